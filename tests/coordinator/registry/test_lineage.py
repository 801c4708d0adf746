"""The graph of what came from what, built from hashes alone."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update

from coordinator.context.services import Services
from coordinator.db import devices, tables
from coordinator.db import runs as rows
from coordinator.db.devices import DeviceRow
from coordinator.experiments import experiment as experiments
from coordinator.operator import version_drawing, version_files
from coordinator.registry import lineage, registration
from coordinator.registry.deployed import add_rollouts
from coordinator.registry.lineage import Graph
from coordinator.registry.registration import DeclaredFile
from coordinator.rollouts import queries as rollout_queries
from coordinator.rollouts.tables import MemberRow, RolloutRow
from tests.support import model_folders as left
from tests.support.services import services_in


@pytest.fixture
def services(tmp_path: Path, database_url: str) -> Iterator[Services]:
    with services_in(tmp_path / "home", database_url) as opened:
        yield opened


def add(services: Services, folder: Path, name: str) -> str:
    """Registers a folder; how the version is written."""
    kind, contents = version_files.gather(folder)
    for content in contents.values():
        services.blobs.put(content.place.read_bytes())
    sent = {path: DeclaredFile(content.sha256, content.size_bytes) for path, content in contents.items()}
    row, _ = registration.register(services, name, kind, sent, renumber=kind == "inference")
    return str(row.id)


def finished_run(services: Services, started_from: str, result: bytes) -> str:
    """A run in the database that began with these params and came to those."""
    run = str(uuid.uuid4())
    experiment = experiments.resolve({"name": "digits"}, "experiment", "devices")
    now = datetime.now(UTC)
    params = services.blobs.put(result)

    def write(connection: Any) -> None:
        resolved = experiment.model_dump(mode="json", exclude_none=True)
        rows.create(connection, run, "digits", resolved, (), now)
        prepared = {"model": {"name": "logreg", "options": {}}, "data": {"fingerprint": left.DATA}}
        rows.begin(connection, run, prepared, started_from, params, (), now)
        hour = now + timedelta(hours=1)
        opened = {"run": run, "number": 1, "state": "committed", "base": started_from, "record": RECORD}
        opened |= {"wanted": 1, "population": 1, "expected": {}, "started_at": now, "deadline_at": hour}
        connection.execute(insert(tables.rounds).values(**opened))
        ended = {"state": "finished", "round": 1, "params": params}
        connection.execute(update(tables.runs).where(tables.runs.c.id == run).values(**ended))

    services.database.write(write).result()
    return run


RECORD = {
    "round": 1, "test_accuracy": 0.97, "test_loss": 0.1, "rejections": {}, "bytes_up": 1, "bytes_down": 2,
}  # fmt: skip


def graph_of(services: Services, version: str) -> Graph:
    model, _, number = version.partition(":")
    identity = registration.VersionId(model, int(number))
    return services.database.read(lambda at: lineage.lineage(at, identity))


def edges(graph: Graph) -> set[tuple[str, str, str]]:
    return {(edge.parent.id, edge.child.id, edge.relation) for edge in graph.edges}


def folders_of_the_circle(folder: Path) -> tuple[str, dict[str, Path]]:
    """Pretrained, compressed and released, each made from the one before; the compressed one's params."""
    params = left.pretrained(folder / "pretrained")
    student, small = left.compressed(folder / "compressed", params)
    left.release(folder / "released", 1, student, small)
    return student, {name: folder / name for name in ("pretrained", "compressed", "released")}


