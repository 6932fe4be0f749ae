"""How many jobs a worker claims ahead of its free threads.

A claim costs a transaction, so short jobs are claimed by the hundred; but a job that waits behind a long one here could
be running elsewhere. A worker therefore holds what it will start within about 50 ms, and gives back what it misjudged.
"""

MOST_AHEAD = 256
SOON = 0.05
TOO_LONG = 0.2


class Prefetch:
    """The number of jobs to hold beyond the free threads; adapts both ways within a few turns."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.ahead = 0

    def adapt(self, *, oldest_waits: float, ran_dry: bool, last_claim_full: bool, recent_run: float) -> None:
        """Look at the last turn. Times in seconds: how long the oldest job not started waits, how long jobs run."""
        if oldest_waits > SOON:
            self.ahead = 0
        elif ran_dry and last_claim_full and recent_run < SOON:
            self.ahead = min(MOST_AHEAD, 2 * self.ahead + self._threads)

    def room(self, *, free_threads: int, unstarted: int) -> int:
        """How many more to claim now."""
        return max(0, free_threads + self.ahead - unstarted)

    def overslept(self, oldest_waits: float) -> bool:
        """True when the unstarted jobs should be given back for others to run; nothing is then held ahead."""
        if oldest_waits > TOO_LONG:
            self.ahead = 0
        return oldest_waits > TOO_LONG
