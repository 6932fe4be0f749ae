"""``manage.py demo`` as a newcomer meets it: a process of its own, its mails read from disk, its pages over HTTP."""

import csv
import email
import email.policy
import http.cookiejar
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.message import EmailMessage
from html import unescape
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    os.environ.get("RWS_JOBS_TEST_DATABASE", "sqlite") != "sqlite",
    reason="the demo runs on SQLite",
)

ROOT = Path(__file__).parent.parent
SIGNUPS = ROOT / "example_project" / "newsletter" / "signups.csv"

SKIPPED = {92: "already", 133: "empty", 202: "already", 248: "2 columns", 272: "empty", 307: "already"}
SKIPPED |= {361: "no e-mail address", 384: "already", 418: "empty", 438: "already", 478: "last Tuesday"}
NO_ADDRESS = {
    "anna30 @ fastbox.example",
    "shcherbakova.y@",
    "hannah.morgan@localbox",
    "remy-lefevre@example,com",
    "thomas4.post.example",
    "tomas1969@@example.org",
    "www.example.net",
}
GONE = {
    "ayesha.s@closed-shop.example",
    "edwardm@old-cable.example",
    "gurpreet@closed-shop.example",
    "h.holloway@old-cable.example",
    "katerina.toth@old-cable.example",
    "soren_virtanen@old-cable.example",
    "wagner@closed-shop.example",
}
GREYLISTING = ("@strict-mail.example", "@greyhound.example")


# -- the demo, run to its end


@dataclass
class Demo:
    """One place where the demo has been, or is, at work."""

    folder: Path
    output: str = ""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "manage.py", *arguments]
        result = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, encoding="utf-8", timeout=120
        )
        self.output = result.stdout
        return result

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DB_", "EMAIL_", "DJANGO_"))}
        return {**kept, "EXAMPLE_VAR": str(self.folder), "PYTHONIOENCODING": "utf-8"}

    def mails(self) -> list[EmailMessage]:
        parse = email.message_from_bytes
        return [parse(path.read_bytes(), policy=email.policy.default) for path in (self.folder / "mails").glob("*.eml")]

    def mails_to(self, address: str) -> list[EmailMessage]:
        return [mail for mail in self.mails() if recipient(mail).addr_spec == address]

    def query(self, sql: str, *values: object) -> list[tuple]:
        with closing(sqlite3.connect(self.folder / "db.sqlite3", timeout=20)) as database:
            return database.execute(sql, values).fetchall()

    def number(self, name: str) -> int:
        """A number of the printed summary."""
        found = re.search(rf"^  {name} +(\d+) ", self.output, re.MULTILINE)
        assert found, self.output
        return int(found[1])


def recipient(mail: EmailMessage):
    (address,) = mail["To"].addresses
    return address


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> Demo:
    demo = Demo(tmp_path_factory.mktemp("demo") / "var")
    result = demo.run("demo", "--no-serve")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return demo


@pytest.fixture
def demo(first_run, tmp_path) -> Demo:
    """A copy of what the first run left, to go on with."""
    return Demo(shutil.copytree(first_run.folder, tmp_path / "var"))


def expected_mails() -> dict[str, str]:
    """Address to name of everybody who is to be welcomed, read from the file without the example's own code."""
    welcome = {}
    with SIGNUPS.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        next(rows)
        for row in rows:
            if rows.line_num not in SKIPPED and row[1].lower() not in NO_ADDRESS | GONE:
                welcome[row[1].lower()] = " ".join(row[0].split())
    return welcome


def test_the_file_is_about_500_real_looking_sign_ups():
    text = SIGNUPS.read_text(encoding="utf-8")
    assert 480 <= len(text.splitlines()) <= 520
    for script in ("é", "Ł", "Ж", "Ψ", "小", "김", "ف", "ש", "अ", "🌻", "’", '""'):
        assert script in text


def test_everybody_who_can_be_reached_gets_exactly_one_mail(first_run):
    expected = expected_mails()
    assert len(expected) == 472
    got = Counter(recipient(mail).addr_spec for mail in first_run.mails())
    assert got == Counter(punycode(address) for address in expected)
    assert {path.suffix for path in (first_run.folder / "mails").iterdir()} == {".eml"}


def test_each_mail_is_right(first_run):
    names = {punycode(address): (address, name) for address, name in expected_mails().items()}
    for mail in first_run.mails():
        address, name = names[recipient(mail).addr_spec]
        text = mail.get_content()
        assert recipient(mail).display_name == name
        # Stripped: Django 5.2 begins a long subject on a line of its own.
        assert mail["Subject"].strip() == f"Welcome aboard, {name}!"
        assert text.startswith(f"Dear {name},\n")
        assert f"with the address {address}." in text
        assert mail["From"] == "The Harbour Letter <hello@harbour.example>"
    assert len({mail["Message-ID"] for mail in first_run.mails()}) == len(names)


