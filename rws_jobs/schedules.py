"""Schedules: declared in code, stored with their next due time, run once per due time by whichever process is first.

A tick compares and sets the stored due time and inserts the job in one transaction: both happen or neither, and of any
number of replicas one does it. Missed times collapse into one run. What runs is the stored definition, and each process
stores its own once, at its first tick: the process that started last wins, and during a rolling deploy old and new ones
do not undo each other's edits every second.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

from django.db import DatabaseError, IntegrityError, connections, router, transaction

from .clock import UnixNow, now
from .cron import next_after, validate
from .enqueueing import checked_options, insert, message
from .functions import JobFunction
from .models import JobSchedule
from .text import check_job_type, check_text
from .transactions import short_transaction

logger = logging.getLogger("rws_jobs")


class ScheduleOptions(TypedDict, total=False):
    """What may be said of the jobs of a schedule; as in :class:`~rws_jobs.enqueueing.Options`."""

    queue: str
    priority: int
    unique_key: str
    max_retries: int


@dataclass(slots=True)
class Schedule:
    """A schedule as this process declares it."""

    name: str
    cron: str
    timezone: str
    job_type: str
    payload: str
    options: str
    stored: bool = False

    @property
    def queue(self) -> str | None:
        """The queue that it names for its jobs, if it names one."""
        queue: str | None = json.loads(self.options).get("queue")
        return queue

    def definition(self) -> dict[str, str]:
        """Its columns but the due time."""
        columns = ("cron", "timezone", "job_type", "payload", "options")
        return {column: getattr(self, column) for column in columns}


_declared: dict[str, Schedule] = {}
_complaints: dict[str, str] = {}


def schedule(
    name: str,
    cron: str,
    job: JobFunction[..., Any] | str,
    *,
    kwargs: Mapping[str, Any] | None = None,
    payload: str | None = None,
    timezone: str = "UTC",
    **options: Unpack[ScheduleOptions],
) -> None:
    """Declare that ``job`` is enqueued at the times of ``cron``, once for each over any number of processes.

    ``cron`` has six fields, the seconds first, all of which must match, or the five of a crontab. ``job`` is a job
    function, with its arguments in ``kwargs``, or a job type, with its payload as text. A new schedule first runs at
    its next time; times missed while no worker ran make one run together.

    Raises CronError for a bad expression, one that never matches or an unknown zone, ValueError for a name declared
    twice, TypeError or ValueError for arguments that do not fit the job. Nothing is stored before the first tick.
    """
    if unknown := options.keys() - ScheduleOptions.__annotations__.keys():
        raise TypeError(
            f"schedule {name!r} has no option {', '.join(sorted(unknown))}: "
            f"the options are {', '.join(ScheduleOptions.__annotations__)}"
        )
    name = check_text(name, what="schedule name", limit=191, one_line=True)
    if name in _declared:
        raise ValueError(f"schedule {name!r} is declared twice: give one of them another name")
    validate(cron, timezone)
    if isinstance(job, JobFunction):
        if payload is not None:
            raise TypeError(f"schedule {name!r}: give the arguments of {job!r} in kwargs=, not as payload=")
        job_type, payload = job.job_type, job.encode(**(kwargs or {}))
    elif kwargs is not None:
        raise TypeError(f"schedule {name!r}: kwargs= goes with a job function; for a job type give payload=")
    else:
        job_type = check_job_type(job)
    message(job_type, payload or "", **options)
    checked = checked_options(options)
    _declared[name] = Schedule(
        name, cron, timezone, job_type, payload or "", json.dumps(checked, ensure_ascii=False, sort_keys=True)
    )


def declared() -> Mapping[str, Schedule]:
    """The schedules that this process declares, by name."""
    return MappingProxyType(_declared)


def tick_schedules() -> int:
    """Enqueue a job for each declared schedule that is due, by the database's clock. Answers how many were inserted.

    A schedule that is broken, in the table or while it is enqueued, is logged once and does not stop the others.
    Database errors of the look itself are raised.
    """
    if not _declared:
        return 0
    using = router.db_for_write(JobSchedule)
    rows = JobSchedule.objects.using(using).filter(name__in=list(_declared)).annotate(now=UnixNow())
    stored = {row.name: row for row in rows}
    inserted = 0
    for name, declaration in list(_declared.items()):
        try:
            if name in stored:
                inserted += _tick(using, declaration, stored[name])
            else:
                _first_sight(using, declaration)
            _complaints.pop(name, None)
        except (DatabaseError, ValueError, TypeError, RecursionError) as error:
            _complain(name, error)
    return inserted


def _first_sight(using: str, declaration: Schedule) -> None:
    """Store the schedule with its next time. Nothing runs yet."""
    following = next_after(declaration.cron, math.floor(now(using)), declaration.timezone)
    if following is None:
        raise ValueError(f"{declaration.cron!r} never runs again")
    try:
        with transaction.atomic(using=using):
            JobSchedule.objects.using(using).create(
                name=declaration.name, next_run_at=following, **declaration.definition()
            )
    except IntegrityError:
        return  # another replica saw it first; the next tick reads its row
    declaration.stored = True


def _tick(using: str, declaration: Schedule, row: Any) -> int:
    if not declaration.stored:
        _store_edits(using, declaration, row)
    if row.next_run_at > row.now or row.cron is None:
        return 0
    # After now, not after the due time: all missed times are this one run.
    following = next_after(row.cron, row.now, row.timezone)
    if following is None:
        raise ValueError(f"{row.cron!r} never runs again")
    with short_transaction(using):
        if row.paused:
            # Its times pass by: resumed, it waits for the next one.
            _update(using, row, next_run_at=following)
            return 0
        if not _update(using, row, next_run_at=following, last_run_at=row.next_run_at):
            return 0
        job = message(row.job_type, row.payload or "", **json.loads(row.options or "{}"))
        meta = json.dumps({"schedule": row.name, "scheduled_for": row.next_run_at}, ensure_ascii=False)
        return int(insert(job, meta=meta, using=using).created)


def _store_edits(using: str, declaration: Schedule, row: Any) -> None:
    """Store what this process declares. Other times move the due time, unless it has come: a missed run is not lost.

    A row without cron text is the original's: it keeps its due time.
    """
    edits: dict[str, Any] = {
        column: value for column, value in declaration.definition().items() if getattr(row, column) != value
    }
    if edits:
        if row.cron is not None and edits.keys() & {"cron", "timezone"} and row.next_run_at > row.now:
            edits["next_run_at"] = next_after(declaration.cron, row.now, declaration.timezone)
        with short_transaction(using):
            if not _update(using, row, **edits):
                return  # the next tick tries again
        for column, value in edits.items():
            setattr(row, column, value)
    declaration.stored = True


def _update(using: str, row: Any, **columns: Any) -> bool:
    """Change the row if it is due as it was when read.

    False: another replica was faster, or somebody holds the row, and the other schedules do not wait for that.
    """
    this = JobSchedule.objects.using(using).filter(pk=row.pk, next_run_at=row.next_run_at)
    skips_locked = connections[using].features.has_select_for_update_skip_locked
    if skips_locked and not this.select_for_update(skip_locked=True):
        return False
    return bool(this.update(**columns))


def _complain(name: str, error: Exception) -> None:
    """Log a broken schedule when it breaks, not at every tick."""
    text = f"{type(error).__name__}: {error}"
    if _complaints.get(name) != text:
        _complaints[name] = text
        logger.error("schedule %r could not be run: %s", name, text)
