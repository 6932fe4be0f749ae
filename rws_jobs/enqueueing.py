"""Enqueueing: the options of one job, their validation before any SQL, and the insert."""

import math
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict, Unpack

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import router, transaction
from django.utils import timezone

from . import registry
from .clock import UnixNow, now
from .conf import conf
from .info import Status
from .models import Job
from .outcomes import seconds
from .signals import job_enqueued
from .text import check_job_type, check_payload, check_queue, check_unique_key


class Options(TypedDict, total=False):
    """What may be said of one job. Of ``run_at`` and ``run_in`` the one given last wins."""

    queue: str
    """Name of its queue, 1 to 64 characters. Default: ``"default"``."""
    priority: int
    """Larger runs first; signed 64 bit. Default: 0."""
    run_at: datetime | float
    """Not before this time: an aware datetime or unix seconds, rounded up to the whole second."""
    run_in: float | timedelta
    """Not before so long from now, by the database's clock: seconds or a timedelta, rounded up to the whole second."""
    unique_key: str | None
    """While a job of the type and this key is pending or running, enqueueing answers that job. Default: none."""
    max_retries: int | None
    """Attempts allowed after the first. Default: ``RWS_JOBS["MAX_RETRIES"]``, 3."""


OPTION_NAMES = tuple(Options.__annotations__)


class Enqueued(str):
    """The id of a job, and whether this call made it.

    A ``str``: store it, compare it, hand it to ``retry()``. ``created`` is False when a live job with the same unique
    key was there already; the id is then that job's, and the new payload and options were not used.
    """

    __slots__ = ("created",)
    created: bool

    def __new__(cls, job_id: str, created: bool = True) -> "Enqueued":
        enqueued = super().__new__(cls, job_id)
        enqueued.created = created
        return enqueued

    @property
    def id(self) -> str:
        """The id as a plain string."""
        return str.__str__(self)

    def __getnewargs__(self) -> tuple[str, bool]:  # type: ignore[override]
        return self.id, self.created

    def __repr__(self) -> str:
        return f"Enqueued({str.__repr__(self)}, created={self.created})"


class Message(NamedTuple):
    """A job to be, validated: what ``enqueue_many()`` takes. Made by ``message()`` and ``@job`` functions."""

    job_type: str
    payload: str
    queue: str
    priority: int
    max_retries: int
    unique_key: str | None
    run_at: int | None
    run_in: float | None

    def __repr__(self) -> str:
        return f"<message for {self.job_type} in {self.queue}>"  # without the payload: it may hold secrets


def message(job_type: str, payload: str = "", **options: Unpack[Options]) -> Message:
    """Validate a job to be, without touching the database. See :class:`Options`; unset ones are the ``@job``'s.

    Raises TypeError or ValueError, naming the argument and the fix.
    """
    job_type = check_job_type(job_type)
    handler = registry.find(job_type)
    declared = handler.options if handler is not None else {}
    return build(job_type, payload, {**declared, **checked_options(options)})


def build(job_type: str, payload: str, checked: Mapping[str, Any]) -> Message:
    """A message of parts that are checked, but for the payload."""
    max_retries = checked.get("max_retries")
    return Message(
        job_type,
        check_payload(payload, conf().MAX_PAYLOAD_BYTES),
        checked.get("queue", "default"),
        checked.get("priority", 0),
        conf().MAX_RETRIES if max_retries is None else max_retries,
        checked.get("unique_key"),
        checked.get("run_at"),
        checked.get("run_in"),
    )


def enqueue(job_type: str, payload: str = "", **options: Unpack[Options]) -> Enqueued:
    """Enqueue a job by the name of its type, with its payload as text. See :class:`Options`.

    An INSERT in the caller's transaction: it is committed, or rolled back, with it. Whether a handler exists is not
    asked: another program may have it. Raises TypeError or ValueError for bad arguments, and database errors as they
    come.
    """
    return insert(message(job_type, payload, **options))


async def aenqueue(job_type: str, payload: str = "", **options: Unpack[Options]) -> Enqueued:
    """``enqueue()`` for async code."""
    return await sync_to_async(insert)(message(job_type, payload, **options))


def enqueue_many(messages: Iterable[Message]) -> list[Enqueued]:
    """Enqueue many jobs in few statements; all or none. Answers one ``Enqueued`` per message, in their order.

    Unique keys hold as they do one by one, also among the messages themselves. Messages come from
    ``some_job.message(...)`` or ``rws_jobs.message(...)``; anything else is a TypeError.
    """
    messages = list(messages)
    for index, item in enumerate(messages):
        if not isinstance(item, Message):
            raise TypeError(f"enqueue_many() item {index} is a {type(item).__name__}: make it with a job's .message(…)")
    if not messages:
        return []
    using = router.db_for_write(Job)
    jobs = Job.objects.using(using)
    with transaction.atomic(using=using):
        moment = now(using)
        rows = [_row(item, moment) for item in messages]
        jobs.enqueue_all([row for row in rows if row.unique_key is None])
        live = jobs.enqueue_all_unless_live([row for row in rows if row.unique_key is not None])
    enqueued = []
    for row in rows:
        job_id = row.id if row.unique_key is None else live[row.job_type, row.unique_key]
        enqueued.append(Enqueued(job_id, created=job_id == row.id))
    _announce(using, enqueued)
    return enqueued


