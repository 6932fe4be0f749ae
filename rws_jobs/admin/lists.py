"""Lists that open as fast with a million jobs as with a thousand.

* An order is one that an index serves, chosen by what is filtered; headers do not sort.
* Nothing is counted beyond ``CAP``. Pages reach as far; "older" goes on from there by the last key shown.
* What no index serves (job type, texts) is looked for among 10,000 jobs at a time, and the page says so.

That is for the page shown. An action on all that match gets the whole queryset and walks it in batches.
"""

import json
from typing import TYPE_CHECKING, Any

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.db.models.functions import Left
from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.functional import cached_property
from django.utils.translation import gettext as _

from rws_jobs.clock import UnixNow
from rws_jobs.info import Status
from rws_jobs.text import flaw

from . import walk
from .display import ERROR_HEAD
from .search import by_key
from .walk import BY_DEATH, BY_ID, Key

if TYPE_CHECKING:
    from .jobs import JobAdmin

CAP = 1_000

BEFORE_VAR = "before"
FILTERS = ("status__exact", "status", "queue", "job_type")

# What a row shows. Payloads and histories hold up to a megabyte each and stay where they are.
COLUMNS = (
    "id", "job_type", "queue", "status", "attempts", "max_retries", "next_run_at", "created_at",
)  # fmt: skip

# Few rows, sorted in memory: the longest running first. By id, a planner could walk the whole table to find them.
BY_CLAIM = ("claimed_at", "id")
# The pending index itself. The claim order mixes directions, which no index of it serves.
BY_LANE = ("queue", "priority", "next_run_at", "created_at", "id")


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no further than ``CAP``."""

    @cached_property
    def _found(self) -> int:
        # Keeps its order: PostgreSQL would otherwise read the table from the start to find the first thousand.
        jobs: Any = self.object_list
        return int(jobs.values("pk")[: CAP + 1].count())

    @cached_property
    def count(self) -> int:
        return min(self._found, CAP)

    @property
    def capped(self) -> bool:
        """There are more than were counted."""
        return self._found > CAP


class JobChangeList(ChangeList):
    """A list of jobs. ``floor`` is the key of the last job looked at, where the look ended before the jobs did."""

    model_admin: "JobAdmin"
    paginator: CappedPaginator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Another search or filter starts at the top again.
        self.params.pop(BEFORE_VAR, None)

    # -- which jobs, in which order

    def get_filters_params(self, params: Any = None) -> Any:
        found = super().get_filters_params(params)
        found.pop(BEFORE_VAR, None)
        if any("\0" in value for values in found.values() for value in values):
            raise IncorrectLookupParameters("PostgreSQL has no NUL.")
        return found

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        statuses = [*self.filter_params.get("status__exact", ()), *self.filter_params.get("status", ())]
        # No index has several of them in one order.
        self.status = self.model_admin.only_status or (statuses[0] if len(statuses) == 1 else "".join(statuses) or None)
        self.by_queue, self.by_type = "queue" in self.params, "job_type" in self.params
        self.ids = by_key(self.model_admin, request, self.query)
        query = self.query
        if self.ids is not None:
            self.query = ""  # the primary key answers it: no text is searched
        self.order = self._best_order()
        try:
            found: QuerySet[Any] = super().get_queryset(request, exclude_parameters)
        finally:
            self.query = query
        return found if self.ids is None else found.filter(self.ids)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        return list(self.order)

    def _best_order(self) -> tuple[str, ...]:
        if self.ids is not None:
            return BY_ID
        if self.status == Status.FAILED.value:
            return BY_DEATH
        if self.status == Status.RUNNING.value:
            return BY_CLAIM
        if self.status == Status.PENDING.value and not self.by_type and not self.query:
            # MariaDB sorts all of the queue if the order names it.
            return BY_LANE[1:] if self.by_queue else BY_LANE
        return BY_ID

    @property
    def _unindexed(self) -> bool:
        """Something is asked that the index of the order does not know: a page could cost a walk through all of it."""
        if self.ids is not None or self.order not in (BY_ID, BY_DEATH):
            return False
        return self.by_type or self.by_queue or bool(self.query) or (self.order == BY_ID and self.status is not None)

    # -- which of them are shown

    def get_results(self, request: HttpRequest) -> None:
        before = self._key(request.GET.get(BEFORE_VAR))
        self.starts_below = before is not None
        self.floor: Key | None = None
        listed = self.queryset
        if before or self._unindexed:
            found = self._look_through(request, before)
            listed = self.model_admin.all_jobs(request).filter(pk__in=found).order_by(*self.order)
        self.queryset = listed.only(*COLUMNS).annotate(now=UnixNow(), error_head=Left("last_error", ERROR_HEAD))
        super().get_results(request)
        self.show_admin_actions = bool(self.result_count)

    def _look_through(self, request: HttpRequest, before: Key | None) -> list[str]:
        """The ids of those that match among the next jobs of the order; notes in ``floor`` where more follow."""
        jobs = self.model_admin.all_jobs(request)
        reach = walk.WINDOW if self._unindexed else CAP
        keys = walk.next_keys(jobs, self.order, before, reach + 1)
        if len(keys) > reach:
            self.floor = keys[reach - 1]
        return walk.those_that_match(jobs, self.queryset, [key[-1] for key in keys[:reach]])[: CAP + 1]

    def _key(self, text: str | None) -> Key | None:
        """The key in a link of ours; None for any other text, and where the order has no keys to go on from."""
        try:
            key = json.loads(text or "")
        except (ValueError, RecursionError):
            return None
        kinds = {BY_ID: [str], BY_DEATH: [int, str]}.get(self.order)
        if not isinstance(key, list) or [type(part) for part in key] != kinds or flaw(key[-1]):
            return None
        return None if len(key) == 2 and abs(key[0]) >= 2**63 else key

    # -- for the templates

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        if PAGE_VAR not in (new_params or {}):
            remove = [*(remove or ()), BEFORE_VAR]
        return super().get_query_string(new_params, remove)

    @property
    def older_url(self) -> str | None:
        """From the end of the last page: the list of what comes after it."""
        last_page = not self.multi_page or self.page_num == self.paginator.num_pages
        if not last_page or self.order not in (BY_ID, BY_DEATH):
            return None
        key = self.floor
        if self.paginator.capped:
            last = list(self.result_list)[-1]
            key = [getattr(last, name) for name in walk.key_names(self.order)]
        return None if key is None else self.get_query_string({BEFORE_VAR: json.dumps(key), PAGE_VAR: 1})

    @property
    def count_label(self) -> str:
        """How many there are: "12", or "1,000+" where counting stopped."""
        count = number_format(self.result_count, force_grouping=True)
        return f"{count}+" if self.paginator.capped or self.floor else count

    @property
    def window_label(self) -> str | None:
        """Among how many they were looked for, if not among all."""
        return number_format(walk.WINDOW, force_grouping=True) if self.floor and self._unindexed else None

    @property
    def clear_search_url(self) -> str:
        return self.get_query_string(remove=[SEARCH_VAR])

    @property
    def conditions(self) -> list[tuple[str, str]]:
        """What is filtered and searched, in words."""
        found = [(_("search"), self.query)] if self.query else []
        for spec in self.filter_specs:
            _everything, *choices = spec.choices(self)
            found += [(str(spec.title), str(choice["display"])) for choice in choices if choice["selected"]]
        return found