def test_the_summary_counts_what_happened(first_run):
    greylisted = sum(address.endswith(GREYLISTING) for address in expected_mails())
    assert greylisted >= 5
    assert first_run.number("sent") == len(first_run.mails()) == 472
    assert first_run.number("retried") == greylisted + 2 * len(GONE)
    assert first_run.number("dead") == len(NO_ADDRESS | GONE)
    assert first_run.number("rate") > 0
    assert f"mails         {first_run.folder / 'mails'}" in first_run.output
    assert "486/486" in first_run.output


def test_lines_that_make_no_sense_are_reported_with_their_number(first_run):
    reported = dict(re.findall(r"^  line +(\d+): (.+)$", first_run.output, re.MULTILINE))
    assert {int(number) for number in reported} == SKIPPED.keys()
    for number, reason in SKIPPED.items():
        assert reason in reported[str(number)]


def test_those_who_cannot_be_reached_are_dead_letters(first_run):
    dead = first_run.query(
        "SELECT email, attempts, last_error, problem FROM rws_jobs JOIN newsletter_subscriber AS subscriber"
        " ON subscriber.id = json_extract(payload, '$.subscriber_id') WHERE status = 'failed'"
    )
    assert {row[0] for row in dead} == NO_ADDRESS | GONE
    for address, attempts, error, problem in dead:
        assert attempts == (1 if address in NO_ADDRESS else 3)
        assert address in error
        assert error.startswith(problem)
        assert problem
        assert error in first_run.output
    assert first_run.query("SELECT count(*) FROM rws_jobs") == [(len(dead),)]


def test_the_nightly_digest_is_scheduled(first_run):
    [(cron, zone, due)] = first_run.query("SELECT cron, timezone, next_run_at FROM rws_job_schedules")
    assert (cron, zone) == ("0 0 2 * * *", "Europe/Paris")
    assert time.time() < due < time.time() + 26 * 3600


def test_a_second_run_sends_nothing_twice(first_run, demo):
    result = demo.run("demo", "--no-serve")
    assert result.returncode == 0, result.stderr
    assert "imported already" in demo.output
    assert (demo.number("sent"), demo.number("retried"), demo.number("dead")) == (0, 0, 14)
    assert len(demo.mails()) == len(first_run.mails())


def test_the_digest_tells_the_owner_who_is_new(demo):
    lines = [
        "from example_project.newsletter.jobs import send_digest",
        "from example_project.newsletter.models import Subscriber",
        "Subscriber.objects.create(name='Łucja Nowak', email='lucja@example.org')",
        "send_digest.enqueue()",
    ]
    assert demo.run("shell", "-c", "\n".join(lines)).returncode == 0
    result = demo.run("runjobs", "--drain")
    assert result.returncode == 0, result.stderr
    [digest] = demo.mails_to("owner@harbour.example")
    assert digest["Subject"] == "1 new subscriber"
    assert "Łucja Nowak <lucja@example.org>" in digest.get_content()
    assert "472 welcomed, 1 waiting, 14 could not be reached" in digest.get_content()
    assert demo.query("SELECT signups FROM newsletter_digest") == [(1,)]


# -- the demo, serving


class Browser:
    """As much of one as the pages need: cookies, and the token of the form that was loaded last."""

    def __init__(self, site: str) -> None:
        self.site, self.token = site, ""
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))

    def get(self, path: str) -> str:
        return self._open(path, None)

    def post(self, path: str, **fields: str) -> str:
        return self._open(path, {"csrfmiddlewaretoken": self.token, **fields})

    def _open(self, path: str, fields: dict[str, str] | None) -> str:
        data = None if fields is None else urllib.parse.urlencode(fields).encode()
        with self.opener.open(urllib.parse.urljoin(self.site, path), data, timeout=20) as response:
            page = response.read().decode()
        if found := re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page):
            self.token = found[1]
        return page


