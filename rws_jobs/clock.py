"""One clock: the database's. Hosts and web processes may disagree about the time, the table never does."""

import math
import time
from typing import Any, NamedTuple

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.sql.compiler import SQLCompiler

from .conf import conf


class UnixNow(models.Func):
    """The database's time in whole unix seconds, as an expression that an index can serve.

    ``UnixNow()`` is rounded down: a claim compares with the second that has begun. ``UnixNow(after=30)`` adds 30
    seconds to the fraction and rounds up: a delayed job never starts before its time. With ``RWS_JOBS["CLOCK"] =
    "local"`` it is this process's clock, for tests that freeze time.
    """

    output_field = models.BigIntegerField()

    def __init__(self, *, after: float | None = None) -> None:
        super().__init__()
        self.after = after

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *args: Any, **context: Any) -> Any:
        if conf().CLOCK == "local":
            now = time.time()
            return "%s", (math.floor(now) if self.after is None else math.ceil(now + self.after),)
        clock = _CLOCKS[connection.vendor]
        return (clock.begun, ()) if self.after is None else (clock.soonest, (self.after,))


class _Clock(NamedTuple):
    exact: str
    begun: str
    soonest: str


_CLOCKS = {
    "postgresql": _Clock(
        exact="EXTRACT(EPOCH FROM statement_timestamp())",
        begun="FLOOR(EXTRACT(EPOCH FROM statement_timestamp()))::bigint",
        soonest="CEIL(EXTRACT(EPOCH FROM statement_timestamp()) + %s)::bigint",
    ),
    # Not UNIX_TIMESTAMP(NOW()): it is an hour wrong during the hour that the clocks repeat.
    "mysql": _Clock(
        exact="TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1000000",
        begun="TIMESTAMPDIFF(SECOND, '1970-01-01', UTC_TIMESTAMP())",
        soonest="CEILING(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1000000 + %s)",
    ),
    # A julian day is a double that misses the millisecond by some 20 µs: rounded to the millisecond first, adding a
    # little less than one and cutting off is then an exact ceiling (SQLite may be built without CEIL).
    "sqlite": _Clock(
        exact="ROUND((julianday('now') - 2440587.5) * 86400.0, 3)",
        begun="CAST(ROUND((julianday('now') - 2440587.5) * 86400.0, 3) AS INTEGER)",
        soonest="CAST(ROUND((julianday('now') - 2440587.5) * 86400.0 + %s, 3) + 0.9995 AS INTEGER)",
    ),
}


def now(using: str) -> float:
    """The database's time in unix seconds, asked once."""
    if conf().CLOCK == "local":
        return time.time()
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute("SELECT " + _CLOCKS[connection.vendor].exact)
        return float(cursor.fetchone()[0])
