"""Retry and delete as people do them, in a browser: selected jobs, all that match, and on a job's page."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from rws_jobs.admin import JobAdmin
from rws_jobs.models import JobWorker

from .optional import chromium, lacking
from .rows import insert, row, statuses

try:
    from playwright.sync_api import Browser, Page, expect, sync_playwright
except ImportError:  # the tests then say so
    sync_playwright = None  # type: ignore[assignment]

pytestmark = pytest.mark.django_db(transaction=True)

SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
# No inline script or style, and nothing from elsewhere.
POLICY = "default-src 'self'; frame-ancestors 'none'; form-action 'self'"


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    if sync_playwright is None:
        lacking("playwright is not installed")
    path = chromium()
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        # Its event loop runs in this thread, where Django would refuse to touch the database.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        browser = playwright.chromium.launch(executable_path=path, args=SWITCHES)
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser complained of: errors of scripts, refused styles, dialogs of injected code."""
    return []


@pytest.fixture
def page(browser: "Browser", live_server: Any, complaints: list[str]) -> "Iterator[Page]":
    """A page of somebody who may do everything, under a strict content security policy."""
    user = User.objects.create(username="ada", is_staff=True, is_superuser=True)
    client = Client()
    client.force_login(user)
    context = browser.new_context(base_url=live_server.url)
    context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": live_server.url}])

    def with_policy(route: Any) -> None:
        response = route.fetch(max_redirects=0)
        route.fulfill(response=response, headers={**response.headers, "content-security-policy": POLICY})

    def note(message: Any) -> None:
        address = message.location.get("url", "")
        if message.type == "error" and not address.endswith("/favicon.ico"):  # the browser's own idea
            complaints.append(f"{message.text} {address}")

    context.route(f"{live_server.url}/admin/**", with_policy)
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", note)
    page.on("dialog", lambda dialog: complaints.append(dialog.message) or dialog.dismiss())  # type: ignore[func-returns-value]
    yield page
    context.unroute_all(behavior="ignoreErrors")  # a picture may still be on its way
    context.close()
    assert complaints == []


def dead(id: str, **columns: Any) -> Any:
    return row(id, **{"status": "failed", "attempts": 4, "last_error": "ValueError: no", "history": "[]"} | columns)


def tick(page: "Page", *ids: str) -> None:
    for job_id in ids:
        page.locator(f'input[name="_selected_action"][value="{job_id}"]').check()


def run(page: "Page", action: str) -> None:
    page.locator("select[name=action]").select_option(action)
    page.locator("button[name=index]").click()


def expect_message(page: "Page", text: str) -> None:
    expect(page.locator(".messagelist li")).to_contain_text([text])


def test_retry_of_selected_dead_letters(page: "Page") -> None:
    insert(dead("a"), dead("b"), dead("c"))
    page.goto("/admin/rws_jobs/deadletter/")
    tick(page, "a", "c")
    run(page, "retry_selected")
    expect_message(page, "2 jobs were retried")
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    assert statuses() == {"a": "pending", "b": "failed", "c": "pending"}


def test_retry_of_all_that_match(page: "Page", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobAdmin, "list_per_page", 2)
    insert(*(dead(f"m{number}", queue="mail") for number in range(5)), dead("other"))
    page.goto("/admin/rws_jobs/deadletter/")
    page.get_by_role("link", name="mail", exact=True).click()
    page.locator("#action-toggle").check()
    page.get_by_role("button", name="Select all that match").click()
    expect(page.get_by_text("All that match are selected")).to_be_visible()
    run(page, "retry_selected")
    expect(page.get_by_role("heading", name="Retry 5 dead letters?")).to_be_visible()
    assert set(statuses().values()) == {"failed"}
    page.get_by_role("button", name="Retry").click()
    expect_message(page, "5 jobs were retried")
    expect(page.get_by_text("Nothing matches.")).to_be_visible()
    assert statuses() == {f"m{number}": "pending" for number in range(5)} | {"other": "failed"}


def test_retry_on_the_page(page: "Page") -> None:
    insert(dead("a"))
    page.goto("/admin/rws_jobs/deadletter/")
    page.locator("#result_list").get_by_role("link", name="tests.noop").click()
    page.get_by_role("button", name="Retry").click()
    expect_message(page, "was retried")
    page.locator(".messagelist").get_by_role("link", name="a", exact=True).click()
    expect(page.locator(".rws-badge")).to_contain_text("pending")
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)
    assert statuses() == {"a": "pending"}


