"""At most one pending or running job per type and unique key, for every writer on every database."""

from collections.abc import Callable
from threading import Barrier, Event
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction

from rws_jobs import Enqueued, UniqueKeyIsLive, enqueue, enqueue_many, jobs, message, register, retry, tick
from rws_jobs.info import JobInfo
from rws_jobs.models import Job
from rws_jobs.outages import Verdict, verdict

from . import original
from .conftest import Clock
from .waiting import wait_for

pytestmark = pytest.mark.django_db

Elsewhere = Callable[..., Any]


def live(key: str = "k", job_type: str = "work") -> list[JobInfo]:
    found = [info for info in jobs(limit=10_000) if info.unique_key == key and info.job_type == job_type]
    return [info for info in found if info.status in ("pending", "running")]


def dead_letter(key: str | None = "k", job_type: str = "work") -> str:
    job_id = enqueue(job_type, "dead", unique_key=key)
    Job.objects.filter(pk=job_id).update(status="failed", attempts=4, last_error="why")
    return job_id


def keyed(payload: str = "", key: str = "k") -> Enqueued:
    return enqueue("work", payload, unique_key=key)


# -- what a key means


def test_the_second_enqueue_says_that_it_made_nothing() -> None:
    first, second = keyed("first"), keyed("second")
    assert (first.created, second.created) == (True, False)
    assert second == first
    assert [info.payload for info in jobs()] == ["first"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("key", "KEY"),
        ("key", "key "),
        ("key", " key"),
        ("ä", "a"),
        ("ss", "ß"),
        ("\u00e9", "e\u0301"),
        ("k\n", "k"),
        ("1", "01"),
    ],
    ids=ascii,
)
def test_keys_are_compared_byte_by_byte(one: str, other: str) -> None:
    assert keyed(key=one).created
    assert keyed(key=other).created
    many = enqueue_many([message("work", unique_key=key) for key in (one, other)])
    assert [item.created for item in many] == [False, False]
    assert len(set(many)) == 2


def test_job_types_are_compared_byte_by_byte() -> None:
    assert enqueue("work", unique_key="k").created
    assert enqueue("Work", unique_key="k").created
    assert enqueue("work ", unique_key="k").created


def test_the_longest_type_and_key_fit() -> None:
    for last in "ab":
        assert enqueue("ü" * 255, unique_key="😀" * 190 + last).created
    assert not enqueue("ü" * 255, unique_key="😀" * 190 + "a").created


def test_a_type_and_a_key_are_not_taken_for_another_pair() -> None:
    assert enqueue("a", unique_key="b\nc").created
    assert enqueue("a b", unique_key="c").created
    assert enqueue("a", unique_key="b").created
    assert not enqueue("a", unique_key="b\nc").created


def test_jobs_without_a_key_are_never_the_same() -> None:
    assert len({enqueue("work", "p"), enqueue("work", "p"), *enqueue_many([message("work", "p")] * 2)}) == 4


def test_the_database_holds_it_for_other_programs_too() -> None:
    keyed()
    with pytest.raises(IntegrityError), transaction.atomic():
        original.run(original.INSERT_ALL, "18c0-0", "work", "", 3, 1, 1, "default", 0, "k")
    original.run(original.INSERT_ALL, "18c0-0", "work", "", 3, 1, 1, "default", 0, "other")
    with pytest.raises(IntegrityError), transaction.atomic():
        Job.objects.filter(pk="18c0-0").update(unique_key="k")


def test_a_job_that_another_program_enqueued_is_answered() -> None:
    original.run(original.INSERT_ALL, "18c0-0", "work", "", 3, 1, 1, "default", 0, "k")
    enqueued = keyed()
    assert (enqueued, enqueued.created) == ("18c0-0", False)


# -- S-063 to S-067


@pytest.mark.django_db(transaction=True)
def test_S063_a_duplicate_leaves_the_callers_transaction_usable() -> None:
    with transaction.atomic():
        Group.objects.create(name="order")
        first, second = keyed(), keyed()
        assert Group.objects.count() == 1
    assert (first.created, second.created, first) == (True, False, second)
    assert Group.objects.count() == 1
    assert len(live()) == 1


@pytest.mark.django_db(transaction=True)
def test_S063_a_duplicate_that_was_committed_meanwhile_leaves_it_usable_too(elsewhere: Elsewhere) -> None:
    """The look does not see it, the insert does: on MariaDB since a REPEATABLE READ transaction reads its snapshot."""
    with transaction.atomic():
        Group.objects.create(name="order")
        assert not jobs()  # the snapshot, where there is one
        # On SQLite the only write lock is ours: nobody can come between.
        first = keyed("theirs") if connection.vendor == "sqlite" else elsewhere(keyed, "theirs").result(30)
        second = keyed("ours")
        many = enqueue_many([message("work", unique_key="k"), message("work", unique_key="new")])
        assert Group.objects.count() == 1
    assert (second, second.created) == (first, False)
    assert [item.created for item in many] == [False, True]
    assert many[0] == first
    assert [info.payload for info in live()] == ["theirs"]
    assert Group.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("atomic", [True, False], ids=["inside atomic()", "in autocommit"])
