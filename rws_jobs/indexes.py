"""An index over the jobs of one status, on databases with and without partial indexes."""

from collections.abc import Sequence
from typing import Any

from django.db import models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.backends.ddl_references import Statement


class StatusIndex(models.Index):
    """Partial on ``status = …`` where the database can, led by the status column elsewhere.

    Partial, it does not repeat the status in its columns: SQLite without ANALYZE would then prefer it to the primary
    key when it updates claimed rows (75 ms a claim instead of 0.5 ms). ``condition`` stays None so that Django does
    not warn of conditions on MySQL: nothing is ignored there.
    """

    def __init__(self, *, status: str, fields: Sequence[str], name: str) -> None:
        super().__init__(fields=list(fields), name=name)
        self.status = status

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Statement:
        return self._for(schema_editor).create_sql(model, schema_editor, using, **kwargs)

    def deconstruct(self) -> Any:
        path, _, _ = super().deconstruct()
        return path, (), {"status": self.status, "fields": self.fields, "name": self.name}

    def _for(self, schema_editor: BaseDatabaseSchemaEditor) -> models.Index:
        if schema_editor.connection.features.supports_partial_indexes:
            return models.Index(fields=self.fields, name=self.name, condition=models.Q(status=self.status))
        return models.Index(fields=["status", *self.fields], name=self.name)
