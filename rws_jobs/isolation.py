"""Connections between two jobs: as a request would find and leave them.

Those inside a caller's ``atomic()``, as in a TestCase, stay as they are.
"""

import logging

from django.db import close_old_connections, connections, reset_queries

logger = logging.getLogger("rws_jobs")


def refresh_connections() -> None:
    """Close what is broken or too old, have the rest checked before its next use, forget logged queries."""
    try:
        close_old_connections()
        reset_queries()
    except Exception:
        logger.exception("a connection could not be closed")


def open_connections() -> set[str]:
    """Aliases inside a transaction that does not end by itself: ``atomic()``, or autocommit switched off."""
    return {
        connection.alias
        for connection in connections.all(initialized_only=True)
        if connection.connection is not None and (connection.in_atomic_block or not connection.autocommit)
    }


def drop_connections(aliases: set[str]) -> None:
    """Forget connections that a handler left inside a transaction; the server rolls back. Their wrappers go too: one
    closed inside ``atomic()`` still believes that it is in a transaction."""
    for alias in aliases:
        try:
            connections[alias].close()
        except Exception:
            logger.exception("connection %s, left inside a transaction, could not be closed", alias)
        del connections[alias]
