"""The filter between projects: what a connection that works for one project reads and writes is that project's alone.

    connection.execute(select(runs))      ─►  SELECT … FROM runs WHERE runs.project = :project
    connection.execute(select(updates))   ─►  … WHERE EXISTS (SELECT 1 FROM runs WHERE runs.id = updates.run AND …)
    connection.execute(insert(runs) …)    ─►  … with the column `project` set

It is the only place that knows: queries do not mention projects, so none can forget them. A table belongs to projects if it
has a column made by `project_column`, or a foreign key to a table that does; every other table must be listed in
`WHOLE_COORDINATOR`. A statement that the filter cannot read, such as SQL as text, is refused. What another project owns
therefore looks exactly as if it did not exist.

Connections of the process itself (rounds, devices, start-up) see everything, and name the project of what they insert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from sqlalchemy import (
    Alias,
    Column,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    ForeignKeyConstraint,
    Insert,
    Select,
    String,
    Table,
    Update,
    and_,
    event,
    or_,
    select,
)
from sqlalchemy.sql import FromClause, Join, visitors
from sqlalchemy.sql.elements import ClauseElement
from sqlalchemy.sql.selectable import CompoundSelect, Values

from coordinator.project_names import DEFAULT_PROJECT

NOBODY = ""
"""No project has this name: a connection that works for it sees nothing and writes nothing of any project."""

WHOLE_COORDINATOR = frozenset(
    {
        "access_tokens",
        "audit",
        "external_accounts",
        "members",
        "projects",
        "rollout_directions",
        "sessions",
        "setup_links",
        "users",
    }
)
"""Tables that belong to no project. Their queries check who asks."""

_OPTION = "fedloop_project"
_OWNER = "of_project"


def project_column(
    *, nullable: bool = False, primary_key: bool = False, index: bool | None = True
) -> Column[Any]:
    """The column of a table whose rows belong to a project. Without a foreign key: SQLite cannot add one to a table.

    `index`: None for a table that is listed in an order and has an index of the project with that.
    """
    return Column(
        "project",
        String(63),
        nullable=nullable,
        primary_key=primary_key,
        index=None if primary_key else index,
        server_default=None if nullable else DEFAULT_PROJECT,
        info={_OWNER: True},
    )


def project_of(connection: Connection) -> str | None:
    """The project that a connection works for; None: for the process, which sees all."""
    project: str | None = connection.get_execution_options().get(_OPTION)
    return project


@contextmanager
def working_for(connection: Connection, project: str | None) -> Iterator[Connection]:
    """The connection, working for a project from now until the end of the block; with None, for the process."""
    before = project_of(connection)
    connection.execution_options(**{_OPTION: project})
    try:
        yield connection
    finally:
        connection.execution_options(**{_OPTION: before})


def install(engine: Engine) -> None:
    """Filters every statement of the engine's connections."""
    event.listen(engine, "before_execute", _before_execute, retval=True)


def is_of_projects(table: Table) -> bool:
    """Whether rows of the table belong to projects."""
    return _owned(table) or _parent(table) is not None


def _before_execute(
    connection: Connection,
    statement: Any,
    multiparams: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any],
    options: Any,
) -> tuple[Any, Any, Any]:
    project = project_of(connection)
    if isinstance(statement, Insert) and isinstance(statement.table, Table) and _owned(statement.table):
        return _insert(statement, multiparams, params, project)
    if project is None:
        return statement, multiparams, params
    if not isinstance(statement, Select | CompoundSelect | Update | Delete | Insert | Values):
        raise RuntimeError(f"a {type(statement).__name__} cannot be limited to a project")
    return _restricted(statement, project), multiparams, params


def _insert(
    statement: Insert,
    multiparams: Sequence[Mapping[str, Any]],
    params: Mapping[str, Any],
    project: str | None,
) -> tuple[Any, Any, Any]:
    if project is None:
        return statement, multiparams, params
    if project == NOBODY:
        raise RuntimeError(f"{statement.table.name}: nobody can write into no project")
    if statement._multi_values or statement.select is not None:
        raise RuntimeError(f"{statement.table.name}: this form of INSERT cannot be limited to a project")
    if statement._values is not None:
        column = statement.table.c["project"]
        # SQLAlchemy keeps a key as it was given, so that the same column would be there twice.
        statement = statement.values({"project" if "project" in statement._values else column: project})
    elif multiparams:
        multiparams = [{**each, "project": project} for each in multiparams]
    else:
        params = {**params, "project": project}
    return statement, multiparams, params


def _restricted(statement: ClauseElement, project: str) -> Any:
    """The statement with a condition for each table of projects in it and in its subqueries."""
    limited = (Select, Update, Delete)
    if isinstance(statement, limited) and not any(
        isinstance(part, limited) for part in visitors.iterate(statement) if part is not statement
    ):
        return statement.where(*_conditions(statement, project))  # without a copy of all of it

    def limit(part: Any) -> None:
        part._where_criteria += tuple(_conditions(part, project))

    visits = {"select": limit, "update": limit, "delete": limit}
    return visitors.cloned_traverse(statement, {}, visits)


def _conditions(part: Any, project: str) -> Iterator[ColumnElement[bool]]:
    """What must hold for the rows of each table that a statement or a subquery names itself."""
    for each in [part.table] if isinstance(part, Update | Delete) else part.get_final_froms():
        for source, is_optional in _sources(each):
            condition = _condition(source, project)
            if condition is not None:
                yield or_(_any_key(source).is_(None), condition) if is_optional else condition


def _sources(source: FromClause, is_optional: bool = False) -> Iterator[tuple[Table | Alias, bool]]:
    """The tables that a FROM names itself, with whether an outer join may yield no row of it."""
    if isinstance(source, Join):
        yield from _sources(source.left, is_optional or source.full)
        yield from _sources(source.right, is_optional or source.isouter or source.full)
    elif isinstance(source, Table) or (isinstance(source, Alias) and isinstance(source.element, Table)):
        yield source, is_optional


def _any_key(source: Table | Alias) -> ColumnElement[Any]:
    """A column that is null only where an outer join found no row."""
    table = source if isinstance(source, Table) else source.element
    assert isinstance(table, Table)
    return source.c[table.primary_key.columns[0].name]


def _condition(source: Table | Alias, project: str) -> ColumnElement[bool] | None:
    """What holds for the rows of a project; None for tables that belong to none."""
    table = source if isinstance(source, Table) else source.element
    assert isinstance(table, Table)
    if _owned(table):
        return source.c["project"] == project
    key = _parent(table)
    if key is None:
        if table.name not in WHOLE_COORDINATOR:
            raise RuntimeError(f"nobody decided which project the rows of {table.name} belong to")
        return None
    parent: Any = key.referred_table.alias()
    same = [source.c[each.parent.name] == parent.c[each.column.name] for each in key.elements]
    above = _condition(parent, project)
    assert above is not None  # its parent belongs to projects
    return select(1).select_from(parent).where(and_(*same), above).correlate(source).exists()


@cache
def _owned(table: Table) -> bool:
    return "project" in table.c and bool(table.c["project"].info.get(_OWNER))


@cache
def _parent(table: Table) -> ForeignKeyConstraint | None:
    """The foreign key to the table that decides which project a row belongs to."""
    if table.name in WHOLE_COORDINATOR:
        return None
    keys = sorted(table.foreign_key_constraints, key=lambda key: str(key.name))
    return next((key for key in keys if is_of_projects(key.referred_table)), None)
