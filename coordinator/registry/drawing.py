"""A lineage graph as people look at it: a tree on a terminal, and Graphviz's DOT. Both from what the API answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from edge_client.wire.strict import printable

Graph = Mapping[str, Any]
"""`of`, `nodes` with `id`, `kind` and `facts`, `edges` with `parent`, `child` and `relation`."""

_SHAPES = {"version": "box", "data": "cylinder", "run": "ellipse", "params": "note"}
_FIGURES = ("test_accuracy", "accuracy", "bytes")


def tree(graph: Graph) -> Tree:
    """What was made from what, from left to right; a node with several parents is spelled out below the first."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    children: dict[str, list[str]] = {}
    for edge in graph["edges"]:
        children.setdefault(edge["parent"], []).append(edge["child"])
    made = {edge["child"] for edge in graph["edges"]}
    drawn: set[str] = set()
    root = Tree(Text(f"lineage of {graph['of']}"))

    # Not recursive: a model may be trained on for hundreds of versions.
    roots = sorted((name for name in nodes if name not in made), key=lambda name: len(_below(name, children)))
    waiting = [(root, name) for name in roots]  # taken from the end: the one that most came of first
    while waiting:
        above, name = waiting.pop()
        line = Text(_line(nodes[name]), style="bold" if name == graph["of"] else "")
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
        label = "\n".join(printable(words) for words in _words(node))
        marked = ", penwidth=2" if node["id"] == graph["of"] else ""
        lines.append(
            f"  {_quoted(node['id'])} [label={_quoted(label)}, shape={_SHAPES[node['kind']]}{marked}];"
        )
    for edge in graph["edges"]:
        ends = f"{_quoted(edge['parent'])} -> {_quoted(edge['child'])}"
        lines.append(f"  {ends} [label={_quoted(edge['relation'])}];")
    return "\n".join([*lines, "}"]) + "\n"


def figures(stage: str, metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Accuracy and size of a version, and of what else it was measured in; a compression's steps are left out."""
    told = []
    for name, values in metrics.items():
        known = [_figure(key, values[key]) for key in _FIGURES if key in values]
        if known and name != "source" and not name.startswith("step-"):
            told.append(" ".join([*[name] * (name not in (stage, "final")), *known]))
    return ", ".join(told)


def _below(name: str, children: Mapping[str, list[str]]) -> set[str]:
    """All that came of a node."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _line(node: Mapping[str, Any]) -> str:
    return printable("  ".join(_words(node)), 300)


def _words(node: Mapping[str, Any]) -> list[str]:
    facts = node["facts"]
    if node["kind"] == "version":
        aliases = "".join(f" @{alias}" for alias in facts["aliases"])
        told = figures(facts["stage"], facts["metrics"])
        return [each for each in (f"{node['id']}{aliases}", facts["stage"], told) if each]
    kind, _, ref = node["id"].partition(":")
    if kind == "run":
        named = f"run {ref[:8]}"
        if not facts:
            return [f"{named} (of another coordinator)"]
        accuracy = [f"accuracy {facts['test_accuracy']:.4f}"] if "test_accuracy" in facts else []
        return [f"{named} {facts['name']}", f"{facts['rounds']} rounds, {facts['state']}", *accuracy]
    return [f"{kind} {ref[:12]}"] + ["not registered"] * (kind == "params")


def _figure(key: str, value: float) -> str:
    return f"{value:,.0f} bytes" if key == "bytes" else f"accuracy {value:.4f}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
