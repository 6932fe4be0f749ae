"""How a table that another program has made becomes ours.

Invariants: no row is lost; the schema that results is a fresh one's; each step looks at what is there, so that a run
cut short on MariaDB, where no transaction takes DDL back, is completed by the next. Except on SQLite the table stays
the same table: other programs' grants, views and triggers hang on it.
"""

import logging
from contextlib import suppress
from typing import Any

from django.core.management import CommandError
from django.db import IntegrityError, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models.functions import SHA256, Length, RowNumber
from django.db.models.signals import post_migrate

from .text import JOB_TYPE_LENGTH, UNIQUE_KEY_LENGTH

logger = logging.getLogger("rws_jobs")
_BATCH_ROWS, _IDS_NAMED = 500, 20


def adopt(model: type[models.Model], editor: BaseDatabaseSchemaEditor) -> None:
    """Make the table that stands in this model's place what the model says, and keep its rows."""
    adoptions = {"sqlite": SQLiteAdoption, "postgresql": PostgreSQLAdoption, "mysql": MySQLAdoption}
    adoptions[editor.connection.vendor](model, editor).run()


class Adoption:
    """An existing table on its way to what the model says: what is the same on every database."""

    def __init__(self, model: type[models.Model], editor: BaseDatabaseSchemaEditor) -> None:
        self.model, self.editor, self.connection = model, editor, editor.connection
        self.name, self.table = model._meta.db_table, editor.quote_name(model._meta.db_table)
        self.rows = model._base_manager.using(self.connection.alias)
        with self.connection.cursor() as cursor:
            there = {column.name for column in self.connection.introspection.get_table_description(cursor, self.name)}
        fields: list[Any] = list(model._meta.local_fields)
        self.plain = [field for field in fields if not field.generated]
        self.present = [field for field in self.plain if field.column in there]
        self.missing = [field for field in self.plain if field.column not in there]
        self.to_generate = [field for field in fields if field.generated and field.column not in there]

    def run(self) -> None:
        self.refuse_a_stranger()
        self.release_long_keys()
        self.fill_nulls()
        self.settle_columns()
        self.complete()

    def refuse_a_stranger(self) -> None:
        """A column that has no value for the rows that are there cannot be added: this is some other table."""
        lacking = [field.column for field in self.missing if not field.null and not field.has_db_default()]
        if lacking:
            raise CommandError(
                f"There is a table {self.name} already, but not one of this job queue: it has no column "
                f"{' or '.join(lacking)}. Nothing was changed. Rename it, or use another database."
            )

    def release_long_keys(self) -> None:
        if any(field.column == "unique_key" for field in self.present):
            lengths = {"type_length": Length("job_type"), "key_length": Length("unique_key")}
            too_long = models.Q(type_length__gt=JOB_TYPE_LENGTH) | models.Q(key_length__gt=UNIQUE_KEY_LENGTH)
            self.release(
                self.rows.exclude(unique_key=None).annotate(**lengths).filter(too_long),
                f"their job type or key is longer than {JOB_TYPE_LENGTH} or {UNIQUE_KEY_LENGTH} characters",
            )

    def fill_nulls(self) -> None:
        """What a hand-made table lets be NULL becomes what an INSERT without it would have got."""
        for field in self.present:
            if field.null or field.primary_key:
                continue
            # A time has no default that were a good guess: the database refuses, and names the column.
            if default := self.default(field) or ("''" if isinstance(field, models.TextField) else None):
                column = self.editor.quote_name(field.column)
                self.execute(f"UPDATE {self.table} SET {column} = {default} WHERE {column} IS NULL")

    def settle_columns(self) -> None:
        """Add what is missing, in the model's order, and make the other columns what they are in a fresh table."""
        # One statement: a large table is copied at most once, and on MariaDB too it is all or nothing.
        self.alter(*self.changes(), *(f"ADD COLUMN {self.definition(field)}" for field in self.missing))

    def changes(self) -> list[str]:
        raise NotImplementedError

    def complete(self) -> None:
        """Add the live key and the indexes."""
        for field in self.to_generate:
            self.release_taken_keys(field)
            self.editor.add_field(self.model, field)
        with self.connection.cursor() as cursor:
            there = self.connection.introspection.get_constraints(cursor, self.name)
        for index in self.model._meta.indexes:
            if index.name not in there:
                self.editor.add_index(self.model, index)

    def release_taken_keys(self, live_key: Any) -> None:
        live = self.rows.filter(status__in=["pending", "running"])
        key = live_key.expression  # Exactly what the database is going to compare.
        if self.connection.vendor == "mysql":
            # By its bytes, and by all of them: rows are sorted by 1,024 at most (max_sort_length).
            key = SHA256(key)
        # Backwards in the alphabet, running comes before pending.
        place = models.Window(RowNumber(), partition_by=[key], order_by=["-status", "created_at", "pk"])
        self.release(
            live.exclude(unique_key=None).annotate(place=place).filter(place__gt=1),
            "another live job of their type, a running or an older one, has the same key",
        )

    def release(self, jobs: "models.QuerySet[Any]", reason: str) -> None:
        """Take the unique keys of these jobs. Told first: a run cut short in between must not keep it to itself."""
        if ids := list(jobs.values_list("pk", flat=True)):
            more = f" and {len(ids) - _IDS_NAMED} more" if len(ids) > _IDS_NAMED else ""
            named = ", ".join(map(str, ids[:_IDS_NAMED])) + more
            _tell(f"Jobs in {self.name} that are kept, but without their unique key, because {reason}: {named}.")
        for start in range(0, len(ids), _BATCH_ROWS):
            self.rows.filter(pk__in=ids[start : start + _BATCH_ROWS]).update(unique_key=None)

    def default(self, field: Any) -> str | None:
        return self.literal(*self.editor.db_default_sql(field)) if field.has_db_default() else None

    def definition(self, field: Any) -> str:
        # The primary key is there: named again, it would be a second one.
        sql = self.literal(*self.editor.column_sql(self.model, field)).removesuffix(" PRIMARY KEY")
        return f"{self.editor.quote_name(field.column)} {sql}"

    def literal(self, sql: Any, params: Any) -> str:
        return str(sql % tuple(map(self.editor.quote_value, params)) if params else sql)

    def alter(self, *changes: str) -> None:
        self.execute(f"ALTER TABLE {self.table} {', '.join(changes)}")

    def execute(self, sql: str) -> None:
        self.editor.execute(sql, None)


