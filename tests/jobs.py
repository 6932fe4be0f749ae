"""The handlers that the tests enqueue. Imported at start-up like any app's jobs module, also in worker processes."""

from rws_jobs import Backoff, job

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
