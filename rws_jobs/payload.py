"""Arguments <-> text: a payload is one JSON object of named arguments, readable in the admin, writable from anywhere.

    {"user_id": 42, "due": {"$date": "2026-03-01"}, "price": {"$decimal": "1.10"}}

An object whose only key starts with `$` is a tag, for a value that JSON has no form for; `_TAGS` lists them. A dict
of the user's that looks like one gets one more `$`: {"$date": 1} is written {"$$date": 1} and comes back as it was.

Arguments come back equal and of the same type, except: tuples as lists, subclasses (enums, SafeString, named tuples)
as their plain base, lazy text as str in the language active at enqueue. What could not keep this promise is refused
at enqueue, by name. Of two equal names in JSON written elsewhere the last wins; NaN and Infinity are refused.
"""

import json
import re
import reprlib
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from django.utils.dateparse import parse_duration
from django.utils.duration import duration_iso_string
from django.utils.functional import LazyObject, Promise

from .text import flaw

Path = tuple[object, ...]  # an argument's name, then keys and indexes
MAX_DEPTH = 100  # far below every reader's recursion limit; also where a structure that contains itself is caught


class PayloadError(ValueError):
    """A payload that cannot be read as named arguments."""


def encode(arguments: Mapping[str, object]) -> str:
    """Write named arguments as JSON. TypeError or ValueError says which of them cannot be stored, and why."""
    return _dict(dict(arguments), ())


def decode(text: str) -> dict[str, object]:
    """Read named arguments back. No text at all, as a plain INSERT may leave it, is no arguments."""
    if not text:
        return {}
    tags = "$" in text or r"\u0024" in text  # the hook costs a call per object, and few payloads have a tag
    try:
        arguments = (_from_tagged_json if tags else _from_json)(text)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the payload cannot be read as named arguments: {error}") from error
    if not isinstance(arguments, dict):
        raise PayloadError(f"the payload must be a JSON object of named arguments, not {type(arguments).__name__}")
    return arguments


def _write(value: object, path: Path) -> str:
    """One value as JSON text. What would not come back as it is, is refused."""
    if len(path) > MAX_DEPTH:
        raise ValueError(f"{_place(path)}: nested more than {MAX_DEPTH} levels deep, or contains itself")
    kind = type(value)  # not isinstance(): a SimpleLazyObject claims the class of whatever it wraps
    for base in kind.__mro__:
        if base in _WRITERS:
            return _WRITERS[base](value, path)
    # request.user is a LazyObject: to look inside would query the database, and raise in async code.
    model = hasattr(getattr(kind, "_meta", None), "pk") or issubclass(kind, LazyObject)
    hint = "pass its primary key" if model else "pass text, numbers, lists, dicts, dates, times, UUID or Decimal"
    raise TypeError(f"{_place(path)}: {kind.__name__} is not storable; {hint}")


def _text(value: str, path: Path, what: str = "text") -> str:
    if found := flaw(value):
        raise ValueError(f"{_place(path)}: the {what} {found}")
    return _quote(value)


def _list(value: list[object] | tuple[object, ...], path: Path) -> str:
    return f"[{','.join([_write(item, (*path, index)) for index, item in enumerate(value)])}]"


def _dict(value: dict[Any, object], path: Path) -> str:
    members = []
    for key, item in dict.items(value):  # not value.items(): a QueryDict's leaves out all but the last of its values
        here = (*path, key)
        members.append(f"{_key(key, here)}:{_write(item, here)}")
    text = ",".join(members)
    if len(members) == 1 and text.startswith('"$'):
        text = '"$' + text[1:]
    return f"{{{text}}}"


def _key(key: object, path: Path) -> str:
    if type(key) is str and key.isidentifier():  # every argument's name: nothing in it to refuse or to escape
        return f'"{key}"'
    if not isinstance(key, str):  # json would make "1" of 1, and only the worker would see it
        raise TypeError(f"{_place(path)}: a key must be str, not {type(key).__name__}")
    return _text(key, path, "key")


def _leaf(write: Callable[[Any], str], value: object, path: Path) -> str:
    try:
        return write(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_place(path)}: {error}") from None


def _place(path: Path) -> str:
    """Say where in the arguments something was found: argument 'order' at ['lines'][2]."""
    name, *steps = map(_brief.repr, path[:10])
    where = "".join(f"[{step}]" for step in steps) + ("…" if len(path) > 10 else "")
    return f"argument {name} at {where}" if where else f"argument {name}"


