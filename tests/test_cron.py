"""What cron promises: the original's grammar and meaning, a crontab's five fields, and each zone's clock changes."""

import json
import re
import time
from bisect import bisect_right
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rws_jobs import cron
from rws_jobs.cron import CronError, Expression, next_after, parse, validate

GOLDEN = Path(__file__).parent / "data" / "cron_golden.jsonl"
PARIS = "Europe/Paris"
LORD_HOWE = "Australia/Lord_Howe"


def utc(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def local(zone: str, text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp())


def shown(instant: int | None) -> str | None:
    return None if instant is None else datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%d %H:%M:%S")


def runs(expression: str, start: int, end: int, timezone: str = "UTC") -> list[int]:
    """Every run in (start, end], from run to run."""
    found: list[int] = []
    at = next_after(expression, start, timezone)
    while at is not None and at <= end:
        found.append(at)
        at = next_after(expression, at, timezone)
    return found


def shown_runs(expression: str, start: str, end: str, timezone: str = "UTC") -> list[str | None]:
    return [shown(run) for run in runs(expression, utc(start), utc(end), timezone)]


# -- the original's answers


def test_every_golden_line_agrees():
    differences = []
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        try:
            answer = {"next": next_after(case["expr"], case.get("after", 0))}
        except CronError:
            answer = {"error": True}
        if answer.items() - case.items():
            differences.append((case, answer))
    assert differences == []


@pytest.mark.parametrize(
    ("text", "after", "due"),
    [
        ("0 0 0 13 * 5", 86399, 3715200),  # Friday the 13th: day AND weekday
        ("0 0 0 */2 * */2", 951868799, 952214400),
        ("0 0 0 1-31 * 1", 60, 345600),
        ("0 0 0 30 2 1", 0, None),
        ("0 0 5-5 * * *", 1709208000, 1709269200),  # croniter: every hour
        ("0 0 0 * * 0-0", 1, 259200),  # croniter: every day
        ("+5 * * * * *", 3599, 3605),
        ("30 0 12 * * *", 0, 43230),  # the second comes first
        ("0 0 0 1 1 0", 0, 252460800),
        ("0 0 0 29 2 4", utc("2080-02-29"), utc("2120-02-29")),  # the longest wait there is, over 2100
    ],
)
def test_six_fields_mean_what_the_original_means(text, after, due):
    assert next_after(text, after) == due


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("*", range(60)),
        ("5", [5]),
        ("*/15", [0, 15, 30, 45]),
        ("1-5", [1, 2, 3, 4, 5]),
        ("5-5", [5]),
        ("0,15,30,45", [0, 15, 30, 45]),
        ("0,10-12,*/20", [0, 10, 11, 12, 20, 40]),
        ("9,3,3,1-4", [1, 2, 3, 4, 9]),
        ("*/100", [0]),
        ("*/4294967295", [0]),
        ("007", [7]),
        ("+5", [5]),
        ("*/+6", range(0, 60, 6)),
        ("+1-+5", [1, 2, 3, 4, 5]),
    ],
)
def test_a_field_is_read_to_its_values(text, seconds):
    assert parse(f"{text} * * * * *").seconds == tuple(seconds)


def test_the_largest_step_is_the_minimum_in_fields_that_start_at_one():
    expression = parse("0 0 0 */4294967295 */32 *")
    assert (expression.days, expression.months) == ((1,), (1,))


BAD_IN_ANY_FIELD = """
    *,5 5,* *,* */5,* 1,,2 1, , ,1 5-1 */0 */00 */-1 */ */a */1.5 */5/2 */5-10 */* *5 5* ** *-5 a - -- 1- -1 1-+ -+5
    1--5 1-5-7 ++5 + +*/5 1-a a-5 5.0 1_0 0x5 1e1 ² ½ ٥ ５ ? L W LW 15W 5#2 H R # / /5 5/10 0/15 [5] "5" 5! 1~5 1:2
    1;2 99999999999999999999 */4294967296 */99999999999 4294967295 4294967296 60 0-60 1,60
    ∗ ★ 5\x1c \x1f5 5\x00 5\u200b \ufeff5
"""


