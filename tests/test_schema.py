"""The tables as each database has them; and G9: the original's SQL, written out, works on them."""

from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.db import IntegrityError, connection, transaction

from rws_jobs.lanes import Lanes
from rws_jobs.models import Job, JobSchedule, JobWorker

from . import original
from .original import ask, run
from .rows import insert, row

pytestmark = pytest.mark.django_db

SQLITE, POSTGRESQL, MARIADB = (connection.vendor == vendor for vendor in ("sqlite", "postgresql", "mysql"))
MODELS = [model for model in apps.get_app_config("rws_jobs").get_models() if not model._meta.proxy]


def claim(limit: int = 10) -> list[str]:
    with transaction.atomic():
        return [claimed.id for claimed in Job.objects.claim("us", Lanes(), limit)]


# -- the tables


def test_each_database_has_the_originals_columns_with_the_originals_types() -> None:
    """Name, type, whether it may be NULL, default: in the order of the original."""
    text, key, long = {
        "sqlite": ("text", "character varying({})", "bigint"),
        "postgresql": ("text", "character varying({})", "bigint"),
        "mysql": ("longtext", "varchar({})", "bigint(20)"),
    }[connection.vendor]
    integer = "int(11)" if MARIADB else "integer"
    assert _columns("rws_jobs")[:12] == [
        ("id", key.format(64), False, None),
        ("job_type", text, False, None),
        ("payload", text, False, None),
        ("status", key.format(16), False, "pending"),
        ("attempts", integer, False, "0"),
        ("max_retries", integer, False, "3"),
        ("next_run_at", long, False, None),
        ("created_at", long, False, None),
        ("last_error", text, True, None),
        ("queue", key.format(64), False, "default"),
        ("priority", long, False, "0"),
        ("unique_key", key.format(191), True, None),
    ]
    assert _columns("rws_job_schedules")[:2] == [
        ("name", key.format(191), False, None),
        ("next_run_at", long, False, None),
    ]


def test_every_later_column_can_be_left_out() -> None:
    for table, first in (("rws_jobs", 12), ("rws_job_schedules", 2)):
        for name, _, nullable, default in _columns(table)[first:]:
            assert nullable or default is not None, f"{table}.{name}"


def _columns(table: str) -> list[tuple[str, str, bool, str | None]]:
    if SQLITE:
        found = [
            (name, kind.lower(), not not_null, default)
            for _, name, kind, not_null, default, _, _ in ask(f"PRAGMA table_xinfo({table})")
        ]
    elif POSTGRESQL:
        found = ask(
            "SELECT attname, format_type(atttypid, atttypmod), NOT attnotnull, split_part(pg_get_expr(adbin, adrelid),"
            " '::', 1) FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            table,
        )
    else:
        found = ask(
            "SELECT column_name, column_type, is_nullable = 'YES', NULLIF(column_default, 'NULL')"
            " FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = %s"
            " ORDER BY ordinal_position",
            table,
        )
    return [
        (name, kind, bool(nullable), default if default is None else default.strip("'"))
        for name, kind, nullable, default in found
    ]


def test_there_are_these_indexes_and_no_twins_of_them() -> None:
    jobs = {
        "rws_jobs_pending": ["queue", "priority", "next_run_at", "created_at", "id"],
        "rws_jobs_running": ["claimed_by"],
        "rws_jobs_failed": ["next_run_at", "id"],
    }
    if MARIADB:
        jobs = {name: ["status", *columns] for name, columns in jobs.items()}
    expected = {
        "rws_jobs": sorted([["id"], ["live_key"], *jobs.values()]),
        "rws_job_schedules": [["name"]],
        "rws_job_workers": [["id"]],
    }
    for table, columns in expected.items():
        with connection.cursor() as cursor:
            found = connection.introspection.get_constraints(cursor, table)
        indexes = {name: one for name, one in found.items() if one["index"] or one["unique"] or one["primary_key"]}
        assert sorted(one["columns"] for one in indexes.values()) == columns
        if table == "rws_jobs":
            assert {name: one["columns"] for name, one in indexes.items() if name in jobs} == jobs
    if POSTGRESQL:
        # Introspection hides none of them: one row per index.
        names = [name for (name,) in ask("SELECT indexname FROM pg_indexes WHERE tablename LIKE 'rws!_%' ESCAPE '!'")]
        assert [name for name in names if name.endswith("_like")] == []
        assert len([name for name in names if name.startswith("rws_jobs_")]) == 5


