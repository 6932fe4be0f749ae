"""Settings of the example: a newsletter with a sign-up page.

Without any setting it needs nothing: an SQLite database and mails as files, both in ``var/``. The environment may name

* another folder for them: ``EXAMPLE_VAR``;
* another database: ``DB_ENGINE`` (postgresql, mysql), ``DB_NAME``, ``DB_HOST``, ``DB_PORT``, ``DB_USER``,
  ``DB_PASSWORD``;
* a mail server, and mails then really go out: ``EMAIL_HOST``, ``EMAIL_PORT``, ``EMAIL_USER``, ``EMAIL_PASSWORD``,
  ``EMAIL_USE_TLS`` (1), ``EMAIL_FROM``, ``EMAIL_OWNER``.
"""

import os
from pathlib import Path

import django

env = os.environ.get

BASE_DIR = Path(__file__).resolve().parent.parent
VAR = Path(env("EXAMPLE_VAR") or BASE_DIR / "var")
VAR.mkdir(parents=True, exist_ok=True)

# For one's own machine only.
SECRET_KEY = "the example's key is no secret"
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rws_jobs",
    "example_project.newsletter",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
ASGI_APPLICATION = "example_project.asgi.application"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LANGUAGE_CODE = "en"
USE_TZ = True
TIME_ZONE = "Europe/Paris"

if engine := env("DB_ENGINE"):
    DATABASE = {
        "ENGINE": f"django.db.backends.{engine}",
        **{name: env(f"DB_{name}", "") for name in ("NAME", "HOST", "PORT", "USER", "PASSWORD")},
    }
else:
    DATABASE = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": VAR / "db.sqlite3",
        "OPTIONS": {
            # Pages and workers read while one writes (WAL), and writers wait for each other in a queue: a transaction
            # that begins as a reader and writes later would fail at once with "database is locked" (IMMEDIATE).
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
        },
    }
DATABASES = {"default": DATABASE}

DEFAULT_FROM_EMAIL = env("EMAIL_FROM", "The Harbour Letter <hello@harbour.example>")
DIGEST_TO = env("EMAIL_OWNER", "owner@harbour.example")

if host := env("EMAIL_HOST"):
    mail_backend = "django.core.mail.backends.smtp.EmailBackend"
    mail_options = {
        "host": host,
        "port": int(env("EMAIL_PORT", "25")),
        "username": env("EMAIL_USER", ""),
        "password": env("EMAIL_PASSWORD", ""),
        "use_tls": env("EMAIL_USE_TLS") == "1",
        "timeout": 20,
    }
    MAILS_GO_TO = f"{host}:{mail_options['port']}"
else:
    mail_backend = "example_project.newsletter.mailboxes.DemoMailboxes"
    mail_options = {"file_path": VAR / "mails"}
    MAILS_GO_TO = VAR / "mails"

if django.VERSION >= (6, 1):
    MAILERS = {"default": {"BACKEND": mail_backend, "OPTIONS": mail_options}}
else:
    EMAIL_BACKEND = mail_backend
    EMAIL_FILE_PATH = mail_options.get("file_path")
    if host:
        EMAIL_HOST, EMAIL_PORT, EMAIL_TIMEOUT = host, mail_options["port"], mail_options["timeout"]
        EMAIL_HOST_USER, EMAIL_HOST_PASSWORD = mail_options["username"], mail_options["password"]
        EMAIL_USE_TLS = mail_options["use_tls"]