def insert(item: Message, *, meta: str | None = None, using: str | None = None) -> Enqueued:
    """Insert one validated job."""
    using = using or router.db_for_write(Job)
    jobs = Job.objects.using(using)
    row = _row(item, None)
    row.meta = meta
    if item.unique_key is None:
        jobs.enqueue(row)
        enqueued = Enqueued(row.id)
    else:
        live_id = jobs.enqueue_unless_live(row)
        enqueued = Enqueued(live_id or row.id, created=live_id is None)
    _announce(using, [enqueued])
    return enqueued


def checked_options(options: Any) -> dict[str, Any]:
    """Options as they are stored: names and values checked, times in seconds. ``None`` takes back what was said before.

    Raises TypeError for unknown names or types, ValueError for values out of bounds.
    """
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _CHECKS:
            raise TypeError(f"no option {name!r}: the options are {', '.join(OPTION_NAMES)}")
        checked[name] = None if value is None and name in _MAY_BE_NONE else _CHECKS[name](value)
        # The one of the two that was given last wins.
        if name == "run_at":
            checked.pop("run_in", None)
        elif name == "run_in":
            checked.pop("run_at", None)
    return checked


def _whole(name: str, low: int, high: int) -> Any:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
        if not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}, not {value}")
        return int(value)

    return check


def _due(value: object) -> int:
    """``run_at`` in unix seconds, rounded up: a job never starts before its time."""
    if isinstance(value, datetime):
        if timezone.is_naive(value):
            if settings.USE_TZ:
                raise ValueError(
                    "run_at is a naive datetime: make it aware, e.g. with django.utils.timezone.make_aware()"
                )
            value = timezone.make_aware(value, timezone.get_default_timezone())
        value = value.timestamp()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"run_at must be a datetime or unix seconds, not {type(value).__name__}")
    if not value < 32_000_000_000 or value == -math.inf:
        raise ValueError(f"run_at must be a time before the year 2984, not {value!r}")
    return max(0, math.ceil(value))


_MAY_BE_NONE = ("unique_key", "max_retries")
_CHECKS: dict[str, Any] = {
    "queue": check_queue,
    "priority": _whole("priority", -(2**63), 2**63 - 1),
    "run_at": _due,
    "run_in": lambda value: seconds(value, "run_in"),
    "unique_key": check_unique_key,
    "max_retries": _whole("max_retries", 0, 2**31 - 1),
}


def _row(item: Message, moment: float | None) -> Job:
    """The row of a job to be. With ``moment`` its times are numbers: a thousand SQL expressions cost more than one look
    at the clock."""
    due: Any
    created: Any
    if moment is None:
        created = UnixNow()
        due = created if item.run_in is None else UnixNow(after=item.run_in)
    else:
        created = math.floor(moment)
        due = created if item.run_in is None else math.ceil(moment + item.run_in)
    # Every column is given, since a database default left to Django is an SQL expression of its own in each row; and in
    # the model's order, not by name, which took enqueue_many from 72 to 83 % of bulk_create's rate on PostgreSQL.
    columns: tuple[Any, ...] = (
        *(new_id(), item.job_type, item.payload, Status.PENDING.value, 0, item.max_retries),
        *(due if item.run_at is None else item.run_at, created),
        *(None, item.queue, item.priority, item.unique_key),  # None is the last error
        *(None, None, None, None),  # claimed_by, claimed_at, history, meta
    )
    return Job(*columns)  # type: ignore[misc]


_last_ns = 0
_id_lock = threading.Lock()


def new_id() -> str:
    """A new job id: nanoseconds since the epoch and 64 random bits, both in hex.

    In order of time, so that jobs of one process are first in, first out within a second; and never colliding, whatever
    the clocks of many machines do.
    """
    global _last_ns
    with _id_lock:
        _last_ns = max(_last_ns + 1, time.time_ns())
        return f"{_last_ns:016x}-{secrets.token_hex(8)}"


def _announce(using: str, enqueued: Iterable[Enqueued]) -> None:
    if job_enqueued.has_listeners(Job):
        created = [item.id for item in enqueued if item.created]
        for info in Job.objects.using(using).filter(pk__in=created).order_by("pk").as_infos():
            job_enqueued.send_robust(Job, job=info)
