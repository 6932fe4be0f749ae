"""``manage.py runjobs``: work jobs off until told to stop."""

import logging
import os
import signal
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, connections, router

from rws_jobs import registry, schedules
from rws_jobs.conf import conf
from rws_jobs.models import Job, JobSchedule, JobWorker
from rws_jobs.text import check_queue
from rws_jobs.worker import Worker

logger = logging.getLogger("rws_jobs")

# Shells and supervisors may send a signal twice; only one that comes later than this is a second wish.
DOUBLE = 1.0
# How often the main thread looks whether a signal has come or the worker has ended, in seconds.
LOOK_INTERVAL = 0.1


class Command(BaseCommand):
    help = (
        "Work background jobs off: run what is due, retry what fails, enqueue what is scheduled, until TERM or Ctrl-C."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        settings = conf()
        add = parser.add_argument
        add("--queues", type=_names, metavar="A,B", help="serve only these queues (default: every queue)")
        add("--exclude-queues", type=_names, metavar="A,B", default=[], help="serve every queue but these")
        add(
            "--threads",
            type=_number(int, 1, 1000),
            default=4,
            metavar="N",
            help="jobs that run at the same time (default: 4)",
        )
        add(
            "--poll-interval",
            type=_number(float, 0.01, 3600),
            default=settings.POLL_INTERVAL,
            metavar="SECONDS",
            help=f"longest pause between two looks for work (default: {settings.POLL_INTERVAL:g})",
        )
        add("--drain", action="store_true", help="run what is due now, then exit")
        add(
            "--max-jobs",
            type=_number(int, 1, 2**31),
            metavar="N",
            help="exit after N jobs, for a supervisor to restart",
        )
        add("--no-schedules", action="store_true", help="leave schedules to other workers")
        add(
            "--shutdown-timeout",
            type=_number(float, 0, 86_400),
            default=settings.SHUTDOWN_TIMEOUT,
            metavar="SECONDS",
            help=f"how long running jobs may take to end after TERM (default: {settings.SHUTDOWN_TIMEOUT:g})",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["queues"] and options["exclude_queues"]:
            raise CommandError("give --queues or --exclude-queues, not both: --queues alone says which are served")
        log_to_stderr(options["verbosity"])
        _check_tables()
        worker = Worker(
            options["queues"],
            options["threads"],
            exclude_queues=options["exclude_queues"],
            poll_interval=options["poll_interval"],
            schedules=not (options["no_schedules"] or options["drain"]),
            drain=options["drain"],
            max_jobs=options["max_jobs"],
        )
        stop = Stop()
        worker.start()
        logger.info(self._introduction(options))
        while not worker.wait(LOOK_INTERVAL) and not stop.asked:
            pass
        if stop.asked:
            self._stop(worker, stop, options["shutdown_timeout"])
        logger.info("stopped")

    def _stop(self, worker: Worker, stop: "Stop", timeout: float) -> None:
        logger.info("stopping: waiting up to %g s for running jobs", timeout)
        deadline = time.monotonic() + timeout
        while not worker.stop(LOOK_INTERVAL):
            if stop.forced or time.monotonic() >= deadline:
                worker.abandon()
                logger.warning("stopped with jobs still running; given back, uncharged")
                logging.shutdown()
                # Their threads cannot be ended, and must not go on while another worker runs the same jobs.
                os._exit(1 if stop.forced else 0)

    def _introduction(self, options: dict[str, Any]) -> str:
        connection = connections[router.db_for_write(Job)]
        if options["queues"]:
            queues = "queues " + ", ".join(options["queues"])
        elif options["exclude_queues"]:
            queues = "every queue but " + ", ".join(options["exclude_queues"])
        else:
            queues = "every queue"
        scheduled = _count(len(schedules.declared()), "schedule")
        if options["no_schedules"] or options["drain"]:
            scheduled = "schedules left to others"
        name = os.path.basename(str(connection.settings_dict["NAME"]))
        return (
            f"working on {connection.display_name} {name!r} ({connection.alias}): {queues}, "
            f"{_count(options['threads'], 'thread')}, {_count(len(registry.job_types()), 'handler')}, "
            f"{scheduled}"
        )


class Stop:
    """What signals have asked for.

    The handlers only set flags: one may come in the middle of a COMMIT, or while this very thread holds the lock of an
    event.
    """

    def __init__(self) -> None:
        self.asked = self.forced = False
        self._first = 0.0
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if not self.asked:
            self._first = time.monotonic()
            self.asked = True
        elif time.monotonic() - self._first > DOUBLE:
            self.forced = True


def log_to_stderr(verbosity: int) -> None:
    """Show the ``rws_jobs`` log where the project's LOGGING shows none of it: -v 2 with a line per success, -v 0
    errors."""
    level = {0: logging.ERROR, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET or verbosity != 1:
        logger.setLevel(level)


def _check_tables() -> None:
    """One clear line instead of a traceback where the database is not ready."""
    connection = connections[router.db_for_write(Job)]
    try:
        tables = set(connection.introspection.table_names())
    except DatabaseError as error:
        raise CommandError(f"the database {connection.alias!r} cannot be used: {error}") from error
    missing = {model._meta.db_table for model in (Job, JobSchedule, JobWorker)} - tables
    if missing:
        raise CommandError(f"tables are missing ({', '.join(sorted(missing))}): run manage.py migrate first")


def _names(text: str) -> list[str]:
    try:
        return [check_queue(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise ArgumentTypeError(f"{error} (give queue names separated by commas)") from error


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}") from None
        if not low <= number <= high:
            raise ArgumentTypeError(f"must be from {low:,} to {high:,}, not {text}")
        return number

    return read


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