@pytest.mark.parametrize("item", re.split("[ \n]+", BAD_IN_ANY_FIELD.strip(" \n")))
def test_what_the_grammar_does_not_have_is_refused_in_every_field(item):
    for position in range(6):
        fields = ["0", "0", "0", "1", "1", "*"]
        fields[position] = item
        with pytest.raises(CronError) as caught:
            parse(" ".join(fields))
        assert any(repr(part) in str(caught.value) for part in item.split(","))


@pytest.mark.parametrize(
    "text",
    [
        *("60 * * * * *", "* 60 * * * *", "* * 24 * * *", "* * * 0 * *", "* * * 32 * *", "* * * * 0 *", "* * * * 13 *"),
        *("* * * * * 7", "* * * * * 0-7", "0 0 12 * * 30"),
        *("0 0 0 * * MON", "0 0 0 1 jan *", "0 0 0 * * MON-FRI", "0 0 0 ? * 1"),
        *("0 0 0-23/2 * * *", "0 1-5/2 * * * *", "0 5/10 * * * *"),
        *("0 0 22-6 * * *", "0 0 0 * 11-2 *", "0 0 0 * * 5-1", "55-5 * * * * *"),
        *(
            "0 0 0 1 1 * 2030",
            "* * * * * * *",
            "* * * *",
            "*",
            "",
            "   ",
            "\t\n",
            "hello",
            "@daily",
            "@reboot",
            "@every 5s",
        ),
    ],
)
def test_six_fields_take_no_more_than_the_original(text):
    with pytest.raises(CronError):
        parse(text)


NOON = ["0", "0", "12", "*", "*", "*"]


@pytest.mark.parametrize("blank", "\t\n\v\f\r \x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000")
def test_unicode_white_space_separates_and_surrounds_fields(blank):
    assert next_after(blank + blank.join(NOON) + blank * 2, 0) == 43200


@pytest.mark.parametrize("other", "\x1c\x1d\x1e\x1f\u200b\ufeff\x00\u180e")
def test_what_only_looks_like_white_space_does_not_separate(other):
    with pytest.raises(CronError):
        parse(other.join(NOON))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0 60 * * * *", ["minute", "'60'", "0-59"]),
        ("0 0 0 1-40 * *", ["day", "'1-40'", "1-31"]),
        ("0 0 0 * 3,5-1 *", ["month", "'5-1'", "1-12"]),
        ("0 0 0 * * x", ["weekday", "'x'", "0-6"]),
        ("0 0 * * 8", ["weekday", "'8'", "0-7"]),
        ("*/0 61 * * * *", ["second", "'*/0'", "0-59"]),  # the first bad field is the one named
        ("* * *", ["3", "six", "five"]),
        ("* * * * * * *", ["7", "six", "five"]),
    ],
)
def test_an_error_names_the_field_the_item_and_what_is_wanted(text, parts):
    with pytest.raises(CronError) as caught:
        parse(text)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_huge_expression_is_refused_at_once():
    started = time.perf_counter()
    with pytest.raises(CronError, match="100000 characters"):
        parse("0," * 50_000)
    assert time.perf_counter() - started < 0.5


def test_the_longest_useful_expression_is_read():
    def spelled(low: int, high: int) -> str:
        return ",".join(map(str, range(low, high + 1)))

    text = " ".join(spelled(*bounds) for bounds in [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6)])
    assert next_after(text, 1000) == 1001


@pytest.mark.parametrize("value", [None, 5, b"* * * * *", ["* * * * *"]])
def test_only_text_is_an_expression(value):
    with pytest.raises(TypeError):
        parse(value)
    with pytest.raises(TypeError):
        next_after(value, 0)


