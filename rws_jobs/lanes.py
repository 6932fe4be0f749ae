"""Which (queue, priority) lanes hold pending jobs, and the due jobs at their heads in claim order.

The pending index is (queue, priority, next_run_at, created_at, id). Inside one lane the due jobs are a prefix of it,
so a claim walks the lanes from the highest priority down and reads the head of each: its cost does not depend on how
many jobs wait for the future, in other queues, or at lower priorities. One query over all priorities took 26 ms
(PostgreSQL) and 85 ms (SQLite) a poll with 500,000 jobs waiting for the future; by lanes it takes what an empty table
takes.
"""

import time
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from django.db import connections

from .clock import UnixNow
from .info import CLAIM_COLUMNS

if TYPE_CHECKING:
    from .querysets import JobQuerySet

Lane = tuple[str, int]
Head = tuple[Any, ...]

# Beyond so many lanes the seeks cost more than the one sorted query over all of them.
MOST_LANES = 64
LOOKED_BEYOND = 256
# How long a pump at full speed works with the lanes it has found, and with the times it has reached in them.
LANES_KEPT = 0.1
FLOORS_KEPT = 1.0

CLAIM_ORDER = ("-priority", "next_run_at", "created_at", "id")
_IN_CLAIM_ORDER = [CLAIM_COLUMNS.index(name) for name in ("next_run_at", "created_at", "id")]


class Lanes:
    """The lanes that one worker serves: some queues or all, and only those job types that ``job_types()`` names.

    Exact by default: each call looks afresh. A pump at full speed sets ``hot`` and then sees a new lane up to 0.1 s
    late, and a job that returned to a time already passed up to 1 s late. In return it does not read, behind a long
    transaction that holds back vacuum, the dead index entries of all jobs finished before (12–15 ms a head instead of
    0.85 ms).
    """

    def __init__(
        self,
        queues: Collection[str] | None = None,
        exclude: Collection[str] = (),
        job_types: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self.queues = sorted(set(queues), reverse=True) if queues else None
        self.exclude = sorted(set(exclude))
        self.job_types = job_types
        self.hot = False
        self._lanes: list[Lane] | None = None
        self._found = 0.0
        self._floors: dict[Lane, int] = {}
        self._floored = 0.0

    def heads(self, jobs: "JobQuerySet", limit: int) -> list[Head]:
        """The first ``limit`` due jobs in claim order, as rows of CLAIM_COLUMNS."""
        lanes = self._current(jobs)
        if lanes is None:
            return self._heads_of_all(jobs, limit)
        heads: list[Head] = []
        for _, equals in groupby(lanes, key=lambda lane: lane[1]):
            # Lanes of equal priority are merged by due time, so that no queue starves another.
            wanted = limit - len(heads)
            merged = [head for lane in equals for head in self._head(jobs, lane, wanted)]
            merged.sort(key=lambda head: [head[column] for column in _IN_CLAIM_ORDER])
            heads += merged[:wanted]
            if len(heads) == limit:
                break
        return heads

    def cool(self) -> None:
        """The work has run out: look afresh from now on."""
        self.hot = False
        self._lanes = None
        self._floors.clear()

    # -- one lane

    def _head(self, jobs: "JobQuerySet", lane: Lane, limit: int) -> list[Head]:
        queue, priority = lane
        due = self._known(jobs.pending()).filter(queue=queue, priority=priority, next_run_at__lte=UnixNow())
        if self.hot and lane in self._floors:
            due = due.filter(next_run_at__gte=self._floors[lane])
        rows = list(due.order_by("next_run_at", "created_at", "id").values_list(*CLAIM_COLUMNS)[:limit])
        if self.hot and rows:
            self._floors[lane] = rows[0][_IN_CLAIM_ORDER[0]]
        return rows

    # -- too many lanes

    def _heads_of_all(self, jobs: "JobQuerySet", limit: int) -> list[Head]:
        due = self._due(jobs).order_by(*CLAIM_ORDER)
        if connections[jobs.db].vendor != "mysql" or not jobs.query.select_for_update:
            return list(due.values_list(*CLAIM_COLUMNS)[:limit])
        # MariaDB locks every row that it examines, and a sort examines all that are due: look first, then lock by id,
        # and look somewhat further, since others may hold the first ones.
        ids = list(due.unlocked().values_list("pk", flat=True)[: limit + LOOKED_BEYOND])
        heads: list[Head] = []
        while ids and len(heads) < limit:
            wanted = limit - len(heads)
            heads += due.filter(pk__any=ids[:wanted]).values_list(*CLAIM_COLUMNS)
            del ids[:wanted]
        return heads

    def _due(self, jobs: "JobQuerySet") -> "JobQuerySet":
        due = self._known(jobs.pending()).filter(next_run_at__lte=UnixNow())
        if self.queues is not None:
            due = due.filter(queue__in=self.queues)
        return due.exclude(queue__in=self.exclude) if self.exclude else due

    def _known(self, jobs: "JobQuerySet") -> "JobQuerySet":
        return jobs if self.job_types is None else jobs.filter(job_type__in=self.job_types())

    # -- all lanes

    def _current(self, jobs: "JobQuerySet") -> list[Lane] | None:
        """The lanes by priority, the highest first, or None where there are too many to walk."""
        moment = time.monotonic()
        if moment - self._floored > FLOORS_KEPT:
            self._floors.clear()
            self._floored = moment
        if not self.hot or self._lanes is None or moment - self._found > LANES_KEPT:
            lanes: list[Lane] = []
            # Plain reads: to lock the row that shows a lane would hide that row from other workers for nothing.
            for lane in self._walk(jobs.unlocked().pending()):
                lanes.append(lane)
                if len(lanes) > MOST_LANES:
                    self._lanes = None
                    return None
            lanes.sort(key=lambda lane: -lane[1])
            self._lanes, self._found = lanes, moment
        return self._lanes

    def _walk(self, pending: "JobQuerySet") -> Iterator[Lane]:
        """Each lane once, found by seeks: the next smaller priority in the queue, else the next queue."""
        if self.queues is not None:
            for name in self.queues:
                if name not in self.exclude:
                    yield from self._walk_queue(pending, name)
            return
        queues = pending.order_by("-queue").values_list("queue", flat=True)
        queue: str | None = queues.first()
        while queue is not None:
            if queue not in self.exclude:
                yield from self._walk_queue(pending, queue)
            queue = queues.filter(queue__lt=queue).first()

    def _walk_queue(self, pending: "JobQuerySet", queue: str) -> Iterator[Lane]:
        priorities = pending.filter(queue=queue).order_by("-priority").values_list("priority", flat=True)
        priority: int | None = priorities.first()
        while priority is not None:
            yield queue, priority
            priority = priorities.filter(priority__lt=priority).first()
