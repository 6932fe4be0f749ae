"""The original, as another program on the same tables: its DDL and its statements, written out, and nothing of ours."""

from typing import Any

from django.db import connection

NINE_COLUMNS = """
CREATE TABLE rws_jobs (
    id VARCHAR(64) PRIMARY KEY,
    job_type TEXT NOT NULL,
    payload TEXT NOT NULL,
    status VARCHAR(16) NOT NULL DEFAULT 'pending',
    attempts INTEGER NOT NULL DEFAULT 0,
    max_retries INTEGER NOT NULL DEFAULT 3,
    next_run_at BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    last_error TEXT
)
"""

TWELVE_COLUMNS = """
CREATE TABLE rws_jobs (
    id VARCHAR(64) PRIMARY KEY,
    job_type TEXT NOT NULL,
    payload TEXT NOT NULL,
    status VARCHAR(16) NOT NULL DEFAULT 'pending',
    attempts INTEGER NOT NULL DEFAULT 0,
    max_retries INTEGER NOT NULL DEFAULT 3,
    next_run_at BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    last_error TEXT,
    queue VARCHAR(64) NOT NULL DEFAULT 'default',
    priority BIGINT NOT NULL DEFAULT 0,
    unique_key VARCHAR(191)
)
"""

# Made by hand after its documentation, by somebody who was sparing with NOT NULL.
HAND_MADE = """
CREATE TABLE rws_jobs (
    id VARCHAR(64) PRIMARY KEY,
    job_type TEXT NOT NULL,
    payload TEXT DEFAULT '',
    status TEXT DEFAULT 'pending',
    attempts INTEGER DEFAULT 0,
    max_retries INTEGER DEFAULT 3,
    next_run_at INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    last_error TEXT,
    queue TEXT,
    priority INTEGER,
    unique_key TEXT
)
"""

SCHEDULES = "CREATE TABLE rws_job_schedules (name VARCHAR(191) PRIMARY KEY, next_run_at BIGINT NOT NULL)"

INSERT = (
    "INSERT INTO rws_jobs (id, job_type, payload, status, attempts, max_retries, next_run_at, created_at)"
    " VALUES (%s, %s, %s, 'pending', 0, 3, %s, %s)"
)
INSERT_ALL = (
    "INSERT INTO rws_jobs (id, job_type, payload, status, attempts, max_retries, next_run_at, created_at,"
    " queue, priority, unique_key) VALUES (%s, %s, %s, 'pending', 0, %s, %s, %s, %s, %s, %s)"
)
LIVE = (
    "SELECT id FROM rws_jobs WHERE job_type = %s AND unique_key = %s AND status IN ('pending', 'running')"
    " ORDER BY created_at LIMIT 1"
)
CANDIDATE = (
    "SELECT id, job_type, payload, attempts, max_retries, created_at, queue, priority, unique_key FROM rws_jobs"
    " WHERE status = 'pending' AND next_run_at <= %s ORDER BY priority DESC, next_run_at ASC, created_at ASC LIMIT 1"
)
CLAIM = "UPDATE rws_jobs SET status = 'running' WHERE id = %s AND status = 'pending'"
FINISH = "DELETE FROM rws_jobs WHERE id = %s"
RETRY = "UPDATE rws_jobs SET status = 'pending', attempts = %s, next_run_at = %s, last_error = %s WHERE id = %s"
BURY = "UPDATE rws_jobs SET status = 'failed', attempts = %s, last_error = %s WHERE id = %s"
REVIVE = "UPDATE rws_jobs SET status = 'pending', attempts = 0, next_run_at = %s WHERE id = %s AND status = 'failed'"
DELETE = "DELETE FROM rws_jobs WHERE id = %s AND status <> 'running'"
RECOVER = "UPDATE rws_jobs SET status = 'pending' WHERE status = 'running'"

SCHEDULE_DUE = "SELECT next_run_at FROM rws_job_schedules WHERE name = %s"
SCHEDULE_SEEN = "INSERT INTO rws_job_schedules (name, next_run_at) VALUES (%s, %s)"
SCHEDULE_TAKEN = "UPDATE rws_job_schedules SET next_run_at = %s WHERE name = %s AND next_run_at = %s"


def run(sql: str, *params: Any) -> int:
    """Execute a statement; answer how many rows it changed."""
    with connection.cursor() as cursor:
        cursor.execute(sql, params or None)
        return int(cursor.rowcount)


def ask(sql: str, *params: Any) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    with connection.cursor() as cursor:
        cursor.execute(sql, params or None)
        return [tuple(row) for row in cursor.fetchall()]