def test_an_expression_is_parsed_once_and_cannot_be_changed():
    first = parse("0 0 5 * * *")
    assert parse("0 0 5 * * *") is first
    with pytest.raises(AttributeError):
        first.hours = (6,)
    assert (first.text, first.has_seconds, parse("0 5 * * *").has_seconds) == ("0 0 5 * * *", True, False)
    assert next_after(first, 0) == next_after(first.text, 0) == 18000


# -- a crontab's five fields


@pytest.mark.parametrize(
    ("text", "field", "values"),
    [
        ("*/20 * * * *", "minutes", [0, 20, 40]),
        ("10-30/10 * * * *", "minutes", [10, 20, 30]),
        ("1-10/4,50-59/9 * * * *", "minutes", [1, 5, 9, 50, 59]),
        ("5-5/3 * * * *", "minutes", [5]),
        ("5 * * * *", "seconds", [0]),
        ("0 9-17/4 * * *", "hours", [9, 13, 17]),
        ("0 0 */10 * *", "days", [1, 11, 21, 31]),
        ("0 0 1 JAN,jul *", "months", [1, 7]),
        ("0 0 1 Feb-dEC/5 *", "months", [2, 7, 12]),
        ("0 0 1 3-may *", "months", [3, 4, 5]),
        ("0 0 * * 7", "weekdays", [0]),
        ("0 0 * * 0,7", "weekdays", [0]),
        ("0 0 * * 5-7", "weekdays", [0, 5, 6]),
        ("0 0 * * 0-7", "weekdays", range(7)),
        ("0 0 * * *", "weekdays", range(7)),
        ("0 0 * * */3", "weekdays", [0, 3, 6]),
        ("0 0 * * mon-Fri", "weekdays", [1, 2, 3, 4, 5]),
        ("0 0 * * SUN,sat", "weekdays", [0, 6]),
        ("0 0 * * mon-7/2", "weekdays", [0, 1, 3, 5]),
    ],
)
def test_five_fields_are_read_as_a_crontab(text, field, values):
    assert getattr(parse(text), field) == tuple(values)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "5/15 * * * *",
            "*,5 * * * *",
            "60 * * * *",
            "* 24 * * *",
            "* * 0 * *",
            "* * * 0 *",
            "* * * 13 *",
            "* * * * 8",
        ),
        *(
            "* * * * fri-sun",
            "* * * * monday",
            "* * * mon *",
            "* * jan * *",
            "mon * * * *",
            "* * * * m",
            "* * * * +mon",
        ),
        *(
            "* * * * */mon",
            "1-5/0 * * * *",
            "1-5/ * * * *",
            "1-5/4294967296 * * * *",
            "1-5/2/2 * * * *",
            "30-10 * * * *",
        ),
        *("* * * * ?", "* * L * *", "* * * * 5#2", "* * * * ſun", "R 0 1 1 *"),
    ],
)
def test_five_fields_are_strict_too(text):
    with pytest.raises(CronError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("0 0 13 * 5", [1, 8, 13, 15, 22, 29]),  # either
        ("0 0 13 * *", [13]),
        ("0 0 * * 5", [1, 8, 15, 22, 29]),
        ("0 0 */2 * 5", [1, 15, 29]),  # starts with *: both
        ("0 0 1-14 * */5", [3, 8, 10, 1]),
        ("0 0 13 * 0-6", range(1, 32)),  # all weekdays, yet restricted by cron's rule
        ("0 0 1-31 * 5", range(1, 32)),
        ("0 0 31 4 5", []),
        ("0 0 31 4,1 fri", [1, 8, 15, 22, 29, 31]),
    ],
)
def test_five_fields_want_either_day_only_where_both_are_restricted(text, days):
    january = runs(text, utc("2027-01-01") - 1, utc("2027-01-31"))
    assert [datetime.fromtimestamp(run, UTC).day for run in january] == sorted(days)


