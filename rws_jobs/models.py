"""The tables and their labels. What happens to a job is in querysets.py."""

from django.db import models
from django.db.models import F, Q, Value
from django.db.models.functions import Concat
from django.utils.translation import gettext_lazy as _

from .fields import GeneratedKeyField, KeyField, KeyTextField
from .indexes import StatusIndex
from .info import Status
from .querysets import JobQuerySet


class Job(models.Model):
    """One job. The first twelve columns are the original's: other programs read and write them with plain SQL."""

    id = KeyField(_("id"), max_length=64, primary_key=True)
    job_type = KeyTextField(_("job type"))
    payload = models.TextField(_("payload"))
    status = KeyField(_("status"), max_length=16, choices=Status, db_default=Status.PENDING.value)
    attempts = models.IntegerField(_("failed attempts"), db_default=0)
    max_retries = models.IntegerField(_("retries allowed"), db_default=3)
    next_run_at = models.BigIntegerField(_("due"), help_text=_("Unix seconds."))
    created_at = models.BigIntegerField(_("enqueued"), help_text=_("Unix seconds."))
    last_error = models.TextField(_("last error"), null=True)
    queue = KeyField(_("queue"), max_length=64, db_default="default")
    priority = models.BigIntegerField(_("priority"), db_default=0, help_text=_("Larger runs first."))
    unique_key = KeyField(_("unique key"), max_length=191, null=True)

    claimed_by = KeyField(_("worker"), max_length=64, null=True)
    claimed_at = models.BigIntegerField(_("claimed"), null=True, help_text=_("Unix seconds."))
    history = models.TextField(_("failed attempts in detail"), null=True)
    meta = models.TextField(_("extensions"), null=True)
    # At most one live job per type and key, for every writer on every database: conditional unique constraints do not
    # exist on MySQL. The not-null test matters: Concat takes NULL as "", and keyless jobs would collide.
    live_key = GeneratedKeyField(
        expression=models.Case(
            models.When(
                Q(status__in=[Status.PENDING.value, Status.RUNNING.value], unique_key__isnull=False),
                then=Concat(F("job_type"), Value("\n"), F("unique_key"), output_field=models.TextField()),
            ),
            default=None,
        ),
        output_field=KeyField(max_length=450, null=True),
        db_persist=True,
        unique=True,
        null=True,
        verbose_name=_("live key"),
    )

    objects = JobQuerySet.as_manager()

    class Meta:
        db_table = "rws_jobs"
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        permissions = [("retry_job", _("Can retry job"))]
        indexes = [
            StatusIndex(
                status=Status.PENDING.value,
                fields=["queue", "priority", "next_run_at", "created_at", "id"],
                name="rws_jobs_pending",
            ),
            StatusIndex(status=Status.RUNNING.value, fields=["claimed_by"], name="rws_jobs_running"),
            StatusIndex(status=Status.FAILED.value, fields=["next_run_at", "id"], name="rws_jobs_failed"),
        ]

    def __str__(self) -> str:
        return f"{self.job_type} {self.id}"


class DeadLetter(Job):
    """A job that failed for good, for a list of its own in the admin. Permissions are those of Job."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")


class JobSchedule(models.Model):
    """A cron schedule and the next time at which it is due. The first two columns are the original's."""

    name = KeyField(_("name"), max_length=191, primary_key=True)
    next_run_at = models.BigIntegerField(_("next run"), help_text=_("Unix seconds."))
    cron = models.TextField(_("cron expression"), null=True)
    timezone = models.CharField(_("time zone"), max_length=64, db_default="UTC")
    job_type = models.TextField(_("job type"), null=True)
    payload = models.TextField(_("payload"), null=True)
    options = models.TextField(_("options"), null=True, help_text=_("JSON."))
    paused = models.BooleanField(_("paused"), db_default=False)
    last_run_at = models.BigIntegerField(_("last run"), null=True, help_text=_("Unix seconds."))

    class Meta:
        db_table = "rws_job_schedules"
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")

    def __str__(self) -> str:
        return str(self.name)


class JobWorker(models.Model):
    """A worker process that lives, or did until its heart stopped. Its id is never used again."""

    id = KeyField(_("id"), max_length=64, primary_key=True)
    host = models.CharField(_("host"), max_length=255)
    pid = models.BigIntegerField(_("process"))
    queues = models.TextField(_("queues"), null=True, help_text=_("Every queue where empty."))
    threads = models.IntegerField(_("threads"), db_default=1)
    started_at = models.BigIntegerField(_("started"), help_text=_("Unix seconds."))
    beat_at = models.BigIntegerField(_("last heartbeat"), help_text=_("Unix seconds."))
    lease = models.IntegerField(_("lease"), help_text=_("Seconds without a heartbeat after which it counts as dead."))

    class Meta:
        db_table = "rws_job_workers"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return str(self.id)
