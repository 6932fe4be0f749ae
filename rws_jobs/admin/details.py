"""What the page of a job shows: what it is, what it was given, and how each attempt ended."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest
from django.utils.translation import gettext as _

from rws_jobs import history, registry
from rws_jobs.clock import now as database_now
from rws_jobs.info import Status
from rws_jobs.models import Job

from .display import age, attempts_of, duration, exact, payload_text, printable, status_badge, when

if TYPE_CHECKING:
    from .jobs import JobAdmin


@dataclass(frozen=True, slots=True)
class Fact:
    """A line about a job. ``more`` stands quietly behind the value; ``is_name`` sets it in monospace."""

    label: str
    value: str
    more: str = ""
    is_name: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that ended badly, as text. Other programs write history too: nothing of its form is relied on."""

    number: str
    exception: str
    error: str
    ended: str
    took: str
    worker: str
    traceback: str

    @classmethod
    def of(cls, entry: dict[str, Any], now: float) -> "Attempt":
        started, ended = _number(entry.get("started")), _number(entry.get("ended"))
        exception = _text(entry.get("exception")).removeprefix("builtins.")
        # Errors are stored as "ValueError: no such user"; the class stands beside them here.
        error = (" ".join(_text(entry.get("error")).split()) + " ").removeprefix(f"{exception.rpartition('.')[2]}: ")
        return cls(
            number=_text(entry.get("attempt")),
            exception=exception,
            error=error.strip(),
            ended="" if ended is None else when(ended, now),
            took="" if started is None or ended is None or ended < started else duration(ended - started),
            worker=_text(entry.get("worker")),
            traceback=_text(entry.get("traceback")),
        )


def details(model_admin: "JobAdmin", request: HttpRequest, job: Job) -> dict[str, Any]:
    """The template's values. All but badges and ages is plain text, which the template escapes."""
    now = database_now(str(job._state.db))
    entries = history.read(job.history)[::-1]
    last_error = printable(job.last_error or "").strip()
    running = job.status == Status.RUNNING.value
    return {
        "badge": status_badge(job.status),
        "facts": list(_facts(job, now)),
        # Once is enough: where the newest attempt tells it, it stands there.
        "last_error": "" if entries and _text(entries[0].get("error")).strip() == last_error else last_error,
        "payload": model_admin.get_payload(request, job),
        "attempts": [Attempt.of(entry, now) for entry in entries],
        "extensions": payload_text(job.meta) if job.meta else "",
        "has_handler": registry.find(job.job_type) is not None,
        "is_running": running,
        "can_retry": job.status == Status.FAILED.value and model_admin.has_retry_permission(request),
        "can_delete": not running and model_admin.has_delete_permission(request),
    }


def _facts(job: Job, now: float) -> Iterator[Fact]:
    due = {Status.PENDING.value: _("Due"), Status.RUNNING.value: _("Was due")}.get(job.status, _("Last due"))
    yield Fact(_("Id"), printable(job.pk), is_name=True)
    yield Fact(_("Queue"), printable(job.queue), _("priority %d") % job.priority if job.priority else "")
    yield Fact(_("Failed attempts"), attempts_of(job))
    if job.unique_key is not None:
        yield Fact(_("Unique key"), printable(job.unique_key), is_name=True)
    yield Fact(due, age(job.next_run_at, now), exact(job.next_run_at))
    yield Fact(_("Enqueued"), age(job.created_at, now), exact(job.created_at))
    if job.claimed_at is not None:
        yield Fact(_("Claimed"), age(job.claimed_at, now), exact(job.claimed_at))
    if job.claimed_by is not None:
        yield Fact(_("Worker"), printable(job.claimed_by), is_name=True)


def _text(value: object) -> str:
    return "" if value is None else printable(value if isinstance(value, (str, int, float)) else json.dumps(value))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
