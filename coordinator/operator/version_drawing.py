"""Versions as people see them: the lineage graph as a tree and as Graphviz's DOT, figures, and differences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from coordinator.json_values import flatten
from coordinator.short_ids import short_id
from edge_client.wire.strict import printable

Graph = Mapping[str, Any]
"""`of`, `nodes` with `id`, `kind` and `facts`, `edges` with `parent`, `child` and `relation`."""

_SHAPES = {
    "version": "box",
    "data": "cylinder",
    "run": "ellipse",
    "params": "note",
    "rollout": "hexagon",
    "devices": "box3d",
}
_FIGURES = ("test_accuracy", "accuracy", "bytes")


def tree(graph: Graph) -> Tree:
    """The graph as a tree, from sources to results; a node with several parents is expanded below the first."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    children: dict[str, list[str]] = {}
    for edge in graph["edges"]:
        children.setdefault(edge["parent"], []).append(edge["child"])
    derived = {edge["child"] for edge in graph["edges"]}
    drawn: set[str] = set()
    root = Tree(Text(f"lineage of {graph['of']}"))

    # Not recursive: a lineage may be hundreds of versions deep.
    roots = sorted(
        (name for name in nodes if name not in derived), key=lambda name: len(_descendants(name, children))
    )
    waiting = [
        (root, name) for name in roots
    ]  # popped from the end: the root with the most descendants first
    while waiting:
        above, name = waiting.pop()
        line = Text(
            printable("  ".join(_describe(nodes[name])), 300), style="bold" if name == graph["of"] else ""
        )
        if name in drawn and children.get(name):
            above.add(line.append(" (see above)", style="dim"))
            continue
        drawn.add(name)
        branch = above.add(line)
        waiting += [(branch, child) for child in reversed(children.get(name, []))]
    if graph["cut"]:
        root.add(Text("there is more; ask for one of the versions at the edge", style="dim"))
    return root


def dot(graph: Graph) -> str:
    """The graph for Graphviz: `dot -Tsvg`."""
    lines = ["digraph lineage {", "  rankdir=LR;", '  node [fontname="sans-serif"];']
    for node in graph["nodes"]:
        label = "\n".join(printable(part) for part in _describe(node))
        marked = ", penwidth=2" if node["id"] == graph["of"] else ""
        lines.append(
            f"  {_quoted(node['id'])} [label={_quoted(label)}, shape={_SHAPES[node['kind']]}{marked}];"
        )
    for edge in graph["edges"]:
        ends = f"{_quoted(edge['parent'])} -> {_quoted(edge['child'])}"
        lines.append(f"  {ends} [label={_quoted(edge['relation'])}];")
    return "\n".join([*lines, "}"]) + "\n"


def figures(stage: str, metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Accuracy and size of a version by stage, without the steps of a compression."""
    stages = []
    for name, values in metrics.items():
        known = [
            f"{values[key]:,.0f} bytes" if key == "bytes" else f"accuracy {values[key]:.4f}"
            for key in _FIGURES
            if key in values
        ]
        if known and name != "source" and not name.startswith("step-"):
            stages.append(" ".join([*[name] * (name not in (stage, "final")), *known]))
    return ", ".join(stages)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every value that differs, as `what`, `before`, `after`; None where a version lacks it.

    Compares files by hash, and shows the beginning of the hash and the size.
    """
    first, second = _values(before), _values(after)
    return [
        {"what": what, "before": first.get(what), "after": second.get(what)}
        for what in dict.fromkeys((*first, *second))
        if first.get(what) != second.get(what)
    ]


def _descendants(name: str, children: Mapping[str, list[str]]) -> set[str]:
    descendants: set[str] = set()
    waiting = [name]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in descendants:
                descendants.add(child)
                waiting.append(child)
    return descendants


def _describe(node: Mapping[str, Any]) -> list[str]:
    facts = node["facts"]
    if node["kind"] == "version":
        aliases = "".join(f" @{alias}" for alias in facts["aliases"])
        measured = figures(facts["stage"], facts["metrics"])
        return [each for each in (f"{node['id']}{aliases}", facts["stage"], measured) if each]
    kind, _, ref = node["id"].partition(":")
    if kind == "rollout":
        return [f"rollout {short_id(ref)}", facts["state"]]
    if kind == "devices":
        return [f"on {facts['count']} device{'s' * (facts['count'] != 1)}"]
    if kind == "run":
        run = f"run {short_id(ref)}"
        if not facts:
            return [f"{run} (of another coordinator)"]
        accuracy = [f"accuracy {facts['test_accuracy']:.4f}"] if "test_accuracy" in facts else []
        return [f"{run} {facts['name']}", f"{facts['rounds']} rounds, {facts['state']}", *accuracy]
    return [f"{kind} {ref[:12]}"] + ["not registered"] * (kind == "params")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _values(version: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"stage": version["stage"], "kind": version["kind"]}
    values |= flatten(version["about"])
    for stage, figures in version["metrics"].items():
        values |= {f"{stage}.{key}": value for key, value in figures.items()}
    for file in version["files"]:
        values[file["path"]] = f"{file['sha256'][:12]} {file['size_bytes']:,} bytes"
    return values
