"""How values look: ages, exact times, badges, errors in one line, payloads.

All of it is data that anybody may have enqueued. It leaves here as plain text, which templates escape, or through
``format_html()``.
"""

import json
import re
from datetime import UTC, datetime
from typing import Any

from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import Truncator, capfirst
from django.utils.timesince import timesince
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from rws_jobs import registry
from rws_jobs.info import Status
from rws_jobs.models import Job

# Longer payloads are cut: a browser takes seconds to lay out a megabyte, and nobody reads it.
LONGEST_PAYLOAD = 100_000
# Characters of an error that a list reads: more than one line shows.
ERROR_HEAD = 300

# Where a long name may break.
WORD_BREAK = format_html("<wbr>{}", "")

# What each status says beside its colour, which not everybody sees.
_SIGNS = {Status.PENDING.value: "○", Status.RUNNING.value: "▶", Status.FAILED.value: "✕"}


def exact(seconds: float) -> str:
    """Unix seconds as a time in the current time zone; the bare number where it is no time that a calendar has."""
    moment = _moment(seconds)
    return str(seconds) if moment is None else date_format(localtime(moment), "Y-m-d H:i:s T")


def moment_of(seconds: float) -> str:
    """The time to the minute, with the exact one in its tooltip."""
    moment = _moment(seconds)
    if moment is None:
        return str(seconds)
    local = localtime(moment)
    # Two parts: where the column is narrow it breaks between them.
    return format_html(
        '<time datetime="{}" title="{}"><span>{}</span> <span>{}</span></time>',
        moment.isoformat(), exact(seconds), date_format(local, "Y-m-d"), date_format(local, "H:i"),
    )  # fmt: skip


def age(seconds: float, now: float) -> str:
    """How long ago, or how far ahead, in words."""
    moment, then = _moment(seconds), _moment(now)
    if moment is None or then is None:
        return str(seconds)
    distance = abs(int(now) - int(seconds))
    if distance == 0:
        return _("now")
    if distance < 60:
        words = ngettext("%(count)d second", "%(count)d seconds", distance) % {"count": distance}
    else:
        words = timesince(min(moment, then), max(moment, then), depth=1)
    return (_("%(age)s ago") if seconds < now else _("in %(age)s")) % {"age": words}


def when(seconds: float | None, now: float) -> str:
    """The age, with the exact time in its tooltip."""
    if seconds is None:
        return "–"
    moment = _moment(seconds)
    if moment is None:
        return str(seconds)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>', moment.isoformat(), exact(seconds), age(seconds, now)
    )


def duration(seconds: float) -> str:
    """How long something took: two figures are enough."""
    if seconds < 60:
        return _("%(seconds)s s") % {"seconds": f"{seconds:.3g}" if seconds < 10 else f"{seconds:.0f}"}
    minutes, rest = divmod(round(seconds), 60)
    return _("%(minutes)d min %(seconds)d s") % {"minutes": minutes, "seconds": rest}


def badge(kind: str, sign: str, label: object) -> SafeString:
    """A small label, told apart by colour, sign and word. ``kind`` chooses the colour."""
    return format_html(
        '<span class="rws-badge rws-badge-{}"><span aria-hidden="true">{}</span> {}</span>', kind, sign, label
    )


def status_badge(status: str) -> SafeString:
    """The badge of a job's status, also of one that another program made up."""
    if status in _SIGNS:
        return badge(status, _SIGNS[status], str(Status(status).label))
    return badge("other", "?", printable(status))


def type_name(job_type: str) -> str:
    """A job type, marked where this process has no handler for it."""
    # A long name may break behind a dot.
    name = format_html_join(WORD_BREAK, "{}", ((part,) for part in re.split(r"(?<=\.)", printable(job_type))))
    if registry.find(job_type) is not None:
        return name
    title = _("This process has no handler for this job type: it may have been removed, or belong to another program.")
    return format_html('{} <span class="rws-note" title="{}">{}</span>', name, title, _("no handler"))


def attempts_of(job: Job) -> str:
    """How many attempts failed, of how many that it may have."""
    return _("%(failed)d of %(allowed)d") % {"failed": job.attempts, "allowed": job.max_retries + 1}


def error_line(error: str | None) -> str:
    """An error in one line, for a cell that cuts it where the room ends."""
    line = " ".join(printable(error or "").split())
    return format_html('<code class="rws-error" title="{}">{}</code>', line, line) if line else "–"


def payload_text(payload: str | None) -> str:
    """A payload as indented JSON, or as it stands where it is none."""
    payload = payload or ""
    try:
        text = json.dumps(json.loads(payload), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = payload
    if len(text) > LONGEST_PAYLOAD:
        text = text[:LONGEST_PAYLOAD] + "…\n" + _("(%(count)d characters in all)") % {"count": len(payload)}
    return printable(text)


def printable(value: object) -> str:
    """Text that a response can carry: half a surrogate pair, as JSON can hold it, could not be encoded."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def list_title(model_admin: Any) -> dict[str, str]:
    """The title of a list: its name. Django's says "Select job to view"."""
    return {"title": capfirst(str(model_admin.opts.verbose_name_plural))}


def short(text: str, length: int) -> str:
    """The beginning of a text."""
    return str(Truncator(printable(text)).chars(length))


def _moment(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(seconds), UTC)
    except (OverflowError, ValueError, OSError):
        return None
