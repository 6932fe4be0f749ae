"""The admin: what it shows, who may do what, and that what it does is what the queue's own statements allow."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin import AdminSite
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth.models import Permission, User
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path, resolve
from django.utils.http import urlencode

from rws_jobs import register
from rws_jobs.admin import DeadLetterAdmin, JobAdmin, bulk, lists, search, walk
from rws_jobs.models import DeadLetter, Job, JobSchedule, JobWorker
from rws_jobs.querysets import JobQuerySet

from .conftest import Clock
from .rows import insert, row, statuses

pytestmark = pytest.mark.django_db

JOBS, DEAD = "/admin/rws_jobs/job/", "/admin/rws_jobs/deadletter/"
NOW = 1_800_000_000  # where the clock stands: 2027-01-15 08:00:00 UTC
SCRIPT = "<script>alert(1)</script>"


def dead(id: str, **columns: Any) -> Job:
    return row(id, **{"status": "failed", "attempts": 4, "last_error": "ValueError: no"} | columns)


def running(id: str, **columns: Any) -> Job:
    return row(id, **{"status": "running", "claimed_by": "w1", "claimed_at": NOW} | columns)


def failure(attempt: int, **values: Any) -> dict[str, Any]:
    """An entry of a history, as a worker writes it."""
    defaults = {
        "attempt": attempt,
        "started": NOW - 100.0,
        "ended": NOW - 60.0,
        "worker": "w1",
        "exception": "builtins.ValueError",
        "error": "ValueError: no",
        "traceback": "Traceback",
    }
    return defaults | values


def texts(html: str) -> str:
    """A page as its reader sees it: no tags, one blank between words."""
    body = re.sub(r"<(script|style).*?</\1>", " ", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body.replace("<wbr>", ""))).split())


def listed(client: Client, url: str) -> list[str]:
    """The ids in a list, in its order."""
    response = client.get(url)
    assert response.status_code == 200, (url, response.status_code)
    return [job.pk for job in response.context["cl"].result_list]


def act(client: Client, url: str, action: str, *ids: str, across: bool = False, confirmed: bool = False) -> Any:
    """Choose an action in a list, as its form does; with ``confirmed``, as the page does that asks."""
    data: dict[str, Any] = {"action": action, "select_across": str(int(across)), "_selected_action": ids}
    data |= {"post": "yes"} if confirmed else {"index": "0"}
    return client.post(url, data, follow=True)


def said(response: Any) -> list[str]:
    return [unescape(re.sub(r"<[^>]*>", "", str(message))) for message in response.context["messages"]]


@pytest.fixture
def admin_user() -> User:
    """A superuser; without a password, whose hash would take longer than the test."""
    return User.objects.create(username="admin", is_staff=True, is_superuser=True)


@pytest.fixture
def admin_client(admin_user: User) -> Client:
    client = Client()
    client.force_login(admin_user)
    return client


@pytest.fixture
def operator() -> Client:
    """Somebody who may look, retry and delete by permission, which takes two queries to find out."""
    user = User.objects.create(username="operator", is_staff=True)
    codenames = ["view_job", "retry_job", "delete_job"]
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames, content_type__app_label="rws_jobs"))
    client = Client()
    client.force_login(user)
    return client


# -- the lists


def test_a_dead_letter_shows_type_queue_attempts_error_in_one_line_when_and_age(
    clock: Clock, admin_client: Client
) -> None:
    error = "ValueError: first line\n   second line"
    insert(dead("a", queue="mail", attempts=3, max_retries=2, last_error=error, next_run_at=NOW - 180))
    page = admin_client.get(DEAD).content.decode()
    cells = [texts(cell) for cell in re.findall(r"<t[hd] class=\"field-.*?</t[hd]>", page, re.S)]
    assert cells == [
        "tests.noop", "mail", "3 of 3", "ValueError: first line second line", "2027-01-15 07:57", "3 minutes ago",
    ]  # fmt: skip
    assert 'title="2027-01-15 07:57:00 UTC"' in page


def test_ages_are_words_for_past_present_and_future(clock: Clock, admin_client: Client) -> None:
    for number, seconds in enumerate([-86_400 * 3, -59, 0, 1, 7_200]):
        insert(row(str(number), next_run_at=NOW + seconds))
    page = texts(admin_client.get(JOBS).content.decode())
    for words in ("3 days ago", "59 seconds ago", " now ", "in 1 second ", "in 2 hours"):
        assert words in page


def test_dead_letters_are_dead_jobs_only_and_the_latest_is_first(admin_client: Client) -> None:
    insert(dead("a", next_run_at=10), dead("b", next_run_at=30), dead("c", next_run_at=20), dead("d", next_run_at=20))
    insert(row("p"), running("r"))
    assert listed(admin_client, DEAD) == ["b", "d", "c", "a"]


def test_jobs_are_listed_newest_first_and_by_what_a_status_calls_for(admin_client: Client) -> None:
    insert(
        dead("1", next_run_at=10), dead("2", next_run_at=5), running("3", claimed_at=20), running("4", claimed_at=10)
    )
    insert(row("5", next_run_at=9), row("6", next_run_at=8), row("7", priority=-1), row("8", queue="another"))
    assert listed(admin_client, JOBS) == list("87654321")
    assert listed(admin_client, JOBS + "?status__exact=failed") == ["1", "2"]
    assert listed(admin_client, JOBS + "?status=failed") == ["1", "2"]
    assert listed(admin_client, JOBS + "?status__exact=running") == ["4", "3"], "the longest running first"
    assert listed(admin_client, JOBS + "?status__exact=pending") == list("8765"), "by lane, then the first due"
    assert listed(admin_client, JOBS + "?status__exact=pending&queue=default") == list("765")


def test_jobs_can_be_filtered_by_queue_and_type(admin_client: Client) -> None:
    insert(row("1", queue="mail"), row("2", job_type="tests.note"), dead("3", queue="mail", job_type="tests.note"))
    assert listed(admin_client, JOBS + "?queue=mail") == ["3", "1"]
    assert listed(admin_client, JOBS + "?job_type=tests.note") == ["3", "2"]
    assert listed(admin_client, JOBS + "?status__exact=pending&job_type=tests.note") == ["2"]
    assert listed(admin_client, DEAD + "?queue=mail&job_type=tests.note") == ["3"]
    assert listed(admin_client, DEAD + "?queue=other") == []


def test_filters_offer_what_is_declared_what_is_there_and_what_is_chosen(
    admin_client: Client, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_SAMPLE", 2)
    configure(QUEUES=["declared"])
    insert(row("1", queue="too-old"), row("2", queue="there", job_type="other.program"), row("3"))
    page = admin_client.get(JOBS + "?queue=chosen").content.decode()
    offered = {unescape(found) for found in re.findall(r'href="\?[^"]*queue=([^"&]*)"', page)}
    assert offered == {"declared", "there", "default", "chosen"}
    assert "?job_type=other.program&amp;queue=chosen" in page
    assert "?job_type=tests.note&amp;queue=chosen" in page


def test_a_column_header_does_not_sort(admin_client: Client) -> None:
    insert(row("1", queue="z"), row("2", queue="a"))
    assert listed(admin_client, JOBS + "?o=3") == ["2", "1"]
    assert "?o=" not in admin_client.get(JOBS).content.decode()


@pytest.mark.parametrize("lookup", ["payload__contains=x", "last_error__icontains=x", "history=x", "created_at__gt=1"])
def test_no_other_column_can_be_asked_for_in_the_address(admin_client: Client, lookup: str) -> None:
    """Neither to walk through a million rows nor to guess at payloads that are hidden."""
    assert admin_client.get(f"{JOBS}?{lookup}").status_code == 400
    assert admin_client.get(f"{DEAD}?{lookup}").status_code == 400
    assert admin_client.get(f"{DEAD}?status__exact=pending").status_code == 400


def test_the_search_finds_ids_and_their_beginnings(admin_client: Client) -> None:
    insert(row("18eccb2ebc401087-00000001"), row("18eccb2ebc401087-00000002"), row("28eccb2ebc401087-00000003"))
    insert(dead("my job/1"))
    assert listed(admin_client, JOBS + "?q=18eccb2ebc401087-00000002") == ["18eccb2ebc401087-00000002"]
    assert listed(admin_client, JOBS + "?q=18eccb2ebc40") == ["18eccb2ebc401087-00000002", "18eccb2ebc401087-00000001"]
    assert listed(admin_client, JOBS + "?q=my+job/1") == ["my job/1"]
    assert listed(admin_client, DEAD + "?q=my+job/1") == ["my job/1"]
    assert listed(admin_client, DEAD + "?q=18eccb2ebc40") == []


def test_the_search_finds_types_and_unique_keys_and_among_dead_letters_errors(admin_client: Client) -> None:
    insert(row("1", unique_key="k:1"), running("2", unique_key="k:2"), row("3", job_type="tests.note"))
    insert(dead("4", unique_key="k:4", last_error="ConnectionError: no route to pdf.example.org"), dead("5"))
    assert listed(admin_client, JOBS + "?q=k:1") == ["1"]
    assert listed(admin_client, JOBS + "?q=k:2") == ["2"]
    assert listed(admin_client, JOBS + "?q=k:4") == ["4"]
    assert listed(admin_client, JOBS + "?q=tests.note") == ["3"]
    assert listed(admin_client, JOBS + "?q=route") == []
    assert listed(admin_client, DEAD + "?q=k:4") == ["4"]
    assert listed(admin_client, DEAD + "?q=ROUTE+to") == ["4"]
    assert listed(admin_client, DEAD + "?q=tests.noop") == ["5", "4"]
    assert listed(admin_client, DEAD + "?q=100%25") == []


def test_a_live_unique_key_is_found_however_old_its_job(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "WINDOW", 1)
    insert(row("1", unique_key="k", job_type="tests.boom"), row("2", unique_key="k", job_type="tests.record"))
    insert(row("3", unique_key="k2", job_type="tests.boom"), row("4"))
    assert listed(admin_client, JOBS + "?q=k") == ["2", "1"]
    assert listed(admin_client, JOBS + "?q=k2") == ["3"]


def test_several_statuses_at_once_are_all_listed(admin_client: Client) -> None:
    insert(dead("1"), row("2"), running("3"))
    assert listed(admin_client, JOBS + "?status__exact=failed&status__exact=pending&queue=default") == ["2", "1"]
    assert listed(admin_client, JOBS + "?status=failed&status__exact=pending") == []


@pytest.mark.parametrize(
    "address", ["?q=%00", "?q=a%00b", "?queue=%00", "?job_type=a%00", "%00/change/", "?before=%5B%22%00%22%5D"]
)
def test_a_nul_in_the_address_is_no_server_error(admin_client: Client, address: str) -> None:
    for url in (JOBS, DEAD):
        assert admin_client.get(url + address).status_code in (200, 302)


def test_an_empty_list_says_what_that_means(admin_client: Client) -> None:
    assert "nothing has failed for good" in admin_client.get(DEAD).content.decode()
    assert "Nothing matches." in admin_client.get(DEAD + "?queue=none").content.decode()
    insert(dead("a"))
    assert "nothing has failed for good" not in admin_client.get(DEAD).content.decode()


# -- large lists


def follow(client: Client, url: str) -> list[str]:
    """All that a list shows, page by page, and then by its links to older ones."""
    found: list[str] = []
    base = url
    for _ in range(50):
        changes = client.get(url).context["cl"]
        for number in changes.paginator.page_range:
            found += listed(client, f"{url}{'&' if '?' in url else '?'}p={number}")
        last = client.get(f"{url}{'&' if '?' in url else '?'}p={changes.paginator.num_pages}").context["cl"]
        if last.older_url is None:
            return found
        url = base.partition("?")[0] + last.older_url
    raise AssertionError("the links to older ones have no end")


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "CAP", 6)
    monkeypatch.setattr(walk, "WINDOW", 9)
    monkeypatch.setattr(JobAdmin, "list_per_page", 2)


def test_a_long_list_is_counted_to_its_cap_and_goes_on_from_there(admin_client: Client, small_bounds: None) -> None:
    insert(*(dead(f"{number:02}", next_run_at=number // 3) for number in range(20)))
    expected = [f"{number:02}" for number in reversed(range(20))]
    for url in (JOBS, DEAD, JOBS + "?status__exact=failed"):
        assert follow(admin_client, url) == expected, url
    page = texts(admin_client.get(DEAD).content.decode())
    assert "6+ dead letters" in page
    assert "Older ones" not in page, "only the last page goes on"
    assert "Older ones" in texts(admin_client.get(DEAD + "?p=3").content.decode())


@pytest.mark.parametrize("count", [0, 1, 6, 7, 9, 10])
def test_around_the_bounds_no_job_is_missing_or_twice(admin_client: Client, small_bounds: None, count: int) -> None:
    insert(*(dead(f"{number:02}", next_run_at=1) for number in range(count)))
    expected = [f"{number:02}" for number in reversed(range(count))]
    for url in (JOBS, DEAD, DEAD + "?queue=default", JOBS + "?queue=default", JOBS + "?q=tests.noop"):
        assert follow(admin_client, url) == expected, url


def test_a_filter_without_an_index_looks_through_so_many_at_a_time_and_says_so(
    admin_client: Client, small_bounds: None
) -> None:
    insert(
        *(
            dead(f"{number:02}", next_run_at=number, queue="mail" if number % 7 == 0 else "other")
            for number in range(30)
        )
    )
    expected = ["28", "21", "14", "07", "00"]
    for url in (DEAD + "?queue=mail", JOBS + "?queue=mail", JOBS + "?queue=mail&status__exact=failed"):
        assert listed(admin_client, url) == ["28", "21"], url
        assert "2+" in texts(admin_client.get(url).content.decode())
        assert "of 9 looked through" in texts(admin_client.get(url).content.decode())
        assert follow(admin_client, url) == expected, url


def test_where_nothing_matches_so_far_the_list_says_so_and_goes_on(admin_client: Client, small_bounds: None) -> None:
    insert(*(dead(f"{number:02}", next_run_at=number, queue="" if number else "rare") for number in range(12)))
    page = admin_client.get(DEAD + "?queue=rare")
    assert "Nothing matches among the 9 looked through." in texts(page.content.decode())
    assert listed(admin_client, DEAD + page.context["cl"].older_url) == ["00"]


def test_pages_of_other_orders_end_at_the_cap(admin_client: Client, small_bounds: None) -> None:
    insert(*(row(f"{number:02}") for number in range(20)))
    assert follow(admin_client, JOBS + "?status__exact=pending") == [f"{number:02}" for number in range(6)]


@pytest.mark.parametrize(
    "before",
    ["x", "[]", "[1]", "{}", '["a","b"]', f'[{2**70},"a"]', "null", '[1,"a",2]', '[1,"\\ud800"]', "[" * 3_000],
    ids=lambda text: text[:20],
)
def test_a_made_up_key_shows_the_list_from_its_beginning(admin_client: Client, before: str) -> None:
    insert(dead("a"))
    for url in (DEAD, JOBS + "?status__exact=failed"):
        assert listed(admin_client, url + ("&" if "?" in url else "?") + urlencode({"before": before})) == ["a"]


def test_another_filter_or_search_starts_at_the_top(admin_client: Client, small_bounds: None) -> None:
    insert(*(dead(f"{number:02}") for number in range(20)))
    older = admin_client.get(DEAD + "?p=3").context["cl"].older_url
    page = admin_client.get(DEAD + older).content.decode()
    assert "before=" in page, "pages go on below"
    filters = page[page.index('id="changelist-filter"') :] if "5.2" in sys.modules["django"].__version__ else page
    for link in re.findall(r'href="(\?[^"]*(?:queue|job_type)=[^"]*)"', filters):
        assert "before" not in link
    assert 'name="before"' not in page


PAGES = [
    JOBS, JOBS + "?p=2",
    JOBS + "?status__exact=failed", JOBS + "?status__exact=pending", JOBS + "?status__exact=running",
    JOBS + "?queue=rare", JOBS + "?job_type=rare", JOBS + "?status__exact=pending&queue=rare",
    JOBS + "?status__exact=pending&job_type=rare", JOBS + "?status=nonsense",
    JOBS + "?q=nothing", JOBS + "?q=0123456789",
    DEAD, DEAD + "?p=2", DEAD + "?queue=rare", DEAD + "?job_type=rare", DEAD + "?q=nothing",
]  # fmt: skip


def fill(count: int) -> None:
    """A tenth running, the others pending and dead by halves, each with a payload and a history."""
    status = ["pending", "failed"] * 4 + ["pending", "running"]
    start = Job.objects.count()
    Job.objects.bulk_create(
        [
            row(
                f"{number:08}",
                status=status[number % 10] if number < 1_000 or number % 10 < 9 else "pending",
                queue=["default", "mail"][number % 2],
                next_run_at=number,
                created_at=number,
                last_error="no",
                history="[]",
            )
            for number in range(start, count)
        ],
        batch_size=500,
    )
    if connection.vendor != "mysql":  # there it would commit the test's transaction
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE rws_jobs")


def rows_read(act: Callable[[], object]) -> int:
    """How many rows the database goes through while ``act`` runs (SQLite: tens of steps of its virtual machine)."""
    steps = 0

    def count_steps() -> None:
        nonlocal steps
        steps += 1

    def so_far() -> int:
        if connection.vendor == "sqlite":
            return steps
        sql = "SHOW SESSION STATUS LIKE 'Handler_read%'"
        if connection.vendor == "postgresql":
            sql = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'rws_jobs'"
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return sum(int(found[-1]) for found in cursor.fetchall())

    if connection.vendor == "sqlite":
        connection.connection.set_progress_handler(count_steps, 10)
    before = so_far()
    act()
    read = so_far() - before
    if connection.vendor == "sqlite":
        connection.connection.set_progress_handler(None, 0)
    return read


def test_a_long_list_opens_with_as_little_reading_as_a_short_one(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "CAP", 100)
    monkeypatch.setattr(walk, "WINDOW", 200)
    monkeypatch.setattr(search, "_SAMPLE", 100)
    fill(1_000)
    short = {url: rows_read(lambda url=url: listed(admin_client, url)) for url in PAGES}
    fill(10_000)
    long = {url: rows_read(lambda url=url: listed(admin_client, url)) for url in PAGES}
    too_much = {url: (short[url], long[url]) for url in PAGES if long[url] > short[url] * 1.3 + 100}
    assert not too_much, too_much


def test_the_measure_of_reading_would_show_a_walk_through_the_table() -> None:
    fill(1_000)
    assert rows_read(lambda: Job.objects.filter(pk="00000001").first()) < 100
    assert rows_read(lambda: Job.objects.filter(payload="x").first()) >= (
        300 if connection.vendor == "sqlite" else 1_000
    )


def statements(client: Client, url: str) -> list[str]:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(url).status_code == 200, url
    return [query["sql"] for query in captured.captured_queries]


def test_no_list_counts_all_rows_or_loads_payloads(admin_client: Client) -> None:
    insert(*(dead(f"d{number}") for number in range(5)), row("p"), running("r"))
    for url in PAGES:
        for sql in statements(admin_client, url):
            if "rws_jobs" not in sql:
                continue
            assert "COUNT(" not in sql or "LIMIT" in sql, sql
            assert "DISTINCT" not in sql, sql
            for column in ("payload", "history", "meta"):
                assert column not in sql, sql
            if "last_error" in sql and "LIKE" not in sql:
                assert re.search(r"(LEFT|SUBSTR)\(\S*last_error", sql), sql


@pytest.mark.parametrize("url", [*PAGES, "page"])
def test_a_page_asks_as_many_queries_for_100_rows_as_for_10_and_no_more_than_12(operator: Client, url: str) -> None:
    history = json.dumps([failure(number) for number in range(1, 51)])
    if url == "page":
        insert(dead("a", history=json.dumps([failure(1)])), dead("b", history=history))
        few, many = statements(operator, DEAD + "a/change/"), statements(operator, DEAD + "b/change/")
    else:
        asked = {"queue": "rare", "job_type": "rare", "last_error": "nothing"}
        insert(*(dead(f"1{number:03}", **asked) for number in range(10)), *(row(f"2{number}") for number in range(10)))
        few = statements(operator, url.replace("p=2", "p=1"))
        insert(
            *(dead(f"3{number:03}", **asked) for number in range(100)), *(row(f"4{number}") for number in range(100))
        )
        many = statements(operator, url.replace("p=2", "p=1"))
    assert len(few) == len(many) <= 12, many


# -- retry


def test_retry_of_selected_dead_letters(clock: Clock, admin_client: Client) -> None:
    insert(dead("a"), dead("b", claimed_by="w9"), dead("c"))
    response = act(admin_client, DEAD, "retry_selected", "a", "b")
    assert said(response) == ["2 jobs were retried: they are due now."]
    assert statuses() == {"a": "pending", "b": "pending", "c": "failed"}
    assert Job.objects.filter(attempts=0, next_run_at=NOW, claimed_by=None, pk__in=["a", "b"]).count() == 2
    assert listed(admin_client, DEAD) == ["c"]


def test_retry_tells_exactly_how_many_were_retried_and_why_others_were_not(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    insert(dead("a"), dead("b", unique_key="k"), dead("c"), dead("d", unique_key="k2"), dead("e", unique_key="k2"))
    insert(row("p", unique_key="k"), row("q"), running("r"))
    response = act(admin_client, DEAD, "retry_selected", "a", "b", "c", "d", "e", "q", "r", "gone")
    assert said(response) == [
        "3 jobs were retried: they are due now.",
        "2 jobs were not retried: for each, another job with its unique key is pending or running.",
        "3 jobs were not retried: only dead jobs can be, and they are none, or none any more.",
    ]
    found = {"a": "pending", "b": "failed", "c": "pending", "d": "pending", "e": "failed"}
    assert statuses() == {**found, "p": "pending", "q": "pending", "r": "running"}


def test_retry_works_in_the_list_of_all_jobs_too(admin_client: Client) -> None:
    insert(dead("a"), row("p", attempts=2), running("r", attempts=1))
    response = act(admin_client, JOBS, "retry_selected", "a", "p", "r")
    assert said(response)[0] == "1 job was retried: it is due now."
    assert said(response)[1].startswith("2 jobs were not retried: only dead jobs can be")
    assert list(Job.objects.order_by("id").values_list("status", "attempts")) == [
        ("pending", 0),
        ("pending", 2),
        ("running", 1),
    ]


def test_retry_of_all_that_match_asks_first_and_reaches_every_page(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BATCH", 3)
    monkeypatch.setattr(JobAdmin, "list_per_page", 2)
    insert(*(dead(f"m{number}", queue="mail") for number in range(8)), dead("other"))
    url = DEAD + "?queue=mail"
    asked = act(admin_client, url, "retry_selected", "m7", across=True)
    assert "Retry 8 dead letters?" in texts(asked.content.decode())
    assert "Queue mail" in texts(asked.content.decode())
    assert set(statuses().values()) == {"failed"}, "nothing is done before it is confirmed"
    response = act(admin_client, url, "retry_selected", "m7", across=True, confirmed=True)
    assert said(response) == ["8 jobs were retried: they are due now."]
    assert statuses() == {f"m{number}": "pending" for number in range(8)} | {"other": "failed"}


def test_all_that_match_are_more_than_the_page_has_looked_through(admin_client: Client, small_bounds: None) -> None:
    insert(
        *(
            dead(f"{number:02}", next_run_at=number, queue="mail" if number % 7 == 0 else "other")
            for number in range(30)
        )
    )
    asked = act(admin_client, DEAD + "?queue=mail", "retry_selected", "28", across=True)
    assert "Retry 2+ dead letters?" in texts(asked.content.decode())
    act(admin_client, DEAD + "?queue=mail", "retry_selected", "28", across=True, confirmed=True)
    assert [pk for pk, status in statuses().items() if status == "pending"] == ["00", "07", "14", "21", "28"]


def test_all_that_match_includes_a_search(admin_client: Client) -> None:
    insert(dead("a", last_error="timed out"), dead("b"), dead("c", last_error="timed out"))
    act(admin_client, DEAD + "?q=timed", "retry_selected", "a", across=True, confirmed=True)
    assert statuses() == {"a": "pending", "b": "failed", "c": "pending"}


def test_retry_of_all_jobs_leaves_those_alone_that_are_not_dead(admin_client: Client) -> None:
    insert(dead("a"), row("p", attempts=2), running("r"))
    response = act(admin_client, JOBS, "retry_selected", "a", across=True, confirmed=True)
    assert said(response) == ["1 job was retried: it is due now."]
    assert Job.objects.get(pk="p").attempts == 2


def test_two_dead_jobs_with_one_key_in_one_batch_are_one_retried_and_one_refused(admin_client: Client) -> None:
    insert(dead("a", unique_key="k"), dead("b", unique_key="k"), dead("c"))
    response = act(admin_client, DEAD, "retry_selected", "a", across=True, confirmed=True)
    assert said(response) == [
        "2 jobs were retried: they are due now.",
        "1 job was not retried: another job with its unique key is pending or running.",
    ]
    assert statuses() == {"a": "failed", "b": "pending", "c": "pending"}, "the newer one got it"


def test_what_time_was_too_short_for_is_left_and_told(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    monkeypatch.setattr(bulk, "BUDGET", -1)
    insert(*(dead(f"{number}") for number in range(5)))
    response = act(admin_client, DEAD, "retry_selected", "0", across=True, confirmed=True)
    assert said(response) == [
        "2 jobs were retried: they are due now.",
        "There was not time enough for all of them: run the action again for the rest.",
    ]
    assert Job.objects.dead().count() == 3


@pytest.mark.django_db(transaction=True)
def test_a_batch_that_the_server_rolled_back_is_tried_again(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(dead("a"), dead("b"))
    errors = [OperationalError(1213, "Deadlock found"), OperationalError("database is locked")]
    requeue = JobQuerySet.requeue

    def unlucky(jobs: JobQuerySet) -> int:
        if errors:
            raise errors.pop()
        return requeue(jobs)

    monkeypatch.setattr(JobQuerySet, "requeue", unlucky)
    response = act(admin_client, DEAD, "retry_selected", "a", "b")
    assert said(response) == ["2 jobs were retried: they are due now."]


@pytest.mark.django_db(transaction=True)
def test_each_batch_is_committed_by_itself(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under ATOMIC_REQUESTS, which would hold SQLite's one lock for as long as the whole action lasts."""
    monkeypatch.setattr(bulk, "BATCH", 2)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    insert(*(dead(f"{number}") for number in range(6)))
    requeue = JobQuerySet.requeue

    def fail_in_the_third(jobs: JobQuerySet) -> int:
        if Job.objects.pending().count() == 4:
            raise ImproperlyConfigured("no more")
        return requeue(jobs)

    monkeypatch.setattr(JobQuerySet, "requeue", fail_in_the_third)
    with pytest.raises(ImproperlyConfigured):
        act(admin_client, DEAD, "retry_selected", "0", across=True, confirmed=True)
    assert not connection.in_atomic_block
    assert Job.objects.pending().count() == 4


