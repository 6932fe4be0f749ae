"""The RWS_JOBS setting: one table of names, defaults and bounds, read late."""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed
from django.dispatch import receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Conf:
    """What the project's ``RWS_JOBS`` dict says, defaults filled in. Times are in seconds."""

    MAX_RETRIES: int = 3
    BACKOFF_INITIAL: float = 0.5
    BACKOFF_MULTIPLIER: float = 2
    BACKOFF_MAX: float = 86_400
    BACKOFF_JITTER: float = 0.0
    POLL_INTERVAL: float = 0.5
    HEARTBEAT_INTERVAL: float = 5
    DEAD_AFTER: float = 30
    SHUTDOWN_TIMEOUT: float = 25
    UNKNOWN_JOBS: str = "fail"
    QUEUES: tuple[str, ...] | None = None
    MAX_PAYLOAD_BYTES: int = 1_048_576
    MAX_ERROR_BYTES: int = 60_000
    CLOCK: str = "database"


NAMES = tuple(field.name for field in fields(Conf))

_BOUNDS: dict[str, tuple[type[int] | type[float], float, float]] = {
    "MAX_RETRIES": (int, 0, 2**31 - 1),
    "BACKOFF_INITIAL": (float, 0, 10**9),
    "BACKOFF_MULTIPLIER": (float, 1, 1_000_000),
    "BACKOFF_MAX": (float, 0, 10**9),
    "BACKOFF_JITTER": (float, 0, 10),
    "POLL_INTERVAL": (float, 0.01, 3_600),
    "HEARTBEAT_INTERVAL": (float, 0.1, 3_600),
    "DEAD_AFTER": (float, 1, 86_400),
    "SHUTDOWN_TIMEOUT": (float, 0, 86_400),
    "MAX_PAYLOAD_BYTES": (int, 1, 2**30),
    "MAX_ERROR_BYTES": (int, 1_000, 2**30),
}
_CHOICES = {"UNKNOWN_JOBS": ("fail", "leave"), "CLOCK": ("database", "local")}


@cache
def conf() -> Conf:
    """The settings in force. Unknown names and bad values are left out here: the system check reports them."""
    good = {name: value for name, value in _given().items() if _problem(name, value) is None}
    if good.get("QUEUES") is not None:
        good["QUEUES"] = tuple(good["QUEUES"])
    settled = Conf(**good)
    if _lease_is_short(settled):
        return replace(settled, HEARTBEAT_INTERVAL=Conf().HEARTBEAT_INTERVAL, DEAD_AFTER=Conf().DEAD_AFTER)
    return settled


def problems() -> list[tuple[str, str]]:
    """What is wrong with the setting: (name, sentence) pairs."""
    if not isinstance(getattr(settings, "RWS_JOBS", {}), dict):
        return [("RWS_JOBS", "RWS_JOBS must be a dict.")]
    found = [(name, sentence) for name, value in _given().items() if (sentence := _problem(name, value))]
    good = {name: value for name, value in _given().items() if _problem(name, value) is None}
    if _lease_is_short(Conf(**good)):
        sentence = "RWS_JOBS['DEAD_AFTER'] must be at least twice HEARTBEAT_INTERVAL: one late beat is not death."
        found.append(("DEAD_AFTER", sentence))
    return found


def _lease_is_short(settled: Conf) -> bool:
    return settled.DEAD_AFTER < 2 * settled.HEARTBEAT_INTERVAL


def _given() -> dict[str, Any]:
    given = getattr(settings, "RWS_JOBS", {})
    return given if isinstance(given, dict) else {}


def _problem(name: str, value: object) -> str | None:
    if name not in NAMES:
        return f"RWS_JOBS has no setting {name!r}. It knows {', '.join(NAMES)}."
    if name in _CHOICES:
        choices = _CHOICES[name]
        return (
            None
            if value in choices
            else f"RWS_JOBS[{name!r}] must be one of {', '.join(map(repr, choices))}, not {value!r}."
        )
    if name == "QUEUES":
        names = isinstance(value, (list, tuple)) and all(isinstance(queue, str) for queue in value)
        return None if value is None or names else "RWS_JOBS['QUEUES'] must be None or a list of queue names."
    kind, low, high = _BOUNDS[name]
    numeric = isinstance(value, int) or (kind is float and isinstance(value, float))
    if isinstance(value, bool) or not numeric or not low <= value <= high:  # type: ignore[operator]
        noun = "a whole number" if kind is int else "a number"
        return f"RWS_JOBS[{name!r}] must be {noun} from {low:g} to {high:g}, not {value!r}."
    return None


@receiver(setting_changed)
def _forget(*, setting: str, **kwargs: object) -> None:
    if setting == "RWS_JOBS":
        conf.cache_clear()
