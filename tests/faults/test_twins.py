"""Every fault test of a coordinator runs on SQLite and on PostgreSQL; those that cannot are named here, with the reason."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

STARTS_ONE = {"local_fleet", "arena", "services_in", "serving", "require_intact", "serve", "postgres"}
"""Functions, and the word of a command line."""

ON_EACH = {"served_on", "module_served_on", "database_url", "database"}
"""Fixtures."""

ON_ONE = {
    "test_so_is_one_without_room_for_everything": "in which SQLite's file is",
    "test_a_zeroed_page_is_reported": "of SQLite's file",
    "test_whichever_page_it_is": "of SQLite's file",
    "test_another_file_and_half_of_one_are_reported": "of SQLite's file",
    "test_one_that_is_gone_leaves_its_log_alone": "of SQLite's file",
    "test_a_server_that_is_away": "which SQLite has none of",
    "test_killed_at_failpoints_and_anywhere_the_model_is_the_same": "test_on_postgresql_too, with fewer kills",
    "test_an_update_that_was_damaged_while_the_coordinator_was_away_is_trained_once_more": "test_on_postgresql_too",
    "test_on_postgresql_too": "is the other one of these two",
    "test_secure_sums_survive_a_kill_at_any_stage": "coordinator/test_secure_devices.py goes on from the rows, on both",
    "test_an_asynchronous_run_that_is_killed_ends_in_the_same_model": "coordinator/test_device_asynchronous.py, on both",
    "test_fedbuff_over_daemons_goes_on_without_the_slowest": "coordinator/test_device_asynchronous.py, on both",
}


def test_every_fault_test_of_a_coordinator_runs_on_both_databases() -> None:
    missing, listed = [], set()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path == Path(__file__):
            continue
        used = _used(path)
        for name in used:
            reached = _reached(name, used)
            if name.startswith("test_") and reached & STARTS_ONE and not reached & ON_EACH:
                listed.add(name)
                missing += [f"{path.name}: {name}"] if name not in ON_ONE else []
    assert missing == []
    assert listed == ON_ONE.keys()


def _used(path: Path) -> Mapping[str, set[str]]:
    """By function: the names, arguments and words in it. A fixture of the module is a function that an argument names."""
    functions = [
        node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)
    ]
    used = {}
    for function in functions:
        others = {function.name}
        if not function.name.startswith("test_") and not function.decorator_list:
            others |= {argument.arg for argument in function.args.args}  # of a helper, which are no fixtures
        used[function.name] = set(map(_word, ast.walk(function))) - others
    return used


def _word(node: ast.AST) -> str:
    for kind, key in ((ast.Name, "id"), (ast.arg, "arg"), (ast.Constant, "value")):
        if isinstance(node, kind):
            return str(getattr(node, key))
    # Of attributes only `databases.postgres()`; many things have a database.
    return "postgres" if isinstance(node, ast.Attribute) and node.attr == "postgres" else ""


def _reached(name: str, used: Mapping[str, set[str]]) -> set[str]:
    """What a function uses, by way of others of its module too."""
    reached, waiting = set[str](), {name}
    while waiting:
        at = waiting.pop()
        reached.add(at)
        waiting |= used.get(at, set()) - reached
    return reached
