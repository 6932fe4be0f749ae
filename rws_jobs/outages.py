"""What a database error means for a worker, and how long it waits before it tries again."""

import logging
import random
import time
from enum import Enum, auto

from django.db import DatabaseError, DataError, IntegrityError, InterfaceError

logger = logging.getLogger("rws_jobs")

# SQLSTATEs of PostgreSQL and error numbers of MySQL/MariaDB after which the server has rolled the transaction back.
_ROLLED_BACK_STATES = {"40001", "40P01", "55P03"}
_ROLLED_BACK_NUMBERS = {1205, 1213, 3572}
# MySQL and MariaDB report some refused values as operational errors: characters that the column's character set lacks,
# and statements beyond max_allowed_packet.
_BAD_DATA_NUMBERS = {1153, 1366}


class Verdict(Enum):
    """What is known about a transaction that ended in an error."""

    ROLLED_BACK = auto()
    """The server undid it (deadlock, serialization, lock wait): the same again may work at once."""
    BAD_DATA = auto()
    """A value or constraint was refused: the same again fails again."""
    UNKNOWN = auto()
    """Anything else, a lost connection above all: it may or may not have been committed."""


def verdict(error: BaseException) -> Verdict:
    """Say what ``error``, raised by a statement or by COMMIT, leaves us knowing."""
    cause = error.__cause__ or error
    number = error.args[0] if error.args and isinstance(error.args[0], int) else None
    if getattr(cause, "sqlstate", None) in _ROLLED_BACK_STATES or getattr(cause, "pgcode", None) in _ROLLED_BACK_STATES:
        return Verdict.ROLLED_BACK
    if number in _ROLLED_BACK_NUMBERS or is_locked(error):
        return Verdict.ROLLED_BACK
    if isinstance(error, (DataError, IntegrityError)) or number in _BAD_DATA_NUMBERS:
        return Verdict.BAD_DATA
    return Verdict.UNKNOWN


def is_locked(error: BaseException) -> bool:
    """True when SQLite refused because another connection holds the lock."""
    return "database is locked" in str(error) or "database table is locked" in str(error)


def is_held(error: BaseException) -> bool:
    """True when a server undid the transaction because of somebody else's locks on rows."""
    return verdict(error) is Verdict.ROLLED_BACK and not is_locked(error)


class Patience:
    """Seconds to wait while the database is away: doubling from 0.1 to 10, each a little different.

    Workers that lost the same database at the same moment would otherwise return to it in step.
    """

    def __init__(self, first: float = 0.1, most: float = 10.0) -> None:
        self._first, self._most = first, most
        self._next = first

    def wait(self) -> float:
        """The next pause, longer than the last."""
        pause = self._next * random.uniform(0.75, 1.25)
        self._next = min(2 * self._next, self._most)
        return pause

    def reset(self) -> None:
        """The database answered."""
        self._next = self._first


class OutageLog:
    """One line when the database goes, one when it is back; not one for every try between."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._since: float | None = None

    def lost(self, error: BaseException) -> None:
        """A statement failed."""
        if self._since is None:
            self._since = time.monotonic()
            expected = isinstance(error, (DatabaseError, InterfaceError))
            text = " ".join(str(error).split())
            logger.error(
                "%s: database error, trying again until it works: %s: %s",
                self._who,
                type(error).__name__,
                text,
                exc_info=None if expected else error,
            )

    def back(self) -> None:
        """A statement worked."""
        if self._since is not None:
            logger.warning("%s: the database is back after %.1f s", self._who, time.monotonic() - self._since)
            self._since = None

    @property
    def out(self) -> bool:
        """True between loss and return."""
        return self._since is not None
