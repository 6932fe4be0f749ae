"""Schedules: one job for each due time, from what is stored, whatever restarts, edits and broken rows there are.

Time is moved by hand, but where several processes are at work: there it is the database's.
"""

import json
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from rws_jobs import current_job, job, register, registry, schedule, schedules, tick, tick_schedules
from rws_jobs.models import Job, JobSchedule, JobWorker

from .conftest import Clock
from .jobs import calls, note
from .processes import Processes, slow
from .rows import Ledger
from .waiting import another_connection, apart, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def at(text: str, day: int = 15) -> float:
    """A time of 2027-01-15, or another day of that month, in UTC."""
    hour, minute, *rest = (int(part) for part in text.split(":"))
    return datetime(2027, 1, day, hour, minute, *rest, tzinfo=UTC).timestamp()


def restart() -> None:
    """A process that has just been started, and declares nothing yet."""
    schedules._declared.clear()
    schedules._complaints.clear()


def due(name: str = "s") -> float:
    return float(JobSchedule.objects.get(pk=name).next_run_at)


def fired() -> list[tuple[str, float]]:
    """For each job that a schedule has enqueued: the schedule, and the due time that the job stands for."""
    found = [json.loads(meta) for meta in Job.objects.order_by("id").values_list("meta", flat=True)]
    return [(meta["schedule"], float(meta["scheduled_for"])) for meta in found]


@pytest.fixture
def declared(clock: Clock) -> Callable[..., None]:
    """Declare a schedule of the ``note`` job at a time, as the only one, and tick once at that time."""

    def declare(when: float, cron: str, **options: Any) -> None:
        clock.move_to(when)
        restart()
        schedule("s", cron, note, **options)
        assert tick_schedules() == 0, "nothing runs at the moment of a declaration or change"

    return declare


# -- first sight, edits, removal


def test_a_new_schedule_waits_for_its_next_time(declared: Callable[..., None], clock: Clock) -> None:
    declared(at("14:02"), "0 15 * * *")
    assert due() == at("15:00")
    clock.move_to(at("14:59:59"))
    assert tick_schedules() == 0
    clock.move_to(at("15:00"))
    assert tick_schedules() == 1
    assert tick_schedules() == 0
    assert fired() == [("s", at("15:00"))]
    assert due() == at("15:00", day=16)
    row = JobSchedule.objects.get()
    assert row.last_run_at == at("15:00")
    assert (row.cron, row.timezone, row.job_type, row.payload) == ("0 15 * * *", "UTC", "tests.note", "{}")


def test_its_jobs_carry_arguments_options_and_the_due_time(declared: Callable[..., None], clock: Clock) -> None:
    options = {"queue": "reports", "priority": 7, "max_retries": 1, "unique_key": "nightly"}
    declared(at("14:02"), "0 15 * * *", kwargs={"value": 42}, **options)
    clock.move_to(at("15:00:20"))
    assert tick_schedules() == 1
    found = Job.objects.get()
    assert {name: getattr(found, name) for name in options} == options
    assert (found.next_run_at, found.created_at) == (at("15:00:20"), at("15:00:20"))
    seen: list[object] = []

    def look(payload: str) -> None:
        seen.append((payload, current_job().scheduled_for))

    del registry._handlers["tests.note"]
    register("tests.note", look)
    assert tick(["reports"])
    assert seen == [('{"value":42}', at("15:00"))]


def test_a_schedule_of_a_job_type_gives_it_the_payload_as_it_is(clock: Clock) -> None:
    schedule("s", "0 15 * * *", "another.program", payload="any text\n")
    tick_schedules()
    clock.move_to(at("15:00"))
    assert tick_schedules() == 1
    assert list(Job.objects.values_list("job_type", "payload")) == [("another.program", "any text\n")]


