"""The fence: whoever lost a claim changes nothing, whatever happened to the job meanwhile.

The life of one job under two workers is a small machine. A model of it, in Python, is walked to every state that can be
reached; from each of them every step is taken for real, and its row count and the row it leaves are the model's.
"""

import json
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rws_jobs import UniqueKeyIsLive, clock, delete, retry
from rws_jobs.info import Claim
from rws_jobs.lanes import Lanes
from rws_jobs.liveness import Heart, Watch, rescue_orphans
from rws_jobs.models import Job, JobWorker
from rws_jobs.outcomes import COMPLETED, Dead, Failure, Released, Retrying, Snoozed
from rws_jobs.settling import ClaimsLost, settle
from rws_jobs.transactions import short_transaction

from .rows import FAR_AHEAD, LONG_AGO, insert, row, statuses

pytestmark = pytest.mark.django_db

MOST_ATTEMPTS = 2
FAILURE = Failure(error="went wrong", exception="builtins.ValueError", traceback="Trace…", started=1.0, ended=2.0)


@dataclass(frozen=True)
class State:
    """The row (``status`` None: there is none), and for each worker the attempts of the claim it believes it has."""

    status: str | None = "pending"
    attempts: int = 0
    owner: str | None = None
    held: tuple[int | None, int | None] = (None, None)

    def is_held_by(self, worker: str) -> bool:
        claimed = self.held["ab".index(worker)]
        return self.status == "running" and self.owner == worker and claimed == self.attempts

    def with_claim(self, worker: str) -> tuple[int | None, int | None]:
        return (self.attempts, self.held[1]) if worker == "a" else (self.held[0], self.attempts)


def expected(state: State, step: str) -> tuple[int, State]:
    """The model: how many rows a step changes, and what follows."""
    what, _, worker = step.partition(" ")
    if what == "claim":
        if state.status != "pending":
            return 0, state
        return 1, replace(state, status="running", owner=worker, held=state.with_claim(worker))
    if what == "reclaim":  # while a run of an earlier claim of its own still goes on
        if state.status != "pending":
            return 0, state
        return 1, replace(state, status="running", owner=worker)
    if what == "requeue":
        return (1, replace(state, status="pending", attempts=0)) if state.status == "failed" else (0, state)
    if what == "delete":
        return (1, replace(state, status=None)) if state.status in ("pending", "failed") else (0, state)
    if what == "rescue":
        if state.status != "running" or state.owner != worker:
            return 0, state
    elif not state.is_held_by(worker):
        return 0, state
    charged = state.attempts + 1
    return 1, {
        "complete": replace(state, status=None, owner=None),
        "retry": replace(state, status="pending", owner=None, attempts=charged),
        "rescue": replace(state, status="pending", owner=None, attempts=charged),
        "bury": replace(state, status="failed", owner=None, attempts=charged),
        "snooze": replace(state, status="pending", owner=None),
        "release": replace(state, status="pending", owner=None),
    }[what]


OUTCOMES = ("complete", "retry", "snooze", "bury", "release")
STEPS = [f"{what} {worker}" for what in ("claim", "reclaim", *OUTCOMES, "rescue") for worker in "ab"] + [
    "requeue",
    "delete",
]


def reachable() -> list[State]:
    start = State()
    found, ahead = {start}, deque([start])
    while ahead:
        state = ahead.popleft()
        for step in STEPS:
            _, following = expected(state, step)
            if following not in found and following.attempts <= MOST_ATTEMPTS:
                found.add(following)
                ahead.append(following)
    return sorted(found, key=repr)


STATES = reachable()


def test_the_model_reaches_what_matters() -> None:
    assert len(STATES) > 100
    assert State("running", 1, "b", (0, 1)) in STATES  # rescued from a, claimed by b: what a does now is late
    assert State("running", 0, "b", (0, 0)) in STATES  # the same attempts: only the owner tells them apart
    assert State("running", 1, "a", (0, None)) in STATES  # the same owner: only the attempts tell them apart


@pytest.mark.parametrize("step", STEPS)
def test_each_step_does_what_the_model_says_wherever_the_job_stands(step: str) -> None:
    for state in STATES:
        arrange(state)
        rows, following = expected(state, step)
        assert take(step, state) == rows, f"{step} in {state}"
        assert look(following.held) == following, f"{step} in {state}"


