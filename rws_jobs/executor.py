"""Run one claimed job and say how it ended. Never raises."""

import logging
import random
import time
import traceback
from collections.abc import Awaitable
from contextvars import Context
from dataclasses import replace
from inspect import isasyncgen, isawaitable, isgenerator
from typing import Any

from asgiref.sync import async_to_sync
from django.db import DatabaseError, InterfaceError, connections, transaction

from . import registry
from .conf import conf
from .context import CurrentJob, set_current
from .info import Claim
from .isolation import drop_connections, refresh_connections
from .models import Job
from .outages import Verdict, verdict
from .outcomes import (
    COMPLETED,
    Completed,
    Dead,
    Discard,
    Failure,
    Lost,
    Outcome,
    Released,
    Retry,
    Retrying,
    Snooze,
    Snoozed,
    retry_delay,
)
from .settling import send
from .signals import job_started
from .text import clean, shorten

logger = logging.getLogger("rws_jobs")

# An atomic job whose transaction the server undid (deadlock, serialization) is repeated at once so often, uncharged.
ATOMIC_REPEATS = 3


class LeftOpen(Exception):
    """A handler returned inside a transaction that it had begun: what it wrote was rolled back."""

    def __init__(self, aliases: set[str]) -> None:
        super().__init__(f"the handler left a transaction open on {', '.join(sorted(aliases))}; it was rolled back")


class _ClaimLost(Exception):
    """Ends an atomic job's transaction whose row is no longer ours."""


def execute(claim: Claim, using: str) -> Outcome:
    """Run the handler of a claimed job, in a context of its own; ``using`` is the alias of the job table."""
    started = time.time()
    inside = refresh_connections()
    outcome: Outcome
    try:
        # A fresh context: language, time zone and context variables of one job are not seen by the next.
        outcome = Context().run(_run, claim, using)
    except Snooze as snooze:
        outcome = Snoozed(snooze.delay)
    except _ClaimLost:
        outcome = Lost()
    except BaseException as error:
        # SystemExit and KeyboardInterrupt too: only a real signal stops a worker, one job must not stop the fleet.
        outcome = _after_failure(claim, error, started)
    if left_open := refresh_connections() - inside:
        drop_connections(left_open)
        if outcome is COMPLETED:
            outcome = _after_failure(claim, LeftOpen(left_open), started)
    return outcome


def _run(claim: Claim, using: str) -> Outcome:
    scheduled_for = claim.extensions.get("scheduled_for") if claim.meta else None
    set_current(CurrentJob(claim.id, claim.job_type, claim.queue, claim.attempt, claim.max_retries, scheduled_for))
    if job_started.receivers:
        send(job_started, claim.info())
    handler = registry.resolve(claim.job_type)
    function, arguments = handler.bind(claim.payload)
    if handler.atomic:
        return _run_atomic(function, arguments, claim, using)
    _call(function, arguments)
    return COMPLETED


def _call(function: Any, arguments: dict[str, Any] | tuple[Any, ...]) -> None:
    answer = function(**arguments) if isinstance(arguments, dict) else function(*arguments)
    if answer is None:
        return
    if isawaitable(answer):
        # Its sync_to_async parts, the ORM's above all, come back to this thread and to connections that we look after.
        async_to_sync(_awaited)(answer)
    elif isgenerator(answer) or isasyncgen(answer):
        raise TypeError("the handler answered a generator, none of whose lines has run")


async def _awaited(answer: Awaitable[object]) -> None:
    await answer


def _run_atomic(function: Any, arguments: dict[str, Any] | tuple[Any, ...], claim: Claim, using: str) -> Outcome:
    """The handler and the end of its job in one transaction: exactly once for what it writes to the same database."""
    committed: list[bool] = []
    connection = connections[using]
    for repeat in range(ATOMIC_REPEATS + 1):
        connection.ensure_connection()
        session = connection.connection
        try:
            with transaction.atomic(using=using):
                transaction.on_commit(lambda: committed.append(True), using=using, robust=True)
                _call(function, arguments)
                if not Job.objects.using(using).complete([claim]):
                    raise _ClaimLost
            return Completed(recorded=True)
        except BaseException as error:
            if committed:
                logger.exception("%r is done, but a callback after its commit raised", claim)
                return Completed(recorded=True)
            if not isinstance(error, (DatabaseError, InterfaceError)):
                raise
            what = verdict(error)
            # The end of an atomic block may have connected anew already.
            lost = connection.connection is not session or not connection.is_usable()
            if what is Verdict.UNKNOWN and lost:
                # Perhaps after its COMMIT: then the row is gone, and the fence finds nothing to give back.
                logger.warning("%r lost its database, given back uncharged: %s", claim, clean(_text(error)))
                return Released()
            if what is not Verdict.ROLLED_BACK or repeat == ATOMIC_REPEATS:
                raise
            # Long enough for the other side of a deadlock to take its lock first.
            time.sleep(random.uniform(0.002, 0.02))
    raise AssertionError("unreachable")


def _after_failure(claim: Claim, error: BaseException, started: float) -> Outcome:
    failure = _describe(error, started)
    if isinstance(error, Discard) or claim.attempt > claim.max_retries:
        return Dead(failure)
    if isinstance(error, Retry) and error.delay is not None:
        return Retrying(failure, error.delay)
    handler = registry.find(claim.job_type)
    return Retrying(failure, retry_delay(handler.backoff if handler else None, claim.attempt, error))


# -- what is kept of an error


def _describe(error: BaseException, started: float) -> Failure:
    limit = conf().MAX_ERROR_BYTES
    if isinstance(error, Retry) and error.__cause__ is not None:
        return replace(_describe(error.__cause__, started), traceback=_traceback(error, limit))
    kind = type(error)
    text = _text(error)
    if isinstance(error, (Discard, registry.NoHandler)):
        shown = text
    else:
        shown = f"{kind.__name__}: {text}" if text else kind.__name__
    return Failure(
        error=shorten(shown, limit),
        exception=clean(f"{kind.__module__}.{kind.__qualname__}"),
        traceback=_traceback(error, limit),
        started=started,
        ended=time.time(),
    )


def _traceback(error: BaseException, limit: int) -> str:
    try:
        return shorten("".join(traceback.format_exception(error)), limit)
    except BaseException:
        return f"(the traceback of this {type(error).__name__} could not be formatted)"


def _text(error: BaseException) -> str:
    """``str(error)``, whatever its ``__str__`` does, even if it calls ``sys.exit()``."""
    for show in (str, repr):
        try:
            return show(error)
        except BaseException:
            continue
    return f"(the text of this {type(error).__name__} could not be read)"
