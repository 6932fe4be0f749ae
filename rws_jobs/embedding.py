"""Working jobs off by hand, one at a time, in the caller's own thread: for programs of your own, and for tests."""

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from django.db import DatabaseError, InterfaceError, connections, router

from . import registry
from .conf import conf
from .executor import execute
from .info import Claim
from .lanes import Lanes
from .liveness import Heart, Watch
from .models import Job
from .outages import Verdict, verdict
from .outcomes import Dead, Lost, Outcome, Retrying
from .settling import ClaimsLost, announce, is_heard, log, settle, without_text
from .transactions import short_transaction

_watches: dict[str, Watch] = {}
_next_look: dict[str, float] = {}


def tick(queues: Collection[str] | None = None) -> bool:
    """Claim one due job, of these queues or of any, and run it here. False when none is due.

    True when one was claimed, whatever became of it. Database errors are raised; a job whose outcome could not be
    written is rescued later, like one whose worker is gone.
    """
    if isinstance(queues, str):
        raise ValueError("queues are a list of names, not one text")
    using = router.db_for_write(Job)
    jobs = Job.objects.using(using)
    lanes = Lanes(queues, job_types=registry.job_types if conf().UNKNOWN_JOBS == "leave" else None)
    if not lanes.heads(jobs, 1):
        _look_for_the_lost(using)
        return False
    with _registered(using) as heart:
        with short_transaction(using):
            claims = jobs.claim(heart.worker, lanes, 1)
        for claim in claims:
            with _beating(heart):
                begun = time.monotonic()
                outcome = execute(claim, using)
                claim.ran = time.monotonic() - begun
            _finish(using, claim, outcome)
    return bool(claims)


def _finish(using: str, claim: Claim, outcome: Outcome) -> None:
    try:
        with short_transaction(using):
            settle(Job.objects.using(using), [(claim, outcome)])
    except ClaimsLost:
        outcome = Lost()
    except (DatabaseError, InterfaceError) as error:
        if verdict(error) is not Verdict.BAD_DATA:
            raise
        outcome = without_text(outcome, error)
        with short_transaction(using):
            settle(Job.objects.using(using), [(claim, outcome)])
    log([(claim, outcome)])
    if is_heard(outcome):
        announce(claim, outcome)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if (
        isinstance(outcome, (Retrying, Dead))
        and outcome.failure.exception == "builtins.KeyboardInterrupt"
        and on_main_thread
    ):
        # Somebody pressed Ctrl-C at this program, not at a worker: the job is settled, and the program may stop.
        raise KeyboardInterrupt


@contextmanager
def _registered(using: str) -> Iterator[Heart]:
    """A worker for the length of one tick, whose row is there before its claim and gone after its job."""
    heart = Heart(using)
    heart.register()
    try:
        yield heart
    finally:
        heart.stop()


@contextmanager
def _beating(heart: Heart) -> Iterator[None]:
    """Beat from another thread while a job lasts; most jobs end before the first beat."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(conf().HEARTBEAT_INTERVAL):
            try:
                heart.beat()
            except (DatabaseError, InterfaceError):
                connections[heart.using].close()
        connections.close_all()

    thread = threading.Thread(target=beat, name="rws_jobs heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _look_for_the_lost(using: str) -> None:
    """With nothing to do, now and then, see whether another worker is gone: there may be no other to see it."""
    now = time.monotonic()
    if now >= _next_look.get(using, 0.0):
        _next_look[using] = now + conf().HEARTBEAT_INTERVAL
        _watches.setdefault(using, Watch(using)).look()
