"""Short transactions of our own, whatever the defaults of the database or role are."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from .outages import is_locked

# How long a short transaction waits for a lock that somebody else holds, in seconds.
LOCK_TIMEOUT = 2


@contextmanager
def short_transaction(using: str) -> Iterator[None]:
    """A transaction that claims or settles: READ COMMITTED with a lock timeout, on SQLite the write lock from BEGIN.

    Nothing of that outlasts it: the connection may be the caller's, or behind PgBouncer the next client's. Inside a
    caller's own ``atomic()`` it is a savepoint, with that transaction's settings.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        with transaction.atomic(using=using):
            yield
    elif connection.vendor == "sqlite":
        with _immediate(connection):
            yield
    elif connection.vendor == "postgresql":
        with transaction.atomic(using=using), connection.cursor() as cursor:
            # Under REPEATABLE READ two neighbours' claims end in a serialization failure.
            cursor.execute(
                f"SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '{LOCK_TIMEOUT}s'"
            )
            yield
    else:
        if getattr(connection, "isolation_level", None) != "read committed":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        with transaction.atomic(using=using):
            yield


def limit_lock_waits(using: str) -> None:
    """Let a connection of our own wait no longer for locks than ``short_transaction`` does elsewhere.

    MySQL and MariaDB know no such limit for one transaction; theirs is 50 s.
    """
    connection = connections[using]
    if connection.vendor == "mysql":
        connection.ensure_connection()
        if getattr(connection, "_rws_jobs_session", None) is not connection.connection:
            with connection.cursor() as cursor:
                cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {LOCK_TIMEOUT}")
            connection._rws_jobs_session = connection.connection  # type: ignore[attr-defined]


@contextmanager
def _immediate(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Take SQLite's write lock at BEGIN, asking often.

    A deferred transaction that reads first and writes later fails at once when somebody wrote in between. And
    SQLite's own busy handler waits longer and longer: under three writers its p90 was 2.3 s, asking every 0.5–2 ms
    0.1 s.
    """
    connection.ensure_connection()
    session = connection.connection
    mode, connection.transaction_mode = connection.transaction_mode, "IMMEDIATE"  # type: ignore[attr-defined]
    (busy_timeout,) = session.execute("PRAGMA busy_timeout").fetchone()
    session.execute("PRAGMA busy_timeout = 0")
    deadline = time.monotonic() + LOCK_TIMEOUT
    with ExitStack() as stack:
        try:
            while True:
                try:
                    stack.enter_context(transaction.atomic(using=connection.alias))
                    break
                except OperationalError as error:
                    if not is_locked(error) or time.monotonic() > deadline:
                        raise
                    time.sleep(random.uniform(0.0005, 0.002))
        finally:
            connection.transaction_mode = mode  # type: ignore[attr-defined]
            session.execute(f"PRAGMA busy_timeout = {busy_timeout}")
        yield