@pytest.mark.skipif(MARIADB, reason="MariaDB has no partial indexes")
@pytest.mark.parametrize("status", ["pending", "running", "failed"])
def test_a_status_index_holds_the_jobs_of_its_status_only(status: str) -> None:
    if SQLITE:
        ((sql,),) = ask("SELECT sql FROM sqlite_master WHERE name = %s", f"rws_jobs_{status}")
        assert sql.endswith(f"WHERE \"status\" = '{status}'")
    else:
        ((sql,),) = ask("SELECT indexdef FROM pg_indexes WHERE indexname = %s", f"rws_jobs_{status}")
        assert sql.endswith(f"WHERE ((status)::text = '{status}'::text)")


@pytest.mark.skipif(not MARIADB, reason="elsewhere text compares binary anyway")
def test_every_key_column_has_the_binary_collation_without_padding() -> None:
    found = ask(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = DATABASE()"
        " AND table_name LIKE 'rws!_job%%' ESCAPE '!' AND collation_name = 'utf8mb4_nopad_bin'"
    )
    assert {
        ("rws_jobs", "id"),
        ("rws_jobs", "status"),
        ("rws_jobs", "queue"),
        ("rws_jobs", "unique_key"),
        ("rws_jobs", "claimed_by"),
        ("rws_jobs", "live_key"),
        ("rws_job_schedules", "name"),
        ("rws_job_workers", "id"),
    } <= set(found)


# -- byte by byte

ALIKE = ["mail", "Mail", "MAIL", "mail ", "mail  ", " mail", "mäil", "maıl"]


def test_ids_are_compared_byte_by_byte() -> None:
    for name in ALIKE:
        run(original.INSERT, name, "t", "p", 1, 1)
    for name in ALIKE:
        assert list(Job.objects.filter(pk=name).values_list("pk", flat=True)) == [name]
        assert ask("SELECT id FROM rws_jobs WHERE id = %s", name) == [(name,)]
        assert run(original.FINISH, name) == 1
    assert ask("SELECT id FROM rws_jobs") == []


def test_queues_are_compared_byte_by_byte() -> None:
    insert(*(row(str(number), queue=name) for number, name in enumerate(ALIKE)))
    for number, name in enumerate(ALIKE):
        with transaction.atomic():
            assert [one.id for one in Job.objects.claim("us", Lanes([name]), 10)] == [str(number)]


def test_statuses_are_compared_byte_by_byte() -> None:
    insert(*(row(name, status=name, unique_key="k") for name in ("pending", "Pending", "pending ", "RUNNING")))
    assert [info.id for info in Job.objects.pending().as_infos()] == ["pending"]
    assert [info.id for info in Job.objects.live("tests.noop", "k").as_infos()] == ["pending"]
    assert run(original.RECOVER) == 0


def test_unique_keys_are_compared_byte_by_byte() -> None:
    insert(*(row(str(number), unique_key=name) for number, name in enumerate(ALIKE)))
    for number, name in enumerate(ALIKE):
        assert ask(original.LIVE, "tests.noop", name) == [(str(number),)]
        assert Job.objects.live("tests.noop", name).get().pk == str(number)
        with pytest.raises(IntegrityError), transaction.atomic():
            insert(row("again", unique_key=name))


def test_job_types_of_keys_are_compared_byte_by_byte() -> None:
    insert(*(row(str(number), job_type=name, unique_key="k") for number, name in enumerate(ALIKE)))
    for number, name in enumerate(ALIKE):
        assert Job.objects.live(name, "k").get().pk == str(number)


def test_names_of_schedules_and_ids_of_workers_are_compared_byte_by_byte() -> None:
    for number, name in enumerate(ALIKE):
        run(original.SCHEDULE_SEEN, name, number)
        JobWorker.objects.create(pk=name, host="h", pid=number, started_at=1, beat_at=1, lease=30)
    for number, name in enumerate(ALIKE):
        assert JobSchedule.objects.get(pk=name).next_run_at == number
        assert JobWorker.objects.get(pk=name).pid == number
        insert(row(str(number), status="running", claimed_by=name))
        assert Job.objects.owned_by(name).get().pk == str(number)


# -- G10: two live jobs never share a unique key, whoever writes them


def by_the_original(id: str, key: str | None, job_type: str = "mail") -> None:
    run(original.INSERT_ALL, id, job_type, "p", 3, 1, 1, "default", 0, key)


