"""RWS_JOBS: what is accepted, what is reported, and that a report leaves the default in force."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from django.core import checks
from django.test import override_settings

from rws_jobs.conf import NAMES, Conf, conf, problems
from rws_jobs.outcomes import default_backoff

Configure = Callable[..., None]

DEFAULTS = {field.name: field.default for field in fields(Conf)}

FLOATS = {
    "BACKOFF_INITIAL": (0, 10**9),
    "BACKOFF_MULTIPLIER": (1, None),
    "BACKOFF_MAX": (0, 10**9),
    "BACKOFF_JITTER": (0, 10),
    "POLL_INTERVAL": (0.01, 3600),
    "HEARTBEAT_INTERVAL": (0.1, 15),
    "DEAD_AFTER": (10, 86_400),
    "SHUTDOWN_TIMEOUT": (0, 86_400),
}
INTEGERS = {"MAX_RETRIES": (0, 2**31 - 1), "MAX_PAYLOAD_BYTES": (1, 2**30), "MAX_ERROR_BYTES": (1000, 2**30)}
BOUNDS = {**FLOATS, **INTEGERS}
CHOICES = {"UNKNOWN_JOBS": ("fail", "leave"), "CLOCK": ("database", "local")}


def reported() -> list[str]:
    """The names that problems() complains about; each complaint is a sentence that says the name."""
    found = problems()
    for name, sentence in found:
        assert name in sentence
        assert sentence.endswith(".")
    return [name for name, _ in found]


def test_without_the_setting_the_defaults_are_in_force(settings: Any) -> None:
    del settings.RWS_JOBS
    conf.cache_clear()
    try:
        assert reported() == []
        assert {name: getattr(conf(), name) for name in NAMES} == DEFAULTS
    finally:
        conf.cache_clear()


def test_the_defaults_are_those_of_the_documentation() -> None:
    documented = {
        "MAX_RETRIES": 3,
        "BACKOFF_INITIAL": 0.5,
        "BACKOFF_MULTIPLIER": 2,
        "BACKOFF_MAX": 86_400,
        "BACKOFF_JITTER": 0,
        "POLL_INTERVAL": 0.5,
        "HEARTBEAT_INTERVAL": 5,
        "DEAD_AFTER": 30,
        "SHUTDOWN_TIMEOUT": 25,
        "UNKNOWN_JOBS": "fail",
        "QUEUES": None,
        "MAX_PAYLOAD_BYTES": 1024**2,
        "MAX_ERROR_BYTES": 60_000,
        "CLOCK": "database",
    }
    assert {name: DEFAULTS[name] for name in documented} == documented


def test_the_defaults_are_good_values(settings: Any) -> None:
    settings.RWS_JOBS = dict(DEFAULTS)
    assert reported() == []


def test_this_file_knows_every_setting() -> None:
    """A new setting needs its lines here too."""
    assert set(NAMES) == set(BOUNDS) | set(CHOICES) | {"QUEUES"}


# -- good values


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, bounds in BOUNDS.items() for value in bounds if value is not None]
    + [(name, value) for name, values in CHOICES.items() for value in values]
    + [("BACKOFF_MULTIPLIER", 1.5), ("POLL_INTERVAL", 1), ("QUEUES", None)],
)
def test_a_good_value_is_in_force(name: str, value: object, settings: Any) -> None:
    settings.RWS_JOBS = {name: value}
    assert reported() == []
    assert getattr(conf(), name) == value
    others = {other: getattr(conf(), other) for other in NAMES if other != name}
    assert others == {other: default for other, default in DEFAULTS.items() if other != name}


@pytest.mark.parametrize("queues", [["a", "b"], ("a", "b"), []])
def test_queues_may_be_a_list_or_a_tuple(queues: Any, settings: Any) -> None:
    settings.RWS_JOBS = {"QUEUES": queues}
    assert reported() == []
    assert tuple(queues) == conf().QUEUES


@pytest.mark.parametrize("name", ["BACKOFF_INITIAL", "BACKOFF_MULTIPLIER", "BACKOFF_MAX", "BACKOFF_JITTER"])
@pytest.mark.parametrize("exponent", range(13))
def test_every_accepted_backoff_can_be_computed(name: str, exponent: int, settings: Any) -> None:
    """A failure must never fail for its delay: a value is refused by the check, or it works."""
    settings.RWS_JOBS = {name: 10**exponent}
    if reported() == []:
        assert conf() == Conf(**{name: 10**exponent})
    for attempt in (1, 2, 1000):
        delay = default_backoff()(attempt, ValueError())
        assert 0 <= delay <= conf().BACKOFF_MAX * (1 + conf().BACKOFF_JITTER)


# -- bad values


@pytest.mark.parametrize("name", ["NOPE", "max_retries", "MAX_RETRIES ", "", 5, None])
def test_an_unknown_key_is_reported_and_harms_nothing(name: Any, settings: Any) -> None:
    settings.RWS_JOBS = {name: 1, "MAX_RETRIES": 7}
    ((found, sentence),) = problems()
    assert found == name
    assert repr(name) in sentence
    assert "MAX_RETRIES" in sentence  # what there is
    assert conf().MAX_RETRIES == 7


BAD = [
    *[(name, low - 1) for name, (low, _) in BOUNDS.items() if name != "DEAD_AFTER"],
    *[(name, high + 1) for name, (_, high) in BOUNDS.items() if high is not None and name != "HEARTBEAT_INTERVAL"],
    *[(name, value) for name in BOUNDS for value in (None, "1", True, [], {}, object(), 1j)],
    *[(name, value) for name in FLOATS for value in (float("nan"), float("inf"), float("-inf"), 10**400)],
    *[(name, value) for name in INTEGERS for value in (5000.0, float("nan"), 10**400, -(10**400))],
    *[(name, value) for name in CHOICES for value in (None, "", "FAIL", "Local", "no", True, 1, [], {}, {"fail"})],
    *[("QUEUES", value) for value in ("mail", b"mail", 5, {"mail": 1}, ["mail", 5], [None], True, object())],
    ("DEAD_AFTER", 0),
    ("DEAD_AFTER", -30),
    ("HEARTBEAT_INTERVAL", 0),
    ("HEARTBEAT_INTERVAL", 3601),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:20])
def test_a_bad_value_is_reported_and_the_default_is_in_force(name: str, value: object, settings: Any) -> None:
    settings.RWS_JOBS = {name: value}
    assert reported() == [name]
    assert getattr(conf(), name) == DEFAULTS[name]


def test_a_bad_value_leaves_the_good_ones_in_force(settings: Any) -> None:
    settings.RWS_JOBS = {"MAX_RETRIES": -1, "POLL_INTERVAL": 2, "NOPE": 1, "CLOCK": "wall", "BACKOFF_JITTER": 0.5}
    assert sorted(reported()) == ["CLOCK", "MAX_RETRIES", "NOPE"]
    assert conf() == Conf(POLL_INTERVAL=2, BACKOFF_JITTER=0.5)


@pytest.mark.parametrize("value", [None, [], "text", 5, [("MAX_RETRIES", 5)]], ids=repr)
def test_something_else_than_a_dict_is_reported(value: object, settings: Any) -> None:
    settings.RWS_JOBS = value
    assert reported() == ["RWS_JOBS"]
    assert conf() == Conf()


# -- one late beat is not death


@pytest.mark.parametrize(
    ("given", "good"),
    [
        ({"HEARTBEAT_INTERVAL": 10, "DEAD_AFTER": 20}, True),
        ({"HEARTBEAT_INTERVAL": 10, "DEAD_AFTER": 19.9}, False),
        ({"HEARTBEAT_INTERVAL": 15}, True),
        ({"HEARTBEAT_INTERVAL": 20}, False),
        ({"DEAD_AFTER": 10}, True),
        ({"DEAD_AFTER": 9}, False),
        ({"DEAD_AFTER": 9, "NOPE": 1}, False),
        ({"DEAD_AFTER": 9, "HEARTBEAT_INTERVAL": "5"}, False),
    ],
    ids=str,
)
def test_the_lease_is_at_least_two_beats_whatever_is_given(given: dict[str, Any], good: bool, settings: Any) -> None:
    settings.RWS_JOBS = given
    assert ("DEAD_AFTER" in reported()) is not good
    assert conf().DEAD_AFTER >= 2 * conf().HEARTBEAT_INTERVAL
    if good:
        assert {name: getattr(conf(), name) for name in given} == given


# -- read late


def test_a_change_is_in_force_at_once_and_so_is_its_end() -> None:
    before = conf()
    with override_settings(RWS_JOBS={"MAX_RETRIES": 9}):
        assert conf().MAX_RETRIES == 9
        with override_settings(RWS_JOBS={}):
            assert conf().MAX_RETRIES == 3
        assert conf().MAX_RETRIES == 9
    assert conf() == before


def test_nobody_changes_what_is_in_force(configure: Configure) -> None:
    queues = ["a"]
    configure(QUEUES=queues)
    assert conf().QUEUES == ("a",)
    queues.append("b")
    assert conf().QUEUES == ("a",)
    with pytest.raises(FrozenInstanceError):
        conf().MAX_RETRIES = 5  # type: ignore[misc]


# -- the system check


def errors() -> list[checks.CheckMessage]:
    return [message for message in checks.run_checks() if str(message.id).startswith("rws_jobs.E")]


@pytest.mark.django_db
def test_the_system_check_reports_what_is_wrong(settings: Any) -> None:
    assert errors() == []
    settings.RWS_JOBS = {"NOPE": 1, "MAX_RETRIES": -1}
    found = errors()
    assert len(found) == 2
    assert all(isinstance(message, checks.Error) for message in found)
    assert "'NOPE'" in found[0].msg
    assert "MAX_RETRIES" in found[1].msg
