"""Enqueueing: what is accepted, what is refused and how, and in whose transaction the row is."""

import asyncio
import contextlib
import copy
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from functools import partial, wraps
from threading import Barrier
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.core.exceptions import PermissionDenied
from django.core.handlers.base import BaseHandler
from django.db import connection, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.translation import gettext_lazy, override

import rws_jobs
from rws_jobs import (
    Enqueued,
    Message,
    aenqueue,
    delete,
    enqueue,
    enqueue_many,
    job,
    jobs,
    message,
    register,
    retry,
    tick,
)
from rws_jobs.info import JobInfo
from rws_jobs.models import Job
from rws_jobs.signals import job_enqueued

from .conftest import Clock

pytestmark = pytest.mark.django_db

NOW = 1_800_000_000  # where the clock of the fixture stands

Elsewhere = Callable[..., Any]


@pytest.fixture
def send() -> Any:
    @job("send", queue="mailers", priority=5, max_retries=7, unique_key="declared")
    def send(user_id: int, subject: str = "hello", *, urgent: bool = False) -> None: ...

    return send


@pytest.fixture
def plain() -> Any:
    @job("plain")
    def plain(value: object = None) -> None: ...

    return plain


def row(job_id: str) -> Job:
    return Job.objects.get(pk=job_id)


def only() -> Job:
    return Job.objects.get()


def options_of(found: Job) -> tuple[object, ...]:
    return found.queue, found.priority, found.max_retries, found.unique_key


@contextmanager
def refused(error: type[Exception], match: str) -> Iterator[None]:
    """Inside: raises, names what ``match`` says, writes no row; the caller's transaction goes on and commits."""
    before = Job.objects.count()
    with transaction.atomic():
        group = Group.objects.create(name="the caller's")
        with pytest.raises(error, match=match):
            yield
        assert Job.objects.count() == before
        group.refresh_from_db()
    assert Group.objects.filter(name="the caller's").delete()[0] == 1


# -- what comes back


def test_enqueued_is_the_id_and_says_that_it_is_new() -> None:
    enqueued = enqueue("plain", "p")
    assert isinstance(enqueued, str)
    assert enqueued.created is True
    assert enqueued == enqueued.id == str(enqueued) == only().pk
    assert type(enqueued.id) is type(str(enqueued)) is str
    assert f"{enqueued}" == enqueued.id
    assert json.dumps(enqueued) == f'"{enqueued.id}"'
    assert {enqueued.id: 1}[enqueued] == 1


def test_enqueued_works_wherever_an_id_does() -> None:
    enqueued = enqueue("plain", "p")
    assert row(enqueued).payload == "p"
    assert Job.objects.filter(pk__in=[enqueued]).count() == 1
    assert retry(enqueued) is False
    assert delete(enqueued) is True


@pytest.mark.parametrize("created", [True, False])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, *(partial(pickle.dumps, protocol=number) for number in range(2, 6))]
)
def test_enqueued_survives_copying_and_pickling(created: bool, duplicate: Callable[[Any], Any]) -> None:
    enqueued = Enqueued("18c0-0", created)
    other = duplicate(enqueued)
    if isinstance(other, bytes):
        other = pickle.loads(other)
    assert type(other) is Enqueued
    assert (other, other.id, other.created) == ("18c0-0", "18c0-0", created)


def test_enqueued_shows_both_in_repr() -> None:
    assert repr(Enqueued("18c0-0", created=False)) == "Enqueued('18c0-0', created=False)"


# -- options