def test_one_day_field_that_never_matches_leaves_the_other():
    assert shown(next_after("0 0 30 2 mon", utc("2027-01-01"))) == "2027-02-01 00:00:00"


def test_a_sixth_field_in_front_is_seconds():
    assert shown_runs("*/10 * * * * *", "2027-01-01 00:00", "2027-01-01 00:00:30") == [
        "2027-01-01 00:00:10",
        "2027-01-01 00:00:20",
        "2027-01-01 00:00:30",
    ]


# -- the edges of time


def test_a_time_before_1970_counts_as_1970():
    assert next_after("* * * * * *", -100) == next_after("* * * * * *", 0) == 1
    assert next_after("* * * * *", -1, "America/New_York") == 60


@pytest.mark.parametrize("timezone", ["UTC", PARIS])
@pytest.mark.parametrize("after", [253_402_300_799, 10**12, 10**30])
def test_the_calendar_has_an_end(after, timezone):
    assert next_after("0 0 0 29 2 1", after, timezone) is None
    assert next_after("* * * * *", after, timezone) is None


@pytest.mark.parametrize("timezone", ["UTC", PARIS])
@pytest.mark.parametrize("text", ["0 0 0 30 2 *", "0 0 31 2 *", "* * * 31 4,6,9,11 *", "0 0 31 2 */2"])
def test_a_date_that_never_comes_is_read_but_not_validated(text, timezone):
    assert next_after(parse(text), utc("2027-01-01"), timezone) is None
    with pytest.raises(CronError, match=re.escape(text)):
        validate(text, timezone)


def test_a_time_that_is_always_skipped_never_runs_in_real_time():
    # A 28 March that is a Sunday is the day of the change in Paris: its 02:30 never comes.
    assert next_after("*/5 30 2 28 3 0", utc("2027-01-01"), PARIS) is None
    assert shown(next_after("*/5 30 2 28 3 0", utc("2027-01-01"))) == "2027-03-28 02:30:00"
    assert shown(next_after("5 30 2 28 3 0", utc("2027-01-01"), PARIS)) == "2027-03-28 01:00:00"


def test_validate_returns_what_it_read_and_refuses_bad_text_and_zones():
    assert validate("0 6 * * *", PARIS) is parse("0 6 * * *")
    for text, timezone in [("60 * * * *", "UTC"), ("", "UTC"), ("* * * * *", "Mars/Base")]:
        with pytest.raises(CronError):
            validate(text, timezone)


@pytest.mark.parametrize(
    "timezone",
    [
        "Mars/Base",
        "",
        "Europe",
        "../Europe/Paris",
        "/etc/localtime",
        "utc ",
        "zone.tab",
        "a\0b",
        "\ud800",
        "x" * 100_000,
    ],
)
def test_a_bad_zone_is_named(timezone):
    with pytest.raises(CronError) as caught:
        next_after("* * * * *", 0, timezone)
    assert repr(timezone)[:20] in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_search_leaves_no_trace_in_what_threads_share():
    # croniter keeps its place in itself; were that the shared one, a thread would answer from another one's start.
    expression = parse("0 12 13 * 5")
    searches = cron._searches(expression)
    states = [dict(vars(search)) for search in searches]
    assert next_after(expression, utc("2027-01-01")) == utc("2027-01-01 12:00")
    assert cron._searches(expression) is searches
    assert [vars(search) for search in searches] == states


# -- zones and their clock changes, to the second


def test_s031_a_daily_run_happens_once_in_the_night_of_25_hours():
    start, end = local(PARIS, "2027-10-30 12:00"), local(PARIS, "2027-11-01 12:00")
    expected = [utc("2027-10-31 00:30"), utc("2027-11-01 01:30"), utc("2027-11-02 01:30")]
    assert runs("30 2 * * *", start, end, PARIS) == expected[:2]
    # Asked at every minute, as by a scheduler that is restarted all the time.
    for minute in range(start, end, 60):
        due = next_after("30 2 * * *", minute, PARIS)
        assert due == next(run for run in expected if run > minute)


