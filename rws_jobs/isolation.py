"""Connections between two jobs: as a request would find and leave them.

Those inside a caller's ``atomic()``, as in a TestCase, stay as they are.
"""

import logging
from contextlib import closing

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("rws_jobs")

# libpq's PQTRANS_ACTIVE, INTRANS and INERROR; psycopg 2 and 3 both answer these numbers.
_PG_IN_TRANSACTION = (1, 2, 3)


def refresh_connections() -> set[str]:
    """Close what is broken or too old, have the rest checked before its next use, forget logged queries.

    With ``CONN_MAX_AGE = 0`` a connection serves the jobs that follow each other and is closed when none is left: to
    connect anew for each would cost more than most jobs (2 ms on SQLite). Answers the aliases that are inside a
    transaction. It is called before and after each job, and its walk over the connections is a good part of what an
    empty job costs.
    """
    inside = set()
    for connection in connections.all(initialized_only=True):
        if not connection.force_debug_cursor:  # else somebody counts queries
            connection.queries_log.clear()
        if _in_transaction(connection):
            inside.add(connection.alias)
        elif connection.errors_occurred or connection.settings_dict["CONN_MAX_AGE"] != 0:
            _close_if_stale(connection)
        else:
            connection.health_check_done = False  # type: ignore[attr-defined]
    return inside


def rest_connections() -> None:
    """No job is left: close all that ``CONN_MAX_AGE`` does not keep."""
    for connection in connections.all(initialized_only=True):
        _close_if_stale(connection)


def drop_connections(aliases: set[str]) -> None:
    """Forget connections that a handler left inside a transaction; the server rolls back. Their wrappers go too: one
    closed inside ``atomic()`` still believes that it is in a transaction."""
    for alias in aliases:
        try:
            connections[alias].close()
        except Exception:
            logger.exception("connection %s, left inside a transaction, could not be closed", alias)
        del connections[alias]


def _close_if_stale(connection: BaseDatabaseWrapper) -> None:
    try:
        connection.close_if_unusable_or_obsolete()
    except Exception:
        logger.exception("connection %s could not be closed", connection.alias)


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Inside one that does not end by itself: ``atomic()``, autocommit switched off, or a BEGIN sent as a statement."""
    session = connection.connection
    if session is None:
        return False
    if connection.in_atomic_block or not connection.autocommit:
        return True
    if connection.vendor == "sqlite":
        return bool(session.in_transaction)
    if connection.vendor == "postgresql":
        return bool(session.info.transaction_status in _PG_IN_TRANSACTION)
    if connection.vendor == "mysql" and connection.mysql_is_mariadb:  # type: ignore[attr-defined]
        return _mariadb_in_transaction(connection)
    return False


def _mariadb_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    # The driver does not tell. Asked only of connections that jobs have opened, and past Django's log of queries.
    try:
        with closing(connection.connection.cursor()) as cursor:
            cursor.execute("SELECT @@in_transaction")
            return bool(cursor.fetchone()[0])
    except Exception:
        return False  # broken: _close_if_stale() sees to it
