"""The first migration creates the tables or adopts the original's, on every database, and loses nothing."""

import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import (
    DataError,
    IntegrityError,
    OperationalError,
    connection,
    connections,
    migrations,
    models,
    transaction,
)
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.optimizer import MigrationOptimizer
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter

from rws_jobs.models import Job, JobSchedule
from rws_jobs.operations import CreateOrAdopt

from . import original
from .original import ask, run

pytestmark = pytest.mark.django_db(transaction=True)

SQLITE, POSTGRESQL, MARIADB = (connection.vendor == vendor for vendor in ("sqlite", "postgresql", "mysql"))
OURS = sorted(model._meta.db_table for model in apps.get_app_config("rws_jobs").get_models() if not model._meta.proxy)
DDL = {"12 columns": original.TWELVE_COLUMNS, "9 columns": original.NINE_COLUMNS}
both = pytest.mark.parametrize("ddl", DDL.values(), ids=DDL)


def migrate(*args: str, **options: Any) -> str:
    """Run the command for real; answer what it printed."""
    out = StringIO()
    call_command("migrate", *args, stdout=out, stderr=out, interactive=False, **options)
    return out.getvalue()


def tables() -> list[str]:
    return [name for name in connection.introspection.table_names() if name.startswith("rws_")]


def schema() -> dict[str, Any]:
    """What the database itself says of the tables whose names begin with rws_: columns, keys, indexes, all of it."""
    if SQLITE:
        described = {
            f"{kind} {name}": sql
            for kind, name, sql in ask(
                "SELECT type, name, sql FROM sqlite_master WHERE tbl_name LIKE 'rws!_%%' ESCAPE '!'"
            )
        }
        for table in tables():
            described[f"columns of {table}"] = ask(f"PRAGMA table_xinfo({table})")
            described[f"indexes of {table}"] = sorted(row[1:] for row in ask(f"PRAGMA index_list({table})"))
        return described
    if MARIADB:
        return {table: ask(f"SHOW CREATE TABLE {table}") for table in tables()}
    return {
        "columns": ask(
            """
            SELECT c.relname, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum), a.attname,
                   format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attgenerated, a.attidentity,
                   pg_get_expr(d.adbin, d.adrelid), l.collname, a.attstorage
            FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
            LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
            LEFT JOIN pg_collation l ON l.oid = a.attcollation
            WHERE c.relname LIKE 'rws!_%' ESCAPE '!' AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
            ORDER BY 1, 2
            """
        ),
        "indexes": ask(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename LIKE 'rws!_%' ESCAPE '!' ORDER BY 1"
        ),
        "constraints": ask(
            "SELECT conrelid::regclass::text, conname, contype::text, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE conrelid::regclass::text LIKE 'rws!_%' ESCAPE '!' ORDER BY 1, 2"
        ),
    }


def drop_everything() -> None:
    """Drop whatever stands in the place of our tables, views on them and copies of them included."""
    cascade = " CASCADE" if POSTGRESQL else ""
    with connection.cursor() as cursor:
        found = connection.introspection.get_table_list(cursor)
    for kind in ("v", "t"):
        for table in found:
            if table.type == kind and table.name.startswith(("rws_", "their_")):
                run(f"DROP {'VIEW' if kind == 'v' else 'TABLE'} IF EXISTS {table.name}{cascade}")


def forget() -> None:
    """As if the migration had not been run: the tables stay."""
    MigrationRecorder(connection).migration_qs.filter(app="rws_jobs").delete()


def apply() -> None:
    """Run the migration as the command does, but without the permissions that it makes afterwards."""
    MigrationExecutor(connection).migrate([("rws_jobs", "0001_initial")])


@pytest.fixture
def fresh(transactional_db: None) -> Iterator[dict[str, Any]]:
    """A database without our tables: what the fresh schema was. However the test ends, it is so again afterwards."""
    described = schema()
    drop_everything()
    forget()
    try:
        yield described
    finally:
        drop_everything()
        forget()
        migrate("rws_jobs", verbosity=0)