@pytest.mark.parametrize(
    ("text", "zone", "after", "expected"),
    [
        ("4 16 * * *", "America/New_York", "2027-03-13 17:00", ["2027-03-14 20:04:00"]),
        ("0 8 * * 1", PARIS, "2027-10-25 09:00", ["2027-11-01 07:00:00"]),
        ("0 20 * * *", PARIS, "2027-10-31 00:00", ["2027-10-31 19:00:00", "2027-11-01 19:00:00"]),
    ],
)
def test_s032_later_runs_keep_their_local_time_after_a_change(text, zone, after, expected):
    at = local(zone, after)
    for due in expected:
        at = next_after(text, at, zone)
        assert shown(at) == due


@pytest.mark.parametrize("text", ["0 * * * *", "0 0 * * * *", "0 */1 * * *"])
@pytest.mark.parametrize(("day", "hours"), [("2027-03-28", 23), ("2027-10-31", 25), ("2027-06-01", 24)])
def test_s033_hourly_runs_follow_real_time(text, day, hours):
    start = local(PARIS, day)
    found = runs(text, start - 1, start + hours * 3600 - 1, PARIS)
    assert found == [start + hour * 3600 for hour in range(hours)]


def test_s033_quarter_hours_run_in_both_passes():
    found = runs("*/15 * * * *", utc("2027-10-30 23:59"), utc("2027-10-31 02:00"), PARIS)
    assert found == list(range(utc("2027-10-31 00:00"), utc("2027-10-31 02:00") + 1, 900))


@pytest.mark.parametrize(
    "text", ["30 2 * * *", "0 30 2 * * *", "0,10,20,30 2 * * *", "* 2 * * *", "0 2,3 * * *", "0-59 0 2 * * *"]
)
def test_s033_skipped_times_run_once_right_after_the_jump(text):
    found = shown_runs(text, "2027-03-27 12:00", "2027-03-28 12:00", PARIS)
    if text == "* 2 * * *":
        assert found == []  # starts with *: real time, and the hour did not take place
    else:
        assert found == ["2027-03-28 01:00:00"]


def test_fixed_hours_run_once_each_per_local_day():
    assert len(shown_runs("0 0-23 * * *", "2027-10-30 21:59", "2027-10-31 22:59", PARIS)) == 24
    assert (
        len(shown_runs("0 0-23 * * *", "2027-03-27 22:59", "2027-03-28 21:59", PARIS)) == 23
    )  # 02:00 and 03:00 are one


def test_s033_a_midnight_that_does_not_exist_runs_once():
    if ZoneInfo("Africa/Cairo").utcoffset(datetime(2027, 5, 1)) != timedelta(hours=3):
        pytest.skip("this tzdata is from before Egypt's summer time came back (2023)")
    assert shown_runs("0 0 * * *", "2027-04-29 12:00", "2027-04-30 12:00", "Africa/Cairo") == ["2027-04-29 22:00:00"]


def test_s045_each_schedule_keeps_its_own_zone():
    assert shown(next_after("0 6 * * *", utc("2027-01-15"), "Asia/Kathmandu")) == "2027-01-15 00:15:00"
    assert shown(next_after("0 6 * * *", utc("2027-01-15"), "Europe/Brussels")) == "2027-01-15 05:00:00"
    assert shown(next_after("0 6 * * *", utc("2027-07-15"), "Europe/Brussels")) == "2027-07-15 04:00:00"


def test_changes_of_half_an_hour():
    assert shown_runs("15 2 * * *", "2027-10-02 12:00", "2027-10-03 12:00", LORD_HOWE) == ["2027-10-02 15:30:00"]
    assert shown_runs("45 1 * * *", "2027-04-03 12:00", "2027-04-04 12:00", LORD_HOWE) == ["2027-04-03 14:45:00"]
    for day in ("2027-10-02", "2027-04-03"):
        found = runs("*/15 * * * *", utc(f"{day} 12:00"), utc(f"{day} 18:00"), LORD_HOWE)
        assert {later - earlier for earlier, later in pairwise(found)} == {900}


