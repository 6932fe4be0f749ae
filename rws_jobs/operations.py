"""The first migration's one operation: create a table, or adopt the one that is there."""

from django.db import migrations


class CreateOrAdopt(migrations.CreateModel):
    """``CreateModel`` that takes over an existing table."""
