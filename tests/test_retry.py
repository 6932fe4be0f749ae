"""How long a failed job waits, how often it is tried, what a handler may choose, and what is kept of each failure."""

import json
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from threading import Event
from typing import Any

import pytest
from django.test import override_settings
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rws_jobs import (
    Backoff,
    Discard,
    Retry,
    Snooze,
    current_job,
    embedding,
    enqueue,
    job,
    jobs,
    on_dead,
    register,
    retry,
    tick,
)
from rws_jobs.clock import now
from rws_jobs.history import extended, read
from rws_jobs.info import JobInfo
from rws_jobs.models import Job
from rws_jobs.outcomes import Failure, default_backoff, retry_delay
from rws_jobs.text import shorten

from .conftest import Clock
from .waiting import wait_for

pytestmark = pytest.mark.django_db

NOW = 1_800_000_000  # where the clock of the fixture stands
DAY = 86_400

Configure = Callable[..., None]
ERROR = ValueError("why")


def fail(payload: str = "") -> None:
    raise ValueError(payload or "why")


def row(job_id: str) -> Job:
    return Job.objects.get(pk=job_id)


def offsets(job_id: str, clock: Clock) -> list[int]:
    """Run a job to its end; for each retry the seconds from the second of its failure to the stored due time."""
    found: list[int] = []
    while tick():
        job_row = row(job_id)
        if job_row.status == "failed":
            break
        found.append(job_row.next_run_at - int(clock.now))
        clock.move_to(job_row.next_run_at + clock.now % 1)
    return found


def run_once(function: Callable[..., Any], **options: Any) -> Job:
    """Declare it, enqueue it, run it; the row that is left."""
    job_id = job("tested", **options)(function).enqueue()
    assert tick() is True
    return row(job_id)


