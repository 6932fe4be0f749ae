"""The worker in threads of this process: it runs what is due, gives back what it has not started, outlives errors."""

import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from rws_jobs import Backoff, Worker, enqueue, enqueue_many, job, message, register
from rws_jobs.liveness import Heart
from rws_jobs.models import Job, JobWorker
from rws_jobs.prefetch import MOST_AHEAD, SOON, TOO_LONG, Prefetch
from rws_jobs.settling import ClaimsLost
from rws_jobs.signals import claim_lost

from .rows import FAR_AHEAD, insert, row, statuses
from .waiting import another_connection, apart, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

on_servers = pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has no server to lose")
StartWorker = Callable[..., Worker]


class Handlers:
    """Two job types: "quick" ends at once, "gated" when it is told to. Both remember what they ran."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self._open = threading.Event()
        register("quick", self._quick)
        register("gated", self._gated)

    def _quick(self, payload: str) -> None:
        self.started.append(payload)
        self.ended.append(payload)

    def _gated(self, payload: str) -> None:
        self.started.append(payload)
        assert self._open.wait(60), "no test keeps the gate closed so long"
        self.ended.append(payload)

    def open(self) -> None:
        self._open.set()

    def wait_started(self, *payloads: str) -> None:
        wait_for(lambda: set(payloads) <= set(self.started), what=f"{payloads} to start")


@pytest.fixture
def handlers(start_worker: StartWorker) -> Iterator[Handlers]:
    made = Handlers()
    yield made
    made.open()  # before the workers are stopped


@pytest.fixture
def quick_beats(configure: Callable[..., None]) -> None:
    """So that an audit, a beat or a declaration of death is a matter of tenths of a second."""
    configure(HEARTBEAT_INTERVAL=0.1, DEAD_AFTER=5)


def enqueue_all(job_type: str, *payloads: str, **options: Any) -> list[str]:
    return [str(id) for id in enqueue_many(message(job_type, payload, **options) for payload in payloads)]


def numbered(count: int) -> list[str]:
    return [f"{number:03}" for number in range(count)]


def all_done() -> bool:
    return not Job.objects.exists()


# -- running


def test_jobs_run_once_each_and_their_rows_go(handlers: Handlers, start_worker: StartWorker) -> None:
    worker = start_worker(threads=3)
    enqueue_all("quick", *numbered(100))
    wait_for(all_done, what="all jobs to be done")
    assert sorted(handlers.ended) == numbered(100)
    assert worker.stop(timeout=30)
    assert worker.counts == Counter(Completed=100)
    assert not JobWorker.objects.exists()


def test_one_thread_runs_jobs_in_claim_order(handlers: Handlers, start_worker: StartWorker) -> None:
    insert(*(row(f"{number}", job_type="quick", payload=f"{number}", priority=number) for number in range(10)))
    start_worker(drain=True).wait(30)
    assert handlers.ended == [f"{number}" for number in range(9, -1, -1)]


def test_as_many_jobs_run_at_once_as_there_are_threads(handlers: Handlers, start_worker: StartWorker) -> None:
    enqueue_all("gated", "a", "b", "c", "d")
    start_worker(threads=3)
    handlers.wait_started("a", "b", "c")
    assert sorted(handlers.started) == ["a", "b", "c"]
    handlers.open()
    wait_for(all_done, what="all jobs to be done")


def test_only_the_queues_asked_for_are_served(handlers: Handlers, start_worker: StartWorker) -> None:
    for queue in ("a", "b", "c"):
        enqueue("quick", queue, queue=queue)
    start_worker(["a", "b"], exclude_queues=["b"], drain=True).wait(30)
    assert handlers.ended == ["a"]
    start_worker(exclude_queues=["b"], drain=True).wait(30)
    assert handlers.ended == ["a", "c"]


@pytest.mark.parametrize(
    "arguments",
    [{"queues": "mail"}, {"exclude_queues": "mail"}, {"threads": 0}, {"threads": -1}, {"max_jobs": 0}],
    ids=str,
)
def test_bad_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError):
        Worker(**arguments)


def test_a_finished_job_is_settled_while_a_long_one_runs(handlers: Handlers, start_worker: StartWorker) -> None:
    (long,) = enqueue_all("gated", "long")
    start_worker(threads=2)
    handlers.wait_started("long")
    enqueue_all("quick", "short")
    wait_for(lambda: statuses() == {long: "running"}, what="the short job to be settled")
    assert handlers.ended == ["short"]


def test_a_drained_worker_has_run_what_was_due_and_what_that_enqueued(
    handlers: Handlers, start_worker: StartWorker
) -> None:
    def again(payload: str) -> None:
        if int(payload):
            enqueue("again", str(int(payload) - 1))
        handlers.ended.append(payload)

    register("again", again)
    (later,) = enqueue_all("quick", "later", run_in=3600)
    enqueue_all("again", "5")
    worker = start_worker(threads=2, drain=True)
    assert worker.wait(30)
    assert handlers.ended == ["5", "4", "3", "2", "1", "0"]
    assert statuses() == {later: "pending"}
    assert not JobWorker.objects.exists()


def test_a_drained_worker_waits_for_what_runs(handlers: Handlers, start_worker: StartWorker) -> None:
    enqueue_all("gated", "long")
    worker = start_worker(threads=2, drain=True)
    handlers.wait_started("long")
    assert not worker.wait(0.3)
    handlers.open()
    assert worker.wait(30)
    assert all_done()


def test_a_worker_with_nothing_to_drain_ends_at_once(start_worker: StartWorker) -> None:
    assert start_worker(drain=True).wait(30)


# -- max_jobs


def test_max_jobs_is_exact(handlers: Handlers, start_worker: StartWorker) -> None:
    enqueue_all("quick", *numbered(60))
    worker = start_worker(threads=3, max_jobs=37)
    assert worker.wait(30)
    assert len(handlers.ended) == 37
    assert list(statuses().values()) == ["pending"] * 23
    assert not Job.objects.exclude(attempts=0).exists()


def test_max_jobs_counts_failures_too(start_worker: StartWorker) -> None:
    enqueue_all("no such job type", *numbered(5), max_retries=0)
    assert start_worker(max_jobs=3).wait(30)
    assert Counter(statuses().values()) == {"failed": 3, "pending": 2}


def test_what_was_given_back_does_not_count_for_max_jobs(handlers: Handlers, start_worker: StartWorker) -> None:
    enqueue_all("gated", "long", priority=1)
    enqueue_all("quick", *numbered(60))
    worker = holding_ahead(50, start_worker, max_jobs=55)
    handlers.wait_started("long")
    wait_for(lambda: Job.objects.running().count() == 1, what="the others to be given back")
    handlers.open()
    assert worker.wait(30)
    assert len(handlers.ended) == 55


# -- stopping


def test_a_stop_finishes_what_runs_and_gives_back_the_rest_uncharged(
    handlers: Handlers, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rws_jobs.prefetch.SOON", 600)  # it is the stop that gives them back
    monkeypatch.setattr("rws_jobs.prefetch.TOO_LONG", 600)
    (long,) = enqueue_all("gated", "long", priority=1)
    rest = enqueue_all("quick", *numbered(20))
    worker = holding_ahead(20, start_worker)
    handlers.wait_started("long")
    assert Job.objects.running().count() == 21
    assert not worker.stop(timeout=0)
    wait_for(lambda: Job.objects.running().count() == 1, what="the unstarted to be given back")
    assert not worker.stop(timeout=0.1)
    assert statuses() == {long: "running"} | dict.fromkeys(rest, "pending")
    assert JobWorker.objects.exists(), "it still beats"
    handlers.open()
    assert worker.stop(timeout=30)
    assert handlers.started == ["long"]
    assert set(Job.objects.values_list("pk", "attempts", "claimed_by")) == {(id, 0, None) for id in rest}
    assert not JobWorker.objects.exists()


def test_a_stopped_worker_claims_nothing(handlers: Handlers, start_worker: StartWorker) -> None:
    worker = start_worker()
    assert worker.stop(timeout=30)
    enqueue_all("quick", "late")
    assert set(statuses().values()) == {"pending"}
    assert worker.stop(timeout=30)


def test_abandoned_jobs_are_given_back_uncharged(handlers: Handlers, start_worker: StartWorker) -> None:
    ids = enqueue_all("gated", "a", "b")
    worker = start_worker(threads=2)
    handlers.wait_started("a", "b")
    worker.abandon(timeout=30)
    assert set(Job.objects.values_list("pk", "status", "attempts", "claimed_by")) == {
        (id, "pending", 0, None) for id in ids
    }
    assert not JobWorker.objects.exists()


# -- prefetch


def adapted(prefetch: Prefetch, **seen: Any) -> int:
    usual = {"oldest_waits": 0.0, "ran_dry": True, "last_claim_full": True, "recent_run": 0.001}
    prefetch.adapt(**usual | seen)
    return prefetch.ahead


def test_prefetch_grows_quickly_while_threads_run_dry_and_not_for_ever() -> None:
    prefetch = Prefetch(4)
    assert prefetch.room(free_threads=4, unstarted=0) == 4
    sizes = [adapted(prefetch) for _ in range(10)]
    assert sizes[:4] == [4, 12, 28, 60]
    assert sizes[-1] == MOST_AHEAD
    assert prefetch.room(free_threads=1, unstarted=7) == MOST_AHEAD + 1 - 7
    assert prefetch.room(free_threads=0, unstarted=2 * MOST_AHEAD) == 0


@pytest.mark.parametrize("seen", [{"ran_dry": False}, {"last_claim_full": False}, {"recent_run": SOON}], ids=str)
def test_prefetch_does_not_grow_without_need(seen: Any) -> None:
    prefetch = Prefetch(4)
    adapted(prefetch)
    assert adapted(prefetch, **seen) == 4


def test_prefetch_ends_when_a_job_waits_too_long() -> None:
    prefetch = Prefetch(4)
    adapted(prefetch)
    assert adapted(prefetch, oldest_waits=SOON + 0.001) == 0
    assert prefetch.room(free_threads=0, unstarted=0) == 0
    assert not prefetch.overslept(TOO_LONG)
    assert prefetch.overslept(TOO_LONG + 0.001)


def test_short_jobs_do_not_wait_behind_a_long_one_while_another_worker_is_idle(
    handlers: Handlers, start_worker: StartWorker
) -> None:
    (long,) = enqueue_all("gated", "long", priority=1)
    enqueue_all("quick", *numbered(20))
    holding_ahead(20, start_worker)
    handlers.wait_started("long")
    start_worker()
    wait_for(lambda: statuses() == {long: "running"}, what="the other worker to run the short ones")
    assert handlers.ended == numbered(20)


def test_what_was_given_back_is_not_claimed_again_in_the_same_turn(
    handlers: Handlers, by_hand: Callable[..., Worker]
) -> None:
    (long,) = enqueue_all("gated", "long", priority=1)
    rest = enqueue_all("quick", *numbered(20))
    worker = by_hand(threads=1)
    worker._prefetch.ahead = 20
    worker._turn()
    handlers.wait_started("long")
    assert set(statuses().values()) == {"running"}
    # As after a turn that took long: nobody looked before.
    wait_for(lambda: worker._prefetch.overslept(worker._threads.oldest_waits), what="the others to wait too long")
    worker._turn()
    assert statuses() == {long: "running"} | dict.fromkeys(rest, "pending")


# -- lost claims


def test_one_lost_claim_does_not_keep_the_others_from_being_settled(
    handlers: Handlers, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[str] = []
    claim_lost.connect(lambda job, **_: lost.append(job.id), weak=False)
    first, second, third = enqueue_all("gated", "a", "b", "c")
    worker = start_worker(threads=3)
    handlers.wait_started("a", "b", "c")
    Job.objects.filter(pk=second).delete()
    with caplog.at_level(logging.WARNING, "rws_jobs"):
        handlers.open()
        wait_for(all_done, what="the others to be settled")
        assert worker.stop(timeout=30)
    assert lost == [second]
    assert [record.job_id for record in caplog.records if "claim was lost" in record.message] == [second]
    assert worker.counts == Counter(Completed=2, Lost=1)
    assert sorted(handlers.ended) == ["a", "b", "c"]
    assert first != third


def test_a_job_taken_away_and_claimed_by_another_stays_the_others(
    handlers: Handlers, start_worker: StartWorker
) -> None:
    (id,) = enqueue_all("gated", "a")
    worker = start_worker()
    handlers.wait_started("a")
    Heart().register()
    other = JobWorker.objects.exclude(pk=Job.objects.get().claimed_by).get().pk
    Job.objects.update(claimed_by=other)
    handlers.open()
    assert worker.stop(timeout=30)
    assert list(Job.objects.values_list("pk", "status", "claimed_by")) == [(id, "running", other)]


def test_rows_that_are_ours_and_that_we_do_not_know_are_given_back_uncharged(
    quick_beats: None, handlers: Handlers, start_worker: StartWorker
) -> None:
    start_worker()
    worker = wait_for(JobWorker.objects.first, what="the worker's row")
    insert(row("stranded", job_type="quick", payload="stranded", status="running", claimed_by=worker.pk, attempts=1))
    wait_for(all_done, what="the stranded job to run")
    assert handlers.ended == ["stranded"]


def test_a_running_job_that_another_program_resets_is_not_started_again_here(
    quick_beats: None, handlers: Handlers, start_worker: StartWorker
) -> None:
    (id,) = enqueue_all("gated", "a")
    worker = start_worker(threads=3)
    handlers.wait_started("a")
    Job.objects.update(status="pending")  # as the original does with every running row when it starts
    wait_for(lambda: statuses() == {id: "running"}, what="the reset job to be claimed again")
    enqueue_all("quick", "after")
    wait_for(lambda: handlers.ended == ["after"], what="a job enqueued later")
    assert handlers.started == ["a", "after"]
    handlers.open()
    wait_for(all_done, what="the job to be settled")
    assert worker.stop(timeout=30)
    assert handlers.started == ["a", "after"]


def test_an_unstarted_job_that_was_taken_away_is_not_started(
    quick_beats: None, handlers: Handlers, by_hand: Callable[..., Worker]
) -> None:
    enqueue_all("gated", "long", priority=1)
    mine, theirs = enqueue_all("quick", "mine", "theirs")
    worker = by_hand(threads=1)
    worker._prefetch.ahead = 2
    worker._turn()
    handlers.wait_started("long")
    Job.objects.filter(pk=theirs).update(claimed_by="another")
    worker._next_audit = 0.0
    worker._turn()
    handlers.open()
    wait_for(lambda: len(worker._threads.finished) == 2, what="the jobs to run")
    worker._turn()
    assert handlers.ended == ["long", "mine"]
    assert statuses() == {theirs: "running"}
    assert worker.counts == Counter(Completed=2, Lost=1)
    assert mine != theirs


def test_what_is_not_written_yet_outlives_an_audit_that_finds_a_claim_lost(
    handlers: Handlers, by_hand: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue_all("gated", "long", priority=2)
    enqueue_all("quick", "done", priority=1)
    unstarted, lost = enqueue_all("gated", "unstarted", "lost")
    insert(row("stranded", status="running", next_run_at=FAR_AHEAD))
    worker = by_hand(threads=2)
    worker._prefetch.ahead = 2
    worker._turn()
    wait_for(lambda: len(worker._threads.finished) == 1, what="the quick job to run")
    handlers.wait_started("long", "unstarted")
    Job.objects.filter(pk="stranded").update(claimed_by=worker._heart.worker)
    Job.objects.filter(pk=lost).update(status="pending", claimed_by=None)
    with somebody_locks("jobs that run", monkeypatch), pytest.raises(OperationalError):
        worker._turn()
    worker._next_audit = 0.0
    worker._turn()
    assert statuses()["stranded"] == "pending"
    assert "done" in handlers.ended
    assert Job.objects.filter(payload="done").count() == 0, "its outcome was forgotten"
    assert unstarted in statuses()


# -- declared dead


def test_a_worker_declared_dead_registers_anew_and_goes_on(
    quick_beats: None, handlers: Handlers, start_worker: StartWorker
) -> None:
    start_worker(threads=2)
    before = wait_for(JobWorker.objects.first, what="the worker's row").pk
    JobWorker.objects.all().delete()
    after = wait_for(JobWorker.objects.first, what="a new row").pk
    assert after != before
    enqueue_all("quick", *numbered(20))
    wait_for(all_done, what="all jobs to be done")
    assert sorted(handlers.ended) == numbered(20)


def test_a_job_that_runs_while_its_worker_is_declared_dead_never_runs_twice_at_once_here(
    quick_beats: None, handlers: Handlers, start_worker: StartWorker
) -> None:
    (id,) = enqueue_all("gated", "a")
    worker = start_worker(threads=3)
    handlers.wait_started("a")
    JobWorker.objects.all().delete()
    wait_for(lambda: Job.objects.filter(attempts=1).exists(), what="the job to be rescued, charged")
    Job.objects.filter(status="pending").update(next_run_at=1)
    wait_for(lambda: Job.objects.running().filter(attempts=1).exists(), what="the rescued job to be claimed again")
    enqueue_all("quick", "after")
    wait_for(lambda: handlers.ended == ["after"], what="a job enqueued later")
    assert handlers.started == ["a", "after"]
    handlers.open()
    wait_for(all_done, what="the job to run again, and to be settled")
    assert worker.stop(timeout=30)
    assert handlers.ended == ["after", "a", "a"]
    assert worker.counts["Lost"] == 1
    assert id


def test_what_had_not_started_when_its_worker_was_declared_dead_runs_once(
    quick_beats: None, handlers: Handlers, start_worker: StartWorker
) -> None:
    enqueue_all("gated", "long", priority=1)
    enqueue_all("quick", *numbered(10))
    holding_ahead(10, start_worker)
    handlers.wait_started("long")
    JobWorker.objects.all().delete()
    wait_for(JobWorker.objects.first, what="a new row")
    start_worker(threads=2)
    wait_for(lambda: len(handlers.ended) == 10, what="the others to run")
    handlers.open()
    wait_for(all_done, what="all jobs to be done")
    assert sorted(handlers.ended)[:10] == numbered(10)
    assert set(handlers.ended[10:]) == {"long"}


def test_a_heart_that_has_not_beaten_for_two_thirds_of_its_lease_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[..., None]
) -> None:
    configure(DEAD_AFTER=30)
    moment = 100.0
    monkeypatch.setattr("rws_jobs.liveness.time.monotonic", lambda: moment)
    heart = Heart()
    heart.register()
    moment += 19.9
    assert heart.trusted
    moment += 0.2
    assert not heart.trusted
    assert heart.beat()
    assert heart.trusted
    JobWorker.objects.all().delete()
    moment += 20.0
    assert not heart.beat()
    assert not heart.trusted


def test_a_worker_without_a_good_beat_starts_nothing(handlers: Handlers, by_hand: Callable[..., Worker]) -> None:
    enqueue_all("quick", "a")
    worker = by_hand(threads=1)
    worker._heart._last_beat -= 21.0
    worker._turn()
    assert set(statuses().values()) == {"pending"}
    assert worker._heart.beat()
    worker._turn()
    assert set(statuses().values()) == {"running"}


# -- database errors


def test_a_lock_held_longer_than_the_timeout_delays_and_loses_nothing(
    handlers: Handlers, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue_all("gated", "a", "b")
    worker = start_worker(threads=2)
    handlers.wait_started("a", "b")
    with somebody_locks("jobs that run", monkeypatch):
        handlers.open()
        wait_for(lambda: worker._apart, what="a turn that failed")
        assert len(statuses()) == 2
    wait_for(all_done, what="both to be settled")
    enqueue_all("quick", *numbered(10))
    wait_for(all_done, what="ten more jobs")
    assert sorted(handlers.ended) == sorted(["a", "b", *numbered(10)])
    assert worker.stop(timeout=30)
    assert worker.counts == Counter(Completed=12)


def test_an_outcome_that_the_database_refuses_is_kept_without_its_text_and_spoils_no_other(
    handlers: Handlers, start_worker: StartWorker
) -> None:
    @job("poison", max_retries=0)
    def poison() -> None:
        raise ValueError("poison")

    with refused("last_error", "= 'ValueError: poison'"):
        (bad,) = enqueue_all("poison", "{}")
        good = enqueue_all("quick", *numbered(5))
        worker = start_worker(threads=4)
        wait_for(lambda: statuses() == {bad: "failed"}, what="all to be settled")
        assert worker.stop(timeout=30)
    assert "could not be stored" in Job.objects.get().last_error
    assert len(good) == len(handlers.ended)


def test_a_job_whose_failure_can_never_be_written_does_not_run_for_ever(
    quick_beats: None, handlers: Handlers, start_worker: StartWorker
) -> None:
    runs: list[int] = []

    @job("poison", max_retries=2)
    def poison() -> None:
        runs.append(1)
        raise ValueError

    with refused("last_error", "IS NOT NULL"):
        enqueue_all("poison", "{}")
        worker = start_worker()
        for number in range(8):
            # Each stranded row that is given back, and runs, has been found by one more audit.
            owner = wait_for(JobWorker.objects.first, what="the worker's row").pk
            insert(row(f"{number}", job_type="quick", payload=f"{number}", status="running", claimed_by=owner))
            wait_for(lambda number=number: f"{number}" in handlers.ended, what="an audit")  # type: ignore[misc]
        assert worker.stop(timeout=30)
    assert 1 <= len(runs) <= 3


@on_servers
def test_one_job_whose_row_somebody_holds_does_not_keep_its_worker_from_all_others(
    handlers: Handlers, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rws_jobs.transactions.LOCK_TIMEOUT", 1)
    held, _ = enqueue_all("gated", "held", "finished with it")
    start_worker(threads=3)
    handlers.wait_started("held", "finished with it")
    with another_connection() as another, transaction.atomic(using=another):
        assert Job.objects.using(another).select_for_update().get(pk=held)
        handlers.open()
        enqueue_all("quick", "new")
        wait_for(lambda: statuses() == {held: "running"}, what="the other jobs to be run and settled")
    wait_for(all_done, what="the job that was held to be settled")
    assert sorted(handlers.ended) == ["finished with it", "held", "new"]


@on_servers
def test_an_idle_worker_whose_sessions_are_killed_goes_on(
    handlers: Handlers, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    start_worker(threads=2)
    for payload in ("a", "b", "c"):
        wait_for(kill_other_sessions, what="the worker's sessions")
        enqueue_all("quick", payload)
        wait_for(all_done, what="the job to be done")
    assert handlers.ended == ["a", "b", "c"]
    assert not [record for record in caplog.records if record.exc_info]


@on_servers
def test_jobs_run_once_each_however_often_the_sessions_are_killed(
    handlers: Handlers, start_worker: StartWorker
) -> None:
    payloads = numbered(400)
    worker = start_worker(threads=2)
    kills = 0
    for start in range(0, 400, 40):
        enqueue_all("quick", *payloads[start : start + 40])
        kills += kill_other_sessions()
        wait_for(lambda goal=start + 20: len(handlers.ended) >= goal, what="some jobs to be done")
        kills += kill_other_sessions()
    wait_for(all_done, timeout=60, what="all jobs to be done")
    assert kills > 5
    assert sorted(handlers.ended) == payloads
    assert worker.stop(timeout=30)
    assert worker.counts["Lost"] == 0
    assert worker.counts["Completed"] == 400


@on_servers
def test_the_first_job_after_a_loss_of_all_sessions_has_a_connection_that_works(start_worker: StartWorker) -> None:
    wrappers: list[Any] = []

    @job("asks", max_retries=0)
    def asks() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        wrappers.append(connections["default"])

    enqueue_all("asks", "{}")
    start_worker()
    wait_for(all_done, what="the first job to be done")
    wait_for(lambda: wrappers[0].connection is None, what="the idle thread to close its connection")
    wait_for(kill_other_sessions, what="the worker's sessions")
    enqueue_all("asks", "{}")
    wait_for(all_done, what="the second job to be done on a new connection")


@on_servers
def test_a_claim_whose_commit_was_not_answered_is_given_back_and_run(
    proxy: "Proxy", handlers: Handlers, start_worker: StartWorker, configure: Callable[..., None]
) -> None:
    configure(HEARTBEAT_INTERVAL=600, DEAD_AFTER=3600)  # nobody looks but because of the error
    worker = start_worker()
    wait_for(JobWorker.objects.exists, what="the worker's row")
    proxy.swallow_the_next_commit()
    enqueue_all("quick", "a")
    wait_for(lambda: proxy.swallowed == 1, what="a COMMIT to be swallowed")
    wait_for(all_done, what="the job to be done")
    assert handlers.ended == ["a"]
    assert worker.stop(timeout=30)
    assert worker.counts["Released"] == 1, "the claim was there, and nobody had been told of it"


@on_servers
def test_an_outcome_whose_commit_was_not_answered_is_no_lost_claim(
    proxy: "Proxy", handlers: Handlers, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    enqueue_all("gated", "a")
    worker = start_worker()
    handlers.wait_started("a")
    proxy.swallow_the_next_commit()
    handlers.open()
    wait_for(lambda: proxy.swallowed == 1, what="a COMMIT to be swallowed")
    assert all_done()
    assert worker.stop(timeout=30)
    assert worker.counts == Counter(Completed=1)
    assert "claim was lost" not in caplog.text


@on_servers
def test_a_worker_stopped_after_an_unanswered_claim_leaves_nothing_behind(
    proxy: "Proxy", handlers: Handlers, start_worker: StartWorker
) -> None:
    worker = start_worker()
    wait_for(JobWorker.objects.exists, what="the worker's row")
    (id,) = enqueue_all("quick", "a", run_in=3600)
    proxy.swallow_the_next_commit(then=lambda: setattr(worker, "_stopping", True))
    Job.objects.update(next_run_at=1)
    wait_for(lambda: proxy.swallowed == 1, what="a COMMIT to be swallowed")
    assert worker.stop(timeout=30)
    assert list(Job.objects.values_list("pk", "status", "attempts", "claimed_by")) == [(id, "pending", 0, None)]


@on_servers
def test_an_outage_is_logged_once_and_survived(
    proxy: "Proxy", handlers: Handlers, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    enqueue_all("gated", "a")
    worker = start_worker(threads=2)
    handlers.wait_started("a")
    proxy.out()
    handlers.open()
    wait_for(lambda: "worker: database error" in caplog.text, what="the worker to notice")
    wait_for(lambda: proxy.refused >= 3, what="some vain attempts")
    assert len(statuses()) == 1
    proxy.back()
    wait_for(all_done, what="the job to be settled")
    enqueue_all("quick", "b")
    wait_for(all_done, what="the next job to be done")
    assert handlers.ended == ["a", "b"]
    assert worker.stop(timeout=30)
    assert worker.counts == Counter(Completed=2)
    lines = [record.message for record in caplog.records if record.message.startswith("worker: ")]
    assert len(lines) == 2, lines
    assert "the database is back" in lines[1]
    assert not [record for record in caplog.records if record.exc_info]


@on_servers
def test_a_worker_stops_during_an_outage(proxy: "Proxy", handlers: Handlers, start_worker: StartWorker) -> None:
    worker = start_worker()
    wait_for(JobWorker.objects.exists, what="the worker's row")
    proxy.out()
    wait_for(lambda: proxy.refused >= 1, what="the worker to notice")
    assert worker.stop(timeout=10)


def test_the_worker_outlives_a_fault_of_its_own(
    handlers: Handlers, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the database is replaced here, but our own step, by one that is broken three times."""
    faults = [ZeroDivisionError(), LookupError(), ClaimsLost()]
    claim = type(Job.objects.all()).claim

    def broken(self: Any, *arguments: Any) -> Any:
        if faults:
            raise faults.pop()
        return claim(self, *arguments)

    monkeypatch.setattr(type(Job.objects.all()), "claim", broken)
    enqueue_all("quick", "a")
    start_worker()
    wait_for(all_done, what="the job to be done")
    assert handlers.ended == ["a"]
    assert not faults
    assert "it goes on" in caplog.text


