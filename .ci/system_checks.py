"""No check warns, no migration is missing, on the database that the environment names."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"

import django
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connection

django.setup()
name = connection.settings_dict["NAME"]
connection.creation.create_test_db(verbosity=0, autoclobber=True)
try:
    call_command("makemigrations", "rws_jobs", check=True, dry_run=True)
    call_command("check", databases=["default"], fail_level="WARNING")
    found = run_checks(databases=["default"], include_deployment_checks=True)
    # Django's own about security are about the settings of the tests, which serve nobody.
    assert [message for message in found if not str(message.id).startswith("security.")] == []
finally:
    connection.creation.destroy_test_db(name, verbosity=0)
