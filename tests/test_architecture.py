"""The shape of the package: imports run one way, one file writes jobs, nothing of the table is taken for code."""

import ast
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

import rws_jobs
from rws_jobs import administration, enqueue, enqueue_many, message, schedule, tick, tick_schedules
from rws_jobs.cron import next_after
from rws_jobs.liveness import Heart, rescue_orphans
from rws_jobs.models import Job, JobSchedule

from .jobs import boom, note
from .rows import insert, row, statuses

PACKAGE = Path(rws_jobs.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)

# Each may import from its own layer and from those before it. "__init__" names things without importing them.
LAYERS = [
    {"conf", "clock", "outages", "outcomes", "signals", "text", "info", "cron", "history", "transactions"},
    {"fields", "indexes", "lanes", "querysets", "models"},
    {"payload", "registry", "enqueueing", "functions", "administration"},
    {"context", "isolation", "executor", "settling", "schedules"},
    {"threads", "prefetch", "ledger", "liveness", "maintenance", "wakeup", "worker", "embedding"},
    {"supervisor"},
    {"management"},
]
# Beside them: these use the inner layers up to the schedules, and nothing but a command uses them.
BESIDE = {"admin", "apps", "checks", "operations", "adoption", "migrations", "backend", "testing"}
FOR_THOSE_BESIDE = 3


