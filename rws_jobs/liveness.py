"""Who is alive: a worker's row and heartbeat, and the rescue of jobs whose worker is gone.

A worker's row is committed before its first claim, and its id is never used again. Each worker watches the others:
one whose heartbeat has not changed for the length of its lease, while the watcher itself was connected all the time,
is declared dead by deleting its row. A running job whose owner has no row is an orphan and goes back to pending,
charged one attempt, or to the dead-letter list. Both steps are conditional and can be repeated by anybody, so there
is no leader.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence

from django.db import router

from . import registry
from .clock import UnixNow
from .conf import conf
from .history import read
from .info import Claim
from .models import Job, JobWorker
from .outcomes import Dead, Failure, Outcome, Retrying, retry_delay
from .settling import ClaimsLost, Run, announce, is_heard, settle
from .signals import worker_lost
from .transactions import short_transaction

logger = logging.getLogger("rws_jobs")

# Orphans rescued by one transaction.
RESCUED_AT_ONCE = 100


class WorkerLost(Exception):
    """The worker that ran the job is gone."""


class Heart:
    """The row of one worker, and its heartbeat."""

    def __init__(self, using: str | None = None, *, queues: Sequence[str] | None = None, threads: int = 1) -> None:
        self.using = using or router.db_for_write(JobWorker)
        self.queues, self.threads = queues, threads
        self.worker = ""
        self._last_beat = 0.0

    def register(self) -> str:
        """Insert a row with a new id and answer the id; it must be committed before the first claim."""
        host = socket.gethostname()
        # Two containers may share host name and pid: the random part makes the id one process's own, and never reused.
        worker = f"{host[:24]}:{os.getpid()}:{secrets.token_hex(8)}"
        JobWorker.objects.using(self.using).create(
            id=worker,
            host=host[:255],
            pid=os.getpid(),
            queues=", ".join(self.queues) if self.queues else None,
            threads=self.threads,
            started_at=UnixNow(),
            beat_at=UnixNow(),
            lease=max(1, round(conf().DEAD_AFTER)),
        )
        self.worker, self._last_beat = worker, time.monotonic()
        return worker

    def beat(self) -> bool:
        """Say that this worker lives. False when it has been declared dead: its claims are lost or will be."""
        begun = time.monotonic()
        alive = JobWorker.objects.using(self.using).filter(pk=self.worker).update(beat_at=UnixNow())
        if alive:
            self._last_beat = begun
        return bool(alive)

    @property
    def trusted(self) -> bool:
        """False when the last good beat is so old that others may soon take this worker for dead: start nothing
        more."""
        return time.monotonic() - self._last_beat < conf().DEAD_AFTER * 2 / 3

    def stop(self) -> None:
        """Remove the row: a worker that leaves has nothing to be rescued."""
        JobWorker.objects.using(self.using).filter(pk=self.worker).delete()


class Watch:
    """What one process has seen of the other workers' heartbeats."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._seen: dict[str, tuple[int, float]] = {}

    def forget(self) -> None:
        """The database was away: everybody's beat is old, and nobody is dead yet."""
        self._seen.clear()

    def look(self) -> int:
        """Declare dead whose beat has stood still for a whole lease, and rescue orphans. Answers how many jobs."""
        moment = time.monotonic()
        seen: dict[str, tuple[int, float]] = {}
        for worker, beat, lease in JobWorker.objects.using(self.using).values_list("pk", "beat_at", "lease"):
            beat_seen, since = self._seen.get(worker, (beat, moment))
            seen[worker] = (beat, since if beat == beat_seen else moment)
            if moment - seen[worker][1] > lease:
                self._declare_dead(worker, beat)
        self._seen = seen
        return rescue_orphans(self.using)

    def _declare_dead(self, worker: str, beat: int) -> None:
        # Only if it has not beaten since it was read.
        gone, _ = JobWorker.objects.using(self.using).filter(pk=worker, beat_at=beat).delete()
        if gone:
            logger.error("worker %s has not been heard of for a whole lease: its jobs are rescued", worker)
            worker_lost.send_robust(JobWorker, worker=worker)


def rescue_orphans(using: str) -> int:
    """Give running jobs whose worker has no row back to the queue, charged one attempt. Answers how many."""
    jobs = Job.objects.using(using)
    rescued = 0
    while True:
        orphans = jobs.orphans(JobWorker.objects.using(using)).as_claims(RESCUED_AT_ONCE)
        for claim in orphans:
            rescued += _rescue(using, claim)
        if len(orphans) < RESCUED_AT_ONCE:
            return rescued


def _rescue(using: str, claim: Claim) -> int:
    run: Run = (claim, _outcome_of_loss(claim))
    try:
        with short_transaction(using):
            settle(Job.objects.using(using), [run])
    except ClaimsLost:
        return 0  # another process was faster
    logger.warning("%r was left by its lost worker %s", claim, claim.worker)
    if is_heard(run[1]):
        announce(*run)
    return 1


def _outcome_of_loss(claim: Claim) -> Outcome:
    """One attempt charged. Nobody knows whether this job brought its worker down: a first loss alone never buries
    it."""
    now = time.time()
    error = WorkerLost(f"worker lost: {claim.worker}")
    failure = Failure(
        error=f"worker lost: {claim.worker}",
        exception=f"{WorkerLost.__module__}.{WorkerLost.__qualname__}",
        traceback="",
        started=now,
        ended=now,
    )
    lost_before = any(entry.get("exception") == failure.exception for entry in read(claim.history))
    if claim.attempt > claim.max_retries and lost_before:
        return Dead(failure)
    handler = registry.find(claim.job_type)
    return Retrying(failure, retry_delay(handler.backoff if handler else None, claim.attempt, error))
