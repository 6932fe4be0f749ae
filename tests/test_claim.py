"""Claims: in the promised order, only what was asked for, and each job to one worker."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rws_jobs import enqueue, enqueue_many, tick
from rws_jobs.info import Claim
from rws_jobs.lanes import Lanes
from rws_jobs.models import Job, JobWorker
from rws_jobs.outages import Verdict, verdict
from rws_jobs.outcomes import Failure
from rws_jobs.transactions import short_transaction

from .jobs import calls, note, record
from .processes import Processes
from .rows import FAR_AHEAD, LONG_AGO, Ledger, insert, row, statuses
from .waiting import another_connection, apart, until_one_waits_for_a_lock, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

one_writer_at_a_time = pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="SQLite has one write lock: no second claim begins while one is open"
)
FAILURE = Failure(error="no", exception="builtins.ValueError", traceback="", started=0.0, ended=0.0)


def claim(limit: int = 1000, *, worker: str = "a", using: str = "default", lanes: Lanes | None = None) -> list[Claim]:
    with short_transaction(using):
        return Job.objects.using(using).claim(worker, lanes or Lanes(), limit)


def ids(claims: list[Claim]) -> list[str]:
    return [claim.id for claim in claims]


def in_order(rows: list[Job]) -> list[str]:
    """The promise, in Python: larger priority, earlier due, earlier enqueued, smaller id by bytes."""
    return [job.id for job in sorted(rows, key=lambda job: (-job.priority, job.next_run_at, job.created_at, job.id))]


# -- order


def test_order_is_priority_then_due_then_enqueued_then_id() -> None:
    insert(
        row("low", priority=-1, next_run_at=1, created_at=1),
        row("late", next_run_at=9, created_at=1),
        row("b", next_run_at=5, created_at=5),
        row("early", next_run_at=1, created_at=9),
        row("a", next_run_at=5, created_at=5),
        row("older", next_run_at=5, created_at=4),
        row("high", priority=1, next_run_at=99, created_at=99),
    )
    assert ids(claim()) == ["high", "early", "older", "a", "b", "late", "low"]


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["default", "Default", "mail", "mail ", "é"]),
        st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]),
        st.integers(1, 4),
        st.integers(1, 2),
        st.text("aZ0-_é ", min_size=1, max_size=3).map(lambda text: text + "."),
    ),
    max_size=25,
    unique_by=lambda values: values[-1],
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=ROWS, batches=st.lists(st.integers(1, 7), min_size=1))
def test_order_holds_over_all_queues_and_however_many_are_taken_at_once(values: list[Any], batches: list[int]) -> None:
    Job.objects.all().delete()
    rows = [
        row(id, queue=queue, priority=priority, next_run_at=due, created_at=enqueued)
        for queue, priority, due, enqueued, id in values
    ]
    insert(*rows)
    claimed: list[str] = []
    for limit in [*batches, 1000]:
        some = ids(claim(limit))
        assert len(some) == min(limit, len(rows) - len(claimed))
        claimed += some
    assert claimed == in_order(rows)


def test_jobs_of_one_second_run_first_in_first_out() -> None:
    first, second, third = (str(enqueue("tests.noop")) for _ in range(3))
    assert ids(claim()) == [first, second, third]


def test_tick_runs_in_claim_order() -> None:
    for value, priority in (("normal", 0), ("urgent", 10), ("some day", -5)):
        note.using(priority=priority).enqueue(value)
    calls.clear()
    while tick():
        pass
    assert calls == ["urgent", "normal", "some day"]


def test_a_rescued_job_comes_before_less_urgent_ones() -> None:
    insert(*(row(f"job {number}") for number in range(3)), row("urgent", priority=10, next_run_at=LONG_AGO + 5))
    (urgent,) = claim(1)
    with short_transaction("default"):
        assert Job.objects.retry(urgent, FAILURE, 0) == 1
    wait_for(lambda: Lanes().heads(Job.objects.all(), 1)[0][0] == "urgent", what="the retried job to be due")
    assert ids(claim(1)) == ["urgent"]


def test_queues_of_equal_priority_take_turns_by_due_time() -> None:
    insert(*(row(f"flood {number:02}", queue="flood", next_run_at=number) for number in range(50)))
    insert(*(row(f"mail {number}", queue="mail", next_run_at=10 * number) for number in range(5)))
    claimed = [ids(claim(4)) for _ in range(12)]
    assert all(len(some) == 4 for some in claimed)
    order = [id for some in claimed for id in some]
    # Each mail comes right where its due time stands in the flood, not behind it all.
    assert [order.index(f"mail {number}") for number in range(5)] == [1, 12, 23, 34, 45]


# -- what is claimed, and what is not


def test_only_due_and_pending_jobs_are_claimed() -> None:
    insert(
        row("due"),
        row("future", next_run_at=FAR_AHEAD),
        row("running", status="running", claimed_by="other"),
        row("foreign", status="running"),
        row("dead", status="failed"),
    )
    before = statuses()
    assert ids(claim()) == ["due"]
    assert statuses() == before | {"due": "running"}


def test_a_claim_is_signed_and_dated_by_the_database() -> None:
    insert(row("job", attempts=2, payload='{"x": 1}', meta='{"y": 2}', unique_key="key"))
    before = Job.objects.get().created_at
    enqueue("tests.noop", run_in=0)
    (claimed,) = claim(1, worker="me")
    job = Job.objects.get(pk="job")
    assert (job.status, job.claimed_by, job.attempts, job.created_at) == ("running", "me", 2, before)
    assert abs(job.claimed_at - Job.objects.exclude(pk="job").get().created_at) <= 60
    assert (claimed.worker, claimed.attempts, claimed.attempt) == ("me", 2, 3)
    assert (claimed.payload, claimed.meta, claimed.unique_key) == ('{"x": 1}', '{"y": 2}', "key")


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        ({}, ["a", "b", "c", "d"]),
        ({"queues": None}, ["a", "b", "c", "d"]),
        ({"queues": ["one"]}, ["a", "c"]),
        ({"queues": ["two", "one"]}, ["a", "b", "c"]),
        ({"queues": ["ONE", "one ", "on"]}, []),
        ({"exclude": ["one"]}, ["b", "d"]),
        ({"exclude": ["one", "two"]}, ["d"]),
        ({"queues": ["one", "two"], "exclude": ["two"]}, ["a", "c"]),
        ({"job_types": lambda: ["tests.noop"]}, ["a", "b", "d"]),
        ({"queues": ["one"], "job_types": lambda: ["tests.noop"]}, ["a"]),
        ({"job_types": list}, []),
    ],
)
@pytest.mark.parametrize("most_lanes", [64, 1])
def test_only_what_was_asked_for_is_claimed(
    lanes: Any, expected: list[str], most_lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rws_jobs.lanes.MOST_LANES", most_lanes)
    insert(
        row("a", queue="one"), row("b", queue="two"), row("c", queue="one", job_type="other"), row("d", queue="three")
    )
    assert ids(claim(lanes=Lanes(**lanes))) == expected
    assert Job.objects.running().count() == len(expected)


def test_never_more_than_the_limit() -> None:
    insert(*(row(f"{number}", queue=f"{number % 3}") for number in range(10)))
    assert [len(claim(limit)) for limit in (1, 4, 4, 4)] == [1, 4, 4, 1]


def test_a_worker_that_leaves_unknown_jobs_claims_what_it_can_run(settings: Any) -> None:
    settings.RWS_JOBS = {"UNKNOWN_JOBS": "leave"}
    insert(row("unknown", job_type="of another program", priority=9), row("known"))
    assert tick()
    assert not tick()
    assert statuses() == {"unknown": "pending"}


# -- one winner


def test_the_update_names_ids_and_status_at_its_top_level() -> None:
    # As UPDATE … WHERE id IN (SELECT …) PostgreSQL answers "1 row" to both of two workers.
    for lanes in (Lanes(), Lanes(["one", "two"], ["two"], lambda: ["tests.noop"])):
        insert(row("job", queue="one"))
        with written() as statements:
            assert ids(claim(lanes=lanes)) == ["job"]
        ((sql, params),) = statements
        assert sql.upper().count("SELECT") == 0
        _, where = sql.split(" WHERE ")
        assert "status" in where
        assert list(params).count("pending") == 2
        assert "job" in params or ["job"] in params
        Job.objects.all().delete()


def test_of_two_claims_of_one_job_the_second_changes_no_row() -> None:
    insert(row("job"))
    with written() as statements:
        claim(worker="a")
    ((sql, params),) = statements
    Job.objects.update(status="pending", claimed_by=None)
    theirs = ["b" if value == "a" else value for value in params]

    def update(params: Any) -> int:
        with short_transaction("default"), connection.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    with short_transaction("default"):
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            assert cursor.rowcount == 1
        other = apart(update, theirs)
        if connection.vendor != "sqlite":
            until_one_waits_for_a_lock()
    assert other.result(timeout=30) == 0
    assert Job.objects.get().claimed_by == "a"


def test_an_open_claim_is_passed_over_not_waited_for() -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database does not skip locked rows")
    insert(*(row(f"{number}") for number in range(6)))
    with another_connection() as another, short_transaction("default"):
        assert ids(Job.objects.claim("a", Lanes(), 3)) == ["0", "1", "2"]
        assert ids(claim(2, worker="b", using=another)) == ["3", "4"]
        # Looking is free: without a lock the rows are still seen.
        assert len(Lanes().heads(Job.objects.using(another), 6)) == 4
    assert ids(claim(worker="b")) == ["5"]
    assert list(Job.objects.order_by("id").values_list("claimed_by", flat=True)) == ["a", "a", "a", "b", "b", "b"]


def test_a_claim_rolled_back_was_none() -> None:
    insert(row("job", attempts=1))
    with short_transaction("default"):
        assert ids(Job.objects.claim("a", Lanes(), 1)) == ["job"]
        transaction.set_rollback(True)
    assert list(Job.objects.values_list("status", "claimed_by", "claimed_at")) == [("pending", None, None)]
    assert ids(claim(worker="b")) == ["job"]


@pytest.mark.parametrize("skip_locked", [True, False])
def test_connections_that_claim_at_once_never_get_the_same_job(
    skip_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not skip_locked:
        without_row_locks(monkeypatch)
    rows = [row(f"{number:03}", queue=f"{number % 2}", priority=number % 3) for number in range(240)]
    insert(*rows)
    together = threading.Barrier(3)

    def take_all(worker: str) -> list[str]:
        taken: list[str] = []
        together.wait(30)
        while some := retried(lambda: ids(claim(7, worker=worker)), or_while=Job.objects.pending().exists):
            taken += some
        return taken

    workers = [apart(take_all, name) for name in "abc"]
    taken = {name: worker.result(timeout=60) for name, worker in zip("abc", workers, strict=True)}
    assert sorted(id for some in taken.values() for id in some) == [job.id for job in rows]
    owners = dict(Job.objects.values_list("id", "claimed_by"))
    assert owners == {id: name for name, some in taken.items() for id in some}


@one_writer_at_a_time
def test_without_row_locks_one_of_two_that_saw_the_same_heads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    without_row_locks(monkeypatch)
    insert(row("job"))
    both_saw_it = threading.Barrier(2)

    class Slowly(Lanes):
        def heads(self, jobs: Any, limit: int) -> Any:
            found = super().heads(jobs, limit)
            assert [head[0] for head in found] == ["job"]
            both_saw_it.wait(30)
            return found

    one, two = (apart(lambda name=name: claim(worker=name, lanes=Slowly())) for name in "ab")
    claims = [*one.result(timeout=30), *two.result(timeout=30)]
    assert len(claims) == 1
    assert Job.objects.get().claimed_by == claims[0].worker


@one_writer_at_a_time
def test_without_row_locks_a_job_that_ran_elsewhere_meanwhile_is_claimed_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_row_locks(monkeypatch)
    insert(row("job"), row("other", next_run_at=LONG_AGO + 1))
    with another_connection() as another:

        def ran_and_failed() -> None:
            (theirs,) = claim(1, worker="b", using=another)
            with short_transaction(another):
                assert Job.objects.using(another).retry(theirs, FAILURE, 0) == 1
            due = Job.objects.using(another).filter(pk="job").update
            due(next_run_at=LONG_AGO)

        claims = claim(lanes=Meanwhile(ran_and_failed))
    assert {claim.id: claim.attempts for claim in claims} == {"job": 1, "other": 0}
    with short_transaction("default"):
        assert Job.objects.complete(claims) == 2, "a claim with an outdated fence can never be settled"


@one_writer_at_a_time
def test_without_row_locks_a_job_that_was_put_off_meanwhile_does_not_start_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_row_locks(monkeypatch)
    insert(row("job"))
    with another_connection() as another:

        def ran_and_failed() -> None:
            (theirs,) = claim(1, worker="b", using=another)
            with short_transaction(another):
                assert Job.objects.using(another).retry(theirs, FAILURE, 3600) == 1

        claims = claim(lanes=Meanwhile(ran_and_failed))
    assert claims == []
    assert statuses() == {"job": "pending"}


def test_a_caller_in_a_transaction_of_its_own_can_tick() -> None:
    note.enqueue("inside")
    calls.clear()
    with transaction.atomic():
        assert tick()
        assert not tick()
    assert calls == ["inside"]
    assert not Job.objects.exists()
    assert not JobWorker.objects.exists()


# -- many processes


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger()
    yield made
    made.drop()


def test_many_processes_run_each_job_once(ledger: Ledger, tmp_path: Path) -> None:
    jobs = enqueue_many(record.message() for _ in range(1000))
    with Processes(tmp_path) as processes:
        workers = [processes.runjobs("--drain", "--threads", "2") for _ in range(4)]
        assert [worker.wait(120) for worker in workers] == [0, 0, 0, 0]
        logs = "".join(worker.log for worker in workers)
    assert ledger.started == sorted(jobs)
    assert {entry.attempt for entry in ledger.entries} == {1}
    assert not Job.objects.exists()
    assert not JobWorker.objects.exists()
    assert "Traceback" not in logs
    assert "claim was lost" not in logs


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_default_isolation_makes_no_difference(level: str, ledger: Ledger, tmp_path: Path) -> None:
    options = {
        "postgresql": {"options": f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"},
        "mysql": {"isolation_level": level},
    }.get(connection.vendor)
    if options is None:
        pytest.skip("SQLite is always serializable")
    jobs = enqueue_many(record.message() for _ in range(200))
    settings = f"DATABASES['default'].setdefault('OPTIONS', {{}}).update({options!r})"
    with Processes(tmp_path) as processes:
        workers = [processes.runjobs("--drain", settings=settings) for _ in range(2)]
        assert [worker.wait(120) for worker in workers] == [0, 0]
        logs = "".join(worker.log for worker in workers)
    assert ledger.started == sorted(jobs)
    assert "rror" not in logs, logs


# -- helpers


class Meanwhile(Lanes):
    """Lanes beside which something else happens between the look and the claim."""

    def __init__(self, happen: Callable[[], None]) -> None:
        super().__init__()
        self._happen = happen

    def heads(self, jobs: Any, limit: int) -> Any:
        found = super().heads(jobs, limit)
        self._happen()
        return found


@contextmanager
def written(alias: str = "default") -> Iterator[list[tuple[str, Any]]]:
    """Collect the UPDATEs of jobs, as they are sent."""
    statements: list[tuple[str, Any]] = []

    def collect(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE") and "rws_jobs" in sql:
            statements.append((sql, params))
        return execute(sql, params, many, context)

    with ExitStack() as stack:
        stack.enter_context(connections[alias].execute_wrapper(collect))
        yield statements


def without_row_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MySQL 5.7 and MariaDB 10.5."""
    for name in ("has_select_for_update", "has_select_for_update_skip_locked"):
        # For connections to come, and for this one, which may remember.
        monkeypatch.setattr(type(connection.features), name, False)
        monkeypatch.setattr(connection.features, name, False)


def retried(claim: Callable[[], list[str]], or_while: Callable[[], bool]) -> list[str]:
    """As the worker does: again after a deadlock, and when others were faster with all that it had seen."""
    while True:
        try:
            if (taken := claim()) or not or_while():
                return taken
        except OperationalError as error:
            if verdict(error) is not Verdict.ROLLED_BACK:
                raise
