"""Text that every database here can store alike, checked before any SQL sees it.

Left to the databases, each fails in its own way: PostgreSQL refuses NUL, SQLite ignores lengths, a driver raises
UnicodeEncodeError on half a surrogate pair. And an oversized statement ends a MariaDB connection with "server has
gone away", which a worker would take for an outage.
"""

import re
from typing import Literal

# The original's columns. Characters are code points, as in VARCHAR(n) of PostgreSQL, MySQL and MariaDB.
JOB_TYPE_LENGTH = 255  # its column has no limit, but job type, "\n" and key make one indexed column (live_key)
QUEUE_LENGTH = 64
UNIQUE_KEY_LENGTH = 191

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_job_type(text: object) -> str:
    return check_text(text, what="job_type", limit=JOB_TYPE_LENGTH, one_line=True)


def check_queue(text: object) -> str:
    return check_text(text, what="queue", limit=QUEUE_LENGTH, one_line=True)


def check_unique_key(text: object) -> str:
    # May hold line ends: a job type never does, so the first "\n" of live_key always ends the job type.
    return check_text(text, what="unique_key", limit=UNIQUE_KEY_LENGTH, fix="shorten it, or use a hash of it")


def check_payload(text: object, limit: int) -> str:
    fix = "keep the data in a table or file and pass its key, or raise RWS_JOBS['MAX_PAYLOAD_BYTES']"
    return check_text(text, what="payload", limit=limit, unit="bytes of UTF-8", empty=True, fix=fix)


def check_text(
    text: object,
    *,
    what: str,
    limit: int,
    unit: Literal["characters", "bytes of UTF-8"] = "characters",
    empty: bool = False,
    one_line: bool = False,
    fix: str = "shorten it",
) -> str:
    """Return `text` as a plain str, or raise TypeError or ValueError saying what is wrong with `what` and the fix.

    `one_line` refuses every control character, `empty` allows the empty text.
    """
    if not isinstance(text, str):
        raise TypeError(f"{what} must be str, not {type(text).__name__}")
    text = str.__str__(text)  # an enum member as its value: str() of one can be its name, and drivers may do the same
    if not text and not empty:
        raise ValueError(f"{what} is empty: give it at least one character")
    if found := flaw(text):
        raise ValueError(f"{what} {found}")
    if one_line and not text.isprintable() and (control := _CONTROL.search(text)):
        raise ValueError(f"{what} has the control character {control[0]!r} at position {control.start()}: remove it")
    size = len(text) if unit == "characters" or text.isascii() else len(text.encode())
    if size > limit:
        raise ValueError(f"{what} is too large: {size:,} {unit}, the limit is {limit:,}: {fix}")
    return text


def flaw(text: str) -> str | None:
    """Say what keeps a text from being stored ("has a NUL character at …"), or None: the usual, quick answer."""
    if (nul := text.find("\0")) >= 0:
        return f"has a NUL character at position {nul}, which PostgreSQL cannot store: remove it"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            return f"has half a surrogate pair ({half!r}) at position {error.start}, which is not Unicode: remove it"
    return None


def clean(text: str) -> str:
    """Make any text storable: NUL and lone surrogates become visible escapes (`\\x00`, `\\ud800`).

    For texts that must be kept whatever they hold, such as the error of a job: refusing one would lose its outcome.
    """
    if flaw(text):
        return text.replace("\0", "\\x00").encode(errors="backslashreplace").decode()
    return str.__str__(text)


def shorten(text: str, limit_bytes: int) -> str:
    """Clean a text and cut it to at most `limit_bytes` of UTF-8, saying in the middle how much was left out.

    A traceback begins with where the job was called and ends with the error: both ends are worth keeping.
    """
    text = clean(text)
    data = text.encode()
    if len(data) <= limit_bytes:
        return text
    room = limit_bytes - len(_left_out(len(data)).encode())
    if room < 0:  # not even the marker fits
        return _whole_characters(data[:limit_bytes])
    head = _whole_characters(data[: room // 2])
    tail = _whole_characters(data[len(data) - (room - room // 2) :])
    return head + _left_out(len(data) - len(head.encode()) - len(tail.encode())) + tail


def _left_out(size: int) -> str:
    return f"\n… {size:,} bytes left out …\n"


def _whole_characters(data: bytes) -> str:
    # Cut from valid UTF-8, so that only a character broken by the cut is there to be ignored.
    return data.decode(errors="ignore")