def test_enqueues_beside_workers_are_all_run_once(handlers: Handlers, start_worker: StartWorker) -> None:
    """Transactions of ten, mixed priorities and delays; a deadlock may only reach the one who enqueues."""
    workers = [start_worker(threads=2) for _ in range(2)]
    enqueued: list[str] = []

    def web(number: int) -> None:
        for turn in range(10):
            payloads = [f"{number}-{turn}-{each}" for each in range(10)]
            while True:
                try:
                    with transaction.atomic():
                        for each, payload in enumerate(payloads):
                            enqueue("quick", payload, priority=each % 3, run_in=each % 2)
                    break
                except OperationalError:
                    continue
            enqueued.extend(payloads)

    for done in [apart(web, number) for number in range(3)]:
        done.result(timeout=60)
    wait_for(all_done, timeout=60, what="all jobs to be done")
    assert sorted(handlers.ended) == sorted(enqueued)
    assert len(enqueued) == 300
    assert all(worker.stop(timeout=30) for worker in workers)
    assert sum(worker.counts["Completed"] for worker in workers) == 300


def test_each_retry_waits_longer(start_worker: StartWorker) -> None:
    attempts: list[float] = []

    @job("fails", max_retries=2, backoff=Backoff(1, multiplier=1))
    def fails() -> None:
        attempts.append(time.monotonic())
        raise ValueError

    (id,) = enqueue_all("fails", "{}")
    start_worker()
    wait_for(lambda: statuses() == {id: "failed"}, what="the job to be dead")
    assert len(attempts) == 3
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(attempts))
    assert Job.objects.get().attempts == 3


