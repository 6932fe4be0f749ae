"""Cron: when is a schedule due next?

Six fields are second, minute, hour, day, month, weekday (0 is Sunday); a time is due when all six match. Five fields
are a crontab's: no second (it is 0), names, 7 for Sunday too, steps on ranges, and day OR weekday where both are
restricted, that is where neither starts with `*`.

The clock of the schedule's zone decides, by cron's rule for days on which it is put forward or back. A second, minute
or hour field that starts with `*` makes the expression follow real time: it runs in both passes of a repeated hour and
never in a skipped one. Any other runs once for each time of a local day: at the first pass of a repeated time, and
right after the jump for skipped times, which then are one run.

Invariant: `next_after(expression, t)` is later than t and depends on its arguments alone, so walking from run to run
neither repeats nor misses one, and every process walks the same way.

croniter searches, for numbers spelled out; it neither parses nor sees zones. It takes `5-5` for the whole field and
`22-6` for a wrap, its grammar moves between releases, and it runs a daily job twice in the night of 25 hours.
"""

import re
from bisect import bisect_left
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from croniter import CroniterBadDateError, croniter

_MAX_LENGTH = 1000  # characters; all six fields spelled out, value by value, take about 520
_DAY = 86_400
_HORIZON_YEARS = 50  # the longest wait for any date is 40: 29 February on a given weekday, across 2100
_HORIZON = _HORIZON_YEARS * 366 * _DAY
_CALENDAR_ENDS = 253_402_300_800 - 3 * _HORIZON  # no search that starts earlier meets year 10000, which datetime lacks


class CronError(ValueError):
    """An expression or a time zone that cannot be used. The message says which part, and what it may be instead."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed cron expression: the values that match, ascending, for each field."""

    text: str
    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]  # 0 is Sunday
    has_seconds: bool  # six fields were written, not five
    either_day: bool  # a matching day OR a matching weekday is enough
    real_time: bool  # for days on which the clock is changed: see above


def parse(text: str) -> Expression:
    """Read an expression of five or six fields.

    Raises CronError for what the grammar does not have, naming the field, the item and the values it may take (or the
    number of fields), and TypeError for anything but a str. Dates that never come are read; `validate` refuses them.
    """
    if not isinstance(text, str):
        raise TypeError(f"a cron expression is a str, not {type(text).__name__}")
    if len(text) > _MAX_LENGTH:  # before any work: a broken row may hold 100,000 characters
        raise CronError(f"the cron expression has {len(text)} characters, at most {_MAX_LENGTH} are read")
    return _parse(text)


def validate(text: str, timezone: str = "UTC") -> Expression:
    """Read the expression of a schedule that is being declared.

    Raises as `parse` does, and CronError for an unknown zone or an expression that no time ever matches.
    """
    expression = parse(text)
    if next_after(expression, 0, timezone) is None:
        raise CronError(f"{text!r} never runs: no date matches it")
    return expression


def next_after(expression: str | Expression, after: int, timezone: str = "UTC") -> int | None:
    """The first run strictly after `after`, both in unix seconds, or None for never.

    A negative `after` counts as 0. Raises as `parse` does, and CronError for a zone the IANA database does not have.
    """
    if not isinstance(expression, Expression):
        expression = parse(expression)
    zone = _zone(timezone)
    after = max(after, 0)
    if after >= _CALENDAR_ENDS:
        return None
    if timezone == "UTC":
        return _next_match(expression, after)
    return (_next_in_real_time if expression.real_time else _next_on_the_clock)(expression, after, zone)


# -- the grammar


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    crontab: bool = False  # ranges may have steps, as in five fields
    names: tuple[str, ...] = ()  # the first one means `low`

    def error(self, item: str, problem: str) -> CronError:
        return CronError(f"{self.name} field: {item!r} {problem} (values: {self.low}-{self.high})")


