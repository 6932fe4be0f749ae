"""The two lists of jobs in the admin: all of them, and the dead letters."""

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.admin.options import ShowFacets
from django.contrib.admin.utils import unquote
from django.contrib.auth import get_permission_codename
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.decorators import method_decorator
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from rws_jobs.info import Status
from rws_jobs.models import Job

from . import page
from .actions import delete_selected, retry_selected
from .display import (
    attempts_of,
    error_line,
    list_title,
    moment_of,
    payload_text,
    status_badge,
    type_name,
    when,
)
from .lists import FILTERS, CappedPaginator, JobChangeList
from .search import QueueFilter, TypeFilter, in_texts
from .walk import BY_DEATH, BY_ID

if TYPE_CHECKING:
    from rws_jobs.querysets import JobQuerySet


class JobAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """All jobs: to look at, to retry, to delete. They are neither added nor edited by hand.

    To hide payloads, register in its place a subclass whose ``get_payload()`` answers None.
    """

    only_status: str | None = None
    newest_first: tuple[str, ...] = BY_ID
    nothing: Any = _("No jobs: everything that was enqueued has succeeded.")

    list_display: Any = (
        "type_column",
        "status_column",
        "queue",
        "attempts_column",
        "due_column",
        "enqueued_column",
    )
    list_filter: ClassVar[Any] = ("status", QueueFilter, TypeFilter)
    list_per_page = 50
    list_max_show_all = 0
    sortable_by = ()
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    paginator = CappedPaginator
    search_fields: ClassVar[Any] = ("id",)  # shows the box; what it finds is in search.py
    search_help_text = _(
        "Finds an id or its beginning, the unique key of a live job, or an exact job type or unique key."
    )
    actions: Any = (retry_selected, delete_selected)
    change_list_template = "admin/rws_jobs/change_list.html"
    change_form_template = "admin/rws_jobs/job.html"

    class Media:
        css = {"all": ["rws_jobs/admin.css"]}

    # -- who may do what: both lists ask for the permissions of Job

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._may(request, "view")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._may(request, "delete")

    def has_retry_permission(self, request: HttpRequest) -> bool:
        """For the action and the button: ``rws_jobs.retry_job``."""
        return self._may(request, "retry")

    def _may(self, request: HttpRequest, what: str) -> bool:
        return bool(request.user.has_perm(f"rws_jobs.{get_permission_codename(what, Job._meta)}"))

    # -- which jobs

    def all_jobs(self, request: HttpRequest) -> "JobQuerySet":
        """Jobs of any status, from the database that is written to: what is seen here is then changed."""
        jobs: JobQuerySet = self.model._default_manager.using(router.db_for_write(Job))
        return jobs

    def get_queryset(self, request: HttpRequest) -> "JobQuerySet":
        return self.all_jobs(request)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        return None if "\0" in object_id else super().get_object(request, object_id, from_field)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[JobChangeList]:
        return JobChangeList

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        # Django allows every column: a walk through all rows, and a way to guess at payloads that are hidden.
        return lookup in FILTERS and not (self.only_status and lookup.startswith("status"))

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        return in_texts(queryset, search_term, errors=self.only_status == Status.FAILED.value), False

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        self.get_queryset(request).filter(pk=obj.pk).discard()

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        queryset.discard()

    # -- the columns; the list annotates "now" and "error_head"

    @admin.display(description=_("job type"))
    def type_column(self, job: Any) -> str:
        return type_name(job.job_type)

    @admin.display(description=_("status"))
    def status_column(self, job: Any) -> str:
        return status_badge(job.status)

    @admin.display(description=_("attempts"))
    def attempts_column(self, job: Any) -> str:
        return attempts_of(job)

    @admin.display(description=_("due"))
    def due_column(self, job: Any) -> str:
        return when(job.next_run_at, job.now)

    @admin.display(description=_("enqueued"))
    def enqueued_column(self, job: Any) -> str:
        return when(job.created_at, job.now)

    # -- the pages

    def get_payload(self, request: HttpRequest, job: Job) -> str | None:
        """The payload as the job's page shows it; None hides it. Override it where payloads hold secrets."""
        return payload_text(job.payload)

    # Bulk actions commit batch by batch, also under ATOMIC_REQUESTS: SQLite would be locked for all the time else.
    @transaction.non_atomic_requests
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().changelist_view(request, {**list_title(self), **(extra_context or {})})

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.retry_view)
        name = f"{self.opts.app_label}_{self.opts.model_name}_retry"
        return [path("<path:object_id>/retry/", view, name=name), *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        job_id = unquote(object_id)
        return page.show(self, request, self.get_object(request, job_id), job_id, extra_context)

    @method_decorator(require_POST)
    def retry_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        job_id = unquote(object_id)
        return page.retry(self, request, self.get_object(request, job_id), job_id)

    @method_decorator(require_POST)
    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        job_id = unquote(object_id)
        return page.delete(self, request, self.get_object(request, job_id), job_id)


class DeadLetterAdmin(JobAdmin):
    """The jobs that failed for good, the latest first."""

    only_status = Status.FAILED.value
    newest_first = BY_DEATH
    nothing = _("No dead letters: nothing has failed for good.")

    list_display: Any = ("type_column", "queue", "attempts_column", "error_column", "when_column", "age_column")
    list_filter = (QueueFilter, TypeFilter)
    search_help_text = _("Finds an id or its beginning, an exact job type or unique key, or a part of the error.")

    def get_queryset(self, request: HttpRequest) -> "JobQuerySet":
        return super().get_queryset(request).dead()

    @admin.display(description=_("error"))
    def error_column(self, job: Any) -> str:
        return error_line(job.error_head)

    # The due time of its last attempt: the row has no other, and this one is indexed.
    @admin.display(description=_("when"))
    def when_column(self, job: Any) -> str:
        return moment_of(job.next_run_at)

    @admin.display(description=_("age"))
    def age_column(self, job: Any) -> str:
        return when(job.next_run_at, job.now)
