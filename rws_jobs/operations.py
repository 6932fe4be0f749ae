"""The first migration's operation: create a table, or adopt the one that another program has made (adoption.py)."""

from typing import Any

from django.core.management import CommandError
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import ProjectState

from .adoption import adopt


class CreateOrAdopt(migrations.CreateModel):
    """``CreateModel`` that adopts the table if there is one."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        model = to_state.apps.get_model(app_label, self.name)
        if self._finds_a_table(schema_editor, model):
            adopt(model, schema_editor)
        else:
            super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        # Asked before any table is dropped, not only before that of the jobs: MariaDB brings no table back.
        jobs = from_state.apps.get_model(app_label, "Job")
        if self._finds_a_table(schema_editor, jobs):
            rows = jobs._base_manager.using(schema_editor.connection.alias)
            if live := rows.filter(status__in=["pending", "running"]).count():
                raise CommandError(
                    f"{jobs._meta.db_table} holds {live} pending or running jobs, perhaps another program's. "
                    "Let them run, or delete them, before the table is dropped."
                )
        super().database_backwards(app_label, schema_editor, from_state, to_state)

    def reduce(self, operation: Any, app_label: str) -> bool:
        # Optimized, it would become a plain CreateModel, which fails where there is a table to adopt.
        return False

    def describe(self) -> str:
        return f"Create or adopt model {self.name}"

    def _finds_a_table(self, editor: BaseDatabaseSchemaEditor, model: type[models.Model]) -> bool:
        # sqlmigrate looks at no table: it prints what a fresh database gets.
        if editor.collect_sql or not self.allow_migrate_model(editor.connection.alias, model):
            return False
        with editor.connection.cursor() as cursor:
            return model._meta.db_table in editor.connection.introspection.table_names(cursor)