class PostgreSQLAdoption(Adoption):
    """In the migration's transaction, behind a lock: nobody writes between the look at the rows and the constraint."""

    def run(self) -> None:
        self.execute(f"LOCK TABLE {self.table} IN ACCESS EXCLUSIVE MODE")
        # With another program's deferred triggers pending on its rows, a table cannot be altered.
        self.execute("SET CONSTRAINTS ALL IMMEDIATE")
        super().run()

    def changes(self) -> list[str]:
        with self.connection.cursor() as cursor:
            cursor.execute(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute JOIN pg_type t ON t.oid = atttypid"
                " WHERE attrelid = %s::regclass AND attcollation = typcollation",
                [self.table],
            )
            types = dict(cursor.fetchall())
        changes = []
        for field in self.present:
            column = f"ALTER COLUMN {self.editor.quote_name(field.column)}"
            wanted = str(field.db_type(self.connection)).replace("varchar", "character varying")
            # Views and generated columns on a column forbid to state its type again, even the same.
            if types.get(field.column) != wanted:
                changes.append(f"{column} TYPE {wanted}")
            default = f"SET DEFAULT {self.default(field)}" if field.has_db_default() else "DROP DEFAULT"
            changes += [f"{column} {default}", f"{column} {'DROP' if field.null else 'SET'} NOT NULL"]
        return changes


class MySQLAdoption(Adoption):
    """Statement by statement, each of them whole."""

    def run(self) -> None:
        # Outside strict mode, a text that is too long for its new column would be cut off without a word.
        self.execute("SET @rws_jobs_sql_mode = @@sql_mode, sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')")
        try:
            super().run()
        finally:
            self.execute("SET sql_mode = @rws_jobs_sql_mode")

    def changes(self) -> list[str]:
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT @@character_set_database, @@collation_database")
            character_set, collation = cursor.fetchone()
        whole = f"DEFAULT CHARACTER SET {character_set} COLLATE {collation}"
        return [whole, *(f"MODIFY {self.definition(field)}" for field in self.present)]

    def complete(self) -> None:
        for _ in range(2):
            # Another program may enqueue a key a second time between the look and the constraint.
            with suppress(IntegrityError):
                return super().complete()
        return super().complete()


class SQLiteAdoption(Adoption):
    """The rows move into a new table: SQLite can neither change a column nor add one that is generated and stored."""

    def run(self) -> None:
        # Views, triggers and foreign keys that name the table go on naming it, and not the old one on its way out.
        self.execute("PRAGMA legacy_alter_table = ON")
        try:
            super().run()
        finally:
            self.execute("PRAGMA legacy_alter_table = OFF")

    def settle_columns(self) -> None:
        for field in self.missing:
            self.alter(f"ADD COLUMN {self.definition(field)}")

    def complete(self) -> None:
        for field in self.to_generate:
            self.release_taken_keys(field)
        hung_on, foreign = self.indexes_and_triggers_of_others(), self.columns_of_others()
        old = self.editor.quote_name(f"{self.name}__original")
        self.alter(f"RENAME TO {old}")
        self.editor.create_model(self.model)
        for name, definition in foreign.items():
            self.alter(f"ADD COLUMN {name} {definition}")
        columns = ", ".join([*(self.editor.quote_name(field.column) for field in self.plain), *foreign])
        self.execute(f"INSERT INTO {self.table} ({columns}) SELECT {columns} FROM {old}")
        self.execute(f"DROP TABLE {old}")
        for sql in hung_on:
            self.execute(sql)

    def indexes_and_triggers_of_others(self) -> list[str]:
        ours = {index.name for index in self.model._meta.indexes}
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT name, sql FROM sqlite_master WHERE tbl_name = %s AND type <> 'table'", [self.name])
            return [sql for name, sql in cursor.fetchall() if sql and name not in ours]

    def columns_of_others(self) -> dict[str, str]:
        ours = {field.column for field in self.model._meta.local_fields}
        with self.connection.cursor() as cursor:
            cursor.execute(f"PRAGMA table_info({self.table})")
            found = [column[1:5] for column in cursor.fetchall() if column[1] not in ours]
        return {
            self.editor.quote_name(name): f"{kind}{' NOT NULL' * not_null} DEFAULT ({default or 'NULL'})"
            for name, kind, not_null, default in found
        }


def _tell(what: str) -> None:
    """In the log at once, and at the end of the migrate command's output."""
    logger.warning(what)

    def write(stdout: Any = None, verbosity: int = 1, **kwargs: Any) -> None:
        post_migrate.disconnect(write)
        if stdout is not None and verbosity:
            stdout.write(what)

    post_migrate.connect(write, weak=False)
