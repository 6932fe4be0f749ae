"""The job that does nothing: what it costs is the queue."""

from rws_jobs import job


@job
def noop() -> None:
    pass