def insert_in_every_status(ddl: str) -> list[tuple[Any, ...]]:
    """Rows as the original leaves them; answer all of them in all columns."""
    nine = [
        ("18c0-0", "mail", '{"to": "ünïcode ☃"}', "pending", 0, 3, 1_700_000_000, 1_600_000_000, None),
        ("18c0-1", "mail", "", "running", 1, 3, 1_700_000_001, 1_600_000_001, "timed out"),
        ("18c0-2", "bill", "100 % sure", "failed", 4, 3, 1_700_000_002, 1_600_000_002, "no handler registered"),
        ("18c0-3", "bill", "x" * 60_000, "pending", 2, 2**31 - 1, 4_700_000_003, 1_600_000_003, "e" * 60_000),
    ]
    three = [("default", 0, None), ("mailers", -5, "k"), ("Mailers", 2**63 - 1, "k"), ("mailers ", 10, "K ")]
    for row, rest in zip(nine, three, strict=True):
        values = row if ddl is original.NINE_COLUMNS else row + rest
        run(f"INSERT INTO rws_jobs VALUES ({', '.join(['%s'] * len(values))})", *values)
    return [
        row + (("default", 0, None) if ddl is original.NINE_COLUMNS else rest)
        for row, rest in zip(nine, three, strict=True)
    ]


def the_originals_columns() -> list[tuple[Any, ...]]:
    return ask(
        "SELECT id, job_type, payload, status, attempts, max_retries, next_run_at, created_at, last_error, queue,"
        " priority, unique_key FROM rws_jobs ORDER BY created_at"
    )


# -- creates or adopts


def test_without_tables_it_creates_them(fresh: dict[str, Any]) -> None:
    assert tables() == []
    migrate("rws_jobs")
    assert tables() == OURS
    assert schema() == fresh


@both
def test_it_adopts_the_originals_tables_with_all_their_rows(fresh: dict[str, Any], ddl: str) -> None:
    run(ddl)
    run(original.SCHEDULES)
    rows = insert_in_every_status(ddl)
    run(original.SCHEDULE_SEEN, "nightly", 1_700_000_000)

    printed = migrate("rws_jobs")

    assert the_originals_columns() == rows
    assert schema() == fresh
    assert "unique key" not in printed
    assert JobSchedule.objects.values_list().get() == (
        ("nightly", 1_700_000_000, None, "UTC", None, None, None, False, None)
    )
    assert list(Job.objects.order_by("pk").values_list("claimed_by", "claimed_at", "history", "meta")) == [
        (None, None, None, None)
    ] * len(rows)


@both
def test_only_one_of_the_originals_tables(fresh: dict[str, Any], ddl: str) -> None:
    run(original.SCHEDULES)
    migrate("rws_jobs")
    assert schema() == fresh
    drop_everything()
    forget()
    run(ddl)
    migrate("rws_jobs")
    assert schema() == fresh


@both
def test_run_twice_it_changes_nothing(fresh: dict[str, Any], ddl: str) -> None:
    run(ddl)
    run(original.SCHEDULES)
    rows = insert_in_every_status(ddl)
    migrate("rws_jobs")
    assert "No migrations to apply" in migrate("rws_jobs")
    forget()
    assert "Applying rws_jobs.0001_initial... OK" in migrate("rws_jobs")
    assert the_originals_columns() == rows
    assert schema() == fresh


def test_our_own_tables_are_adopted_with_every_column(fresh: dict[str, Any]) -> None:
    migrate("rws_jobs")
    job = Job(id="a", job_type="t", payload="p", next_run_at=1, created_at=2, unique_key="k", claimed_by="w", meta="{}")
    job.save(force_insert=True)
    before = ask("SELECT * FROM rws_jobs")
    forget()
    migrate("rws_jobs")
    assert ask("SELECT * FROM rws_jobs") == before
    assert schema() == fresh


def test_a_table_made_by_hand_is_adopted_too(fresh: dict[str, Any]) -> None:
    run(original.HAND_MADE)
    run(original.INSERT, "a", "mail", "p", 1, 1)
    run(
        "INSERT INTO rws_jobs (id, job_type, payload, status, attempts, max_retries, next_run_at, created_at)"
        " VALUES ('b', 'mail', NULL, NULL, NULL, NULL, 2, 2)"
    )
    run("UPDATE rws_jobs SET queue = 'mailers', priority = 7, unique_key = 'k' WHERE id = 'a'")
    migrate("rws_jobs")
    assert the_originals_columns() == [
        ("a", "mail", "p", "pending", 0, 3, 1, 1, None, "mailers", 7, "k"),
        ("b", "mail", "", "pending", 0, 3, 2, 2, None, "default", 0, None),
    ]
    assert schema() == fresh