def arrange(state: State) -> None:
    Job.objects.all()._raw_delete("default")
    JobWorker.objects.all()._raw_delete("default")
    for worker in "ab":
        JobWorker.objects.create(id=worker, host="h", pid=1, started_at=1, beat_at=1, lease=30)
    if state.status is not None:
        insert(
            row(
                "job",
                status=state.status,
                attempts=state.attempts,
                claimed_by=state.owner,
                claimed_at=state.owner and 1,
                max_retries=100,
            )
        )


def take(step: str, state: State) -> int:
    jobs = Job.objects.all()
    what, _, worker = step.partition(" ")
    if what in ("claim", "reclaim"):
        return len(jobs.claim(worker, Lanes(), 10))
    if what == "rescue":
        JobWorker.objects.filter(pk=worker).delete()
        return rescue_orphans("default")
    if what == "requeue":
        return int(retry("job"))
    if what == "delete":
        return int(delete("job"))
    attempts = state.held["ab".index(worker)]
    claim = held(worker, -1 if attempts is None else attempts)
    match what:
        case "complete":
            return jobs.complete([claim])
        case "retry":
            return jobs.retry(claim, FAILURE, 60)
        case "snooze":
            return jobs.snooze(claim, 60)
        case "bury":
            return jobs.bury(claim, FAILURE)
        case "release":
            return jobs.release(claim)
    raise AssertionError(step)


def held(worker: str, attempts: int, id: str = "job") -> Claim:
    return Claim(id, "tests.noop", "{}", "default", 0, attempts, 100, 1, 1, None, None, None, worker=worker)


def look(claims: tuple[int | None, int | None]) -> State:
    job = Job.objects.first()
    if job is None:
        return State(None, look_attempts(), None, claims)
    assert (job.claimed_at is None) == (job.claimed_by is None) == (job.status != "running")
    return State(job.status, job.attempts, job.claimed_by, claims)


