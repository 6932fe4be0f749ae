"""Schedules and workers in the admin: to look at only."""

from typing import Any

from django.contrib import admin
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from rws_jobs.clock import UnixNow
from rws_jobs.schedules import declared

from .display import badge, list_title, payload_text, printable, when


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """A table that only the workers write."""

    sortable_by = ()
    change_list_template = "admin/rws_jobs/change_list.html"
    nothing: Any = ""

    class Media:
        css = {"all": ["rws_jobs/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = self.model._default_manager.using(router.db_for_write(self.model))
        found: QuerySet[Any] = rows.annotate(now=UnixNow())
        return found

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().changelist_view(request, {**list_title(self), **(extra_context or {})})


class JobScheduleAdmin(ReadOnlyAdmin):
    """Which schedules are stored, when each ran last and runs next, and whether the code still declares it."""

    ordering = ("name",)
    nothing = _("No schedules yet: a worker stores those that the code declares when it starts.")
    list_display = ("name", "cron_column", "timezone", "job_type", "next_column", "last_column", "state_column")
    fields = readonly_fields = (
        "name", "state_column", "cron_column", "timezone", "next_column", "last_column", "job_type", "payload_column",
        "options",
    )  # fmt: skip

    @admin.display(description=_("cron expression"), empty_value="–")
    def cron_column(self, row: Any) -> str:
        return format_html("<code>{}</code>", printable(row.cron)) if row.cron else ""

    @admin.display(description=_("next run"))
    def next_column(self, row: Any) -> str:
        return when(row.next_run_at, row.now)

    @admin.display(description=_("last run"))
    def last_column(self, row: Any) -> str:
        return when(row.last_run_at, row.now)

    @admin.display(description=_("state"))
    def state_column(self, row: Any) -> str:
        if row.name not in declared():
            return badge("other", "–", _("not declared here"))
        return badge("pending", "‖", _("paused")) if row.paused else badge("good", "●", _("declared"))

    @admin.display(description=_("payload"))
    def payload_column(self, row: Any) -> str:
        return format_html('<pre class="rws-text">{}</pre>', payload_text(row.payload))


class JobWorkerAdmin(ReadOnlyAdmin):
    """Which workers there are, and whether their hearts beat."""

    ordering = ("host", "started_at", "id")
    nothing = _("No workers: start one with “manage.py runjobs”.")
    list_display = (
        "id_column",
        "state_column",
        "host",
        "pid",
        "queues_column",
        "threads",
        "started_column",
        "beat_column",
    )
    list_display_links = None

    @admin.display(description=_("id"))
    def id_column(self, row: Any) -> str:
        return format_html('<code class="rws-id">{}</code>', printable(row.pk))

    @admin.display(description=_("state"))
    def state_column(self, row: Any) -> str:
        alive = row.now - row.beat_at <= row.lease
        return badge("good", "●", _("alive")) if alive else badge("failed", "✕", _("silent"))

    @admin.display(description=_("queues"))
    def queues_column(self, row: Any) -> str:
        return printable(row.queues or _("all"))

    @admin.display(description=_("started"))
    def started_column(self, row: Any) -> str:
        return when(row.started_at, row.now)

    @admin.display(description=_("last heartbeat"))
    def beat_column(self, row: Any) -> str:
        return when(row.beat_at, row.now)
