"""Where the demo's mail goes: into files. Some addresses misbehave as real ones do.

With ``EMAIL_HOST`` set, Django's SMTP backend is used instead, and the jobs stay as they are.
"""

import os
import secrets
import smtplib
from collections.abc import Sequence
from datetime import datetime
from email.utils import parseaddr

from django.core.mail import EmailMessage
from django.core.mail.backends.filebased import EmailBackend

from rws_jobs import current_job

GONE = {"closed-shop.example", "old-cable.example"}
GREYLISTING = {"greyhound.example", "strict-mail.example"}


class DemoMailboxes(EmailBackend):
    """Django's file backend, but one mail is one file.

    Django's own names its file after the second and the backend's place in memory, and appends: of some hundred mails a
    second, several share a file. And it writes in place, so that who looks at the right moment finds half a mail.
    """

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        for message in email_messages:
            for recipient in message.recipients():
                _ask_server(parseaddr(recipient)[1])
            self._write(message.message().as_bytes())
        return len(email_messages)

    def _write(self, mail: bytes) -> None:
        path = os.path.join(self.file_path, f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(6)}.eml")
        with open(path + ".part", "xb") as file:
            file.write(mail)
        os.rename(path + ".part", path)


def _ask_server(address: str) -> None:
    """Answer as the server of this address would, with the errors of smtplib."""
    domain = address.rpartition("@")[2]
    if domain in GONE:
        raise smtplib.SMTPRecipientsRefused({address: (550, b"5.1.1 No such mailbox")})
    if domain in GREYLISTING and _is_first_attempt():
        raise smtplib.SMTPDataError(451, b"4.7.1 Greylisted, please try again later")


def _is_first_attempt() -> bool:
    try:
        return current_job().attempt == 1
    except LookupError:  # mail sent outside of a job, by sendtestemail for one
        return False
