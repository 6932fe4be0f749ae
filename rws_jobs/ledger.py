"""The books of one worker: the claims that it holds, and the runs that are not written yet.

An outcome stays here until the database has taken it, or until the fence shows that the claim was lost.
"""

import logging
import time
from collections import Counter

from django.db import DatabaseError, InterfaceError

from .info import Claim
from .models import Job
from .outages import Verdict, is_held, verdict
from .outcomes import Completed, Dead, Lost, Outcome, Released, Retrying
from .settling import ClaimsLost, Run, is_heard, log, settle, without_text
from .threads import Announcer
from .transactions import short_transaction

logger = logging.getLogger("rws_jobs")

SUMMARY_INTERVAL = 10.0


class Ledger:
    """Claims from their commit to the commit of their outcome. Used by the pump alone."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.held: dict[str, Claim] = {}
        self.unwritten: list[Run] = []
        self.put_off: list[Run] = []
        self._given_up: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.announcer = Announcer()
        # Their COMMIT was not answered: written, or not.
        self._doubtful: set[str] = set()
        self._summed: Counter[str] = Counter()
        self._summed_at = time.monotonic()

    def take(self, claims: list[Claim]) -> list[Claim]:
        """Enter new claims, and answer those to be started.

        One that is still in flight here (another program has reset its row) is not started a second time: the audit
        sees to it.
        """
        fresh = [claim for claim in claims if claim.id not in self.held]
        self.held.update((claim.id, claim) for claim in fresh)
        return fresh

    def written(self, runs: list[Run]) -> None:
        """These outcomes are committed, or known to be lost."""
        log(runs)
        for claim, outcome in runs:
            self.held.pop(claim.id, None)
            self._doubtful.discard(claim.id)
            self.counts[type(outcome).__name__] += 1
            if is_heard(outcome):
                self.announcer.put(claim, outcome)

    def write_singly(self) -> None:
        """Each run in a transaction of its own: the fence tells which were lost, and one bad value spoils only one.

        A run whose row somebody else holds is put off. Raises other errors of the database, and the third wait for a
        row: then more than a row is held. What is left stays unwritten.
        """
        waits = 0
        while self.unwritten:
            try:
                self._write(*self.unwritten[0])
            except (DatabaseError, InterfaceError) as error:
                if not is_held(error) or waits == 2:
                    raise
                waits += 1
                self.put_off.append(self.unwritten[0])
            del self.unwritten[0]

    def write_put_off(self) -> None:
        """Try again what was put off, up to the first row that is still held."""
        while self.put_off:
            try:
                self._write(*self.put_off[0])
            except (DatabaseError, InterfaceError) as error:
                if is_held(error):
                    return
                raise
            del self.put_off[0]

    def _write(self, claim: Claim, outcome: Outcome) -> None:
        jobs = Job.objects.using(self.using)
        try:
            with short_transaction(self.using):
                settle(jobs, [(claim, outcome)])
        except ClaimsLost:
            # Nothing changed by a statement whose first try was not answered means that the first try did it.
            if claim.id not in self._doubtful:
                outcome = Lost()
        except (DatabaseError, InterfaceError) as error:
            if verdict(error) is not Verdict.BAD_DATA:
                raise
            if (bare := without_text(outcome, error)) != outcome:
                self._write(claim, bare)
                return
            # The row stays running and ours: given back, it would run for ever. It is rescued when this worker is gone.
            logger.exception("%r: its outcome cannot be written and is given up", claim)
            self._given_up.add(claim.id)
            outcome = Lost()
        self.written([(claim, outcome)])

    def doubt(self) -> None:
        """A COMMIT was not answered: what was to be written may be written."""
        self._doubtful.update(claim.id for claim, _ in self.unwritten)

    def audit(self, worker: str) -> set[str]:
        """Compare the rows that are ``worker``'s with the claims entered here; each side may miss some.

        Rows unknown here are to be given back. Answers the ids of claims that are no longer ours.
        """
        mine = {claim.id: claim for claim in Job.objects.using(self.using).owned_by(worker).as_claims()}
        known = self.held.keys() | self._given_up
        self.unwritten += [(claim, Released()) for pk, claim in mine.items() if pk not in known]
        return {pk for pk, claim in self.held.items() if claim.worker == worker and pk not in mine}

    def give_up(self) -> list[Run]:
        """Runs that give back every claim not yet in the unwritten ones."""
        unwritten = {claim.id for claim, _ in self.unwritten}
        return [(claim, Released()) for claim in self.held.values() if claim.id not in unwritten]

    def clear(self) -> None:
        """The process ends without the database: what is held here is left to be rescued."""
        self.held.clear()
        self.unwritten.clear()
        self.put_off.clear()

    def summarize(self, last: bool = False) -> None:
        """Log one line every ten seconds while there is work, and one at the end."""
        now = time.monotonic()
        seconds = now - self._summed_at
        if seconds < SUMMARY_INTERVAL and not last:
            return
        news = self.counts - self._summed
        done, retried, dead = (news[kind.__name__] for kind in (Completed, Retrying, Dead))
        if ran := done + retried + dead:
            logger.info(
                "%d run%s in %.1f s (%.3g/s): %d done, %d to be retried, %d dead",
                *(ran, "" if ran == 1 else "s", seconds, ran / max(seconds, 0.001), done, retried, dead),
            )
        self._summed, self._summed_at = self.counts.copy(), now
