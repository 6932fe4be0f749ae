"""Who is told of what: on_dead hooks and signals, once each, after the commit, each by itself."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import transaction

from rws_jobs import Discard, Retry, Snooze, enqueue, job, jobs, on_dead, register, tick
from rws_jobs.clock import UnixNow
from rws_jobs.info import JobInfo
from rws_jobs.models import Job, JobWorker
from rws_jobs.signals import (
    claim_lost,
    job_dead,
    job_enqueued,
    job_retrying,
    job_started,
    job_succeeded,
    worker_lost,
)

from .waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

Elsewhere = Callable[..., Any]
StartWorker = Callable[..., Any]
WorkOff = Callable[[], None]

JOB_SIGNALS = {
    "enqueued": job_enqueued,
    "started": job_started,
    "succeeded": job_succeeded,
    "retrying": job_retrying,
    "dead": job_dead,
    "lost": claim_lost,
}


@pytest.fixture(params=["tick", "Worker"])
def work_off(request: pytest.FixtureRequest, start_worker: StartWorker) -> WorkOff:
    """Run all that is due, by hand or by a worker with its threads."""

    def by_hand() -> None:
        while Job.objects.pending().filter(next_run_at__lte=UnixNow()).exists():
            assert tick()

    def by_worker() -> None:
        worker = start_worker(threads=1, drain=True)
        assert worker.wait(30)

    return by_hand if request.param == "tick" else by_worker


@pytest.fixture
def told() -> dict[str, list[JobInfo]]:
    """What each signal of a job has been sent with."""
    received: dict[str, list[JobInfo]] = defaultdict(list)

    def listen(name: str) -> Callable[..., None]:
        def receiver(sender: object, job: JobInfo, **kwargs: object) -> None:
            assert sender is Job
            received[name].append(job)

        return receiver

    for name, signal in JOB_SIGNALS.items():
        signal.connect(listen(name), weak=False)
    return received


def summary(told: dict[str, list[JobInfo]]) -> dict[str, list[tuple[str, int, str | None]]]:
    return {
        name: [(info.status, info.attempts, info.last_error) for info in infos]
        for name, infos in told.items()
        if name != "enqueued"
    }


def fail(payload: str) -> None:
    raise ValueError("why")


# -- each end, once, with the right info


def test_a_success(work_off: WorkOff, told: dict[str, list[JobInfo]]) -> None:
    register("work", lambda payload: None)
    job_id = enqueue("work", "p", queue="q", priority=2, unique_key="k", max_retries=1, run_at=5)
    work_off()
    assert summary(told) == {"started": [("running", 0, None)], "succeeded": [("succeeded", 0, None)]}
    (info,) = told["succeeded"]
    assert (info.id, info.job_type, info.payload, info.queue, info.priority) == (job_id, "work", "p", "q", 2)
    assert (info.max_retries, info.run_at, info.unique_key) == (1, 5, "k")
    assert info.created_at == told["enqueued"][0].created_at


def test_an_atomic_success(work_off: WorkOff, told: dict[str, list[JobInfo]]) -> None:
    @job("work", atomic=True)
    def work() -> None: ...

    work.enqueue()
    work_off()
    assert summary(told) == {"started": [("running", 0, None)], "succeeded": [("succeeded", 0, None)]}


@pytest.mark.parametrize("error", [ValueError("why"), Retry(3600)], ids=repr)
def test_a_failure_with_attempts_left(error: Exception, work_off: WorkOff, told: dict[str, list[JobInfo]]) -> None:
    @job("work", backoff=lambda attempt, exception: 3600)
    def work() -> None:
        raise error

    work.enqueue()
    work_off()
    text = f"{type(error).__name__}: {error}"
    assert summary(told) == {"started": [("running", 0, None)], "retrying": [("pending", 1, text)]}


@pytest.mark.parametrize(("error", "text"), [(ValueError("why"), "ValueError: why"), (Discard("no use"), "no use")])
def test_a_death(error: Exception, text: str, work_off: WorkOff, told: dict[str, list[JobInfo]]) -> None:
    dead: list[JobInfo] = []
    on_dead(dead.append)

    @job("work", max_retries=1)
    def work() -> None:
        raise error

    Job.objects.filter(pk=work.enqueue()).update(attempts=1)
    work_off()
    assert summary(told) == {"started": [("running", 1, None)], "dead": [("failed", 2, text)]}
    assert dead == told["dead"] == jobs("failed")


def test_a_snooze_is_neither(work_off: WorkOff, told: dict[str, list[JobInfo]]) -> None:
    @job("work")
    def work() -> None:
        raise Snooze(3600)

    work.enqueue()
    work_off()
    assert summary(told) == {"started": [("running", 0, None)]}


def test_a_job_without_a_handler_was_started_all_the_same(work_off: WorkOff, told: dict[str, list[JobInfo]]) -> None:
    enqueue("nobody's", max_retries=0)
    work_off()
    text = "no handler registered for job_type 'nobody's'"
    assert summary(told) == {"started": [("running", 0, None)], "dead": [("failed", 1, text)]}


def test_started_is_sent_in_the_thread_of_the_job_before_it(work_off: WorkOff) -> None:
    seen: list[tuple[str, int]] = []
    job_started.connect(lambda **kwargs: seen.append(("started", threading.get_ident())), weak=False)
    register("work", lambda payload: seen.append(("handler", threading.get_ident())))
    enqueue("work")
    work_off()
    assert [name for name, _ in seen] == ["started", "handler"]
    assert seen[0][1] == seen[1][1]


def test_all_of_many_are_told_before_a_worker_has_stopped(
    start_worker: StartWorker, told: dict[str, list[JobInfo]]
) -> None:
    dead: list[JobInfo] = []
    on_dead(dead.append)
    register("work", lambda payload: None)
    register("doomed", fail)
    for _ in range(40):
        enqueue("work")
        enqueue("doomed", max_retries=0)
    assert start_worker(threads=3, drain=True).wait(60)
    assert len(told["succeeded"]) == len({info.id for info in told["succeeded"]}) == 40
    assert len(told["dead"]) == len({info.id for info in told["dead"]}) == 40
    assert sorted(info.id for info in dead) == sorted(info.id for info in told["dead"])
    assert len(told["started"]) == 80


def test_what_is_told_is_committed(work_off: WorkOff, elsewhere: Elsewhere) -> None:
    seen: dict[str, Any] = {}

    def look(job: JobInfo, signal: Any = None, **kwargs: object) -> None:
        row = elsewhere(Job.objects.filter(pk=job.id).values_list("status", "attempts", "claimed_by").first)
        name = "hook" if signal is None else next(name for name, one in JOB_SIGNALS.items() if one is signal)
        seen[name] = row.result(30)

    on_dead(look)
    for signal in (job_succeeded, job_retrying, job_dead):
        signal.connect(look)
    register("work", lambda payload: None)
    register("doomed", fail)
    enqueue("work")
    enqueue("doomed", max_retries=0)
    job("later", backoff=lambda attempt, exception: 3600)(raising).enqueue()
    work_off()
    dead = ("failed", 1, None)
    assert seen == {"succeeded": None, "retrying": ("pending", 1, None), "dead": dead, "hook": dead}


def raising() -> None:
    raise ValueError("why")


# -- hooks and receivers, each by itself


def test_hooks_are_called_in_the_order_of_registration(work_off: WorkOff) -> None:
    called: list[int] = []
    for number in range(5):
        on_dead(lambda job, number=number: called.append(number))  # type: ignore[misc]
    register("doomed", fail)
    enqueue("doomed", max_retries=0)
    work_off()
    assert called == [0, 1, 2, 3, 4]


def test_on_dead_is_a_decorator_too() -> None:
    @on_dead
    def hook(job: JobInfo) -> None: ...

    assert hook.__name__ == "hook"


@pytest.mark.parametrize("hook", [None, "hook", 5], ids=repr)
def test_a_hook_that_cannot_be_called_is_refused(hook: Any) -> None:
    with pytest.raises(TypeError, match="on_dead"):
        on_dead(hook)


def database_error(job: JobInfo) -> None:
    Group.objects.create(name="twice")
    Group.objects.create(name="twice")


def no_arguments() -> None: ...


def exits(job: JobInfo) -> None:
    raise SystemExit(3)


def divides(job: JobInfo) -> None:
    raise ZeroDivisionError("a hook")


@pytest.mark.parametrize("broken", [divides, database_error, no_arguments, exits])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hook_that_raises_is_logged_and_harms_nobody(
    broken: Any, work_off: WorkOff, told: dict[str, list[JobInfo]], caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []
    on_dead(broken)
    on_dead(lambda job: called.append(job.id))
    register("doomed", fail)
    ids = [enqueue("doomed", max_retries=0) for _ in range(2)]
    try:
        work_off()
    except SystemExit:
        pytest.fail("a hook ended the program")
    assert called == ids
    assert [info.id for info in told["dead"]] == ids
    assert sum(broken.__name__ in record.getMessage() for record in caplog.records) == 2
    assert {info.status for info in jobs()} == {"failed"}
    assert not JobWorker.objects.exists()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *[(name, ZeroDivisionError("a receiver")) for name in ("started", "succeeded", "retrying", "dead")],
        *[(name, SystemExit(3)) for name in ("started", "dead")],
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receiver_that_raises_harms_nobody(name: str, error: BaseException, work_off: WorkOff) -> None:
    called: list[str] = []

    def broken(**kwargs: object) -> None:
        raise error

    JOB_SIGNALS[name].connect(broken)
    JOB_SIGNALS[name].connect(lambda job, **kwargs: called.append(job.id), weak=False)
    ended: list[str] = []
    for signal in (job_succeeded, job_retrying, job_dead):
        signal.connect(lambda job, **kwargs: ended.append(job.job_type), weak=False)
    register("work", lambda payload: None)
    register("doomed", fail)
    later = job("later", backoff=lambda attempt, exception: 3600)(raising)
    for _ in range(2):
        enqueue("work")
        enqueue("doomed", max_retries=0)
        later.enqueue()
    try:
        work_off()
    except SystemExit:
        pytest.fail("a receiver ended the program")
    if isinstance(error, Exception):
        assert sorted(ended) == ["doomed", "doomed", "later", "later", "work", "work"]
        assert len(called) == (6 if name == "started" else 2)
    else:
        # Django's send_robust() does not go on to the next receiver; the jobs and the worker must not feel it.
        assert {"later", "work"} <= set(ended)
    assert {(info.job_type, info.status, info.attempts) for info in jobs()} == {
        ("doomed", "failed", 1),
        ("later", "pending", 1),
    }


def test_a_transaction_left_open_by_a_hook_does_not_swallow_what_later_ones_write(
    start_worker: StartWorker,
) -> None:
    def hook(job: JobInfo) -> None:
        if job.payload == "leak":
            transaction.atomic().__enter__()
        Group.objects.create(name=job.payload)

    on_dead(hook)
    register("doomed", fail)
    for payload in ("leak", "one", "other"):
        enqueue("doomed", payload, max_retries=0)
    assert start_worker(threads=1, drain=True).wait(30)
    assert sorted(group.name for group in Group.objects.all()) == ["one", "other"]


def test_a_slow_hook_does_not_hold_up_a_worker(start_worker: StartWorker) -> None:
    called, gate, ran = threading.Event(), threading.Event(), threading.Event()

    def slow(job: JobInfo) -> None:
        called.set()
        assert gate.wait(30)

    on_dead(slow)
    register("doomed", fail)
    register("work", lambda payload: ran.set())
    start_worker(threads=1)
    try:
        enqueue("doomed", max_retries=0)
        assert called.wait(30)
        enqueue("work")
        assert ran.wait(30)
        wait_for(lambda: [info.job_type for info in jobs()] == ["doomed"], what="the job to be settled")
    finally:
        gate.set()


def test_a_hook_registered_while_a_worker_runs_is_called(start_worker: StartWorker) -> None:
    called = threading.Event()
    register("doomed", fail)
    start_worker(threads=1)
    on_dead(lambda job: called.set())
    enqueue("doomed", max_retries=0)
    assert called.wait(30)


def test_a_hook_may_enqueue(work_off: WorkOff) -> None:
    reported: list[str] = []
    register("report", reported.append)
    register("doomed", fail)
    on_dead(lambda job: enqueue("report", job.id))
    job_id = enqueue("doomed", max_retries=0)
    work_off()
    work_off()
    assert reported == [job_id]


# -- claims that were lost


def another_worker(job_id: str) -> None:
    """As if this worker had been declared dead and another had claimed the job."""
    JobWorker.objects.get_or_create(id="another", host="h", pid=1, started_at=1, beat_at=1, lease=30)
    Job.objects.filter(pk=job_id).update(claimed_by="another")


def another_program(job_id: str) -> None:
    """As the original does when it starts: every running row is pending again."""
    Job.objects.filter(pk=job_id).update(status="pending", next_run_at=4_000_000_000)


def rescued(job_id: str) -> None:
    Job.objects.filter(pk=job_id).update(status="pending", next_run_at=4_000_000_000, claimed_by=None, attempts=1)


def claimed_again(job_id: str) -> None:
    """Rescued and claimed by this same worker: only the attempts differ."""
    Job.objects.filter(pk=job_id).update(attempts=1)


def gone(job_id: str) -> None:
    Job.objects.filter(pk=job_id).delete()


@pytest.mark.parametrize("end", ["returns", "raises", "dies", "snoozes"])
@pytest.mark.parametrize("lose", [another_worker, another_program, rescued, claimed_again, gone])
def test_a_worker_that_lost_its_claim_changes_nothing_and_says_so(
    lose: Callable[[str], None],
    end: str,
    work_off: WorkOff,
    told: dict[str, list[JobInfo]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooked: list[JobInfo] = []
    on_dead(hooked.append)
    left: list[Any] = []

    @job("work", max_retries=0 if end == "dies" else 5)
    def work() -> None:
        lose(job_id)
        left.extend(Job.objects.filter(pk=job_id).values())
        if end == "snoozes":
            raise Snooze(1)
        if end != "returns":
            raise ValueError("why")

    register("fine", lambda payload: None)
    job_id = work.enqueue()
    enqueue("fine")
    work_off()
    assert list(Job.objects.values()) == left
    assert [info.id for info in told["lost"]] == [job_id]
    assert told["lost"][0].status == "running"
    assert [info.job_type for info in told["succeeded"]] == ["fine"]
    assert told["retrying"] == told["dead"] == hooked == []
    assert any(job_id in record.getMessage() and "lost" in record.getMessage() for record in caplog.records)


# -- workers that are gone


@pytest.mark.parametrize("earlier_loss", [False, True])
def test_the_rescue_of_a_job_is_told_by_whoever_does_it(earlier_loss: bool, told: dict[str, list[JobInfo]]) -> None:
    hooked: list[JobInfo] = []
    on_dead(hooked.append)
    job_id = enqueue("work", max_retries=0)
    history = '[{"attempt":1,"exception":"rws_jobs.liveness.WorkerLost"}]' if earlier_loss else None
    Job.objects.filter(pk=job_id).update(status="running", claimed_by="host:1:gone", history=history)
    assert tick() is False
    (name,) = summary(told)
    assert name == ("dead" if earlier_loss else "retrying")
    ((status, attempts, error),) = summary(told)[name]
    assert (status, attempts) == ("failed" if earlier_loss else "pending", 1)
    assert error is not None
    assert error.startswith("worker lost")
    assert [info.id for info in hooked] == ([job_id] if earlier_loss else [])


def test_a_worker_that_is_declared_dead_is_told_once(start_worker: StartWorker, configure: Callable[..., None]) -> None:
    configure(HEARTBEAT_INTERVAL=0.2)
    lost: list[str] = []
    worker_lost.connect(lambda sender, worker, **kwargs: lost.append(worker), weak=False)
    JobWorker.objects.create(id="host:1:still", host="host", pid=1, started_at=1, beat_at=1, lease=1)
    job_id = enqueue("work", run_at=4_000_000_000)
    Job.objects.filter(pk=job_id).update(status="running", claimed_by="host:1:still")
    start_worker(threads=1)
    start_worker(threads=1)
    wait_for(lambda: jobs()[0].status == "pending", what="the job to be rescued")
    wait_for(lambda: lost, what="the signal")
    assert lost == ["host:1:still"]
    assert JobWorker.objects.count() == 2


def test_an_unheard_outcome_costs_no_thread(start_worker: StartWorker) -> None:
    register("work", lambda payload: None)
    enqueue("work")
    start_worker(threads=1)
    wait_for(lambda: not jobs(), what="the job to end")
    assert not [thread for thread in threading.enumerate() if "announcer" in thread.name]
