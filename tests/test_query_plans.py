"""What a worker asks the database costs the same however many jobs wait.

100,000 jobs are due, as many wait for the future, in another queue and on the dead-letter list. The statements are
those that the package sends, taken down while it works; each is explained, and the rows that it examines are counted,
with statistics taken while the table was empty and with fresh ones.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from django.db import connection, transaction

from rws_jobs.info import Claim
from rws_jobs.lanes import Lanes
from rws_jobs.models import Job, JobWorker
from rws_jobs.outcomes import COMPLETED, Dead, Failure, Released, Retrying, Snoozed
from rws_jobs.settling import settle
from rws_jobs.transactions import short_transaction

EACH = 100_000
RUNNING = 3_000
# Numbers 1 to EACH are due, the next EACH wait for the future, and so on; the last are running.
_STATUS = f"CASE WHEN n <= {3 * EACH} THEN 'pending' WHEN n <= {4 * EACH} THEN 'failed' ELSE 'running' END"
_DUE = f"CASE WHEN n > {EACH} AND n <= {2 * EACH} THEN 30000000000 + n ELSE 1000000000 + n END"
_QUEUE = f"CASE WHEN n > {2 * EACH} AND n <= {3 * EACH} THEN 'other' ELSE 'default' END"
# Three workers live; the owner of the last ten is gone.
_OWNER = f"CASE WHEN n > {4 * EACH + RUNNING - 10} THEN 'gone' WHEN n > {4 * EACH} THEN {{worker}} ELSE NULL END"
_TOTAL = 4 * EACH + RUNNING
_INSERT = (
    "INSERT INTO rws_jobs (id, job_type, payload, status, attempts, max_retries, next_run_at, created_at, queue,"
    " priority, unique_key, claimed_by, claimed_at) {recursive}"
    f"SELECT {{id}}, 'tests.noop', '{{{{}}}}', {_STATUS}, 0, 3, {_DUE}, 1000000000, {_QUEUE}, 0,"
    f" CASE WHEN n % 100 = 0 THEN {{id}} ELSE NULL END, {_OWNER}, CASE WHEN n > {4 * EACH} THEN 1 ELSE NULL END"
    " FROM {numbers}"
)
_FILL = {
    "sqlite": {
        "id": "printf('%016x', n)",
        "worker": "'worker ' || (n % 3)",
        "recursive": f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {_TOTAL}) ",
        "numbers": "numbers",
    },
    "postgresql": {
        "id": "lpad(to_hex(n), 16, '0')",
        "worker": "'worker ' || (n % 3)",
        "recursive": "",
        "numbers": f"generate_series(1, {_TOTAL}) AS n",
    },
    "mysql": {
        "id": "lpad(lower(hex(n)), 16, '0')",
        "worker": "concat('worker ', n % 3)",
        "recursive": "",
        "numbers": f"(SELECT seq AS n FROM seq_1_to_{_TOTAL}) AS numbers",
    },
}


class Statement(NamedTuple):
    sql: str
    params: Any


def execute(sql: str, params: Any = None) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return list(cursor.fetchall()) if cursor.description else []


@pytest.fixture(scope="module")
def full_table(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The rows, inserted once; the database's own gathering of statistics is switched off first."""
    with django_db_blocker.unblock():
        Job.objects.all()._raw_delete("default")
        if connection.vendor == "postgresql":
            execute("ALTER TABLE rws_jobs SET (autovacuum_enabled = false)")
            execute("VACUUM ANALYZE rws_jobs")
        elif connection.vendor == "mysql":
            execute("ALTER TABLE rws_jobs STATS_AUTO_RECALC = 0")
            execute("ANALYZE TABLE rws_jobs")
        execute(_INSERT.format(**_FILL[connection.vendor]))
        for number in range(3):
            JobWorker.objects.create(id=f"worker {number}", host="h", pid=1, started_at=1, beat_at=1, lease=30)
        yield
        execute("DELETE FROM rws_job_workers")
        if connection.vendor == "postgresql":
            execute("TRUNCATE rws_jobs")
            execute("ALTER TABLE rws_jobs RESET (autovacuum_enabled)")
        elif connection.vendor == "mysql":
            execute("TRUNCATE rws_jobs")
            execute("ALTER TABLE rws_jobs STATS_AUTO_RECALC = DEFAULT")
        else:
            execute("DELETE FROM rws_jobs")
            execute("DELETE FROM sqlite_stat1")
        connection.close()  # SQLite reads statistics when a connection is opened


@pytest.fixture(scope="module", params=["statistics of an empty table", "fresh statistics"])
def statistics(request: pytest.FixtureRequest, full_table: None) -> str:
    """First as they were before the rows came, for SQLite none; then as they are."""
    if request.param == "fresh statistics":
        execute("ANALYZE TABLE rws_jobs" if connection.vendor == "mysql" else "ANALYZE rws_jobs")
    connection.close()
    return str(request.param)


pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("statistics")]