def test_retry_on_the_page_of_a_dead_letter(clock: Clock, admin_client: Client) -> None:
    insert(dead("a", history="[]"))
    response = admin_client.post(DEAD + "a/retry/", follow=True)
    assert response.redirect_chain == [(DEAD, 302)]
    assert said(response) == ["“tests.noop a” was retried: it is due now. See job a."]
    job = Job.objects.get(pk="a")
    assert (job.status, job.attempts, job.next_run_at, job.history) == ("pending", 0, NOW, "[]")


def test_retry_whose_key_is_live_again_says_so_with_a_link_to_that_job(admin_client: Client) -> None:
    insert(dead("a", unique_key="k"), running("live", unique_key="k"))
    response = admin_client.post(DEAD + "a/retry/", follow=True)
    message = "“tests.noop a” was not retried, since another job with its unique key is pending or running: live"
    assert said(response) == [message]
    assert f'<a href="{JOBS}live/change/">live</a>' in response.content.decode()
    assert response.redirect_chain == [(DEAD + "a/change/", 302)]
    assert statuses() == {"a": "failed", "live": "running"}


@pytest.mark.parametrize("url", [JOBS, DEAD])
def test_retry_of_a_job_that_is_not_dead_changes_nothing_and_says_what_it_is(admin_client: Client, url: str) -> None:
    insert(row("p", attempts=2), running("r"))
    for job_id, status in (("p", "pending"), ("r", "running")):
        (message,) = said(admin_client.post(f"{url}{job_id}/retry/", follow=True))
        assert f"it is {status}. Only dead jobs can be retried." in message
    (message,) = said(admin_client.post(url + "gone/retry/", follow=True))
    assert message == "There is no job “gone”: it has succeeded, or somebody deleted it."
    assert list(Job.objects.order_by("id").values_list("status", "attempts")) == [("pending", 2), ("running", 0)]


