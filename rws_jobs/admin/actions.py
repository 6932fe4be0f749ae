"""*Retry* and *Delete* for selected jobs and for all that match: confirmation, messages, and the admin's log."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.utils import model_ngettext
from django.contrib.contenttypes.models import ContentType
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from rws_jobs.info import Status
from rws_jobs.models import Job

from . import bulk, walk
from .display import printable, status_badge, type_name
from .lists import COLUMNS, JobChangeList

if TYPE_CHECKING:
    from rws_jobs.querysets import JobQuerySet

    from .jobs import JobAdmin

# As many of the jobs concerned are named on the page that asks.
_NAMED = 10


@dataclass(frozen=True, slots=True)
class Selection:
    """What an action was asked for: some ids, or all that match the filters."""

    ids: list[str]
    across: bool
    confirmed: bool

    @classmethod
    def of(cls, request: HttpRequest) -> "Selection":
        ids = dict.fromkeys(pk for pk in request.POST.getlist(ACTION_CHECKBOX_NAME) if "\0" not in pk)
        across = request.POST.get("select_across", "0") not in ("", "0")
        return cls(list(ids), across, bool(request.POST.get("post")))

    def batches(self, model_admin: "JobAdmin", request: HttpRequest, matching: "JobQuerySet") -> Iterator[list[str]]:
        """The ids, in batches: the selected ones, or those of ``matching``."""
        return bulk.in_batches(walk.through(model_admin.all_jobs(request), matching) if self.across else [self.ids])


@admin.action(permissions=["retry"], description=gettext_lazy("Retry selected %(verbose_name_plural)s"))
def retry_selected(model_admin: "JobAdmin", request: HttpRequest, queryset: "JobQuerySet") -> HttpResponse | None:
    """Give dead jobs a full new set of attempts. Asks first when it is for all that match."""
    selection = Selection.of(request)
    if selection.across and not selection.confirmed:
        return _ask(model_admin, request, selection, queryset, "retry_selected")
    # Of all that match, only dead jobs can be retried: the others need not be walked through.
    batches = selection.batches(model_admin, request, queryset.dead().order_by(*walk.BY_DEATH))
    tally = _logged(model_admin, request, selection, bulk.retry(model_admin.get_queryset(request), batches), CHANGE)
    done = ngettext("%d job was retried: it is due now.", "%d jobs were retried: they are due now.", tally.done)
    key_live = ngettext(
        "%d job was not retried: another job with its unique key is pending or running.",
        "%d jobs were not retried: for each, another job with its unique key is pending or running.",
        tally.key_live,
    )
    other = ngettext(
        "%d job was not retried: only dead jobs can be, and it is none, or none any more.",
        "%d jobs were not retried: only dead jobs can be, and they are none, or none any more.",
        tally.other,
    )
    _tell(model_admin, request, tally, [(tally.done, done), (tally.key_live, key_live), (tally.other, other)])
    return None


@admin.action(permissions=["delete"], description=gettext_lazy("Delete selected %(verbose_name_plural)s"))
def delete_selected(model_admin: "JobAdmin", request: HttpRequest, queryset: "JobQuerySet") -> HttpResponse | None:
    """Delete jobs that are not running, once that is confirmed. Takes the place of Django's action of this name."""
    selection = Selection.of(request)
    if not selection.confirmed:
        return _ask(model_admin, request, selection, queryset, "delete_selected")
    deletable = queryset.filter(status__in=[Status.PENDING.value, Status.FAILED.value])
    batches = selection.batches(model_admin, request, deletable)
    tally = _logged(model_admin, request, selection, bulk.delete(model_admin.get_queryset(request), batches), DELETION)
    done = ngettext("%d job was deleted.", "%d jobs were deleted.", tally.done)
    running = ngettext(
        "%d job was not deleted: it is running.", "%d jobs were not deleted: they are running.", tally.running
    )
    other = ngettext(
        "%d job was not deleted: it is no longer in this list.",
        "%d jobs were not deleted: they are no longer in this list.",
        tally.other,
    )
    _tell(model_admin, request, tally, [(tally.done, done), (tally.running, running), (tally.other, other)])
    return None


# -- asking