def test_times_missed_while_no_worker_ran_make_one_run(declared: Callable[..., None], clock: Clock) -> None:
    declared(at("08:59:30"), "* * * * *")
    clock.move_to(at("12:00:30"))
    assert tick_schedules() == 1
    assert tick_schedules() == 0
    assert fired() == [("s", at("09:00"))]
    assert due() == at("12:01")


def test_each_time_fires_once_while_a_worker_runs(declared: Callable[..., None], clock: Clock) -> None:
    declared(at("08:59:30"), "*/10 * * * * *")
    for second in range(60):
        clock.move_to(at("09:00") + second)
        tick_schedules()
        tick_schedules()
    assert fired() == [("s", at("08:59:40")), *(("s", at("09:00") + second) for second in range(10, 60, 10))]


def test_a_clock_set_back_fires_nothing_again(declared: Callable[..., None], clock: Clock) -> None:
    declared(at("08:59:30"), "*/5 * * * *")
    clock.move_to(at("10:00"))
    assert tick_schedules() == 1
    for minute in range(9 * 60, 10 * 60 + 5):
        clock.move_to(at("00:00") + 60 * minute)
        assert tick_schedules() == 0
    clock.move_to(at("10:05"))
    assert tick_schedules() == 1


@pytest.mark.parametrize("when", ["08:10", "11:59:59"])
def test_a_schedule_of_the_original_keeps_its_due_time_and_gets_the_text(clock: Clock, when: str) -> None:
    JobSchedule.objects.create(name="s", next_run_at=at("12:00"))
    clock.move_to(at(when))
    schedule("s", "0 9 * * *", note)
    assert tick_schedules() == 0
    assert due() == at("12:00")
    assert JobSchedule.objects.get().cron == "0 9 * * *"
    clock.move_to(at("12:00"))
    assert tick_schedules() == 1
    assert due() == at("09:00", day=16)


def test_a_changed_expression_holds_at_once_and_does_not_run_by_itself(
    declared: Callable[..., None], clock: Clock
) -> None:
    declared(at("12:00"), "0 0 * * *")
    assert due() == at("00:00", day=16)
    declared(at("12:02"), "*/5 * * * *")
    assert due() == at("12:05")
    clock.move_to(at("12:05"))
    assert tick_schedules() == 1
    declared(at("12:07"), "0 0 * * *")
    assert due() == at("00:00", day=16)
    clock.move_to(at("00:00", day=16))
    assert tick_schedules() == 1
    assert fired() == [("s", at("12:05")), ("s", at("00:00", day=16))]


def test_a_changed_time_zone_moves_the_due_time(declared: Callable[..., None], clock: Clock) -> None:
    declared(at("03:00"), "0 6 * * *")
    assert due() == at("06:00")
    declared(at("03:01"), "0 6 * * *", timezone="Europe/Brussels")
    assert due() == at("05:00")
    declared(at("03:02"), "0 6 * * *", timezone="Asia/Kathmandu")
    assert due() == at("00:15", day=16)


@pytest.mark.parametrize(
    ("change", "column", "value"),
    [({"kwargs": {"value": 2}}, "payload", '{"value":2}'), ({"queue": "other"}, "queue", "other")],
    ids=["arguments", "queue"],
)
def test_changed_arguments_or_options_hold_from_the_next_time(
    declared: Callable[..., None], clock: Clock, change: Any, column: str, value: str
) -> None:
    declared(at("12:00"), "0 15 * * *", kwargs={"value": 1})
    declared(at("12:02"), "0 15 * * *", **{"kwargs": {"value": 1}, **change})
    assert due() == at("15:00")
    clock.move_to(at("15:00"))
    assert tick_schedules() == 1
    assert list(Job.objects.values_list(column, flat=True)) == [value]


