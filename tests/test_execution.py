"""Running a job: what is recorded of its end, in what surroundings it runs, and what it leaves to the next."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import pytest
from asgiref.local import Local
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import Group
from django.db import DatabaseError, IntegrityError, OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation

from rws_jobs import Discard, Retry, Snooze, current_job, enqueue, job, jobs, register, tick
from rws_jobs.executor import ATOMIC_REPEATS
from rws_jobs.history import read
from rws_jobs.info import Claim
from rws_jobs.models import Job, JobWorker
from rws_jobs.signals import claim_lost, job_started

from . import original
from .conftest import Clock
from .waiting import wait_for

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)

SQLITE, POSTGRESQL, MARIADB = (connection.vendor == vendor for vendor in ("sqlite", "postgresql", "mysql"))
needs_a_server = pytest.mark.skipif(SQLITE, reason="there is no server to lose")

Configure = Callable[..., None]
Elsewhere = Callable[..., Any]
StartWorker = Callable[..., Any]


def run_once(function: Callable[..., Any], *args: Any, **options: Any) -> Job | None:
    """Declare it, enqueue it, run it; the row that is left."""
    name = options.pop("name", "tested")
    declared = job(name, **{"max_retries": 0, **options})(function)
    job_id = declared.enqueue(*args)
    assert tick() is True
    return Job.objects.filter(pk=job_id).first()


def dead(found: Job | None) -> Job:
    assert found is not None
    assert (found.status, found.attempts, found.claimed_by) == ("failed", 1, None)
    return found


def last(found: Job | None) -> dict[str, Any]:
    """The newest entry of its history."""
    assert found is not None
    return read(found.history)[-1]


def raising(error: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise error

    return handler


# -- error recording


@pytest.mark.parametrize(("code", "shown"), [(0, "0"), (3, "3"), ("text", "text"), (None, "None")])
def test_S050_sys_exit_is_a_failed_attempt(code: object, shown: str) -> None:
    found = dead(run_once(raising(SystemExit(code))))
    assert found.last_error is not None
    assert found.last_error.startswith("SystemExit")
    assert shown in found.last_error or code is None
    assert last(found)["exception"] == "builtins.SystemExit"


ENDS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseException("base")]


@committed
@pytest.mark.parametrize("asynchronous", [False, True], ids=["def", "async def"])
def test_S050_nothing_that_a_handler_raises_stops_a_worker(asynchronous: bool, start_worker: StartWorker) -> None:
    @job("ends", max_retries=0)
    def ends(number: int) -> None:
        raise ENDS[number]

    @job("async.ends", max_retries=0)
    async def async_ends(number: int) -> None:
        raise ENDS[number]

    @job("fine")
    def fine() -> None: ...

    declared = async_ends if asynchronous else ends
    ids = [declared.enqueue(number) for number in range(len(ENDS))]
    fine.enqueue()
    worker = start_worker(threads=1)
    wait_for(lambda: not Job.objects.exclude(status="failed").exists(), what="all jobs to have ended")
    assert worker.wait(0) is False
    for job_id, error in zip(ids, ENDS, strict=True):
        found = dead(Job.objects.get(pk=job_id))
        assert found.last_error is not None
        assert found.last_error.startswith(type(error).__name__)


def test_ctrl_c_at_a_program_that_ticks_stops_it_once_the_job_is_settled() -> None:
    job("tested", max_retries=0)(raising(KeyboardInterrupt())).enqueue()
    with pytest.raises(KeyboardInterrupt):
        tick()
    assert Job.objects.get().status == "failed"
    assert not JobWorker.objects.exists()


class NeedsTwo(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("x")


def test_S051_an_exception_that_cannot_be_rebuilt_is_recorded() -> None:
    found = dead(run_once(raising(NeedsTwo(1, 2))))
    assert found.last_error == "NeedsTwo: x"
    entry = last(found)
    assert entry["exception"] == f"{__name__}.NeedsTwo"
    assert entry["error"] == found.last_error
    assert "raise error" in entry["traceback"]
    assert entry["traceback"].endswith("NeedsTwo: x\n")
    assert entry["attempt"] == 1
    assert entry["started"] <= entry["ended"]
    assert entry["worker"]


def unshowable(error: type[BaseException]) -> Exception:
    def fail(self: object) -> str:
        raise error("no text")

    return type("Unshowable", (Exception,), {"__str__": fail, "__repr__": fail})()


@pytest.mark.parametrize("error", [ValueError, RecursionError, SystemExit])
def test_S052_an_exception_without_a_text_is_recorded_by_its_class(error: type[BaseException]) -> None:
    try:
        found = dead(run_once(raising(unshowable(error))))
    except SystemExit:
        pytest.fail("the exception of its text got out")
    assert found.last_error is not None
    assert found.last_error.startswith("Unshowable")
    assert last(found)["exception"] == f"{__name__}.Unshowable"


def test_an_exception_whose_text_is_no_text_is_recorded() -> None:
    error = type("Odd", (Exception,), {"__str__": lambda self: 5})()
    found = dead(run_once(raising(error)))
    assert found.last_error is not None
    assert found.last_error.startswith("Odd")


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "emoji 😀 ünïcode", "%s %d {} \\x00", ""], ids=ascii)
def test_S053_S054_any_text_is_recorded_at_every_attempt(text: str, clock: Clock) -> None:
    job_id = job("tested", max_retries=1)(raising(ValueError(text))).enqueue()
    for _ in range(2):
        assert tick()
        clock.forward(10)
    found = Job.objects.get(pk=job_id)
    assert (found.status, found.attempts) == ("failed", 2)
    shown = text.replace("\0", "\\x00").replace("\ud800", "\\ud800")
    assert found.last_error == (f"ValueError: {shown}" if text else "ValueError")
    assert [entry["error"] for entry in read(found.history)] == [found.last_error] * 2


@committed
@pytest.mark.skipif(not MARIADB, reason="the three-byte utf8 of MySQL and MariaDB")
def test_S054_an_emoji_that_the_column_cannot_hold_does_not_stop_the_queue(start_worker: StartWorker) -> None:
    job("tested", max_retries=0)(raising(ValueError("😀"))).enqueue()
    ran = threading.Event()
    register("fine", lambda payload: ran.set())
    enqueue("fine")
    original.run("ALTER TABLE rws_jobs MODIFY last_error LONGTEXT CHARACTER SET utf8mb3")
    try:
        start_worker()
        assert ran.wait(10), "the worker takes the refused text for an outage"
        wait_for(lambda: [info.status for info in jobs()] == ["failed"], what="the job to be dead")
        assert jobs()[0].last_error
    finally:
        original.run("ALTER TABLE rws_jobs MODIFY last_error LONGTEXT CHARACTER SET utf8mb4")


def test_S055_a_huge_error_is_cut_in_the_middle(configure: Configure) -> None:
    found = dead(run_once(raising(ValueError("head" + "x" * 5_000_000 + "tail"))))
    assert found.last_error is not None
    assert found.last_error.startswith("ValueError: head")
    assert found.last_error.endswith("tail")
    assert len(found.last_error.encode()) <= 60_000
    entry = last(found)
    assert len(entry["traceback"].encode()) <= 60_000
    assert entry["traceback"].startswith("Traceback")
    assert entry["traceback"].rstrip().endswith("tail")


def test_S055_endless_recursion_is_recorded() -> None:
    def deeper() -> None:
        deeper()

    def handler() -> None:
        deeper()

    found = dead(run_once(handler))
    assert found.last_error is not None
    assert found.last_error.startswith("RecursionError")
    assert len(last(found)["traceback"].encode()) <= 60_000


@pytest.mark.parametrize("extra", [0, 1, 2, 3, 4])
def test_S056_a_cut_never_splits_a_character(extra: int, configure: Configure) -> None:
    configure(MAX_ERROR_BYTES=1000)
    found = dead(run_once(raising(Discard("a" * extra + "😀" * 249 + "b"))))
    assert found.last_error is not None
    size = extra + 4 * 249 + 1
    assert (len(found.last_error.encode()) == size) is (size <= 1000)
    assert len(found.last_error.encode()) <= 1000
    assert "�" not in found.last_error
    assert found.last_error.endswith("😀b")


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000_000, {str(number): number for number in range(200_000)}, object(), b"bytes", ValueError("returned")],
    ids=lambda value: type(value).__name__,
)
def test_S056_S057_whatever_a_handler_returns_it_is_done(value: object) -> None:
    def handler() -> object:
        Group.objects.create(name="its work")
        return value

    assert run_once(handler, max_retries=5) is None
    assert Group.objects.count() == 1
    assert tick() is False


def test_S057_a_queryset_that_is_returned_is_not_evaluated() -> None:
    returned: list[Any] = []

    def handler() -> Any:
        returned.append(Group.objects.all())
        return returned[0]

    assert run_once(handler) is None
    assert returned[0]._result_cache is None


@committed
def test_S058_an_on_commit_callback_that_raises_is_a_failed_attempt() -> None:
    def handler() -> None:
        with transaction.atomic():
            Group.objects.create(name="committed")
            transaction.on_commit(lambda: 1 / 0)

    found = dead(run_once(handler))
    assert found.last_error == "ZeroDivisionError: division by zero"
    assert Group.objects.count() == 1


def test_the_causes_of_an_exception_are_in_its_traceback() -> None:
    def handler() -> None:
        try:
            raise LookupError("the cause")
        except LookupError as error:
            raise ExceptionGroup("several", [ValueError("one"), TypeError("two")]) from error

    traceback = last(run_once(handler))["traceback"]
    for text in ("the cause", "several", "ValueError: one", "TypeError: two"):
        assert text in traceback


@pytest.mark.parametrize("payload", ["not json", "[1]", "5", '{"value": NaN}', '{"value": {"$date": "x"}}', "{" * 5000])
def test_a_payload_that_cannot_be_read_is_a_failed_attempt(payload: str) -> None:
    @job("tested", max_retries=0)
    def tested(value: object = None) -> None: ...

    job_id = enqueue("tested", payload)
    assert tick()
    found = dead(Job.objects.get(pk=job_id))
    assert found.last_error is not None
    assert found.last_error.startswith("PayloadError: ")
    assert len(found.last_error) < 1000


def test_a_payload_that_does_not_fit_the_signature_any_more_is_a_failed_attempt() -> None:
    @job("tested", max_retries=0)
    def tested(value: object) -> None: ...

    ids = [enqueue("tested", payload) for payload in ("{}", '{"value": 1, "gone": 2}', "")]
    for job_id, name in zip(ids, ("value", "gone", "value"), strict=True):
        assert tick()
        found = dead(Job.objects.get(pk=job_id))
        assert found.last_error is not None
        assert found.last_error.startswith("TypeError: ")
        assert f"'{name}'" in found.last_error


# -- the database, during and between jobs


def test_S074_after_a_swallowed_database_error_the_failure_is_recorded_and_the_next_job_is_fine() -> None:
    def swallow() -> None:
        with transaction.atomic():
            Group.objects.create(name="twice")
            with suppress(IntegrityError):
                Group.objects.create(name="twice")
            Group.objects.count()

    found = dead(run_once(swallow))
    assert "IntegrityError" in last(found)["traceback"]
    assert not Group.objects.exists()
    assert run_once(lambda: Group.objects.create(name="next") and None, name="next") is None
    assert Group.objects.count() == 1


def leak_atomic() -> None:
    transaction.atomic().__enter__()


def leak_two() -> None:
    transaction.atomic().__enter__()
    transaction.atomic().__enter__()


def leak_autocommit() -> None:
    transaction.set_autocommit(False)


LEAKS = [leak_atomic, leak_two, leak_autocommit]


@committed
@pytest.mark.parametrize("leak", LEAKS)
def test_a_transaction_that_a_handler_leaves_open_is_rolled_back_and_the_attempt_failed(
    leak: Callable[[], None],
) -> None:
    def handler() -> None:
        Group.objects.create(name="before")
        leak()
        Group.objects.create(name="inside")

    found = dead(run_once(handler))
    assert found.last_error is not None
    assert found.last_error.startswith("LeftOpen: ")
    assert "default" in found.last_error
    assert [group.name for group in Group.objects.all()] == ["before"]
    assert not connections["default"].in_atomic_block


@committed
@pytest.mark.parametrize("leak", LEAKS)
def test_a_handler_that_leaves_a_transaction_open_and_raises_failed_of_what_it_raised(leak: Callable[[], None]) -> None:
    def handler() -> None:
        leak()
        Group.objects.create(name="inside")
        raise ValueError("its own")

    found = dead(run_once(handler))
    assert found.last_error == "ValueError: its own"
    assert not Group.objects.exists()


@committed
@pytest.mark.parametrize("leak", LEAKS)
def test_the_next_job_on_the_same_thread_does_not_feel_the_leak(
    leak: Callable[[], None], start_worker: StartWorker
) -> None:
    threads: list[int] = []

    @job("leaks", max_retries=0)
    def leaks() -> None:
        threads.append(threading.get_ident())
        leak()
        Group.objects.create(name="leaked")

    @job("next", max_retries=0)
    def following() -> None:
        threads.append(threading.get_ident())
        with transaction.atomic():
            Group.objects.create(name="next")

    leaks.enqueue()
    following.enqueue()
    worker = start_worker(threads=1, drain=True)
    assert worker.wait(30)
    assert len(set(threads)) == 1
    assert [group.name for group in Group.objects.all()] == ["next"]
    assert [(info.job_type, info.status) for info in jobs()] == [("leaks", "failed")]


@committed
def test_the_next_job_does_not_feel_a_transaction_begun_by_hand(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BEGIN as a statement, which Django does not see, on a connection that stays open between jobs."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    left_open: list[Any] = []

    @job("leaks", max_retries=0)
    def leaks() -> None:
        original.run("BEGIN")
        Group.objects.create(name="leaked")
        left_open.append(connection.connection)

    @job("next", max_retries=0)
    def following() -> None:
        Group.objects.create(name="next")
        with transaction.atomic():
            Group.objects.create(name="atomic")

    leaks.enqueue()
    following.enqueue()
    worker = start_worker(threads=1, drain=True)
    try:
        assert worker.wait(10), "the worker waits for a lock that its own idle thread holds"
        assert sorted(group.name for group in Group.objects.all()) == ["atomic", "next"]
        assert [(info.job_type, info.status) for info in jobs()] == [("leaks", "failed")]
    finally:
        with suppress(Exception):
            left_open[0].rollback()


@committed
@needs_a_server
def test_S018_a_connection_that_broke_between_two_jobs_is_replaced(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", True)
    seen: list[tuple[int, int]] = []

    @job("ask", max_retries=0)
    def ask() -> None:
        seen.append((session_id(), threading.get_ident()))

    start_worker(threads=1)
    for number in range(3):
        ask.enqueue()
        wait_for(lambda number=number: len(seen) > number and not jobs("running"), what=f"job {number}")  # type: ignore[misc]
        if number == 1:
            end_session(seen[1][0])
    assert jobs() == []
    (first, _), (second, _), (third, _) = seen
    assert first == second  # it stays open from job to job
    assert third != second
    assert len({thread for _, thread in seen}) == 1


def session_id() -> int:
    return int(original.ask("SELECT pg_backend_pid()" if POSTGRESQL else "SELECT connection_id()")[0][0])


def end_session(number: int) -> None:
    """End a session of the server, and wait until it has gone."""
    if POSTGRESQL:
        original.ask("SELECT pg_terminate_backend(%s)", number)
        sql = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
    else:
        original.run(f"KILL {number}")
        sql = "SELECT count(*) FROM information_schema.processlist WHERE id = %s"
    wait_for(lambda: original.ask(sql, number)[0][0] == 0, what="the session to end")


@committed
def test_S019_with_CONN_MAX_AGE_0_an_idle_worker_keeps_no_connection_of_its_jobs(start_worker: StartWorker) -> None:
    wrappers: list[Any] = []

    @job("ask", max_retries=0)
    def ask() -> None:
        Group.objects.count()
        assert connection.connection is not None
        wrappers.append(connections["default"])

    for _ in range(4):
        ask.enqueue()
    start_worker(threads=2)
    wait_for(lambda: len(wrappers) == 4 and not jobs(), what="all jobs")
    wait_for(lambda: all(wrapper.connection is None for wrapper in wrappers), what="the connections to be closed")


@committed
def test_S107_the_log_of_queries_is_forgotten_after_each_job(start_worker: StartWorker, settings: Any) -> None:
    settings.DEBUG = True
    logged: list[int] = []

    @job("ask", max_retries=0)
    def ask() -> None:
        Group.objects.count()
        logged.append(len(connection.queries))

    for _ in range(4):
        ask.enqueue()
    assert start_worker(threads=1, drain=True).wait(30)
    # The first may have connected too, and on MariaDB one statement of ours asks for a transaction left open.
    assert len(set(logged[1:])) == 1
    assert logged[1] <= 2


# -- in the caller's own process


def test_S121_a_tick_inside_a_test_case_leaves_its_transaction_alone() -> None:
    assert connection.in_atomic_block
    group = Group.objects.create(name="the test's")
    seen: list[str] = []

    def handler() -> None:
        seen.extend(group.name for group in Group.objects.all())
        Group.objects.create(name="the job's")

    assert run_once(handler) is None
    assert seen == ["the test's"]
    assert connection.in_atomic_block
    group.refresh_from_db()
    assert Group.objects.count() == 2


def test_S121_queries_can_be_counted_around_a_tick() -> None:
    register("ask", lambda payload: Group.objects.count())
    enqueue("ask")
    Group.objects.count()
    with CaptureQueriesContext(connection) as captured:
        assert tick()
    statements = [query["sql"] for query in captured.captured_queries]
    assert any("rws_jobs" in sql and sql.startswith("UPDATE") for sql in statements)
    assert any("auth_group" in sql for sql in statements)


def test_a_tick_leaves_the_callers_context_alone() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    variable.set("the caller's")
    seen: list[object] = []

    def handler() -> None:
        seen.append((variable.get(), translation.get_language(), timezone.get_current_timezone_name()))
        variable.set("the job's")
        translation.activate("fr")

    with translation.override("de"), timezone.override("Asia/Tokyo"):
        assert run_once(handler) is None
        assert (variable.get(), translation.get_language()) == ("the caller's", "de")
        assert timezone.get_current_timezone_name() == "Asia/Tokyo"
    assert seen == [("unset", "en", "UTC")]


def test_a_handler_may_tick_itself() -> None:
    seen: list[str] = []
    register("inner", lambda payload: seen.append(current_job().job_type))

    def outer() -> None:
        enqueue("inner")
        assert tick()
        seen.append(current_job().job_type)

    assert run_once(outer) is None
    assert seen == ["inner", "tested"]


def test_a_handler_may_enqueue() -> None:
    def chain(left: int) -> None:
        if left:
            declared.enqueue(left - 1)

    declared = job("chain")(chain)
    declared.enqueue(3)
    assert [tick() for _ in range(5)] == [True] * 4 + [False]


# -- isolation between jobs


local = Local()
context_variable: ContextVar[str] = ContextVar("context_variable", default="unset")


@committed
@pytest.mark.parametrize("asynchronous", [False, True], ids=["def", "async def"])
def test_S116_S117_a_job_sees_nothing_of_the_one_before(
    asynchronous: bool, start_worker: StartWorker, settings: Any
) -> None:
    settings.LANGUAGE_CODE, settings.TIME_ZONE = "en-gb", "Europe/Paris"
    seen: list[Any] = []

    def change() -> None:
        translation.activate("de")
        timezone.activate("Asia/Tokyo")
        context_variable.set("changed")
        local.value = "changed"
        seen.append(threading.get_ident() if not asynchronous else None)

    def look() -> None:
        seen.append(threading.get_ident() if not asynchronous else None)
        seen.append(
            (
                translation.get_language(),
                timezone.get_current_timezone_name(),
                context_variable.get(),
                getattr(local, "value", "unset"),
            )
        )

    async def async_change() -> None:
        change()

    async def async_look() -> None:
        look()

    job("change", max_retries=0)(async_change if asynchronous else change).enqueue()
    job("look", max_retries=0)(async_look if asynchronous else look).enqueue()
    assert start_worker(threads=1, drain=True).wait(30)
    assert jobs() == []
    assert seen[0] == seen[1]
    assert seen[2] == ("en-gb", "Europe/Paris", "unset", "unset")


# -- current_job()


def test_current_job_outside_of_a_job_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match="current_job"):
        current_job()


def test_current_job_tells_what_runs(clock: Clock) -> None:
    seen: list[Any] = []

    @job("tested", queue="q", max_retries=2)
    def tested() -> None:
        seen.append(current_job())
        if len(seen) < 3:
            raise ValueError

    job_id = tested.enqueue()
    for _ in range(3):
        assert tick()
        clock.forward(10)
    assert [(found.id, found.job_type, found.queue, found.max_retries) for found in seen] == [
        (job_id, "tested", "q", 2)
    ] * 3
    assert [found.attempt for found in seen] == [1, 2, 3]
    assert [found.scheduled_for for found in seen] == [None] * 3
    with pytest.raises(LookupError):
        current_job()


def test_current_job_in_all_that_a_handler_calls() -> None:
    seen: list[str] = []

    async def asynchronous() -> None:
        seen.append(current_job().id)
        await asyncio.to_thread(lambda: seen.append(current_job().id))
        await sync_to_async(lambda: seen.append(current_job().id))()
        await asyncio.gather(*(asyncio.create_task(nested()) for _ in range(2)))

    async def nested() -> None:
        seen.append(current_job().id)

    assert run_once(asynchronous) is None
    assert len(seen) == 5
    assert len(set(seen)) == 1


def test_current_job_of_a_raw_handler() -> None:
    seen: list[str] = []
    register("raw", lambda payload: seen.append(current_job().id))
    job_id = enqueue("raw")
    assert tick()
    assert seen == [job_id]


@pytest.mark.parametrize("meta", ["not json", "[1]", '{"scheduled_for": null}', "{}"])
def test_extensions_that_another_program_wrote_harm_nothing(meta: str) -> None:
    seen: list[object] = []
    register("raw", lambda payload: seen.append(current_job().scheduled_for))
    Job.objects.filter(pk=enqueue("raw")).update(meta=meta)
    assert tick()
    assert seen == [None]
    assert not Job.objects.exists()


# -- async handlers


def test_S119_an_async_handler_uses_the_orm() -> None:
    Group.objects.create(name="there")

    async def handler(name: str) -> None:
        group = await Group.objects.aget(name=name)
        await Group.objects.acreate(name=f"{group.name} and back")
        async for found in Group.objects.all():
            assert found.name.startswith("there")

    assert run_once(handler, "there") is None
    assert Group.objects.filter(name="there and back").exists()


@committed
def test_S119_in_a_worker_too_and_its_connections_are_looked_after(start_worker: StartWorker) -> None:
    wrappers: list[Any] = []

    @job("handler", max_retries=0)
    async def handler(name: str) -> None:
        await Group.objects.acreate(name=name)
        wrappers.append(await sync_to_async(lambda: connections["default"])())

    for number in range(6):
        handler.enqueue(str(number))
    start_worker(threads=2)
    wait_for(lambda: Group.objects.count() == 6 and not jobs(), what="all six")
    wait_for(lambda: all(wrapper.connection is None for wrapper in wrappers), what="the connections to be closed")


def test_S119_an_async_handler_that_raises_is_a_failed_attempt() -> None:
    async def handler() -> None:
        await asyncio.sleep(0)
        raise ValueError("async")

    found = dead(run_once(handler))
    assert found.last_error == "ValueError: async"
    assert "in handler" in last(found)["traceback"]


@pytest.mark.parametrize(
    ("error", "status", "attempts"),
    [(Retry(5), "pending", 1), (Snooze(5), "pending", 0), (Discard("no use"), "failed", 1)],
    ids=lambda value: str(value),
)
def test_S119_an_async_handler_chooses_how_it_ends(error: Exception, status: str, attempts: int) -> None:
    async def handler() -> None:
        raise error

    found = run_once(handler, max_retries=3)
    assert found is not None
    assert (found.status, found.attempts) == (status, attempts)


def test_S119_a_sync_handler_may_run_a_loop_of_its_own() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    seen: list[int] = []

    def handler() -> None:
        seen.append(asyncio.run(answer()))
        seen.append(async_to_sync(answer)())

    assert run_once(handler) is None
    assert seen == [42, 42]


@committed
def test_S119_in_a_worker_too(start_worker: StartWorker) -> None:
    async def answer() -> int:
        return await Group.objects.acount()

    seen: list[int] = []

    @job("handler", max_retries=0)
    def handler() -> None:
        seen.append(async_to_sync(answer)())
        seen.append(asyncio.run(asyncio.sleep(0, 7)))

    handler.enqueue()
    assert start_worker(threads=1, drain=True).wait(30)
    assert jobs() == []
    assert seen == [0, 7]


class AsyncCallable:
    def __init__(self) -> None:
        self.awaited = 0

    async def __call__(self, payload: str) -> None:
        self.awaited += 1


def test_a_handler_that_answers_a_coroutine_is_not_taken_for_done_before_that_has_run() -> None:
    """Whatever hides the ``async`` of a function, its job is not lost: it is run, or fails."""
    handler = AsyncCallable()

    def hide(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args)

        return inner

    for number, registered in enumerate([handler, partial(handler), hide(handler), lambda payload: handler(payload)]):
        register(f"raw {number}", registered)
        enqueue(f"raw {number}", max_retries=0)
    while tick():
        pass
    assert handler.awaited + len(jobs("failed")) == 4


def test_a_handler_that_answers_a_generator_is_not_taken_for_done() -> None:
    ran: list[str] = []

    def generator(payload: str) -> Any:
        ran.append(payload)
        yield

    async def asynchronous(payload: str) -> AsyncIterator[None]:
        ran.append(payload)
        yield

    enqueued = 0
    for number, handler in enumerate([generator, asynchronous]):
        try:
            register(f"raw {number}", handler)
        except TypeError:
            continue  # refused where it is written: better still
        enqueue(f"raw {number}", max_retries=0)
        enqueued += 1
    while tick():
        pass
    assert len(ran) + len(jobs("failed")) == enqueued


# -- @job(atomic=True)


@committed
def test_atomic_commits_the_row_and_the_effects_together(elsewhere: Elsewhere) -> None:
    seen: list[tuple[int, int]] = []

    def look() -> tuple[int, int]:
        return Group.objects.count(), Job.objects.count()

    def handler() -> None:
        Group.objects.create(name="effect")
        seen.append(elsewhere(look).result(30))
        transaction.on_commit(lambda: seen.append(elsewhere(look).result(30)))

    assert run_once(handler, atomic=True) is None
    assert seen == [(0, 1), (1, 0)]


@committed
@pytest.mark.parametrize(
    ("error", "status", "attempts"),
    [
        (ValueError("no"), "pending", 1),
        (IntegrityError("no"), "pending", 1),
        (Retry(5), "pending", 1),
        (Snooze(5), "pending", 0),
        (Discard("no use"), "failed", 1),
        (SystemExit(3), "pending", 1),
    ],
    ids=repr,
)
def test_atomic_rolls_the_effects_back_when_it_does_not_succeed(
    error: BaseException, status: str, attempts: int
) -> None:
    calls: list[None] = []

    def handler() -> None:
        calls.append(None)
        Group.objects.create(name="effect")
        raise error

    found = run_once(handler, atomic=True, max_retries=3)
    assert found is not None
    assert (found.status, found.attempts, found.claimed_by) == (status, attempts, None)
    assert len(calls) == 1
    assert not Group.objects.exists()


@committed
def test_atomic_rolls_the_effects_back_when_its_claim_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[str] = []
    claim_lost.connect(lambda job, **kwargs: lost.append(job.id), weak=False)
    job_started.connect(steal)

    def handler() -> None:
        Group.objects.create(name="effect")

    found = run_once(handler, atomic=True)
    assert found is not None
    assert (found.status, found.claimed_by, found.attempts) == ("running", "another", 0)
    assert not Group.objects.exists()
    assert lost == [found.pk]
    assert "claim was lost" in caplog.text


def steal(job: Any, **kwargs: object) -> None:
    """As if the worker had been declared dead and another had claimed its job."""
    Job.objects.filter(pk=job.id).update(claimed_by="another")


@committed
def test_atomic_and_async(elsewhere: Elsewhere) -> None:
    async def handler(fail: bool) -> None:
        await Group.objects.acreate(name=f"effect {fail}")
        if fail:
            raise ValueError

    assert dead(run_once(handler, True, atomic=True))
    assert run_once(handler, False, atomic=True) is None
    assert [group.name for group in Group.objects.all()] == ["effect False"]


@committed
def test_atomic_in_a_worker(start_worker: StartWorker) -> None:
    @job("handler", atomic=True, max_retries=0)
    def handler(number: int) -> None:
        Group.objects.create(name=str(number))
        if number % 3 == 0:
            raise ValueError

    for number in range(12):
        handler.enqueue(number)
    assert start_worker(threads=3, drain=True).wait(60)
    assert sorted(int(group.name) for group in Group.objects.all()) == [1, 2, 4, 5, 7, 8, 10, 11]
    assert sorted(info.payload for info in jobs()) == sorted(f'{{"number":{number}}}' for number in (0, 3, 6, 9))
    assert {info.status for info in jobs()} == {"failed"}


@committed
def test_atomic_that_enqueues_commits_that_too() -> None:
    def handler(fail: bool) -> None:
        enqueue("follow-up", str(fail))
        if fail:
            raise ValueError

    assert dead(run_once(handler, True, atomic=True))
    assert run_once(handler, False, atomic=True) is None
    assert [info.payload for info in jobs("pending")] == ["False"]


@committed
@pytest.mark.parametrize("error", [ZeroDivisionError("callback"), OperationalError("database is locked")], ids=repr)
def test_atomic_whose_on_commit_callback_raises_is_done_once_and_the_error_is_not_lost(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Its row went with the commit: it cannot be retried, so at least the log tells."""
    calls: list[None] = []

    def handler() -> None:
        calls.append(None)
        Group.objects.create(name="effect")
        transaction.on_commit(partial(raise_, error))

    assert run_once(handler, atomic=True, max_retries=3) is None
    assert len(calls) == 1
    assert Group.objects.count() == 1
    assert str(error) in caplog.text


