"""Who gets the letter, and which digests its owner got."""

from email.headerregistry import Address

from django.db import models
from django.db.models import Count, Q
from django.utils import timezone


class SubscriberQuerySet(models.QuerySet):
    def state(self) -> dict[str, int]:
        """How many are welcomed, wait for their welcome, and cannot be reached."""
        unreachable = Q(welcomed_at=None) & ~Q(problem="")
        return self.aggregate(
            welcomed=Count("welcomed_at"),
            waiting=Count("pk", filter=Q(welcomed_at=None, problem="")),
            unreachable=Count("pk", filter=unreachable),
        )


class Subscriber(models.Model):
    SIGN_UP_PAGE = "sign-up page"

    name = models.CharField(max_length=100)
    email = models.EmailField(
        "e-mail address", unique=True, error_messages={"unique": "This address has signed up already."}
    )
    source = models.CharField("came from", max_length=30, default=SIGN_UP_PAGE, editable=False)
    created_at = models.DateTimeField("signed up", default=timezone.now, editable=False, db_index=True)
    welcomed_at = models.DateTimeField("welcomed", null=True, editable=False)
    problem = models.CharField("could not be reached", max_length=200, blank=True, editable=False)

    objects = SubscriberQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"

    def clean(self) -> None:
        """Called by every form, the admin's too, before it looks for an address that exists already."""
        # A browser sends one line, but anybody can send more, and a mail header must not have any.
        self.name = " ".join(self.name.split())
        # In principle A@x and a@x may be two mailboxes. In practice they are one person who would get two letters.
        self.email = self.email.lower()

    @property
    def mailbox(self) -> str:
        """Name and address for a "To" header. Names hold commas, quotes and every script there is."""
        user, _, domain = self.email.rpartition("@")
        return str(Address(self.name, user, domain))


class Digest(models.Model):
    """One nightly summary that was sent, of the sign-ups before ``until``."""

    until = models.DateTimeField(unique=True)
    signups = models.IntegerField("sign-ups")
    sent_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-until"]

    def __str__(self) -> str:
        return f"{self.until:%Y-%m-%d}: {self.signups} sign-ups"