@pytest.mark.parametrize(
    ("option", "value", "column", "stored"),
    [
        ("queue", "mailers", "queue", "mailers"),
        ("queue", "q" * 64, "queue", "q" * 64),
        ("queue", "Ünï 'code' %s ☃ ", "queue", "Ünï 'code' %s ☃ "),
        ("priority", 10, "priority", 10),
        ("priority", -(2**63), "priority", -(2**63)),
        ("priority", 2**63 - 1, "priority", 2**63 - 1),
        ("max_retries", 0, "max_retries", 0),
        ("max_retries", 2**31 - 1, "max_retries", 2**31 - 1),
        ("unique_key", "k", "unique_key", "k"),
        ("unique_key", "ü" * 191, "unique_key", "ü" * 191),
        ("unique_key", "two\nlines", "unique_key", "two\nlines"),
        ("run_at", 12, "next_run_at", 12),
        ("run_at", 12.01, "next_run_at", 13),
        ("run_at", -5, "next_run_at", 0),
        ("run_at", datetime(2027, 1, 15, 9, tzinfo=UTC), "next_run_at", NOW + 3600),
        ("run_at", datetime(2027, 1, 15, 9, 0, 0, 1, tzinfo=UTC), "next_run_at", NOW + 3601),
        ("run_at", datetime(2027, 1, 15, 10, tzinfo=ZoneInfo("Europe/Paris")), "next_run_at", NOW + 3600),
        ("run_at", datetime(2027, 1, 15, 9, tzinfo=timezone(timedelta(hours=-1))), "next_run_at", NOW + 7200),
        ("run_at", datetime(1960, 1, 1, tzinfo=UTC), "next_run_at", 0),
        ("run_in", 0, "next_run_at", NOW),
        ("run_in", 60, "next_run_at", NOW + 60),
        ("run_in", 0.5, "next_run_at", NOW + 1),
        ("run_in", timedelta(minutes=1, milliseconds=1), "next_run_at", NOW + 61),
    ],
)
@pytest.mark.parametrize("way", ["by name", "using", "using, many", "many"])
def test_every_option_is_stored(
    option: str, value: Any, column: str, stored: object, way: str, clock: Clock, plain: Any
) -> None:
    options = {option: value}
    match way:
        case "by name":
            enqueued = enqueue("plain", "{}", **options)
        case "using":
            enqueued = plain.using(**options).enqueue()
        case "using, many":
            (enqueued,) = enqueue_many([plain.using(**options).message()])
        case _:
            (enqueued,) = enqueue_many([message("plain", "{}", **options)])
    found = row(enqueued)
    assert getattr(found, column) == stored
    defaults = {"queue": "default", "priority": 0, "max_retries": 3, "unique_key": None, "next_run_at": NOW}
    for name, default in defaults.items():
        if name != column:
            assert getattr(found, name) == default
    assert (found.created_at, found.payload, found.attempts, found.status) == (NOW, "{}", 0, "pending")


def test_a_delay_is_added_to_the_fraction_and_rounded_up(clock: Clock, plain: Any) -> None:
    clock.forward(0.75)
    dues = [row(plain.using(run_in=delay).enqueue()).next_run_at - NOW for delay in (0, 0.25, 0.5, 1, 1.25)]
    assert dues == [1, 1, 2, 2, 2]
    many = enqueue_many([plain.using(run_in=delay).message() for delay in (0, 0.25, 0.5, 1, 1.25)])
    assert [row(enqueued).next_run_at - NOW for enqueued in many] == dues
    assert row(plain.enqueue()).next_run_at == row(enqueue_many([plain.message()])[0]).next_run_at == NOW


def test_a_delay_counts_from_the_databases_clock_and_never_ends_early(plain: Any) -> None:
    from rws_jobs.clock import now

    for delay in (0, 0.001, 0.2, 0.5, 0.999, 1, 59.5):
        before = now("default")
        enqueued = [plain.using(run_in=delay).enqueue(), *enqueue_many([plain.using(run_in=delay).message()])]
        after = now("default")
        for job_id in enqueued:
            due = row(job_id).next_run_at
            assert before + delay - 0.001 <= due <= after + delay + 1


def test_the_options_of_the_decorator_hold(send: Any) -> None:
    assert options_of(row(send.enqueue(1))) == ("mailers", 5, 7, "declared")


def test_the_options_of_the_decorator_hold_by_name_too(send: Any) -> None:
    assert options_of(row(enqueue("send", '{"user_id": 1}'))) == ("mailers", 5, 7, "declared")
    Job.objects.all().delete()
    assert options_of(row(enqueue_many([message("send", "{}")])[0])) == ("mailers", 5, 7, "declared")
    Job.objects.all().delete()
    assert options_of(row(async_to_sync(aenqueue)("send", "{}"))) == ("mailers", 5, 7, "declared")


def test_given_options_win_over_the_decorators(send: Any) -> None:
    given = {"queue": "q", "priority": 0, "max_retries": 0, "unique_key": "given"}
    assert options_of(row(send.using(**given).enqueue(1))) == ("q", 0, 0, "given")
    Job.objects.all().delete()
    assert options_of(row(enqueue("send", "{}", **given))) == ("q", 0, 0, "given")


@pytest.mark.parametrize("option", ["unique_key", "max_retries"])
def test_none_means_the_same_by_name_and_with_using(option: str, send: Any, configure: Callable[..., None]) -> None:
    configure(MAX_RETRIES=1)
    by_name = options_of(row(enqueue("send", "{}", **{option: None})))
    Job.objects.all().delete()
    with_using = options_of(row(send.using(**{option: None}).enqueue(1)))
    Job.objects.all().delete()
    other = {"unique_key": "other", "max_retries": 5}[option]
    chained = options_of(row(send.using(**{option: other}).using(**{option: None}).enqueue(1)))
    assert by_name == with_using == chained


def test_a_default_left_to_the_settings_is_read_at_enqueue(plain: Any, configure: Callable[..., None]) -> None:
    configure(MAX_RETRIES=9)
    assert row(plain.enqueue()).max_retries == 9


