"""What Alembic runs to apply revisions: on the connection, and in the transaction, of `migrate`."""

from __future__ import annotations

from alembic import context

from coordinator.audit import entries  # noqa: F401  they belong to the metadata
from coordinator.db.tables import metadata
from coordinator.identity import tables as identity_tables  # noqa: F401  they belong to the metadata
from coordinator.jobs import tables as job_tables  # noqa: F401  they belong to the metadata
from coordinator.rollouts import tables  # noqa: F401  they belong to the metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters tables by copying them
)
context.run_migrations()
