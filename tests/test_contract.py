"""The original's contract (QUEUE_SPEC): sections 3 to 8 by their return values, section 9 statement by statement."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Barrier, Event, current_thread
from threading import enumerate as all_threads
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connection, transaction
from django.db.migrations.recorder import MigrationRecorder

from rws_jobs import (
    delete,
    enqueue,
    failed_jobs,
    job,
    jobs,
    on_dead,
    register,
    retry,
    schedule,
    schedules,
    tick,
    tick_schedules,
)
from rws_jobs.cron import CronError
from rws_jobs.info import JobInfo
from rws_jobs.models import Job, JobSchedule, JobWorker

from . import original
from .conftest import Clock
from .waiting import wait_for

pytestmark = pytest.mark.django_db

NOW = 1_800_000_000  # where the clock of the fixture stands
DUE_NOW = 1_500_000_000

Configure = Callable[..., None]


def fail(payload: str) -> None:
    raise ValueError(f"no {payload}")


@pytest.fixture
def ran() -> list[str]:
    """The payloads that the handler of "work" has got, in order."""
    payloads: list[str] = []
    register("work", payloads.append)
    return payloads


@pytest.fixture
def quick(configure: Configure, clock: Clock) -> Clock:
    """Backoff of 1 ms, ×1: due at the next whole second, which is one step of the clock away."""
    configure(BACKOFF_INITIAL=0.001, BACKOFF_MULTIPLIER=1)
    return clock


def row(job_id: str) -> Job:
    return Job.objects.get(pk=job_id)


def set_running(job_id: str, owner: str | None = None) -> None:
    Job.objects.filter(pk=job_id).update(status="running", claimed_by=owner)


def work_off() -> int:
    ticks = 0
    while tick():
        ticks += 1
    return ticks


def kill(job_type: str = "doomed", **options: Any) -> str:
    """A dead job."""
    register(job_type, fail)
    job_id = enqueue(job_type, "luck", max_retries=0, **options)
    assert tick()
    assert row(job_id).status == "failed"
    return job_id


# -- section 9: asserted by the original's tests


def test_T1_an_empty_queue_ticks_false() -> None:
    assert tick() is False


def test_T2_one_job_ticks_true_once_and_its_handler_gets_exactly_the_payload(ran: list[str]) -> None:
    payload = '{"exactly": "this"}  \n ünïcode ☃ 😀 %s \\'
    enqueue("work", payload)
    assert tick() is True
    assert ran == [payload]
    assert tick() is False
    assert not Job.objects.exists()


def test_T3_a_job_of_an_unregistered_type_is_tried_max_retries_plus_one_times(quick: Clock) -> None:
    job_id = enqueue("nobody's", max_retries=2)
    for _ in range(3):
        assert tick() is True
        quick.forward(1)
    assert tick() is False
    assert (row(job_id).status, row(job_id).attempts) == ("failed", 3)
    assert row(job_id).last_error == "no handler registered for job_type 'nobody's'"


def test_T4_a_job_that_fails_twice_is_called_three_times(quick: Clock) -> None:
    calls: list[str] = []

    def third_time_lucky(payload: str) -> None:
        calls.append(payload)
        if len(calls) < 3:
            raise RuntimeError("not yet")

    register("lucky", third_time_lucky)
    enqueue("lucky", "p", max_retries=5)
    for _ in range(3):
        assert tick() is True
        quick.forward(1)
    assert calls == ["p"] * 3
    assert tick() is False
    assert not Job.objects.exists()


def test_T5_a_row_left_running_by_a_worker_that_is_gone_is_rescued_and_runs_once(quick: Clock, ran: list[str]) -> None:
    job_id = enqueue("work", "left")
    set_running(job_id, owner="host:1:a-worker-without-a-row")
    assert tick() is False  # nothing is due, and an idle tick looks for the lost
    assert (row(job_id).status, row(job_id).claimed_by, row(job_id).attempts) == ("pending", None, 1)
    quick.forward(1)
    assert tick() is True
    assert ran == ["left"]
    assert tick() is False


def test_T5_a_row_of_a_worker_that_lives_is_left_alone(quick: Clock, ran: list[str]) -> None:
    owner = JobWorker.objects.create(id="host:1:alive", host="host", pid=1, started_at=NOW, beat_at=NOW, lease=30)
    job_id = enqueue("work", "held")
    set_running(job_id, owner=owner.pk)
    assert tick() is False
    assert (row(job_id).status, row(job_id).claimed_by) == ("running", owner.pk)
    assert ran == []


def test_T5_a_running_row_without_an_owner_is_another_programs(ran: list[str]) -> None:
    job_id = enqueue("work", "theirs")
    set_running(job_id)
    assert tick() is False
    assert row(job_id).status == "running"
    assert ran == []


def test_T6_the_past_job_runs_and_the_future_one_waits(clock: Clock, ran: list[str]) -> None:
    enqueue("work", "future", run_in=3600)
    enqueue("work", "past", run_at=clock.now - 10)
    assert tick() is True
    assert ran == ["past"]
    assert tick() is False
    clock.forward(3599)
    assert tick() is False
    clock.forward(1)
    assert tick() is True
    assert ran == ["past", "future"]


@pytest.mark.django_db(transaction=True)
def test_T7_twenty_jobs_on_four_threads_all_run_before_the_join_returns(
    start_worker: Callable[..., Any], ran: list[str]
) -> None:
    for number in range(20):
        enqueue("work", str(number))
    worker = start_worker(threads=4, drain=True)
    assert worker.wait(timeout=30)
    assert sorted(ran, key=int) == [str(number) for number in range(20)]
    assert not Job.objects.exists()


# -- section 9: promised by the original's documentation


def test_P1_larger_priority_first(ran: list[str]) -> None:
    for priority in (0, 10, -5):
        enqueue("work", str(priority), priority=priority)
    assert work_off() == 3
    assert ran == ["10", "0", "-5"]


def test_P1_of_equal_priority_the_earlier_due_first(ran: list[str]) -> None:
    for due in (3, 1, 2):
        enqueue("work", str(due), run_at=due)
    assert work_off() == 3
    assert ran == ["1", "2", "3"]


def test_P1_of_equal_due_time_the_earlier_created_first(clock: Clock, ran: list[str]) -> None:
    for payload, created in (("second", NOW), ("first", NOW - 1)):
        clock.move_to(created)
        enqueue("work", payload, run_at=5)
    clock.move_to(NOW)
    assert work_off() == 2
    assert ran == ["first", "second"]


def test_P1_of_the_same_second_the_earlier_enqueued_first(clock: Clock, ran: list[str]) -> None:
    with transaction.atomic():
        for payload in "ABC":
            enqueue("work", payload)
    assert work_off() == 3
    assert ran == ["A", "B", "C"]


def test_P1_order_holds_across_queues(ran: list[str]) -> None:
    enqueue("work", "low", queue="a", priority=-1)
    enqueue("work", "late", queue="b", run_at=20)
    enqueue("work", "early", queue="c", run_at=10)
    enqueue("work", "high", queue="z", priority=1)
    assert work_off() == 4
    assert ran == ["high", "early", "late", "low"]


def test_P1_order_holds_beyond_64_lanes(ran: list[str]) -> None:
    for number in range(70):
        enqueue("work", str(number), queue=f"queue {number}", priority=number % 35, run_at=1000 - number)
    for _ in range(4):
        assert tick()
    assert ran == ["69", "34", "68", "33"]
    assert tick(["queue 0", "queue 1"])
    assert ran[-1] == "1"


def test_P1_the_smallest_and_largest_priority(ran: list[str]) -> None:
    for priority in (-(2**63), 2**63 - 1, 0):
        enqueue("work", str(priority), priority=priority)
    assert work_off() == 3
    assert ran == [str(2**63 - 1), "0", str(-(2**63))]


def test_P2_only_the_named_queues_run(ran: list[str]) -> None:
    enqueue("work", "default")
    enqueue("work", "mail", queue="mailers")
    assert tick(["mailers"]) is True
    assert ran == ["mail"]
    assert tick(["mailers"]) is False
    assert tick(["Mailers", "mailers "]) is False
    assert tick() is True
    assert ran == ["mail", "default"]


@pytest.mark.parametrize("queues", [None, [], ()])
def test_P2_no_filter_runs_every_queue(queues: list[str] | None, ran: list[str]) -> None:
    enqueue("work", "default")
    enqueue("work", "mail", queue="mailers")
    assert tick(queues) is True
    assert tick(queues) is True
    assert sorted(ran) == ["default", "mail"]


def test_P2_a_text_is_not_a_list_of_queues() -> None:
    with pytest.raises(ValueError, match="queues"):
        tick("mailers")


@pytest.mark.parametrize("status", ["pending", "running"])
def test_P3_a_live_key_answers_the_same_id(status: str, ran: list[str]) -> None:
    first = enqueue("work", "first", unique_key="k")
    Job.objects.filter(pk=first).update(status=status)
    assert enqueue("work", "second", unique_key="k", queue="other", priority=9) == first
    assert Job.objects.count() == 1
    assert (row(first).payload, row(first).queue, row(first).priority) == ("first", "default", 0)


def test_P3_another_type_with_the_same_key_inserts() -> None:
    assert enqueue("one", unique_key="k") != enqueue("other", unique_key="k")
    assert Job.objects.count() == 2


def test_P3_after_completion_the_key_is_free(ran: list[str]) -> None:
    first = enqueue("work", unique_key="k")
    assert tick()
    assert enqueue("work", unique_key="k") != first


def test_P3_after_dead_letter_the_key_is_free() -> None:
    first = kill(unique_key="k")
    assert enqueue("doomed", unique_key="k") != first
    assert Job.objects.count() == 2


def test_P4_without_retries_the_first_failure_is_the_last() -> None:
    told: list[JobInfo] = []
    on_dead(told.append)
    register("doomed", fail)
    job_id = enqueue("doomed", "luck", max_retries=0)
    due = row(job_id).next_run_at
    assert tick() is True
    dead = row(job_id)
    assert (dead.status, dead.attempts, dead.last_error) == ("failed", 1, "ValueError: no luck")
    assert dead.next_run_at == due
    assert [(info.id, info.status, info.attempts, info.last_error) for info in told] == [
        (job_id, "failed", 1, "ValueError: no luck")
    ]
    assert failed_jobs() == told
    assert tick() is False


def test_P5_a_dead_job_is_retried(clock: Clock) -> None:
    job_id = kill()
    clock.forward(100)
    assert retry(job_id) is True
    again = row(job_id)
    assert (again.status, again.attempts, again.next_run_at) == ("pending", 0, NOW + 100)
    assert again.last_error == "ValueError: no luck"
    ran: list[str] = []
    register("doomed", ran.append)
    assert tick() is True
    assert ran == ["luck"]
    assert retry(job_id) is False


@pytest.mark.parametrize("status", ["pending", "running"])
def test_P5_a_job_that_is_not_dead_is_not_retried(status: str) -> None:
    job_id = enqueue("work", run_at=5)
    Job.objects.filter(pk=job_id).update(status=status, attempts=2)
    assert retry(job_id) is False
    assert (row(job_id).status, row(job_id).attempts, row(job_id).next_run_at) == (status, 2, 5)


UNKNOWN_IDS = ["", "unknown", "x" * 300, "a\x00b", "\ud800", "é"]


@pytest.mark.parametrize("job_id", UNKNOWN_IDS, ids=ascii)
def test_P5_an_unknown_id_is_not_retried(job_id: str) -> None:
    kept = kill()
    assert retry(job_id) is False
    assert row(kept).status == "failed"


def test_P6_a_pending_job_is_deleted() -> None:
    job_id = enqueue("work")
    assert delete(job_id) is True
    assert not Job.objects.exists()


def test_P6_a_dead_job_is_deleted() -> None:
    job_id = kill()
    assert delete(job_id) is True
    assert not Job.objects.exists()


def test_P6_a_running_job_is_not_deleted() -> None:
    job_id = enqueue("work")
    set_running(job_id, owner="w")
    assert delete(job_id) is False
    assert row(job_id).status == "running"


@pytest.mark.parametrize("job_id", UNKNOWN_IDS, ids=ascii)
def test_P6_an_unknown_id_is_not_deleted(job_id: str) -> None:
    kept = enqueue("work")
    assert delete(job_id) is False
    assert row(kept).status == "pending"


def test_P7_jobs_are_listed_in_claim_order() -> None:
    dead = kill(priority=5)
    late, early = enqueue("work", run_at=20), enqueue("work", run_at=10)
    first = enqueue("work", run_at=10**9 * 5, priority=7)
    running = enqueue("work", run_at=15)
    set_running(running)
    assert [info.id for info in jobs()] == [first, dead, early, running, late]
    assert [info.id for info in jobs(limit=2)] == [first, dead]
    assert [info.id for info in jobs("pending")] == [first, early, late]
    assert [info.id for info in jobs("pending", 1)] == [first]
    assert [info.id for info in jobs("running")] == [running]
    assert [info.id for info in jobs("failed")] == [info.id for info in failed_jobs()] == [dead]
    assert jobs(limit=0) == failed_jobs(0) == []


@pytest.mark.parametrize("status", ["done", "", "PENDING", "pending ", "x" * 300, "a\x00b", "\ud800"], ids=ascii)
def test_P7_an_unknown_status_is_an_empty_list(status: str) -> None:
    enqueue("work")
    assert jobs(status) == []


def test_P7_a_negative_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="limit"):
        jobs(limit=-1)


def test_P7_an_info_has_all_that_the_original_tells(clock: Clock) -> None:
    job_id = enqueue("work", "p", queue="q", priority=-3, run_in=60, unique_key="k", max_retries=9)
    assert jobs() == [
        JobInfo(
            id=job_id,
            job_type="work",
            payload="p",
            queue="q",
            priority=-3,
            status="pending",
            attempts=0,
            max_retries=9,
            run_at=NOW + 60,
            created_at=NOW,
            last_error=None,
            unique_key="k",
        )
    ]


class Replica:
    """A process of its own as far as schedules go: what it declares, and what it has stored of that."""

    def __init__(self) -> None:
        self._declared: dict[str, Any] = {}

    @contextmanager
    def _active(self) -> Iterator[None]:
        mine, schedules._declared = self._declared, schedules._declared
        others = dict(schedules._declared)
        schedules._declared.clear()
        schedules._declared.update(mine)
        try:
            yield
        finally:
            self._declared = dict(schedules._declared)
            schedules._declared.clear()
            schedules._declared.update(others)

    def schedule(self, *args: Any, **options: Any) -> None:
        with self._active():
            schedule(*args, **options)

    def tick(self) -> int:
        with self._active():
            return tick_schedules()


def due(name: str = "nightly") -> int:
    return int(JobSchedule.objects.values_list("next_run_at", flat=True).get(pk=name))


def test_P8_of_two_replicas_one_enqueues(clock: Clock) -> None:
    one, other = Replica(), Replica()
    for replica in (one, other):
        replica.schedule("nightly", "0 * * * * *", "work", payload="p")
        assert replica.tick() == 0
    clock.move_to(due())
    assert (one.tick(), other.tick()) == (1, 0)
    assert [(info.job_type, info.payload) for info in jobs()] == [("work", "p")]
    clock.forward(60)
    assert (other.tick(), one.tick()) == (1, 0)
    assert len(jobs()) == 2


def test_P9_at_first_sight_nothing_runs_and_the_row_is_the_next_time(clock: Clock) -> None:
    schedule("nightly", "0 * * * * *", "work")
    clock.move_to(NOW)  # itself a matching second: the next one is strictly after it
    assert tick_schedules() == 0
    assert due() == NOW + 60
    assert jobs() == []


def test_P10_missed_times_collapse_into_one_run(clock: Clock) -> None:
    schedule("nightly", "0 * * * * *", "work")
    tick_schedules()
    clock.forward(3 * 3600 + 30)
    assert tick_schedules() == 1
    assert len(jobs()) == 1
    assert due() == NOW + 3 * 3600 + 60
    assert tick_schedules() == 0


@pytest.mark.parametrize(
    "cron",
    [
        "",
        "* * * *",
        "* * * * * * *",
        "60 * * * * *",
        "* * 24 * * *",
        "a b c d e f",
        "0 0 0 30 2 *",
        "0 0 31 2 *",
        "\x00",
    ],
    ids=ascii,
)
def test_P11_an_invalid_cron_is_an_error_where_it_is_declared(cron: str) -> None:
    with pytest.raises(CronError) as raised:
        schedule("nightly", cron, "work")
    assert str(raised.value)
    assert tick_schedules() == 0
    assert not JobSchedule.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_P12_the_table_of_an_older_original_is_adopted_and_its_rows_run(ran: list[str]) -> None:
    def drop() -> None:
        call_command("migrate", "rws_jobs", "zero", verbosity=0)

    drop()
    try:
        original.run(original.NINE_COLUMNS)
        original.run(original.INSERT, "18c0-0", "work", "old", 1, 1)
        call_command("migrate", "rws_jobs", verbosity=0)
        (info,) = jobs()
        assert (info.id, info.queue, info.priority, info.unique_key) == ("18c0-0", "default", 0, None)
        assert tick(["default"]) is True
        assert ran == ["old"]
        assert tick() is False
    finally:
        if not MigrationRecorder(connection).migration_qs.filter(app="rws_jobs").exists():
            original.run("DROP TABLE rws_jobs")
        else:
            drop()
        call_command("migrate", "rws_jobs", verbosity=0)


@pytest.mark.django_db(transaction=True)
def test_P13_stop_ends_the_threads_and_a_started_job_is_finished(start_worker: Callable[..., Any]) -> None:
    started, gate, finished = Event(), Event(), Event()
    others = set(all_threads())

    def slow(payload: str) -> None:
        started.set()
        assert gate.wait(30)
        finished.set()

    register("slow", slow)
    enqueue("slow", "first")
    waiting = enqueue("slow", "second")
    worker = start_worker(threads=1)
    assert started.wait(30)
    assert worker.stop(timeout=0) is False
    gate.set()
    assert worker.stop(timeout=30) is True
    assert finished.is_set()
    wait_for(
        lambda: not [thread for thread in set(all_threads()) - others if thread is not current_thread()],
        what="the threads of the worker to end",
    )
    assert [(info.id, info.status, info.attempts) for info in jobs()] == [(waiting, "pending", 0)]
    assert not JobWorker.objects.exists()


def test_P14_a_schedule_passes_its_options_to_its_jobs(clock: Clock) -> None:
    schedule("nightly", "0 * * * * *", "work", payload="p", queue="q", priority=7, unique_key="k", max_retries=9)
    tick_schedules()
    clock.move_to(due())
    assert tick_schedules() == 1
    (info,) = jobs()
    assert (info.job_type, info.payload, info.queue, info.priority) == ("work", "p", "q", 7)
    assert (info.unique_key, info.max_retries, info.run_at) == ("k", 9, NOW + 60)


# -- section 3: enqueue


def test_enqueue_inserts_a_pending_job_due_now(clock: Clock) -> None:
    clock.forward(0.75)
    job_id = enqueue("nobody's", "p")
    found = row(job_id)
    assert (found.status, found.attempts, found.max_retries) == ("pending", 0, 3)
    assert (found.next_run_at, found.created_at) == (NOW, NOW)
    assert (found.queue, found.priority, found.unique_key, found.last_error) == ("default", 0, None, None)
    assert (found.claimed_by, found.claimed_at) == (None, None)


def test_enqueue_answers_the_id_in_the_originals_shape() -> None:
    time_part, dash, rest = enqueue("work").partition("-")
    assert dash
    assert int(time_part, 16) > 10**18
    assert int(rest, 16) >= 0


def test_enqueue_raises_the_databases_error() -> None:
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(DatabaseError):
            enqueue("work")
    assert jobs() == []


# -- sections 4 and 5: claim, execute, finish


def test_a_claim_changes_the_status_and_the_owner_only() -> None:
    seen: list[Job] = []
    register("look", lambda payload: seen.append(Job.objects.get()))
    job_id = enqueue("look", "p", run_at=77, priority=3, unique_key="k")
    before = row(job_id)
    assert tick()
    (claimed,) = seen
    assert claimed.status == "running"
    assert claimed.claimed_by
    assert claimed.claimed_at
    for column in ("id", "job_type", "payload", "attempts", "max_retries", "next_run_at", "created_at", "last_error"):
        assert getattr(claimed, column) == getattr(before, column)
    assert (claimed.queue, claimed.priority, claimed.unique_key) == ("default", 3, "k")


def test_a_tick_runs_one_job(ran: list[str]) -> None:
    enqueue("work", "1")
    enqueue("work", "2")
    assert tick() is True
    assert ran == ["1"]


def test_a_tick_is_true_whatever_became_of_the_job() -> None:
    register("doomed", fail)
    enqueue("doomed", "luck", max_retries=1)
    enqueue("nobody's", run_at=99)
    assert tick() is True
    assert tick() is True


def test_a_tick_raises_the_databases_error() -> None:
    enqueue("work")
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(DatabaseError):
            tick()


def test_a_tick_leaves_no_worker_behind(ran: list[str]) -> None:
    enqueue("work")
    assert tick()
    assert not JobWorker.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_handler_sees_its_worker_registered_and_committed(elsewhere: Callable[..., Any]) -> None:
    seen: list[bool] = []

    def look(payload: str) -> None:
        owner = Job.objects.get().claimed_by
        seen.append(elsewhere(lambda: JobWorker.objects.filter(pk=owner).exists()).result(30))

    register("look", look)
    enqueue("look")
    assert tick()
    assert seen == [True]


def test_default_retries_are_due_after_half_one_and_two_seconds_rounded_up(clock: Clock) -> None:
    register("doomed", fail)
    job_id = enqueue("doomed", "luck")
    offsets = []
    for attempt in (1, 2, 3):
        assert tick()
        failed = row(job_id)
        assert (failed.status, failed.attempts, failed.last_error) == ("pending", attempt, "ValueError: no luck")
        assert failed.claimed_by is None
        offsets.append(failed.next_run_at - int(clock.now))
        clock.move_to(failed.next_run_at - 1)
        assert tick() is False
        clock.forward(1)
    assert offsets == [1, 1, 2]
    assert tick()
    assert (row(job_id).status, row(job_id).attempts, row(job_id).claimed_by) == ("failed", 4, None)


def test_max_retries_is_read_at_enqueue(configure: Configure) -> None:
    configure(MAX_RETRIES=7)
    job_id = enqueue("work")
    configure(MAX_RETRIES=1)
    assert row(job_id).max_retries == 7


def test_the_backoff_of_the_settings_is_read_when_a_job_fails(clock: Clock, configure: Configure) -> None:
    register("doomed", fail)
    job_id = enqueue("doomed", "luck")
    configure(BACKOFF_INITIAL=100, BACKOFF_MULTIPLIER=3)
    assert tick()
    assert row(job_id).next_run_at == NOW + 100
    clock.forward(100)
    assert tick()
    assert row(job_id).next_run_at == NOW + 400


# -- section 6: administration


def test_retry_keeps_everything_but_status_attempts_and_due_time() -> None:
    job_id = kill(queue="q", priority=4, unique_key="k", run_at=50)
    before = row(job_id)
    assert retry(job_id)
    after = row(job_id)
    for column in ("payload", "last_error", "created_at", "priority", "queue", "unique_key", "max_retries", "history"):
        assert getattr(after, column) == getattr(before, column)
    assert after.next_run_at > before.next_run_at


def test_a_job_enqueued_by_another_program_runs(ran: list[str]) -> None:
    original.run(original.INSERT, "18c0-0", "work", "theirs", DUE_NOW, DUE_NOW)
    assert tick() is True
    assert ran == ["theirs"]
    assert not Job.objects.exists()


def test_register_again_replaces_the_handler() -> None:
    first: list[str] = []
    second: list[str] = []
    register("work", first.append)
    register("work", second.append)
    enqueue("work", "p")
    assert tick()
    assert (first, second) == ([], ["p"])


@pytest.mark.parametrize("unknown_jobs", ["fail", "leave"])
@pytest.mark.django_db(transaction=True)
def test_register_may_happen_after_start(
    unknown_jobs: str, configure: Configure, start_worker: Callable[..., Any]
) -> None:
    configure(UNKNOWN_JOBS=unknown_jobs)
    ran = Event()
    start_worker()
    register("late", lambda payload: ran.set())
    enqueue("late")
    assert ran.wait(15), "a handler registered while a worker runs is used by it"


# -- section 7: schedules


def test_a_schedule_of_a_job_function_carries_its_arguments_and_its_due_time(clock: Clock) -> None:
    seen: list[tuple[str, int | None]] = []

    @job("report", queue="reports")
    def report(kind: str) -> None:
        from rws_jobs import current_job

        seen.append((kind, current_job().scheduled_for))

    schedule("nightly", "0 0 2 * * *", report, kwargs={"kind": "full"}, timezone="Europe/Paris")
    tick_schedules()
    two_in_paris = int(datetime(2027, 1, 16, 2, tzinfo=ZoneInfo("Europe/Paris")).timestamp())
    assert due() == two_in_paris
    clock.move_to(two_in_paris + 7)
    assert tick_schedules() == 1
    assert tick(["reports"])
    assert seen == [("full", two_in_paris)]


def test_the_count_is_of_jobs_inserted_not_of_those_that_a_unique_key_swallowed(clock: Clock) -> None:
    schedule("nightly", "0 * * * * *", "work", unique_key="k")
    tick_schedules()
    clock.forward(60)
    assert tick_schedules() == 1
    clock.forward(60)
    assert tick_schedules() == 0
    assert due() == NOW + 180
    assert len(jobs()) == 1


def test_a_stored_row_of_the_originals_fires_once_when_its_past_due(clock: Clock) -> None:
    JobSchedule.objects.create(name="nightly", next_run_at=NOW - 500)
    schedule("nightly", "0 0 0 * * *", "work")
    assert tick_schedules() == 1
    assert due() == NOW + 16 * 3600
    assert tick_schedules() == 0


def test_a_stored_row_of_the_originals_keeps_its_due_time(clock: Clock) -> None:
    JobSchedule.objects.create(name="nightly", next_run_at=NOW + 5)
    schedule("nightly", "0 0 0 * * *", "work")
    assert tick_schedules() == 0
    assert due() == NOW + 5


def test_without_schedules_a_tick_asks_nothing(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        assert tick_schedules() == 0


@pytest.mark.parametrize(
    ("args", "options", "error", "match"),
    [
        (("", "0 0 0 * * *", "work"), {}, ValueError, "schedule name"),
        (("x" * 192, "0 0 0 * * *", "work"), {}, ValueError, "schedule name"),
        (("a\x00b", "0 0 0 * * *", "work"), {}, ValueError, "schedule name"),
        ((None, "0 0 0 * * *", "work"), {}, TypeError, "schedule name"),
        (("n", "0 0 0 * * *", ""), {}, ValueError, "job_type"),
        (("n", "0 0 0 * * *", 5), {}, TypeError, "job_type"),
        (("n", "0 0 0 * * *", "work"), {"timezone": "Mars/Base"}, CronError, "Mars/Base"),
        (("n", "0 0 0 * * *", "work"), {"kwargs": {}}, TypeError, "kwargs"),
        (("n", "0 0 0 * * *", "work"), {"payload": "\x00"}, ValueError, "payload"),
        (("n", "0 0 0 * * *", "work"), {"queue": ""}, ValueError, "queue"),
        (("n", "0 0 0 * * *", "work"), {"priority": "high"}, TypeError, "priority"),
        (("n", "0 0 0 * * *", "work"), {"bogus": 1}, TypeError, "bogus"),
    ],
)
def test_bad_declarations_are_refused(args: Any, options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        schedule(*args, **options)
    assert not schedules.declared()


def test_a_schedule_with_one_fixed_time_is_refused() -> None:
    """A run_at would be one instant for all runs (W35)."""
    with pytest.raises(TypeError, match="run_at"):
        schedule("nightly", "0 0 0 * * *", "work", run_at=5)


def test_a_schedules_arguments_are_bound_where_it_is_declared() -> None:
    @job("report")
    def report(kind: str) -> None: ...

    with pytest.raises(TypeError, match="kind"):
        schedule("nightly", "0 0 0 * * *", report)
    with pytest.raises(TypeError, match="payload"):
        schedule("nightly", "0 0 0 * * *", report, payload="{}")
    assert not schedules.declared()


# -- schedules in the field


@pytest.mark.django_db(transaction=True)
def test_S034_five_processes_run_each_time_once(clock: Clock, elsewhere: Callable[..., Any]) -> None:
    schedule("minutely", "* * * * *", "work")
    barrier = Barrier(5, timeout=30)

    def replica() -> int:
        barrier.wait()
        return tick_schedules()

    for minute in range(6):
        inserted = sum(future.result(30) for future in [elsewhere(replica) for _ in range(5)])
        assert inserted == min(minute, 1)
        assert len(jobs()) == minute
        assert due("minutely") == NOW + 60 * (minute + 1)
        clock.forward(60)


def test_S035_after_downtime_one_run_for_all_that_was_missed(clock: Clock) -> None:
    clock.move_to(datetime(2027, 1, 15, 8, 59, 30, tzinfo=UTC))
    schedule("minutely", "* * * * *", "work")
    tick_schedules()
    clock.move_to(datetime(2027, 1, 15, 12, 0, 30, tzinfo=UTC))
    assert tick_schedules() == 1
    clock.forward(29)
    assert tick_schedules() == 0
    clock.forward(1)
    assert tick_schedules() == 1


def test_S036_after_four_days_off_each_runs_once(clock: Clock) -> None:
    schedule("often", "*/5 * * * *", "work")
    schedule("daily", "0 6 * * *", "work")
    tick_schedules()
    clock.forward(4 * 86_400)
    assert tick_schedules() == 2
    assert tick_schedules() == 0


def test_S036_a_clock_that_jumps_forward_makes_one_run(clock: Clock) -> None:
    schedule("often", "*/5 * * * *", "work")
    schedule("daily", "0 6 * * *", "work")
    tick_schedules()
    clock.forward(2 * 3600)
    assert tick_schedules() == 1
    assert tick_schedules() == 0


def test_S036_a_clock_that_jumps_back_repeats_nothing_and_resumes(clock: Clock) -> None:
    schedule("often", "*/5 * * * *", "work")
    tick_schedules()
    clock.forward(300)
    assert tick_schedules() == 1
    fired = int(clock.now)
    clock.forward(-3600)
    while clock.now <= fired:
        assert tick_schedules() == 0
        clock.forward(60)
    clock.move_to(fired + 300)
    assert tick_schedules() == 1


def test_S037_a_paused_schedule_lets_its_times_pass_and_waits_for_the_next(clock: Clock) -> None:
    clock.move_to(datetime(2027, 1, 15, 8, 10, tzinfo=UTC))
    schedule("hourly", "0 * * * *", "work")
    tick_schedules()
    JobSchedule.objects.update(paused=True)
    while clock.now < datetime(2027, 1, 15, 10, 20, tzinfo=UTC).timestamp():
        assert tick_schedules() == 0
        clock.forward(60)
    JobSchedule.objects.update(paused=False)
    assert tick_schedules() == 0
    assert due("hourly") == datetime(2027, 1, 15, 11, tzinfo=UTC).timestamp()
    clock.move_to(due("hourly"))
    assert tick_schedules() == 1


def test_S037_paused_while_no_worker_ran_it_still_waits_for_the_next_time(clock: Clock) -> None:
    """Nobody ticked between pausing and resuming: the row still shows the time that passed while it was paused."""
    clock.move_to(datetime(2027, 1, 15, 8, 10, tzinfo=UTC))
    schedule("hourly", "0 * * * *", "work")
    tick_schedules()
    JobSchedule.objects.update(paused=True)
    clock.move_to(datetime(2027, 1, 15, 10, 20, tzinfo=UTC))
    assert tick_schedules() == 0
    JobSchedule.objects.update(paused=False)
    assert tick_schedules() == 0


def test_S038_a_new_schedule_first_runs_at_its_next_time(clock: Clock) -> None:
    clock.move_to(datetime(2027, 1, 15, 14, 2, tzinfo=UTC))
    schedule("daily", "0 15 * * *", "work")
    ran = []
    while clock.now < datetime(2027, 1, 15, 15, 2, tzinfo=UTC).timestamp():
        if tick_schedules():
            ran.append(datetime.fromtimestamp(clock.now, UTC).strftime("%H:%M"))
        clock.forward(60)
    assert ran == ["15:00"]


def test_S039_a_changed_expression_takes_effect_and_is_no_run_itself(clock: Clock) -> None:
    ran = []

    def live_until(hour: int, minute: int, replica: Replica, day: int = 15) -> None:
        while clock.now < datetime(2027, 1, day, hour, minute, tzinfo=UTC).timestamp():
            if replica.tick():
                ran.append(datetime.fromtimestamp(clock.now, UTC).strftime("%d %H:%M"))
            clock.forward(60)

    clock.move_to(datetime(2027, 1, 15, 11, 55, tzinfo=UTC))
    for cron, until in (("0 0 * * *", (12, 2)), ("*/5 * * * *", (12, 7)), ("0 0 * * *", (12, 30))):
        deployed = Replica()
        deployed.schedule("nightly", cron, "work")
        live_until(*until, deployed)
    assert ran == ["15 12:05"]
    assert due() == datetime(2027, 1, 16, tzinfo=UTC).timestamp()


def test_S039_a_changed_time_zone_moves_the_due_time(clock: Clock) -> None:
    before, after = Replica(), Replica()
    before.schedule("nightly", "0 12 * * *", "work")
    before.tick()
    after.schedule("nightly", "0 12 * * *", "work", timezone="Europe/Paris")
    assert after.tick() == 0
    assert due() == datetime(2027, 1, 15, 11, tzinfo=UTC).timestamp()


def test_S039_new_arguments_and_options_hold_from_the_next_due_time(clock: Clock) -> None:
    before, after = Replica(), Replica()
    before.schedule("nightly", "0 12 * * *", "work", payload="old")
    before.tick()
    was_due = due()
    after.schedule("nightly", "0 12 * * *", "work", payload="new", queue="q")
    assert after.tick() == 0
    assert due() == was_due
    clock.move_to(was_due)
    assert before.tick() == 1  # even where the old code ticks first: what is stored runs
    assert [(info.payload, info.queue) for info in jobs()] == [("new", "q")]


def test_S039_a_time_missed_before_the_change_is_not_lost(clock: Clock) -> None:
    before, after = Replica(), Replica()
    before.schedule("nightly", "0 12 * * *", "work")
    before.tick()
    clock.move_to(due() + 60)
    after.schedule("nightly", "0 18 * * *", "work")
    assert after.tick() == 1
    assert due() == datetime(2027, 1, 15, 18, tzinfo=UTC).timestamp()


def test_S040_a_schedule_removed_from_the_code_does_not_fire_and_stays_listed(clock: Clock) -> None:
    before, after = Replica(), Replica()
    before.schedule("nightly", "* * * * *", "work")
    before.schedule("other", "* * * * *", "work")
    before.tick()
    after.schedule("other", "* * * * *", "work")
    clock.forward(3600)
    assert after.tick() == 1
    assert set(JobSchedule.objects.values_list("pk", flat=True)) == {"nightly", "other"}


BROKEN = {
    "no expression": {"cron": ""},
    "a minute too many": {"cron": "60 * * * *"},
    "a date that never comes": {"cron": "0 0 31 2 *"},
    "a hundred thousand characters": {"cron": "0," * 50_000 + "0 * * * *"},
    "an unknown zone": {"timezone": "Mars/Base"},
    "options that are no JSON": {"options": "{not json"},
    "options that are no object": {"options": "[1]"},
    "options that nobody knows": {"options": '{"bogus": 1}'},
    "options nested without end": {"options": "[" * 100_000},
    "a queue without a name": {"options": '{"queue": ""}'},
    "no job type": {"job_type": None},
    "an empty job type": {"job_type": ""},
}


@pytest.mark.parametrize("values", BROKEN.values(), ids=BROKEN)
def test_S041_S042_a_broken_row_is_one_error_and_the_others_go_on(
    values: dict[str, Any], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a good one", "broken", "one more"):
        schedule(name, "* * * * *", "work")
    tick_schedules()
    JobSchedule.objects.filter(pk="broken").update(**values)
    for _ in range(3):
        clock.forward(60)
        assert tick_schedules() == 2
    assert len(jobs()) == 6
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "'broken'" in errors[0]
    assert len(errors[0]) < 2000


def test_S043_six_fields_begin_with_seconds_and_five_with_minutes(clock: Clock) -> None:
    schedule("six", "*/10 * * * * *", "work")
    schedule("five", "*/10 * * * *", "work")
    tick_schedules()
    assert (due("six"), due("five")) == (NOW + 10, NOW + 600)


@pytest.mark.parametrize("use_tz", [True, False])
def test_S044_a_zone_of_its_own_whatever_USE_TZ_says(use_tz: bool, clock: Clock, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Shanghai"
    schedule("daily", "30 9 * * *", "work", timezone="Asia/Shanghai")
    tick_schedules()
    ran = []
    while clock.now < NOW + 86_400:
        ran += [int(clock.now)] * tick_schedules()
        clock.forward(600)
    assert ran == [datetime(2027, 1, 16, 1, 30, tzinfo=UTC).timestamp()]


def test_S045_a_zone_with_odd_minutes(clock: Clock) -> None:
    schedule("nepal", "0 6 * * *", "work", timezone="Asia/Kathmandu")
    schedule("brussels", "0 6 * * *", "work", timezone="Europe/Brussels")
    tick_schedules()
    assert due("nepal") == datetime(2027, 1, 16, 0, 15, tzinfo=UTC).timestamp()
    assert due("brussels") == datetime(2027, 1, 16, 5, 0, tzinfo=UTC).timestamp()


def test_S046_a_tick_that_comes_late_runs_once(clock: Clock) -> None:
    schedule("daily", "0 12 * * *", "work")
    tick_schedules()
    clock.move_to(due("daily") + 90)
    assert tick_schedules() == 1
    clock.forward(1)
    assert tick_schedules() == 0


def test_S047_a_hundred_and_fifty_schedules_each_run_once_a_day(clock: Clock) -> None:
    clock.move_to(datetime(2027, 1, 14, 23, 59, 59, tzinfo=UTC))
    one, other = Replica(), Replica()
    for number in range(150):
        for replica in (one, other):
            replica.schedule(f"daily {number}", f"{number * 7 % 60} {number % 24} * * *", "work", payload=str(number))
    for replica in (one, other):
        assert replica.tick() == 0
    for _ in range(144):
        clock.forward(600)
        assert one.tick() + other.tick() < 20
    assert sorted(int(info.payload) for info in jobs(limit=1000)) == list(range(150))


def test_S047_what_an_idle_tick_asks_does_not_grow_with_schedules(clock: Clock, django_assert_num_queries: Any) -> None:
    for number in range(100):
        schedule(f"daily {number}", "0 12 * * *", "work")
    tick_schedules()
    tick_schedules()
    with django_assert_num_queries(1):
        assert tick_schedules() == 0


def test_S048_one_function_on_two_schedules_runs_for_both(clock: Clock) -> None:
    @job("report")
    def report(kind: str) -> None: ...

    schedule("one", "* * * * *", report, kwargs={"kind": "a"}, queue="a")
    schedule("two", "* * * * *", report, kwargs={"kind": "b"}, queue="b")
    tick_schedules()
    clock.forward(60)
    assert tick_schedules() == 2
    assert [(info.queue, info.payload) for info in jobs()] == [("a", '{"kind":"a"}'), ("b", '{"kind":"b"}')]


def test_S048_a_name_declared_twice_is_an_error() -> None:
    schedule("nightly", "0 0 * * *", "work")
    with pytest.raises(ValueError, match="'nightly'"):
        schedule("nightly", "0 1 * * *", "work")
    assert schedules.declared()["nightly"].cron == "0 0 * * *"


def test_S049_with_a_unique_key_a_long_run_does_not_pile_up(clock: Clock) -> None:
    schedule("minutely", "* * * * *", "work", unique_key="minutely")
    tick_schedules()
    clock.forward(60)
    assert tick_schedules() == 1
    Job.objects.update(status="running", claimed_by="w")
    for _ in range(5):
        clock.forward(60)
        assert tick_schedules() == 0
    assert len(jobs()) == 1
    Job.objects.all().delete()
    clock.forward(60)
    assert tick_schedules() == 1


def test_S049_without_a_key_each_time_makes_one_job(clock: Clock) -> None:
    schedule("minutely", "* * * * *", "work")
    tick_schedules()
    for _ in range(5):
        clock.forward(60)
        assert tick_schedules() == 1
    assert len(jobs()) == 5


def test_a_run_and_its_due_time_are_committed_together(clock: Clock) -> None:
    """When the insert fails, the due time stays: the run is not lost (W29)."""
    schedule("nightly", "* * * * *", "work")
    tick_schedules()
    was_due = due()
    JobSchedule.objects.update(options='{"queue": ""}')
    clock.forward(60)
    assert tick_schedules() == 0
    assert due() == was_due
    JobSchedule.objects.update(options="{}")
    clock.forward(3600)
    assert tick_schedules() == 1


def test_a_schedule_counts_from_the_databases_clock() -> None:
    schedule("hourly", "0 * * * *", "work")
    assert tick_schedules() == 0
    ahead = due("hourly") - datetime.now(UTC).timestamp()
    assert -5 <= ahead <= 3605
