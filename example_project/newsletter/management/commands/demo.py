"""``manage.py demo``: the whole example in one command."""

import logging
import socket
import time
from io import StringIO
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper
from django.db.models import Count, Q
from django.urls import reverse

from example_project.newsletter.models import Subscriber
from example_project.newsletter.signups import import_signups
from rws_jobs import JobInfo, Worker, failed_jobs
from rws_jobs.models import Job
from rws_jobs.signals import job_retrying

SIGNUPS = Path(__file__).parents[2] / "signups.csv"
LOG = settings.VAR / "worker.log"
LOGIN = PASSWORD = "demo"


class Command(BaseCommand):
    help = "Import some 500 sign-ups, send everybody a welcome, then serve site, admin and worker until Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--no-serve", action="store_true", help="end after the summary")
        parser.add_argument("--port", type=int, default=8000, help="where to serve (default: 8000)")

    def handle(self, *, no_serve: bool, port: int, **options: Any) -> None:
        if not no_serve:
            check_port(port)
        log_to_file()
        call_command("migrate", verbosity=0)
        create_operator()
        self.import_signups()
        worker = Worker()
        try:
            self.work_off(worker)
            if not no_serve:
                self.serve(port)
        except KeyboardInterrupt:
            self.stdout.write("\nInterrupted. Run it again to go on.")
        finally:
            worker.stop(timeout=10)

    def import_signups(self) -> None:
        # Not asked address by address: one that was corrected in the admin would come in a second time.
        if Subscriber.objects.exclude(source=Subscriber.SIGN_UP_PAGE).exists():
            self.stdout.write(f"The sign-ups are imported already. To begin anew, delete {settings.VAR}.")
            return
        count, skipped = import_signups(SIGNUPS)
        self.stdout.write(f"Imported {count} sign-ups from {SIGNUPS.name}. {len(skipped)} lines were skipped:")
        for line in skipped:
            self.stdout.write(f"  line {line.number:3}: {line.reason}")

    def work_off(self, worker: Worker) -> None:
        """Let the worker run until nothing is left to do, and say what it did."""
        retries: list[JobInfo] = []

        def note_retry(job: JobInfo, **signal: object) -> None:
            retries.append(job)

        job_retrying.connect(note_retry)
        welcomed_before = Subscriber.objects.state()["welcomed"]
        rate = self.watch(worker)

        welcomed = Subscriber.objects.state()["welcomed"] - welcomed_before
        dead = failed_jobs(limit=1000)
        self.say("sent", f"{welcomed} mails")
        self.say("retried", f"{len(retries)} failed attempts")
        self.say("dead", f"{len(dead)} letters")
        self.say("rate", f"{rate:.0f} jobs/s" if rate else "nothing was waiting")
        self.say("mails", settings.MAILS_GO_TO)
        self.say("log", LOG)
        if dead:
            self.stdout.write("\nDead letters:")
        for letter in dead:
            self.stdout.write(f"  {letter.last_error}")

    def watch(self, worker: Worker) -> float:
        """Show the progress. Answers how many jobs a second had their first attempt; retries mostly wait."""
        total, first_attempts = remaining, untried = live_jobs()
        bar = ProgressBar(self.stdout, total)
        rate = 0.0
        started = time.monotonic()
        worker.start()
        while remaining:
            time.sleep(0.05)
            remaining, still_untried = live_jobs()
            if untried:
                rate = (first_attempts - still_untried) / (time.monotonic() - started)
            untried = still_untried
            bar.show(total - remaining)
        return rate

    def serve(self, port: int) -> None:
        site = f"http://127.0.0.1:{port}"
        self.stdout.write("\nServing, until Ctrl-C:")
        self.say("sign-up page", site + reverse("sign_up"))
        self.say("admin", f"{site}{reverse('admin:index')} (user {LOGIN}, password {PASSWORD})")
        self.say("subscribers", f"{site}{reverse('admin:newsletter_subscriber_changelist')}?problem__isempty=0")
        self.say("dead letters", site + reverse("admin:rws_jobs_deadletter_changelist"))
        self.stdout.write("To put a dead letter right, correct the address of its subscriber, then retry it.\n")
        self.stdout.flush()
        # What runserver would say has been said.
        call_command("runserver", f"127.0.0.1:{port}", use_reloader=False, stdout=StringIO())

    def say(self, name: str, value: object) -> None:
        self.stdout.write(f"  {name:13} {value}")


class ProgressBar:
    """A bar on a terminal; elsewhere, in a log file say, a line every so often."""

    WIDTH = 40

    def __init__(self, stdout: OutputWrapper, total: int) -> None:
        self.stdout, self.total, self.shown = stdout, total, 0

    def show(self, done: int) -> None:
        share = done / self.total
        if self.stdout.isatty():
            bar = "#" * int(share * self.WIDTH)
            end = "\n" if done == self.total else ""
            self.stdout.write(f"\r  [{bar:.<{self.WIDTH}}] {done}/{self.total}", ending=end)
        elif share >= self.shown + 0.2 or done == self.total:
            self.stdout.write(f"  {done}/{self.total}")
            self.shown = share
        self.stdout.flush()


def live_jobs() -> tuple[int, int]:
    """How many jobs are not over, and how many of them have not failed yet."""
    live = Job.objects.filter(status__in=["pending", "running"])
    counts = live.aggregate(all=Count("pk"), untried=Count("pk", filter=Q(attempts=0)))
    return counts["all"], counts["untried"]


def check_port(port: int) -> None:
    # Before the mails are sent, and because runserver ends the whole process where it finds the port taken.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as runserver does
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise CommandError(f"Port {port} cannot be served: {error}. Choose another one with --port.") from None


def log_to_file() -> None:
    # On the terminal, a line for each failed attempt would tear the progress bar to pieces.
    handler = logging.FileHandler(LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("rws_jobs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def create_operator() -> None:
    user, _ = get_user_model().objects.get_or_create(username=LOGIN, defaults={"is_staff": True, "is_superuser": True})
    if not user.check_password(PASSWORD):
        user.set_password(PASSWORD)
        user.save()