def raise_(error: BaseException) -> None:
    raise error


@committed
def test_atomic_is_repeated_at_once_when_the_server_undid_it_and_then_charged(clock: Clock) -> None:
    calls: list[None] = []

    def handler() -> None:
        calls.append(None)
        raise OperationalError("database is locked")

    found = run_once(handler, atomic=True, max_retries=3)
    assert found is not None
    assert len(calls) == 1 + ATOMIC_REPEATS
    assert (found.status, found.attempts) == ("pending", 1)
    assert found.last_error == "OperationalError: database is locked"


def test_not_atomic_is_not_repeated_at_once() -> None:
    calls: list[None] = []

    def handler() -> None:
        calls.append(None)
        raise OperationalError("database is locked")

    dead(run_once(handler))
    assert len(calls) == 1


@committed
@needs_a_server
def test_atomic_that_a_deadlock_ended_is_repeated_uncharged(elsewhere: Elsewhere) -> None:
    one, other = Group.objects.create(name="one"), Group.objects.create(name="other")
    errors: list[DatabaseError] = []
    neighbours: list[Any] = []
    has_other = threading.Event()

    def neighbour() -> None:
        with transaction.atomic():
            if POSTGRESQL:
                original.run("SET LOCAL deadlock_timeout = '60s'")  # whoever looks first is the victim: not we
            else:
                # The victim is who has changed least: not we.
                Group.objects.bulk_create(Group(name=f"weight {number}") for number in range(100))
            Group.objects.filter(pk=other.pk).update(name="other, the neighbour's")
            has_other.set()
            Group.objects.filter(pk=one.pk).update(name="one, the neighbour's")

    def handler() -> None:
        if errors:
            neighbours[0].result(30)  # our rollback lets it go on; a repeat could be faster than it
        Group.objects.filter(pk=one.pk).update(name="one, the job's")
        if not neighbours:
            neighbours.append(elsewhere(neighbour))
            assert has_other.wait(30)
            mine = session_id()
            wait_for(lambda: is_waited_for(mine), what="the neighbour to wait for us")
        try:
            Group.objects.filter(pk=other.pk).update(name="other, the job's")
        except DatabaseError as error:
            errors.append(error)
            raise

    assert run_once(handler, atomic=True) is None
    assert len(errors) == 1
    assert set(Group.objects.filter(pk__in=[one.pk, other.pk]).values_list("name", flat=True)) == {
        "one, the job's",
        "other, the job's",
    }


