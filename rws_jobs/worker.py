"""The worker: one pump, the only thread that talks to the job table, and the threads that run handlers.

Each turn of the pump is one short transaction that settles what has finished and claims what fits; jobs start once
its COMMIT has returned. Batches form because turns take time: under load hundreds of jobs share a transaction, an
idle worker settles a single job at once. When a turn fails, what is known decides (see ``_turn_failed``); nothing
here ends of a database error, and an outcome is kept in memory until it is written or its claim is found lost.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection
from functools import partial

from django.db import DatabaseError, InterfaceError, connections, router

from . import registry
from .conf import conf
from .executor import execute
from .info import Claim
from .lanes import Lanes
from .ledger import Ledger
from .liveness import Heart
from .maintenance import Maintenance
from .models import Job
from .outages import OutageLog, Patience, Verdict, is_held, verdict
from .outcomes import Lost, Released
from .prefetch import Prefetch
from .settling import ClaimsLost, Run, settle
from .threads import ExecutorThreads
from .transactions import limit_lock_waits, short_transaction

logger = logging.getLogger("rws_jobs")

FIRST_PAUSE = 0.005


class Worker:
    """Works jobs off in the background of this process.

    ``queues``: the names to serve, None for all, but those in ``exclude_queues``. ``threads``: how many jobs run at
    once. ``poll_interval`` (seconds) defaults to ``POLL_INTERVAL``. ``schedules=False`` leaves schedules to others.
    With ``drain`` it ends when nothing is due, with ``max_jobs`` after so many jobs. Raises ValueError for bad
    arguments.
    """

    def __init__(
        self,
        queues: Collection[str] | None = None,
        threads: int = 4,
        *,
        exclude_queues: Collection[str] = (),
        poll_interval: float | None = None,
        schedules: bool = True,
        drain: bool = False,
        max_jobs: int | None = None,
    ) -> None:
        if isinstance(queues, str) or isinstance(exclude_queues, str):
            raise ValueError("queues are a list of names, not one text")
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        if max_jobs is not None and max_jobs < 1:
            raise ValueError(f"max_jobs must be at least 1, not {max_jobs}")
        self.using = router.db_for_write(Job)
        self._lanes = Lanes(queues, exclude_queues, registry.job_types if conf().UNKNOWN_JOBS == "leave" else None)
        self._heart = Heart(self.using, queues=sorted(queues) if queues else None, threads=threads)
        self._maintenance = Maintenance(self._heart, schedules=schedules, on_declared_dead=self._declared_dead)
        self._wake = threading.Event()
        self._threads = ExecutorThreads(threads, partial(execute, using=self.using), self._wake)
        self._prefetch = Prefetch(threads)
        self._ledger = Ledger(self.using)
        self._pump = threading.Thread(target=self._run, name="rws_jobs pump", daemon=True)
        self._patience, self._outage = Patience(), OutageLog("worker")

        self._poll_interval = conf().POLL_INTERVAL if poll_interval is None else poll_interval
        self._pause = FIRST_PAUSE
        self._next_audit = 0.0
        self._drain, self._max_jobs = drain, max_jobs
        self._stopping = self._abandoning = self._was_declared_dead = False
        self._apart = False  # settle and claim in transactions of their own, once
        self._in_doubt = False  # rows may be ours of which a COMMIT without an answer has not told
        self._last_claim_full = False
        self._empty = False  # the last look found nothing due

    # -- from outside

    def start(self) -> None:
        """Register this worker in the database and start its threads, once.

        Raises the database's error when that fails, RuntimeError for a second start.
        """
        if self._pump.ident is not None:
            raise RuntimeError("this worker was started before: make a new one")
        self._heart.register()
        self._threads.start()
        self._maintenance.start()
        self._pump.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Claim nothing more, give back what has not started, and wait for the rest, at most ``timeout`` seconds.

        True when all has ended. False when jobs still run: they are settled when they end, and ``stop()`` may be called
        again to wait for that.
        """
        self._stopping = True
        self._wake.set()
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the worker has ended, at most ``timeout`` seconds. True when it has, or was never started."""
        if self._pump.ident is not None:
            self._pump.join(timeout)
        return not self._pump.is_alive()

    def abandon(self, timeout: float = 2.0) -> None:
        """Give running jobs back, uncharged.

        Only for a process that ends right after: their handlers still run, and another worker may start the same jobs.
        """
        self._abandoning = True
        self.stop(timeout)

    @property
    def counts(self) -> Counter[str]:
        """How many runs ended in which way, by the name of the outcome."""
        return self._ledger.counts.copy()

    # -- the pump

    def _run(self) -> None:
        while not self._done():
            self._wake.clear()
            try:
                if self._turn():
                    self._outage.back()
                    self._patience.reset()
            except (DatabaseError, InterfaceError) as error:
                self._turn_failed(error)
            except Exception:
                # A fault of ours must not leave claimed jobs behind with nobody to settle them.
                logger.exception("a turn of the worker failed; it goes on")
                self._pause = self._patience.wait()
            self._ledger.summarize()
            if not self._threads.finished and not self._done():
                self._wake.wait(self._pause)
        self._leave()

    def _turn(self) -> bool:
        """Settle and claim. True when the database has answered."""
        limit_lock_waits(self.using)
        audited = time.monotonic() >= self._next_audit
        if audited:
            self._audit()
        runs = self._collect()
        room = 0 if self._apart and runs else self._room()
        jobs = Job.objects.using(self.using)
        # Look before a transaction: an idle worker takes no write lock on SQLite.
        if not runs and not (room and (self._lanes.hot or self._lanes.heads(jobs, 1))):
            self._rest(looked=room > 0)
            return audited or room > 0
        self._ledger.unwritten = runs
        self._in_doubt = room > 0
        claims: list[Claim] = []
        try:
            with short_transaction(self.using):
                settle(jobs, runs)
                if room:
                    claims = jobs.claim(self._heart.worker, self._lanes, room)
        except ClaimsLost:
            self._in_doubt = False
            self._ledger.write_singly()
            return True
        self._ledger.unwritten, self._apart, self._in_doubt = [], False, False
        self._ledger.written(runs)
        self._start(claims, room)
        return True

    def _collect(self) -> list[Run]:
        """What has ended since the last turn, and what is to be given back."""
        runs = self._ledger.unwritten
        finished = self._threads.finished
        while finished:
            runs.append(finished.popleft())
        overslept = self._prefetch.overslept(self._threads.oldest_waits)
        if self._stopping or self._was_declared_dead or overslept:
            runs += [(claim, Released()) for claim in self._threads.take_back()]
            self._was_declared_dead = False
        if self._abandoning:
            runs += self._ledger.give_up()
        return runs

    def _room(self) -> int:
        if self._stopping or not self._heart.trusted:
            return 0
        threads = self._threads
        self._prefetch.adapt(
            oldest_waits=threads.oldest_waits,
            ran_dry=threads.ran_dry,
            last_claim_full=self._last_claim_full,
            recent_run=threads.recent_run,
        )
        room = self._prefetch.room(free_threads=threads.count - threads.running, unstarted=threads.unstarted)
        return room if self._max_jobs is None else min(room, self._max_jobs - threads.handed_over)

    def _start(self, claims: list[Claim], room: int) -> None:
        fresh = self._ledger.take(claims)
        if fresh:
            self._threads.put(fresh)
        self._last_claim_full = self._lanes.hot = bool(room) and len(claims) == room
        if room and not self._last_claim_full:
            self._lanes.cool()
        self._empty = not claims and room > 0
        self._pause = 0.0 if self._last_claim_full else FIRST_PAUSE

    def _rest(self, *, looked: bool) -> None:
        if looked:
            self._lanes.cool()
            self._last_claim_full = False
            self._empty = True
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), self._poll_interval)

    def _done(self) -> bool:
        enough = self._max_jobs is not None and self._threads.handed_over >= self._max_jobs
        out_of_work = self._stopping or enough or (self._drain and self._empty)
        return out_of_work and not (self._ledger.held or self._ledger.unwritten or self._in_doubt)

    # -- when a turn fails

    def _turn_failed(self, error: Exception) -> None:
        """Runs stay unwritten in the ledger. Claims of the turn are forgotten: not one of them has started."""
        what = verdict(error)
        self._in_doubt = self._in_doubt and what is Verdict.UNKNOWN
        if what is Verdict.ROLLED_BACK and not self._apart:
            # Nothing happened; at once again, but settle and claim apart, so that one does not undo the other for ever.
            self._apart, self._pause = True, 0.0
            return
        if self._ledger.unwritten and (what is Verdict.BAD_DATA or is_held(error)):
            try:
                self._ledger.write_singly()
                self._apart, self._pause = False, 0.0
                return
            except (DatabaseError, InterfaceError) as another:
                error, what = another, verdict(another)
        if what is Verdict.UNKNOWN:
            # COMMIT may have been done and its answer lost: what we settled may be settled, and rows may be ours
            # that we do not know of. The next turn begins with an audit, on a new connection.
            self._ledger.doubt()
            self._next_audit = 0.0
            connections[self.using].close()
        self._outage.lost(error)
        self._lanes.cool()
        self._pause = self._patience.wait()
        if self._abandoning:
            self._ledger.clear()
            self._in_doubt = False

    def _audit(self) -> None:
        """Now and then, and after an error, compare our claims with the table."""
        self._ledger.write_put_off()
        lost = self._ledger.audit(self._heart.worker)
        if lost:
            # Only what has not started is dropped: a run in progress is found lost by the fence when it ends.
            unstarted = self._threads.take_back()
            self._threads.put([claim for claim in unstarted if claim.id not in lost])
            self._ledger.written([(claim, Lost()) for claim in unstarted if claim.id in lost])
        self._next_audit = time.monotonic() + conf().HEARTBEAT_INTERVAL
        self._in_doubt = False

    def _declared_dead(self) -> None:
        """Called by maintenance: under a new id, what has not started is given back if it is still ours."""
        self._heart.register()
        self._was_declared_dead = True
        self._wake.set()

    # -- the end

    def _leave(self) -> None:
        self._threads.dismiss()
        self._ledger.announcer.stop()
        self._maintenance.stop()
        self._ledger.summarize(last=True)
        try:
            self._heart.stop()
        except (DatabaseError, InterfaceError) as error:
            logger.warning("worker %s could not remove its row: %s", self._heart.worker, error)
        connections.close_all()
