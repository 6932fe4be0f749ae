"""The life of a job: every statement that changes a job row, in life order.

::

    enqueue ──► pending ──claim──► running ──complete──► (row deleted)
                   ▲  ▲               │ ├─retry / snooze──► pending, later
                   │  └────release────┘ ├─bury────────────► failed  (the dead-letter list)
                   └───────────requeue──┼───────────────────┘
                                        └─rescue (its worker is gone): retry or bury

Each is one conditional statement, and the number of rows that it changed is the verdict. What a worker writes about a
job it holds is fenced by ``claimed_by`` and ``attempts``: a worker that lost its claim changes nothing. Every step
back to pending or to failed clears ``claimed_by``, so that another program's claim never inherits a dead owner.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from django.db import IntegrityError, connections, models, transaction
from django.db.models import Exists, OuterRef

from . import history
from .clock import UnixNow
from .info import CLAIM_COLUMNS, INFO_COLUMNS, Claim, JobInfo, Status
from .lanes import CLAIM_ORDER, Lanes
from .outcomes import Failure

if TYPE_CHECKING:
    from .models import Job, JobWorker

PENDING, RUNNING, FAILED = Status.PENDING.value, Status.RUNNING.value, Status.FAILED.value

_DISOWNED: dict[str, Any] = {"claimed_by": None, "claimed_at": None}
# Rows of one INSERT: enough to make the statement's own cost vanish, and below any server's packet limit.
_BATCH_ROWS, _BATCH_BYTES = 500, 262_144


class UniqueKeyIsLive(Exception):
    """A dead job cannot be retried: another job of its type and unique key is pending or running (``live_id``)."""

    def __init__(self, job_id: str, live_id: str | None) -> None:
        self.job_id, self.live_id = job_id, live_id
        super().__init__(f"job {job_id} cannot be retried while job {live_id} with the same unique key is live")


class JobQuerySet(models.QuerySet["Job"]):
    """Jobs, and all that can happen to them."""

    # -- where a job stands

    def pending(self) -> Self:
        """Jobs that wait: due, delayed, or for their next attempt."""
        return self.filter(status=PENDING)

    def running(self) -> Self:
        """Jobs that a worker has claimed."""
        return self.filter(status=RUNNING)

    def dead(self) -> Self:
        """The dead-letter list: jobs that failed for good."""
        return self.filter(status=FAILED)

    def live(self, job_type: str, unique_key: str) -> Self:
        """The pending or running job of this type and unique key, if there is one."""
        return self.filter(live_key=f"{job_type}\n{unique_key}")

    def in_claim_order(self) -> Self:
        """The larger priority first, then the earlier due, the earlier enqueued, the smaller id."""
        return self.order_by(*CLAIM_ORDER)

    def owned_by(self, worker: str) -> Self:
        """Jobs that this worker has claimed and not settled."""
        return self.filter(status=RUNNING, claimed_by=worker)

    def held(self, claim: Claim) -> Self:
        """The fence: the claimed job, as long as it is still held as it was claimed."""
        return self.owned_by(claim.worker).filter(pk=claim.id, attempts=claim.attempts)

    def as_infos(self) -> list[JobInfo]:
        """These jobs as plain values."""
        return [
            JobInfo(**dict(zip(INFO_COLUMNS, row, strict=True))) for row in self.values_list(*INFO_COLUMNS.values())
        ]

    # -- (nothing) → pending

    def enqueue(self, job: "Job") -> None:
        """Insert a job in the caller's transaction."""
        job.save(force_insert=True, using=self.db)

    def enqueue_unless_live(self, job: "Job") -> str | None:
        """Insert a job with a unique key, unless one is live: then answer that one's id, else None.

        Look first, insert inside a savepoint, on conflict look again: a conflict in the caller's transaction would
        poison it on PostgreSQL. Raises IntegrityError when three tries do not settle it.
        """
        live = self.live(job.job_type, str(job.unique_key)).values_list("pk", flat=True)
        connection = connections[self.db]
        for tried in range(3):
            found = live.first()
            if found is None and tried and connection.in_atomic_block and connection.features.has_select_for_update:
                # A REPEATABLE READ transaction sees what was committed since it began only by a read with a lock. Not
                # the first resort: two that wait for the same lock end in a deadlock on MariaDB.
                found = live.select_for_update().first()
            if found is not None:
                return found
            try:
                with transaction.atomic(using=self.db):
                    self.enqueue(job)
                return None
            except IntegrityError as error:
                conflict = error
        raise conflict

    def enqueue_all(self, jobs: Sequence["Job"]) -> None:
        """Insert many jobs, in batches that no server's packet limit refuses. All or nothing inside a transaction."""
        batch: list[Job] = []
        size = 0
        for job in jobs:
            batch.append(job)
            size += len(job.payload)
            if len(batch) == _BATCH_ROWS or size >= _BATCH_BYTES:
                self.bulk_create(batch)
                batch, size = [], 0
        if batch:
            self.bulk_create(batch)

    def enqueue_all_unless_live(self, jobs: Sequence["Job"]) -> dict[tuple[str, str], str]:
        """Insert those of many jobs with unique keys whose key is not live; answer the live id of each type and key."""
        new = {(job.job_type, str(job.unique_key)): job for job in reversed(jobs)}
        live: dict[tuple[str, str], str] = {}
        keys = [f"{job_type}\n{unique_key}" for job_type, unique_key in new]
        for start in range(0, len(keys), _BATCH_ROWS):
            found = self.filter(live_key__in=keys[start : start + _BATCH_ROWS])
            for job_type, unique_key, pk in found.values_list("job_type", "unique_key", "pk"):
                live[job_type, str(unique_key)] = pk
        missing = [job for key, job in new.items() if key not in live]
        missing.reverse()
        try:
            with transaction.atomic(using=self.db):
                self.enqueue_all(missing)
            live.update({(job.job_type, str(job.unique_key)): job.pk for job in missing})
        except IntegrityError:
            # Somebody enqueued one of them at the same moment: each for itself.
            for job in missing:
                live[job.job_type, str(job.unique_key)] = self.enqueue_unless_live(job) or job.pk
        return live

    # -- pending → running

    def claim(self, worker: str, lanes: Lanes, limit: int) -> list[Claim]:
        """Take up to ``limit`` due jobs in claim order. They are the worker's once the transaction is committed.

        The UPDATE names the ids and repeats the status at its top level: as a subquery, PostgreSQL would answer "1
        row" to both of two workers. And the status is a range: SQLite without statistics and PostgreSQL with
        statistics of an empty table would otherwise walk a status index instead of the primary key (25–92 ms a claim
        instead of 0.4–1.8).
        """
        connection = connections[self.db]
        locks = connection.features.has_select_for_update_skip_locked and connection.in_atomic_block
        heads = lanes.heads(self.select_for_update(skip_locked=True) if locks else self.all(), limit)
        if not heads:
            return []
        ids = [head[0] for head in heads]
        still_pending = self.filter(pk__any=ids, status__range=(PENDING, PENDING)).order_by()
        # Nobody comes between the look and the UPDATE where the rows are locked, or SQLite's one write lock is held.
        alone = locks or (connection.vendor == "sqlite" and connection.in_atomic_block)
        if not alone:
            # Else a job may have run, failed and been put off in between.
            still_pending = still_pending.filter(next_run_at__lte=UnixNow())
        won = still_pending.update(status=RUNNING, claimed_by=worker, claimed_at=UnixNow())
        if won != len(heads) or not alone:
            mine = {head[0]: head for head in self.owned_by(worker).filter(pk__any=ids).values_list(*CLAIM_COLUMNS)}
            heads = [mine[pk] for pk in ids if pk in mine]
        return [Claim(*(*head, worker)) for head in heads]

    def unlocked(self) -> Self:
        """The same jobs, read without row locks."""
        jobs = self.all()
        jobs.query.select_for_update = False
        return jobs

    # -- running → (deleted)

    def complete(self, claims: Iterable[Claim]) -> int:
        """The handlers returned. The number of rows deleted is the number of claims still held."""
        by_fence: dict[tuple[str, int], list[str]] = defaultdict(list)
        for claim in claims:
            by_fence[claim.worker, claim.attempts].append(claim.id)
        return sum(
            self.owned_by(worker).filter(pk__any=ids, attempts=attempts)._raw_delete(self.db)
            for (worker, attempts), ids in by_fence.items()
        )

    # -- running → pending or failed

    def retry(self, claim: Claim, failure: Failure, delay: float) -> int:
        """A failed attempt, with attempts left: due again ``delay`` seconds from now."""
        return self._back_to_pending(claim, failure, UnixNow(after=delay))

    def snooze(self, claim: Claim, delay: float) -> int:
        """Not now: due again ``delay`` seconds from now, uncharged."""
        return self.held(claim).update(status=PENDING, next_run_at=UnixNow(after=delay), **_DISOWNED)

    def bury(self, claim: Claim, failure: Failure) -> int:
        """Failed for good: to the dead-letter list. The due time stays, as the original's does."""
        return self.held(claim).update(status=FAILED, **self._charge(claim, failure), **_DISOWNED)

    def release(self, claim: Claim) -> int:
        """Given back as it was, uncharged."""
        return self.held(claim).update(status=PENDING, **_DISOWNED)

    def _back_to_pending(self, claim: Claim, failure: Failure, due: UnixNow) -> int:
        return self.held(claim).update(status=PENDING, next_run_at=due, **self._charge(claim, failure), **_DISOWNED)

    def _charge(self, claim: Claim, failure: Failure) -> dict[str, Any]:
        return {
            "attempts": claim.attempts + 1,
            "last_error": failure.error,
            "history": history.extended(claim.history, claim.attempt, claim.worker, failure),
        }

    # -- running, its worker gone

    def orphans(self, workers: "models.QuerySet[JobWorker]") -> Self:
        """Running jobs whose owner is none of ``workers``. Rows without an owner belong to another program."""
        alive = workers.filter(pk=OuterRef("claimed_by"))
        return self.running().filter(claimed_by__isnull=False).filter(~Exists(alive))

    def as_claims(self, limit: int | None = None) -> list[Claim]:
        """Running rows as the claims of their owners, whose fence then guards what is done to them."""
        rows = self.values_list(*CLAIM_COLUMNS, "claimed_by")[:limit]
        return [Claim(*row) for row in rows]

    # -- failed → pending, and away

    def requeue(self) -> int:
        """Dead jobs get a full new set of attempts, due now. Their history and last error stay.

        Raises IntegrityError where a unique key is live again: ``retry()`` in the public names says which.
        """
        return self.dead().update(status=PENDING, attempts=0, next_run_at=UnixNow(), **_DISOWNED)

    def discard(self) -> int:
        """Delete jobs that are not running."""
        return self.filter(status__in=[PENDING, FAILED]).order_by()._raw_delete(self.db)