def is_waited_for(session: int) -> bool:
    if POSTGRESQL:
        sql = "SELECT count(*) FROM pg_locks WHERE NOT granted AND %s = ANY(pg_blocking_pids(pid))"
        return bool(original.ask(sql, session)[0][0])
    threading.Event().wait(0.15)  # InnoDB's tables are frozen for whoever reads them more often than every 0.1 s
    sql = (
        "SELECT count(*) FROM information_schema.innodb_lock_waits w"
        " JOIN information_schema.innodb_trx t ON t.trx_id = w.blocking_trx_id WHERE t.trx_mysql_thread_id = %s"
    )
    return bool(original.ask(sql, session)[0][0])


@committed
@pytest.mark.skipif(not POSTGRESQL, reason="a REPEATABLE READ that refuses to overwrite")
def test_atomic_that_a_serialization_failure_ended_is_repeated_uncharged(elsewhere: Elsewhere) -> None:
    group = Group.objects.create(name="before")
    calls: list[str] = []

    def handler() -> None:
        original.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        calls.append(Group.objects.get().name)
        if len(calls) == 1:
            elsewhere(lambda: Group.objects.update(name="the neighbour's")).result(30)
        Group.objects.update(name="the job's")

    assert run_once(handler, atomic=True) is None
    assert calls == ["before", "the neighbour's"]
    group.refresh_from_db()
    assert group.name == "the job's"