def test_delete_of_selected_jobs_and_its_cancel(page: "Page") -> None:
    insert(dead("a"), row("b"), row("c"))
    page.goto("/admin/rws_jobs/job/")
    tick(page, "a", "b")
    run(page, "delete_selected")
    page.get_by_role("link", name="Cancel").click()
    expect(page.locator("#result_list tbody tr")).to_have_count(3)
    assert len(statuses()) == 3
    tick(page, "a", "b")
    run(page, "delete_selected")
    page.get_by_role("button", name="Delete").click()
    expect_message(page, "2 jobs were deleted")
    assert statuses() == {"c": "pending"}


def test_delete_of_all_that_match(page: "Page", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobAdmin, "list_per_page", 2)
    insert(*(row(f"{number}") for number in range(5)), row("r", status="running", claimed_by="w1"))
    page.goto("/admin/rws_jobs/job/")
    page.locator("#action-toggle").check()
    page.get_by_role("button", name="Select all that match").click()
    run(page, "delete_selected")
    expect(page.get_by_role("heading", name="Delete 6 jobs?")).to_be_visible()
    page.get_by_role("button", name="Delete").click()
    expect_message(page, "5 jobs were deleted")
    assert statuses() == {"r": "running"}


def test_delete_on_the_page_and_its_cancel(page: "Page") -> None:
    insert(dead("a"))
    page.goto("/admin/rws_jobs/deadletter/a/change/")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("link", name="Cancel").click()
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    assert statuses() == {"a": "failed"}
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="Delete this job?")).to_be_visible()
    page.get_by_role("button", name="Delete").click()
    expect_message(page, "was deleted")
    assert statuses() == {}


def test_what_was_enqueued_is_shown_and_never_run(page: "Page", complaints: list[str]) -> None:
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    insert(dead("a", job_type=attack, queue=attack, last_error=attack, payload=attack, unique_key=attack))
    for url in ("deadletter/", "job/", "deadletter/a/change/"):
        page.goto(f"/admin/rws_jobs/{url}")
        expect(page.locator("#content")).to_contain_text(attack)
        expect(page.locator("#content img[src=x]")).to_have_count(0)
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#content")).to_contain_text(attack)
    page.get_by_role("button", name="Delete").click()
    expect_message(page, attack)
    assert complaints == []


def test_a_complaint_of_the_browser_would_be_seen(page: "Page", complaints: list[str]) -> None:
    page.goto("/admin/rws_jobs/deadletter/")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\" onclick=\"alert(1)\">')")
    page.evaluate("document.querySelector('p:last-child').click()")
    expect(page.locator("p").last).to_be_attached()
    assert any("Content Security Policy" in complaint for complaint in complaints)
    complaints.clear()


def test_a_traceback_keeps_its_indentation_and_can_be_folded(page: "Page") -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1\n    deeper()\n\tValueError'
    insert(dead("a", history=json.dumps([{"attempt": 1, "error": "no", "traceback": text}])))
    page.goto("/admin/rws_jobs/deadletter/a/change/")
    trace = page.locator("details pre")
    assert trace.inner_text() == text
    assert "mono" in trace.evaluate("element => getComputedStyle(element).fontFamily").lower()
    assert trace.evaluate("element => getComputedStyle(element).whiteSpace") == "pre"
    page.get_by_text("Traceback", exact=True).click()
    expect(trace).not_to_be_visible()


# The contrast of an element's text with what lies behind it, as WCAG defines it.
CONTRAST = """element => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const behind = [];
    for (let each = element; each; each = each.parentElement) behind.unshift(getComputedStyle(each).backgroundColor);
    const luminance = colours => {
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(value => value / 255)
            .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const pair = [luminance(behind), luminance([...behind, getComputedStyle(element).color])];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_of_ours_has_enough_contrast(page: "Page", theme: Any) -> None:
    """4.5 to 1, in both themes of the admin."""
    page.emulate_media(color_scheme=theme)
    history = json.dumps([{"attempt": 1, "exception": "ValueError", "error": "no", "worker": "w1", "traceback": "T"}])
    insert(dead("a", job_type="removed", history=history), row("b"), row("r", status="running", claimed_by="w1"))
    JobWorker.objects.create(id="w1", host="h", pid=1, started_at=1, beat_at=30_000_000_000, lease=30)
    seen: dict[str, float] = {}
    for url in ("deadletter/", "job/", "deadletter/a/change/", "job/r/change/", "jobworker/", "deadletter/?queue=none"):
        page.goto(f"/admin/rws_jobs/{url}")
        for element in page.locator("#content [class*=rws-]").all():
            seen[f"{url} {element.get_attribute('class')}"] = element.evaluate(CONTRAST)
    assert len(seen) > 25
    assert {name: round(ratio, 2) for name, ratio in seen.items() if ratio < 4.5} == {}
