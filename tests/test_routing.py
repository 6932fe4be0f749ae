"""Several databases: with a router every statement goes where the jobs are, every look that leads to a write too."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import DatabaseError, connection, connections, router, transaction
from django.db.backends.signals import connection_created
from django.db.models import Model

import rws_jobs
from rws_jobs import enqueue, enqueue_many, job, message, on_dead, schedule, tick, tick_schedules
from rws_jobs.liveness import Heart, Watch
from rws_jobs.models import Job, JobSchedule, JobWorker

from .jobs import calls, note
from .processes import Processes
from .waiting import wait_for

# The aliases are made below: "jobs" and "replica" are further connections to the test's own database.
pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "jobs", "replica"])

OURS = "rws_job"
READ_ONLY: dict[str, Any] = {
    "postgresql": {"OPTIONS": {"options": "-c default_transaction_read_only=on"}},
    "mysql": {"OPTIONS": {"charset": "utf8mb4", "init_command": "SET SESSION TRANSACTION READ ONLY"}},
    "sqlite": {"OPTIONS": {"init_command": "PRAGMA query_only = ON"}},
}


@pytest.fixture(scope="module", autouse=True)
def aliases(django_db_setup: None) -> Iterator[None]:
    """Before the first test is set up: pytest-django allows a test the aliases that there are by then."""
    found = connections.settings["default"]
    mirror = {"TEST": {**found["TEST"], "MIRROR": "default"}}  # so that nobody flushes them
    connections.settings["jobs"] = {**found, **mirror}
    connections.settings["replica"] = {**found, **mirror, **READ_ONLY[connection.vendor]}
    yield
    for alias in ("jobs", "replica"):
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


class JobsApart:
    """Our app lives on "jobs"; other apps have nothing to do with it."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return "jobs" if model._meta.app_label == "rws_jobs" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return (db == "jobs") == (app_label == "rws_jobs")


class ReadsApart:
    """What is only read comes from a server that takes no writes, and that may lag."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str:
        return "replica"

    def db_for_write(self, model: type[Model], **hints: Any) -> str:
        return "default"

    def allow_relation(self, *objects: Any, **hints: Any) -> bool:
        return True


@contextmanager
def statements_on(alias: str) -> Iterator[list[str]]:
    """Everything that is sent to an alias, by this thread and by all that connect from now on."""
    sent: list[str] = []

    def collect(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append(sql)
        return execute(sql, params, many, context)

    def connected(connection: Any, **_: Any) -> None:
        if connection.alias == alias and collect not in connection.execute_wrappers:
            connection.execute_wrappers.append(collect)

    connection_created.connect(connected)
    with ExitStack() as stack:
        stack.callback(connection_created.disconnect, connected)
        connections[alias].execute_wrappers.append(collect)
        stack.callback(lambda: connections[alias].execute_wrappers.clear())
        yield sent


@pytest.fixture
def jobs_apart(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The jobs are on "jobs"; "default" is an empty file, where no statement of ours would find a table."""
    before = connections["default"]
    sqlite = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "default.sqlite3")}}
    monkeypatch.setitem(connections.settings, "default", connections.configure_settings(sqlite)["default"])
    connections["default"] = connections.create_connection("default")
    settings.DATABASE_ROUTERS = ["tests.test_routing.JobsApart"]
    with statements_on("default") as sent:
        yield sent
    connections["default"].close()
    connections["default"] = before


@pytest.fixture
def reads_apart(settings: Any) -> Iterator[list[str]]:
    """Reads go to "replica", which takes no writes."""
    settings.DATABASE_ROUTERS = ["tests.test_routing.ReadsApart"]
    with statements_on("replica") as sent:
        yield sent


@pytest.fixture(params=["jobs_apart", "reads_apart"])
def elsewhere(request: pytest.FixtureRequest) -> list[str]:
    """What was sent to the alias that has nothing to do with it: to be empty."""
    sent: list[str] = request.getfixturevalue(request.param)
    return sent


def count() -> int:
    alias = rws_jobs.administration._jobs().db
    return Job.objects.using(alias).count()


def all_done() -> bool:
    return count() == 0


def test_the_aliases_are_what_they_are_meant_to_be(reads_apart: list[str]) -> None:
    assert (router.db_for_read(Job), router.db_for_write(Job)) == ("replica", "default")
    assert not Job.objects.exists()
    assert any(OURS in sql for sql in reads_apart), "statements are seen"
    with pytest.raises(DatabaseError), transaction.atomic(using="replica"):
        Job.objects.using("replica").update(attempts=1)


def test_enqueue(elsewhere: list[str]) -> None:
    enqueue("tests.note", "{}")
    enqueue_many([message("tests.note", "{}"), message("tests.note", "{}", unique_key="many")])
    first = note.using(unique_key="one").enqueue()
    again = note.using(unique_key="one").enqueue()
    assert (first.created, again.created, again.id) == (True, False, first.id)

    async def from_async_code() -> None:
        await note.aenqueue()
        await sync_to_async(connections.close_all)()  # in the thread that it was sent from

    asyncio.run(from_async_code())
    assert count() == 5
    assert elsewhere == []


def test_tick(elsewhere: list[str]) -> None:
    for value in range(3):
        note.enqueue(value)
    enqueue("no such type", "")
    calls.clear()
    while tick():
        pass
    assert calls == [0, 1, 2]
    assert count() == 1
    assert elsewhere == []


