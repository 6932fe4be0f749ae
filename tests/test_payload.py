"""What payloads promise: arguments come back as they were or are refused by name, and no text is too odd to store."""

import enum
import json
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth.models import User
from django.db import models
from django.http import QueryDict
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy, override
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rws_jobs.payload import MAX_DEPTH, PayloadError, decode, encode
from rws_jobs.text import check_job_type, check_payload, check_queue, check_text, check_unique_key, clean, shorten

PARIS = ZoneInfo("Europe/Paris")


def same(one: Any, other: Any) -> bool:
    """Equality that also sees types, digits, zones, folds, signs of zero and the order of keys."""
    if type(one) is not type(other):
        return False
    match one:
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case list():
            return len(one) == len(other) and all(map(same, one, other))
        case datetime() | time():
            zones = one.tzinfo is other.tzinfo or (isinstance(one.tzinfo, timezone) and one.tzinfo == other.tzinfo)
            return zones and repr(one.replace(tzinfo=None)) == repr(other.replace(tzinfo=None))
        case _:
            return repr(one) == repr(other)


def returns(value: object) -> bool:
    return same(decode(encode({"value": value})), {"value": value})


# -- strategies

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
keys = texts | st.builds("{}{}".format, st.sampled_from(["$", "$$", "$$$"]), texts)
tags = st.sampled_from(["$", "$$", "$date", "$$date", "$datetime", "$decimal", "$ref", "$uuid"])
offsets = st.integers(-86399, 86399).map(lambda seconds: timezone(timedelta(seconds=seconds)))
zones = st.none() | st.timezones() | st.just(UTC) | offsets
folds = st.sampled_from([0, 1])
datetimes = st.builds(lambda moment, fold: moment.replace(fold=fold), st.datetimes(timezones=zones), folds)
times = st.builds(lambda value, zone, fold: value.replace(tzinfo=zone, fold=fold), st.times(), zones, folds)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
    datetimes,
    st.dates(),
    times,
    st.timedeltas(),
    st.uuids(),
    st.decimals(allow_nan=False, allow_infinity=False),
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(tags, inner, min_size=1, max_size=2)
    ),
    max_leaves=20,
)
arguments = st.dictionaries(keys, values, max_size=5) | st.dictionaries(tags, values, min_size=1, max_size=1)


# -- what goes in comes out


@settings(deadline=None, max_examples=300)
@given(arguments)
@example({"$date": "2026-03-01"})
@example({"$$date": {"$date": date(2026, 3, 1)}})
@example({"a": {"$date": 1, "$time": 2}})
@example({"value": timedelta.min})
@example({"value": timedelta.max})
@example({"value": datetime.min.replace(tzinfo=PARIS)})
@example({"value": datetime.max.replace(tzinfo=PARIS)})
@example({"value": -0.0})
@example({"value": Decimal("-0E+5")})
def test_arguments_come_back_exactly_as_they_were(named: dict[str, object]) -> None:
    text = encode(named)
    assert same(decode(text), named)
    assert same(decode(encode(decode(text))), named)
    assert isinstance(json.loads(text), dict)
    check_payload(text, len(text.encode()))


@settings(deadline=None, max_examples=100)
@given(arguments)
def test_a_payload_may_be_spaced_and_escaped_as_any_json_writer_likes(named: dict[str, object]) -> None:
    text = encode(named)
    assert same(decode(json.dumps(json.loads(text), indent=2)), named)
    assert same(decode(text.replace("$", r"\u0024")), named)