def test_a_day_left_out_of_the_calendar():
    # Samoa went from 29 to 31 December 2011, at 10:00 UTC.
    assert shown_runs("0 12 * * *", "2011-12-29 12:00", "2011-12-31 12:00", "Pacific/Apia") == [
        "2011-12-29 22:00:00",
        "2011-12-30 10:00:00",
        "2011-12-30 22:00:00",
    ]
    assert shown(next_after("30 0 30 12 *", utc("2011-06-01"), "Pacific/Apia")) == "2011-12-30 10:00:00"
    assert shown(next_after("* * 30 12 *", utc("2011-06-01"), "Pacific/Apia")) == "2012-12-29 10:00:00"


@pytest.mark.parametrize(
    ("text", "zone", "start", "expected"),
    [
        ("*/30 0 12 1 7 *", PARIS, "2027-01-01", ["2027-07-01 10:00:00", "2027-07-01 10:00:30", "2028-07-01 10:00:00"]),
        ("*/30 0 12 1 1 *", PARIS, "2027-07-01", ["2028-01-01 11:00:00", "2028-01-01 11:00:30", "2029-01-01 11:00:00"]),
        (
            "*/59 0 12 29 2 *",
            PARIS,
            "2027-07-01",
            ["2028-02-29 11:00:00", "2028-02-29 11:00:59", "2032-02-29 11:00:00"],
        ),
        (
            "*/30 0 1 31 10 *",
            PARIS,
            "2027-01-01",
            ["2027-10-30 23:00:00", "2027-10-30 23:00:30", "2028-10-31 00:00:00"],
        ),
        (
            "*/59 30 2 31 10 *",
            PARIS,
            "2027-01-01",
            ["2027-10-31 00:30:00", "2027-10-31 00:30:59", "2027-10-31 01:30:00"],
        ),
        ("*/30 0 2 14 3 *", "America/New_York", "2027-01-01", ["2028-03-14 06:00:00", "2028-03-14 06:00:30"]),
        # Vostok's clock was put back by seven hours, so a time comes again long after its first pass.
        (
            "*/59 0 18 31 1 *",
            "Antarctica/Vostok",
            "1994-01-31",
            ["1994-01-31 11:00:00", "1994-01-31 11:00:59", "1994-01-31 18:00:00"],
        ),
        ("59 0 18 31 1 *", "Antarctica/Vostok", "1994-01-31", ["1994-01-31 11:00:59", "1995-01-31 11:00:59"]),
    ],
)
def test_distant_runs_are_found_on_the_other_side_of_changes(text, zone, start, expected):
    at = utc(start)
    for due in expected:
        at = next_after(text, at, zone)
        assert shown(at) == due


# -- an oracle that only counts: every value of a field is known, every second or minute is looked at


class Case(NamedTuple):
    text: str
    values: list[set[int]]  # second minute hour day month weekday
    either_day: bool
    real_time: bool

    def matches_date(self, day: date) -> bool:
        by_day, by_weekday = day.day in self.values[3], day.isoweekday() % 7 in self.values[5]
        either = by_day or by_weekday
        return day.month in self.values[4] and (either if self.either_day else by_day and by_weekday)

    def matches(self, at: datetime) -> bool:
        second, minute, hour = self.values[:3]
        return at.minute in minute and at.second in second and at.hour in hour and self.matches_date(at.date())


BOUNDS = [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6)]
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
NAMES = {4: MONTHS, 5: ("sun", "mon", "tue", "wed", "thu", "fri", "sat")}


