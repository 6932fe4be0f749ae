"""The threads that run handlers, between the claims that wait for them and the runs that wait to be settled."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from queue import Empty, SimpleQueue

from django.db import connections

from .info import Claim
from .isolation import drop_connections, refresh_connections, rest_connections
from .outcomes import Outcome
from .settling import Run, announce

logger = logging.getLogger("rws_jobs")

# A thread without a job for so many seconds closes the connections that CONN_MAX_AGE does not keep.
REST_AFTER = 1.0


class ExecutorThreads:
    """``count`` threads that take claims in order and leave runs. Only the pump puts, takes back and looks.

    There is no lock on the way of a job: claims pass through a queue written in C, counters belong to one thread each.
    """

    def __init__(self, count: int, execute: Callable[[Claim], Outcome], wake: threading.Event) -> None:
        self.count = count
        self.finished: deque[Run] = deque()
        self.ran_dry = False
        self._execute, self._wake = execute, wake
        self._ready: SimpleQueue[Claim | None] = SimpleQueue()
        self._put = 0
        self._taken_back = 0
        self._started = [0] * count
        self._ended = [0] * count
        self._last_run = [0.0] * count
        # (claims put up to here, when): the oldest unstarted claim is in the first batch not yet passed.
        self._batches: deque[tuple[int, float]] = deque()
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"rws_jobs executor {index + 1}", daemon=True)
            for index in range(count)
        ]

    def start(self) -> None:
        """Start the threads; they live until ``dismiss()``."""
        for thread in self._threads:
            thread.start()

    def put(self, claims: list[Claim]) -> None:
        """Hand over claimed jobs, to be run in this order."""
        self.ran_dry = False
        self._put += len(claims)
        self._batches.append((self._put, time.monotonic()))
        for claim in claims:
            self._ready.put(claim)

    def take_back(self) -> list[Claim]:
        """Remove all jobs that no thread has started."""
        claims = []
        try:
            while (claim := self._ready.get_nowait()) is not None:
                claims.append(claim)
        except Empty:
            pass
        self._taken_back += len(claims)
        return claims

    def dismiss(self) -> None:
        """Let each thread end after the job that it runs."""
        for _ in self._threads:
            self._ready.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the threads to end, at most ``timeout`` seconds in all."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- what the pump wants to know

    @property
    def handed_over(self) -> int:
        """Jobs handed over so far and not taken back."""
        return self._put - self._taken_back

    @property
    def unstarted(self) -> int:
        """Jobs handed over that no thread has started."""
        return max(0, self.handed_over - sum(self._started))

    @property
    def running(self) -> int:
        """Jobs that a thread runs at this moment."""
        return sum(self._started) - sum(self._ended)

    @property
    def recent_run(self) -> float:
        """The longest of the threads' last runs, in seconds."""
        return max(self._last_run)

    @property
    def oldest_waits(self) -> float:
        """How long the oldest unstarted job has been waiting, in seconds."""
        passed = sum(self._started) + self._taken_back
        while self._batches and self._batches[0][0] <= passed:
            self._batches.popleft()
        return time.monotonic() - self._batches[0][1] if self._batches else 0.0

    def _next(self) -> Claim | None:
        try:
            return self._ready.get_nowait()
        except Empty:
            self.ran_dry = True
        try:
            return self._ready.get(timeout=REST_AFTER)
        except Empty:
            rest_connections()
        return self._ready.get()

    def _work(self, index: int) -> None:
        while True:
            claim = self._next()
            if claim is None:
                connections.close_all()
                return
            self._started[index] += 1
            begun = time.monotonic()
            outcome = self._execute(claim)
            self._last_run[index] = claim.ran = time.monotonic() - begun
            self.finished.append((claim, outcome))
            self._ended[index] += 1
            # set() takes a lock; the pump clears the flag before it looks at `finished`, so a set flag is enough.
            if not self._wake.is_set():
                self._wake.set()


class Announcer:
    """The thread that calls hooks and signal receivers of settled jobs: a slow one delays the others, never the pump.

    It starts with the first outcome that somebody listens for.
    """

    def __init__(self) -> None:
        self._outcomes: SimpleQueue[Run | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, claim: Claim, outcome: Outcome) -> None:
        """Announce this committed outcome soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rws_jobs announcer", daemon=True)
            self._thread.start()
        self._outcomes.put((claim, outcome))

    def stop(self, timeout: float = 5.0) -> None:
        """Wait until everything is announced, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._outcomes.put(None)
            self._thread.join(timeout)

    def _work(self) -> None:
        while (run := self._outcomes.get()) is not None:
            inside = refresh_connections()
            Context().run(announce, *run)
            if left_open := refresh_connections() - inside:
                drop_connections(left_open)
                logger.error("a hook left a transaction open on %s; it was rolled back", ", ".join(left_open))
            rest_connections()
        connections.close_all()