@pytest.mark.skipif(not MARIADB, reason="only there a table has a character set")
@both
def test_a_table_in_an_older_character_set_is_adopted_too(fresh: dict[str, Any], ddl: str) -> None:
    run(ddl + " DEFAULT CHARACTER SET latin1")
    run(original.SCHEDULES + " DEFAULT CHARACTER SET latin1")
    run(original.INSERT, "a", "mail", "ünïcode", 1, 1)
    migrate("rws_jobs")
    assert schema() == fresh
    assert Job.objects.get().payload == "ünïcode"
    run("UPDATE rws_jobs SET payload = %s", "☃ 𝄞")
    assert Job.objects.get().payload == "☃ 𝄞"


def test_a_text_too_long_for_its_new_column_is_not_cut_off(fresh: dict[str, Any]) -> None:
    run(original.HAND_MADE)
    add("a", "waiting for someone", key=None)
    if MARIADB:
        run("SET sql_mode = 'NO_ENGINE_SUBSTITUTION'")
    try:
        migrate("rws_jobs")
    except DataError:
        assert not SQLITE
    else:
        assert SQLITE  # It knows no lengths.
    finally:
        if MARIADB:
            assert ask("SELECT @@sql_mode") == [("NO_ENGINE_SUBSTITUTION",)]
            connection.close()
    assert ask("SELECT status FROM rws_jobs") == [("waiting for someone",)]


def test_a_job_without_a_due_time_is_not_given_one(fresh: dict[str, Any]) -> None:
    run(original.HAND_MADE.replace("next_run_at INTEGER NOT NULL", "next_run_at INTEGER"))
    run("INSERT INTO rws_jobs (id, job_type, created_at) VALUES ('a', 'mail', 1)")
    with pytest.raises((IntegrityError, DataError), match="next_run_at"):
        migrate("rws_jobs")
    assert ask("SELECT id, next_run_at FROM rws_jobs") == [("a", None)]
    run("UPDATE rws_jobs SET next_run_at = 5")
    migrate("rws_jobs")
    assert schema() == fresh