def test_a_payload_is_compact_readable_and_in_the_order_given() -> None:
    named = {"user_id": 42, "name": "Žofie 🎉", "tags": ["a", None, True, 1.5], "due": date(2026, 3, 1)}
    assert encode(named) == ('{"user_id":42,"name":"Žofie 🎉","tags":["a",null,true,1.5],"due":{"$date":"2026-03-01"}}')
    assert encode({}) == "{}"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (datetime(2026, 3, 1, 12), {"$datetime": "2026-03-01T12:00:00"}),
        (datetime(2026, 3, 1, 12, tzinfo=UTC), {"$datetime": "2026-03-01T12:00:00+00:00"}),
        (datetime(2026, 3, 1, 12, tzinfo=ZoneInfo("UTC")), {"$datetime": "2026-03-01T12:00:00+00:00[UTC]"}),
        (datetime(2026, 3, 1, 12, tzinfo=PARIS), {"$datetime": "2026-03-01T12:00:00+01:00[Europe/Paris]"}),
        (
            datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=PARIS),
            {"$datetime": "2026-10-25T02:30:00+01:00[Europe/Paris][fold=1]"},
        ),
        (date(2026, 3, 1), {"$date": "2026-03-01"}),
        (time(12, 0, 0, 5), {"$time": "12:00:00.000005"}),
        (time(12, tzinfo=timezone(timedelta(hours=-3))), {"$time": "12:00:00-03:00"}),
        (time(12, tzinfo=PARIS), {"$time": "12:00:00[Europe/Paris]"}),
        (timedelta(days=1, hours=2, microseconds=3), {"$timedelta": "P1DT02H00M00.000003S"}),
        (-timedelta(seconds=1), {"$timedelta": "-P0DT00H00M01S"}),
        (UUID(int=5), {"$uuid": "00000000-0000-0000-0000-000000000005"}),
        (Decimal("1.10"), {"$decimal": "1.10"}),
        ({"$date": "2026-03-01"}, {"$$date": "2026-03-01"}),
        ({"$$ref": 1}, {"$$$ref": 1}),
        ({"$type": 1, "more": 2}, {"$type": 1, "more": 2}),
    ],
)
def test_the_written_form_is_what_the_docs_show_to_other_languages(value: object, written: object) -> None:
    assert json.loads(encode({"value": value})) == {"value": written}
    assert returns(value)


@pytest.mark.parametrize("fold", [0, 1])
@pytest.mark.parametrize("clock", ["2026-03-29T02:30", "2026-10-25T02:30", "2026-07-01T12:00", "1890-01-01T00:00"])
def test_skipped_and_repeated_hours_keep_clock_zone_and_fold(clock: str, fold: int) -> None:
    assert returns(datetime.fromisoformat(clock).replace(tzinfo=PARIS, fold=fold))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-10-25T02:30:00+02:00[Europe/Paris]", datetime(2026, 10, 25, 2, 30, tzinfo=PARIS)),
        ("2026-10-25T02:30:00+01:00[Europe/Paris]", datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=PARIS)),
        ("2026-10-25T02:30[Europe/Paris]", datetime(2026, 10, 25, 2, 30, tzinfo=PARIS)),
        ("2026-07-01T10:00:00.000Z[Europe/Paris]", datetime(2026, 7, 1, 12, tzinfo=PARIS)),
        ("2026-07-01T10:00:00.000Z", datetime(2026, 7, 1, 10, tzinfo=UTC)),
    ],
)
def test_times_written_by_java_and_javascript_are_the_moment_they_say(text: str, expected: datetime) -> None:
    assert same(decode(json.dumps({"at": {"$datetime": text}})), {"at": expected})


class Colour(enum.StrEnum):
    RED = "red"


class OldColour(str, enum.Enum):  # noqa: UP042 (its str() is its name)
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Size(models.TextChoices):
    LARGE = "L", "Large"


class Ratio(float):
    def __repr__(self) -> str:
        return "a ratio"


class Moment(datetime):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"),
        (OldColour.RED, "red"),
        (Size.LARGE, "L"),
        (mark_safe("<b>"), "<b>"),
        (Level.HIGH, 3),
        (Ratio(0.5), 0.5),
        (Moment(2026, 3, 1), datetime(2026, 3, 1)),
        ((1, (2, 3)), [1, [2, 3]]),
        (Point(1, 2), [1, 2]),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        ({Colour.RED: 1, Size.LARGE: 2, mark_safe("k"): 3}, {"red": 1, "L": 2, "k": 3}),
        ({OldColour.RED: 1}, {"red": 1}),
        (QueryDict("a=1&a=2&b=3"), {"a": ["1", "2"], "b": ["3"]}),
    ],
)
def test_subclasses_and_tuples_come_back_as_their_plain_base(value: object, plain: object) -> None:
    assert same(decode(encode({"value": value})), {"value": plain})


def test_any_mapping_of_arguments_will_do() -> None:
    assert encode(MappingProxyType({"a": 1})) == '{"a":1}'


def test_lazy_text_is_stored_in_the_language_of_the_enqueuer() -> None:
    with override("de"):
        text = encode({"day": gettext_lazy("Monday"), "nested": [{"day": gettext_lazy("Monday")}]})
    with override("fr"):
        assert same(decode(text), {"day": "Montag", "nested": [{"day": "Montag"}]})


def test_the_longest_number_python_reads_back_is_stored() -> None:
    number = 10**4300 - 1
    assert decode(encode({"number": -number})) == {"number": -number}