def test_tick_of_an_atomic_job(elsewhere: list[str]) -> None:
    @job("atomic", atomic=True)
    def atomic() -> None:
        calls.append("atomic")

    atomic.enqueue()
    calls.clear()
    assert tick()
    assert calls == ["atomic"]
    assert count() == 0
    assert elsewhere == []


def test_administration(elsewhere: list[str]) -> None:
    dead = enqueue("no such type", "", max_retries=0)
    waiting = note.using(run_in=60).enqueue()
    assert tick()
    assert [info.id for info in rws_jobs.failed_jobs()] == [dead]
    assert {info.id for info in rws_jobs.jobs()} == {dead, waiting}
    assert rws_jobs.retry(dead)
    assert not rws_jobs.retry(dead)
    assert rws_jobs.delete(dead)
    assert rws_jobs.delete(waiting)
    assert all_done()
    assert elsewhere == []


def test_a_retry_refused_names_the_live_job(elsewhere: list[str]) -> None:
    dead = enqueue("no such type", "", max_retries=0, unique_key="key")
    assert tick()
    live = enqueue("no such type", "", unique_key="key")
    with pytest.raises(rws_jobs.UniqueKeyIsLive) as caught:
        rws_jobs.retry(dead)
    assert caught.value.live_id == live
    assert elsewhere == []


def test_schedules(elsewhere: list[str]) -> None:
    schedule("s", "* * * * *", note)
    assert tick_schedules() == 0
    alias = rws_jobs.administration._jobs().db
    JobSchedule.objects.using(alias).update(next_run_at=60)
    assert tick_schedules() == 1
    assert count() == 1
    assert elsewhere == []


def test_heartbeat_and_rescue(elsewhere: list[str]) -> None:
    alias = rws_jobs.administration._jobs().db
    heart = Heart()
    heart.register()
    note.enqueue()
    Job.objects.using(alias).update(status="running", claimed_by="gone")
    assert heart.beat()
    assert Watch(alias).look() == 1
    heart.stop()
    assert not JobWorker.objects.using(alias).exists()
    assert elsewhere == []


def test_a_worker(elsewhere: list[str], start_worker: Callable[..., Any]) -> None:
    dead: list[str] = []
    on_dead(lambda info: dead.append(info.id))
    calls.clear()
    schedule("each second", "* * * * * *", note, kwargs={"value": "scheduled"})
    for value in range(10):
        note.enqueue(value)
    lost = enqueue("no such type", "", max_retries=0)
    worker = start_worker(threads=2)
    wait_for(lambda: dead == [lost] and "scheduled" in calls, what="all jobs to be done")
    assert set(range(10)) <= set(calls)
    assert worker.stop(timeout=30)
    assert [sql for sql in elsewhere if "BEGIN" not in sql.upper()] == []


def test_a_worker_process(jobs_apart: list[str], tmp_path: Path) -> None:
    empty = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "other.sqlite3")}
    settings = (
        f"DATABASES = {{'jobs': DATABASES['default'], 'default': {empty!r}}}\n"
        "DATABASE_ROUTERS = ['tests.test_routing.JobsApart']"
    )
    for value in range(10):
        note.enqueue(value)
    name = connections["jobs"].settings_dict["NAME"]
    with Processes(tmp_path) as processes, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(connections["default"].settings_dict, "NAME", name)  # what the helper hands on
        process = processes.runjobs("--drain", settings=settings)
        assert process.wait() == 0
    assert f"{Path(str(name)).name!r} (jobs)" in process.log
    assert "10 runs in" in process.log
    assert all_done()


ORIGINAL = (
    "CREATE TABLE rws_jobs (id VARCHAR(64) PRIMARY KEY, job_type TEXT NOT NULL, payload TEXT NOT NULL,"
    " status VARCHAR(16) NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, max_retries INTEGER NOT NULL DEFAULT 3,"
    " next_run_at BIGINT NOT NULL, created_at BIGINT NOT NULL, last_error TEXT)"
)


def test_a_database_of_its_own_is_migrated_with_its_rows_and_no_other_touched(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite = {
        "default": {"ENGINE": "django.db.backends.dummy"},
        "jobs": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "jobs.sqlite3")},
    }
    monkeypatch.setitem(connections.settings, "jobs", connections.configure_settings(sqlite)["jobs"])
    before = connections["jobs"]
    connections["jobs"] = connections.create_connection("jobs")
    settings.DATABASE_ROUTERS = ["tests.test_routing.JobsApart"]
    try:
        with connections["jobs"].cursor() as cursor:
            cursor.execute(ORIGINAL)
            cursor.executemany(
                "INSERT INTO rws_jobs (id, job_type, payload, status, next_run_at, created_at)"
                " VALUES (%s, 'tests.note', '{}', 'pending', 1, 1)",
                [[f"{number:04}"] for number in range(1000)],
            )
        with statements_on("default") as sent:
            call_command("migrate", database="jobs", verbosity=0)
            assert count() == 1000
            assert tick()
            assert count() == 999
        assert sent == []
        tables = connections["jobs"].introspection.table_names()
        assert {"rws_jobs", "rws_job_schedules", "rws_job_workers"} <= set(tables)
        assert not [name for name in tables if name.startswith("auth_")]
        call_command("migrate", database="jobs", verbosity=0)
    finally:
        connections["jobs"].close()
        connections["jobs"] = before
