import type { Schemas } from "./api";
import type { Final } from "./results";

export type Kind = Schemas["Job"]["kind"];

export const SIMULATION: readonly Kind[] = ["simulation"];
export const DATACENTER: readonly Kind[] = ["pretraining", "plan", "compression", "export"];

/** Documents to begin with, small enough to be done in a minute. */
export const TEMPLATES: Readonly<Record<Kind, string>> = {
  simulation: '[data]\ndataset = "digits"\n\n[model]\nname = "mlp"\n\n[federation]\nclients = 10\nclients_per_round = 5\nrounds = 10\n',
  pretraining: '[data]\ndataset = "digits"\n\n[train]\nepochs = 5\n\n[plan]\ndp = 1\n\n[profile]\n',
  plan: '[data]\ndataset = "digits"\n\n[planner]\nprocesses = 2\n',
  compression: '[[step]]\nkind = "quantize"\nprecision = "static-int8"\n',
  export: 'name = "digits"\nversion = 1\n',
};

/** Kinds of jobs whose model a job of this kind starts from; none if it needs no source. */
export function sourcesOf(kind: Kind): readonly Kind[] {
  return kind === "compression" || kind === "export" ? ["simulation", "pretraining", "compression"] : [];
}

export function isLive(job: Schemas["JobSummary"]): boolean {
  return job.state === "queued" || job.state === "running";
}

/** A point of a curve: of a training by step, of a simulation by round. */
export interface Point {
  readonly step?: number;
  readonly round?: number;
  readonly loss?: number;
  readonly lr?: number;
  readonly rows_per_second?: number;
  readonly train_loss?: number | null;
  readonly test_loss?: number | null;
  readonly test_accuracy?: number | null;
  readonly bytes_up?: number;
}

/** Tokens of a row, of a training on text; 1 for other rows. */
export function tokensPerRow(job: Schemas["Job"]): number {
  const data = job.document["data"] as { dataset?: string; length?: number } | undefined;
  return (data?.dataset === "shakespeare" || data?.dataset === "text") && data.length ? data.length : 1;
}

const PARTS = ["compute", "communication", "bubble", "loader", "other"];

/** Shares of a step by what it was spent on, in the order of a step; they add up to 1. */
export function split(seconds: Readonly<Record<string, number>>): [string, number][] {
  const total = Object.values(seconds).reduce((sum, each) => sum + each, 0);
  return total ? PARTS.filter((each) => each in seconds).map((each) => [each, (seconds[each] ?? 0) / total]) : [];
}

/** Where a training's time goes, of its profiled steps. */
export interface Profile {
  readonly mean_seconds?: Record<string, number>;
  readonly tokens_per_second?: number | null;
  readonly rows_per_second?: number;
}

/** What a report of a job may hold, by kind. */
export interface JobReport {
  readonly profile?: Profile;
  readonly final?: Final;
  readonly ranking?: readonly { plan: string; processes: number; seconds: number; predicted: number | null; measured: number | null; memory_bytes: number }[];
  readonly explanation?: readonly string[];
  readonly source?: CompressionRow;
  readonly steps?: readonly CompressionRow[] | number;
  readonly notices?: readonly string[];
  readonly verdicts?: readonly { runtime: string; refused: string | null }[];
  readonly accuracy?: number;
  readonly r2?: number;
  readonly bytes?: number;
}

export interface CompressionRow {
  readonly step: number;
  readonly kind: string;
  readonly precision: string;
  readonly accuracy: number | null;
  readonly r2?: number | null;
  readonly bytes: number;
  readonly latency_us: number | null;
}