@st.composite
def fields(draw, position: int, crontab: bool) -> tuple[str, set[int]]:
    low, high = BOUNDS[position]
    if draw(st.booleans() if position < 3 else st.sampled_from([True, True, True, False])):
        return draw(st.sampled_from([("*", set(range(low, high + 1)))]))
    top = high + (crontab and position == 5)

    def word(value: int) -> str:
        if crontab and position in NAMES and value <= high and draw(st.booleans()):
            name = NAMES[position][value - low]
            return draw(st.sampled_from([name, name.upper(), name.title()]))
        return draw(st.sampled_from(["", "", "+", "0"])) + str(value)

    texts, values = [], set()
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted(draw(st.tuples(st.integers(low, top), st.integers(low, top))))
        kind = draw(st.sampled_from(["one", "range", "step", *(["stepped range"] if crontab else [])]))
        step = draw(st.integers(1, high + 3)) if "step" in kind else 1
        if kind == "one":
            end = start
            texts.append(word(start))
        elif kind == "step":
            start, end = low, high
            texts.append(f"*/{step}")
        else:
            texts.append(f"{word(start)}-{word(end)}" + (f"/{step}" if kind == "stepped range" else ""))
        values |= {value % 7 if position == 5 else value for value in range(start, end + 1, step)}
    return ",".join(texts), values


@st.composite
def cases(draw, seconds: bool = True) -> Case:
    """Any expression; without `seconds`, one that is only due at second 0."""
    crontab = draw(st.booleans())
    parts = [draw(fields(position, crontab)) for position in range(6)]
    if crontab or not seconds:
        parts[0] = ("0", {0})
    texts = [text for text, _ in parts]
    starred = [text.startswith("*") for text in texts]
    text = " ".join(texts[1:] if crontab else texts)
    return Case(text, [values for _, values in parts], crontab and not (starred[3] or starred[5]), any(starred[:3]))


def next_by_calendar(case: Case, after: int) -> int | None:
    """The next match in UTC, day by day for 42 years."""
    start = datetime.fromtimestamp(after, UTC)
    times = [(h, m, s) for h in sorted(case.values[2]) for m in sorted(case.values[1]) for s in sorted(case.values[0])]
    for days in range(42 * 366):
        day = start.date() + timedelta(days=days)
        if case.matches_date(day):
            for hour, minute, second in times:
                due = datetime(day.year, day.month, day.day, hour, minute, second, tzinfo=UTC)
                if due > start:
                    return int(due.timestamp())
    return None


