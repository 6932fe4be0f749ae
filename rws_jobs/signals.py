"""Signals of a job's life. Each carries ``job``, a :class:`~rws_jobs.info.JobInfo`; a receiver that raises is logged.

``job_enqueued`` is sent inside the caller's transaction, ``job_started`` in the thread that runs the job, the others
once the outcome is committed. The sender is the Job model.
"""

from django.dispatch import Signal

job_enqueued = Signal()
job_started = Signal()
job_succeeded = Signal()
job_retrying = Signal()
job_dead = Signal()
claim_lost = Signal()
worker_lost = Signal()