@contextmanager
def undone() -> Iterator[None]:
    """A worker's transaction that is rolled back."""
    with short_transaction("default"):
        yield
        transaction.set_rollback(True)


def sent_by(act: Callable[[], object], only: str = "") -> list[Statement]:
    """The statements about jobs that ``act`` sends, as they are sent. What they change is undone."""
    statements: list[Statement] = []

    def collect(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "rws_jobs" in sql and only in sql:
            statements.append(Statement(sql, params))
        return execute(sql, params, many, context)

    with undone(), connection.execute_wrapper(collect):
        act()
    assert statements
    return statements


# -- the statements


def claimed(count: int) -> list[Claim]:
    claims = Job.objects.claim("me", Lanes(["default"]), count)
    assert len(claims) == count
    return claims


FAILURE = Failure(error="no", exception="builtins.ValueError", traceback="", started=0.0, ended=0.0)


@pytest.mark.parametrize("queues", [None, ["default"], ["default", "other", "empty"]], ids=str)
def test_finding_the_lanes(queues: list[str] | None) -> None:
    for statement in sent_by(lambda: Lanes(queues)._current(Job.objects.all())):
        assert cost(statement) <= 10, plan(statement)
        check_plan(statement)


@pytest.mark.parametrize("limit", [1, 256])
def test_looking_for_due_jobs(limit: int) -> None:
    for statement in sent_by(lambda: Lanes().heads(Job.objects.all(), limit)):
        assert cost(statement) <= limit + 10, plan(statement)
        check_plan(statement)


def test_looking_for_jobs_of_known_types_only() -> None:
    lanes = Lanes(job_types=lambda: ["tests.noop", "tests.note"])
    for statement in sent_by(lambda: lanes.heads(Job.objects.all(), 10)):
        assert cost(statement) <= 20, plan(statement)
        check_plan(statement)


@pytest.mark.parametrize("limit", [1, 10, 256])
def test_the_heads_of_a_claim(limit: int) -> None:
    locked = "FOR UPDATE" if connection.vendor != "sqlite" else "LIMIT"
    for statement in sent_by(lambda: claimed(limit), only=locked):
        assert cost(statement) <= limit + 10, plan(statement)
        check_plan(statement)


def test_the_heads_of_a_hot_claim() -> None:
    lanes = Lanes(["default"])
    lanes.hot = True

    def claim() -> None:
        lanes.heads(Job.objects.all(), 10)
        Job.objects.claim("me", lanes, 64)

    for statement in sent_by(claim, only="next_run_at"):
        if not statement.sql.startswith("UPDATE"):
            assert cost(statement) <= 80, plan(statement)
            check_plan(statement)


@pytest.mark.parametrize("count", [1, 10, 256])
def test_the_update_of_a_claim(count: int) -> None:
    statement = sent_by(lambda: claimed(count))[-1]
    assert statement.sql.startswith("UPDATE")
    # In the state before the claim.
    assert cost(statement) <= 4 * count + 10, plan(statement)
    check_plan(statement)


@pytest.mark.parametrize("count", [1, 10, 256])
def test_the_delete_of_completed_jobs(count: int) -> None:
    def complete() -> None:
        settle(Job.objects.all(), [(claim, COMPLETED) for claim in claimed(count)])

    statement = sent_by(complete)[-1]
    assert statement.sql.startswith("DELETE")
    check_after(lambda: claimed(count), statement, most=4 * count + 10)


@pytest.mark.parametrize(
    "outcome", [Retrying(FAILURE, 1), Dead(FAILURE), Snoozed(1), Released()], ids=lambda outcome: type(outcome).__name__
)
def test_the_update_of_a_job_that_did_not_complete(outcome: Any) -> None:
    statement = sent_by(lambda: settle(Job.objects.all(), [(claim, outcome) for claim in claimed(1)]))[-1]
    assert statement.sql.startswith("UPDATE")
    check_after(lambda: claimed(1), statement, most=10)


def test_the_sweep_of_orphans() -> None:
    (statement,) = sent_by(lambda: Job.objects.orphans(JobWorker.objects.all()).as_claims(100))
    assert len(execute(*statement)) == 10
    # Each running job may be looked at, with its worker's row, and no other.
    assert cost(statement) <= 3 * RUNNING + 50, plan(statement)
    check_no_scan(statement)


def test_the_audit_of_a_worker() -> None:
    (statement,) = sent_by(lambda: Job.objects.owned_by("gone").as_claims())
    assert cost(statement) <= 30, plan(statement)
    check_no_scan(statement)


def test_the_dead_letter_list() -> None:
    (statement,) = sent_by(lambda: list(Job.objects.dead().order_by("-next_run_at", "-id")[:100]))
    assert cost(statement) <= 110, plan(statement)
    check_plan(statement)


def test_the_look_for_a_live_key() -> None:
    for key in (f"{100:016x}", "no such key"):
        (statement,) = sent_by(lambda key=key: Job.objects.live("tests.noop", key).first())
        assert cost(statement) <= 10, plan(statement)
        check_no_scan(statement)


def test_retry_and_delete_of_one_job() -> None:
    dead = f"{3 * EACH + 1:016x}"
    for act in (lambda: Job.objects.filter(pk=dead).requeue(), lambda: Job.objects.filter(pk=dead).discard()):
        (statement,) = sent_by(act)
        assert cost(statement) <= 10, plan(statement)
        check_plan(statement)


# -- what the database says


def check_after(arrange: Callable[[], object], statement: Statement, most: int) -> None:
    """Check a statement in the state that it was sent in."""
    with undone():
        arrange()
        check_plan(statement)
    assert cost(statement, arrange) <= most, plan(statement)


def plan(statement: Statement) -> Any:
    """The statement and its plan, for people."""
    explain = {"sqlite": "EXPLAIN QUERY PLAN ", "postgresql": "EXPLAIN ", "mysql": "EXPLAIN "}[connection.vendor]
    return statement.sql[:3000], execute(explain + statement.sql, statement.params)


def check_plan(statement: Statement) -> None:
    """No sort, and no scan of the table or of a whole index but from its end up to a LIMIT."""
    shown = plan(statement)
    for sort in ("B-TREE", "Sort", "filesort"):
        assert sort not in str(shown[1]), shown
    check_no_scan(statement)


def check_no_scan(statement: Statement) -> None:
    """Enough where few rows are left to sort."""
    check = {"sqlite": _check_sqlite, "postgresql": _check_postgresql, "mysql": _check_mysql}[connection.vendor]
    check(statement)


def _check_sqlite(statement: Statement) -> None:
    shown = plan(statement)
    for *_, detail in shown[1]:
        whole = detail.startswith("SCAN rws_jobs") and "USING" not in detail
        assert not whole, shown
        # A scan of an index is one step of it: there is a limit.
        assert not detail.startswith("SCAN") or " LIMIT " in statement.sql, shown


def _check_postgresql(statement: Statement) -> None:
    ((found,),) = execute("EXPLAIN (FORMAT JSON) " + statement.sql, statement.params)
    nodes = list(_nodes(json.loads(found) if isinstance(found, str) else found))
    for node in nodes:
        if node.get("Relation Name") == "rws_jobs":
            assert node["Node Type"] != "Seq Scan", plan(statement)
        if node["Node Type"].startswith("Index") and "Index Cond" not in node:
            assert " LIMIT " in statement.sql, plan(statement)


def _nodes(found: Any) -> Iterator[dict[str, Any]]:
    if isinstance(found, list):
        for each in found:
            yield from _nodes(each)
    elif isinstance(found, dict):
        if "Node Type" in found:
            yield found
        for value in found.values():
            yield from _nodes(value)


def _check_mysql(statement: Statement) -> None:
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN " + statement.sql, statement.params)
        names = [column[0] for column in cursor.description]
        steps = [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]
    for step in steps:
        if step["table"] == "rws_jobs":
            assert step["type"] != "ALL", plan(statement)
            assert step["type"] != "index" or " LIMIT " in statement.sql, plan(statement)


def cost(statement: Statement, arrange: Callable[[], object] = lambda: None) -> int:
    """How many rows it examines, by the database's own count. (SQLite counts steps of its virtual machine: some 200 for
    each row of an UPDATE or DELETE, 40 of a SELECT, 3 of a row that is only passed over.)"""
    with undone():
        arrange()
        if connection.vendor == "postgresql":
            ((found,),) = execute("EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + statement.sql, statement.params)
            return sum(_examined(node) for node in _nodes(json.loads(found) if isinstance(found, str) else found))
        if connection.vendor == "mysql":
            before = _rows_read()
            nothing = _rows_read() - before
            before = _rows_read()
            execute(*statement)
            return _rows_read() - before - nothing
        return _steps(statement) // (40 if statement.sql.startswith("SELECT") else 200)
    raise AssertionError("unreachable")


def _examined(node: dict[str, Any]) -> int:
    if "Scan" not in node["Node Type"]:
        return 0
    rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return int(rows * node["Actual Loops"])


def _rows_read() -> int:
    return sum(int(number) for _, number in execute("SHOW SESSION STATUS LIKE 'Handler_read%'"))


def _steps(statement: Statement) -> int:
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 10

    connection.connection.set_progress_handler(count, 10)
    try:
        execute(*statement)
    finally:
        connection.connection.set_progress_handler(None, 0)
    return steps


def test_the_counts_would_show_a_scan() -> None:
    """The measure itself: what no index serves examines everything."""
    scan = Statement("SELECT count(*) FROM rws_jobs WHERE payload = %s", ["x"])
    assert cost(scan) >= (_TOTAL // 20 if connection.vendor == "sqlite" else _TOTAL - 10)
    with pytest.raises(AssertionError):
        check_plan(scan)
    with pytest.raises(AssertionError), transaction.atomic():
        check_plan(Statement("SELECT id FROM rws_jobs WHERE status = 'failed' ORDER BY created_at LIMIT 100", []))
