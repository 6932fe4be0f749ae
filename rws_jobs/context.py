"""What a handler can learn about the job it runs."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurrentJob:
    """The job that is running here. Times are unix seconds."""

    id: str
    job_type: str
    queue: str
    attempt: int
    """The number of this attempt, counted from 1."""
    max_retries: int
    scheduled_for: int | None
    """The due time of the schedule that this run stands for; None for a job that no schedule enqueued."""


_current: ContextVar[CurrentJob | None] = ContextVar("rws_jobs_current", default=None)


def current_job() -> CurrentJob:
    """The job that runs in this thread or task. Raises LookupError where none does."""
    found = _current.get()
    if found is None:
        raise LookupError("current_job() was called outside of a job")
    return found


def set_current(job: CurrentJob) -> None:
    """For the executor: inside the context made for this run."""
    _current.set(job)