def test_jobs_of_the_future_do_not_start(handlers: Handlers, start_worker: StartWorker) -> None:
    insert(row("future", job_type="quick", next_run_at=FAR_AHEAD))
    start_worker()
    enqueue_all("quick", "now")
    wait_for(lambda: statuses() == {"future": "pending"}, what="the other job to be done")
    assert handlers.ended == ["now"]


# -- helpers


def holding_ahead(count: int, start_worker: StartWorker, **options: Any) -> Worker:
    """A worker of one thread that has learnt, from earlier jobs, to claim ``count`` ahead."""

    class Experienced(Prefetch):
        def __init__(self, threads: int) -> None:
            super().__init__(threads)
            self.ahead = count

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("rws_jobs.worker.Prefetch", Experienced)
        return start_worker(threads=1, **options)


@pytest.fixture
def by_hand(handlers: Handlers) -> Iterator[Callable[..., Worker]]:
    """A worker whose turns the test takes itself, one by one, on its own connection."""
    made: list[Worker] = []

    def make(**options: Any) -> Worker:
        worker = Worker(schedules=False, **options)
        worker._heart.register()
        worker._threads.start()
        made.append(worker)
        return worker

    yield make
    handlers.open()
    for worker in made:
        worker._threads.take_back()
        worker._threads.dismiss()
        worker._threads.join(30)


