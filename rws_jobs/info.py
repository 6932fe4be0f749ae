"""What is known of a job: in listings, hooks and signals (JobInfo), and in the worker that holds it (Claim)."""

import json
from dataclasses import dataclass, field
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _


class Status(models.TextChoices):
    """Where a job stands. There is no "done": a job that succeeded has no row."""

    PENDING = "pending", _("pending")
    RUNNING = "running", _("running")
    FAILED = "failed", _("failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as it stood when it was looked at. ``run_at`` and ``created_at`` are unix seconds.

    The payload is left out of ``repr()``: it may hold secrets, and infos end up in logs.
    """

    id: str
    job_type: str
    payload: str = field(repr=False)
    queue: str
    priority: int
    status: str
    attempts: int
    max_retries: int
    run_at: int
    created_at: int
    last_error: str | None
    unique_key: str | None


# Where each of its values stands in the table.
INFO_COLUMNS = {
    "id": "id",
    "job_type": "job_type",
    "payload": "payload",
    "queue": "queue",
    "priority": "priority",
    "status": "status",
    "attempts": "attempts",
    "max_retries": "max_retries",
    "run_at": "next_run_at",
    "created_at": "created_at",
    "last_error": "last_error",
    "unique_key": "unique_key",
}

# The columns of a claim, in the order in which Claim takes them; its worker comes last.
CLAIM_COLUMNS = (
    "id",
    "job_type",
    "payload",
    "queue",
    "priority",
    "attempts",
    "max_retries",
    "next_run_at",
    "created_at",
    "unique_key",
    "history",
    "meta",
)


@dataclass(slots=True, eq=False, repr=False)
class Claim:
    """A job held by a worker. ``worker`` and ``attempts`` are the fence: every later statement names them.

    ``ran`` is how long its handler has run, in seconds.
    """

    id: str
    job_type: str
    payload: str
    queue: str
    priority: int
    attempts: int
    max_retries: int
    next_run_at: int
    created_at: int
    unique_key: str | None
    history: str | None
    meta: str | None
    worker: str = ""
    ran: float = 0.0

    @property
    def attempt(self) -> int:
        """The number of this attempt, counted from 1."""
        return self.attempts + 1

    @property
    def extensions(self) -> dict[str, Any]:
        """The meta column as a dict; empty where it holds nothing of use."""
        try:
            found = json.loads(self.meta) if self.meta else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def info(self, status: str = "running", *, attempts: int | None = None, error: str | None = None) -> JobInfo:
        """This job for hooks and signals, with the status, failures and error that it has got by now."""
        return JobInfo(
            id=self.id,
            job_type=self.job_type,
            payload=self.payload,
            queue=self.queue,
            priority=self.priority,
            status=status,
            attempts=self.attempts if attempts is None else attempts,
            max_retries=self.max_retries,
            run_at=self.next_run_at,
            created_at=self.created_at,
            last_error=error,
            unique_key=self.unique_key,
        )

    def __repr__(self) -> str:
        return f"<{self.job_type} {self.id}, attempt {self.attempt} of {self.max_retries + 1}>"