@pytest.mark.parametrize(
    ("calls", "due"),
    [
        ([{"run_at": 5, "run_in": 60}], NOW + 60),
        ([{"run_in": 60, "run_at": 5}], 5),
        ([{"run_at": 5}, {"run_in": 60}], NOW + 60),
        ([{"run_in": 60}, {"run_at": 5}], 5),
        ([{"run_at": 5}, {"run_in": 60}, {"run_at": 6}], 6),
        ([{"run_in": 60}, {"run_in": 70}], NOW + 70),
        ([{"run_at": 5}, {"run_at": 6}], 6),
        ([{"run_in": 60}, {"queue": "q"}], NOW + 60),
        ([{"run_in": 60}, {"run_at": 5, "run_in": 70}], NOW + 70),
        ([{"run_at": 5}, {"run_in": 60, "run_at": 6}], 6),
    ],
)
def test_the_last_of_run_at_and_run_in_wins(calls: list[dict[str, Any]], due: int, clock: Clock, plain: Any) -> None:
    chain = plain
    for options in calls:
        chain = chain.using(**options)
    assert row(chain.enqueue()).next_run_at == due
    if len(calls) == 1:
        assert row(enqueue("plain", **calls[0])).next_run_at == due


def test_using_changes_nothing_of_what_it_is_called_on(clock: Clock, plain: Any) -> None:
    later = plain.using(run_in=60)
    later.using(queue="q", run_at=5)
    assert row(later.enqueue()).next_run_at == NOW + 60
    assert row(plain.enqueue()).next_run_at == NOW
    assert plain.using().message() == plain.message()


# -- datetimes


@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai"])
def test_a_naive_run_at_is_refused_with_USE_TZ(zone: str, settings: Any, plain: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = True, zone
    with refused(ValueError, "run_at.*naive"):
        plain.using(run_at=datetime(2030, 1, 1)).enqueue()


def test_S044_a_naive_run_at_is_local_without_USE_TZ(settings: Any, clock: Clock, plain: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Shanghai"
    in_a_minute = datetime(2027, 1, 15, 16, 1)  # 08:01 UTC
    job_id = plain.using(run_at=in_a_minute).enqueue()
    assert row(job_id).next_run_at == NOW + 60
    clock.forward(59)
    assert tick() is False
    clock.forward(1)
    assert tick() is True


def test_S044_an_aware_run_at_is_itself_without_USE_TZ(settings: Any, plain: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Shanghai"
    assert row(plain.using(run_at=datetime(2027, 1, 15, 8, tzinfo=UTC)).enqueue()).next_run_at == NOW


def test_of_a_repeated_hour_the_fold_decides(plain: Any) -> None:
    first = datetime(2027, 10, 31, 2, 30, tzinfo=ZoneInfo("Europe/Paris"))
    dues = [row(plain.using(run_at=first.replace(fold=fold)).enqueue()).next_run_at for fold in (0, 1)]
    assert dues[1] - dues[0] == 3600


# -- what is refused


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 9


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"queue": ""}, ValueError),
    ({"queue": "q" * 65}, ValueError),
    ({"queue": "a\x00b"}, ValueError),
    ({"queue": "two\nlines"}, ValueError),
    ({"queue": "\ud800"}, ValueError),
    ({"queue": 5}, TypeError),
    ({"queue": b"q"}, TypeError),
    ({"priority": 2**63}, ValueError),
    ({"priority": -(2**63) - 1}, ValueError),
    ({"priority": 1.5}, TypeError),
    ({"priority": 1.0}, TypeError),
    ({"priority": "1"}, TypeError),
    ({"priority": True}, TypeError),
    ({"max_retries": -1}, ValueError),
    ({"max_retries": 2**31}, ValueError),
    ({"max_retries": 2**32 - 1}, ValueError),
    ({"max_retries": 1.0}, TypeError),
    ({"max_retries": False}, TypeError),
    ({"unique_key": ""}, ValueError),
    ({"unique_key": "k" * 192}, ValueError),
    ({"unique_key": "a\x00b"}, ValueError),
    ({"unique_key": "\udfff"}, ValueError),
    ({"unique_key": 5}, TypeError),
    ({"run_at": None}, TypeError),
    ({"run_at": "tomorrow"}, TypeError),
    ({"run_at": True}, TypeError),
    ({"run_at": Decimal(5)}, TypeError),
    ({"run_at": date(2030, 1, 1)}, TypeError),
    ({"run_at": timedelta(1)}, TypeError),
    ({"run_at": float("nan")}, ValueError),
    ({"run_at": float("inf")}, ValueError),
    ({"run_at": float("-inf")}, ValueError),
    ({"run_at": 10**400}, ValueError),
    ({"run_at": datetime.max.replace(tzinfo=UTC)}, ValueError),
    ({"run_at": datetime(2030, 1, 1)}, ValueError),
    ({"run_in": None}, TypeError),
    ({"run_in": "60"}, TypeError),
    ({"run_in": False}, TypeError),
    ({"run_in": -1}, ValueError),
    ({"run_in": timedelta(seconds=-1)}, ValueError),
    ({"run_in": timedelta.max}, ValueError),
    ({"run_in": float("nan")}, ValueError),
    ({"run_in": float("inf")}, ValueError),
    ({"run_in": 10**400}, ValueError),
    ({"delay": 5}, TypeError),
]


