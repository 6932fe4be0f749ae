"""A background job queue for Django in the database you already have.

The public names. They are looked up when first used: Django imports this package before models may be imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "administration": ("delete", "failed_jobs", "jobs", "retry"),
    "context": ("CurrentJob", "current_job"),
    "embedding": ("tick",),
    "enqueueing": ("Enqueued", "Message", "aenqueue", "enqueue", "enqueue_many", "message"),
    "functions": ("JobFunction", "job"),
    "info": ("JobInfo",),
    "outcomes": ("Backoff", "Discard", "Retry", "Snooze"),
    "payload": ("PayloadError",),
    "querysets": ("UniqueKeyIsLive",),
    "registry": ("register",),
    "schedules": ("schedule", "tick_schedules"),
    "settling": ("on_dead",),
    "worker": ("Worker",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Backoff",
    "CurrentJob",
    "Discard",
    "Enqueued",
    "JobFunction",
    "JobInfo",
    "Message",
    "PayloadError",
    "Retry",
    "Snooze",
    "UniqueKeyIsLive",
    "Worker",
    "aenqueue",
    "current_job",
    "delete",
    "enqueue",
    "enqueue_many",
    "failed_jobs",
    "job",
    "jobs",
    "message",
    "on_dead",
    "register",
    "retry",
    "schedule",
    "tick",
    "tick_schedules",
]

if TYPE_CHECKING:
    from .administration import delete, failed_jobs, jobs, retry
    from .context import CurrentJob, current_job
    from .embedding import tick
    from .enqueueing import Enqueued, Message, aenqueue, enqueue, enqueue_many, message
    from .functions import JobFunction, job
    from .info import JobInfo
    from .outcomes import Backoff, Discard, Retry, Snooze
    from .payload import PayloadError
    from .querysets import UniqueKeyIsLive
    from .registry import register
    from .schedules import schedule, tick_schedules
    from .settling import on_dead
    from .worker import Worker


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
