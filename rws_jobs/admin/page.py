"""The page of one job, and its two buttons. Both are POSTs to addresses of their own; a GET of those is refused."""

from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, DELETION
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _

from rws_jobs import administration
from rws_jobs.info import Status
from rws_jobs.models import Job
from rws_jobs.querysets import UniqueKeyIsLive

from .actions import confirmation, log
from .details import details
from .display import printable, short

if TYPE_CHECKING:
    from .jobs import JobAdmin


def show(model_admin: "JobAdmin", request: HttpRequest, job: Job | None, job_id: str, extra: Any) -> HttpResponse:
    """Everything about the job, and no form: a POST here is an attempt to edit it."""
    if not model_admin.has_view_permission(request, job) or request.method not in ("GET", "HEAD"):
        raise PermissionDenied
    if job is None:
        return _missing(model_admin, request, job_id)
    request.current_app = model_admin.admin_site.name
    context = {
        **model_admin.admin_site.each_context(request),
        **details(model_admin, request, job),
        "title": short(job.job_type, 100),
        "subtitle": None,
        "opts": model_admin.opts,
        "original": job,
        "media": model_admin.media,
        "has_view_permission": True,
        "preserved_filters": model_admin.get_preserved_filters(request),
        "history_url": _job_url(model_admin, job.pk, "history"),
        **(extra or {}),
    }
    return TemplateResponse(request, model_admin.change_form_template or "admin/rws_jobs/job.html", context)


def retry(model_admin: "JobAdmin", request: HttpRequest, job: Job | None, job_id: str) -> HttpResponse:
    """The *Retry* button."""
    if not model_admin.has_retry_permission(request):
        raise PermissionDenied
    if job is None:
        return _missing(model_admin, request, job_id)
    name = printable(job)
    try:
        retried = administration.retry(job.pk)
    except UniqueKeyIsLive as error:
        text = _("“{}” was not retried, since another job with its unique key is pending or running: {}")
        message = format_html(text, name, _link(model_admin, error.live_id or "?"))
        model_admin.message_user(request, message, messages.ERROR)
        return _to_page(model_admin, request, job.pk)
    if not retried:
        return _not_dead(model_admin, request, job.pk)
    log(request, [Job(pk=job.pk, job_type=job.job_type)], CHANGE)
    message = format_html(_("“{}” was retried: it is due now. See job {}."), name, _link(model_admin, job.pk))
    model_admin.message_user(request, message, messages.SUCCESS)
    return _to_list(model_admin, request)


def delete(model_admin: "JobAdmin", request: HttpRequest, job: Job | None, job_id: str) -> HttpResponse:
    """The *Delete* button, and the answer to the question that follows it."""
    if not model_admin.has_delete_permission(request, job):
        raise PermissionDenied
    if job is None:
        return _missing(model_admin, request, job_id)
    name = printable(job)
    if job.status != Status.RUNNING.value and not request.POST.get("post"):
        back_url = _filtered(model_admin, request, _url(model_admin, "change", job.pk))
        title = _("Delete this job?")
        return confirmation(model_admin, request, title=title, deletes=True, jobs=[job], hidden=[], back_url=back_url)
    # Of those in this list: a dead letter that somebody has retried meanwhile is another thing to delete.
    if model_admin.get_queryset(request).filter(pk=job.pk).discard():
        log(request, [Job(pk=job.pk, job_type=job.job_type)], DELETION)
        model_admin.message_user(request, _("“%s” was deleted.") % name, messages.SUCCESS)
        return _to_list(model_admin, request)
    if model_admin.all_jobs(request).running().filter(pk=job.pk).exists():
        message = _("“%s” was not deleted: it is running, and its worker would not notice.") % name
        model_admin.message_user(request, message, messages.ERROR)
        return _to_page(model_admin, request, job.pk)
    return _missing(model_admin, request, job.pk)


# -- where to go then


def _missing(model_admin: "JobAdmin", request: HttpRequest, job_id: str) -> HttpResponse:
    """The job is not, or no longer, in this list: say where it is."""
    if "\0" not in job_id and Job.objects.using(router.db_for_write(Job)).filter(pk=job_id).exists():
        return _not_dead(model_admin, request, job_id)
    text = _("There is no job “%s”: it has succeeded, or somebody deleted it.") % short(job_id, 100)
    model_admin.message_user(request, text, messages.WARNING)
    return _to_list(model_admin, request)


def _not_dead(model_admin: "JobAdmin", request: HttpRequest, job_id: str) -> HttpResponse:
    status = Job.objects.using(router.db_for_write(Job)).filter(pk=job_id).values_list("status", flat=True).first()
    if status is None:
        return _missing(model_admin, request, job_id)
    label = Status(status).label if status in Status.values else printable(status)
    text = _("Job {} is no dead letter, or none any more: it is {}. Only dead jobs can be retried.")
    model_admin.message_user(request, format_html(text, _link(model_admin, job_id), label), messages.WARNING)
    return _to_list(model_admin, request)


def _to_list(model_admin: "JobAdmin", request: HttpRequest) -> HttpResponseRedirect:
    """The list as it was filtered; the admin's first page for those who may not see it."""
    if not model_admin.has_view_permission(request):
        return HttpResponseRedirect(reverse("admin:index", current_app=model_admin.admin_site.name))
    return HttpResponseRedirect(_filtered(model_admin, request, _url(model_admin, "changelist")))


def _to_page(model_admin: "JobAdmin", request: HttpRequest, job_id: str) -> HttpResponseRedirect:
    if not model_admin.has_view_permission(request):
        return _to_list(model_admin, request)
    return HttpResponseRedirect(_filtered(model_admin, request, _url(model_admin, "change", job_id)))


def _filtered(model_admin: "JobAdmin", request: HttpRequest, url: str) -> str:
    filters = model_admin.get_preserved_filters(request)
    return str(add_preserved_filters({"preserved_filters": filters, "opts": model_admin.opts}, url))


def _url(model_admin: "JobAdmin", page: str, *job_id: str) -> str:
    name = f"admin:{model_admin.opts.app_label}_{model_admin.opts.model_name}_{page}"
    return reverse(name, args=[quote(pk) for pk in job_id], current_app=model_admin.admin_site.name)


def _job_url(model_admin: "JobAdmin", job_id: str, page: str = "change") -> str | None:
    """A page in the list of all jobs, where this admin site has that list."""
    if not model_admin.admin_site.is_registered(Job):
        return None
    try:
        return reverse(f"admin:rws_jobs_job_{page}", args=[quote(job_id)], current_app=model_admin.admin_site.name)
    except NoReverseMatch:
        return None


def _link(model_admin: "JobAdmin", job_id: str) -> str:
    url = _job_url(model_admin, job_id)
    name = printable(job_id)
    return name if url is None else format_html('<a href="{}">{}</a>', url, name)
