"""Creates the tables, or adopts those of a program that shares them: see rws_jobs/operations.py."""

from django.db import migrations, models
from django.db.models.functions import Concat

from rws_jobs import fields, indexes, operations


class Migration(migrations.Migration):
    # With True, --fake-initial would take the original's tables for ours, and add nothing to them.
    initial = False

    dependencies = []

    operations = [
        # Jobs first: if the table of that name is something else, nothing has been touched yet.
        operations.CreateOrAdopt(
            name="Job",
            fields=[
                ("id", fields.KeyField(max_length=64, primary_key=True, serialize=False, verbose_name="id")),
                ("job_type", fields.KeyTextField(verbose_name="job type")),
                ("payload", models.TextField(verbose_name="payload")),
                (
                    "status",
                    fields.KeyField(
                        choices=[("pending", "pending"), ("running", "running"), ("failed", "failed")],
                        db_default="pending",
                        max_length=16,
                        verbose_name="status",
                    ),
                ),
                ("attempts", models.IntegerField(db_default=0, verbose_name="failed attempts")),
                ("max_retries", models.IntegerField(db_default=3, verbose_name="retries allowed")),
                ("next_run_at", models.BigIntegerField(help_text="Unix seconds.", verbose_name="due")),
                ("created_at", models.BigIntegerField(help_text="Unix seconds.", verbose_name="enqueued")),
                ("last_error", models.TextField(null=True, verbose_name="last error")),
                ("queue", fields.KeyField(db_default="default", max_length=64, verbose_name="queue")),
                (
                    "priority",
                    models.BigIntegerField(db_default=0, help_text="Larger runs first.", verbose_name="priority"),
                ),
                ("unique_key", fields.KeyField(max_length=191, null=True, verbose_name="unique key")),
                ("claimed_by", fields.KeyField(max_length=64, null=True, verbose_name="worker")),
                ("claimed_at", models.BigIntegerField(help_text="Unix seconds.", null=True, verbose_name="claimed")),
                ("history", models.TextField(null=True, verbose_name="failed attempts in detail")),
                ("meta", models.TextField(null=True, verbose_name="extensions")),
                (
                    "live_key",
                    fields.GeneratedKeyField(
                        db_persist=True,
                        expression=models.Case(
                            models.When(
                                models.Q(status__in=["pending", "running"], unique_key__isnull=False),
                                then=Concat(
                                    models.F("job_type"),
                                    models.Value("\n"),
                                    models.F("unique_key"),
                                    output_field=models.TextField(),
                                ),
                            ),
                            default=None,
                        ),
                        null=True,
                        output_field=fields.KeyField(max_length=450, null=True),
                        unique=True,
                        verbose_name="live key",
                    ),
                ),
            ],
            options={
                "verbose_name": "job",
                "verbose_name_plural": "jobs",
                "db_table": "rws_jobs",
                "permissions": [("retry_job", "Can retry job")],
                "indexes": [
                    indexes.StatusIndex(
                        status="pending",
                        fields=["queue", "priority", "next_run_at", "created_at", "id"],
                        name="rws_jobs_pending",
                    ),
                    indexes.StatusIndex(status="running", fields=["claimed_by"], name="rws_jobs_running"),
                    indexes.StatusIndex(status="failed", fields=["next_run_at", "id"], name="rws_jobs_failed"),
                ],
            },
        ),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[],
            options={
                "verbose_name": "dead letter",
                "verbose_name_plural": "dead letters",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("rws_jobs.job",),
        ),
        operations.CreateOrAdopt(
            name="JobSchedule",
            fields=[
                ("name", fields.KeyField(max_length=191, primary_key=True, serialize=False, verbose_name="name")),
                ("next_run_at", models.BigIntegerField(help_text="Unix seconds.", verbose_name="next run")),
                ("cron", models.TextField(null=True, verbose_name="cron expression")),
                ("timezone", models.CharField(db_default="UTC", max_length=64, verbose_name="time zone")),
                ("job_type", models.TextField(null=True, verbose_name="job type")),
                ("payload", models.TextField(null=True, verbose_name="payload")),
                ("options", models.TextField(help_text="JSON.", null=True, verbose_name="options")),
                ("paused", models.BooleanField(db_default=False, verbose_name="paused")),
                ("last_run_at", models.BigIntegerField(help_text="Unix seconds.", null=True, verbose_name="last run")),
            ],
            options={
                "verbose_name": "schedule",
                "verbose_name_plural": "schedules",
                "db_table": "rws_job_schedules",
            },
        ),
        operations.CreateOrAdopt(
            name="JobWorker",
            fields=[
                ("id", fields.KeyField(max_length=64, primary_key=True, serialize=False, verbose_name="id")),
                ("host", models.CharField(max_length=255, verbose_name="host")),
                ("pid", models.BigIntegerField(verbose_name="process")),
                (
                    "queues",
                    models.TextField(help_text="Every queue where empty.", null=True, verbose_name="queues"),
                ),
                ("threads", models.IntegerField(db_default=1, verbose_name="threads")),
                ("started_at", models.BigIntegerField(help_text="Unix seconds.", verbose_name="started")),
                ("beat_at", models.BigIntegerField(help_text="Unix seconds.", verbose_name="last heartbeat")),
                (
                    "lease",
                    models.IntegerField(
                        help_text="Seconds without a heartbeat after which it counts as dead.", verbose_name="lease"
                    ),
                ),
            ],
            options={
                "verbose_name": "worker",
                "verbose_name_plural": "workers",
                "db_table": "rws_job_workers",
            },
        ),
    ]
