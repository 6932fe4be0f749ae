"""Rows of the job table as a test wants them, and a table in which jobs write down that they ran."""

import os
from typing import Any, NamedTuple

from django.db import connections, router

from rws_jobs import current_job
from rws_jobs.models import Job

# Long ago, so that what counts from here is due.
LONG_AGO = 1_000_000_000
FAR_AHEAD = 30_000_000_000


def row(id: str, **columns: Any) -> Job:
    """A pending, due job that is not saved."""
    defaults: dict[str, Any] = {
        "job_type": "tests.noop",
        "payload": "{}",
        "status": "pending",
        "attempts": 0,
        "max_retries": 3,
        "next_run_at": LONG_AGO,
        "created_at": LONG_AGO,
        "queue": "default",
        "priority": 0,
    }
    return Job(id=id, **defaults | columns)


def insert(*rows: Job) -> None:
    Job.objects.bulk_create(rows)


def statuses() -> dict[str, str]:
    """The status of each job in the table, by id."""
    return dict(Job.objects.order_by("id").values_list("id", "status"))


class Entry(NamedTuple):
    job_id: str
    attempt: int
    what: str
    process: int


class Ledger:
    """A table without any key: who writes twice is seen twice. The ``record`` job writes into it."""

    def __init__(self) -> None:
        self._execute("CREATE TABLE tests_ledger (job_id VARCHAR(64), attempt INT, what VARCHAR(16), process INT)")

    def drop(self) -> None:
        self._execute("DROP TABLE tests_ledger")

    @property
    def entries(self) -> list[Entry]:
        with _connection().cursor() as cursor:
            cursor.execute("SELECT job_id, attempt, what, process FROM tests_ledger")
            return [Entry(*found) for found in cursor.fetchall()]

    @property
    def started(self) -> list[str]:
        """The ids of the jobs that have started, sorted; one that started twice is here twice."""
        return sorted(entry.job_id for entry in self.entries if entry.what == "started")

    @staticmethod
    def write(what: str) -> None:
        """For jobs: say that this one did ``what``."""
        job = current_job()
        with _connection().cursor() as cursor:
            cursor.execute(
                "INSERT INTO tests_ledger (job_id, attempt, what, process) VALUES (%s, %s, %s, %s)",
                [job.id, job.attempt, what, os.getpid()],
            )

    @staticmethod
    def _execute(sql: str) -> None:
        with _connection().cursor() as cursor:
            cursor.execute(sql)


def _connection() -> Any:
    return connections[router.db_for_write(Job)]