_brief = reprlib.Repr()  # a key may be a megabyte long
_brief.maxstring = _brief.maxother = 100


def _write_time(value: datetime | time) -> str:
    """ISO 8601 and the zone's name, as RFC 9557, Java and JavaScript's Temporal write it; then the fold, if 1."""
    zone, name = value.tzinfo, ""
    if isinstance(zone, ZoneInfo) and zone.key:
        name = f"[{zone.key}]"
    elif isinstance(zone, timezone) and zone.utcoffset(None).microseconds:
        raise ValueError(f"{zone} has a fraction of a second, which Python does not always read back; round it")
    elif zone is not None and not isinstance(zone, timezone):
        raise TypeError(f"its time zone, a {type(zone)}, is not storable; use zoneinfo.ZoneInfo or datetime.timezone")
    return value.isoformat() + name + ("[fold=1]" if value.fold else "")


def _read_time(kind: Any, text: str) -> object:
    if not (match := re.fullmatch(r"([^\[]+)(?:\[([^]=]+)])?(\[fold=1])?", text)):
        raise ValueError("not of the form time[zone]")
    moment = kind.fromisoformat(match[1]).replace(fold=int(bool(match[3])))
    if not match[2]:
        return moment
    zone, offset = ZoneInfo(match[2]), moment.utcoffset()
    for fold in (moment.fold, 1 - moment.fold):  # the local time as written; its offset may tell the fold
        local = moment.replace(tzinfo=zone, fold=fold)
        if offset in (None, local.utcoffset()):
            return local
    return moment.astimezone(zone)  # "Z", or the zone has new rules since: the moment stays, the clock moves


def _read_timedelta(text: str) -> timedelta:
    if (duration := parse_duration(text)) is None:
        raise ValueError("not a duration like P1DT02H00M00S")
    return duration


def _finite(number: Any) -> Any:
    if not Decimal(number).is_finite():
        raise ValueError(f"JSON has no number {number}; pass None or text")
    return number


_TAGS: tuple[tuple[str, type, Callable[[Any], str], Callable[[str], object]], ...] = (
    ("$datetime", datetime, _write_time, partial(_read_time, datetime)),  # 2026-03-01T12:00:00+01:00[Europe/Paris]
    ("$date", date, date.isoformat, date.fromisoformat),
    ("$time", time, _write_time, partial(_read_time, time)),
    ("$timedelta", timedelta, duration_iso_string, _read_timedelta),  # P1DT02H00M00S
    ("$uuid", UUID, str, UUID),
    ("$decimal", Decimal, lambda value: str(_finite(value)), lambda text: _finite(Decimal(text))),
)


def _write_tag(tag: str, write: Callable[[Any], str], value: object) -> str:
    return f'{{"{tag}":{_quote(write(value))}}}'


def _read_tag(found: dict[str, object]) -> object:
    key, value = next(iter(found.items()), ("", None))
    if len(found) != 1 or not key.startswith("$"):
        return found
    if key.startswith("$$"):
        return {key[1:]: value}
    if key not in _READERS or not isinstance(value, str):
        raise ValueError(f"unknown tag {_brief.repr(key)}; write a plain key with one more $ in front")
    try:
        return _READERS[key](value)
    except Exception as error:  # text from anywhere: whatever a constructor raises, the payload is at fault
        # The value is not shown: the sentence ends up in logs.
        raise ValueError(f"the text of a {key} cannot be read as one") from error


_READERS = {tag: read for tag, _, _, read in _TAGS}
_WRITERS: dict[type, Callable[[Any, Path], str]] = {
    type(None): lambda value, path: "null",
    bool: lambda value, path: "true" if value else "false",
    int: partial(_leaf, int.__repr__),  # a ValueError where Python would not read all the digits back
    float: partial(_leaf, lambda value: float.__repr__(_finite(value))),
    str: _text,
    Promise: lambda value, path: _text(str(value), path),
    **dict.fromkeys((list, tuple), _list),
    dict: _dict,
    **{kind: partial(_leaf, partial(_write_tag, tag, write)) for tag, kind, write, _ in _TAGS},
}
_quote = json.JSONEncoder(ensure_ascii=False).encode
_from_json = json.JSONDecoder(parse_constant=_finite).decode
_from_tagged_json = json.JSONDecoder(parse_constant=_finite, object_hook=_read_tag).decode