def raising(error: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise error

    return handler


# -- the arithmetic


@pytest.mark.parametrize(
    ("initial", "multiplier", "due"),
    [
        (0.5, 2, [1, 1, 2, 4, 8]),
        (1.5, 2, [2, 3, 6, 12]),
        (0.999, 1, [1, 1, 1]),
        (0.001, 1, [1, 1, 1]),
        (1, 3, [1, 3, 9, 27]),
        (1, 1.5, [1, 2, 3, 4, 6]),  # 1, 1.5, 2.25, 3.375, 5.0625
        (0, 2, [0, 0, 0]),
        (60, 1, [60, 60, 60]),
    ],
)
@pytest.mark.parametrize("way", ["settings", "Backoff"])
def test_retries_are_due_after_initial_times_multiplier_to_the_failures_before_rounded_up(
    initial: float, multiplier: float, due: list[int], way: str, clock: Clock, configure: Configure
) -> None:
    if way == "settings":
        configure(BACKOFF_INITIAL=initial, BACKOFF_MULTIPLIER=multiplier)
        register("doomed", fail)
    else:
        job("doomed", backoff=Backoff(initial, multiplier))(raising(ERROR))
    job_id = enqueue("doomed", max_retries=len(due))
    assert offsets(job_id, clock) == due
    assert row(job_id).attempts == len(due) + 1


def test_a_delay_is_added_to_the_fraction_of_the_second(clock: Clock) -> None:
    clock.forward(0.75)
    job("doomed", backoff=Backoff(0.5, 2))(raising(ERROR))
    job_id = enqueue("doomed", "{}", max_retries=3)
    assert offsets(job_id, clock) == [2, 2, 3]


@pytest.mark.parametrize("max_retries", [0, 1, 2, 5])
def test_max_retries_allows_one_attempt_more(max_retries: int, clock: Clock) -> None:
    attempts: list[int] = []

    def handler() -> None:
        attempts.append(current_job().attempt)
        raise ERROR

    job("doomed", backoff=Backoff(1, 1))(handler)
    job_id = enqueue("doomed", "{}", max_retries=max_retries)
    assert len(offsets(job_id, clock)) == max_retries
    assert attempts == list(range(1, max_retries + 2))
    assert (row(job_id).status, row(job_id).attempts) == ("failed", max_retries + 1)
    assert tick() is False


def test_without_any_setting_four_attempts_within_seconds(clock: Clock) -> None:
    register("doomed", fail)
    assert offsets(enqueue("doomed"), clock) == [1, 1, 2]


initials = st.just(0.0) | st.floats(0.001, 1e6)


@given(initials, st.floats(1, 1e6), st.integers(1, 3000), st.floats(0, 1e9))
@example(0.0, 2.0, 2000, 86_400.0)
@example(0.5, 2.0, 2000, 86_400.0)
@example(1e6, 1e6, 1, 0.0)
@hypothesis_settings(deadline=None, database=None)
def test_backoff_is_the_formula_and_never_more_than_its_maximum(
    initial: float, multiplier: float, attempt: int, maximum: float
) -> None:
    delay = Backoff(initial, multiplier, maximum)(attempt, ERROR)
    exact = min(Fraction(initial) * Fraction(multiplier) ** (attempt - 1), Fraction(maximum))
    assert delay == pytest.approx(float(exact), rel=1e-9)


@given(st.floats(0, 1e6), st.floats(0, 10), st.integers(1, 50))
@hypothesis_settings(deadline=None, database=None)
def test_jitter_never_shortens_a_delay_and_lengthens_it_at_most_by_its_part(
    initial: float, jitter: float, attempt: int
) -> None:
    plain = Backoff(initial, 2)(attempt, ERROR)
    jittered = Backoff(initial, 2, jitter=jitter)(attempt, ERROR)
    assert plain <= jittered <= plain * (1 + jitter)


@pytest.mark.parametrize("backoff", [Backoff(5, 5), Backoff(0.5, 1_000_000), lambda attempt, error: 5**attempt])
def test_S059_however_many_attempts_a_delay_is_capped(backoff: Any) -> None:
    delays = [retry_delay(backoff, attempt, ERROR) for attempt in range(1, 1001)]
    assert delays == sorted(delays)
    assert delays[-1] == DAY


def test_S059_a_callable_that_answers_an_absurd_number_is_capped_too(configure: Configure) -> None:
    configure(BACKOFF_MULTIPLIER=1)  # else the default backoff could stand in for it unseen
    for attempt in (10, 100, 1000, 2000):
        assert retry_delay(lambda attempt, error: 10**attempt, attempt, ERROR) == DAY


def test_S059_a_job_with_a_thousand_attempts_always_has_a_next_time(clock: Clock) -> None:
    job("doomed", backoff=Backoff(1, 10))(raising(ERROR))
    job_id = enqueue("doomed", "{}", max_retries=2**31 - 1)
    for attempts in (0, 1, 16, 400, 2**31 - 3):
        Job.objects.update(attempts=attempts)
        assert tick()
        found = row(job_id)
        assert (found.status, found.attempts) == ("pending", attempts + 1)
        assert found.next_run_at - clock.now == min(10**attempts if attempts < 20 else DAY, DAY)
        clock.move_to(found.next_run_at)


def test_the_cap_of_the_settings(configure: Configure) -> None:
    configure(BACKOFF_INITIAL=100, BACKOFF_MULTIPLIER=10, BACKOFF_MAX=500)
    assert [retry_delay(None, attempt, ERROR) for attempt in (1, 2, 3)] == [100, 500, 500]
    assert retry_delay(Backoff(1000), 1, ERROR) == 500
    assert retry_delay(lambda attempt, error: 1000.0, 1, ERROR) == 500
    assert retry_delay(Backoff(1000, maximum=2000), 5, ERROR) == 2000
    assert retry_delay(Backoff(1000, maximum=timedelta(minutes=1)), 1, ERROR) == 60


def test_S060_with_jitter_jobs_that_failed_together_return_apart(clock: Clock) -> None:
    job("doomed", backoff=Backoff(60, jitter=0.5))(raising(ERROR))
    for _ in range(60):
        enqueue("doomed", "{}")
    while tick():
        pass
    waits = {info.run_at - NOW for info in jobs(limit=100)}
    assert min(waits) >= 60
    assert max(waits) <= 90
    assert len(waits) >= 10


def test_S060_jitter_by_setting(configure: Configure) -> None:
    configure(BACKOFF_INITIAL=60, BACKOFF_JITTER=0.5)
    waits = {default_backoff()(1, ERROR) for _ in range(500)}
    assert min(waits) >= 60
    assert max(waits) <= 90
    assert max(waits) - min(waits) > 5


# -- backoffs of one's own


def test_a_callable_gets_the_attempt_and_the_exception(clock: Clock) -> None:
    asked: list[tuple[int, BaseException]] = []

    def backoff(attempt: int, exception: BaseException) -> float:
        asked.append((attempt, exception))
        return 10.0 * attempt

    job("doomed", backoff=backoff)(raising(ERROR))
    assert offsets(enqueue("doomed", "{}", max_retries=3), clock) == [10, 20, 30]
    assert asked == [(1, ERROR), (2, ERROR), (3, ERROR)]


@pytest.mark.parametrize("source", ["database", "local"])
@pytest.mark.parametrize("answer", [5, 5.0, Decimal(5), Fraction(5), True], ids=repr)
def test_a_callable_may_answer_any_number(answer: Any, source: str, configure: Configure) -> None:
    configure(CLOCK=source)
    before = now("default")
    found = run_once(raising(ERROR), backoff=lambda attempt, exception: answer)
    assert before + float(answer) - 0.001 <= found.next_run_at <= now("default") + float(answer) + 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("answer", [Decimal(5), Fraction(5), True], ids=repr)
def test_whatever_number_a_callable_answers_the_worker_goes_on(answer: Any, start_worker: Callable[..., Any]) -> None:
    job("doomed", backoff=lambda attempt, exception: answer)(raising(ERROR)).enqueue()
    ran = Event()
    register("fine", lambda payload: ran.set())
    worker = start_worker(threads=1)
    try:
        wait_for(lambda: not jobs("running") and jobs()[0].attempts == 1, timeout=10, what="the failure to be written")
        enqueue("fine")
        assert ran.wait(10)
    finally:
        worker.abandon()


def exits(attempt: int, exception: BaseException) -> float:
    raise SystemExit(3)


NO_NUMBERS = (None, "5", -1, -0.001, float("nan"), float("inf"), float("-inf"), [5], 5j, object())
BROKEN = [
    *[lambda attempt, exception, answer=answer: answer for answer in NO_NUMBERS],
    lambda: 5,
    lambda attempt, exception: 1 / 0,
    lambda attempt, exception: 2.0 ** (10_000 * attempt),
    exits,
]


@pytest.mark.parametrize("backoff", BROKEN)
def test_a_broken_backoff_is_logged_and_the_default_stands_in_for_it(
    backoff: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        found = run_once(raising(ERROR), backoff=backoff)
    except SystemExit:
        pytest.fail("what a backoff raises must not end a worker")
    assert (found.status, found.attempts, found.last_error) == ("pending", 1, "ValueError: why")
    assert found.next_run_at == NOW + 1
    assert any("backoff" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"initial": -1}, ValueError, "initial"),
        ({"initial": "1"}, TypeError, "initial"),
        ({"initial": None}, TypeError, "initial"),
        ({"initial": float("nan")}, ValueError, "initial"),
        ({"initial": float("inf")}, ValueError, "initial"),
        ({"initial": True}, TypeError, "initial"),
        ({"initial": 1, "multiplier": 0.5}, ValueError, "multiplier"),
        ({"initial": 1, "multiplier": float("nan")}, ValueError, "multiplier"),
        ({"initial": 1, "multiplier": "2"}, TypeError, "multiplier"),
        ({"initial": 1, "maximum": -1}, ValueError, "maximum"),
        ({"initial": 1, "maximum": "1"}, TypeError, "maximum"),
        ({"initial": 1, "jitter": -0.1}, ValueError, "jitter"),
        ({"initial": 1, "jitter": "0"}, TypeError, "jitter"),
    ],
)
def test_a_bad_backoff_is_an_error_where_it_is_written(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Backoff(**arguments)


def test_a_backoff_takes_timedeltas() -> None:
    backoff = Backoff(timedelta(minutes=1), 2, maximum=timedelta(minutes=3))
    assert [backoff(attempt, ERROR) for attempt in (1, 2, 3)] == [60, 120, 180]
    assert backoff == Backoff(timedelta(minutes=1), 2, maximum=timedelta(minutes=3))


# -- S-061, S-062


def test_S061_without_retries_a_job_is_started_once(clock: Clock) -> None:
    calls: list[None] = []

    def handler() -> None:
        calls.append(None)
        raise ERROR

    assert run_once(handler, max_retries=0).status == "failed"
    clock.forward(DAY)
    assert tick() is False
    assert len(calls) == 1


def test_S061_a_job_that_loses_its_worker_again_and_again_is_dead(clock: Clock) -> None:
    """A first loss alone never buries it: nobody knows whether the job was to blame."""
    dead: list[JobInfo] = []
    on_dead(dead.append)
    job_id = enqueue("nobody's", max_retries=0)
    states = []
    for _ in range(3):
        Job.objects.filter(status="pending").update(status="running", claimed_by="host:1:gone")
        clock.forward(100)
        assert tick() is False
        states.append((row(job_id).status, row(job_id).attempts))
        embedding._next_look.clear()
    assert states == [("pending", 1), ("failed", 2), ("failed", 2)]
    assert [info.id for info in dead] == [job_id]
    assert "worker lost" in str(row(job_id).last_error)
    assert ["WorkerLost" in entry["exception"] for entry in read(row(job_id).history)] == [True, True]


def test_S062_a_dead_job_that_is_retried_has_all_its_attempts_again(clock: Clock) -> None:
    job("doomed", max_retries=2, backoff=Backoff(1, 1))(raising(ERROR))
    job_id = enqueue("doomed")
    assert len(offsets(job_id, clock)) == 2
    assert retry(job_id)
    assert len(offsets(job_id, clock)) == 2
    found = row(job_id)
    assert (found.status, found.attempts, found.max_retries) == ("failed", 3, 2)
    assert [entry["attempt"] for entry in read(found.history)] == [1, 2, 3, 1, 2, 3]


# -- Retry


@pytest.mark.parametrize(
    ("in_", "due"), [(0, 0), (0.5, 1), (7, 7), (timedelta(minutes=2), 120), (10 * DAY, 10 * DAY)], ids=str
)
def test_retry_sets_the_delay_and_is_charged(in_: Any, due: int, clock: Clock) -> None:
    found = run_once(raising(Retry(in_)), backoff=Backoff(1000), max_retries=1)
    assert (found.status, found.attempts, found.next_run_at - NOW, found.claimed_by) == ("pending", 1, due, None)
    clock.move_to(found.next_run_at)
    assert tick()
    assert (row(found.pk).status, row(found.pk).attempts) == ("failed", 2)
    assert str(row(found.pk).last_error).startswith("Retry")


def test_retry_without_a_delay_leaves_it_to_the_backoff(clock: Clock) -> None:
    found = run_once(raising(Retry()), backoff=Backoff(40))
    assert (found.status, found.attempts, found.next_run_at - NOW) == ("pending", 1, 40)


def test_retry_keeps_the_error_that_led_to_it() -> None:
    def handler() -> None:
        try:
            raise ConnectionError("the cause")
        except ConnectionError as error:
            raise Retry(in_=5) from error

    found = run_once(handler)
    assert "ConnectionError: the cause" in read(found.history)[0]["traceback"]


def test_a_subclass_of_retry_is_one() -> None:
    class Throttled(Retry):
        pass

    found = run_once(raising(Throttled(in_=5)), max_retries=1)
    assert (found.status, found.attempts) == ("pending", 1)
    assert str(found.last_error).startswith("Throttled")


@pytest.mark.parametrize("kind", [Retry, Snooze])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        (timedelta(seconds=-1), ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (10**400, ValueError),
        ("5", TypeError),
        (True, TypeError),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_bad_delay_is_an_error_where_it_is_written(kind: type[Exception], value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="in_"):
        kind(value)


def test_a_bad_delay_in_a_handler_is_a_failed_attempt() -> None:
    def handler() -> None:
        raise Snooze(-1)

    found = run_once(handler, max_retries=1)
    assert (found.status, found.attempts) == ("pending", 1)
    assert str(found.last_error).startswith("ValueError: in_")


# -- Snooze


def test_snooze_comes_back_uncharged_however_often(clock: Clock) -> None:
    attempts: list[int] = []

    def handler() -> None:
        attempts.append(current_job().attempt)
        if len(attempts) < 6:
            raise Snooze(timedelta(seconds=30))

    declared = job("tested", max_retries=0)(handler)
    job_id = declared.enqueue()
    for number in range(5):
        assert tick()
        found = row(job_id)
        assert (found.status, found.attempts, found.claimed_by) == ("pending", 0, None)
        assert found.next_run_at == NOW + 30 * (number + 1)
        assert (found.last_error, found.history) == (None, None)
        clock.forward(29)
        assert tick() is False
        clock.forward(1)
    assert tick()
    assert not jobs()
    assert attempts == [1] * 6


def test_snooze_keeps_the_failures_so_far(clock: Clock) -> None:
    attempts: list[int] = []

    def handler() -> None:
        attempts.append(current_job().attempt)
        raise ERROR if len(attempts) != 2 else Snooze(5)

    job_id = job("tested", max_retries=1, backoff=Backoff(1))(handler).enqueue()
    for _ in range(3):
        assert tick()
        clock.forward(10)
    assert attempts == [1, 2, 2]
    assert (row(job_id).status, row(job_id).attempts) == ("failed", 2)


@pytest.mark.parametrize("delay", [0, 0.3, 32_000_000_000])
@pytest.mark.parametrize("kind", [Retry, Snooze])
def test_delays_by_the_databases_clock(kind: Any, delay: float) -> None:
    before = now("default")
    found = run_once(raising(kind(delay)))
    after = now("default")
    assert before + delay - 0.001 <= found.next_run_at <= after + delay + 1


# -- Discard


def test_discard_goes_straight_to_the_dead_letter_list() -> None:
    dead: list[JobInfo] = []
    on_dead(dead.append)
    found = run_once(raising(Discard("no such user")), max_retries=9)
    assert (found.status, found.attempts, found.last_error) == ("failed", 1, "no such user")
    assert found.claimed_by is None
    assert [(info.id, info.last_error) for info in dead] == [(found.pk, "no such user")]
    assert read(found.history)[0]["exception"] == "rws_jobs.outcomes.Discard"
    assert tick() is False
    assert retry(found.pk)


def test_discard_without_a_reason_says_so() -> None:
    found = run_once(raising(Discard()))
    assert (found.status, found.last_error) == ("failed", "discarded")


# -- what is kept of each failure


def test_each_failed_attempt_is_kept_oldest_first(clock: Clock) -> None:
    def handler() -> None:
        raise ValueError(f"attempt {current_job().attempt}")

    job("doomed", max_retries=3, backoff=Backoff(1, 1))(handler)
    job_id = enqueue("doomed", "{}")
    offsets(job_id, clock)
    entries = read(row(job_id).history)
    assert [entry["attempt"] for entry in entries] == [1, 2, 3, 4]
    assert [entry["error"] for entry in entries] == [f"ValueError: attempt {number}" for number in (1, 2, 3, 4)]
    assert {entry["exception"] for entry in entries} == {"builtins.ValueError"}
    assert all("in handler" in entry["traceback"] for entry in entries)
    assert [entry["started"] for entry in entries] == [NOW, NOW + 1, NOW + 2, NOW + 3]
    assert row(job_id).last_error == "ValueError: attempt 4"


@pytest.mark.parametrize("history", ["not json", "{}", "5", "[1, null]", '"text"', ""])
def test_a_history_that_another_program_spoiled_is_begun_anew(history: str) -> None:
    register("doomed", fail)
    job_id = enqueue("doomed")
    Job.objects.update(history=history)
    assert tick()
    assert [entry["error"] for entry in read(row(job_id).history)] == ["ValueError: why"]


def a_failure(text: str, limit: int) -> Failure:
    return Failure(
        error=shorten(text, limit),
        exception="builtins.ValueError",
        traceback=shorten("Traceback\n" + text, limit),
        started=1.0,
        ended=2.0,
    )


def test_old_tracebacks_go_first_then_old_entries_but_the_first(configure: Configure) -> None:
    configure(MAX_ERROR_BYTES=1000)
    text: str | None = None
    histories = []
    for attempt in range(1, 31):
        text = extended(text, attempt, "worker", a_failure(f"{attempt:03}" + "x" * 400, 1000))
        histories.append(read(text))
        assert len(text) <= 4000
    without = next(entries for entries in histories if not all(entry["traceback"] for entry in entries))
    kept = [bool(entry["traceback"]) for entry in without]
    assert kept == sorted(kept)  # the older ones have lost theirs
    assert [entry["attempt"] for entry in without] == list(range(1, len(without) + 1))  # and no entry is gone yet
    final = histories[-1]
    numbers = [entry["attempt"] for entry in final]
    assert numbers[0] == 1
    assert numbers[1:] == list(range(numbers[1], 31))
    assert final[-1]["traceback"]
    assert all(entry["error"][:3] == f"{entry['attempt']:03}" for entry in final)


awkward = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20) | st.sampled_from(
    ["x", '"', "\\", "\n", "😀", "ü", "\x01"]
)


@given(st.lists(st.tuples(awkward, st.integers(0, 1500)), min_size=1, max_size=12))
@example([("😀", 1000)])
@example([("\\", 1000)])
@example([("\x01", 1000)] * 3)
@hypothesis_settings(deadline=None, database=None, max_examples=60)
def test_a_history_never_grows_beyond_four_times_the_limit_of_an_error(failures: list[tuple[str, int]]) -> None:
    with override_settings(RWS_JOBS={"MAX_ERROR_BYTES": 1000}):
        text: str | None = None
        for attempt, (piece, times) in enumerate(failures, 1):
            text = extended(text, attempt, "worker", a_failure(piece * times, 1000))
            assert len(text) <= 4000
            json.loads(text)
            assert read(text)[-1]["attempt"] == attempt
            assert read(text)[-1]["error"] or not piece * times