@pytest.mark.parametrize(("options", "error"), BAD_OPTIONS, ids=lambda value: ascii(value)[:40])
def test_W21_W28_a_bad_option_is_refused_by_name(options: dict[str, Any], error: type[Exception], plain: Any) -> None:
    (name,) = options
    with refused(error, name):
        enqueue("plain", "{}", **options)
    with refused(error, name):
        message("plain", "{}", **options)
    with refused(error, name):
        plain.using(**options).enqueue()
    with refused(error, name):
        async_to_sync(aenqueue)("plain", "{}", **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [pair for pair in BAD_OPTIONS if next(iter(pair[0])) in ("queue", "priority", "max_retries", "unique_key")],
    ids=lambda value: ascii(value)[:40],
)
def test_a_bad_option_of_the_decorator_is_refused_where_it_is_written(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(options))):

        @job("declared", **options)
        def declared() -> None: ...

    register("declared", print)  # the type is still free


@pytest.mark.parametrize(
    ("job_type", "error"),
    [
        ("", ValueError),
        ("t" * 256, ValueError),
        ("a\x00b", ValueError),
        ("two\nlines", ValueError),
        ("\ud800", ValueError),
        (None, TypeError),
        (5, TypeError),
        (b"t", TypeError),
    ],
    ids=ascii,
)
def test_W28_a_bad_job_type_is_refused(job_type: Any, error: type[Exception]) -> None:
    with refused(error, "job_type"):
        enqueue(job_type)
    with pytest.raises(error, match="job_type"):
        register(job_type, print)
    if job_type is not None:
        with pytest.raises(error):
            job(job_type)(lambda: None)


@pytest.mark.parametrize(
    ("payload", "error"),
    [("a\x00b", ValueError), ("\ud800", ValueError), (None, TypeError), ({"a": 1}, TypeError), (b"p", TypeError)],
    ids=ascii,
)
def test_W28_a_bad_payload_is_refused(payload: Any, error: type[Exception]) -> None:
    with refused(error, "payload"):
        enqueue("plain", payload)
    with refused(error, "payload"):
        message("plain", payload)


def test_S080_a_payload_over_the_limit_is_refused_and_one_at_the_limit_is_not(
    configure: Callable[..., None], plain: Any
) -> None:
    configure(MAX_PAYLOAD_BYTES=1000)
    assert len(row(enqueue("t", "x" * 1000)).payload) == 1000
    assert row(enqueue("t", "ü" * 500)).payload == "ü" * 500
    for text in ("x" * 1001, "ü" * 501, "x" * 20_000_000):
        with refused(ValueError, "payload.*too large.*1,000"):
            enqueue("t", text)
    with refused(ValueError, "payload.*too large"):
        plain.enqueue("x" * 1000)


def test_S080_a_megabyte_goes_in_and_comes_out_by_default() -> None:
    received: list[str] = []
    register("big", received.append)
    payload = "ü" * (2**19)
    enqueue("big", payload)
    with refused(ValueError, "too large"):
        enqueue("big", payload + "x")
    assert tick()
    assert received == [payload]


def test_S081_many_large_messages_go_in_batches_inside_the_callers_transaction() -> None:
    payloads = [f"{number:03}" + "x" * 10_000 for number in range(500)] + ["y" * 900_000, "z" * 900_000]
    with transaction.atomic():
        enqueued = enqueue_many(message("big", payload) for payload in payloads)
        Group.objects.create(name="the caller's")
    stored = dict(Job.objects.values_list("pk", "payload"))
    assert [stored[job_id] for job_id in enqueued] == payloads


def test_a_wrong_call_is_a_type_error_where_it_is_written(send: Any) -> None:
    for args, kwargs in [
        ((), {}),
        ((), {"subject": "s"}),
        ((1, "s", True), {}),
        ((1,), {"user_id": 2}),
        ((1,), {"unknown": 2}),
    ]:
        with refused(TypeError, "test_enqueue.*send.*user_id: int"):
            send.enqueue(*args, **kwargs)
        with refused(TypeError, "send"):
            send.message(*args, **kwargs)
        with refused(TypeError, "send"):
            send.using(priority=1).enqueue(*args, **kwargs)
        with refused(TypeError, "send"):
            async_to_sync(send.aenqueue)(*args, **kwargs)


