"""How one run of a job can end, what a handler raises to choose, and how long a retry waits."""

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from numbers import Real
from typing import Any

from .conf import conf

logger = logging.getLogger("rws_jobs")

BackoffPolicy = Callable[[int, BaseException], float]


# -- what a handler raises


class Retry(Exception):
    """Raised by a handler: fail this attempt, and run again ``in_`` seconds (or a timedelta) from now.

    Without ``in_`` the job's backoff decides. The attempt is charged: after the last one the job is dead. Raised
    ``from`` another exception, it is recorded as that one.
    """

    def __init__(self, in_: float | timedelta | None = None) -> None:
        self.delay = None if in_ is None else seconds(in_, "in_")
        super().__init__("retry" if in_ is None else f"retry in {self.delay:g} s")


class Snooze(Exception):
    """Raised by a handler: not now, come back ``in_`` seconds (or a timedelta) from now. No attempt is charged."""

    def __init__(self, in_: float | timedelta) -> None:
        self.delay = seconds(in_, "in_")
        super().__init__(f"snooze for {self.delay:g} s")


class Discard(Exception):
    """Raised by a handler: running again is of no use; straight to the dead-letter list with ``reason``."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason or "discarded")


def seconds(value: float | timedelta, name: str) -> float:
    """A number of seconds or a timedelta as seconds.

    Raises TypeError for other types, ValueError for negative, infinite or absurd (beyond 1,000 years) values.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, not {type(value).__name__}")
    if not 0 <= value <= 32_000_000_000:
        raise ValueError(f"{name} must be from 0 seconds to 1,000 years, not {value!r}")
    return float(value)


# -- how long a retry waits


@dataclass(frozen=True, slots=True)
class Backoff:
    """``initial × multiplier^(failures before)`` seconds, at most ``maximum``, plus a random part of it.

    ``initial`` and ``maximum`` take seconds or a timedelta; ``maximum`` defaults to ``BACKOFF_MAX``. The random part is
    up to ``jitter`` times the delay: 0.5 spreads 60 s over 60 to 90 s, and never shortens it. Raises TypeError or
    ValueError for bad values.
    """

    initial: float | timedelta
    multiplier: float = 2
    maximum: float | timedelta | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        seconds(self.initial, "Backoff initial")
        if self.maximum is not None:
            seconds(self.maximum, "Backoff maximum")
        for name, least, value in (("multiplier", 1, self.multiplier), ("jitter", 0, self.jitter)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Backoff {name} must be a number, not {type(value).__name__}")
            if not least <= value <= 1_000_000:
                raise ValueError(f"Backoff {name} must be from {least} to 1,000,000, not {value!r}")

    def __call__(self, attempt: int, exception: BaseException) -> float:
        """Seconds to wait after the failure of attempt number ``attempt`` (counted from 1)."""
        cap = seconds(conf().BACKOFF_MAX if self.maximum is None else self.maximum, "maximum")
        delay = seconds(self.initial, "initial")
        try:
            delay = delay and delay * float(self.multiplier) ** (attempt - 1)
        except OverflowError:
            delay = cap
        return min(delay, cap) * (1 + self.jitter * random.random())


def default_backoff() -> Backoff:
    """The backoff of jobs that bring none, from the settings."""
    return Backoff(conf().BACKOFF_INITIAL, conf().BACKOFF_MULTIPLIER, conf().BACKOFF_MAX, conf().BACKOFF_JITTER)


def retry_delay(policy: BackoffPolicy | None, attempt: int, exception: BaseException) -> float:
    """Ask ``policy``; one that raises or answers nonsense must not lose the job, so the default stands in for it."""
    if policy is not None:
        try:
            delay: Any = policy(attempt, exception)
            if isinstance(policy, Backoff):
                return float(delay)
            number = isinstance(delay, (Real, Decimal))
            if number and delay >= 0 and delay != math.inf:
                # Compared before it is converted: 10**2000 is no float.
                return float(min(delay, conf().BACKOFF_MAX))
            logger.error("backoff %r answered %r: the default backoff is used", policy, delay)
        except BaseException:
            logger.exception("backoff %r raised: the default backoff is used", policy)
    return default_backoff()(attempt, exception)


# -- how a run ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A bad end, as it is kept. Times are unix seconds of this machine's clock, for display."""

    error: str
    exception: str
    traceback: str
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Completed:
    """The handler returned. ``recorded``: its own transaction has deleted the row already."""

    recorded: bool = False


COMPLETED = Completed()


@dataclass(frozen=True, slots=True)
class Retrying:
    """Failed, with attempts left: due again in ``delay`` seconds."""

    failure: Failure
    delay: float


@dataclass(frozen=True, slots=True)
class Snoozed:
    """Wants to run ``delay`` seconds from now, uncharged."""

    delay: float


@dataclass(frozen=True, slots=True)
class Dead:
    """Failed for good: to the dead-letter list."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Released:
    """Given back uncharged: not run, or its database was lost under it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The claim is no longer ours: nothing is to be written."""


Outcome = Completed | Retrying | Snoozed | Dead | Released | Lost
