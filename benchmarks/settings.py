"""The tests' database settings, with the job app alone and a database of its own."""

import os

os.environ.setdefault("RWS_JOBS_TEST_NAME", "rws_jobs_benchmark")

from tests.settings import DATABASES, DEFAULT_AUTO_FIELD, SECRET_KEY, TIME_ZONE, USE_TZ  # noqa: F401

INSTALLED_APPS = ["rws_jobs", "benchmarks"]