def test_arguments_are_stored_by_name(send: Any) -> None:
    assert json.loads(row(send.enqueue(1, "s", urgent=True)).payload) == {"user_id": 1, "subject": "s", "urgent": True}


def test_a_handler_of_any_names_takes_them() -> None:
    received: list[dict[str, Any]] = []

    @job("any")
    def anything(first: int, **rest: object) -> None:
        received.append({"first": first, **rest})

    anything.enqueue(1, b=2)
    anything.enqueue(first=3, options={"queue": "q"}, queue="not an option")
    assert tick()
    assert tick()
    assert received == [{"first": 1, "b": 2}, {"first": 3, "options": {"queue": "q"}, "queue": "not an option"}]


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (Opaque(), TypeError),
        (b"bytes", TypeError),
        ({1, 2}, TypeError),
        (1j, TypeError),
        (Color.RED, TypeError),
        ({1: "a"}, TypeError),
        ([{"deep": Opaque()}], TypeError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (Decimal("NaN"), ValueError),
        ("a\x00b", ValueError),
        ({"k\x00": 1}, ValueError),
        ("\ud800", ValueError),
        (Group(name="a model"), TypeError),
        (print, TypeError),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_S076_S078_S079_an_argument_that_cannot_be_stored_is_refused_by_name(
    value: object, error: type[Exception], plain: Any
) -> None:
    with refused(error, "'value'"):
        plain.enqueue(value)
    with refused(error, "'value'"):
        plain.message(value=value)
    with refused(error, "'value'"):
        async_to_sync(plain.aenqueue)(value)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2027, 1, 15, 8, 0, 0, 123456, tzinfo=UTC),
        datetime(2027, 10, 31, 2, 30, tzinfo=ZoneInfo("Europe/Paris"), fold=1),
        datetime(2027, 1, 15, 8),
        date(2027, 1, 15),
        time(8, 30, 1, 5),
        timedelta(days=-1, microseconds=1),
        UUID("12345678-1234-5678-1234-567812345678"),
        Decimal("1.10"),
        {"$date": "not a date"},
        [None, True, 1, 1.5, "ü☃😀", {}],
        2**80,
    ],
    ids=lambda value: ascii(value)[:40],
)
@pytest.mark.parametrize("way", ["one", "many"])
def test_S076_arguments_come_back_as_themselves(value: object, way: str) -> None:
    received: list[Any] = []

    @job("echo")
    def echo(value: object) -> None:
        received.append(value)

    if way == "one":
        echo.enqueue(value)
    else:
        enqueue_many([echo.message(value)])
    assert tick()
    (back,) = received
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_S077_lazy_text_is_stored_in_the_language_of_the_enqueuer(plain: Any) -> None:
    with override("de"):
        job_id = plain.enqueue(gettext_lazy("Monday"))
    assert json.loads(row(job_id).payload) == {"value": "Montag"}


def test_S078_the_first_run_and_a_retry_get_the_same_value(clock: Clock) -> None:
    received: list[object] = []

    @job("echo")
    def echo(value: object) -> None:
        received.append(value)
        if len(received) < 2:
            raise ValueError

    echo.enqueue((1, (2, 3)))
    assert tick()
    clock.forward(5)
    assert tick()
    assert received == [[1, [2, 3]]] * 2


def test_an_enum_that_is_a_number_is_that_number(plain: Any) -> None:
    found = row(plain.using(priority=Level.HIGH).enqueue(Level.HIGH))
    assert (found.priority, json.loads(found.payload)) == (9, {"value": 9})


# -- declarations


def _of_main() -> None: ...


def test_S088_what_a_worker_could_not_call_is_refused() -> None:
    class Service:
        def method(self) -> None: ...

        def __call__(self) -> None: ...

    def without_wraps(function: Callable[[], None]) -> Callable[[], None]:
        def inner() -> None:
            function()

        return inner

    def nested() -> None: ...

    def starred(*args: object) -> None: ...

    def positional(value: object, /) -> None: ...

    of_main = type(_of_main)(_of_main.__code__, {"__name__": "__main__"})
    refused_ones = (
        *(of_main, nested, lambda: None, partial(_of_main), Service().method, Service(), Service, len, Color),
        *(staticmethod(_of_main), classmethod(_of_main), without_wraps(_of_main), starred, positional),
    )
    accepted = []
    for function in refused_ones:
        with contextlib.suppress(TypeError):
            job(function)  # type: ignore[call-overload]
            accepted.append(function)
    assert accepted == []
    with pytest.raises(TypeError, match="args"):
        job("starred")(starred)
    with pytest.raises(TypeError, match="value"):
        job("positional")(positional)


def test_S088_a_generator_is_refused_since_calling_it_runs_nothing() -> None:
    def generator() -> Iterator[None]:
        yield

    async def asynchronous() -> Any:
        yield

    for function in (generator, asynchronous):
        with pytest.raises(TypeError):
            job("generator")(function)