def module_of(path: Path) -> str:
    """The part of the package that a file belongs to: its module, or the first folder."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from executed(child)


def imports(path: Path) -> set[str]:
    """The parts of the package that a file imports when it runs."""
    found: set[str] = set()
    inside = path.relative_to(PACKAGE).parts[:-1]
    for node in executed(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(name.name.split(".")[1] for name in node.names if name.name.startswith("rws_jobs."))
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = ["rws_jobs", *inside][: 1 + len(inside) - (node.level - 1)]
                target = [*base, *(node.module.split(".") if node.module else [])]
            else:
                target = (node.module or "").split(".")
            if target[0] != "rws_jobs":
                continue
            names = [target[1]] if len(target) > 1 else [name.name for name in node.names]
            found.update(name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists())
    return found - {module_of(path)}


def layer_of(module: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if module in layer)


# -- imports


def test_the_reader_of_imports_reads_them() -> None:
    assert {"conf", "registry", "settling"} <= imports(PACKAGE / "worker.py")
    assert "worker" in imports(PACKAGE / "management" / "commands" / "runjobs.py")
    assert "querysets" not in imports(PACKAGE / "lanes.py"), "only for type checkers"
    assert "checks" in imports(PACKAGE / "apps.py"), "inside a function"


@pytest.mark.parametrize("module", sorted({module_of(path) for path in FILES} - {"__init__"}))
def test_every_module_has_a_place(module: str) -> None:
    assert sum(module in layer for layer in [*LAYERS, BESIDE]) == 1, "give it a layer in this test, and keep to it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    module = module_of(path)
    found = imports(path)
    if module == "__init__":
        assert found == set(), "the public names are looked up when they are first used"
    elif module in BESIDE:
        inner = {other for other in found - BESIDE if layer_of(other) > FOR_THOSE_BESIDE}
        assert inner == set()
    else:
        assert found & BESIDE == set() or module == "management"
        above = {other for other in found - BESIDE if layer_of(other) > layer_of(module)}
        assert above == set()


def test_no_module_imports_itself_by_a_detour() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        graph.setdefault(module_of(path), set()).update(imports(path))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {error.args[1]}")


def test_the_package_is_imported_without_models() -> None:
    code = "import rws_jobs, sys; assert 'rws_jobs.models' not in sys.modules; assert 'django.db' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


# -- who writes jobs

WRITES = {
    "update",
    "delete",
    "_raw_delete",
    "bulk_create",
    "bulk_update",
    "create",
    "get_or_create",
    "update_or_create",
    "save",
    "raw",
}
WRITES |= {f"a{name}" for name in WRITES}
WRITERS = {"querysets.py", "adoption.py"}  # adoption.py: once, in the first migration
OTHER_TABLES = ("JobWorker.objects", "JobSchedule.objects", "LogEntry.objects")


def writes(path: Path) -> Iterator[str]:
    """Calls that may write rows of some table other than OTHER_TABLES, by what they are called on."""
    tree = tree_of(path)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("rws_jobs"))
        for alias in node.names
        if (path.parent / f"{alias.name}.py").exists() or (PACKAGE / f"{alias.name}.py").exists()
    }
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        from_other_tables = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(OTHER_TABLES)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES):
                continue
            on = ast.unparse(node.func.value)
            if on.startswith(OTHER_TABLES) or on in from_other_tables or on in modules:
                continue
            if node.func.attr == "update" and node.args and not node.keywords:
                continue  # of a dict or set: a queryset's takes keywords only
            yield f"{path.name}:{node.lineno} {ast.unparse(node)[:80]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_querysets_writes_jobs(path: Path) -> None:
    if path.name in WRITERS:
        assert list(writes(path)), "the rule would see them"
    else:
        assert list(writes(path)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_querysets_and_migrations_hold_sql_that_writes(path: Path) -> None:
    if module_of(path) in {"adoption", "migrations", "operations"}:
        return
    tree = tree_of(path)
    documentation = {
        node.body[0].value.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
        if isinstance(node.body[0], ast.Expr)
    }
    found = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno not in documentation
        if re.search(r"\b(INSERT INTO|UPDATE \w+ SET|DELETE FROM|REPLACE INTO|TRUNCATE)\b", node.value)
    ]
    assert found == []


@pytest.mark.django_db
def test_each_statement_that_writes_a_job_comes_from_querysets() -> None:
    """What really happens: whenever a job row is written, a line of querysets.py is at work."""
    written: list[str] = []
    strangers: list[str] = []

    def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if re.match(r"(INSERT INTO|UPDATE|DELETE FROM)\s+[\"`]rws_jobs[\"`]", sql):
            written.append(sql.split()[0])
            frame = sys._getframe()
            files = set()
            while frame.f_back is not None:
                files.add(frame.f_code.co_filename)
                frame = frame.f_back
            if str(PACKAGE / "querysets.py") not in files:
                strangers.append(sql)
        return execute(sql, params, many, context)

    Heart().register()
    insert(
        row("orphan", status="running", claimed_by="gone"),
        row("dead", status="failed"),
        row("dead too", status="failed"),
    )
    schedule("s", "* * * * *", note)
    tick_schedules()
    JobSchedule.objects.update(next_run_at=next_after("* * * * *", 0))
    with connection.execute_wrapper(watch):
        note.enqueue("once")
        note.using(unique_key="key").enqueue("unique")
        enqueue_many([message("tests.note", "{}"), message("tests.note", "{}", unique_key="another")])
        boom.enqueue()
        enqueue("no such type", "")
        assert rescue_orphans("default") == 1
        assert tick_schedules() == 1
        assert administration.retry("dead")
        assert administration.delete("dead too")
        while tick():
            pass
    assert set(written) == {"INSERT", "UPDATE", "DELETE"}
    assert len(written) > 15
    assert strangers == []
    assert len(statuses()) == Job.objects.count()


# -- nothing of the table is code

NEVER_IMPORTED = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "yaml"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "import_string", "import_module", "find_spec"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled_evaluated_or_imported_by_name(path: Path) -> None:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(NEVER_IMPORTED & {name.name.split(".")[0] for name in node.names})
        elif isinstance(node, ast.ImportFrom):
            found.update(NEVER_IMPORTED & {(node.module or "").split(".")[0]})
            found.update(NEVER_CALLED & {name.name for name in node.names})
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            found.update(NEVER_CALLED & {name})
            if isinstance(node.func, ast.Attribute) and node.func.attr in NEVER_CALLED - {"compile"}:
                found.add(node.func.attr)
    # __init__ looks its own names up in its own modules; the table never says which.
    assert found == ({"import_module"} if path == PACKAGE / "__init__.py" else set())


# -- the public names


def test_the_public_names_are_listed_once_and_alike() -> None:
    assert list(rws_jobs.__all__) == sorted(rws_jobs.__all__)
    assert set(rws_jobs.__all__) == set(rws_jobs._HOME_OF)
    for_type_checkers = {
        alias.name
        for node in tree_of(PACKAGE / "__init__.py").body
        if isinstance(node, ast.If)
        for each in node.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    assert for_type_checkers == set(rws_jobs.__all__)
    assert set(rws_jobs.__all__) <= set(dir(rws_jobs))


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rws_jobs.nothing  # noqa: B018


@pytest.mark.parametrize("name", rws_jobs.__all__)
def test_each_public_name_resolves_and_is_documented_and_typed(name: str) -> None:
    found = getattr(rws_jobs, name)
    assert found.__module__.startswith("rws_jobs.")
    assert (found.__doc__ or "").strip(), "no docstring"
    for function in _functions(found):
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            if parameter.name not in ("self", "cls"):
                assert parameter.annotation is not parameter.empty, f"{function.__qualname__}: {parameter}"
        assert signature.return_annotation is not signature.empty or function.__name__ == "__init__", function
        if not inspect.isclass(found):
            typing.get_type_hints(function)


def _functions(found: Any) -> Iterator[Any]:
    if inspect.isfunction(found):
        yield found
        return
    assert inspect.isclass(found)
    for attribute, value in vars(found).items():
        if inspect.isfunction(value) and (not attribute.startswith("_") or attribute in ("__init__", "__call__")):
            # What a dataclass generates has the annotations of its fields.
            yield value
            if not attribute.startswith("_"):
                assert value.__doc__, f"{value.__qualname__} has no docstring"


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


# -- size


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_says_what_it_is_for(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree) or not tree.body or module_of(path) == "migrations"
