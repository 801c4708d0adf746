"""The database's revisions: agree with the tables of the code, are run once, and know what is too new."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from coordinator.db.migrations import migrate
from coordinator.db.store import open_engine
from coordinator.db.tables import metadata
from coordinator.errors import UserError


def test_the_revisions_make_the_tables_that_the_code_expects(database_url: str) -> None:
    migrate(database_url)
    engine = open_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        tables = set(inspect(connection).get_table_names())
    engine.dispose()
    assert tables == {*metadata.tables, "alembic_version"}


def test_a_database_up_to_date_is_left_as_it_is(database_url: str) -> None:
    migrate(database_url)
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO serials (serial_number, device_group, added_at) VALUES ('s1', 'g', '2026-01-01')"
            )
        )
    migrate(database_url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM serials")).scalar_one() == 1
    engine.dispose()


def test_a_database_of_a_newer_version_is_refused_untouched(database_url: str) -> None:
    migrate(database_url)
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(UserError, match=r"'9999'.*newer"):
        migrate(database_url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://root:secret@host/db", "not supported"),
        ("no url: secret", "invalid database URL"),
        ("sqlite://", "in memory"),
        ("postgresql://tester:secret@127.0.0.1:1/db", r"cannot open the database postgresql.*\*\*\*"),
    ],
)
def test_a_url_of_no_usable_database_is_reported_without_its_password(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        migrate(url)
    assert "secret" not in str(raised.value)


def test_a_database_in_a_folder_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot open the database"):
        migrate(f"sqlite:///{tmp_path}/absent/fedloop.db")
