"""Settings of the test suite. RWS_JOBS_TEST_DATABASE chooses sqlite (default), postgresql or mariadb.

The servers are looked for where PGHOST, PGPORT, PGUSER, PGPASSWORD and MYSQL_HOST, MYSQL_PORT, MYSQL_USER,
MYSQL_PASSWORD say. RWS_JOBS_TEST_NAME names the database: runs with different names can go on side by side.
"""

import os
import tempfile
from pathlib import Path

VENDOR = os.environ.get("RWS_JOBS_TEST_DATABASE", "sqlite")
TEST_NAME = os.environ.get("RWS_JOBS_TEST_NAME", "rws_jobs")

if VENDOR == "sqlite":
    # A real file: workers are other threads and processes, which cannot share a database in memory.
    folder = Path(tempfile.gettempdir()) / f"{TEST_NAME}-tests"
    folder.mkdir(exist_ok=True)
    DATABASE = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("RWS_JOBS_TEST_LIVE_NAME", str(folder / "db.sqlite3")),
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
        "TEST": {"NAME": str(folder / "test.sqlite3")},
    }
elif VENDOR == "postgresql":
    DATABASE = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": os.environ.get("RWS_JOBS_TEST_LIVE_NAME", TEST_NAME),
        "HOST": os.environ.get("PGHOST", "127.0.0.1"),
        "PORT": os.environ.get("PGPORT", "5432"),
        "USER": os.environ.get("PGUSER", "postgres"),
        "PASSWORD": os.environ.get("PGPASSWORD", ""),
    }
elif VENDOR == "mariadb":
    DATABASE = {
        "ENGINE": "django.db.backends.mysql",
        "NAME": os.environ.get("RWS_JOBS_TEST_LIVE_NAME", TEST_NAME),
        "HOST": os.environ.get("MYSQL_HOST", "127.0.0.1"),
        "PORT": os.environ.get("MYSQL_PORT", "3306"),
        "USER": os.environ.get("MYSQL_USER", "root"),
        "PASSWORD": os.environ.get("MYSQL_PASSWORD", ""),
        "OPTIONS": {"charset": "utf8mb4"},
        "TEST": {"CHARSET": "utf8mb4"},
    }
else:
    raise ValueError(f"RWS_JOBS_TEST_DATABASE={VENDOR!r}: give sqlite, postgresql or mariadb")

DATABASES = {"default": DATABASE}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "only for tests"
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rws_jobs",
    "tests",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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
RWS_JOBS: dict[str, object] = {}
