"""``python -m benchmarks [drain|backlog|enqueue|memory] --database sqlite|postgresql|mariadb``

Each figure stands beside the raw floor or the plain Django call measured in the same run: machines are noisy, ratios
hold. The database is made, used and dropped; give it a quiet machine.
"""

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=[*BENCHMARKS, "all"], default="all")
    parser.add_argument("--database", choices=["sqlite", "postgresql", "mariadb"], default="sqlite")
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs of one run (default: 20,000)")
    parser.add_argument("--runs", type=int, default=5, help="runs, of which the median is given (default: 5)")
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    with _database(options.database):
        print(
            f"{options.database}, Python {sys.version.split()[0]}, {options.jobs:,} jobs, median of {options.runs} runs"
        )
        for name, benchmark in BENCHMARKS.items():
            if options.what in (name, "all"):
                benchmark(options)


# -- the benchmarks


def drain(options: Any) -> None:
    """No-op jobs worked off by one process, against the floor."""
    ratios = []
    for _ in range(options.runs):
        floor_rate, rate = _floor_run(options.jobs), _drain_run(options)
        ratios.append((rate / floor_rate, rate, floor_rate))
    ratio, rate, floor_rate = statistics.median(ratios), *(statistics.median(row[i] for row in ratios) for i in (1, 2))
    _line("drain", f"{rate:,.0f}/s", f"floor {floor_rate:,.0f}/s", ratio[0])


def backlog(options: Any) -> None:
    """The same with 200,000 jobs waiting for the future, at a higher priority, against none waiting."""
    ratios = []
    for _ in range(options.runs):
        _clear()
        empty = _drain_run(options)
        _future(200_000)
        waiting = _drain_run(options, keep=True)
        _clear()
        ratios.append((waiting / empty, waiting, empty))
    ratio, waiting, empty = (statistics.median(row[i] for row in ratios) for i in range(3))
    _line("200,000 waiting", f"{waiting:,.0f}/s", f"none {empty:,.0f}/s", ratio)


def enqueue(options: Any) -> None:
    """``enqueue_many`` against ``bulk_create`` of the same rows, and one ``enqueue`` against one ``save()``."""
    from benchmarks.jobs import noop
    from rws_jobs import enqueue_many
    from rws_jobs.models import Job

    many, single = [], []
    for _ in range(options.runs):
        _clear()
        rows = _rows(options.jobs)
        plain = _rate(options.jobs, partial(_bulk_create, rows))
        _clear()
        ours = _rate(options.jobs, lambda: enqueue_many([noop.message() for _ in range(options.jobs)]))
        many.append((ours / plain, ours, plain))
        _clear()
        count = max(1, options.jobs // 20)
        rows = _rows(count)
        plain = _rate(count, partial(_each, rows, lambda row: row.save(force_insert=True)))
        ours = _rate(count, partial(_each, range(count), lambda _: noop.enqueue()))
        single.append((ours / plain, ours, plain))
    for name, rows, other in (("enqueue_many", many, "bulk_create"), ("enqueue", single, "save()")):
        ratio, ours, plain = (statistics.median(row[i] for row in rows) for i in range(3))
        _line(name, f"{ours:,.0f}/s", f"{other} {plain:,.0f}/s", ratio)
    Job.objects.all()._raw_delete("default")


def memory(options: Any) -> None:
    """Growth of the process over ten times as many jobs as one run has, after a first run."""
    _drain_run(options)
    before = _resident()
    for _ in range(10):
        _drain_run(options)
    grown = _resident() - before
    print(f"  {'memory':<16} {grown / 1024:+.1f} MB over {10 * options.jobs:,} jobs ({before / 1024:.0f} MB before)")


BENCHMARKS: dict[str, Callable[[Any], None]] = {
    "drain": drain,
    "backlog": backlog,
    "enqueue": enqueue,
    "memory": memory,
}


# -- their parts


def _drain_run(options: Any, keep: bool = False) -> float:
    from benchmarks.jobs import noop
    from rws_jobs import Worker, enqueue_many

    if not keep:
        _clear()
    enqueue_many([noop.message() for _ in range(options.jobs)])
    worker = Worker(threads=options.threads, drain=True, schedules=False)
    started = time.perf_counter()
    worker.start()
    worker.wait()
    elapsed = time.perf_counter() - started
    assert worker.counts["Completed"] == options.jobs, worker.counts
    return options.jobs / elapsed


def _floor_run(jobs: int) -> float:
    from benchmarks import floor

    _clear()
    _bulk_create(_rows(jobs))
    return floor.drain()


def _rows(count: int) -> list[Any]:
    from benchmarks.jobs import noop
    from rws_jobs.enqueueing import _row

    return [_row(noop.message(), time.time()) for _ in range(count)]


def _bulk_create(rows: list[Any]) -> None:
    from django.db import transaction

    from rws_jobs.models import Job

    with transaction.atomic():
        Job.objects.bulk_create(rows, batch_size=500)


def _future(count: int) -> None:
    from benchmarks.jobs import noop
    from rws_jobs import enqueue_many

    for _ in range(count // 10_000):
        enqueue_many([noop.using(run_in=86_400, priority=5).message() for _ in range(10_000)])


def _clear() -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM rws_jobs" if connection.vendor == "sqlite" else "TRUNCATE TABLE rws_jobs")
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE rws_jobs")


def _each(items: Iterable[Any], do: Callable[[Any], object]) -> None:
    for item in items:
        do(item)


def _rate(count: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def _resident() -> float:
    """Kilobytes now where the kernel tells, else the most there has been."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize() / 1024
    except OSError:
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _line(name: str, ours: str, other: str, ratio: float) -> None:
    print(f"  {name:<16} {ours:>12}   {other:<24} {ratio:6.1%}", flush=True)


class _database:
    """A test database of Django's own making, migrated, for the length of a run."""

    def __init__(self, vendor: str) -> None:
        os.environ["RWS_JOBS_TEST_DATABASE"] = vendor
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"

    def __enter__(self) -> None:
        import django
        from django.db import connection

        django.setup()
        self._old = connection.settings_dict["NAME"]
        connection.creation.create_test_db(verbosity=0, autoclobber=True)

    def __exit__(self, *failure: object) -> None:
        from django.db import connection

        connection.creation.destroy_test_db(self._old, verbosity=0)


if __name__ == "__main__":
    main()