_SIX = (
    _Field("second", 0, 59),
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day", 1, 31),
    _Field("month", 1, 12),
    _Field("weekday", 0, 6),
)
_FIVE = (
    *(field._replace(crontab=True) for field in _SIX[:4]),  # the second is filled in as 0
    _Field("month", 1, 12, True, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
    _Field("weekday", 0, 7, True, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
)
# Unicode's white space separates fields. str.split() and \s would also split at U+001C-001F, which are not part of it.
_FIELD_TEXT = re.compile(r"[\S\x1c-\x1f]+")
# int() by itself would also take "1_0", blanks, minus signs and the digits of other scripts.
_NUMBER = re.compile(r"\+?[0-9]+")


@lru_cache(maxsize=512)
def _parse(text: str) -> Expression:
    texts = _FIELD_TEXT.findall(text)
    if len(texts) not in (5, 6):
        wanted = "six are wanted (second minute hour day month weekday), or five without the second"
        raise CronError(f"number of fields in {text!r}: {len(texts)}; {wanted}")
    has_seconds = len(texts) == 6
    if not has_seconds:
        texts.insert(0, "0")
    values = [_values(*each) for each in zip(_SIX if has_seconds else _FIVE, texts, strict=True)]
    seconds, minutes, hours, days, months, weekdays = values
    starred = [each.startswith("*") for each in texts]
    either_day = not (has_seconds or starred[3] or starred[5])
    real_time = any(starred[:3])
    return Expression(text, seconds, minutes, hours, days, months, weekdays, has_seconds, either_day, real_time)


def _values(field: _Field, text: str) -> tuple[int, ...]:
    ranges = [range(field.low, field.high + 1)] if text == "*" else [_item(field, item) for item in text.split(",")]
    values = {value for each in ranges for value in each}
    return tuple(sorted({value % 7 for value in values} if field.name == "weekday" else values))


def _item(field: _Field, item: str) -> range:
    body, slash, step_text = item.partition("/")
    step = _number(field, step_text, named=False) if slash else 1
    if not step or step >= 2**32:  # the limit is shared with the other programs that read these texts
        raise field.error(item, "has a step that is not a number from 1 to 4294967295")
    if item == "*":
        raise field.error(item, "cannot be part of a list")
    if body == "*":
        return range(field.low, field.high + 1, step)
    start, dash, end = body.partition("-")
    # Crons disagree about 5/15: it is only 5, an error, or 5-59/15. Who wants the last can say so.
    if slash and not (dash and field.crontab):
        raise field.error(item, f"has a step, which only goes with *{' or a range' if field.crontab else ''}")
    low, high = _number(field, start), _number(field, end if dash else start)
    if low is None or high is None:
        raise field.error(item, "is not a number, nor a range of two")
    if low > high:
        raise field.error(item, "runs backwards")
    if low < field.low or high > field.high:
        raise field.error(item, "is out of bounds")
    return range(low, high + 1, step)


def _number(field: _Field, text: str, named: bool = True) -> int | None:
    if named and text.lower() in field.names:
        return field.low + field.names.index(text.lower())
    return int(text) if _NUMBER.fullmatch(text) else None


# -- the search; `wall` is what the clock in the zone shows, as if it were unix seconds


@lru_cache(maxsize=512)
def _searches(expression: Expression) -> tuple[croniter, ...]:
    if expression.either_day:  # not croniter's day_or, which takes a list of every value for no restriction
        by_day = replace(expression, weekdays=tuple(range(7)), either_day=False)
        by_weekday = replace(expression, days=tuple(range(1, 32)), either_day=False)
        return _searches(by_day) + _searches(by_weekday)
    e = expression
    fields = zip((e.seconds, e.minutes, e.hours, e.days, e.months, e.weekdays), (60, 60, 24, 31, 12, 7), strict=True)
    text = " ".join("*" if len(values) == size else ",".join(map(str, values)) for values, size in fields)
    return (croniter(text, 0, second_at_beginning=True, day_or=False, max_years_between_matches=_HORIZON_YEARS),)


def _next_match(expression: Expression, wall: int) -> int | None:
    found = []
    for search in _searches(expression):
        with suppress(CroniterBadDateError):  # no such date within the horizon
            found.append(int(copy(search).get_next(float, wall)))  # a copy: it notes its place, threads share it
    return min(found, default=None)


def _next_in_real_time(expression: Expression, after: int, zone: ZoneInfo) -> int | None:
    reached, wall = after, _wall(zone, after)
    # The horizon ends the search for a time that is skipped whenever its date comes.
    while reached - after < _HORIZON and (due := _next_match(expression, wall)) is not None:
        candidate = due - (_wall(zone, reached) - reached)
        near = min(candidate, reached + _DAY)
        change = _offset_change(zone, reached, near)
        if change <= near:  # from here on the clock shows something else: look again
            reached, wall = change, _wall(zone, change) - 1
        elif near == candidate:
            return candidate
        else:  # nothing matches for days, whatever the offset does meanwhile: go on near the candidate
            reached = max(near, candidate - 2 * _DAY)
            wall = _wall(zone, reached)
    return None


def _next_on_the_clock(expression: Expression, after: int, zone: ZoneInfo) -> int | None:
    wall = _wall(zone, after)
    first_pass = _instant(zone, wall)
    if first_pass < after:  # the second pass: whatever was due before the clock was put back has run
        wall = _wall(zone, _offset_change(zone, first_pass, after) - 1)
    due = _next_match(expression, wall)
    if due is None:
        return None
    instant = _instant(zone, due)
    if _wall(zone, instant) == due:
        return instant
    return _offset_change(zone, _instant(zone, due, fold=1), instant)  # skipped: right after the jump


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # unknown; malformed; a directory, or too long for a file name
        raise CronError(f"{name!r:.80} is not a time zone of the IANA database") from error


def _wall(zone: ZoneInfo, instant: int) -> int:
    return int(datetime.fromtimestamp(instant, zone).replace(tzinfo=UTC).timestamp())


def _instant(zone: ZoneInfo, wall: int, fold: int = 0) -> int:
    # Of a repeated time, fold 0 is the first pass. Of a skipped one, fold 0 lies after the jump and fold 1 before it.
    return int(datetime.fromtimestamp(wall, UTC).replace(tzinfo=zone, fold=fold).timestamp())


def _offset_change(zone: ZoneInfo, before: int, until: int) -> int:
    # The first instant in (before, until] with another UTC offset than `before`, or until + 1. They are at most a day
    # apart, so there is one at most: no zone has changed twice within six days since 1970 (tzdata 2026.6).
    usual = _wall(zone, before) - before
    if _wall(zone, until) - until == usual:
        return until + 1
    return before + bisect_left(range(before, until), True, key=lambda instant: _wall(zone, instant) - instant != usual)
