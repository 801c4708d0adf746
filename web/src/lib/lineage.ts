import type { Schemas } from "./api";

/** A node of a drawing: its column from sources to results, and its row in that column. */
export interface Placed {
  readonly node: Schemas["LineageNode"];
  readonly column: number;
  readonly row: number;
}

/**
 * Places a lineage in columns: each node behind the last of its parents. In a column, nodes are in the order of the rows
 * that they are connected to (the barycentre heuristic of Sugiyama 1981, one sweep each way).
 */
export function layout(graph: Schemas["Lineage"]): Placed[] {
  const parents = grouped(graph.edges, (edge) => [edge.child, edge.parent]);
  const children = grouped(graph.edges, (edge) => [edge.parent, edge.child]);
  const columns = columnsOf(graph, parents, children);
  const rows = new Map<string, number>();
  const sort = (column: string[], neighbours: ReadonlyMap<string, string[]>): void => {
    const weight = new Map(column.map((id, index) => [id, mean(neighbours.get(id) ?? [], rows, index)]));
    column.sort((one, other) => (weight.get(one) ?? 0) - (weight.get(other) ?? 0));
    column.forEach((id, index) => rows.set(id, index));
  };
  for (const column of columns) sort(column, parents);
  for (const column of columns.toReversed()) sort(column, children);
  const nodes = new Map(graph.nodes.map((node) => [node.id, node]));
  return columns.flatMap((column, index) =>
    column.flatMap((id, row) => {
      const node = nodes.get(id);
      return node ? [{ node, column: index, row }] : [];
    }),
  );
}

function columnsOf(graph: Schemas["Lineage"], parents: ReadonlyMap<string, string[]>, children: ReadonlyMap<string, string[]>): string[][] {
  const column = new Map<string, number>();
  const open = new Map(graph.nodes.map((node) => [node.id, parents.get(node.id)?.length ?? 0]));
  const ready = graph.nodes.map((node) => node.id).filter((id) => open.get(id) === 0);
  for (let id = ready.shift(); id !== undefined; id = ready.shift()) {
    column.set(id, Math.max(-1, ...(parents.get(id) ?? []).map((each) => column.get(each) ?? -1)) + 1);
    for (const child of children.get(id) ?? []) {
      const left = (open.get(child) ?? 0) - 1;
      open.set(child, left);
      if (left === 0) ready.push(child);
    }
  }
  const found: string[][] = Array.from({ length: Math.max(0, ...column.values()) + 1 }, () => []);
  for (const node of graph.nodes) found[column.get(node.id) ?? 0]?.push(node.id);
  return found;
}

function grouped(edges: readonly Schemas["LineageEdge"][], ends: (edge: Schemas["LineageEdge"]) => [string, string]): Map<string, string[]> {
  const found = new Map<string, string[]>();
  for (const edge of edges) {
    const [key, value] = ends(edge);
    found.set(key, [...(found.get(key) ?? []), value]);
  }
  return found;
}

function mean(ids: readonly string[], rows: ReadonlyMap<string, number>, otherwise: number): number {
  const known = ids.map((id) => rows.get(id)).filter((row) => row !== undefined);
  return known.length ? known.reduce((sum, row) => sum + row, 0) / known.length : otherwise;
}
