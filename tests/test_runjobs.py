"""``manage.py runjobs`` as a real process: its options, its signals, its words."""

import re
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from rws_jobs import enqueue, enqueue_many, message
from rws_jobs.management.commands.runjobs import Stop
from rws_jobs.models import Job, JobSchedule, JobWorker

from .jobs import boom, fail_with, noop, record
from .processes import Process, Processes
from .rows import Ledger, statuses
from .waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "0123-hunters-that-nobody-may-read-4567"


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger()
    yield made
    made.drop()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file is not there, a ``record`` job with its name runs on."""
    return tmp_path / "gate"


def all_done() -> bool:
    return not Job.objects.exists()


def gated(gate: Path, count: int = 1, **options: Any) -> list[str]:
    """Enqueue jobs that run until the gate opens."""
    return [str(record.using(**options).enqueue(gate=str(gate))) for _ in range(count)]


def wait_started(ledger: Ledger, *ids: str) -> None:
    wait_for(lambda: set(ids) <= set(ledger.started), what=f"{ids} to start")


# -- words and options


def test_it_says_what_it_works_on(processes: Processes) -> None:
    name = Path(str(connection.settings_dict["NAME"])).name
    one = processes.runjobs("--queues", "mail, reports", "--threads", "1").started()
    many = processes.runjobs("--exclude-queues", "mail").started()
    assert f"working on {connection.display_name} '{name}' (default): queues mail, reports, 1 thread, " in one.log
    assert "every queue but mail, 4 threads, " in many.log
    assert re.search(r"\d+ handlers, 0 schedules", one.log)
    assert len(one.log.splitlines()) == 1
    (first,) = JobWorker.objects.filter(pid=one.pid)
    assert (first.queues, first.threads) == ("mail, reports", 1)


def test_drain_runs_what_is_due_and_exits(processes: Processes, ledger: Ledger) -> None:
    due = enqueue_many(record.message() for _ in range(20))
    later = record.using(run_in=3600).enqueue()
    process = processes.runjobs("--drain")
    assert process.wait() == 0
    assert ledger.started == sorted(due)
    assert statuses() == {later: "pending"}
    assert not JobWorker.objects.exists()
    assert "20 runs in" in process.log
    assert process.log.rstrip().endswith("stopped")
    again = processes.runjobs("--drain")
    assert again.wait() == 0
    assert " runs in " not in again.log


def test_queues_and_exclude_queues(processes: Processes, ledger: Ledger) -> None:
    ids = {queue: str(record.using(queue=queue).enqueue()) for queue in ("a", "b", "c")}
    assert processes.runjobs("--queues", "a", "--drain").wait() == 0
    assert ledger.started == [ids["a"]]
    assert processes.runjobs("--exclude-queues", "c,a", "--drain").wait() == 0
    assert ledger.started == sorted([ids["a"], ids["b"]])
    assert statuses() == {ids["c"]: "pending"}


def test_max_jobs_exits_after_so_many(processes: Processes, ledger: Ledger) -> None:
    enqueue_many(record.message() for _ in range(20))
    process = processes.runjobs("--max-jobs", "7", "--threads", "2")
    assert process.wait() == 0
    assert len(ledger.started) == 7
    assert list(statuses().values()) == ["pending"] * 13


def test_no_schedules_leaves_them_to_others(processes: Processes, ledger: Ledger) -> None:
    jobs = (
        "from rws_jobs import schedule\nfrom tests.jobs import record\nschedule('each second', '* * * * * *', record)"
    )
    enqueue_many([noop.message()])
    abstains = processes.runjobs("--no-schedules", jobs=jobs).started()
    wait_for(all_done, what="the job to be done")
    assert "schedules left to others" in abstains.log
    assert not JobSchedule.objects.exists()
    processes.runjobs(jobs=jobs).started()
    wait_for(JobSchedule.objects.exists, what="the other to store the schedule")


def test_the_poll_interval_is_taken(processes: Processes) -> None:
    process = processes.runjobs("--poll-interval", "0.05").started()
    noop.enqueue()
    wait_for(all_done, what="the job to be done")
    process.send(signal.SIGTERM)
    assert process.wait() == 0


@pytest.mark.parametrize(("verbosity", "lines"), [("0", 0), ("1", 0), ("2", 1)])
def test_only_verbosity_2_shows_successes(processes: Processes, verbosity: str, lines: int) -> None:
    job_id = noop.enqueue()
    process = processes.runjobs("--drain", "-v", verbosity)
    assert process.wait() == 0
    assert len(re.findall(rf"tests\.noop {job_id} done", process.log)) == lines
    assert (process.log == "") == (verbosity == "0")


def test_failures_are_shown_always(processes: Processes) -> None:
    dead, failing = boom.enqueue(text="no reason"), fail_with.enqueue(text="abc")
    process = processes.runjobs("--max-jobs", "2", "-v", "1")
    assert process.wait() == 0
    assert f"tests.boom {dead} is dead, attempt 1 of 1" in process.log
    assert f"tests.fail_with {failing} failed, attempt 1 of 6" in process.log
    assert "LookupError: 3 characters" in process.log


def test_the_log_never_shows_a_payload(processes: Processes) -> None:
    fail_with.using(max_retries=0).enqueue(text=SECRET)
    record.using(max_retries=0).enqueue(gate="/dev/null")
    enqueue("no such type", SECRET, max_retries=0)
    enqueue("tests.noop", SECRET, max_retries=0)  # not JSON
    enqueue("tests.noop", f'{{"{SECRET}": 1}}'[:-1], max_retries=0)
    enqueue("tests.noop", f'["{SECRET}"]', max_retries=0)
    enqueue("tests.noop", f'{{"surplus": "{SECRET}"}}', max_retries=0)
    enqueue("tests.fail_with", f'{{"text": {{"$uuid": "{SECRET}"}}}}', max_retries=0)
    enqueue("tests.fail_with", f'{{"text": {{"$unknown": "{SECRET}"}}}}', max_retries=0)
    process = processes.runjobs("--drain", "-v", "2")
    assert process.wait() == 0
    assert process.log.count("is dead") == 9
    shown = [line for line in process.log.splitlines() if SECRET[5:12] in line]
    assert not shown


def test_a_project_with_logging_of_its_own_is_not_logged_twice(processes: Processes) -> None:
    settings = (
        "LOGGING = {'version': 1, 'disable_existing_loggers': False,"
        " 'handlers': {'mine': {'class': 'logging.StreamHandler', 'formatter': 'mine'}},"
        " 'formatters': {'mine': {'format': 'MINE %(message)s'}},"
        " 'loggers': {'rws_jobs': {'handlers': ['mine'], 'level': 'INFO'}}}"
    )
    process = processes.runjobs("--drain", settings=settings)
    assert process.wait() == 0
    assert len(re.findall("working on", process.log)) == 1
    assert process.log.startswith("MINE working on")


# -- wrong use


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--queues", "mail", "--exclude-queues", "reports"], "--queues or --exclude-queues, not both"),
        (["--queues", "mail,,reports"], "queue is empty"),
        (["--queues", ""], "separated by commas"),
        (["--queues", "x" * 65], "the limit is 64"),
        (["--exclude-queues", "a\nb"], "control character"),
        (["--threads", "0"], "--threads: must be from 1 to 1,000, not 0"),
        (["--threads", "many"], "'many' is not a whole number"),
        (["--threads", "2.5"], "'2.5' is not a whole number"),
        (["--poll-interval", "0"], "--poll-interval: must be from 0.01 to 3,600"),
        (["--poll-interval", "soon"], "'soon' is not a number"),
        (["--poll-interval", "nan"], "must be from 0.01"),
        (["--max-jobs", "0"], "--max-jobs: must be from 1"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout: must be from 0"),
        (["--no-such-option"], "--no-such-option"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_arguments_are_refused_with_the_right_ones_named(arguments: list[str], named: str) -> None:
    with pytest.raises(CommandError, match=re.escape(named)):
        call_command("runjobs", *arguments)
    assert not JobWorker.objects.exists()


def test_a_wrong_argument_is_one_line_and_exit_code_2_or_1(processes: Processes) -> None:
    process = processes.runjobs("--threads", "0")
    assert process.wait() in (1, 2)
    assert "Traceback" not in process.log
    assert process.log.rstrip().endswith("argument --threads: must be from 1 to 1,000, not 0")


def test_before_migrate_it_says_so_in_one_line(processes: Processes, tmp_path: Path) -> None:
    empty = tmp_path / "empty.sqlite3"
    sqlite3.connect(empty).close()
    settings = f"DATABASES = {{'default': {{'ENGINE': 'django.db.backends.sqlite3', 'NAME': {str(empty)!r}}}}}"
    process = processes.runjobs(settings=settings)
    assert process.wait() == 1
    (line,) = process.log.splitlines()
    assert "tables are missing" in line
    assert "manage.py migrate" in line


def test_without_a_database_it_says_so_in_one_line(processes: Processes, tmp_path: Path) -> None:
    nowhere = tmp_path / "no such folder" / "db.sqlite3"
    settings = f"DATABASES = {{'default': {{'ENGINE': 'django.db.backends.sqlite3', 'NAME': {str(nowhere)!r}}}}}"
    process = processes.runjobs(settings=settings)
    assert process.wait() == 1
    (line,) = process.log.splitlines()
    assert "the database 'default' cannot be used" in line


# -- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_an_idle_worker_cleanly(processes: Processes, number: signal.Signals) -> None:
    process = processes.runjobs().started()
    wait_for(JobWorker.objects.exists, what="the worker's row")
    process.send(number)
    assert process.wait(timeout=15) == 0
    assert "Traceback" not in process.log
    assert process.log.rstrip().endswith("stopped")
    assert not JobWorker.objects.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_lets_running_jobs_finish_and_gives_back_the_rest_uncharged(
    processes: Processes, ledger: Ledger, gate: Path, number: signal.Signals
) -> None:
    long = gated(gate, 2, priority=1)
    rest = gated(gate, 8)
    process = processes.runjobs("--threads", "2").started()
    wait_started(ledger, *long)
    process.send(number)
    process.wait_for_log("stopping: waiting up to 25 s for running jobs")
    process.send(number)  # a shell sends it twice: within a second that is one wish
    assert process.running
    wait_for(lambda: Job.objects.running().count() == 2, what="the rest to be given back")
    gate.touch()
    assert process.wait() == 0
    assert statuses() == dict.fromkeys(rest, "pending")
    assert set(Job.objects.values_list("attempts", "claimed_by")) == {(0, None)}
    assert ledger.started == sorted(long)
    assert sum(entry.what == "ended" for entry in ledger.entries) == 2
    assert not JobWorker.objects.exists()


def test_what_a_stopped_worker_gave_back_runs_elsewhere_at_once(
    processes: Processes, ledger: Ledger, gate: Path
) -> None:
    long = gated(gate, 2, priority=1)
    stopping = processes.runjobs("--threads", "2").started()
    wait_started(ledger, *long)
    rest = enqueue_many(record.message() for _ in range(8))
    stopping.send(signal.SIGTERM)
    processes.runjobs("--threads", "2").started()
    wait_for(lambda: Job.objects.count() == 2, what="the other worker to run the rest")
    assert ledger.started == sorted([*long, *rest])
    assert stopping.running
    gate.touch()
    assert stopping.wait() == 0
    assert {entry.attempt for entry in ledger.entries} == {1}


def test_beyond_the_shutdown_timeout_running_jobs_are_given_back_uncharged(
    processes: Processes, ledger: Ledger, gate: Path
) -> None:
    ids = gated(gate, 2)
    process = processes.runjobs("--threads", "2", "--shutdown-timeout", "0.5").started()
    wait_started(ledger, *ids)
    process.send(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    assert set(Job.objects.values_list("pk", "status", "attempts", "claimed_by", "last_error")) == {
        (id, "pending", 0, None, None) for id in ids
    }
    assert "given back, uncharged" in process.log
    assert not JobWorker.objects.exists()
    gate.touch()
    assert processes.runjobs("--drain").wait() == 0
    assert all_done()
    assert [entry.attempt for entry in ledger.entries if entry.what == "ended"] == [1, 1]


def test_deploys_do_not_cost_an_attempt(processes: Processes, ledger: Ledger, gate: Path) -> None:
    (id,) = gated(gate, max_retries=0)
    for deploy in (1, 2):
        process = processes.runjobs("--shutdown-timeout", "0").started()
        wait_for(lambda deploy=deploy: len(ledger.started) == deploy, what=f"run {deploy} to start")  # type: ignore[misc]
        process.send(signal.SIGTERM)
        assert process.wait() == 0
    assert list(Job.objects.values_list("pk", "status", "attempts")) == [(id, "pending", 0)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_ends_it_now_with_an_error_code_and_no_charge(
    processes: Processes, ledger: Ledger, gate: Path, number: signal.Signals
) -> None:
    (id,) = gated(gate)
    process = processes.runjobs().started()
    wait_started(ledger, id)
    process.send(number)
    process.wait_for_log("stopping")

    def ended() -> bool:
        # Again and again: what comes within a second is the same wish, what comes later is a second one.
        if process.running:
            process.send(number)
        return not process.running

    wait_for(ended, timeout=20, every=0.3, what="the process to end")
    assert process.wait() == 1
    assert list(Job.objects.values_list("pk", "status", "attempts", "claimed_by")) == [(id, "pending", 0, None)]
    assert "Traceback" not in process.log


def test_signals_within_a_second_are_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 100.0
    monkeypatch.setattr("rws_jobs.management.commands.runjobs.time.monotonic", lambda: moment)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        stop = Stop()
        assert not stop.asked
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        moment += 1.0
        signal.raise_signal(signal.SIGHUP)
        assert not stop.forced
        moment += 0.01
        signal.raise_signal(signal.SIGINT)
        assert stop.forced
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_workers_that_are_stopped_at_any_moment_leave_no_row_running(processes: Processes, ledger: Ledger) -> None:
    """Under a stream of short jobs the signal comes in the middle of claims, commits and handlers."""
    jobs = (
        "import time\nfrom rws_jobs import job\nfrom tests.rows import Ledger\n"
        "@job('short')\ndef short():\n    time.sleep(0.005)\n    Ledger.write('started')\n"
    )
    ids = enqueue_many(message("short", "{}") for _ in range(6000))
    for turn in range(7):
        workers = [processes.runjobs("--threads", "2", jobs=jobs) for _ in range(3)]
        for number, worker in enumerate(workers):
            # After as many more jobs: moments that nobody chose.
            worker.started()
            enough = len(ledger.entries) + 1 + (13 * turn + 7 * number) % 40
            wait_for(lambda enough=enough: len(ledger.entries) >= enough or all_done(), what="jobs to run")  # type: ignore[misc]
            worker.send(signal.SIGTERM)
        for worker in workers:
            assert worker.wait() == 0, worker.log
            assert "Traceback" not in worker.log
            assert "rror" not in worker.log, worker.log
        assert not Job.objects.exclude(status="pending", attempts=0, claimed_by=None).exists()
        assert not JobWorker.objects.exists()
    left = set(statuses())
    assert left, "the stream was meant to last"
    assert ledger.started == sorted(set(ids) - left)


def test_as_process_1_of_a_container_it_obeys_signals(processes: Processes, ledger: Ledger, gate: Path) -> None:
    unshare = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare --pid is not allowed here")
    idle = processes.runjobs("--queues", "none", prefix=unshare).started()
    worker = wait_for(JobWorker.objects.first, what="the worker's row")
    assert worker.pid == 1
    send_to_child(idle, signal.SIGTERM)
    assert idle.wait(timeout=15) == 0
    (id,) = gated(gate)
    busy = processes.runjobs(prefix=unshare).started()
    wait_started(ledger, id)
    send_to_child(busy, signal.SIGTERM)
    busy.wait_for_log("stopping")
    assert busy.running
    gate.touch()
    assert busy.wait() == 0
    assert all_done()


def test_a_worker_killed_without_warning_leaves_its_jobs_to_be_rescued(
    processes: Processes, ledger: Ledger, gate: Path
) -> None:
    (id,) = gated(gate)
    settings = "RWS_JOBS = {'HEARTBEAT_INTERVAL': 0.2, 'DEAD_AFTER': 1}"
    first = processes.runjobs(settings=settings).started()
    wait_started(ledger, id)
    first.kill()
    gate.touch()
    second = processes.runjobs(settings=settings).started()
    wait_for(all_done, what="the job to be rescued and done")
    assert [(entry.attempt, entry.what) for entry in ledger.entries] == [(1, "started"), (2, "started"), (2, "ended")]
    assert "has not been heard of for a whole lease" in second.log
    assert set(JobWorker.objects.values_list("pid", flat=True)) == {second.pid}


def test_a_new_worker_with_the_same_host_and_pid_is_another(processes: Processes, ledger: Ledger, gate: Path) -> None:
    unshare = ["unshare", "--fork", "--pid", "--mount-proc", "--uts", "--kill-child"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("unshare --pid --uts is not allowed here")
    (id,) = gated(gate)
    settings = "import socket\nsocket.sethostname('web-0')\nRWS_JOBS = {'HEARTBEAT_INTERVAL': 0.2, 'DEAD_AFTER': 1}"
    first = processes.runjobs(settings=settings, prefix=unshare).started()
    wait_started(ledger, id)
    first.kill()
    processes.runjobs(settings=settings, prefix=unshare).started()
    assert set(JobWorker.objects.values_list("host", "pid")) == {("web-0", 1)}
    gate.touch()
    wait_for(all_done, what="the job to be rescued and done")
    assert sorted(entry.attempt for entry in ledger.entries if entry.what == "started") == [1, 2]


def test_a_stopped_and_continued_worker_neither_loses_nor_repeats(
    processes: Processes, ledger: Ledger, gate: Path
) -> None:
    (id,) = gated(gate)
    process = processes.runjobs().started()
    wait_started(ledger, id)
    process.send(signal.SIGSTOP)
    more = enqueue_many(record.message() for _ in range(5))
    gate.touch()
    process.send(signal.SIGCONT)
    wait_for(all_done, what="all jobs to be done")
    assert ledger.started == sorted([id, *more])


# -- helpers


def send_to_child(process: Process, number: signal.Signals) -> None:
    """To the process that ``unshare`` has started: number 1 of its own namespace."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    subprocess.run(["kill", f"-{number.value}", child], check=True)