def wait_for(condition: Callable[[], object], what: str, seconds: float = 30) -> object:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(demo: Demo, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The demo as a process, ended by Ctrl-C: it must then be gone within seconds, cleanly."""
    output = demo.folder.parent / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "demo", *arguments],
            cwd=ROOT,
            env=demo.environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=10)
        demo.output = output.read_text(encoding="utf-8")
        assert code == 0, demo.output
        assert "Traceback" not in demo.output
        assert demo.query("SELECT count(*) FROM rws_jobs WHERE status = 'running'") == [(0,)]
        assert demo.query("SELECT count(*) FROM rws_job_workers") == [(0,)]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def served(demo: Demo) -> Iterator[Browser]:
    port = free_port()
    with started(demo, "--port", str(port)) as process:
        browser = Browser(f"http://127.0.0.1:{port}/")

        def answers() -> bool:
            assert process.poll() is None, (demo.folder.parent / "output.txt").read_text(encoding="utf-8")
            try:
                browser.get("/")
            except urllib.error.URLError:
                return False
            return True

        wait_for(answers, "the site answers")
        yield browser
    for path in ("", "admin/", "admin/newsletter/subscriber/?problem__isempty=0", "admin/rws_jobs/deadletter/"):
        assert f" http://127.0.0.1:{port}/{path}" in demo.output
    assert "user demo, password demo" in demo.output


def test_a_sign_up_in_the_browser_is_welcomed(demo):
    with served(demo) as browser:
        assert "472" in browser.get("/")
        page = browser.post("/", name=" Zoë\r\nO’Neil ", email="Zoe.O.Neil@Example.com")
        assert "Thank you" in page
        wait_for(lambda: demo.mails_to("zoe.o.neil@example.com"), "the welcome mail")
        browser.get("/")
        assert "has signed up already" in browser.post("/", name="Zoë", email="zoe.o.neil@example.com")
        assert "Enter a valid email address" in browser.post("/", name="Zoë", email="zoe at home")
    [mail] = demo.mails_to("zoe.o.neil@example.com")
    assert mail["Subject"] == "Welcome aboard, Zoë O’Neil!"
    assert demo.query("SELECT count(*) FROM newsletter_subscriber") == [(487,)]


def retry_on_its_page(browser: Browser, job_id: str) -> None:
    page = browser.get("/admin/rws_jobs/deadletter/")
    link = re.search(rf'href="([^"]*{job_id}/change/[^"]*)"', page)
    assert link, "the list of dead letters does not lead to the job"
    page = browser.get(unescape(link[1]))
    button = re.search(r'<form method="post" action="([^"]*/retry/[^"]*)"', page)
    assert button, "the page of a dead letter has no button to retry it"
    browser.post(unescape(button[1]))


def retry_in_the_list(browser: Browser, job_id: str) -> None:
    page = browser.get("/admin/rws_jobs/deadletter/")
    action = re.search(r'<option value="(\w+)">Retry', page)
    assert action, "the list of dead letters has no action to retry them"
    browser.post("/admin/rws_jobs/deadletter/", action=action[1], _selected_action=job_id)


@pytest.mark.parametrize(
    ("address", "retry"),
    [("wagner@closed-shop.example", retry_on_its_page), ("remy-lefevre@example,com", retry_in_the_list)],
)
def test_an_operator_corrects_an_address_and_retries_in_the_admin(demo, address, retry):
    [(subscriber, name)] = demo.query("SELECT id, name FROM newsletter_subscriber WHERE email = ?", address)
    [(job_id,)] = demo.query("SELECT id FROM rws_jobs WHERE json_extract(payload, '$.subscriber_id') = ?", subscriber)
    with served(demo) as browser:
        browser.get("/admin/login/")
        browser.post("/admin/login/", username="demo", password="demo", next="/admin/")
        assert address in unescape(browser.get("/admin/newsletter/subscriber/?problem__isempty=0"))
        assert address in unescape(browser.get("/admin/rws_jobs/deadletter/"))

        browser.get(f"/admin/newsletter/subscriber/{subscriber}/change/")
        page = browser.post(f"/admin/newsletter/subscriber/{subscriber}/change/", name=name, email="new@example.org")
        assert "was changed successfully" in page

        retry(browser, job_id)
        wait_for(lambda: demo.mails_to("new@example.org"), "the mail to the corrected address")
        wait_for(lambda: "473" in browser.get("/"), "the page counts it")
    [mail] = demo.mails_to("new@example.org")
    assert recipient(mail).display_name == name
    assert demo.query("SELECT count(*) FROM rws_jobs WHERE id = ?", job_id) == [(0,)]
    [(problem,)] = demo.query("SELECT problem FROM newsletter_subscriber WHERE id = ?", subscriber)
    assert problem == ""


def test_ctrl_c_in_the_middle_and_again(tmp_path):
    demo = Demo(tmp_path / "var")
    with started(demo, "--no-serve"):
        wait_for(lambda: any((demo.folder / "mails").glob("*.eml")), "the first mail")
    assert "Run it again to go on" in demo.output
    assert len(demo.mails()) < 472
    result = demo.run("demo", "--no-serve")
    assert result.returncode == 0, result.stderr
    assert "imported already" in demo.output
    assert Counter(recipient(mail).addr_spec for mail in demo.mails()) == Counter(map(punycode, expected_mails()))


def test_a_port_in_use_is_said_before_anything_is_done(tmp_path):
    demo = Demo(tmp_path / "var")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        result = demo.run("demo", "--port", str(port))
    assert result.returncode == 1
    assert result.stderr.startswith(f"CommandError: Port {port} cannot be served")
    assert "--port" in result.stderr
    assert not (demo.folder / "db.sqlite3").exists()


def punycode(address: str) -> str:
    user, _, domain = address.rpartition("@")
    return f"{user}@{domain.encode('idna').decode()}"
