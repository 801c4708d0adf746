"""The lineage of a version as a graph: its ancestors and descendants.

    data ─► pretrained version ─► compressed version ─► release ─► federated run ─► next version

Nodes are versions, data sets by fingerprint, runs by id, and params that no version contains. An edge is an equal hash: an
input of the child is a file of its parent. The params of a run's first round link it to the version that contains them,
and to the releases made from them before it began, since its devices had these. The graph is transitively reduced.
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

MAX_NODES = 500
"""A larger graph is cut, and marked as such."""


@dataclass(frozen=True, order=True)
class Node:
    """A version `name:number`, a data set by fingerprint, a run or a rollout by id, unregistered params by hash, or the
    devices that run a version."""

    kind: Literal["version", "data", "run", "params", "rollout", "devices"]
    ref: str

    @property
    def id(self) -> str:
        """The node's id in responses. No version number is as long as a hash or a run's id."""
        return self.ref if self.kind == "version" else f"{self.kind}:{self.ref}"


@dataclass(frozen=True, order=True)
class Edge:
    """`child` was made from `parent`. `start`: a run started from it."""

    parent: Node
    child: Node
    relation: Literal["data", "params", "run", "start", "rollout", "devices"]


@dataclass
class Graph:
    """The ancestors and descendants of one version.

    Attributes:
        nodes: each with the facts to show.
        cut: there are more.
    """

    of: Node
    nodes: dict[Node, dict[str, Any]] = field(default_factory=dict)
    edges: set[Edge] = field(default_factory=set)
    cut: bool = False


def lineage(connection: Connection, version: VersionId) -> Graph:
    """The graph around a version, which must exist."""
    graph = Graph(_version_node(version))
    edges: set[Edge] = set()
    for forward in (False, True):
        seen: set[Node] = set()
        waiting = [graph.of]
        while waiting:
            here = waiting.pop(0)
            if here in seen:
                continue
            if len(graph.nodes) >= MAX_NODES:
                graph.cut = True
                break
            seen.add(here)
            graph.nodes.setdefault(here, _facts(connection, here))
            adjacent = (_child_edges if forward else _parent_edges)(connection, here)
            edges.update(adjacent)
            waiting += [edge.child if forward else edge.parent for edge in adjacent]
    edges = {edge for edge in edges if edge.parent in graph.nodes and edge.child in graph.nodes}
    graph.edges = {edge for edge in edges if not _is_transitive(edge, edges)}
    return graph


def _parent_edges(connection: Connection, node: Node) -> list[Edge]:
    """Edges to a node's parents."""
    if node.kind == "run":
        return _starts(connection, node)
    if node.kind != "version":
        return []
    version = _version(connection, node)
    registered: set[Edge] = set()
    unregistered: set[Edge] = set()
    own = {file.sha256 for file in version.files}
    for each in version.inputs:
        if each.relation != "params":
            registered.add(Edge(Node(each.relation, each.ref), node, each.relation))
            continue
        parents = _origins(connection, each.ref, passed_on=each.ref in own) - {version.id}
        registered |= {Edge(_version_node(parent), node, "params") for parent in parents}
        if not parents and each.ref not in own:
            unregistered.add(Edge(Node("params", each.ref), node, "params"))
    # Unregistered params are omitted if a registered version is a parent too.
    has_parent = any(edge.relation == "params" for edge in registered)
    return sorted(registered if has_parent else registered | unregistered)


def _origins(connection: Connection, digest: str, *, passed_on: bool = False) -> set[VersionId]:
    """The versions that a file comes from: those that contain it and did not get it from another version.

    A compression that only quantizes has the same params as its source. If only such versions are registered they
    count, unless the question is about one of them (`passed_on`).
    """
    held = set(registry.versions_with_file(connection, [digest]).get(digest, ()))
    users = {user for user, _ in registry.versions_with_input(connection, [digest]).get(digest, ())}
    return held - users if passed_on else held - users or held


def _child_edges(connection: Connection, node: Node) -> list[Edge]:
    """Edges to a node's children. Data has none: other models of the same data do not belong to the lineage."""
    if node.kind == "run":
        made = registry.versions_with_input(connection, [node.ref]).get(node.ref, ())
        return [Edge(node, _version_node(child), "run") for child, relation in made if relation == "run"]
    if node.kind != "version":
        return []
    version = _version(connection, node)
    digests = [file.sha256 for file in version.files]
    inputs = [each.ref for each in version.inputs if each.relation == "params"]
    children = {
        child for made in registry.versions_with_input(connection, digests).values() for child, _ in made
    }
    edges: list[Edge] = []
    for child in sorted(children - {version.id}):
        edges += _parent_edges(connection, _version_node(child))
    for run in _runs_from(connection, [*digests, *(inputs if version.kind == "inference" else ())]):
        edges += _starts(connection, Node("run", run))
    return [edge for edge in edges if edge.parent == node]


def _starts(connection: Connection, node: Node) -> list[Edge]:
    """What a run started from: the versions with its first params, and the releases of these that existed then."""
    run = run_rows.find(connection, node.ref)
    first = select(rounds.c.base).where(rounds.c.run == node.ref, rounds.c.number == 1)
    base = connection.execute(first).scalar_one_or_none()
    if run is None or base is None:
        return []
    versions = sorted(_origins(connection, base))
    for identity, _ in registry.versions_with_input(connection, [base]).get(base, ()):
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


def _is_transitive(edge: Edge, edges: Iterable[Edge]) -> bool:
    """Whether a longer path leads from the parent to the child too."""
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
