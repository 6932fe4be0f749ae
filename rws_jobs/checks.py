"""System checks: the setting, the databases, and names that nobody serves."""

from collections.abc import Iterable
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from . import conf, registry, schedules
from .models import Job

# The oldest servers on which every statement here was run or is documented to work.
_OLDEST_POSTGRESQL = 130000
_OLDEST_MARIADB = (10, 6)
_OLDEST_MYSQL = (8, 0, 17)


@register()
def check_setting(**kwargs: Any) -> list[CheckMessage]:
    """RWS_JOBS holds known names and usable values."""
    return [
        Error(sentence, hint="The default is in force until this is mended.", id="rws_jobs.E001")
        for _, sentence in conf.problems()
    ]


@register()
def check_queue_names(**kwargs: Any) -> list[CheckMessage]:
    """With ``RWS_JOBS["QUEUES"]`` set, jobs and schedules name only those queues."""
    known = conf.conf().QUEUES
    if known is None:
        return []
    return [
        Warning(
            f"{who} uses the queue {queue!r}, which is not in RWS_JOBS['QUEUES'].",
            hint=f"Known queues: {', '.join(known)}. A job in a queue that no worker serves waits for ever.",
            id="rws_jobs.W001",
        )
        for who, queue in _queues_used()
        if queue not in known
    ]


def _queues_used() -> Iterable[tuple[str, str]]:
    for job_type in registry.job_types():
        yield f"job {job_type!r}", registry.resolve(job_type).options.get("queue", "default")
    for schedule in schedules.declared().values():
        if (queue := schedule.queue) is not None:
            yield f"schedule {schedule.name!r}", queue


@register(Tags.database)
def check_database(databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """The database that holds the jobs is new enough, and SQLite is set up for more than one writer."""
    alias = router.db_for_write(Job)
    if alias not in (databases or ()):
        return []
    connection = connections[alias]
    if connection.vendor == "sqlite":
        return _check_sqlite(connection)
    if connection.vendor == "postgresql":
        return _check_postgresql(connection)
    if connection.vendor == "mysql":
        return _check_mysql(connection)
    return [
        Error(
            f"The database {alias!r} ({connection.display_name}) cannot hold jobs.",
            hint="Use SQLite, PostgreSQL, MariaDB or MySQL, or route the rws_jobs app to one.",
            id="rws_jobs.E002",
        )
    ]


def _check_sqlite(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    if connection.is_in_memory_db():  # type: ignore[attr-defined]
        return []
    found: list[CheckMessage] = []
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        journal = str(cursor.fetchone()[0]).lower()
    options = f"DATABASES[{connection.alias!r}]['OPTIONS']"
    if journal != "wal":
        found.append(
            Warning(
                f"SQLite's journal mode is {journal!r}: readers and the worker wait for each other.",
                hint=f"{options}: 'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;'",
                id="rws_jobs.W002",
            )
        )
    if str(connection.settings_dict["OPTIONS"].get("transaction_mode") or "").upper() != "IMMEDIATE":
        found.append(
            Warning(
                "SQLite transactions begin deferred: one that reads before it writes fails at once with 'database is "
                "locked' when another connection has written in between.",
                hint=f"{options}: 'transaction_mode': 'IMMEDIATE'",
                id="rws_jobs.W003",
            )
        )
    return found


def _check_postgresql(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    version: int = connection.pg_version  # type: ignore[attr-defined]
    if version >= _OLDEST_POSTGRESQL:
        return []
    return [_too_old(f"PostgreSQL {version // 10000}", f"PostgreSQL {_OLDEST_POSTGRESQL // 10000}")]


def _check_mysql(connection: BaseDatabaseWrapper) -> list[CheckMessage]:
    version: tuple[int, ...] = connection.mysql_version  # type: ignore[attr-defined]
    mariadb: bool = connection.mysql_is_mariadb  # type: ignore[attr-defined]
    name, oldest = ("MariaDB", _OLDEST_MARIADB) if mariadb else ("MySQL", _OLDEST_MYSQL)
    if version >= oldest:
        return []
    return [_too_old(f"{name} {'.'.join(map(str, version))}", f"{name} {'.'.join(map(str, oldest))}")]


def _too_old(found: str, oldest: str) -> CheckMessage:
    return Error(f"{found} is too old to hold jobs.", hint=f"Use {oldest} or newer.", id="rws_jobs.E003")
