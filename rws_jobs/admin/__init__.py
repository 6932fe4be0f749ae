"""Jobs, dead letters, schedules and workers in Django's admin. Imported by the admin alone, where it is installed.

For another admin site, register the same classes there: ``site.register(Job, JobAdmin)``.
"""

from django.contrib import admin

from rws_jobs.models import DeadLetter, Job, JobSchedule, JobWorker

from .jobs import DeadLetterAdmin, JobAdmin
from .others import JobScheduleAdmin, JobWorkerAdmin

__all__ = ["DeadLetterAdmin", "JobAdmin", "JobScheduleAdmin", "JobWorkerAdmin"]

admin.site.register(DeadLetter, DeadLetterAdmin)
admin.site.register(Job, JobAdmin)
admin.site.register(JobSchedule, JobScheduleAdmin)
admin.site.register(JobWorker, JobWorkerAdmin)