def test_the_full_loop(services: Services, tmp_path: Path) -> None:
    student, made = folders_of_the_circle(tmp_path)
    teacher, small, release = (add(services, folder, "digits") for folder in made.values())
    run = finished_run(services, student, left.params(50))
    row, is_new = registration.register_run(services, "digits", run)
    assert (str(row.id), row.stage, is_new) == ("digits:4", "run", True)
    assert registration.register_run(services, "digits", run) == (row, False)
    expected = {
        (f"data:{left.DATA}", teacher, "data"),
        (teacher, small, "params"),
        (f"data:{left.DRAWN}", small, "data"),
        (small, release, "params"),
        (release, f"run:{run}", "start"),
        (f"run:{run}", "digits:4", "run"),
    }
    for version in (small, release, "digits:4"):
        assert edges(graph_of(services, version)) == expected
    of_others = (f"data:{left.DRAWN}", small, "data")  # the teacher neither came from it nor led to it
    assert edges(graph_of(services, teacher)) == expected - {of_others}
    facts = {node.id: facts for node, facts in graph_of(services, teacher).nodes.items()}
    assert facts[f"run:{run}"] == {
        "name": "digits", "state": "finished", "rounds": 1, "test_accuracy": 0.97, "test_loss": 0.1
    }  # fmt: skip


def test_the_circle_ends_at_the_rollouts_and_the_devices_that_run_a_release(
    services: Services, tmp_path: Path
) -> None:
    _, made = folders_of_the_circle(tmp_path)
    release = [add(services, folder, "digits") for folder in made.values()][-1]
    now = datetime.now(UTC)
    other = release.partition(":")[0], 9

    def rolled_out(connection: Any, name: str, model: str, version: int, **standings: str) -> None:
        row = RolloutRow(name, model, version, "finished", 0, False, None, "", {}, {}, now, now)
        members = [MemberRow(name, device, 0, standing, now) for device, standing in standings.items()]  # type: ignore[arg-type]
        rollout_queries.add(connection, row, (100.0,), members)

    def write(connection: Any) -> None:
        for name in "abcde":
            state = "revoked" if name == "e" else "active"
            row = DeviceRow(name, name, "default", None, state, None, name, None, now)  # type: ignore[arg-type]
            devices.add(connection, row)
        model, _, number = release.partition(":")
        rolled_out(connection, "first", model, int(number), a="active", b="active", c="failed", e="active")
        rolled_out(connection, "again", model, int(number), c="active", d="waiting")
        rolled_out(connection, "later", *other, b="active", a="rolled_back")

    services.database.write(write).result()
    graph = graph_of(services, release)
    services.database.read(lambda at: add_rollouts(at, graph))
    leaves = {node.id: facts for node, facts in graph.nodes.items() if node.kind in ("rollout", "devices")}
    assert {key: facts.get("state", facts.get("count")) for key, facts in leaves.items()} == {
        "rollout:first": "finished", "rollout:again": "finished", f"devices:{release}": 2,
    }  # fmt: skip
    added = {edge for edge in edges(graph) if edge[2] in ("rollout", "devices")}
    assert added == {
        (release, "rollout:first", "rollout"), (release, "rollout:again", "rollout"),
        ("rollout:first", f"devices:{release}", "devices"), ("rollout:again", f"devices:{release}", "devices"),
    }  # fmt: skip
    found = {
        "of": release,
        "cut": graph.cut,
        "nodes": [{"id": n.id, "kind": n.kind, "facts": facts} for n, facts in graph.nodes.items()],
        "edges": [{"parent": p, "child": c, "relation": r} for p, c, r in edges(graph)],
    }
    assert "on 2 devices" in version_drawing.dot(found)


def test_it_is_the_same_in_whatever_order_versions_are_registered(services: Services, tmp_path: Path) -> None:
    _, made = folders_of_the_circle(tmp_path)
    for place, order in enumerate(itertools.permutations(made)):
        named = {name: add(services, made[name], f"m{place}-{name}") for name in order}
        ends = {(parent, child) for parent, child, _ in edges(graph_of(services, named["compressed"]))}
        assert (named["pretrained"], named["compressed"]) in ends
        assert (named["compressed"], named["released"]) in ends