def test_S088_a_wrapped_function_goes_by_its_own_name() -> None:
    def wrapping(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def inner(*args: object, **kwargs: object) -> None:
            function(*args, **kwargs)

        return inner

    wrapped = job(wrapping(at_the_top))
    assert wrapped.job_type == "tests.test_enqueue.at_the_top"
    with pytest.raises(TypeError, match="value"):
        wrapped.enqueue()
    wrapped.enqueue(5)
    assert tick()
    assert top_calls.pop() == 5


top_calls: list[object] = []


def at_the_top(value: object) -> None:
    top_calls.append(value)


def test_a_job_of_an_apps_jobs_module_goes_by_the_apps_name() -> None:
    from tests.jobs import note

    assert note.job_type == "tests.note"


def test_a_job_can_still_be_called() -> None:
    @job("adder")
    def adder(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    assert adder(2) == adder(1, b=2) == 3
    assert (adder.__name__, adder.__doc__) == ("adder", "Adds.")
    assert not Job.objects.exists()


def test_two_functions_for_one_type_are_an_error_that_names_both() -> None:
    @job("taken")
    def first() -> None: ...

    with pytest.raises(ValueError) as raised:

        @job("taken")
        def second() -> None: ...

    for name in ("'taken'", "first", "second"):
        assert name in str(raised.value)
    with pytest.raises(ValueError, match="'taken'"):
        register("taken", print)
    register("text", print)
    with pytest.raises(ValueError, match="'text'"):
        job("text")(at_the_top)


def test_the_same_function_again_takes_its_own_place() -> None:
    """As when its module is reloaded."""
    calls: list[int] = []
    for number in (1, 2):

        def again(number: int = number) -> None:
            calls.append(number)

        declared = job("again")(again)
    declared.enqueue()
    assert tick()
    assert calls == [2]


def test_register_refuses_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="callable"):
        register("text", "print")  # type: ignore[arg-type]


def test_a_backoff_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="backoff"):
        job("late", backoff=5)  # type: ignore[call-overload]


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        rws_jobs.nothing_like_it  # noqa: B018
    assert set(rws_jobs.__all__) <= set(dir(rws_jobs))
    for name in rws_jobs.__all__:
        assert getattr(rws_jobs, name) is not None


# -- many at once


def test_many_answer_in_the_order_of_their_messages(plain: Any, send: Any) -> None:
    messages = [
        plain.message(1),
        send.using(unique_key="a").message(2),
        message("other", "3"),
        send.using(unique_key="a").message(4),
        plain.using(queue="q").message(5),
        send.using(unique_key="b").message(6),
    ]
    enqueued = enqueue_many(iter(messages))
    assert [item.created for item in enqueued] == [True, True, True, False, True, True]
    assert enqueued[3] == enqueued[1]
    stored = {job_id: row(job_id).payload for job_id in enqueued}
    assert [stored[job_id] for job_id in enqueued] == [
        *('{"value":1}', '{"user_id":2}', "3", '{"user_id":2}', '{"value":5}', '{"user_id":6}')
    ]
    assert Job.objects.count() == 5


def test_many_run_in_the_order_of_their_messages(clock: Clock) -> None:
    ran: list[str] = []
    register("text", ran.append)
    enqueue_many(message("text", f"{number:04}") for number in range(600))
    by_claim = [info.payload for info in jobs(limit=1000)]
    assert by_claim == [f"{number:04}" for number in range(600)]
    assert tick()
    assert ran == ["0000"]