def by_us(id: str, key: str | None, job_type: str = "mail") -> None:
    insert(row(id, job_type=job_type, unique_key=key))


Writer = Callable[..., None]
writers = [by_the_original, by_us]


@pytest.mark.parametrize("first", writers)
@pytest.mark.parametrize("second", writers)
@pytest.mark.parametrize("status", ["pending", "running"])
def test_G10_a_second_live_job_with_the_key_is_refused(first: Writer, second: Writer, status: str) -> None:
    first("a", "k")
    run("UPDATE rws_jobs SET status = %s WHERE id = 'a'", status)
    with pytest.raises(IntegrityError), transaction.atomic():
        second("b", "k")
    second("c", "k", job_type="bill")
    second("d", "K")
    assert sorted(ask("SELECT id FROM rws_jobs")) == [("a",), ("c",), ("d",)]


@pytest.mark.parametrize("writer", writers)
def test_G10_a_dead_or_finished_job_frees_its_key(writer: Writer) -> None:
    writer("a", "k")
    run(original.BURY, 4, "no", "a")
    writer("b", "k")
    run(original.FINISH, "b")
    writer("c", "k")
    assert sorted(ask("SELECT id FROM rws_jobs")) == [("a",), ("c",)]


@pytest.mark.parametrize("writer", writers)
def test_G10_a_dead_job_whose_key_is_live_again_cannot_be_revived(writer: Writer) -> None:
    writer("a", "k")
    run(original.BURY, 4, "no", "a")
    writer("b", "k")
    with pytest.raises(IntegrityError), transaction.atomic():
        run(original.REVIVE, 1, "a")
    assert sorted(ask("SELECT id, status FROM rws_jobs")) == [("a", "failed"), ("b", "pending")]


@pytest.mark.parametrize("writer", writers)
def test_G10_jobs_without_a_key_are_as_many_as_you_like(writer: Writer) -> None:
    for id in "abc":
        writer(id, None)
    assert ask("SELECT COUNT(*) FROM rws_jobs") == [(3,)]


@pytest.mark.parametrize("writer", writers)
def test_G10_the_empty_text_is_a_key(writer: Writer) -> None:
    writer("a", "")
    with pytest.raises(IntegrityError), transaction.atomic():
        writer("b", "")


@pytest.mark.parametrize("writer", writers)
def test_G10_the_longest_type_and_key_are_compared_to_their_ends(writer: Writer) -> None:
    writer("a", "𝄞" * 191, job_type="𝄞" * 255)
    writer("b", "𝄞" * 190 + "x", job_type="𝄞" * 255)
    with pytest.raises(IntegrityError), transaction.atomic():
        writer("c", "𝄞" * 191, job_type="𝄞" * 255)


# -- G9: a program that knows only the original's columns


def test_G9_what_it_inserts_with_eight_columns_gets_the_defaults_and_is_claimed_by_us() -> None:
    assert run(original.INSERT, "18c0-0", "mail", '{"to": "you"}', 1, 1) == 1
    job = Job.objects.get()
    assert (job.status, job.attempts, job.max_retries, job.last_error) == ("pending", 0, 3, None)
    assert (job.queue, job.priority, job.unique_key, job.live_key) == ("default", 0, None, None)
    assert (job.claimed_by, job.claimed_at, job.history, job.meta) == (None, None, None, None)
    assert claim() == ["18c0-0"]


def test_G9_what_it_inserts_with_all_its_columns_is_claimed_by_us() -> None:
    run(original.INSERT_ALL, "18c0-0", "mail", "p", 0, 1, 1, "mailers", -5, "k")
    with transaction.atomic():
        (claimed,) = Job.objects.claim("us", Lanes(["mailers"]), 10)
    assert (claimed.id, claimed.queue, claimed.priority, claimed.max_retries) == ("18c0-0", "mailers", -5, 0)
    assert claimed.unique_key == "k"


def test_G9_an_insert_without_status_and_counts_gets_the_originals_defaults() -> None:
    run("INSERT INTO rws_jobs (id, job_type, payload, next_run_at, created_at) VALUES ('a', 'mail', '', 1, 1)")
    assert ask("SELECT status, attempts, max_retries, queue, priority FROM rws_jobs") == [
        ("pending", 0, 3, "default", 0)
    ]