def test_fake_initial_adopts_as_well(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    run(original.SCHEDULES)
    rows = insert_in_every_status(original.TWELVE_COLUMNS)
    assert "FAKED" not in migrate("rws_jobs", fake_initial=True)
    assert the_originals_columns() == rows
    assert schema() == fresh


def test_fake_initial_creates_as_well(fresh: dict[str, Any]) -> None:
    migrate("rws_jobs", fake_initial=True)
    assert schema() == fresh


# -- one live job per type and key


def add(id: str, status: str = "pending", *, key: str | None = "k", job_type: str = "mail", created: int = 1) -> None:
    run(original.INSERT_ALL, id, job_type, "", 3, 1, created, "default", 0, key)
    run("UPDATE rws_jobs SET status = %s WHERE id = %s", status, id)


def keys() -> dict[str, str | None]:
    return dict(ask("SELECT id, unique_key FROM rws_jobs"))


def test_of_live_jobs_with_one_key_the_running_one_keeps_it(
    fresh: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run(original.TWELVE_COLUMNS)
    add("older", created=1)
    add("dead", "failed", created=0)
    add("dead too", "failed", created=0)
    add("running", "running", created=5)
    add("younger", created=9)
    add("other type", job_type="bill")
    add("other key", key="K")
    add("third key", key="k ")
    rows = len(keys())

    with caplog.at_level(logging.WARNING, "rws_jobs"):
        printed = migrate("rws_jobs")

    kept = {"dead": "k", "dead too": "k", "running": "k", "other type": "k", "other key": "K", "third key": "k "}
    assert keys() == {"older": None, "younger": None, **kept}
    assert len(keys()) == rows
    assert schema() == fresh
    (record,) = caplog.records
    for text in (record.getMessage(), printed):
        (sentence,) = (line for line in text.splitlines() if "unique key" in line)
        assert "older, younger." in sentence
        assert not any(name in sentence for name in ("dead", "running,", "other type", "third"))


def test_of_pending_jobs_with_one_key_the_oldest_keeps_it(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    add("a", created=5)
    add("c", created=4)
    add("b", created=4)
    add("d", created=6)
    migrate("rws_jobs")
    assert keys() == {"a": None, "b": "k", "c": None, "d": None}


def test_of_running_jobs_with_one_key_the_oldest_keeps_it(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    add("waits", created=1)
    add("second", "running", created=3)
    add("first", "running", created=2)
    migrate("rws_jobs")
    assert keys() == {"waits": None, "first": "k", "second": None}


def test_what_the_database_compares_is_what_counts(fresh: dict[str, Any]) -> None:
    """The live key is type, line end, key: with a line end in the type, two pairs make one live key."""
    run(original.TWELVE_COLUMNS)
    add("a", job_type="x\ny", key="z", created=1)
    add("b", job_type="x", key="y\nz", created=2)
    migrate("rws_jobs")
    assert keys() == {"a": "z", "b": None}


def test_the_longest_keys_are_compared_to_their_ends(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    for created in range(20):
        add(f"{created:02}", key="𝄞" * 190 + "xyz"[created % 3], job_type="𝄞" * 255, created=created)
    migrate("rws_jobs")
    assert sorted(id for id, key in keys().items() if key) == ["00", "01", "02"]


def test_keys_in_a_collation_without_case_are_compared_byte_by_byte(fresh: dict[str, Any]) -> None:
    collation = {"sqlite": "NOCASE", "postgresql": '"C"', "mysql": "utf8mb4_unicode_ci"}[connection.vendor]
    ddl = original.TWELVE_COLUMNS.replace("TEXT", f"TEXT COLLATE {collation}")
    run(ddl.replace("(64)", f"(64) COLLATE {collation}").replace("(191)", f"(191) COLLATE {collation}"))
    expected = {}
    for id, (job_type, key) in enumerate([("mail", "k"), ("Mail", "k"), ("mail", "K"), ("mail", "k "), ("mail ", "k")]):
        add(str(id), key=key, job_type=job_type)
        expected[str(id)] = key
    migrate("rws_jobs")
    assert keys() == expected
    assert schema() == fresh


@pytest.mark.parametrize("status", ["pending", "running", "failed"])
def test_a_job_type_too_long_for_a_key_loses_the_key(fresh: dict[str, Any], status: str) -> None:
    run(original.TWELVE_COLUMNS)
    add("long", status, job_type="ü" * 256)
    add("fits", status, job_type="ü" * 255, key="ü" * 191)
    add("keyless", status, job_type="ü" * 9_000, key=None)
    printed = migrate("rws_jobs")
    assert keys() == {"long": None, "fits": "ü" * 191, "keyless": None}
    assert "255" in printed
    assert ": long." in printed
    assert schema() == fresh


def test_a_key_too_long_for_its_column_is_lost_and_its_job_is_not(fresh: dict[str, Any]) -> None:
    run(original.HAND_MADE)
    add("long", key="k" * 192)
    add("fits", key="k" * 191)
    assert ": long." in migrate("rws_jobs")
    assert keys() == {"long": None, "fits": "k" * 191}


def test_the_report_names_some_and_counts_the_others(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    with transaction.atomic():
        for number in range(521):
            add(f"id-{number:03}", created=number)
    printed = migrate("rws_jobs")
    assert keys() == {f"id-{number:03}": None if number else "k" for number in range(521)}
    assert "id-001, id-002" in printed
    assert "and 500 more" in printed
    assert printed.count("id-") == 20


def test_the_report_is_printed_once(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    add("a")
    add("b")
    assert migrate("rws_jobs").count("unique key") == 1
    assert "unique key" not in migrate("rws_jobs")


# -- what it leaves alone


@pytest.mark.parametrize("columns", ["id VARCHAR(64) PRIMARY KEY, payload TEXT", "job_type INTEGER", "id INTEGER"])
def test_a_table_that_is_something_else_is_refused_and_left(fresh: dict[str, Any], columns: str) -> None:
    run(f"CREATE TABLE rws_jobs ({columns})")
    before = schema()
    with pytest.raises(CommandError, match=r"table rws_jobs .* no column .*created_at\b"):
        migrate("rws_jobs")
    assert schema() == before
    assert tables() == ["rws_jobs"]


def test_what_other_programs_hang_on_the_table_survives(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    run("ALTER TABLE rws_jobs ADD COLUMN their_note VARCHAR(20) DEFAULT '50 % off' NOT NULL")
    run("CREATE INDEX their_index ON rws_jobs (their_note)")
    run("CREATE VIEW their_view AS SELECT id, status, unique_key, their_note FROM rws_jobs")
    run("CREATE TABLE their_log (id VARCHAR(64))")
    if POSTGRESQL:
        run("GRANT SELECT ON rws_jobs TO PUBLIC")
        run("CREATE OR REPLACE FUNCTION their_function() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN INSERT INTO their_log VALUES (OLD.id); RETURN OLD; END'")  # fmt: skip
        run("CREATE TRIGGER their_trigger AFTER DELETE ON rws_jobs FOR EACH ROW EXECUTE FUNCTION their_function()")
        before = ask("SELECT oid, relacl::text FROM pg_class WHERE relname = 'rws_jobs'")
    else:
        each = "BEGIN INSERT INTO their_log VALUES (OLD.id); END"
        run(f"CREATE TRIGGER their_trigger AFTER DELETE ON rws_jobs FOR EACH ROW {each}")
    rows = insert_with_note()

    migrate("rws_jobs")

    assert ask("SELECT id, their_note FROM their_view ORDER BY id") == rows
    assert ask("SELECT id FROM their_log") == []
    run(original.FINISH, "b")
    assert ask("SELECT id FROM their_log") == [("b",)]
    run(original.INSERT, "c", "mail", "", 1, 1)
    assert ask("SELECT their_note FROM their_view WHERE id = 'c'") == [("50 % off",)]
    with connection.cursor() as cursor:
        constraints = connection.introspection.get_constraints(cursor, "rws_jobs")
    assert constraints["their_index"]["columns"] == ["their_note"]
    if POSTGRESQL:
        assert ask("SELECT oid, relacl::text FROM pg_class WHERE relname = 'rws_jobs'") == before
    run("DROP TRIGGER their_trigger" + (" ON rws_jobs" if POSTGRESQL else ""))


@pytest.mark.skipif(not POSTGRESQL, reason="only there triggers can be deferred")
def test_deferred_triggers_of_other_programs_are_no_obstacle(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    run("CREATE TABLE their_log (id VARCHAR(64))")
    run(
        "CREATE OR REPLACE FUNCTION their_function() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO their_log VALUES (NEW.id); RETURN NEW; END'"
    )
    run(
        "CREATE CONSTRAINT TRIGGER their_trigger AFTER UPDATE OF unique_key ON rws_jobs"
        " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION their_function()"
    )
    add("a")
    add("long", job_type="j" * 256)
    add("b")
    migrate("rws_jobs")
    assert sorted(ask("SELECT id FROM their_log")) == [("b",), ("long",)]


def insert_with_note() -> list[tuple[str, str]]:
    add("a", key=None)
    add("b", key=None)
    run("UPDATE rws_jobs SET their_note = 'theirs' WHERE id = 'b'")
    return [("a", "50 % off"), ("b", "theirs")]


class NotHere:
    """A router that keeps the jobs off every database."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "rws_jobs" else None


@pytest.mark.parametrize("ddl", [*DDL.values(), None], ids=[*DDL, "no table"])
def test_what_a_router_denies_is_not_touched(fresh: dict[str, Any], settings: Any, ddl: str | None) -> None:
    if ddl:
        run(ddl)
        add_plain = insert_in_every_status(ddl)
        assert add_plain
    before = schema()
    settings.DATABASE_ROUTERS = [NotHere()]
    migrate("rws_jobs")
    assert schema() == before
    migrate("rws_jobs", "zero")
    assert schema() == before


# -- cut short


class Stopped(BaseException):
    """The process was killed."""


@contextmanager
def another_connection() -> Iterator[None]:
    """A connection as of another process: cut off at the end, whatever it was doing."""
    kept = connections["default"]
    connections["default"] = connections.create_connection("default")
    try:
        yield
        connections["default"].connection.close()
    finally:
        connections["default"] = kept


def stop_before(statement: int) -> Callable[..., Any]:
    """Let so many statements through that write to our tables, or record the migration, and no more."""
    passed = count()

    def wrapper(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        writes = not sql.lstrip().startswith(("SELECT", "SHOW", "PRAGMA"))
        if writes and ("rws_job" in sql or "django_migrations" in sql) and next(passed) >= statement:
            raise Stopped
        return execute(sql, params, many, context)

    return wrapper


@pytest.mark.parametrize("ddl", [*DDL.values(), None], ids=[*DDL, "no table"])
def test_cut_short_before_any_statement_it_is_completed_by_the_next_run(fresh: dict[str, Any], ddl: str | None) -> None:
    for statement in count():
        drop_everything()
        forget()
        rows: list[tuple[Any, ...]] = []
        if ddl:
            run(ddl)
            rows = insert_in_every_status(ddl)
        if ddl is original.TWELVE_COLUMNS:
            add("twin", created=1_600_000_004, key="k")
            add("long", created=1_600_000_005, key="k", job_type="j" * 256)
            add("twin of long", created=1_600_000_006, key="k")
        stopped = False
        with another_connection(), connection.execute_wrapper(stop_before(statement)):
            try:
                apply()
            except Stopped:
                stopped = True
        if stopped:
            apply()
        assert schema() == fresh
        assert the_originals_columns()[: len(rows)] == rows
        if ddl is original.TWELVE_COLUMNS:
            assert [keys()[name] for name in ("twin", "long", "twin of long")] == [None] * 3
        if not stopped:
            assert statement > 5
            return


@pytest.mark.skipif(not MARIADB, reason="elsewhere nobody can write while the table is adopted")
def test_a_key_enqueued_again_in_the_meantime_is_looked_at_again(fresh: dict[str, Any]) -> None:
    run(original.TWELVE_COLUMNS)
    add("a", created=1)
    writer = connections.create_connection("default")
    enqueued = []

    def enqueue_meanwhile(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if "ADD COLUMN `live_key`" in sql and len(enqueued) < 2:
            enqueued.append(f"again {len(enqueued)}")
            with writer.cursor() as cursor:
                cursor.execute(original.INSERT_ALL, [enqueued[-1], "mail", "", 3, 1, 2, "default", 0, "k"])
        return execute(sql, *args)

    try:
        with connection.execute_wrapper(enqueue_meanwhile):
            migrate("rws_jobs")
    finally:
        writer.close()
    assert keys() == {"a": "k", "again 0": None, "again 1": None}
    assert schema() == fresh


@pytest.mark.skipif(not POSTGRESQL, reason="MariaDB has no such lock, and SQLite has one writer anyway")
def test_nobody_writes_between_the_look_and_the_constraint(fresh: dict[str, Any]) -> None:
    run(original.HAND_MADE)
    add("a", created=1)
    writer = connections.create_connection("default")
    refused = []

    def insert_meanwhile(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if sql.startswith('ALTER TABLE "rws_jobs"'):
            with writer.cursor() as cursor:
                cursor.execute("SET lock_timeout = 20")
                with pytest.raises(OperationalError, match="lock timeout"):
                    cursor.execute(original.INSERT, ["b", "mail", "", 1, 1])
            refused.append(sql)
        return execute(sql, *args)

    try:
        with connection.execute_wrapper(insert_meanwhile):
            migrate("rws_jobs")
    finally:
        writer.close()
    assert len(refused) >= 2
    assert keys() == {"a": "k"}


# -- and back


def test_backwards_it_drops_the_tables(fresh: dict[str, Any]) -> None:
    migrate("rws_jobs")
    assert tables() == OURS
    migrate("rws_jobs", "zero")
    assert tables() == []


@both
@pytest.mark.parametrize("status", ["pending", "running"])
def test_backwards_it_refuses_to_drop_live_jobs(fresh: dict[str, Any], ddl: str, status: str) -> None:
    run(ddl)
    migrate("rws_jobs")
    add("b", "failed", key="b")
    add("a", status)
    with pytest.raises(CommandError, match="rws_jobs holds 1 pending or running"):
        migrate("rws_jobs", "zero")
    assert schema() == fresh
    assert keys() == {"a": "k", "b": "b"}
    run(original.FINISH, "a")
    migrate("rws_jobs", "zero")
    assert tables() == []


# -- sqlmigrate, squashmigrations, makemigrations


@both
def test_sqlmigrate_prints_what_a_fresh_database_gets(fresh: dict[str, Any], ddl: str) -> None:
    def printed(**options: Any) -> str:
        out = StringIO()
        call_command("sqlmigrate", "rws_jobs", "0001", stdout=out, **options)
        return out.getvalue()

    without_tables = printed()
    assert without_tables.count("CREATE TABLE") == len(OURS)
    assert "GENERATED ALWAYS AS" in without_tables
    run(ddl)
    insert_in_every_status(ddl)
    before = schema()
    assert printed() == without_tables
    assert printed(backwards=True).count("DROP TABLE") == len(OURS)
    assert schema() == before


def operations() -> list[Any]:
    migration = MigrationLoader(None).get_migration("rws_jobs", "0001_initial")
    return [operation for operation in migration.operations if isinstance(operation, CreateOrAdopt)]


def test_it_cannot_be_squashed_away() -> None:
    for operation in operations():
        later = [
            migrations.AddField(operation.name, "more", models.IntegerField(null=True)),
            migrations.AlterModelOptions(operation.name, {"ordering": ["pk"]}),
            migrations.RenameModel(operation.name, "Renamed"),
            migrations.DeleteModel("Renamed"),
        ]
        for first in (later[:1], later[1:2], later[2:3], [migrations.DeleteModel(operation.name)]):
            both_of_them = [operation, *first]
            assert MigrationOptimizer().optimize(both_of_them, "rws_jobs") == both_of_them
        assert not operation.elidable


def test_it_can_be_written_out_again() -> None:
    migration = MigrationLoader(None).get_migration("rws_jobs", "0001_initial")
    assert migration.initial is False
    written: dict[str, Any] = {}
    exec(MigrationWriter(migration, include_header=False).as_string(), written)
    again = written["Migration"]("0001_initial", "rws_jobs")
    assert [type(operation) for operation in again.operations] == [type(one) for one in migration.operations]
    states = [one.mutate_state(ProjectState()) for one in (migration, again)]
    assert MigrationAutodetector(*states)._detect_changes() == {}


# -- in other projects than this


def manage(folder: Path, settings: str, *args: str) -> str:
    """Run a management command in a process and a project of its own."""
    (folder / "project.py").write_text(
        f"from tests.settings import *\nDATABASES['default']['NAME'] = {str(folder / 'default.sqlite3')!r}\n{settings}"
    )
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "project",
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[1])]),
        "RWS_JOBS_TEST_DATABASE": "sqlite",
    }
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "django", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ALONE = "INSTALLED_APPS = ['rws_jobs']\nROOT_URLCONF = 'project'\nurlpatterns = []\nMIDDLEWARE = TEMPLATES = []"


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "DEFAULT_AUTO_FIELD = 'django.db.models.AutoField'",
        "USE_I18N = False",
        "LANGUAGE_CODE = 'de'",
        "USE_TZ = False",
        ALONE,
    ],
    ids=["as here", "another auto field", "without translation", "in German", "without time zones", "no other app"],
)
def test_there_is_nothing_to_migrate_or_to_warn_of(tmp_path: Path, settings: str) -> None:
    assert "No changes detected" in manage(tmp_path, settings, "makemigrations", "--check", "--dry-run", "rws_jobs")
    manage(tmp_path, settings, "check", "rws_jobs", "--fail-level", "INFO", "--database", "default")


def test_no_check_warns_of_the_tables_on_this_database() -> None:
    found = run_checks(app_configs=[apps.get_app_config("rws_jobs")], databases=["default"])
    assert [warning for warning in found if not str(warning.id).startswith("rws_jobs.")] == []


def test_another_database_is_migrated_and_no_other(tmp_path: Path) -> None:
    paths = {alias: tmp_path / f"{alias}.sqlite3" for alias in ("default", "other")}
    for path in paths.values():
        with closing(sqlite3.connect(path)) as database:
            database.executescript(original.NINE_COLUMNS + ";" + original.SCHEDULES)
            database.execute(original.INSERT.replace("%s", "?"), ["a", "mail", "p", 1, 1])
            database.commit()
    untouched = paths["default"].read_bytes()
    other = f"DATABASES['other'] = DATABASES['default'] | {{'NAME': {str(paths['other'])!r}}}"

    manage(tmp_path, f"{ALONE}\n{other}", "migrate", "--database", "other")

    with closing(sqlite3.connect(paths["other"])) as database:
        assert database.execute("SELECT id, queue, live_key FROM rws_jobs").fetchall() == [("a", "default", None)]
        assert database.execute("SELECT app, name FROM django_migrations").fetchall() == [("rws_jobs", "0001_initial")]
    assert paths["default"].read_bytes() == untouched
