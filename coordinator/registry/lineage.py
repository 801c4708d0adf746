"""Where a version comes from and what came of it, as a graph.

    data ─► pretrained version ─► compressed version ─► release ─► federated run ─► next version

Nodes are versions, data sets by fingerprint, runs by id, and params that no version holds. Edges are equal hashes: what
a version was made from is a file of its parent. A run hangs on the params of its first round: on the version that
holds them, and on the releases made from them before it began, for these are what its devices had. Edges that only
shorten a longer way are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Connection, select

from coordinator.db import registry
from coordinator.db import runs as run_rows
from coordinator.db.registry import VersionId, VersionRow
from coordinator.db.tables import rounds

MOST_NODES = 500
"""A graph with more is cut, and says so."""


@dataclass(frozen=True, order=True)
class Node:
    """A version `name:number`, a data set by its fingerprint, a run by its id, or params, not registered, by hash."""

    kind: Literal["version", "data", "run", "params"]
    ref: str

    @property
    def id(self) -> str:
        """What the node is called in answers. No version's number is as long as a hash or the id of a run."""
        return self.ref if self.kind == "version" else f"{self.kind}:{self.ref}"


@dataclass(frozen=True, order=True)
class Edge:
    """`child` was made from `parent`. `start`: a run began with it."""

    parent: Node
    child: Node
    relation: Literal["data", "params", "run", "start"]


@dataclass
class Graph:
    """The lineage of one version: all it came from, all that came of it.

    Attributes:
        nodes: with the facts there are to show of each.
        cut: there is more.
    """

    of: Node
    nodes: dict[Node, dict[str, Any]] = field(default_factory=dict)
    edges: set[Edge] = field(default_factory=set)
    cut: bool = False


def lineage(connection: Connection, version: VersionId) -> Graph:
    """The graph around a version, which must be there."""
    graph = Graph(_version_node(version))
    edges: set[Edge] = set()
    for forward in (False, True):
        seen: set[Node] = set()
        waiting = [graph.of]
        while waiting:
            here = waiting.pop(0)
            if here in seen:
                continue
            if len(graph.nodes) >= MOST_NODES:
                graph.cut = True
                break
            seen.add(here)
            graph.nodes.setdefault(here, _facts(connection, here))
            found = (_made_of if forward else _made_from)(connection, here)
            edges.update(found)
            waiting += [edge.child if forward else edge.parent for edge in found]
    edges = {edge for edge in edges if edge.parent in graph.nodes and edge.child in graph.nodes}
    graph.edges = {edge for edge in edges if not _is_short_cut(edge, edges)}
    return graph


def _made_from(connection: Connection, node: Node) -> list[Edge]:
    """Edges to what a node came from."""
    if node.kind == "run":
        return _starts(connection, node)
    if node.kind != "version":
        return []
    version = _version(connection, node)
    found: set[Edge] = set()
    unknown: set[Edge] = set()
    own = {file.sha256 for file in version.files}
    for each in version.inputs:
        if each.relation != "params":
            found.add(Edge(Node(each.relation, each.ref), node, each.relation))
            continue
        parents = _origins(connection, each.ref, passed_on=each.ref in own) - {version.id}
        found |= {Edge(_version_node(parent), node, "params") for parent in parents}
        if not parents and each.ref not in own:
            unknown.add(Edge(Node("params", each.ref), node, "params"))
    # What lies between is not worth a word where somebody registered what it was made from.
    known = any(edge.relation == "params" for edge in found)
    return sorted(found if known else found | unknown)


def _origins(connection: Connection, digest: str, *, passed_on: bool = False) -> set[VersionId]:
    """The versions that a file comes from: of all that have it those that did not get it from another one.

    A compression that only quantizes has the same params as what it began with. Where nothing but such versions are
    registered they count, unless it is one of them that asks (`passed_on`).
    """
    held = set(registry.holders(connection, [digest]).get(digest, ()))
    users = {user for user, _ in registry.made_from(connection, [digest]).get(digest, ())}
    return held - users if passed_on else held - users or held


def _made_of(connection: Connection, node: Node) -> list[Edge]:
    """Edges to what came of a node. Of data none: what else was made of the same data is another story."""
    if node.kind == "run":
        made = registry.made_from(connection, [node.ref]).get(node.ref, ())
        return [Edge(node, _version_node(child), "run") for child, relation in made if relation == "run"]
    if node.kind != "version":
        return []
    version = _version(connection, node)
    digests = [file.sha256 for file in version.files]
    inputs = [each.ref for each in version.inputs if each.relation == "params"]
    children = {child for made in registry.made_from(connection, digests).values() for child, _ in made}
    edges: list[Edge] = []
    for child in sorted(children - {version.id}):
        edges += _made_from(connection, _version_node(child))
    for run in _runs_from(connection, [*digests, *(inputs if version.kind == "inference" else ())]):
        edges += _starts(connection, Node("run", run))
    return [edge for edge in edges if edge.parent == node]


def _starts(connection: Connection, node: Node) -> list[Edge]:
    """What a run began with: whoever holds these params, and releases of them that were there when it was made."""
    run = run_rows.find(connection, node.ref)
    first = select(rounds.c.base).where(rounds.c.run == node.ref, rounds.c.number == 1)
    base = connection.execute(first).scalar_one_or_none()
    if run is None or base is None:
        return []
    versions = sorted(_origins(connection, base))
    for identity, _ in registry.made_from(connection, [base]).get(base, ()):
        row = registry.find(connection, identity)
        if row is not None and row.kind == "inference" and row.created_at <= run.created_at:
            versions.append(identity)
    return [Edge(_version_node(version), node, "start") for version in dict.fromkeys(versions)]


def _runs_from(connection: Connection, digests: Collection[str]) -> list[str]:
    wanted = select(rounds.c.run).where(rounds.c.number == 1, rounds.c.base.in_(list(digests)))
    return list(connection.execute(wanted.order_by(rounds.c.started_at, rounds.c.run)).scalars())


def _facts(connection: Connection, node: Node) -> dict[str, Any]:
    if node.kind == "run":
        return _run_facts(connection, node)
    if node.kind != "version":
        return {}
    version = _version(connection, node)
    return {
        "stage": version.stage,
        "kind": version.kind,
        "aliases": list(version.aliases),
        "metrics": {stage: dict(figures) for stage, figures in version.metrics.items()},
    }


def _run_facts(connection: Connection, node: Node) -> dict[str, Any]:
    run = run_rows.find(connection, node.ref)
    if run is None:
        return {}
    last = (run_rows.records(connection, run.id) or [{}])[-1]
    figures = {key: last[key] for key in ("test_accuracy", "test_loss") if last.get(key) is not None}
    return {"name": run.name, "state": run.state, "rounds": run.round, **figures}


def _version(connection: Connection, node: Node) -> VersionRow:
    model, _, number = node.ref.rpartition(":")
    row = registry.find(connection, VersionId(model, int(number)))
    assert row is not None, node
    return row


def _version_node(version: VersionId) -> Node:
    return Node("version", str(version))


def _is_short_cut(edge: Edge, edges: Iterable[Edge]) -> bool:
    """Whether the child comes from the parent on a longer way too."""
    children: dict[Node, list[Node]] = {}
    for each in edges:
        if each != edge:
            children.setdefault(each.parent, []).append(each.child)
    seen: set[Node] = set()
    waiting = [edge.parent]
    while waiting:
        here = waiting.pop()
        if here == edge.child:
            return True
        if here not in seen:
            seen.add(here)
            waiting += children.get(here, ())
    return False
