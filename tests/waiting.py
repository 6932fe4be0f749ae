"""Other threads and connections beside the test's own, and waiting for what they do."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from django.db import connection, connections

T = TypeVar("T")


def wait_for(condition: Callable[[], T], *, timeout: float = 30.0, every: float = 0.01, what: str) -> T:
    """Ask ``condition`` until its answer is true, and return that. AssertionError with ``what`` after ``timeout``."""
    deadline = time.monotonic() + timeout
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what}")
        time.sleep(every)


def apart(function: Callable[..., T], *arguments: object) -> "Future[T]":
    """Call ``function`` in a thread of its own, with database connections of its own."""

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            connections.close_all()
            future.set_exception(error)
        else:
            connections.close_all()
            future.set_result(result)

    future: Future[T] = Future()
    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def another_connection(alias: str = "another") -> Iterator[str]:
    """A second connection of this thread to the test's database, under the alias that this gives."""
    connections[alias] = connection.copy(alias)
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]


def until_one_waits_for_a_lock() -> None:
    """Until a session of this database waits for a lock that another holds. (SQLite has one lock, and no such list.)"""
    sql = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx t JOIN information_schema.processlist p"
        " ON p.id = t.trx_mysql_thread_id WHERE t.trx_state = 'LOCK WAIT' AND p.db = DATABASE()",
    }[connection.vendor]

    def waits() -> bool:
        # On a connection of its own, now and then: inside a transaction PostgreSQL shows the same list again, and
        # within 0.1 s so does InnoDB.
        with another_connection("watching") as alias, connections[alias].cursor() as cursor:
            cursor.execute(sql)
            return bool(cursor.fetchone()[0])

    wait_for(waits, every=0.15, what="a session that waits for a lock")