def counted_runs(case: Case, zone: ZoneInfo, start: int, end: int, step: int) -> list[int]:
    """Every run in (start, end], by looking at the clock every `step` seconds and remembering what it showed."""
    tick, found = timedelta(seconds=step), []
    shown_before: set[datetime] = set()
    before = datetime.fromtimestamp(start - step, zone).replace(tzinfo=None)
    for instant in range(start, end + 1, step):
        now = datetime.fromtimestamp(instant, zone).replace(tzinfo=None)
        skipped = [now - n * tick for n in range(1, (now - before) // tick)]
        wanted = [now] if case.real_time else [reading for reading in (now, *skipped) if reading not in shown_before]
        if instant > start and any(map(case.matches, wanted)):
            found.append(instant)
        shown_before.add(now)
        before = now
    return found


@settings(deadline=None, max_examples=150)
@given(cases(), st.integers(0, utc("2110-01-01")))
def test_in_utc_the_next_run_is_the_first_match_and_strictly_later(case, after):
    due = next_after(case.text, after)
    assert due == next_by_calendar(case, after)
    if due is not None:
        assert due > after
        assert case.matches(datetime.fromtimestamp(due, UTC))
        assert next_after(case.text, due - 1) == due


@settings(deadline=None, max_examples=200)
@given(cases())
def test_an_expression_is_read_to_exactly_its_values(case):
    read = parse(case.text)
    fields_read = [read.seconds, read.minutes, read.hours, read.days, read.months, read.weekdays]
    assert fields_read == [tuple(sorted(values)) for values in case.values]
    assert (read.either_day, read.real_time) == (case.either_day, case.real_time)


CHANGES = [
    (PARIS, "2027-03-28 01:00"),
    (PARIS, "2027-10-31 01:00"),
    ("America/New_York", "2027-03-14 07:00"),
    ("America/New_York", "2027-11-07 06:00"),
    (LORD_HOWE, "2027-04-03 15:00"),
    (LORD_HOWE, "2027-10-02 15:30"),
    ("America/St_Johns", "2010-11-07 02:31"),  # 00:01 became 23:01 of the day before
    ("America/St_Johns", "2010-03-14 03:31"),  # 00:01 became 01:01
    ("Pacific/Apia", "2011-12-30 10:00"),  # a whole day forward
    ("Antarctica/Vostok", "1994-01-31 17:00"),  # seven hours back
    ("Asia/Kathmandu", "2027-03-28 01:00"),  # no change at all
]
LONG_CHANGES = {"Pacific/Apia", "Antarctica/Vostok"}


def window(change: tuple[str, str], before: int, after: int) -> tuple[str, int, int]:
    """A zone and a time around its change, which this tzdata must know for the test to mean anything."""
    zone, at = change[0], utc(change[1])
    offsets = [datetime.fromtimestamp(instant, ZoneInfo(zone)).utcoffset() for instant in (at - 1, at)]
    assert zone == "Asia/Kathmandu" or offsets[0] != offsets[1], f"tzdata has no change of {zone} at {change[1]}"
    return zone, at - before, at + after


def assert_first_later(due: int | None, after: int, expected: list[int], end: int) -> None:
    place = bisect_right(expected, after)
    if place < len(expected):
        assert due == expected[place]
    else:
        assert due is None or due > end


@settings(deadline=None, max_examples=60)
@given(cases(seconds=False), st.sampled_from(CHANGES), st.data())
def test_walking_through_a_change_by_minutes_finds_what_counting_finds(case, change, data):
    zone, start, end = window(change, 8 * 3600, 27 * 3600)
    expected = counted_runs(case, ZoneInfo(zone), start, end, 60)
    assert runs(case.text, start, end, zone) == expected
    # From anywhere, not only from run to run.
    for after in [*range(start, end, 1800), data.draw(st.integers(start, end - 1))]:
        assert_first_later(next_after(case.text, after, zone), after, expected, end)


@settings(deadline=None, max_examples=30)
@given(cases(), st.sampled_from([change for change in CHANGES if change[0] not in LONG_CHANGES]), st.data())
def test_around_a_change_every_second_is_answered_as_counting_answers_it(case, change, data):
    zone, start, end = window(change, 7200, 7200)
    expected = counted_runs(case, ZoneInfo(zone), start, end, 1)
    for after in [*range(start, end, 600), *data.draw(st.lists(st.integers(start, end - 1), max_size=10))]:
        assert_first_later(next_after(case.text, after, zone), after, expected, end)


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(0, utc("2040-01-01")), st.sampled_from(sorted({zone for zone, _ in CHANGES})))
def test_in_any_zone_the_next_run_is_strictly_later_and_nothing_lies_between(case, after, zone):
    due = next_after(case.text, after, zone)
    if due is not None:
        assert due > after
        assert next_after(case.text, (after + due) // 2, zone) == due
        assert next_after(case.text, due - 1, zone) == due


# -- whatever is thrown at it


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(), st.text("0123456789*,-/+ MONJAN@?LW#\t\xa0\x1c", max_size=40)))
def test_any_text_is_read_or_refused_with_a_cron_error(text):
    try:
        read = parse(text)
    except CronError:
        return
    assert isinstance(read, Expression)
    assert next_after(read, 0) is None or next_after(read, 0) > 0


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.text(), st.text("aEU/.-_0", max_size=12)))
def test_any_zone_is_known_or_refused_with_a_cron_error(timezone):
    try:
        assert next_after("* * * * *", 0, timezone) > 0
    except CronError:
        return