def test_G9_it_claims_and_finishes_jobs_of_ours_in_its_order() -> None:
    insert(
        row("low", priority=-1),
        row("later", next_run_at=5, created_at=1),
        row("younger", next_run_at=4, created_at=3),
        row("older", next_run_at=4, created_at=2),
        row("high", priority=1, next_run_at=9),
        row("far", next_run_at=30_000_000_000, priority=9),
    )
    order = []
    while found := ask(original.CANDIDATE, 20_000_000_000):
        ((id, job_type, payload, attempts, max_retries, _, queue, _, unique_key),) = found
        assert (job_type, payload, attempts, max_retries, queue, unique_key) == (
            *("tests.noop", "{}", 0, 3, "default", None),
        )
        assert run(original.CLAIM, id) == 1
        assert run(original.CLAIM, id) == 0
        assert run(original.FINISH, id) == 1
        order.append(id)
    assert order == ["high", "older", "younger", "later", "low"]
    assert ask("SELECT id FROM rws_jobs") == [("far",)]


def test_G9_neither_claims_what_the_other_has() -> None:
    insert(row("a"), row("b"))
    assert run(original.CLAIM, "a") == 1
    assert claim() == ["b"]
    assert run(original.CLAIM, "b") == 0
    assert ask(original.CANDIDATE, 20_000_000_000) == []


def test_G9_a_claim_of_its_has_no_owner_even_where_we_had_the_job_before() -> None:
    insert(row("a"))
    with transaction.atomic():
        (ours,) = Job.objects.claim("us", Lanes(), 1)
        Job.objects.release(ours)
    run(original.CLAIM, "a")
    assert ask("SELECT status, claimed_by, claimed_at FROM rws_jobs") == [("running", None, None)]
    assert Job.objects.complete([ours]) == 0


def test_G9_its_retry_is_due_for_us_with_its_count() -> None:
    run(original.INSERT, "a", "mail", "p", 1, 1)
    run(original.CLAIM, "a")
    assert run(original.RETRY, 1, 2, "boom", "a") == 1
    with transaction.atomic():
        (claimed,) = Job.objects.claim("us", Lanes(), 1)
    assert (claimed.attempts, claimed.next_run_at) == (1, 2)
    assert Job.objects.get().last_error == "boom"


def test_G9_its_dead_jobs_are_in_our_list_and_it_revives_and_deletes_ours() -> None:
    run(original.INSERT, "a", "mail", "p", 1, 1)
    run(original.CLAIM, "a")
    assert run(original.BURY, 4, "boom", "a") == 1
    (dead,) = Job.objects.dead().as_infos()
    assert (dead.id, dead.attempts, dead.last_error) == ("a", 4, "boom")
    insert(row("b", status="failed", attempts=4, history="[]"))
    assert run(original.REVIVE, 7, "b") == 1
    assert run(original.REVIVE, 7, "b") == 0
    assert claim() == ["b"]
    assert run(original.DELETE, "b") == 0
    assert run(original.DELETE, "a") == 1
    assert [info.id for info in Job.objects.as_infos()] == ["b"]


def test_G9_its_recovery_takes_our_running_jobs_and_our_fence_keeps_the_books() -> None:
    insert(row("a"), row("b"))
    with transaction.atomic():
        ours: list[Any] = Job.objects.claim("us", Lanes(), 1)
    assert run(original.RECOVER) == 1
    assert claim() == ["a", "b"]
    assert ours[0].id == "a"
    run(original.RECOVER)
    run(original.CLAIM, "a")
    assert ask("SELECT status FROM rws_jobs ORDER BY id") == [("running",), ("pending",)]


def test_G9_its_schedules_are_rows_like_ours() -> None:
    run(original.SCHEDULE_SEEN, "nightly", 100)
    with pytest.raises(IntegrityError), transaction.atomic():
        run(original.SCHEDULE_SEEN, "nightly", 100)
    schedule = JobSchedule.objects.get()
    assert (schedule.cron, schedule.timezone, schedule.paused, schedule.last_run_at) == (None, "UTC", False, None)
    assert ask(original.SCHEDULE_DUE, "nightly") == [(100,)]
    assert run(original.SCHEDULE_TAKEN, 200, "nightly", 100) == 1
    assert run(original.SCHEDULE_TAKEN, 200, "nightly", 100) == 0
    JobSchedule.objects.create(pk="ours", next_run_at=5, cron="0 0 2 * * *", job_type="mail", options="{}")
    assert run(original.SCHEDULE_TAKEN, 6, "ours", 5) == 1
    assert JobSchedule.objects.get(pk="ours").cron == "0 0 2 * * *"