def test_many_of_none_ask_nothing(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        assert enqueue_many([]) == []


def test_many_take_few_statements(plain: Any, django_assert_max_num_queries: Any) -> None:
    messages = [plain.message(number) for number in range(1000)]
    with django_assert_max_num_queries(30 if connection.vendor == "sqlite" else 8):  # SQLite takes 999 parameters
        enqueue_many(messages)
    assert Job.objects.count() == 1000


@pytest.mark.parametrize("bad", ["plain", ("plain", "{}"), None, at_the_top], ids=repr)
def test_many_refuse_what_is_no_message(bad: Any, plain: Any) -> None:
    with refused(TypeError, "item 1 "):
        enqueue_many([plain.message(), bad])


def test_many_are_all_or_none(plain: Any) -> None:
    good, late = plain.message(1), plain.message(2)
    broken = Message(late.job_type, late.payload, "q", 2**70, 0, None, None, None)  # what validation would refuse
    with pytest.raises(Exception):  # noqa: B017  (which one depends on the database)
        enqueue_many([good, broken])
    assert not Job.objects.exists()


def test_a_message_is_a_value(plain: Any) -> None:
    assert plain.message(1) == plain.message(value=1) == message("plain", '{"value":1}')
    assert pickle.loads(pickle.dumps(plain.message(1))) == plain.message(1)
    assert len(enqueue_many([plain.message(1)] * 2)) == Job.objects.count() == 2


# -- async


def test_enqueue_from_async_code(plain: Any) -> None:
    async def main() -> list[Enqueued]:
        return [await plain.aenqueue(1), await plain.using(queue="q").aenqueue(value=2), await aenqueue("plain", "{}")]

    enqueued = async_to_sync(main)()
    assert all(type(item) is Enqueued and item.created for item in enqueued)
    assert [(row(item).queue, row(item).payload) for item in enqueued] == [
        ("default", '{"value":1}'),
        ("q", '{"value":2}'),
        ("default", "{}"),
    ]


@pytest.mark.django_db(transaction=True)
def test_enqueue_from_asyncio_run(plain: Any, elsewhere: Elsewhere) -> None:
    from asgiref.sync import sync_to_async
    from django.db import connections

    async def main() -> list[Enqueued]:
        try:
            return await asyncio.gather(*(plain.aenqueue(number) for number in range(5)))
        finally:
            await sync_to_async(connections.close_all)()

    enqueued = elsewhere(asyncio.run, main()).result(30)
    assert sorted(info.payload for info in jobs()) == [f'{{"value":{number}}}' for number in range(5)]
    assert {info.id for info in jobs()} == set(enqueued)


# -- in the caller's transaction


class Rollback(Exception):
    pass


def rolled_back(function: Callable[[], object]) -> None:
    def run() -> None:
        with transaction.atomic():
            function()
            raise Rollback

    with pytest.raises(Rollback):
        run()


@pytest.mark.django_db(transaction=True)
def test_S070_a_job_is_not_seen_before_the_commit_and_found_after(elsewhere: Elsewhere) -> None:
    found: list[bool] = []

    @job("look")
    def look(pk: int) -> None:
        found.append(Group.objects.filter(pk=pk).exists())

    with transaction.atomic():
        look.enqueue(Group.objects.create(name="new").pk)
        assert elsewhere(jobs).result(30) == []
        if connection.vendor != "sqlite":  # where the caller's transaction holds the only write lock
            assert elsewhere(tick).result(30) is False
    assert elsewhere(tick).result(30) is True
    assert found == [True]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("key", [None, "k"])
def test_S070_a_rollback_takes_the_job_along(key: str | None, plain: Any) -> None:
    rolled_back(lambda: plain.using(unique_key=key).enqueue())
    rolled_back(lambda: enqueue_many([plain.using(unique_key=key).message()]))
    assert not Job.objects.exists()
    assert tick() is False
    assert plain.using(unique_key=key).enqueue().created


@pytest.mark.parametrize("key", [None, "k"])
def test_a_rollback_to_a_savepoint_takes_only_its_jobs_along(key: str | None, plain: Any) -> None:
    with transaction.atomic():
        kept = plain.enqueue("outer")
        rolled_back(lambda: plain.using(unique_key=key).enqueue("inner"))
        with transaction.atomic():
            also_kept = plain.using(unique_key=key).enqueue("second inner")
        assert also_kept.created
    assert {info.id for info in jobs()} == {kept, also_kept}


@pytest.mark.django_db(transaction=True)
def test_an_outer_rollback_takes_the_jobs_of_inner_blocks_along(plain: Any) -> None:
    def nested() -> None:
        plain.enqueue("outer")
        with transaction.atomic():
            plain.using(unique_key="k").enqueue("inner")

    rolled_back(nested)
    assert not Job.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_in_autocommit_a_job_is_committed_at_once(plain: Any, elsewhere: Elsewhere) -> None:
    job_id = plain.enqueue()
    keyed = plain.using(unique_key="k").enqueue()
    assert {info.id for info in elsewhere(jobs).result(30)} == {job_id, keyed}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("error", [ZeroDivisionError, Http404, PermissionDenied])
def test_S072_a_failed_request_enqueues_nothing(error: type[Exception], plain: Any) -> None:
    def failing(request: HttpRequest) -> HttpResponse:
        plain.enqueue("failing")
        raise error

    def working(request: HttpRequest) -> HttpResponse:
        plain.enqueue("working")
        return HttpResponse()

    request = RequestFactory().get("/")
    handler = BaseHandler()
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    try:
        with pytest.raises(error):
            handler.make_view_atomic(failing)(request)
        handler.make_view_atomic(working)(request)
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert [info.payload for info in jobs()] == ['{"value":"working"}']


@pytest.mark.django_db(transaction=True)
def test_S073_the_id_is_good_after_the_commit_and_unknown_elsewhere_before(plain: Any, elsewhere: Elsewhere) -> None:
    with transaction.atomic():
        job_id = plain.enqueue()
        assert row(job_id).pk == job_id
        assert elsewhere(Job.objects.filter(pk=job_id).exists).result(30) is False
    assert elsewhere(Job.objects.filter(pk=job_id).exists).result(30) is True
    assert elsewhere(delete, job_id).result(30) is True


@pytest.mark.skipif(connection.vendor == "sqlite", reason="the caller's transaction holds the only write lock")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("function", [retry, delete])
def test_S073_before_the_commit_the_id_is_unknown_elsewhere_also_to_what_would_write(
    function: Callable[[str], bool], plain: Any, elsewhere: Elsewhere
) -> None:
    with transaction.atomic():
        job_id = plain.enqueue()
        assert elsewhere(function, job_id).result(10) is False
    assert [info.id for info in jobs()] == [job_id]


@pytest.mark.django_db(transaction=True)
def test_S073_after_a_rollback_the_id_is_unknown(plain: Any) -> None:
    ids: list[str] = []
    rolled_back(lambda: ids.append(plain.enqueue()))
    assert retry(ids[0]) is False
    assert delete(ids[0]) is False
    with pytest.raises(Job.DoesNotExist):
        row(ids[0])


# -- ids


@pytest.mark.django_db(transaction=True)
def test_W26_ids_of_many_threads_are_unique_and_of_one_thread_in_order(plain: Any, elsewhere: Elsewhere) -> None:
    barrier = Barrier(8, timeout=30)

    def enqueue_some() -> list[Enqueued]:
        barrier.wait()
        return [plain.enqueue() for _ in range(10)] + enqueue_many([plain.message()] * 10)

    runs = [future.result(60) for future in [elsewhere(enqueue_some) for _ in range(8)]]
    for ids in runs:
        assert ids == sorted(ids)
    assert len({job_id for ids in runs for job_id in ids}) == 160 == Job.objects.count()


def test_first_in_first_out_within_a_second_even_where_the_clock_stands_still(clock: Clock, plain: Any) -> None:
    enqueued = [plain.enqueue(number) for number in range(50)]
    clock.forward(-5)  # nor where it is set back
    enqueued += [plain.enqueue(number) for number in range(50)]
    assert enqueued == sorted(enqueued)
    assert len(set(enqueued)) == 100


# -- the signal


def test_job_enqueued_is_sent_once_per_new_job_with_its_info(clock: Clock, plain: Any) -> None:
    told: list[JobInfo] = []
    job_enqueued.connect(lambda job, **kwargs: told.append(job), weak=False)
    job_id = plain.using(queue="q", priority=3, unique_key="k", max_retries=1, run_in=5).enqueue(1)
    expected = JobInfo(
        id=job_id,
        job_type="plain",
        payload='{"value":1}',
        queue="q",
        priority=3,
        status="pending",
        attempts=0,
        max_retries=1,
        run_at=NOW + 5,
        created_at=NOW,
        last_error=None,
        unique_key="k",
    )
    assert told == [expected]
    plain.using(unique_key="k").enqueue(2)
    assert told == [expected]
    many = enqueue_many([plain.message(1), plain.using(unique_key="k").message(2), plain.message(3)])
    assert [info.id for info in told[1:]] == [many[0], many[2]]


def test_job_enqueued_is_sent_within_the_transaction(plain: Any) -> None:
    def write(job: JobInfo, **kwargs: object) -> None:
        assert connection.in_atomic_block
        Group.objects.create(name=job.id)

    job_enqueued.connect(write)
    ids: list[str] = []
    rolled_back(lambda: ids.append(plain.enqueue()))
    assert not Group.objects.exists()
    with transaction.atomic():
        kept = plain.enqueue()
    assert [group.name for group in Group.objects.all()] == [kept]


def test_a_receiver_that_raises_harms_neither_the_job_nor_the_other_receivers(
    plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def broken(**kwargs: object) -> None:
        raise ZeroDivisionError("receiver")

    def fine(job: JobInfo, **kwargs: object) -> None:
        told.append(job.id)

    job_enqueued.connect(broken)
    job_enqueued.connect(fine)
    with transaction.atomic():
        job_id = plain.enqueue()
    assert told == [job_id] == [info.id for info in jobs()]
    assert any("broken" in record.getMessage() or record.exc_info for record in caplog.records)


def test_without_receivers_an_enqueue_is_one_statement(plain: Any, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        plain.enqueue()


# -- secrets


def test_S097_a_message_does_not_show_its_payload(plain: Any) -> None:
    assert "hunter2" not in repr(plain.message("hunter2"))
    assert "hunter2" not in repr(plain.using(queue="q"))


def test_S097_a_refusal_does_not_show_the_other_arguments() -> None:
    @job("login")
    def login(password: str, token: object) -> None: ...

    with pytest.raises(TypeError) as raised:
        login.enqueue("hunter2", Opaque())
    assert "hunter2" not in str(raised.value)
