import type { Round } from "./queries";

type Values = readonly (number | null)[];

/** Runs that differ by their seeds only, and so are drawn as one line with a band. */
export interface SeedGroup<Run> {
  readonly runs: readonly Run[];
}

/** The runs by their settings without `seed`, in the order in which each group first appears. */
export function groupBySeed<Run extends { readonly experiment: Readonly<Record<string, unknown>> }>(runs: readonly Run[]): readonly SeedGroup<Run>[] {
  const groups = new Map<string, Run[]>();
  for (const run of runs) {
    const key = withoutSeeds(run.experiment);
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  return [...groups.values()].map((members) => ({ runs: members }));
}

/** Mean, least and greatest value of each round over the runs that have it. */
export function overSeeds(runs: readonly (readonly Round[])[], figure: (round: Round) => number | null, rounds: number): { mean: Values; low: Values; high: Values } {
  const columns = Array.from({ length: rounds }, (_, index) => runs.flatMap((each) => {
    const round = each[index];
    const value = round === undefined ? null : figure(round);
    return value === null ? [] : [value];
  }));
  return {
    mean: columns.map((values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null)),
    low: columns.map((values) => (values.length ? Math.min(...values) : null)),
    high: columns.map((values) => (values.length ? Math.max(...values) : null)),
  };
}

/** The settings as JSON with sorted keys, without the seeds of the run and of its data. */
function withoutSeeds(experiment: Readonly<Record<string, unknown>>): string {
  return JSON.stringify(experiment, (key, value: unknown) => {
    if (key === "seed") return undefined;
    if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.entries(value).sort(([left], [right]) => left.localeCompare(right)));
  });
}
