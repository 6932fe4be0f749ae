"""The attempts of a job that ended badly, as kept in its ``history`` column: JSON, oldest first, bounded."""

import json
from typing import Any

from .conf import conf
from .outcomes import Failure
from .text import shorten


def read(text: str | None) -> list[dict[str, Any]]:
    """The entries of a history column; an empty list where it holds nothing readable."""
    try:
        entries = json.loads(text) if text else []
    except ValueError:
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def extended(text: str | None, attempt: int, worker: str, failure: Failure) -> str:
    """The history with one more attempt.

    It stays below four times ``MAX_ERROR_BYTES``: old entries lose their tracebacks first, then the oldest but the very
    first (which tells how it began) go.
    """
    entries = read(text)
    entries.append(
        {
            "attempt": attempt,
            "started": round(failure.started, 3),
            "ended": round(failure.ended, 3),
            "worker": worker,
            "exception": failure.exception,
            "error": failure.error,
            "traceback": failure.traceback,
        }
    )
    limit = 4 * conf().MAX_ERROR_BYTES - len("[]")
    sizes = [len(_dump(entry)) + len(",") for entry in entries]
    for index, entry in enumerate(entries[:-1]):
        if sum(sizes) <= limit:
            break
        entry["traceback"] = ""
        sizes[index] = len(_dump(entry)) + len(",")
    while sum(sizes) > limit and len(entries) > 2:
        del entries[1], sizes[1]
    if sum(sizes) > limit:
        # Characters that JSON must escape take up to six times their size.
        for entry in entries:
            entry["error"], entry["traceback"] = shorten(entry["error"], limit // 64), ""
    return _dump(entries)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
