"""Prints the structure: `python -m tests.structure`."""

from __future__ import annotations

import sys

from tests.structure.measure import import_cycles, import_graph, mutual_folders, packages

_SHOWN = 5


def main() -> None:
    lines = []
    measured = packages()
    for package in measured:
        crowded = package.folders.most_common(1)[0]
        lines += [
            f"{package.name}: {package.lines} lines, {len(package.modules)} modules, median module "
            f"{package.median_module():.0f}, median function {package.median_function():.0f}",
            f"  largest folder    {crowded[0]} ({crowded[1]} modules)",
            *(f"  longest module    {each.name} ({each.lines})" for each in package.modules[:_SHOWN]),
            *(f"  longest function  {each.name} ({each.lines})" for each in package.functions[:_SHOWN]),
            f"  longest chain     {len(package.chain)}: {' > '.join(package.chain)}",
        ]
    graph = import_graph()
    pairs = mutual_folders(graph)
    lines.append(f"{len(pairs)} pairs of folders import each other")
    lines += [f"  {one} and {other} ({count} and {back})" for one, other, count, back in pairs]
    cycles = import_cycles(graph)
    lines.append(f"{len(cycles)} cycles of imports")
    lines += [f"  {', '.join(cycle)}" for cycle in cycles]
    lines.append(f"{sum(package.lines for package in measured)} lines in total")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