def test_the_deepest_nesting_allowed_comes_back() -> None:
    value: object = date(2026, 3, 1)
    for level in range(MAX_DEPTH - 1):
        value = {"$x": value} if level % 2 else [value]
    assert returns(value)
    with pytest.raises(ValueError, match=re.escape("argument 'value' at [0]['$x'][0]")):
        encode({"value": [{"$x": [value]}]})


# -- what is refused, and how it is said


class Offsetless(tzinfo):
    pass


def a_function() -> None: ...


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset(),
        b"bytes",
        bytearray(),
        1j,
        a_function,
        a_function.__code__,
        partial(print),
        Decimal,
        object(),
        enum.Enum("Kind", "A B").A,  # type: ignore[attr-defined]
        range(3),
        iter([]),
        {}.keys(),
        ValueError("x"),
        re.compile("x"),
        MappingProxyType({}),
        SimpleLazyObject(lambda: "text"),
        datetime(2026, 3, 1, tzinfo=Offsetless()),  # type: ignore[abstract]
        time(12, tzinfo=Offsetless()),  # type: ignore[abstract]
        {1: "a"},
        {None: "a"},
        {(1, 2): "a"},
        {gettext_lazy("Monday"): 1},
    ],
    ids=repr,
)
def test_what_cannot_come_back_is_a_type_error_that_names_the_argument(value: object) -> None:
    with pytest.raises(TypeError, match=r"argument 'thing'"):
        encode({"fine": 1, "thing": value})
    with pytest.raises(TypeError, match=re.escape("argument 'thing' at ['lines'][2]")):
        encode({"fine": 1, "thing": {"lines": [0, 1, value]}})


@pytest.mark.parametrize(
    "value",
    [
        "a\0b",
        "\ud800",
        "é\udfff",
        {"k\0": 1},
        {"\udc80": 1},
        mark_safe("\0"),
        float("nan"),
        float("inf"),
        -float("inf"),
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("-Infinity"),
        10**4300,
        -(10**5000),
        time(12, tzinfo=timezone(timedelta(microseconds=1))),
    ],
    ids=lambda value: ascii(value) if not isinstance(value, int) else "long number",
)
def test_what_some_database_or_reader_would_choke_on_is_a_value_error_that_names_the_argument(value: object) -> None:
    with pytest.raises(ValueError, match=r"argument 'thing'") as caught:
        encode({"fine": 1, "thing": value})
    assert clean(str(caught.value)) == str(caught.value)  # the message itself can be stored
    with pytest.raises(ValueError, match=re.escape("argument 'thing' at ['lines'][2]")):
        encode({"fine": 1, "thing": {"lines": (0, 1, value)}})


def test_a_refusal_says_what_to_do_instead() -> None:
    def refusal(**named: object) -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            encode(named)
        return str(caught.value)

    assert refusal(order={"lines": [1, 2, User(pk=3)]}) == (
        "argument 'order' at ['lines'][2]: User is not storable; pass its primary key"
    )
    assert refusal(x={1: 2}) == "argument 'x' at [1]: a key must be str, not int"
    assert refusal(x={"\0": 2}) == (
        r"argument 'x' at ['\x00']: the key has a NUL character at position 0, which PostgreSQL cannot store: remove it"
    )
    assert refusal(x="ab\ud800") == (
        r"argument 'x': the text has half a surrogate pair ('\ud800') at position 2, which is not Unicode: remove it"
    )
    assert refusal(x=float("nan")) == "argument 'x': JSON has no number nan; pass None or text"
    assert refusal(x=b"") == (
        "argument 'x': bytes is not storable; pass text, numbers, lists, dicts, dates, times, UUID or Decimal"
    )


def test_a_lazy_user_is_refused_without_looking_it_up() -> None:
    def look_up() -> object:
        raise AssertionError("queried the database")

    with pytest.raises(TypeError, match="argument 'user': SimpleLazyObject is not storable; pass its primary key"):
        encode({"user": SimpleLazyObject(look_up)})


