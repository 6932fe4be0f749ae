"""Which handler runs which job type, in this process."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from .outcomes import BackoffPolicy
from .text import check_job_type


class NoHandler(LookupError):
    """A job was claimed whose type this process has no handler for."""

    def __init__(self, job_type: str) -> None:
        super().__init__(f"no handler registered for job_type '{job_type}'")


class Handler:
    """What runs the jobs of one type. This one is ``register()``'s: it hands on the payload as it stands in the row."""

    atomic = False
    backoff: BackoffPolicy | None = None
    options: Mapping[str, Any] = {}

    def __init__(self, job_type: str, function: Callable[..., Any]) -> None:
        self.job_type = job_type
        self.function = function

    def bind(self, payload: str) -> tuple[Callable[..., Any], dict[str, Any] | tuple[Any, ...]]:
        """The function to call, and its arguments (a dict of keywords, or a tuple)."""
        return self.function, (payload,)

    @property
    def where(self) -> str:
        """Where the function is defined, for error messages."""
        return f"{getattr(self.function, '__module__', '?')}.{getattr(self.function, '__qualname__', self.function)}"


_handlers: dict[str, Handler] = {}
_lock = threading.Lock()


def add(handler: Handler) -> None:
    """Make ``handler`` the one for its job type. Raises ValueError, naming both, when another function has the type.

    The same function again (a reloaded module) takes its own place, and ``register()`` replaces what ``register()``
    set.
    """
    with _lock:
        other = _handlers.get(handler.job_type)
        if other is not None and other.where != handler.where and not (type(other) is type(handler) is Handler):
            raise ValueError(
                f"two handlers for job type {handler.job_type!r}: {other.where} and {handler.where}; "
                "give one of them another name"
            )
        _handlers[handler.job_type] = handler


def register(job_type: str, handler: Callable[[str], object]) -> None:
    """Let ``handler(payload)`` run the jobs of ``job_type``; the payload is the text as it was enqueued.

    Registering the type again replaces the handler, also while workers run. ``handler`` may be an ``async def``
    function. Raises TypeError for a handler that cannot be called, ValueError for a bad job type or one that a
    ``@job`` has.
    """
    job_type = check_job_type(job_type)
    if not callable(handler):
        raise TypeError(f"the handler for {job_type!r} must be callable, not {type(handler).__name__}")
    add(Handler(job_type, handler))


def resolve(job_type: str) -> Handler:
    """The handler for a job type. Raises NoHandler."""
    try:
        return _handlers[job_type]
    except KeyError:
        raise NoHandler(job_type) from None


def find(job_type: str) -> Handler | None:
    """The handler for a job type, or None."""
    return _handlers.get(job_type)


def job_types() -> list[str]:
    """All job types that this process can run, sorted."""
    return sorted(_handlers)