def test_params_that_are_not_registered_are_reported(services: Services, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run", parent="a" * 64)
    version = add(services, tmp_path / "run", "digits")
    assert (f"params:{'a' * 64}", version, "params") in edges(graph_of(services, version))


def test_a_release_made_after_a_run_is_not_what_it_began_with(services: Services, tmp_path: Path) -> None:
    student, made = folders_of_the_circle(tmp_path)
    small = add(services, made["compressed"], "digits")
    run = finished_run(services, student, left.params(50))
    release = add(services, made["released"], "digits")
    found = edges(graph_of(services, small))
    assert (small, f"run:{run}", "start") in found
    assert (release, f"run:{run}", "start") not in found


def test_releases_of_the_same_params_come_from_the_file_they_were_made_from(
    services: Services, tmp_path: Path
) -> None:
    params = left.pretrained(tmp_path / "pretrained")
    names = [add(services, tmp_path / "pretrained", "digits")]
    for seed in (1, 2):  # both only quantize, so they have the params of the pretraining
        left.compressed(tmp_path / f"compressed{seed}", params, seed, left.params(0))
        names.append(add(services, tmp_path / f"compressed{seed}", "digits"))
    for seed in (1, 2):
        left.release(tmp_path / f"release{seed}", 1, params, left.tflite(seed))
        names.append(add(services, tmp_path / f"release{seed}", "digits"))
    run = f"run:{finished_run(services, params, left.params(50))}"
    teacher, small, other, release, release_of_other = names
    made = {edge for edge in edges(graph_of(services, teacher)) if edge[2] != "data"}
    assert made == {
        (teacher, small, "params"),
        (teacher, other, "params"),
        (small, release, "params"),
        (other, release_of_other, "params"),
        (release, run, "start"),
        (release_of_other, run, "start"),
    }
    above = {parent for parent, _, _ in edges(graph_of(services, release))} - {release}
    assert above == {f"data:{left.DATA}", f"data:{left.DRAWN}", teacher, small}


def test_intermediate_versions_need_not_be_registered(services: Services, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "pretrained")
    teacher = add(services, tmp_path / "pretrained", "digits")
    left.release(tmp_path / "release", 1, left.sha256(left.params(0)), left.tflite(1))
    release = add(services, tmp_path / "release", "digits")
    made = {edge for edge in edges(graph_of(services, release)) if edge[2] != "data"}
    assert made == {(teacher, release, "params")}


def test_a_long_history_is_cut(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "MAX_NODES", 4)
    parent = None
    for number in range(6):
        parent = left.pretrained(tmp_path / str(number), number, parent)
        add(services, tmp_path / str(number), "digits")
    graph = graph_of(services, "digits:6")
    assert graph.cut
    assert len(graph.nodes) == 4
    assert {edge.child for edge in graph.edges} <= graph.nodes.keys()


def test_it_is_drawn_as_a_tree_and_as_dot() -> None:
    nodes = [
        {"id": "data:" + "d" * 64, "kind": "data", "facts": {}},
        {"id": "a:1", "kind": "version", "facts": _facts(aliases=["champion"])},
        {"id": "a:2", "kind": "version", "facts": _facts()},
        {"id": 'run:x"\n', "kind": "run", "facts": {}},
    ]
    made = [("data:" + "d" * 64, "a:1"), ("a:1", "a:2"), ("a:1", 'run:x"\n'), ('run:x"\n', "a:2")]
    listed = [{"parent": parent, "child": child, "relation": "params"} for parent, child in made]
    graph = {"of": "a:1", "nodes": nodes, "edges": listed, "cut": False}
    text = "\n".join(_lines(version_drawing.tree(graph)))
    assert "a:1 @champion  pretrain  accuracy 0.9000" in text
    dot = version_drawing.dot(graph)
    assert dot.count("->") == 4
    assert r'"run:x\"\n"' in dot


def _facts(**more: Any) -> dict[str, Any]:
    metrics = {"pretrain": {"test_accuracy": 0.9}}
    return {"stage": "pretrain", "kind": "params", "aliases": [], "metrics": metrics, **more}


def _lines(tree: Any) -> list[str]:
    return [str(tree.label), *(line for child in tree.children for line in _lines(child))]