def test_argument_names_are_checked_like_keys() -> None:
    with pytest.raises(TypeError, match="argument 1: a key must be str, not int"):
        encode({1: "a"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"argument 'a\\x00': the key has a NUL"):
        encode({"a\0": 1})


def circles() -> list[object]:
    ring: list[object] = []
    ring += [ring, ring]
    loop: dict[str, object] = {}
    loop["again"] = (loop,)
    return [ring, loop]


@pytest.mark.parametrize("value", circles(), ids=["list", "dict"])
def test_a_structure_that_contains_itself_is_refused_at_once(value: object) -> None:
    with pytest.raises(ValueError, match=r"argument 'tree' at .*…: nested more than 100 levels deep"):
        encode({"tree": value})


def test_an_error_about_a_huge_key_is_short() -> None:
    with pytest.raises(TypeError) as caught:
        encode({"a": {"k" * 1_000_000: object()}})
    assert len(str(caught.value)) < 300


# -- payloads written elsewhere


def test_no_text_at_all_is_no_arguments() -> None:
    assert decode("") == {}
    assert decode("{}") == {}


def test_of_two_equal_names_the_last_wins() -> None:
    assert decode('{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize(
    "text",
    [
        " ",
        "null",
        "42",
        '"text"',
        "[]",
        '["a"]',
        "{",
        "{'a': 1}",
        '{"a": 1} {"b": 2}',
        '{"a": "line\nend"}',
        "not json",
        '\ufeff{"a": 1}',
        '{"a": NaN}',
        '{"a": [Infinity]}',
        '{"a": -Infinity, "b": "$"}',
        '{"a": ' + "9" * 4301 + "}",
        '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}",
        '{"a$": ' + '{"a":' * 200_000 + "1" + "}" * 200_000 + "}",
        '{"$date": "2026-03-01"}',
        '{"a": {"$": 1}}',
        '{"a": {"$unheard_of": "1"}}',
        '{"a": {"$Date": "2026-03-01"}}',
        '{"a": {"$date": 20260301}}',
        '{"a": {"$date": null}}',
        '{"a": {"$date": ["2026-03-01"]}}',
        '{"a": {"$date": {"$date": "2026-03-01"}}}',
        '{"a": {"$date": "2026-02-30"}}',
        '{"a": {"$datetime": ""}}',
        '{"a": {"$datetime": "yesterday"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[Europe/Atlantis]"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[../../etc/passwd]"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[/etc/passwd]"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[Europe]"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[tzdata.zi]"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[\\u0000]"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[\\ud800]"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[' + "x" * 10_000 + ']"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[]"}}',
        '{"a": {"$datetime": "2026-03-01T12:00:00[Europe/Paris][fold=2]"}}',
        '{"a": {"$datetime": "0001-01-01T00:00:00+05:00[America/New_York]"}}',
        '{"a": {"$time": "25:00"}}',
        '{"a": {"$time": "12:00+05:00[Europe/Paris]"}}',
        '{"a": {"$timedelta": "soon"}}',
        '{"a": {"$timedelta": "P9999999999D"}}',
        '{"a": {"$uuid": "1234"}}',
        '{"a": {"$decimal": "one"}}',
        '{"a": {"$decimal": "NaN"}}',
        '{"a": {"$decimal": "Infinity"}}',
        '{"a": {"$decimal": true}}',
    ],
    ids=lambda text: ascii(text[:60]),
)
def test_a_payload_that_is_not_named_arguments_is_a_payload_error(text: str) -> None:
    with pytest.raises(PayloadError, match=r"^the payload ") as caught:
        decode(text)
    message = str(caught.value)
    assert len(message) < 500
    assert "\n" not in message
    assert clean(message) == message


def test_a_payload_error_names_the_tag_and_the_way_out() -> None:
    with pytest.raises(PayloadError, match=re.escape("unknown tag '$ref'; write a plain key with one more $")):
        decode('{"schema": {"$ref": "#/a"}}')
    assert decode('{"schema": {"$$ref": "#/a"}}') == {"schema": {"$ref": "#/a"}}
    with pytest.raises(PayloadError, match=re.escape("the text of a $uuid cannot be read as one")):
        decode('{"a": {"$uuid": "1234"}}')


@settings(deadline=None, max_examples=300)
@given(st.text() | st.builds('{{"a":{{"{}":{}}}}}'.format, tags, st.text().map(json.dumps)))
def test_no_text_makes_decode_raise_anything_else(text: str) -> None:
    try:
        found = decode(text)
    except PayloadError:
        return
    assert type(found) is dict


# -- texts


@pytest.mark.parametrize(
    ("check", "limit"), [(check_job_type, 255), (check_queue, 64), (check_unique_key, 191)], ids=lambda of: str(of)
)
def test_names_have_one_to_so_many_characters(check: Callable[[object], str], limit: int) -> None:
    for text in ("a", "a" * limit, "🎉" * limit, "Größe/ 1"):
        assert check(text) == text
    for text in ("", "a" * (limit + 1), "a\0", "\ud800", "🎉" * (limit + 1)):
        with pytest.raises(ValueError):
            check(text)
    for value in (None, 1, b"a", gettext_lazy("Monday"), ["a"]):
        with pytest.raises(TypeError, match="must be str"):
            check(value)


@pytest.mark.parametrize("control", ["\n", "\r", "\t", "\x1f", "\x7f", "\x85", "\x9f"])
def test_only_keys_may_have_control_characters(control: str) -> None:
    for check in (check_job_type, check_queue):
        with pytest.raises(ValueError, match=r"has the control character .* at position 1"):
            check(f"a{control}b")
    assert check_unique_key(f"a{control}b") == f"a{control}b"


@pytest.mark.parametrize("text", [Colour.RED, OldColour.RED, mark_safe("red")])
def test_a_checked_text_is_a_plain_str(text: str) -> None:
    for checked in (check_queue(text), check_payload(text, 3), clean(text), shorten(text, 3)):
        assert type(checked) is str
        assert checked == "red"


def test_a_payload_is_measured_in_bytes() -> None:
    assert check_payload("", 0) == ""
    assert check_payload("é" * 5, 10) == "é" * 5
    with pytest.raises(ValueError) as caught:
        check_payload("é" * 600_000, 1_048_576)
    assert str(caught.value) == (
        "payload is too large: 1,200,000 bytes of UTF-8, the limit is 1,048,576: keep the data in a table or file and "
        "pass its key, or raise RWS_JOBS['MAX_PAYLOAD_BYTES']"
    )


def test_an_error_about_a_text_names_it_with_the_limit_the_size_and_the_fix() -> None:
    def refusal(check: Callable[[object], str], text: object) -> str:
        with pytest.raises((TypeError, ValueError)) as caught:
            check(text)
        return str(caught.value)

    assert refusal(check_queue, "q" * 65) == "queue is too large: 65 characters, the limit is 64: shorten it"
    assert refusal(check_queue, "") == "queue is empty: give it at least one character"
    assert refusal(check_queue, 5) == "queue must be str, not int"
    assert refusal(check_job_type, "a\nb") == "job_type has the control character '\\n' at position 1: remove it"
    assert refusal(check_unique_key, "k" * 192) == (
        "unique_key is too large: 192 characters, the limit is 191: shorten it, or use a hash of it"
    )
    assert refusal(partial(check_text, what="schedule name", limit=5), "a\0") == (
        "schedule name has a NUL character at position 1, which PostgreSQL cannot store: remove it"
    )


@settings(deadline=None)
@given(st.text(st.characters()))
def test_cleaned_text_can_be_stored_anywhere_and_good_text_is_left_alone(text: str) -> None:
    cleaned = clean(text)
    assert "\0" not in cleaned
    assert cleaned.encode().decode() == cleaned
    assert clean(cleaned) == cleaned
    if "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text):
        assert cleaned == text


def test_cleaned_text_shows_what_was_there() -> None:
    assert clean("é\0\ud800\udc80!") == r"é\x00\ud800\udc80!"


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(), max_size=300), st.integers(0, 400))
@example("🎉" * 100, 60)
@example("x" * 1_000_000, 60_000)
def test_shortened_text_fits_and_keeps_both_ends(text: str, limit: int) -> None:
    whole = clean(text)
    short = shorten(text, limit)
    size = len(short.encode())
    assert size <= limit
    assert shorten(short, limit) == short
    if len(whole.encode()) <= limit:
        assert short == whole
    elif marker := re.search(r"\n… ([\d,]+) bytes left out …\n", short):
        head, tail = short[: marker.start()], short[marker.end() :]
        assert whole.startswith(head)
        assert whole.endswith(tail)
        left_out = int(marker[1].replace(",", ""))
        assert len(head.encode()) + left_out + len(tail.encode()) == len(whole.encode())
        assert limit - size < 10  # no more is cut than a broken character at each end and a digit of the marker
        assert abs(len(head.encode()) - len(tail.encode())) < 10
    else:
        assert whole.startswith(short)
        assert limit < 40


def test_shortened_text_says_how_much_is_missing() -> None:
    short = shorten("a" * 10_000 + "b" * 10_000, 1_000)
    assert re.fullmatch(r"a{484}\n… 19,031 bytes left out …\nb{485}", short), short
