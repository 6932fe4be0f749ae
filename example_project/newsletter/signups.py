"""Sign-ups from a CSV file with the columns name, email, signed_up_at, source.

Nothing is assumed of the file but its encoding: a line that makes no sense is skipped and reported, the rest goes in.
Whether mail reaches an address is not for the importer to know; that is found out by sending.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from django.db import transaction

from rws_jobs import enqueue_many

from .jobs import send_welcome
from .models import Subscriber

COLUMNS = ["name", "email", "signed_up_at", "source"]


@dataclass(frozen=True)
class SkippedLine:
    number: int
    reason: str


@transaction.atomic
def import_signups(path: Path) -> tuple[int, list[SkippedLine]]:
    """Add the subscribers of a file and enqueue their welcome: all together or, if anything fails, nothing.

    Answers how many were new, and the lines that were skipped.
    """
    found, skipped = read_signups(path)
    known = set(Subscriber.objects.values_list("email", flat=True))
    new = [subscriber for subscriber in found if subscriber.email not in known]
    for subscriber in new:
        subscriber.save()
    enqueue_many(send_welcome.message(subscriber_id=subscriber.pk) for subscriber in new)
    return len(new), skipped


def read_signups(path: Path) -> tuple[list[Subscriber], list[SkippedLine]]:
    subscribers: list[Subscriber] = []
    skipped: list[SkippedLine] = []
    first_line: dict[str, int] = {}
    # Spreadsheets put a mark before the text ("-sig"), and names may hold line ends (newline="").
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        if (header := next(rows, [])) != COLUMNS:
            raise ValueError(f"{path.name} must begin with the line {','.join(COLUMNS)}, not {','.join(header)}")
        for row in rows:
            try:
                subscriber = _subscriber(row)
                if subscriber.email in first_line:
                    raise ValueError(f"{subscriber.email} is on line {first_line[subscriber.email]} already")
            except ValueError as error:
                skipped.append(SkippedLine(rows.line_num, str(error)))
            else:
                first_line[subscriber.email] = rows.line_num
                subscribers.append(subscriber)
    return subscribers, skipped


def _subscriber(row: Sequence[str]) -> Subscriber:
    """Raises ValueError, saying what is wrong with the row."""
    if not row:
        raise ValueError("empty")
    if len(row) != len(COLUMNS):
        raise ValueError(f"{len(row)} columns instead of {len(COLUMNS)}")
    name, email, signed_up_at, source = (" ".join(cell.split()) for cell in row)
    if not name or not email:
        raise ValueError(f"no {'e-mail address' if name else 'name'}")
    try:
        created_at = datetime.fromisoformat(signed_up_at)
    except ValueError:
        raise ValueError(f"{signed_up_at!r} is not a date and time") from None
    return Subscriber(name=name, email=email.lower(), created_at=created_at, source=source)
