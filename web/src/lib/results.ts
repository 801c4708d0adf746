import { bytes, figure, share } from "./format";

/** Figures of a model as reports hold them; those beside loss and accuracy are under `metrics`. */
export interface Final {
  readonly metrics?: Readonly<Record<string, unknown>> | null;
  readonly baselines?: Readonly<Record<string, Readonly<Record<string, unknown>>>>;
  readonly [key: string]: unknown;
}

const SHARES: readonly string[] = ["test_accuracy", "accuracy", "balanced_accuracy"];
const QUANTITIES: readonly string[] = ["r2", "mae", "rmse"];

/** A figure by its key: accuracies as percent, bytes in their unit; a dash where it was not measured or is not defined. */
export function result(key: string, value: unknown): string {
  if (typeof value !== "number") return "–";
  if (SHARES.includes(key)) return share(value);
  return key === "bytes" ? bytes(value) : figure(value);
}

/** The single numbers of a final model: accuracy and loss, R2 and errors of one that predicts quantities, AUC and the like; and how many rows. */
export function finalFigures(final: Final): [string, number][] {
  const all = [...Object.entries(final), ...Object.entries(final.metrics ?? {})];
  return all.filter((each): each is [string, number] => typeof each[1] === "number" && each[0] !== "round");
}

/** How models without federation do on the same rows, as far as it was measured: name and figures of each. */
export function baselinesOf(final: Final): [string, [string, number][]][] {
  return Object.entries(final.baselines ?? {}).map(([name, found]) => {
    const known = Object.entries(found).filter(([key]) => [...SHARES, ...QUANTITIES].includes(key));
    return [name, known.filter((each): each is [string, number] => typeof each[1] === "number")];
  });
}

/** A figure of a round that devices measured on their own rows; null where they measured none. */
export function onDevices(round: { readonly on_devices?: { readonly metrics?: Readonly<Record<string, unknown>> } }, key: string): number | null {
  const value = round.on_devices?.metrics?.[key];
  return typeof value === "number" ? value : null;
}

/** The figure by which a run is known: accuracy, or R2 of one that predicts quantities. */
export function scoreOf(run: { readonly test_accuracy: number | null; readonly r2: number | null }): string {
  if (run.test_accuracy !== null || run.r2 === null) return share(run.test_accuracy);
  return `R2 ${figure(run.r2)}`;
}
