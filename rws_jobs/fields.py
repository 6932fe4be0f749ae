"""Key columns: compared byte by byte on every database, and indexed once."""

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.sql.compiler import SQLCompiler


class _Binary(models.Field):  # type: ignore[type-arg]
    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters: dict[str, Any] = dict(super().db_parameters(connection))
        if connection.vendor == "mysql":
            mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
            parameters["collation"] = "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"
        return parameters


class KeyTextField(_Binary, models.TextField):  # type: ignore[type-arg]
    """A name without a limit, the job type, that compares as a :class:`KeyField` does."""


class KeyField(_Binary, models.CharField):  # type: ignore[type-arg]
    """A short identifier: job id, queue name, unique key.

    On MySQL and MariaDB it compares binary without padding: with a default collation ``Mail`` and ``mail`` would be one
    queue, and with plain ``_bin`` so would ``mail`` and ``mail `` (blanks at the end). On PostgreSQL it makes no
    ``text_pattern_ops`` twin of its index, which nothing here would use and every insert would pay for.
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        # The same type by its full name: PostgreSQL's twin index is made, and MySQL's warning of unique columns beyond
        # 255 characters (which end long before the 3,072 bytes of an index) is given, for types that begin "varchar".
        return f"character varying({self.max_length})"

    def cast_db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        return self.db_type(connection) if connection.vendor == "postgresql" else super().cast_db_type(connection)


class GeneratedKeyField(models.GeneratedField):
    """A key that the database computes from other columns."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        # Django's own knows only that it is some CharField, answers "varchar", and the twin index is there again.
        return self.output_field.db_type(connection)  # type: ignore[union-attr]


@KeyField.register_lookup
class AnyOf(models.Lookup):
    """``pk__any=[…]``: one of these keys, which are plain strings.

    What ``__in`` means, for lists of hundreds: Django prepares each value of an ``__in`` by itself, and psycopg
    parses a placeholder for each (some 2 ms for 256, under a profiler). On PostgreSQL it is one array.
    """

    lookup_name = "any"
    prepare_rhs = False

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        column, params = self.process_lhs(compiler, connection)
        keys = list(self.rhs)
        placeholders = ", ".join(["%s"] * len(keys)) or "NULL"
        return f"{column} IN ({placeholders})", (*params, *keys)

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, Any]:
        column, params = self.process_lhs(compiler, connection)
        return f"{column} = ANY(%s)", (*params, list(self.rhs))
