"""The handlers that the tests enqueue. Imported at start-up like any app's jobs module, also in worker processes."""

from pathlib import Path

from rws_jobs import Backoff, job

from .rows import Ledger
from .waiting import wait_for

calls: list[object] = []


@job
def note(value: object = None) -> None:
    """Remember, in this process, that it ran."""
    calls.append(value)


@job(max_retries=0)
def boom(text: str = "boom") -> None:
    raise ValueError(text)


@job(max_retries=5, backoff=Backoff(0))
def noop() -> None:
    pass


@job(max_retries=5, backoff=Backoff(0))
def record(gate: str = "") -> None:
    """Write "started" into the table of tests.rows.Ledger; with a gate, wait for that file and then write "ended"."""
    Ledger.write("started")
    if gate:
        wait_for(Path(gate).exists, timeout=120, what=gate)
        Ledger.write("ended")


@job(max_retries=5, backoff=Backoff(0))
def fail_with(text: str) -> None:
    """Fail, but not for good, with an error that does not show the argument."""
    raise LookupError(f"{len(text)} characters")
