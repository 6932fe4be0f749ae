"""What the search box finds, and the filters beside the lists, without reading a million rows."""

import re
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from rws_jobs import registry
from rws_jobs.conf import conf

from .display import short

if TYPE_CHECKING:
    from rws_jobs.querysets import JobQuerySet

    from .jobs import JobAdmin

# Enough of an id to be a small range of the primary key: 8 hexadecimal digits of nanoseconds are 4 seconds.
_ID = re.compile(r"[0-9a-f-]{8,64}")
# How many of the newest jobs are asked which queues and types there are, and how many of each a filter offers.
_SAMPLE, _MOST_CHOICES = 1_000, 100
# Of so many known job types live unique keys are looked up: SQLite takes 500 SELECTs in a union.
_MOST_TYPES = 400


def by_key(model_admin: "JobAdmin", request: HttpRequest, term: str) -> Q | None:
    """The condition on the primary key that answers a search; None where there is none, and texts must be searched.

    Tried in turn: the beginning of an id, an id, the unique key of a live job of a known type.
    """
    if not term or "\0" in term:
        return None
    jobs = model_admin.all_jobs(request)
    if _ID.fullmatch(term):
        # The index serves the range: LIKE alone only in PostgreSQL's C collation. "z" sorts behind all digits in each.
        beginning = Q(pk__gte=term, pk__lt=f"{term}zzzz", pk__startswith=term)
        if jobs.filter(beginning).exists():
            return beginning
    elif jobs.filter(pk=term).exists():
        return Q(pk=term)
    if model_admin.only_status is None and (types := registry.job_types()[:_MOST_TYPES]):
        # Not IN: SQLite with statistics takes a unique index that holds many NULLs for useless then.
        first, *others = (jobs.live(job_type, term).values_list("pk", flat=True) for job_type in types)
        if live := list(first.union(*others, all=True)):
            return Q(pk__in=live)
    return None


def in_texts(jobs: "JobQuerySet", term: str, *, errors: bool) -> "JobQuerySet":
    """Jobs of that type or unique key or, among dead ones, with the term in their error. No index serves this."""
    if not term:
        return jobs
    found = Q(job_type=term) | Q(unique_key=term)
    return jobs.filter(found | Q(last_error__icontains=term) if errors else found)


class _ColumnFilter(admin.SimpleListFilter):
    """By the value of a text column.

    The choices are what the code declares, what the newest 1,000 jobs of the list have, and what is chosen: DISTINCT
    would read all jobs. Any other value can be given in the address.
    """

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        newest = model_admin.get_queryset(request).order_by(*model_admin.newest_first)
        names = {*self.declared(), *newest.values_list(self.parameter_name, flat=True)[:_SAMPLE]}
        chosen = self.value()
        listed = sorted(names)[:_MOST_CHOICES]
        if chosen and chosen not in listed:
            listed.append(chosen)
        return [(name, short(name, 80)) for name in listed]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(**{str(self.parameter_name): self.value()}) if self.value() else queryset

    def declared(self) -> list[str]:
        raise NotImplementedError


class QueueFilter(_ColumnFilter):
    title = _("queue")
    parameter_name = "queue"

    def declared(self) -> list[str]:
        return list(conf().QUEUES or ())


class TypeFilter(_ColumnFilter):
    title = _("job type")
    parameter_name = "job_type"

    def declared(self) -> list[str]:
        return registry.job_types()