@committed
@needs_a_server
def test_atomic_whose_database_was_lost_is_given_back_uncharged(elsewhere: Elsewhere) -> None:
    calls: list[None] = []

    def handler() -> None:
        calls.append(None)
        Group.objects.create(name="effect")
        if len(calls) == 1:
            elsewhere(end_session, session_id()).result(30)
            Group.objects.count()

    found = run_once(handler, atomic=True)
    assert found is not None
    assert (found.status, found.attempts, found.claimed_by, found.last_error) == ("pending", 0, None, None)
    assert not Group.objects.exists()
    assert tick()
    assert not Job.objects.exists()
    assert Group.objects.count() == 1


@committed
@needs_a_server
def test_not_atomic_whose_database_was_lost_is_a_failed_attempt(elsewhere: Elsewhere) -> None:
    def handler() -> None:
        Group.objects.count()
        elsewhere(end_session, session_id()).result(30)
        Group.objects.count()

    found = dead(run_once(handler))
    assert found.last_error is not None
    assert "Error: " in found.last_error


# -- unknown jobs


def test_S082_a_job_without_a_handler_fails_and_the_others_run(clock: Clock) -> None:
    ran: list[str] = []
    register("known", ran.append)
    gone = enqueue("a.removed.function", max_retries=1)
    for number in range(5):
        enqueue("known", str(number))
    for _ in range(6):
        assert tick()
    assert ran == list("01234")
    found = Job.objects.get(pk=gone)
    assert (found.status, found.attempts) == ("pending", 1)
    assert found.last_error == "no handler registered for job_type 'a.removed.function'"
    assert found.next_run_at > clock.now
    clock.forward(10)
    assert tick()
    assert Job.objects.get(pk=gone).status == "failed"