@contextmanager
def somebody_locks(what: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another connection holds locks on the running jobs (on SQLite the write lock); our own wait is cut short."""
    monkeypatch.setattr("rws_jobs.transactions.LOCK_TIMEOUT", 1)
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
    with another_connection() as another, transaction.atomic(using=another):
        if connection.vendor == "sqlite":
            with connections[another].cursor() as cursor:
                cursor.execute("UPDATE rws_jobs SET attempts = attempts")
        else:
            assert list(Job.objects.using(another).running().select_for_update()), what
        yield


@contextmanager
def refused(column: str, what: str) -> Iterator[None]:
    """Let the database refuse such values in this column of a job, by a constraint."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(
                f"CREATE TRIGGER refused BEFORE UPDATE ON rws_jobs WHEN NEW.{column} {what}"
                " BEGIN SELECT RAISE(ABORT, 'refused by a constraint'); END"
            )
        else:
            cursor.execute(f"ALTER TABLE rws_jobs ADD CONSTRAINT refused CHECK (NOT ({column} {what}))")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                "DROP TRIGGER refused"
                if connection.vendor == "sqlite"
                else "ALTER TABLE rws_jobs DROP CONSTRAINT refused"
            )


def kill_other_sessions() -> int:
    """End every session of this database but the test's own; answers how many."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return int(cursor.fetchone()[0])
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()")
        killed = 0
        for (id,) in cursor.fetchall():
            try:
                cursor.execute(f"KILL {id}")
                killed += 1
            except OperationalError:
                continue  # gone meanwhile
        return killed


class Proxy:
    """Stands between the worker's connections and the server: to lose an answer, or everything."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._armed = self._is_out = False
        self._then: Callable[[], object] = lambda: None
        self._answered = threading.Event()
        self.swallowed = self.refused = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow_the_next_commit(self, then: Callable[[], object] = lambda: None) -> None:
        """The next COMMIT reaches the server; its answer reaches nobody: ``then`` is called, and the connection cut."""
        self._then, self._armed = then, True

    def out(self) -> None:
        """Cut all connections, and refuse new ones."""
        self._is_out = True
        self._cut_all()

    def back(self) -> None:
        self._is_out = False

    def close(self) -> None:
        self._listener.close()
        self._cut_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_out:
                self.refused += 1
                client.close()
                continue
            server = socket.create_connection(self._server)
            with self._lock:
                self._pairs.append((client, server))
            for run in (self._from_client, self._from_server):
                threading.Thread(target=run, args=(client, server), daemon=True).start()

    def _from_client(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError), ExitStack() as stack:
            stack.callback(_shut, client, server)
            while data := _receive(client):
                if self._armed and re.search(rb"\bcommit\b", data, re.IGNORECASE):  # not READ COMMITTED
                    self._armed = False
                    with self._lock:
                        self._pairs.remove((client, server))
                    server.sendall(data)
                    self._swallow(client)
                    return
                server.sendall(data)

    def _from_server(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError), ExitStack() as stack:
            stack.callback(_shut, client, server)
            while data := _receive(server):
                with self._lock:
                    passed_on = (client, server) in self._pairs
                if not passed_on:
                    self._answered.set()
                    return
                client.sendall(data)

    def _swallow(self, client: socket.socket) -> None:
        assert self._answered.wait(30), "the server did not answer the COMMIT"
        self._then()
        client.close()
        self.swallowed += 1

    def _cut_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _shut(*pair)


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """All connections made from here on go through it; the test's own is there already. Ask for it before a worker:
    then it outlives that."""
    connection.ensure_connection()
    settings = connections.settings["default"]
    proxy = Proxy(settings["HOST"], int(settings["PORT"]))
    monkeypatch.setitem(connections.settings, "default", {**settings, "HOST": "127.0.0.1", "PORT": str(proxy.port)})
    yield proxy
    proxy.close()