@pytest.mark.parametrize("way", ["one", "many"])
def test_S064_a_first_caller_that_rolls_back_does_not_swallow_the_second(
    atomic: bool, way: str, elsewhere: Elsewhere
) -> None:
    started = Event()

    def second() -> Enqueued:
        started.set()
        if not atomic:
            return enqueue_one()
        with transaction.atomic():
            enqueued = enqueue_one()
            Group.objects.create(name="second")
        return enqueued

    def enqueue_one() -> Enqueued:
        return keyed("second") if way == "one" else enqueue_many([message("work", "second", unique_key="k")])[0]

    with transaction.atomic():
        assert keyed("first").created
        future = elsewhere(second)
        assert started.wait(30)
        wait_for(lambda: future.done() or waits_for_a_lock(), what="the second caller to meet the first")
        transaction.set_rollback(True)
    enqueued = future.result(30)
    assert enqueued.created
    assert [(info.id, info.payload) for info in live()] == [(enqueued, "second")]


@pytest.mark.django_db(transaction=True)
def test_S064_a_first_caller_that_commits_is_answered_to_the_second(elsewhere: Elsewhere) -> None:
    started = Event()

    def second() -> Enqueued:
        started.set()
        with transaction.atomic():
            return keyed("second")

    with transaction.atomic():
        first = keyed("first")
        future = elsewhere(second)
        assert started.wait(30)
        wait_for(lambda: future.done() or waits_for_a_lock(), what="the second caller to meet the first")
    enqueued = future.result(30)
    assert (enqueued, enqueued.created) == (first, False)
    assert [info.payload for info in live()] == ["first"]


def waits_for_a_lock() -> bool:
    """Somebody waits for a lock that we hold."""
    if connection.vendor == "postgresql":
        sql = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
        return bool(original.ask(sql)[0][0])
    if connection.vendor == "mysql":
        return original.ask("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")[0][1] != "0"
    return True  # on SQLite nobody tells; the second caller asks again and again until we are done


def test_S065_while_it_runs_its_key_answers_it_and_afterwards_one_more_is_made() -> None:
    answered: list[Enqueued] = []

    def enqueue_itself(payload: str) -> None:
        if not answered:
            answered.extend(keyed() for _ in range(5))

    register("work", enqueue_itself)
    first = keyed()
    assert tick()
    assert [(item, item.created) for item in answered] == [(first, False)] * 5
    assert jobs() == []
    again = keyed()
    assert again.created
    assert again != first


def test_S065_while_it_waits_for_its_retry_its_key_answers_it(clock: Clock) -> None:
    register("work", lambda payload: 1 / 0)
    first = keyed()
    assert tick()
    assert keyed() == first
    assert not keyed().created


def test_S066_after_its_worker_was_lost_a_key_is_not_blocked_for_ever(clock: Clock) -> None:
    ran: list[str] = []
    register("work", ran.append)
    first = keyed("first")
    Job.objects.filter(pk=first).update(status="running", claimed_by="host:1:gone")
    assert not keyed("before").created
    assert tick() is False  # and looks for the lost
    assert not keyed("rescued, not yet run").created
    clock.forward(5)
    assert tick() is True
    assert ran == ["first"]
    assert keyed("after").created


def test_S067_after_it_died_its_key_is_free() -> None:
    register("work", lambda payload: 1 / 0)
    first = enqueue("work", unique_key="k", max_retries=0)
    assert tick()
    second = keyed()
    assert second.created
    assert second != first


# -- many callers at once


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("atomic", [False, True], ids=["in autocommit", "inside atomic()"])
def test_S068_of_eight_callers_at_once_one_makes_the_job(atomic: bool, elsewhere: Elsewhere) -> None:
    rounds, callers = 25, 8
    barrier = Barrier(callers, timeout=30)

    def enqueue_one(key: str) -> Enqueued:
        if not atomic:
            return keyed(key=key)
        with transaction.atomic():
            return keyed(key=key)

    errors: list[DatabaseError] = []

    def caller() -> list[Enqueued]:
        answers = []
        for number in range(rounds):
            barrier.wait()
            try:
                answers.append(enqueue_one(f"round {number}"))
            except DatabaseError as error:
                errors.append(error)
        return answers

    answers = [future.result(120) for future in [elsewhere(caller) for _ in range(callers)]]
    assert errors == []
    for of_round in zip(*answers, strict=True):
        assert len(set(of_round)) == 1
        assert sum(item.created for item in of_round) == 1
    assert sorted(info.id for info in jobs(limit=1000)) == sorted(answers[0])