def test_a_time_that_was_missed_before_an_edit_is_still_run_with_the_edit(
    declared: Callable[..., None], clock: Clock
) -> None:
    declared(at("12:00"), "0 15 * * *", kwargs={"value": 1})
    clock.move_to(at("16:00"))
    restart()
    schedule("s", "0 20 * * *", note, kwargs={"value": 2})
    assert tick_schedules() == 1
    assert fired() == [("s", at("15:00"))]
    assert list(Job.objects.values_list("payload", flat=True)) == ['{"value":2}']
    assert due() == at("20:00")


def test_during_a_deploy_old_processes_do_not_undo_the_edits_of_new_ones(
    declared: Callable[..., None], clock: Clock
) -> None:
    declared(at("12:00"), "0 15 * * *", kwargs={"value": "old"})
    old = dict(schedules._declared)
    declared(at("12:02"), "0 14 * * *", kwargs={"value": "new"})
    new = dict(schedules._declared)
    for minute in range(12 * 60 + 3, 15 * 60 + 2):
        clock.move_to(at("00:00") + 60 * minute)
        for version in (old, new):
            schedules._declared.clear()
            schedules._declared.update(version)
            tick_schedules()
    assert fired() == [("s", at("14:00"))]
    assert list(Job.objects.values_list("payload", flat=True)) == ['{"value":"new"}']


def test_a_schedule_removed_from_the_code_stays_listed_and_never_fires(
    declared: Callable[..., None], clock: Clock
) -> None:
    declared(at("12:00"), "* * * * *")
    restart()
    schedule("another", "* * * * *", note)
    tick_schedules()
    for minute in range(1, 5):
        clock.move_to(at("12:00") + 60 * minute)
        tick_schedules()
    assert Counter(name for name, _ in fired()) == {"another": 4}
    assert JobSchedule.objects.filter(pk="s").exists()
    restart()
    clock.forward(60)
    assert tick_schedules() == 0


def test_a_paused_schedule_lets_its_times_pass_and_resumed_waits_for_the_next(
    declared: Callable[..., None], clock: Clock
) -> None:
    declared(at("08:05"), "0 * * * *")
    clock.move_to(at("08:10"))
    JobSchedule.objects.update(paused=True)
    for minute in range(8 * 60 + 10, 10 * 60 + 20):
        clock.move_to(at("00:00") + 60 * minute)
        assert tick_schedules() == 0
    clock.move_to(at("10:20"))
    JobSchedule.objects.update(paused=False)
    assert tick_schedules() == 0
    assert due() == at("11:00")
    clock.move_to(at("11:00"))
    assert tick_schedules() == 1
    assert fired() == [("s", at("11:00"))]


def test_a_due_time_that_came_before_the_resumption_is_not_made_up_for(
    declared: Callable[..., None], clock: Clock
) -> None:
    """Also in the worker that was the first to look again: the look that finds it paused moves it on."""
    declared(at("08:05"), "0 * * * *")
    JobSchedule.objects.update(paused=True)
    clock.move_to(at("09:30"))
    assert tick_schedules() == 0
    assert due() == at("10:00")
    assert JobSchedule.objects.get().last_run_at is None


# -- several schedules


def test_one_function_may_have_several_schedules(clock: Clock) -> None:
    schedule("one", "0 15 * * *", note, kwargs={"value": 1}, queue="a")
    schedule("two", "0 15 * * *", note, kwargs={"value": 2}, queue="b")
    tick_schedules()
    clock.move_to(at("15:00"))
    assert tick_schedules() == 2
    assert set(Job.objects.values_list("queue", "payload")) == {("a", '{"value":1}'), ("b", '{"value":2}')}


def test_a_name_declared_twice_is_an_error() -> None:
    schedule("s", "0 15 * * *", note)
    with pytest.raises(ValueError, match="declared twice"):
        schedule("s", "0 16 * * *", note)


@pytest.mark.parametrize(
    "cron",
    ["0 0 31 2 *", "60 * * * *", "", "* * * *", "0," * 50_000 + "0 * * * *", "@reboot"],
    ids=lambda cron: cron[:12] or "empty",
)
def test_a_bad_expression_is_refused_where_it_is_written(cron: str) -> None:
    with pytest.raises(ValueError):
        schedule("s", cron, note)
    assert not schedules.declared()


