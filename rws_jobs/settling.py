"""What is written, said and logged of a job once its run has ended."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from django.dispatch import Signal

from .info import Claim, JobInfo, Status
from .models import Job
from .outcomes import COMPLETED, Completed, Dead, Lost, Outcome, Released, Retrying, Snoozed
from .querysets import JobQuerySet
from .signals import claim_lost, job_dead, job_retrying, job_succeeded

logger = logging.getLogger("rws_jobs")

Run = tuple[Claim, Outcome]
DeadHook = Callable[[JobInfo], object]

_dead_hooks: list[DeadHook] = []


class ClaimsLost(Exception):
    """Fewer rows were changed than jobs were to be settled: some are no longer ours."""


def on_dead(hook: DeadHook) -> DeadHook:
    """Call ``hook(job)`` with a :class:`JobInfo` when a worker of this process has put a job on the dead-letter list.

    A decorator or a plain call. Hooks are called in the order of registration, after the commit; one that raises is
    logged. Raises TypeError when ``hook`` cannot be called.
    """
    if not callable(hook):
        raise TypeError(f"on_dead takes a callable, not {type(hook).__name__}")
    _dead_hooks.append(hook)
    return hook


def settle(jobs: JobQuerySet, runs: Sequence[Run]) -> None:
    """Write how these runs ended: one DELETE for all that succeeded, an UPDATE for each other. Raises ClaimsLost."""
    done = [claim for claim, outcome in runs if outcome is COMPLETED]
    settled = jobs.complete(done) if done else 0
    if len(done) < len(runs):
        settled += sum(_write(jobs, claim, outcome) for claim, outcome in runs if outcome is not COMPLETED)
    if settled != len(runs):
        raise ClaimsLost


def _write(jobs: JobQuerySet, claim: Claim, outcome: Outcome) -> int:
    match outcome:
        case Retrying(failure, delay):
            return jobs.retry(claim, failure, delay)
        case Snoozed(delay):
            return jobs.snooze(claim, delay)
        case Dead(failure):
            return jobs.bury(claim, failure)
        case Released():
            return jobs.release(claim)
        case Completed() | Lost():
            return 1  # nothing to write any more


def without_text(outcome: Outcome, error: Exception) -> Outcome:
    """The same outcome with nothing in it that a database could refuse, after one has."""
    if isinstance(outcome, (Retrying, Dead)):
        text = f"(the error could not be stored: {type(error).__name__})"
        return replace(outcome, failure=replace(outcome.failure, error=text, exception="", traceback=""))
    return outcome


def log(runs: Iterable[Run]) -> None:
    """One line per run that is worth one: failures and dead letters always, successes at DEBUG."""
    debug = logger.isEnabledFor(logging.DEBUG)
    for claim, outcome in runs:
        if outcome is COMPLETED and not debug:
            continue
        match outcome:
            case Completed() if debug:
                logger.debug("%s %s done after %.3f s", claim.job_type, claim.id, claim.ran, extra=_extra(claim))
            case Retrying(failure, delay):
                logger.warning(
                    "%s %s failed, attempt %d of %d, after %.3f s, next in %g s: %s",
                    *(claim.job_type, claim.id, claim.attempt, claim.max_retries + 1, claim.ran, delay),
                    _one_line(failure.error),
                    extra=_extra(claim),
                )
            case Dead(failure):
                logger.error(
                    "%s %s is dead, attempt %d of %d, after %.3f s: %s",
                    *(claim.job_type, claim.id, claim.attempt, claim.max_retries + 1, claim.ran),
                    _one_line(failure.error),
                    extra=_extra(claim),
                )
            case Lost():
                logger.warning(
                    "%s %s: the claim was lost, nothing written", claim.job_type, claim.id, extra=_extra(claim)
                )


def is_heard(outcome: Outcome) -> bool:
    """True when somebody listens for this outcome; telling nobody should cost nothing."""
    match outcome:
        case Completed():
            return bool(job_succeeded.receivers)
        case Retrying():
            return bool(job_retrying.receivers)
        case Dead():
            return bool(_dead_hooks or job_dead.receivers)
        case Lost():
            return bool(claim_lost.receivers)
    return False


def announce(claim: Claim, outcome: Outcome) -> None:
    """Call the hooks and signal receivers of a committed outcome, each by itself. Never raises."""
    match outcome:
        case Completed():
            send(job_succeeded, claim.info("succeeded"))
        case Retrying(failure):
            info = claim.info(Status.PENDING.value, attempts=claim.attempts + 1, error=failure.error)
            send(job_retrying, info)
        case Dead(failure):
            info = claim.info(Status.FAILED.value, attempts=claim.attempts + 1, error=failure.error)
            for hook in list(_dead_hooks):
                try:
                    hook(info)
                except BaseException:
                    logger.exception("on_dead hook %r raised for %r", hook, claim)
            send(job_dead, info)
        case Lost():
            send(claim_lost, claim.info())


def send(signal: Signal, info: JobInfo) -> None:
    """Tell the receivers of a signal. One that raises is logged, also one that calls ``sys.exit()``."""
    try:
        signal.send_robust(Job, job=info)
    except BaseException:
        logger.exception("a signal receiver raised for %r", info)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


def _extra(claim: Claim) -> dict[str, object]:
    return {"job_id": claim.id, "job_type": claim.job_type, "queue": claim.queue, "attempt": claim.attempt}
