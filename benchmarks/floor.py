"""The raw floor: the same rows worked off by plain driver SQL, one claim and one DELETE for each batch of 100."""

import time

from django.db import connection

_SKIP_LOCKED = "" if connection.vendor == "sqlite" else " FOR UPDATE SKIP LOCKED"
_HEADS = (
    "SELECT id FROM rws_jobs WHERE status = 'pending' AND queue = 'default' AND priority = 0 AND next_run_at <= {now}"
    " ORDER BY next_run_at, created_at, id LIMIT {batch}" + _SKIP_LOCKED
)


def drain(batch: int = 100) -> float:
    """Work the table off, and answer jobs per second."""
    connection.ensure_connection()
    cursor = connection.connection.cursor()
    heads = _HEADS.format(now=int(time.time()) + 1, batch=batch)
    mark = "?" if connection.vendor == "sqlite" else "%s"
    done, started = 0, time.perf_counter()
    while True:
        _begin(cursor)
        cursor.execute(heads)
        ids = [row[0] for row in cursor.fetchall()]
        if ids:
            among = _among(mark, len(ids))
            parameters = [ids] if connection.vendor == "postgresql" else ids
            cursor.execute(f"UPDATE rws_jobs SET status = 'running', claimed_by = 'floor' WHERE id {among}", parameters)
        cursor.execute("COMMIT")
        if not ids:
            return done / (time.perf_counter() - started)
        _begin(cursor)
        cursor.execute(f"DELETE FROM rws_jobs WHERE id {among}", parameters)
        cursor.execute("COMMIT")
        done += len(ids)


def _begin(cursor: object) -> None:
    cursor.execute("BEGIN IMMEDIATE" if connection.vendor == "sqlite" else "BEGIN")  # type: ignore[attr-defined]


def _among(mark: str, count: int) -> str:
    return "= ANY(%s)" if connection.vendor == "postgresql" else f"IN ({', '.join([mark] * count)})"