def test_S083_left_to_others_a_job_without_a_handler_is_not_touched(configure: Configure) -> None:
    configure(UNKNOWN_JOBS="leave")
    ran: list[str] = []
    register("known", ran.append)
    unknown = [enqueue(job_type, priority=9) for job_type in ("new_task", "Known", "known ")]
    before = list(Job.objects.order_by("pk").values())
    enqueue("known", "p")
    assert tick() is True
    assert ran == ["p"]
    assert tick() is False
    assert list(Job.objects.order_by("pk").values()) == before
    register("new_task", ran.append)
    assert tick() is True
    assert {info.id for info in jobs()} == set(unknown[1:])


@committed
def test_S083_in_a_worker_too(configure: Configure, start_worker: StartWorker) -> None:
    configure(UNKNOWN_JOBS="leave")
    ran: list[str] = []
    register("known", ran.append)
    unknown = enqueue("new_task", priority=9)
    for number in range(3):
        enqueue("known", str(number))
    assert start_worker(threads=1, drain=True).wait(30)
    assert ran == ["0", "1", "2"]
    assert [(info.id, info.status, info.attempts) for info in jobs()] == [(unknown, "pending", 0)]


# -- secrets


def test_S097_arguments_are_neither_logged_nor_shown(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    caplog.set_level("DEBUG", "rws_jobs")
    caplog.set_level("DEBUG", "django")
    infos: list[Any] = []
    job_started.connect(lambda job, **kwargs: infos.append(job), weak=False)

    @job("login", max_retries=1)
    def login(password: str, token: str, fail: bool) -> None:
        if fail:
            raise PermissionError("wrong password")

    for fail in (True, False):
        job_id = login.enqueue(password="hunter2", token="hunter2", fail=fail)
        infos.append(Job.objects.get(pk=job_id))
        assert tick()
    infos += jobs()
    clock.forward(10)
    assert tick()
    infos += [jobs()[0], Claim("18c0-0", "login", "hunter2", "default", 0, 0, 3, 1, 1, None, None, None)]
    messages = [
        record.getMessage() for record in caplog.records if record.name.startswith(("rws_jobs", "django.tasks"))
    ]
    assert any("wrong password" in message for message in messages)
    assert any("done after" in message for message in messages)
    assert not any("hunter2" in message for message in messages)
    assert not any("hunter2" in text(info) for info in infos for text in (repr, str, "{}".format))
    found = Job.objects.get()
    assert found.status == "failed"
    assert found.last_error is not None
    assert found.history is not None
    assert "hunter2" not in found.last_error + found.history


def test_log_lines_carry_the_job_for_structured_logging(caplog: pytest.LogCaptureFixture) -> None:
    found = dead(run_once(raising(ValueError("two\nlines"))))
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert "\n" not in record.getMessage()
    assert "two lines" in record.getMessage()
    shown = {name: getattr(record, name) for name in ("job_id", "job_type", "queue", "attempt")}
    assert shown == {"job_id": found.pk, "job_type": "tested", "queue": "default", "attempt": 1}