@pytest.mark.django_db(transaction=True)
def test_S068_with_the_previous_job_done_again_one(elsewhere: Elsewhere) -> None:
    register("work", lambda payload: None)
    for _ in range(5):
        barrier = Barrier(8, timeout=60)

        def caller(barrier: Barrier = barrier) -> Enqueued:
            barrier.wait()
            return keyed()

        answers = [future.result(60) for future in [elsewhere(caller) for _ in range(8)]]
        assert sum(item.created for item in answers) == 1
        assert [info.id for info in live()] == [answers[0]]
        assert tick() is True
        assert tick() is False


@pytest.mark.django_db(transaction=True)
def test_enqueueing_while_workers_finish_loses_nothing(elsewhere: Elsewhere, start_worker: Callable[..., Any]) -> None:
    """A key comes and goes all the time; every answer that says "created" is a job that ran."""
    ran: list[str] = []
    register("work", ran.append)
    start_worker(threads=2)

    def caller(name: str) -> list[str]:
        made = []
        for number in range(30):
            payload = f"{name} {number}"
            if keyed(payload).created:
                made.append(payload)
        return made

    made = [payload for future in [elsewhere(caller, name) for name in "abc"] for payload in future.result(120)]
    wait_for(lambda: not jobs(), what="the last job to end")
    assert made
    assert sorted(ran) == sorted(made)


# -- many jobs at once


@pytest.mark.django_db(transaction=True)
def test_S069_a_bulk_enqueue_keeps_keys_as_one_by_one_does() -> None:
    before = {f"key {number}": keyed(key=f"key {number}") for number in range(50)}
    with transaction.atomic():
        Group.objects.create(name="the caller's")
        enqueued = enqueue_many(
            message("work", str(number), unique_key=f"key {number % 100}" if number < 200 else None)
            for number in range(1000)
        )
        assert Group.objects.count() == 1
    created = [item.created for item in enqueued]
    assert created == [False] * 50 + [True] * 50 + [False] * 100 + [True] * 800
    assert enqueued[:50] == enqueued[100:150] == list(before.values())
    assert enqueued[50:100] == enqueued[150:200]
    assert Job.objects.count() == 50 + 50 + 800
    payloads = dict(Job.objects.values_list("pk", "payload"))
    assert [payloads[item] for item in enqueued[50:100]] == [str(number) for number in range(50, 100)]


@pytest.mark.django_db(transaction=True)
def test_S069_bulk_callers_at_once_make_each_key_once(elsewhere: Elsewhere) -> None:
    barrier = Barrier(4, timeout=60)

    def caller(first: int) -> list[Enqueued]:
        barrier.wait()
        messages = [message("work", unique_key=f"key {number}") for number in range(first, first + 50)]
        while True:
            try:
                return enqueue_many(messages)
            except OperationalError as error:  # on MariaDB they may deadlock: the caller may try again
                if connection.vendor != "mysql" or verdict(error) is not Verdict.ROLLED_BACK:
                    raise

    answers = [future.result(60) for future in [elsewhere(caller, first) for first in (0, 10, 20, 30)]]
    assert sum(item.created for answer in answers for item in answer) == 80 == Job.objects.count()
    for number in range(30, 50):
        assert len({answer[number - first] for answer, first in zip(answers, (0, 10, 20, 30), strict=True)}) == 1


# -- retrying a dead job


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("status", ["pending", "running"])
def test_a_dead_job_whose_key_is_live_again_is_not_retried(status: str) -> None:
    dead = dead_letter()
    other = keyed()
    Job.objects.filter(pk=other).update(status=status)
    before = list(Job.objects.order_by("pk").values())
    with transaction.atomic():
        Group.objects.create(name="the caller's")
        with pytest.raises(UniqueKeyIsLive, match=other) as raised:
            retry(dead)
        assert Group.objects.count() == 1
    assert (raised.value.job_id, raised.value.live_id) == (dead, other)
    assert list(Job.objects.order_by("pk").values()) == before
    assert Group.objects.count() == 1
    with pytest.raises(UniqueKeyIsLive):
        retry(dead)


def test_a_dead_job_is_retried_once_its_key_is_free() -> None:
    register("work", lambda payload: None)
    dead, other = dead_letter(), keyed()
    with pytest.raises(UniqueKeyIsLive):
        retry(dead)
    assert tick()
    assert retry(dead) is True
    assert keyed() == dead
    assert not live("k", "other")
    assert other not in {info.id for info in jobs()}


def test_of_two_dead_jobs_with_one_key_one_is_retried() -> None:
    one, other = dead_letter(), dead_letter()
    assert retry(one) is True
    with pytest.raises(UniqueKeyIsLive, match=one):
        retry(other)


def test_dead_jobs_without_a_key_are_all_retried() -> None:
    assert [retry(dead_letter(None)) for _ in range(2)] == [True, True]
