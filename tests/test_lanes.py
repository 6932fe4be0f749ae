"""Lanes: the due jobs in claim order, found by seeks; and how stale a hot worker's view of them may be."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rws_jobs import lanes as module
from rws_jobs.lanes import FLOORS_KEPT, LANES_KEPT, MOST_LANES, Lanes
from rws_jobs.models import Job
from rws_jobs.transactions import short_transaction

from .rows import FAR_AHEAD, LONG_AGO, insert, row
from .waiting import another_connection

pytestmark = pytest.mark.django_db(transaction=True)


class Clock:
    """Stands for the time module in lanes.py: nothing here waits."""

    def __init__(self) -> None:
        self.moment = 1000.0

    def monotonic(self) -> float:
        return self.moment


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def heads(lanes: Lanes, limit: int = 1000) -> list[str]:
    return [head[0] for head in lanes.heads(Job.objects.all(), limit)]


def claim(lanes: Lanes, limit: int, using: str = "default") -> list[str]:
    with short_transaction(using):
        return [claim.id for claim in Job.objects.using(using).claim("worker", lanes, limit)]


@contextmanager
def hot(lanes: Lanes) -> Iterator[None]:
    """At full speed: lanes and floors are remembered."""
    lanes.hot = True
    yield
    lanes.cool()
    assert not lanes.hot


# -- exact

VALUES = st.lists(
    st.tuples(
        st.sampled_from("abcd"),  # queue
        st.integers(-2, 2),  # priority
        st.sampled_from([1, 2, 3, FAR_AHEAD]),  # due
        st.integers(1, 2),  # enqueued
        st.sampled_from(["tests.noop", "other"]),
        st.sampled_from(["pending", "pending", "pending", "running", "failed"]),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=VALUES,
    limit=st.integers(1, 50),
    queues=st.none() | st.lists(st.sampled_from("abce"), min_size=1, unique=True),
    exclude=st.lists(st.sampled_from("abe"), unique=True),
    job_types=st.none() | st.just(["tests.noop"]),
)
def test_lanes_and_the_one_query_beyond_them_agree_with_a_sort_in_python(
    values: list[Any], limit: int, queues: Any, exclude: Any, job_types: Any
) -> None:
    Job.objects.all().delete()
    rows = [
        row(f"{number}", queue=queue, priority=priority, next_run_at=due, created_at=at, job_type=kind, status=status)
        for number, (queue, priority, due, at, kind, status) in enumerate(values)
    ]
    insert(*rows)
    due = [
        job
        for job in rows
        if job.status == "pending"
        and job.next_run_at < FAR_AHEAD
        and (queues is None or job.queue in queues)
        and job.queue not in exclude
        and (job_types is None or job.job_type in job_types)
    ]
    due.sort(key=lambda job: (-job.priority, job.next_run_at, job.created_at, job.id))
    expected = [job.id for job in due][:limit]

    def found() -> list[str]:
        return heads(Lanes(queues, exclude, None if job_types is None else lambda: job_types), limit)

    assert found() == expected
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "MOST_LANES", 0)
        assert found() == expected


@pytest.mark.parametrize("count", [MOST_LANES, MOST_LANES + 1])
def test_on_both_sides_of_the_most_lanes_the_order_is_the_same(count: int) -> None:
    rows = [
        row(f"{number:03}", queue=f"{number % 8}", priority=number // 8, next_run_at=LONG_AGO + number % 5)
        for number in range(count)
    ]
    more = [row(f"{job.id}+", queue=job.queue, priority=job.priority, next_run_at=LONG_AGO + 2) for job in rows]
    insert(*rows, *more)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        found = heads(Lanes())
    in_order = sorted([*rows, *more], key=lambda job: (-job.priority, job.next_run_at, job.id))
    assert found == [job.id for job in in_order]
    # One sorted query beyond; below it each lane's own.
    sorted_queries = [query["sql"] for query in queries if "next_run_at" in query["sql"].partition("WHERE")[2]]
    assert len(sorted_queries) == (count if count <= MOST_LANES else 1)


def test_beyond_the_most_lanes_an_open_claim_leaves_the_other_jobs_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database has one writer at a time")
    monkeypatch.setattr(module, "MOST_LANES", 2)
    insert(*(row(f"{number}", queue=f"{number}") for number in range(9)))
    with another_connection() as another, short_transaction("default"):
        assert [claim.id for claim in Job.objects.claim("a", Lanes(), 2)] == ["0", "1"]
        assert claim(Lanes(), 2, using=another) == ["2", "3"]


def test_no_more_is_read_than_is_wanted() -> None:
    insert(*(row(f"{number}", priority=number % 3) for number in range(9)))
    with CaptureQueriesContext(connection) as queries:
        assert heads(Lanes(), 3) == ["2", "5", "8"]
    lane_reads = [query["sql"] for query in queries if "next_run_at" in query["sql"].partition("WHERE")[2]]
    assert len(lane_reads) == 1, "the highest priority has enough"
    assert lane_reads[0].endswith("LIMIT 3")


def test_what_waits_elsewhere_costs_no_statement() -> None:
    insert(row("wanted", queue="wanted"))
    with CaptureQueriesContext(connection) as alone:
        heads(Lanes(["wanted"]))
    insert(*(row(f"{number}", queue=f"{number % 20}", priority=number) for number in range(60)))
    with CaptureQueriesContext(connection) as among_others:
        assert heads(Lanes(["wanted"])) == ["wanted"]
    assert len(among_others) == len(alone)


def test_no_queues_at_all_mean_every_queue() -> None:
    insert(row("a", queue="one"), row("b", queue="two"))
    assert heads(Lanes(None)) == heads(Lanes([])) == ["a", "b"]


# -- hot


def test_a_hot_look_does_not_seek_lanes_it_knows(clock: Clock) -> None:
    insert(*(row(f"{number}", queue=f"{number}") for number in range(5)))
    lanes = Lanes()
    with CaptureQueriesContext(connection) as cold:
        heads(lanes)
    with hot(lanes), CaptureQueriesContext(connection) as queries:
        assert heads(lanes) == ["0", "1", "2", "3", "4"]
    assert len(queries) == 5 < len(cold)


def test_a_hot_worker_sees_a_new_lane_after_a_tenth_of_a_second(clock: Clock) -> None:
    insert(row("old"))
    lanes = Lanes()
    with hot(lanes):
        assert heads(lanes) == ["old"]
        insert(row("urgent", priority=9), row("elsewhere", queue="mail"))
        clock.moment += LANES_KEPT + 0.001
        assert heads(lanes) == ["urgent", "elsewhere", "old"]


def test_a_hot_worker_sees_new_jobs_of_a_known_lane_at_once(clock: Clock) -> None:
    insert(row("1", next_run_at=LONG_AGO), row("2", next_run_at=LONG_AGO + 5))
    lanes = Lanes()
    with hot(lanes):
        assert claim(lanes, 1) == ["1"]
        insert(row("3", next_run_at=LONG_AGO + 9))
        assert claim(lanes, 9) == ["2", "3"]


def test_a_hot_worker_reads_from_the_time_it_has_reached(clock: Clock) -> None:
    insert(*(row(f"{number}", next_run_at=LONG_AGO + number) for number in range(3)))
    lanes = Lanes()
    with hot(lanes):
        assert claim(lanes, 2) == ["0", "1"]
        assert heads(lanes) == ["2"]  # reached: LONG_AGO + 2
        with CaptureQueriesContext(connection) as queries:
            assert heads(lanes) == ["2"]
        assert all(str(LONG_AGO + 2) in query["sql"] for query in queries)


def test_a_hot_worker_sees_a_job_that_returned_to_an_earlier_time_after_a_second(clock: Clock) -> None:
    insert(row("late", next_run_at=LONG_AGO + 5), row("later", next_run_at=LONG_AGO + 6))
    lanes = Lanes()
    with hot(lanes):
        assert heads(lanes) == ["late", "later"]
        insert(row("returned"))
        clock.moment += FLOORS_KEPT + 0.001
        assert heads(lanes) == ["returned", "late", "later"]


def test_looking_does_not_put_off_the_look_from_the_start(clock: Clock) -> None:
    insert(row("late", next_run_at=LONG_AGO + 5))
    lanes = Lanes()
    with hot(lanes):
        assert heads(lanes) == ["late"]
        insert(row("returned"))
        begun = clock.moment
        while "returned" not in heads(lanes):
            clock.moment += 0.05
            assert clock.moment - begun < FLOORS_KEPT + 0.1


def test_cooled_it_is_exact_at_once(clock: Clock) -> None:
    insert(row("late", next_run_at=LONG_AGO + 5))
    lanes = Lanes()
    with hot(lanes):
        assert heads(lanes) == ["late"]
        insert(row("returned"), row("urgent", priority=9))
    assert heads(lanes) == ["urgent", "returned", "late"]


def test_cooled_and_hot_again_it_has_forgotten_what_it_had_reached(clock: Clock) -> None:
    insert(row("late", next_run_at=LONG_AGO + 5))
    lanes = Lanes()
    with hot(lanes):
        assert heads(lanes) == ["late"]
    insert(row("returned"), row("urgent", priority=9))
    with hot(lanes):
        assert heads(lanes) == ["urgent", "returned", "late"]


def test_what_another_holds_locked_is_not_passed_by_for_good(clock: Clock) -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database does not skip locked rows")
    insert(row("held"), row("mine", next_run_at=LONG_AGO + 5))
    lanes = Lanes()
    with another_connection() as another, hot(lanes):
        with short_transaction(another):
            assert [claim.id for claim in Job.objects.using(another).claim("b", Lanes(), 1)] == ["held"]
            assert claim(lanes, 1) == ["mine"]
            transaction.set_rollback(True, using=another)
        clock.moment += FLOORS_KEPT + 0.001
        assert claim(lanes, 1) == ["held"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(0, 9)), max_size=30),
    batches=st.lists(st.integers(1, 5), min_size=1),
)
def test_while_nothing_comes_a_hot_worker_claims_in_exact_order(values: list[Any], batches: list[int]) -> None:
    Job.objects.all().delete()
    rows = [
        row(f"{number:02}", queue=queue, priority=priority, next_run_at=LONG_AGO + due)
        for number, (queue, priority, due) in enumerate(values)
    ]
    insert(*rows)
    rows.sort(key=lambda job: (-job.priority, job.next_run_at, job.id))
    lanes = Lanes()
    claimed: list[str] = []
    with hot(lanes):
        for limit in [*batches, *[5] * 6]:
            claimed += claim(lanes, limit)
    assert claimed == [job.id for job in rows]


STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "claim"]), st.integers(1, 4), st.sampled_from("ab"), st.integers(0, 2)),
    max_size=30,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, clock_step=st.sampled_from([0.0, 0.06, 0.6]))
def test_hot_or_not_each_job_is_claimed_once_and_none_is_left(steps: list[Any], clock_step: float) -> None:
    Job.objects.all().delete()
    clock = Clock()
    lanes = Lanes()
    inserted: list[str] = []
    claimed: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
        with hot(lanes):
            for what, number, queue, priority in steps:
                clock.moment += clock_step
                if what == "claim":
                    claimed += claim(lanes, number)
                else:
                    inserted.append(f"{len(inserted):03}")
                    insert(row(inserted[-1], queue=queue, priority=priority, next_run_at=LONG_AGO + number))
        claimed += claim(lanes, 1000)
    assert sorted(claimed) == inserted