# -- delete


def test_delete_of_selected_jobs_asks_first(admin_client: Client) -> None:
    insert(dead("a"), row("b"), row("c"))
    asked = act(admin_client, JOBS, "delete_selected", "a", "b")
    assert "Delete 2 jobs?" in texts(asked.content.decode())
    assert len(statuses()) == 3
    response = act(admin_client, JOBS, "delete_selected", "a", "b", confirmed=True)
    assert said(response) == ["2 jobs were deleted."]
    assert statuses() == {"c": "pending"}


def test_delete_of_all_that_match_keeps_what_runs(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    insert(*(row(f"{number}", queue="mail") for number in range(5)), running("r", queue="mail"), row("other"))
    asked = act(admin_client, JOBS + "?queue=mail", "delete_selected", "0", across=True)
    assert "Delete 6 jobs?" in texts(asked.content.decode())
    response = act(admin_client, JOBS + "?queue=mail", "delete_selected", "0", across=True, confirmed=True)
    assert said(response) == ["5 jobs were deleted."]
    assert statuses() == {"other": "pending", "r": "running"}


def test_a_job_that_started_to_run_meanwhile_is_not_deleted(admin_client: Client) -> None:
    insert(row("a"), row("b"))
    act(admin_client, JOBS, "delete_selected", "a", "b")
    Job.objects.filter(pk="a").update(status="running", claimed_by="w1")
    response = act(admin_client, JOBS, "delete_selected", "a", "b", "gone", confirmed=True)
    assert said(response) == [
        "1 job was deleted.",
        "1 job was not deleted: it is running.",
        "1 job was not deleted: it is no longer in this list.",
    ]
    assert statuses() == {"a": "running"}


def test_a_dead_letter_that_was_retried_meanwhile_is_not_deleted_as_one(admin_client: Client) -> None:
    insert(dead("a"), dead("b"))
    Job.objects.filter(pk="a").requeue()
    act(admin_client, DEAD, "delete_selected", "a", "b", confirmed=True)
    admin_client.post(DEAD + "a/delete/", {"post": "yes"})
    assert statuses() == {"a": "pending"}


def test_a_dead_letter_that_is_retried_at_this_moment_is_not_deleted(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_object = JobAdmin.get_object

    def and_then_retried(*args: Any, **kwargs: Any) -> Any:
        job = get_object(*args, **kwargs)
        Job.objects.all().requeue()
        return job

    insert(dead("a"))
    monkeypatch.setattr(JobAdmin, "get_object", and_then_retried)
    (message,) = said(admin_client.post(DEAD + "a/delete/", {"post": "yes"}, follow=True))
    assert "it is pending" in message
    assert statuses() == {"a": "pending"}


def test_djangos_own_deletions_keep_what_runs(admin_client: Client, rf: Any) -> None:
    from django.contrib import admin

    insert(row("a"), running("r"), dead("d"), row("x"))
    model_admin = admin.site.get_model_admin(Job)
    model_admin.delete_queryset(rf.get("/"), Job.objects.exclude(pk="x"))
    assert statuses() == {"r": "running", "x": "pending"}
    for job in Job.objects.all():
        model_admin.delete_model(rf.get("/"), job)
    assert statuses() == {"r": "running"}


@pytest.mark.parametrize("url", [JOBS, DEAD])
def test_delete_on_the_page_asks_first(admin_client: Client, url: str) -> None:
    insert(dead("a"))
    asked = admin_client.post(url + "a/delete/")
    assert "Delete this job?" in texts(asked.content.decode())
    assert statuses() == {"a": "failed"}
    response = admin_client.post(url + "a/delete/", {"post": "yes"}, follow=True)
    assert response.redirect_chain == [(url, 302)]
    assert said(response) == ["“tests.noop a” was deleted."]
    assert statuses() == {}


@pytest.mark.parametrize("data", [{}, {"post": "yes"}])
def test_a_running_job_cannot_be_deleted_on_its_page(admin_client: Client, data: dict[str, str]) -> None:
    insert(running("r"))
    response = admin_client.post(JOBS + "r/delete/", data, follow=True)
    assert said(response) == ["“tests.noop r” was not deleted: it is running, and its worker would not notice."]
    assert response.redirect_chain == [(JOBS + "r/change/", 302)]
    page = texts(response.content.decode())
    assert "It is running, so it cannot be deleted" in page
    assert "/delete/" not in response.content.decode()
    assert statuses() == {"r": "running"}


@pytest.mark.parametrize("url", [JOBS, DEAD])
@pytest.mark.parametrize("button", ["retry", "delete"])
def test_the_buttons_addresses_take_nothing_but_post(admin_client: Client, url: str, button: str) -> None:
    insert(dead("a"))
    for method in (admin_client.get, admin_client.head, admin_client.put):
        response = method(f"{url}a/{button}/", data={"post": "yes"})
        assert (response.status_code, response["Allow"]) == (405, "POST")
    assert statuses() == {"a": "failed"}


def test_without_a_csrf_token_nothing_is_done(admin_user: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(admin_user)
    insert(dead("a"))
    for url in (DEAD + "a/retry/", DEAD + "a/delete/", DEAD):
        data = {"post": "yes", "action": "retry_selected", "_selected_action": "a", "index": "0"}
        assert client.post(url, data).status_code == 403
    assert statuses() == {"a": "failed"}


def test_the_list_is_left_as_it_was_filtered(admin_client: Client) -> None:
    insert(dead("a"), dead("b"))
    page = admin_client.get(DEAD + "?queue=default").content.decode()
    (link,) = re.findall(r'href="([^"]*/a/change/[^"]*)"', page)
    page = admin_client.get(unescape(link)).content.decode()
    (action,) = re.findall(r'action="([^"]*/a/retry/[^"]*)"', page)
    response = admin_client.post(unescape(action), follow=True)
    assert response.redirect_chain == [(DEAD + "?queue=default", 302)]


# -- who may do what

ROLES = {
    "nobody": [],
    "viewer": ["view_job"],
    "retrier": ["view_job", "retry_job"],
    "deleter": ["view_job", "delete_job"],
    "operator": ["view_job", "retry_job", "delete_job"],
    "editor": ["view_job", "change_job", "add_job"],
    "retrier who cannot look": ["retry_job"],
    "deleter who cannot look": ["delete_job"],
}  # fmt: skip


@pytest.mark.parametrize("url", [JOBS, DEAD])
@pytest.mark.parametrize("role", ROLES)
def test_who_may_do_what(role: str, url: str) -> None:
    """Both lists ask for view_job, retry_job and delete_job, each for its own; nobody may add or change."""
    permissions = ROLES[role]
    user = User.objects.create(username=role, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions, content_type__app_label="rws_jobs"))
    client = Client()
    client.force_login(user)
    insert(dead("page-retry"), dead("page-delete"), dead("list-retry"), dead("list-delete"), dead("kept"))
    ok = {True: (200, 302), False: (403,)}
    sees, retries, deletes = (f"{what}_job" in permissions for what in ("view", "retry", "delete"))

    page = client.get(url + "kept/change/")
    assert client.get(url).status_code in ok[sees]
    assert page.status_code in ok[sees]
    assert client.get(url + "add/").status_code == 403
    assert client.post(url + "add/", {"job_type": "os.system"}).status_code == 403
    assert client.post(url + "kept/change/", {"payload": "{}", "queue": "other"}).status_code == 403
    if sees:
        listed = client.get(url).content.decode()
        assert ("/retry/" in page.content.decode(), "/delete/" in page.content.decode()) == (retries, deletes)
        assert ('value="retry_selected"' in listed, 'value="delete_selected"' in listed) == (retries, deletes)
        assert url + "add/" not in listed

    assert client.post(url + "page-retry/retry/").status_code in ok[retries]
    assert client.post(url + "page-delete/delete/", {"post": "yes"}).status_code in ok[deletes]
    act(client, url, "retry_selected", "list-retry")
    act(client, url, "delete_selected", "list-delete", confirmed=True)
    found = statuses()
    assert found.pop("kept") == "failed"
    assert found.pop("page-retry") == ("pending" if retries else "failed")
    assert found.pop("list-retry") == ("pending" if retries and sees else "failed")
    assert found == (
        ({} if deletes else {"page-delete": "failed"}) | ({} if deletes and sees else {"list-delete": "failed"})
    )
    assert Job.objects.get(pk="kept").queue == "default"


def test_both_lists_are_on_the_first_page_for_who_may_look(admin_client: Client) -> None:
    user = User.objects.create(username="viewer", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="view_job"))
    client = Client()
    client.force_login(user)
    page = client.get("/admin/").content.decode()
    assert DEAD in page
    assert JOBS in page
    assert "/admin/rws_jobs/jobschedule/" not in page
    assert not Permission.objects.filter(codename__endswith="deadletter").exists()


# -- the admin's log


def entries() -> list[tuple[int, str | None, str, str]]:
    rows = LogEntry.objects.order_by("pk").values_list("action_flag", "object_id", "object_repr", "change_message")
    return list(rows)


def test_what_is_done_to_selected_jobs_is_in_the_admins_log(admin_client: Client) -> None:
    insert(*(dead(name) for name in "abcdef"))
    admin_client.post(DEAD + "a/retry/")
    admin_client.post(DEAD + "b/delete/", {"post": "yes"})
    act(admin_client, DEAD, "retry_selected", "c", "d", "gone")
    act(admin_client, DEAD, "delete_selected", "e", confirmed=True)
    assert entries()[:2] == [(CHANGE, "a", "tests.noop a", "Retried."), (DELETION, "b", "tests.noop b", "")]
    assert sorted(entries()[2:4]) == [
        (CHANGE, "c", "tests.noop c", "Retried."), (CHANGE, "d", "tests.noop d", "Retried."),
    ]  # fmt: skip
    assert entries()[4:] == [(DELETION, "e", "tests.noop e", "")]
    assert {entry.content_type.model for entry in LogEntry.objects.all()} == {"job"}
    assert "Retried." in admin_client.get(JOBS + "a/history/").content.decode()


def test_what_was_refused_is_not_in_the_log(admin_client: Client) -> None:
    insert(dead("a", unique_key="k"), row("p", unique_key="k"), running("r"))
    admin_client.post(DEAD + "a/retry/")
    admin_client.post(JOBS + "r/delete/", {"post": "yes"})
    act(admin_client, JOBS, "retry_selected", "a", "p", "r")
    act(admin_client, JOBS, "delete_selected", "r", confirmed=True)
    assert entries() == []


def test_all_that_match_are_one_log_entry_for_each_batch(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    insert(dead("a"), dead("b"), dead("c"))
    act(admin_client, DEAD, "retry_selected", "a", across=True, confirmed=True)
    assert entries() == [
        (CHANGE, None, "2 jobs, c to b", "Retried with all that matched."),
        (CHANGE, None, "1 jobs, a to a", "Retried with all that matched."),
    ]
    assert admin_client.get("/admin/").status_code == 200, "the first page lists recent actions"


# -- the page of a job


def test_the_page_shows_the_payload_indented(admin_client: Client) -> None:
    insert(row("a", payload='{"user": {"id": 42, "name": "Ünal"}, "big": 123456789012345678901234567890}'))
    page = unescape(admin_client.get(JOBS + "a/change/").content.decode())
    assert '{\n  "user": {\n    "id": 42,\n    "name": "Ünal"\n  },\n  "big": 123456789012345678901234567890\n}' in page


@pytest.mark.parametrize(
    "payload", ["", "plain text", '{"a": ', "[" * 100_000, "9" * 5_000, "<b>", "a\tb", "nul\\u0000", "{'a'"]
)
def test_a_payload_that_is_not_json_is_shown_as_it_is(admin_client: Client, payload: str) -> None:
    insert(row("a", payload=payload))
    page = unescape(admin_client.get(JOBS + "a/change/").content.decode())
    assert payload[:1000] in page


def test_half_a_surrogate_pair_is_shown_escaped(admin_client: Client) -> None:
    """JSON can hold one; no response could be encoded with it."""
    history = json.dumps([failure(1, error="bad \ud800", traceback="\udfff")])
    insert(dead("a", payload='{"a": "\\ud83d"}', history=history))
    page = admin_client.get(JOBS + "a/change/").content.decode()
    assert all(text in page for text in ("\\ud83d", "\\ud800", "\\udfff"))


def test_a_payload_of_a_megabyte_is_cut(admin_client: Client) -> None:
    insert(row("a", payload=json.dumps({"text": "x" * 1_000_000})))
    page = admin_client.get(JOBS + "a/change/")
    assert len(page.content) < 200_000
    assert "characters in all" in page.content.decode()


def test_payloads_can_be_hidden(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    insert(row("a", payload='{"password": "secret"}'))
    monkeypatch.setattr(JobAdmin, "get_payload", lambda self, request, job: None)
    for url in (JOBS + "a/change/", JOBS):
        assert "secret" not in admin_client.get(url).content.decode()
    assert "Hidden." in admin_client.get(JOBS + "a/change/").content.decode()


def test_the_page_shows_every_attempt_the_newest_first(clock: Clock, admin_client: Client) -> None:
    history = [
        failure(1, exception="builtins.KeyError", error="KeyError: 'x'", traceback="first traceback", worker="host-1"),
        failure(
            2, exception="app.errors.Broken", error="Broken: two\nlines", traceback="second traceback", worker="host-2"
        ),
    ]
    insert(dead("a", attempts=2, max_retries=1, history=json.dumps(history), last_error="Broken: two\nlines"))
    page = texts(admin_client.get(DEAD + "a/change/").content.decode())
    newest, oldest = page.index("Attempt 2"), page.index("Attempt 1")
    assert newest < oldest
    for text in ("1 minute ago", "after 40 s", "host-2", "app.errors.Broken two lines", "second traceback"):
        assert newest < page.index(text) < oldest
    for text in ("host-1", "KeyError 'x'", "first traceback"):
        assert page.index(text) > oldest
    assert "Last error" not in page, "it stands at the newest attempt"


def test_a_traceback_keeps_its_lines_and_their_indentation(admin_client: Client) -> None:
    try:
        raise ExceptionGroup("two", [ValueError("a"), TypeError("b")])
    except ExceptionGroup as error:
        import traceback

        text = "".join(traceback.format_exception(error))
    insert(dead("a", history=json.dumps([failure(1, traceback=text)])))
    page = unescape(admin_client.get(DEAD + "a/change/").content.decode())
    assert re.search(r"<details open>.*<pre[^>]*>" + re.escape(text) + "</pre>", page, re.S)


def test_an_error_without_a_history_is_shown(admin_client: Client) -> None:
    """As the original's jobs have it."""
    insert(dead("a", last_error="it broke\n  badly", history=None))
    page = admin_client.get(DEAD + "a/change/").content.decode()
    assert "it broke\n  badly</pre>" in page
    assert "None is recorded." in page


@pytest.mark.parametrize(
    "history",
    ["nonsense", "{}", "[1, null, []]", "[{}]", '[{"started": "soon", "ended": [], "error": {"a": 1}, "attempt": {}}]',
     '[{"started": 1e300, "ended": 1e308, "traceback": 5}]', '[{"started": NaN, "ended": Infinity}]'],
)  # fmt: skip
def test_a_history_of_any_form_is_no_server_error(admin_client: Client, history: str) -> None:
    insert(dead("a", history=history))
    assert admin_client.get(DEAD + "a/change/").status_code == 200


@pytest.mark.parametrize("seconds", [-(2**63), -1, 0, 253_402_300_800, 2**63 - 1])
def test_a_time_that_no_calendar_has_is_no_server_error(admin_client: Client, seconds: int) -> None:
    insert(dead("a", next_run_at=seconds, created_at=seconds, claimed_at=seconds))
    for url in (DEAD, JOBS, JOBS + "a/change/", DEAD + "a/change/"):
        assert admin_client.get(url).status_code == 200


def test_a_status_that_another_program_made_up_is_shown(admin_client: Client) -> None:
    insert(row("a", status="stopped"))
    assert "stopped" in texts(admin_client.get(JOBS).content.decode())
    assert "stopped" in texts(admin_client.get(JOBS + "a/change/").content.decode())


def test_times_are_in_the_admins_time_zone(clock: Clock, admin_client: Client, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    insert(dead("a", next_run_at=NOW))
    assert "2027-01-15 17:00:00 JST" in admin_client.get(DEAD + "a/change/").content.decode()
    assert "2027-01-15 17:00" in texts(admin_client.get(DEAD).content.decode())


def test_a_job_without_a_handler_is_listed_shown_and_retried_and_marked(admin_client: Client) -> None:
    insert(dead("a", job_type="removed.function"))
    for url in (DEAD, JOBS, DEAD + "?job_type=removed.function", DEAD + "?q=removed.function"):
        assert "removed.function no handler" in texts(admin_client.get(url).content.decode()), url
    assert "No handler for this job type here" in texts(admin_client.get(DEAD + "a/change/").content.decode())
    admin_client.post(DEAD + "a/retry/")
    act(admin_client, JOBS, "delete_selected", "a", confirmed=True)
    assert statuses() == {}
    register("removed.function", lambda payload: None)
    insert(dead("b", job_type="removed.function"))
    for url in (DEAD, DEAD + "b/change/"):
        assert "o handler" not in texts(admin_client.get(url).content.decode())


def test_the_page_offers_what_can_be_done_with_the_job(admin_client: Client) -> None:
    insert(dead("a"), row("p"), running("r"))
    offered = {}
    for job_id in "apr":
        page = admin_client.get(f"{JOBS}{job_id}/change/").content.decode()
        offered[job_id] = [button for button in ("retry", "delete") if f"/{job_id}/{button}/" in page]
    assert offered == {"a": ["retry", "delete"], "p": ["delete"], "r": []}


@pytest.mark.parametrize("job_id", ["a/b", "a b", "_5F", "ä", "?x=1#y", "..", "a/retry", "<b>'\""])
def test_any_id_has_its_page_and_its_buttons(admin_client: Client, job_id: str) -> None:
    insert(dead(job_id))
    (link,) = re.findall(r'href="([^"]*/change/)"', admin_client.get(DEAD).content.decode())
    page = admin_client.get(unescape(link))
    assert page.status_code == 200
    (action,) = re.findall(r'action="([^"]*/retry/)"', page.content.decode())
    admin_client.post(unescape(action))
    assert statuses() == {job_id: "pending"}


# -- what anybody may have enqueued


def test_everything_is_escaped(admin_client: Client) -> None:
    history = [failure(1, exception=SCRIPT, error=SCRIPT, traceback=SCRIPT, worker=SCRIPT)]
    job_id = SCRIPT + "a"
    insert(
        dead(job_id, job_type=SCRIPT, payload=json.dumps({SCRIPT: SCRIPT}), last_error=SCRIPT, queue=SCRIPT,
             unique_key=SCRIPT, claimed_by=SCRIPT, history=json.dumps(history), meta=json.dumps({SCRIPT: 1})),
        running("live", job_type=SCRIPT, unique_key=SCRIPT),
        dead("raw", job_type=SCRIPT, payload=SCRIPT),
    )  # fmt: skip
    JobSchedule.objects.create(name=SCRIPT, next_run_at=1, cron=SCRIPT, job_type=SCRIPT, payload=SCRIPT, options=SCRIPT)
    JobWorker.objects.create(id=SCRIPT, host=SCRIPT, pid=1, queues=SCRIPT, started_at=1, beat_at=1, lease=30)
    links = [
        unescape(link)
        for url in (DEAD, JOBS, "/admin/rws_jobs/jobschedule/")
        for link in re.findall(r'href="([^"]*/change/)"', admin_client.get(url).content.decode())
    ]
    assert len(links) == 6
    search = urlencode({"q": SCRIPT, "queue": SCRIPT, "job_type": SCRIPT})
    pages = [admin_client.get(url) for url in (JOBS, DEAD, f"{JOBS}?{search}", f"{DEAD}?{search}", *links)]
    pages += [admin_client.get(f"/admin/rws_jobs/{name}/") for name in ("jobschedule", "jobworker")]
    pages += [act(admin_client, DEAD, action, job_id, across=True) for action in ("retry_selected", "delete_selected")]
    pages += [act(admin_client, DEAD, "delete_selected", job_id), act(admin_client, JOBS, "retry_selected", job_id)]
    buttons = [link.replace("/change/", "/retry/") for link in links[:2]]
    pages += [admin_client.post(url, follow=True) for url in buttons]
    pages += [
        admin_client.post(url.replace("/retry/", "/delete/"), data) for url in buttons for data in ({}, {"post": "yes"})
    ]
    pages += [
        admin_client.get(JOBS),
        admin_client.get(DEAD + SCRIPT + "/change/", follow=True),
        admin_client.get("/admin/"),
    ]
    for number, page in enumerate(pages):
        assert page.status_code in (200, 302), number
        assert SCRIPT not in page.content.decode(), number
        assert page.status_code == 302 or "<script>" not in page.content.decode(), number
    assert sum("&lt;script&gt;" in page.content.decode() for page in pages) >= 18


def test_no_page_needs_inline_styles_or_scripts(admin_client: Client) -> None:
    """A strict content security policy allows none."""
    insert(*(dead(f"{number}", history=json.dumps([failure(1)])) for number in range(60)), running("r"))
    JobWorker.objects.create(id="w", host="h", pid=1, started_at=1, beat_at=1, lease=30)
    pages = [DEAD, JOBS, DEAD + "1/change/", JOBS + "r/change/", "/admin/rws_jobs/jobworker/", DEAD + "?queue=none"]
    found = [admin_client.get(url).content.decode() for url in pages]
    found.append(act(admin_client, DEAD, "delete_selected", "1", across=True).content.decode())
    for url, page in zip([*pages, "confirmation"], found, strict=True):
        content = page[page.index('id="content"') :]
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]* src=)", content), url
        assert "rws_jobs/admin.css" in page, url


# -- schedules and workers


def test_schedules_show_when_they_ran_and_run_and_whether_they_are_declared(clock: Clock, admin_client: Client) -> None:
    from rws_jobs import schedule

    schedule("nightly", "0 0 2 * * *", "tests.note", timezone="Europe/Paris")
    schedule("resting", "0 3 * * *", "tests.note")
    for name, columns in (
        ("nightly", {"next_run_at": NOW + 7_200, "last_run_at": NOW - 60, "timezone": "Europe/Paris"}),
        ("resting", {"next_run_at": NOW, "paused": True}),
        ("dropped", {"next_run_at": NOW}),
    ):
        JobSchedule.objects.create(name=name, cron="0 0 2 * * *", job_type="tests.note", **columns)
    page = admin_client.get("/admin/rws_jobs/jobschedule/").content.decode()
    rows = [texts(found) for found in re.findall(r"<tr><th.*?</tr>", page, re.S)]
    assert rows == [
        "dropped 0 0 2 * * * UTC tests.note now – – not declared here",
        "nightly 0 0 2 * * * Europe/Paris tests.note in 2 hours 1 minute ago ● declared",
        "resting 0 0 2 * * * UTC tests.note now – ‖ paused",
    ]
    assert 'type="checkbox"' not in page


@pytest.mark.parametrize("name", ["jobschedule", "jobworker"])
def test_schedules_and_workers_cannot_be_added_changed_or_deleted(admin_client: Client, name: str) -> None:
    JobSchedule.objects.create(name="a", next_run_at=1, cron="0 0 2 * * *", job_type="tests.note", payload='{"a": 1}')
    JobWorker.objects.create(id="a", host="h", pid=1, started_at=1, beat_at=1, lease=30)
    url = f"/admin/rws_jobs/{name}/"
    assert admin_client.get(url + "a/change/").status_code == 200
    for address in ("add/", "a/change/", "a/delete/"):
        assert admin_client.post(url + address, {"post": "yes", "cron": "x", "host": "x"}).status_code == 403
    act(admin_client, url, "delete_selected", "a", confirmed=True)
    assert JobSchedule.objects.get().cron == "0 0 2 * * *"
    assert JobWorker.objects.get().host == "h"


def test_workers_show_how_long_ago_their_hearts_beat(clock: Clock, admin_client: Client) -> None:
    common: dict[str, Any] = {"pid": 4711, "started_at": NOW - 7_200, "lease": 30, "threads": 4}
    JobWorker.objects.create(id="one", host="a", beat_at=NOW - 2, queues="mail,default", **common)
    JobWorker.objects.create(id="two", host="b", beat_at=NOW - 31, **common)
    page = admin_client.get("/admin/rws_jobs/jobworker/").content.decode()
    rows = [texts(found) for found in re.findall(r"<tr><t[hd].*?</tr>", page, re.S)]
    assert rows == [
        "one ● alive a 4711 mail,default 4 2 hours ago 2 seconds ago",
        "two ✕ silent b 4711 all 4 2 hours ago 31 seconds ago",
    ]


# -- the house


class _Urls:
    def __init__(self, **registered: Any) -> None:
        self.site = AdminSite(name="operations")
        for model, model_admin in registered.values():
            self.site.register(model, model_admin)
        self.urlpatterns = [path("ops/", self.site.urls)]


def test_another_admin_site_works(admin_client: Client, settings: Any) -> None:
    settings.ROOT_URLCONF = _Urls(jobs=(Job, JobAdmin), dead=(DeadLetter, DeadLetterAdmin))
    insert(dead("a", unique_key="k"), row("live", unique_key="k"), dead("b"))
    for url in ("/ops/rws_jobs/deadletter/", "/ops/rws_jobs/job/", "/ops/rws_jobs/job/a/change/"):
        page = admin_client.get(url)
        assert page.status_code == 200
        assert '"/admin/' not in page.content.decode()
    response = admin_client.post("/ops/rws_jobs/deadletter/a/retry/", follow=True)
    assert 'href="/ops/rws_jobs/job/live/change/"' in response.content.decode()
    admin_client.post("/ops/rws_jobs/deadletter/b/retry/")
    asked = act(admin_client, "/ops/rws_jobs/job/", "delete_selected", "a")
    assert "Delete 1 job?" in texts(asked.content.decode())
    assert statuses() == {"a": "failed", "b": "pending", "live": "pending"}


def test_a_site_with_the_dead_letters_alone_works(admin_client: Client, settings: Any) -> None:
    settings.ROOT_URLCONF = _Urls(dead=(DeadLetter, DeadLetterAdmin))
    insert(dead("a", unique_key="k"), row("live", unique_key="k"), dead("b"))
    assert admin_client.get("/ops/rws_jobs/deadletter/a/change/").status_code == 200
    for job_id in "ab":
        response = admin_client.post(f"/ops/rws_jobs/deadletter/{job_id}/retry/", follow=True)
        assert response.status_code == 200
    assert statuses() == {"a": "failed", "b": "pending", "live": "pending"}


def test_a_subclass_can_narrow_the_list_and_its_actions_keep_to_that(admin_client: Client, settings: Any) -> None:
    class OneQueue(JobAdmin):
        def get_queryset(self, request: Any) -> JobQuerySet:
            return super().get_queryset(request).filter(queue="mine")

    settings.ROOT_URLCONF = _Urls(jobs=(Job, OneQueue))
    insert(dead("mine", queue="mine"), dead("theirs"), dead("mine too", queue="mine"))
    url = "/ops/rws_jobs/job/"
    for query in ("", "?queue=mine", "?job_type=tests.noop", "?before=%5B%22z%22%5D", "?q=tests.noop"):
        assert listed(admin_client, url + query) == ["mine too", "mine"], query
    assert listed(admin_client, url + "?q=theirs") == []
    act(admin_client, url, "retry_selected", "mine", "theirs")
    act(admin_client, url, "delete_selected", "mine", across=True, confirmed=True)
    admin_client.post(url + "theirs/retry/")
    admin_client.post(url + "theirs/delete/", {"post": "yes"})
    assert statuses() == {"theirs": "failed"}


def test_pages_can_be_translated(admin_client: Client, settings: Any) -> None:
    """Django's own words are, here ours stay English: no text is put together before its language is known."""
    settings.LANGUAGE_CODE = "de"
    settings.USE_THOUSAND_SEPARATOR = True
    insert(*(dead(f"{number}") for number in range(60)), running("r"))
    assert "Suchen" in admin_client.get(DEAD).content.decode()
    for url in (DEAD, JOBS, DEAD + "1/change/", JOBS + "r/change/"):
        assert admin_client.get(url).status_code == 200
    assert said(act(admin_client, DEAD, "retry_selected", "1", "2"))[0].startswith("2 jobs")


def test_no_table_depends_on_users() -> None:
    for model in apps.get_app_config("rws_jobs").get_models():
        assert not [field for field in model._meta.get_fields() if field.is_relation]


def test_without_the_admin_installed_its_module_is_not_imported() -> None:
    code = (
        "import sys, django; from django.conf import settings; "
        "database = {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}; "
        "settings.configure(INSTALLED_APPS=['rws_jobs'], DATABASES={'default': database}); "
        "django.setup(); import rws_jobs.models, rws_jobs.schedules; from django.core.management import call_command; "
        "call_command('check'); call_command('makemigrations', check=True, dry_run=True, verbosity=0); "
        "assert not [name for name in sys.modules if name.startswith(('rws_jobs.admin.', 'django.contrib.admin'))]; "
        "assert 'rws_jobs.admin' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_list_view_is_outside_of_atomic_requests() -> None:
    for url in (JOBS, DEAD):
        assert resolve(url).func._non_atomic_requests == {"default"}  # type: ignore[attr-defined]
