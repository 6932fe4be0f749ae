"""Retry or delete many jobs: in batches, each a short transaction of its own, until done or out of time.

What happens to a job is decided by the querysets' conditional statements. A batch that one of its jobs spoils is done
again job by job; so it is always known which jobs were changed, and why the others were not.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from django.db import DatabaseError, IntegrityError, transaction

from rws_jobs.info import Status
from rws_jobs.outages import Verdict, verdict
from rws_jobs.querysets import JobQuerySet

BATCH = 500
# Seconds. Web servers give up on a request after 30 (gunicorn's default); what is left can be asked for again.
BUDGET = 20.0
_TRIES = 4


@dataclass(slots=True)
class Tally:
    """What became of the jobs of one action."""

    done: int = 0
    key_live: int = 0
    running: int = 0
    other: int = 0
    unfinished: bool = False
    changed: list[str] = field(default_factory=list)
    """The ids of the batch just done."""


def in_batches(lists: Iterable[list[str]]) -> Iterator[list[str]]:
    """Lists of ids in parts of at most ``BATCH``."""
    for ids in lists:
        for start in range(0, len(ids), BATCH):
            yield ids[start : start + BATCH]


def retry(jobs: JobQuerySet, batches: Iterable[list[str]]) -> Iterator[Tally]:
    """Requeue the dead ones of ``jobs``, newest first. Yields the tally after each batch."""

    def requeue(some: JobQuerySet) -> int:
        return some.requeue()

    for tally, ids in _until_out_of_time(batches):
        tally.changed, refused = _attempt(jobs.dead(), ids, requeue)
        tally.done += len(tally.changed)
        tally.key_live += refused
        tally.other += len(ids) - len(tally.changed) - refused
        yield tally


def delete(jobs: JobQuerySet, batches: Iterable[list[str]]) -> Iterator[Tally]:
    """Delete those of ``jobs`` that are not running. Yields the tally after each batch."""

    def discard(some: JobQuerySet) -> int:
        return some.discard()

    deletable = jobs.filter(status__in=[Status.PENDING.value, Status.FAILED.value])
    for tally, ids in _until_out_of_time(batches):
        tally.changed, _ = _attempt(deletable, ids, discard)
        tally.done += len(tally.changed)
        if left := len(ids) - len(tally.changed):
            running = jobs.running().filter(pk__in=ids).count()
            tally.running += running
            tally.other += left - running
        yield tally


def _until_out_of_time(batches: Iterable[list[str]]) -> Iterator[tuple[Tally, list[str]]]:
    tally = Tally()
    deadline = time.monotonic() + BUDGET
    for number, ids in enumerate(batches):
        if number and time.monotonic() > deadline:
            tally.unfinished = True
            return
        yield tally, ids


class _Moved(Exception):
    """Some of the batch changed between the look and the step."""


def _attempt(jobs: JobQuerySet, ids: list[str], step: Callable[[JobQuerySet], int]) -> tuple[list[str], int]:
    """Do ``step`` to those of ``ids`` that are in ``jobs``: which were changed, and how many did a live key refuse?"""
    try:
        return _insist(lambda: _at_once(jobs, ids, step))
    except (IntegrityError, _Moved):
        return _insist(lambda: _one_by_one(jobs, ids, step))


def _insist(attempt: Callable[[], tuple[list[str], int]]) -> tuple[list[str], int]:
    for _ in range(_TRIES - 1):
        try:
            return attempt()
        except DatabaseError as error:
            # A deadlock with workers or with somebody who enqueues: undone by the server, the same again may work.
            if verdict(error) is not Verdict.ROLLED_BACK:
                raise
    return attempt()


def _at_once(jobs: JobQuerySet, ids: list[str], step: Callable[[JobQuerySet], int]) -> tuple[list[str], int]:
    fit = set(jobs.filter(pk__in=ids).values_list("pk", flat=True))
    with transaction.atomic(using=jobs.db):
        if fit and step(jobs.filter(pk__in=fit)) != len(fit):
            raise _Moved
    return [pk for pk in ids if pk in fit], 0


def _one_by_one(jobs: JobQuerySet, ids: list[str], step: Callable[[JobQuerySet], int]) -> tuple[list[str], int]:
    changed, refused = [], 0
    with transaction.atomic(using=jobs.db):
        for pk in ids:
            try:
                with transaction.atomic(using=jobs.db):
                    if step(jobs.filter(pk=pk)):
                        changed.append(pk)
            except IntegrityError:
                refused += 1
    return changed, refused
