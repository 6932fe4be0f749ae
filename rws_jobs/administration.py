"""Look at jobs, retry dead ones, delete any that is not running."""

from django.db import IntegrityError, router, transaction

from .info import JobInfo, Status
from .models import Job
from .querysets import JobQuerySet, UniqueKeyIsLive
from .text import flaw


def jobs(status: str | None = None, limit: int = 100) -> list[JobInfo]:
    """At most ``limit`` jobs in claim order, all or those of one status: "pending", "running" or "failed".

    An unknown status is an empty list. Raises ValueError for a negative limit.
    """
    if limit < 0:
        raise ValueError(f"limit must not be negative, but is {limit}")
    if status is not None and flaw(status):
        return []
    found = _jobs().in_claim_order()
    return (found if status is None else found.filter(status=status))[:limit].as_infos()


def failed_jobs(limit: int = 100) -> list[JobInfo]:
    """At most ``limit`` dead letters, in claim order."""
    return jobs(Status.FAILED.value, limit)


def retry(job_id: str) -> bool:
    """Give a dead job a full new set of attempts, due now; its history stays.

    True if it was dead; False when it is missing, pending or running. Raises UniqueKeyIsLive when another job of its
    type and unique key is pending or running.
    """
    if flaw(job_id):
        return False  # no database could hold such an id
    found = _jobs()
    # Looked at first: an UPDATE would wait, on MariaDB up to 50 s, for whoever holds the row.
    if not found.dead().filter(pk=job_id).exists():
        return False
    try:
        with transaction.atomic(using=found.db):
            return bool(found.filter(pk=job_id).requeue())
    except IntegrityError:
        for job_type, unique_key in found.filter(pk=job_id).values_list("job_type", "unique_key"):
            live = found.live(job_type, unique_key or "").values_list("pk", flat=True).first()
            raise UniqueKeyIsLive(job_id, live) from None
        raise


def delete(job_id: str) -> bool:
    """Delete a pending or dead job. False when it is running or missing."""
    if flaw(job_id) or not _jobs().filter(pk=job_id).exists():
        return False
    return bool(_jobs().filter(pk=job_id).discard())


def _jobs() -> JobQuerySet:
    # The alias for writing, also to read: a look that leads to a write must not come from a lagging replica.
    return Job.objects.using(router.db_for_write(Job))
