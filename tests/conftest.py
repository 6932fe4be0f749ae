"""What the tests share: a process left as it was found, a clock moved by hand, workers, other connections."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
import time_machine
from django.db import connections

from rws_jobs import Worker, embedding, registry, schedules, settling, signals

from . import jobs

SIGNALS = [
    getattr(signals, name)
    for name in (
        "job_enqueued",
        "job_started",
        "job_succeeded",
        "job_retrying",
        "job_dead",
        "claim_lost",
        "worker_lost",
    )
]


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Each test finds the handlers of the installed apps and no schedules, and leaves no handler, hook or receiver."""
    handlers, hooks, declared = dict(registry._handlers), list(settling._dead_hooks), dict(schedules._declared)
    receivers = [list(signal.receivers) for signal in SIGNALS]
    schedules._declared.clear()
    schedules._complaints.clear()
    embedding._watches.clear()
    embedding._next_look.clear()
    jobs.calls.clear()
    yield
    registry._handlers.clear()
    registry._handlers.update(handlers)
    settling._dead_hooks[:] = hooks
    schedules._declared.clear()
    schedules._declared.update(declared)
    for signal, found in zip(SIGNALS, receivers, strict=True):
        with signal.lock:
            signal.receivers[:] = found
            signal.sender_receivers_cache.clear()


@pytest.fixture
def configure(settings: Any) -> Callable[..., None]:
    """Change some of ``RWS_JOBS`` for this test: ``configure(MAX_RETRIES=0)``."""

    def change(**changes: object) -> None:
        settings.RWS_JOBS = {**settings.RWS_JOBS, **changes}

    return change


class Clock:
    """The time in this process and, with CLOCK "local", of the queue. It stands still between two moves."""

    def __init__(self, traveller: Any) -> None:
        self._traveller = traveller

    @property
    def now(self) -> float:
        return time.time()

    def move_to(self, when: float | datetime) -> None:
        self._traveller.move_to(when)

    def forward(self, seconds: float) -> None:
        self._traveller.shift(seconds)


@pytest.fixture
def clock(configure: Callable[..., None]) -> Iterator[Clock]:
    """A clock moved by hand, that shows 2027-01-15 08:00:00 UTC, a Friday."""
    configure(CLOCK="local")
    with time_machine.travel(1_800_000_000, tick=False) as traveller:
        yield Clock(traveller)


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Start a ``Worker``; it is stopped at the end of the test. Needs ``django_db(transaction=True)``."""
    workers: list[Worker] = []

    def start(queues: list[str] | None = None, threads: int = 1, **options: Any) -> Worker:
        worker = Worker(queues, threads, **options)
        worker.start()
        workers.append(worker)
        return worker

    yield start
    stuck = [worker for worker in workers if not worker.stop(timeout=30)]
    assert not stuck, "a worker did not stop: one of its jobs still runs"


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Future[Any]]]:
    """Run a function in a thread of its own, hence on connections of its own. Needs ``django_db(transaction=True)``."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(32) as pool:
        yield lambda function, *args, **kwargs: pool.submit(run, function, *args, **kwargs)
