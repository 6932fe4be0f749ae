"""The background work of the newsletter. rws_jobs imports the ``jobs`` module of every installed app.

Jobs run at least once: a worker that dies after a mail went out and before that is noted sends it again. Both jobs
here note what they sent and look there first, so a repeat is rare; and it carries the same Message-ID, by which it can
be told from another mail.
"""

import json
import time
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.mail import EmailMessage
from django.core.validators import validate_email
from django.template.defaultfilters import pluralize
from django.template.loader import render_to_string
from django.utils import timezone

from rws_jobs import Backoff, Discard, JobInfo, current_job, job, on_dead, schedule

from .models import Digest, Subscriber


# The name stands in the rows, and stays the same wherever the code moves. Real mail would be given hours instead of
# seconds: ten retries or so, and Backoff(timedelta(minutes=5), maximum=timedelta(hours=4)).
@job("newsletter.send_welcome", queue="mail", max_retries=2, backoff=Backoff(1))
def send_welcome(subscriber_id: int) -> None:
    subscriber = Subscriber.objects.filter(pk=subscriber_id).first()
    if subscriber is None or subscriber.welcomed_at:
        return
    try:
        validate_email(subscriber.email)
    except ValidationError:
        raise Discard(f"{subscriber.email!r} is not an e-mail address: correct it, then retry") from None
    EmailMessage(
        subject=f"Welcome aboard, {subscriber.name}!",
        body=render_to_string("newsletter/welcome.txt", {"subscriber": subscriber}),
        to=[subscriber.mailbox],
        headers={"Message-ID": f"<welcome-{subscriber.pk}@harbour.example>"},
    ).send()
    # An update of these columns only: meanwhile somebody may have corrected the name in the admin.
    Subscriber.objects.filter(pk=subscriber.pk).update(welcomed_at=timezone.now(), problem="")


@on_dead
def note_problem(job: JobInfo) -> None:
    """Show the operator, in the list of subscribers, whom no welcome reached."""
    if job.job_type == send_welcome.job_type:
        subscriber = Subscriber.objects.filter(pk=json.loads(job.payload)["subscriber_id"])
        subscriber.update(problem=(job.last_error or "")[:200])


@job("newsletter.send_digest", queue="mail")
def send_digest() -> None:
    """Tell the owner who signed up since the last digest. Nights without a worker are thus made up for by the next."""
    until = datetime.fromtimestamp(current_job().scheduled_for or time.time(), UTC)
    last = Digest.objects.first()
    since = last.until if last else until - timedelta(days=1)
    if until <= since:
        return
    signups = Subscriber.objects.filter(created_at__gte=since, created_at__lt=until)
    context = {"since": since, "until": until, "signups": signups, "state": Subscriber.objects.state()}
    EmailMessage(
        subject=f"{len(signups)} new subscriber{pluralize(len(signups))}",
        body=render_to_string("newsletter/digest.txt", context),
        to=[settings.DIGEST_TO],
        headers={"Message-ID": f"<digest-{until:%Y%m%d%H%M}@harbour.example>"},
    ).send()
    Digest.objects.create(until=until, signups=len(signups))


schedule("nightly-digest", "0 0 2 * * *", send_digest, timezone="Europe/Paris")