def test_nothing_is_stored_before_the_first_tick() -> None:
    schedule("s", "0 15 * * *", note)
    assert not JobSchedule.objects.exists()
    assert tick_schedules() == 0
    assert JobSchedule.objects.exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"job": note, "payload": "x"}, TypeError),
        ({"job": "a.type", "kwargs": {}}, TypeError),
        ({"job": note, "kwargs": {"surplus": 1}}, TypeError),
        ({"job": note, "timezone": "Mars/Base"}, ValueError),
        ({"job": note, "queue": ""}, ValueError),
        ({"job": note, "queue": 5}, TypeError),
        ({"job": note, "run_in": 5}, TypeError),
        ({"job": ""}, ValueError),
        ({"job": note, "name": ""}, ValueError),
        ({"job": note, "name": "x" * 192}, ValueError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_where_they_are_written(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        schedule(**{"name": "s", "cron": "0 15 * * *", **arguments})
    assert not schedules.declared()


def test_a_tick_costs_one_statement_however_many_schedules_wait(clock: Clock) -> None:
    for number in range(150):
        schedule(f"s {number}", f"{number % 60} {number % 24} * * *", note)
    tick_schedules()
    clock.forward(1)
    with CaptureQueriesContext(connection) as queries:
        assert tick_schedules() == 0
    assert len(queries) == 1


def test_150_daily_schedules_over_a_day_with_two_replicas_run_once_each(clock: Clock) -> None:
    clock.move_to(at("00:00", day=14) - 60)
    for number in range(150):
        minute = number * 9
        schedule(f"s {number:03}", f"{minute % 60} {minute // 60} * * *", note)
    tick_schedules()
    for step in range(0, 24 * 60, 10):
        clock.move_to(at("00:00", day=14) + 60 * step)
        tick_schedules()
        tick_schedules()
    assert sorted(name for name, _ in fired()) == [f"s {number:03}" for number in range(150)]
    assert all(when == at("00:00", day=14) + 60 * 9 * int(name[2:]) for name, when in fired())


def test_a_unique_key_keeps_runs_from_piling_up_and_is_counted_rightly(
    declared: Callable[..., None], clock: Clock
) -> None:
    declared(at("12:00"), "* * * * *", unique_key="one at a time")
    counts = []
    for minute in range(1, 6):
        clock.move_to(at("12:00") + 60 * minute)
        counts.append(tick_schedules())
        assert due() == at("12:01") + 60 * minute, "the time passes, whether a job was inserted or not"
    assert counts == [1, 0, 0, 0, 0]
    calls.clear()
    assert tick()
    clock.forward(60)
    assert tick_schedules() == 1
    assert fired() == [("s", at("12:06"))]


def test_the_jobs_of_a_schedule_without_a_key_pile_up_one_for_each_time(
    declared: Callable[..., None], clock: Clock
) -> None:
    declared(at("12:00"), "* * * * *")
    for minute in range(1, 4):
        clock.move_to(at("12:00") + 60 * minute)
        assert tick_schedules() == 1
    assert len(fired()) == 3


# -- broken rows


BROKEN = {
    "no expression": {"cron": ""},
    "a minute 60": {"cron": "60 * * * *"},
    "a date that never comes": {"cron": "0 0 31 2 *"},
    "100,000 characters": {"cron": "0," * 50_000},
    "a zone that is none": {"timezone": "Mars/Base"},
    "a zone that is a path": {"timezone": "../../etc/passwd"},
    "no job type": {"job_type": None},
    "an empty job type": {"job_type": ""},
    "a job type too long": {"job_type": "x" * 300},
    "options that are not JSON": {"options": "{not json"},
    "options that are no object": {"options": "[1]"},
    "an option unknown": {"options": '{"bogus": 1}'},
    "an option of a wrong type": {"options": '{"queue": 5}'},
    "an option out of bounds": {"options": '{"priority": 1e400}'},
}


@pytest.mark.parametrize("columns", BROKEN.values(), ids=BROKEN)
def test_a_row_broken_by_sql_is_logged_once_and_stops_no_other(
    columns: dict[str, Any], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.move_to(at("12:00"))
    for name in ("a", "broken", "z"):
        schedule(name, "* * * * *", note)
    tick_schedules()
    good = JobSchedule.objects.get(pk="broken")
    JobSchedule.objects.filter(pk="broken").update(**columns)
    for minute in range(1, 6):
        clock.move_to(at("12:00") + 60 * minute)
        assert tick_schedules() == 2
        assert tick_schedules() == 0
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "'broken'" in line
    assert len(line) < 1000
    assert due("broken") == at("12:01"), "it was not run: it is still due"
    # Repaired, it runs the times it has missed as one.
    JobSchedule.objects.filter(pk="broken").update(**{column: getattr(good, column) for column in columns})
    clock.forward(1)
    assert tick_schedules() == 1
    assert [entry for entry in fired() if entry[0] == "broken"] == [("broken", at("12:01"))]
    # And broken again, it is logged again.
    JobSchedule.objects.filter(pk="broken").update(**columns)
    clock.forward(60)
    tick_schedules()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 2


def test_a_job_type_that_nobody_handles_is_enqueued_all_the_same(declared: Callable[..., None], clock: Clock) -> None:
    declared(at("12:00"), "* * * * *")
    JobSchedule.objects.update(job_type="no.such", payload="{not json")
    clock.move_to(at("12:01"))
    assert tick_schedules() == 1
    assert tick()
    assert "no handler registered for job_type 'no.such'" in Job.objects.get().last_error


def test_due_time_and_job_are_committed_together_or_not_at_all(
    declared: Callable[..., None], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    declared(at("12:00"), "* * * * *", kwargs={"value": "refused"})
    schedule("z", "* * * * *", note)
    tick_schedules()
    clock.move_to(at("12:01"))
    with refusing_jobs_with("refused"):
        assert tick_schedules() == 1
        assert due() == at("12:01")
        assert JobSchedule.objects.get(pk="s").last_run_at is None
        assert [name for name, _ in fired()] == ["z"]
        assert "IntegrityError" in caplog.text
    clock.move_to(at("12:03"))
    assert tick_schedules() == 2
    assert fired()[1:] == [("s", at("12:01")), ("z", at("12:02"))]
    assert due() == at("12:04")


@contextmanager
def refusing_jobs_with(value: str) -> Iterator[None]:
    """A constraint on the payload of jobs."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(
                f"CREATE TRIGGER refused BEFORE INSERT ON rws_jobs WHEN NEW.payload LIKE '%{value}%'"
                " BEGIN SELECT RAISE(ABORT, 'refused by a constraint'); END"
            )
        else:
            cursor.execute(f"ALTER TABLE rws_jobs ADD CONSTRAINT refused CHECK (payload NOT LIKE '%{value}%')")
    try:
        yield
    finally:
        table = connection.vendor == "sqlite"
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER refused" if table else "ALTER TABLE rws_jobs DROP CONSTRAINT refused")


# -- many at once


def test_of_replicas_that_tick_at_once_one_enqueues(declared: Callable[..., None], clock: Clock) -> None:
    declared(at("12:00"), "* * * * *")
    for minute in range(1, 6):
        clock.move_to(at("12:00") + 60 * minute)
        together = threading.Barrier(4)

        def replica(together: threading.Barrier = together) -> int:
            together.wait(30)
            return tick_schedules()

        replicas = [apart(replica) for _ in range(4)]
        assert sorted(each.result(timeout=30) for each in replicas) == [0, 0, 0, 1]
    assert fired() == [("s", at("12:00") + 60 * minute) for minute in range(1, 6)]


def test_replicas_that_see_a_schedule_first_at_once_store_it_once(clock: Clock) -> None:
    schedule("s", "0 15 * * *", note)
    together = threading.Barrier(4)

    def replica() -> int:
        together.wait(30)
        return tick_schedules()

    replicas = [apart(replica) for _ in range(4)]
    assert [each.result(timeout=30) for each in replicas] == [0, 0, 0, 0]
    assert JobSchedule.objects.count() == 1
    assert due() == at("15:00")


@pytest.mark.parametrize("edited", [False, True], ids=["due", "edited"])
def test_a_schedule_whose_row_somebody_holds_delays_no_other(clock: Clock, edited: bool) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no row locks")
    clock.move_to(at("12:00"))
    for name in ("a", "held", "z"):
        schedule(name, "* * * * *", note)
    tick_schedules()
    if edited:
        restart()
        for name in ("a", "held", "z"):
            schedule(name, "* * * * *", note, kwargs={"value": "edited"})
    clock.move_to(at("12:01"))
    with another_connection() as another, transaction.atomic(using=another):
        assert JobSchedule.objects.using(another).select_for_update().get(pk="held")
        assert apart(tick_schedules).result(timeout=20) == 2, "no look waits for the row that is held"
        assert sorted(name for name, _ in fired()) == ["a", "z"]
    assert tick_schedules() == 1
    assert ("held", at("12:01")) in fired()


PER_SECOND = """
from rws_jobs import current_job, job, schedule
from tests.rows import Ledger

@job("second")
def second():
    Ledger.write(str(current_job().scheduled_for))

schedule("each second", "* * * * * *", second)
"""


def each_second_on_three_processes(seconds: int, folder: Path) -> None:
    ledger = Ledger()
    try:
        with Processes(folder) as processes:
            workers = [processes.runjobs(jobs=PER_SECOND) for _ in range(3)]
            for worker in workers:
                worker.started()
            wait_for(lambda: len(ledger.entries) >= seconds, timeout=4 * seconds + 60, what=f"{seconds} runs")
            for worker in workers:
                worker.send(signal.SIGTERM)
            assert [worker.wait() for worker in workers] == [0, 0, 0]
            logs = "".join(worker.log for worker in workers)
        runs = [*(entry.what for entry in ledger.entries), *(str(int(when)) for _, when in fired())]
        twice = [when for when, count in Counter(runs).items() if count > 1]
        assert twice == []
        first, last = min(map(int, runs)), max(map(int, runs))
        assert len(runs) <= last - first + 1
        assert JobSchedule.objects.count() == 1
        assert due("each second") >= last + 1
        assert "rror" not in logs, logs
    finally:
        ledger.drop()


def test_three_processes_enqueue_one_job_for_each_due_time(tmp_path: Path) -> None:
    each_second_on_three_processes(6, tmp_path)


@slow
def test_three_processes_enqueue_one_job_for_each_due_time_of_a_minute(tmp_path: Path) -> None:
    each_second_on_three_processes(60, tmp_path)


def test_a_worker_ticks_schedules_and_runs_their_jobs(start_worker: Callable[..., Any]) -> None:
    ran = threading.Event()

    @job("second")
    def second() -> None:
        ran.set()

    schedule("each second", "* * * * * *", second)
    start_worker()
    assert ran.wait(30)


def test_a_worker_told_so_leaves_schedules_alone(
    start_worker: Callable[..., Any], configure: Callable[..., None]
) -> None:
    configure(HEARTBEAT_INTERVAL=0.1, DEAD_AFTER=5)
    schedule("each second", "* * * * * *", note)
    start_worker(schedules=False)
    for _ in range(3):  # three turns of its maintenance, each of which finds its row gone
        wait_for(lambda: JobWorker.objects.all().delete()[0], what="the worker to register anew")
    assert not JobSchedule.objects.exists()