def look_attempts() -> Any:
    """A row that is gone has no attempts to compare."""

    class Anything(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    return Anything()


# -- what is written


@pytest.fixture
def claim() -> Claim:
    insert(row("job", max_retries=3))
    (claimed,) = Job.objects.claim("me", Lanes(), 1)
    return claimed


def test_a_retry_waits_at_least_its_delay_by_the_databases_clock(claim: Claim) -> None:
    before = clock.now("default")
    assert Job.objects.retry(claim, FAILURE, 7.3) == 1
    after = clock.now("default")
    job = Job.objects.get()
    assert math.ceil(before + 7.3 - 0.001) <= job.next_run_at <= math.ceil(after + 7.3 + 0.001)
    assert (job.status, job.attempts, job.last_error, job.created_at) == ("pending", 1, "went wrong", LONG_AGO)
    (entry,) = json.loads(job.history)
    assert entry == {
        "attempt": 1,
        "started": 1.0,
        "ended": 2.0,
        "worker": "me",
        "exception": "builtins.ValueError",
        "error": "went wrong",
        "traceback": "Trace…",
    }


def test_a_snoozed_job_waits_and_is_not_charged(claim: Claim) -> None:
    before = clock.now("default")
    assert Job.objects.snooze(claim, 60) == 1
    after = clock.now("default")
    job = Job.objects.get()
    assert math.ceil(before + 60 - 0.001) <= job.next_run_at <= math.ceil(after + 60 + 0.001)
    assert (job.status, job.attempts, job.last_error, job.history) == ("pending", 0, None, None)


def test_a_released_job_stands_where_it_stood(claim: Claim) -> None:
    assert Job.objects.release(claim) == 1
    job = Job.objects.get()
    assert (job.status, job.attempts, job.next_run_at, job.last_error, job.history) == (
        *("pending", 0, LONG_AGO, None, None),
    )


def test_a_buried_job_keeps_its_due_time_and_its_story(claim: Claim) -> None:
    assert Job.objects.bury(claim, FAILURE) == 1
    job = Job.objects.get()
    assert (job.status, job.attempts, job.next_run_at, job.last_error) == ("failed", 1, LONG_AGO, "went wrong")
    assert [entry["attempt"] for entry in json.loads(job.history)] == [1]
    assert retry("job")
    job.refresh_from_db()
    assert (job.status, job.attempts, job.last_error) == ("pending", 0, "went wrong")
    assert job.next_run_at > LONG_AGO
    assert len(json.loads(job.history)) == 1


def test_each_failed_attempt_adds_to_the_story() -> None:
    insert(row("job"))
    for attempt in (1, 2, 3):
        Job.objects.update(next_run_at=LONG_AGO)
        (claimed,) = Job.objects.claim(f"worker {attempt}", Lanes(), 1)
        assert claimed.attempt == attempt
        assert Job.objects.retry(claimed, FAILURE, 0) == 1
    entries = json.loads(Job.objects.get().history)
    assert [(entry["attempt"], entry["worker"]) for entry in entries] == [
        *((number, f"worker {number}") for number in (1, 2, 3)),
    ]


def test_admin_steps_do_nothing_to_jobs_that_are_not_there() -> None:
    assert not retry("nothing")
    assert not delete("nothing")


def test_a_dead_job_whose_key_is_live_again_stays_dead() -> None:
    insert(row("dead", status="failed", attempts=4, unique_key="key"), row("live", unique_key="key"))
    with pytest.raises(UniqueKeyIsLive) as caught:
        retry("dead")
    assert (caught.value.job_id, caught.value.live_id) == ("dead", "live")
    assert statuses() == {"dead": "failed", "live": "pending"}
    assert Job.objects.get(pk="dead").attempts == 4


# -- batches


def test_a_batch_is_deleted_by_the_fence_of_each_claim() -> None:
    insert(*(row(f"{number}", attempts=number % 2) for number in range(6)))
    claims = [*Job.objects.claim("a", Lanes(), 3), *Job.objects.claim("b", Lanes(), 3)]
    Job.objects.filter(pk="1").update(claimed_by="b")
    Job.objects.filter(pk="4").update(attempts=9)
    assert Job.objects.complete(claims) == 4
    assert statuses() == {"1": "running", "4": "running"}
    assert Job.objects.complete(claims) == 0
    assert Job.objects.complete([]) == 0


@pytest.mark.parametrize(
    "outcome",
    [COMPLETED, Retrying(FAILURE, 0), Snoozed(0), Dead(FAILURE), Released()],
    ids=lambda outcome: type(outcome).__name__,
)
def test_one_lost_claim_undoes_the_whole_batch(outcome: Any) -> None:
    insert(*(row(f"{number}") for number in range(5)))
    claims = Job.objects.claim("a", Lanes(), 5)
    Job.objects.filter(pk="3").update(claimed_by="b")
    with pytest.raises(ClaimsLost), short_transaction("default"):
        settle(Job.objects.all(), [(claim, outcome if claim.id == "3" else COMPLETED) for claim in claims])
    assert set(statuses().values()) == {"running"}
    assert len(statuses()) == 5


def test_a_batch_of_every_outcome_is_settled_together() -> None:
    outcomes = [COMPLETED, Retrying(FAILURE, 60), Snoozed(60), Dead(FAILURE), Released()]
    insert(*(row(f"{number}") for number in range(5)))
    claims = Job.objects.claim("a", Lanes(), 5)
    settle(Job.objects.all(), list(zip(claims, outcomes, strict=True)))
    assert statuses() == {"1": "pending", "2": "pending", "3": "failed", "4": "pending"}
    assert list(Job.objects.order_by("id").values_list("attempts", flat=True)) == [1, 0, 1, 0]
    assert not Job.objects.exclude(claimed_by=None, claimed_at=None).exists()


# -- rescue


def test_only_jobs_whose_owner_has_no_row_are_orphans() -> None:
    heart = Heart("default")
    heart.register()
    insert(
        row("orphan", status="running", claimed_by="gone"),
        row("mine", status="running", claimed_by=heart.worker),
        row("another program's", status="running"),
        row("pending", claimed_by="gone"),  # the original resets rows and leaves our columns as they are
        row("dead", status="failed", claimed_by="gone"),
        row("future", next_run_at=FAR_AHEAD),
    )
    before = statuses()
    assert [job.id for job in Job.objects.orphans(JobWorker.objects.all())] == ["orphan"]
    assert rescue_orphans("default") == 1
    assert statuses() == before | {"orphan": "pending"}
    assert Job.objects.get(pk="orphan").last_error == "worker lost: gone"
    assert rescue_orphans("default") == 0


def test_of_two_that_rescue_the_same_job_one_charges_it() -> None:
    insert(row("job", status="running", claimed_by="gone"))
    workers = JobWorker.objects.all()
    (one,), (two,) = (Job.objects.orphans(workers).as_claims() for _ in range(2))
    assert Job.objects.retry(one, FAILURE, 0) == 1
    assert Job.objects.retry(two, FAILURE, 0) == 0
    assert Job.objects.bury(two, FAILURE) == 0
    assert Job.objects.get().attempts == 1


def test_a_rescuer_that_comes_after_the_end_of_the_job_changes_nothing(claim: Claim) -> None:
    (found,) = Job.objects.orphans(JobWorker.objects.all()).as_claims()
    assert Job.objects.snooze(claim, 60) == 1
    assert Job.objects.retry(found, FAILURE, 0) == 0
    assert Job.objects.get().attempts == 0


def test_a_lost_job_is_buried_when_it_has_cost_a_worker_before_and_no_attempt_is_left() -> None:
    insert(row("job", max_retries=1))
    for attempt, status in ((1, "pending"), (2, "failed")):
        Job.objects.update(next_run_at=LONG_AGO)
        (claimed,) = Job.objects.claim(f"gone {attempt}", Lanes(), 1)
        assert claimed.attempt == attempt
        assert rescue_orphans("default") == 1
        assert statuses() == {"job": status}
    assert Job.objects.get().attempts == 2


def test_a_first_loss_alone_never_buries_a_job() -> None:
    insert(row("job", max_retries=0))
    Job.objects.claim("gone", Lanes(), 1)
    assert rescue_orphans("default") == 1
    assert statuses() == {"job": "pending"}
    assert Job.objects.get().attempts == 1


def test_many_orphans_are_all_rescued() -> None:
    insert(*(row(f"{number:03}", status="running", claimed_by="gone") for number in range(250)))
    assert rescue_orphans("default") == 250
    assert set(Job.objects.values_list("status", "attempts", "claimed_by")) == {("pending", 1, None)}


def test_a_worker_that_beats_while_it_is_watched_is_not_declared_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch measures with its own clock, and declares dead only on the beat that it has read."""
    moment = 0.0
    monkeypatch.setattr("rws_jobs.liveness.time.monotonic", lambda: moment)
    JobWorker.objects.create(id="alive", host="h", pid=1, started_at=1, beat_at=1, lease=10)
    JobWorker.objects.create(id="still", host="h", pid=1, started_at=1, beat_at=1, lease=10)
    insert(*(row(name, status="running", claimed_by=name) for name in ("alive", "still")))
    watch = Watch("default")
    for beat in range(2, 12):
        assert watch.look() == 0
        moment += 1.0
        JobWorker.objects.filter(pk="alive").update(beat_at=beat)
    assert watch.look() == 0, "exactly the lease is not longer than the lease"
    moment += 0.5
    assert watch.look() == 1
    assert set(JobWorker.objects.values_list("pk", flat=True)) == {"alive"}
    assert statuses() == {"alive": "running", "still": "pending"}


def test_a_worker_that_beats_after_it_was_looked_at_is_not_declared_dead() -> None:
    JobWorker.objects.create(id="late", host="h", pid=1, started_at=1, beat_at=5, lease=10)
    watch = Watch("default")
    watch._declare_dead("late", 4)
    assert JobWorker.objects.exists()
    watch._declare_dead("late", 5)
    assert not JobWorker.objects.exists()


def test_after_an_outage_nobody_is_dead_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0.0
    monkeypatch.setattr("rws_jobs.liveness.time.monotonic", lambda: moment)
    JobWorker.objects.create(id="quiet", host="h", pid=1, started_at=1, beat_at=1, lease=10)
    watch = Watch("default")
    watch.look()
    watch.forget()
    moment += 60.0
    watch.look()
    assert JobWorker.objects.exists()
    moment += 10.5
    watch.look()
    assert not JobWorker.objects.exists()