def _ask(
    model_admin: "JobAdmin", request: HttpRequest, selection: Selection, queryset: "JobQuerySet", action: str
) -> HttpResponse:
    """The page between the action and its deed."""
    conditions: list[tuple[str, str]] = []
    jobs: list[Job] = []
    if selection.across:
        # The page's own list once more: it knows how many match without counting them all.
        shown = model_admin.get_changelist_instance(request)
        assert isinstance(shown, JobChangeList)
        jobs, count, conditions = list(shown.result_list), shown.count_label, shown.conditions
    else:
        jobs = list(queryset.only(*COLUMNS).order_by("-pk"))
        count = str(len(jobs))
    deletes = action == "delete_selected"
    title = _("Delete %(count)s %(name)s?") if deletes else _("Retry %(count)s %(name)s?")
    return confirmation(
        model_admin,
        request,
        title=title % {"count": count, "name": model_ngettext(model_admin.opts, 1 if count == "1" else 2)},
        deletes=deletes,
        jobs=jobs,
        hidden=[
            ("action", action),
            ("select_across", str(int(selection.across))),
            # One is enough to say that something was selected, when all that match are meant.
            *((ACTION_CHECKBOX_NAME, pk) for pk in (selection.ids[:1] if selection.across else selection.ids)),
        ],
        back_url=request.get_full_path(),
        across=selection.across,
        conditions=conditions,
    )


def confirmation(
    model_admin: "JobAdmin",
    request: HttpRequest,
    *,
    title: str,
    deletes: bool,
    jobs: list[Job],
    hidden: list[tuple[str, str]],
    back_url: str,
    across: bool = False,
    conditions: Sequence[tuple[str, str]] = (),
) -> HttpResponse:
    """A page that asks; its form comes back to the same address."""
    request.current_app = model_admin.admin_site.name
    context = {
        **model_admin.admin_site.each_context(request),
        "title": title,
        "subtitle": None,
        "original": title,  # the last of the breadcrumbs
        "opts": model_admin.opts,
        "media": model_admin.media,
        "has_view_permission": model_admin.has_view_permission(request),
        "deletes": deletes,
        "across": across,
        "conditions": conditions,
        "jobs": [(type_name(job.job_type), printable(job.pk), status_badge(job.status)) for job in jobs[:_NAMED]],
        "unnamed": max(0, len(jobs) - _NAMED),
        "hidden": hidden,
        "back_url": back_url,
    }
    return TemplateResponse(request, "admin/rws_jobs/confirm.html", context)


# -- telling


def _tell(model_admin: "JobAdmin", request: HttpRequest, tally: bulk.Tally, sentences: list[tuple[int, str]]) -> None:
    """A message for each sentence whose count is not 0. The first tells what was done, the others what was not."""
    for number, (count, sentence) in enumerate(sentences):
        if count:
            model_admin.message_user(request, sentence % count, messages.WARNING if number else messages.SUCCESS)
    if tally.unfinished:
        rest = _("There was not time enough for all of them: run the action again for the rest.")
        model_admin.message_user(request, rest, messages.WARNING)
    elif not any(count for count, sentence in sentences):
        model_admin.message_user(request, _("There was none to change."), messages.WARNING)


def _logged(
    model_admin: "JobAdmin", request: HttpRequest, selection: Selection, tallies: Iterable[bulk.Tally], flag: int
) -> bulk.Tally:
    """Run the batches, and enter what they changed into the admin's log.

    Selected jobs get an entry each. Of all that match, a batch of 500 gets one: a hundred thousand entries help nobody.
    """
    user_id: Any = request.user.pk
    types: dict[str, str] = {}
    if not selection.across:
        named = model_admin.get_queryset(request).filter(pk__in=selection.ids)
        types = dict(named.values_list("pk", "job_type"))
    tally = bulk.Tally()
    for tally in tallies:
        if tally.changed and selection.across:
            LogEntry.objects.create(
                user_id=user_id,
                content_type=ContentType.objects.get_for_model(Job),
                object_repr=f"{len(tally.changed)} jobs, {tally.changed[0]} to {tally.changed[-1]}",
                action_flag=flag,
                change_message="Retried with all that matched." if flag == CHANGE else "Deleted with all that matched.",
            )
        elif tally.changed:
            log(request, [Job(pk=pk, job_type=types.get(pk, "")) for pk in tally.changed], flag)
    return tally


def log(request: HttpRequest, jobs: list[Job], flag: int) -> None:
    """Enter what was done to these jobs into the admin's log. Its texts are stored, so they are not translated."""
    message = "Retried." if flag == CHANGE else ""
    LogEntry.objects.log_actions(request.user.pk, jobs, flag, message)  # type: ignore[arg-type]
