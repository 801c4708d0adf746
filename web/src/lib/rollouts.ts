import type { Schemas } from "./api";
import defaults from "./gates.json";
import { figure, share } from "./format";
import { texts } from "./texts";

export type Gate = keyof typeof defaults;
export const GATES = Object.keys(defaults) as Gate[];
export type FilterKey = keyof typeof texts.rollouts.filters;

const SHARES: readonly Gate[] = ["install", "answered", "golden_accuracy", "max_accuracy_drop", "confidence"];
const SECONDS: readonly Gate[] = ["deadline_seconds", "soak_seconds"];
const UPPER_BOUNDS: readonly Gate[] = ["max_accuracy_drop", "max_loss_increase"];
const OFF = "none";

export function defaultOf(gate: Gate): string {
  return String(defaults[gate] ?? OFF);
}

/** The gates that were entered; those left empty keep their default. Throws on what is no number. */
export function gatesOf(entered: Partial<Record<Gate, string>>): Partial<Record<Gate, number | null>> {
  const found: Partial<Record<Gate, number | null>> = {};
  for (const gate of GATES) {
    const text = entered[gate]?.trim() ?? "";
    if (text === "") continue;
    const value = text === OFF ? null : Number(text);
    if (Number.isNaN(value)) throw new Error(texts.rollouts.badGate(texts.rollouts.names[gate], text));
    found[gate] = value;
  }
  return found;
}

/** The filter that was entered, lists separated by commas. Throws on a label without `=`. */
export function filterOf(entered: Partial<Record<FilterKey, string>>): Schemas["RolloutRequest"]["filter"] {
  const list = (key: FilterKey): string[] => (entered[key] ?? "").split(",").map((each) => each.trim()).filter(Boolean);
  const labels = list("labels").map((each): [string, string] => {
    const at = each.indexOf("=");
    if (at < 1) throw new Error(texts.rollouts.badLabel(each));
    return [each.slice(0, at).trim(), each.slice(at + 1).trim()];
  });
  return { groups: list("groups"), device_classes: list("device_classes"), runtimes: list("runtimes"), ids: list("ids"), labels: Object.fromEntries(labels) };
}

/** A gate's limit or measured value in its unit. */
export function inUnit(gate: string, value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (SHARES.includes(gate as Gate)) return share(value);
  return SECONDS.includes(gate as Gate) ? texts.rollouts.seconds(figure(Math.round(value))) : figure(value);
}

/** "at least 95 %", "at most 2 %"; what only says how others are measured stands alone. */
export function limitOf(each: Schemas["Measured"]): string {
  if (each.limit === null) return texts.rollouts.off;
  const value = inUnit(each.gate, each.limit);
  if (each.gate === "deadline_seconds" || each.gate === "confidence") return value;
  return UPPER_BOUNDS.includes(each.gate as Gate) ? texts.rollouts.most(value) : texts.rollouts.least(value);
}

/** A filter as one line; empty if it admits all devices. */
export function filterText(filter: Readonly<Record<string, unknown>>): string {
  return Object.entries(filter)
    .map(([key, value]): [string, string] => [
      texts.rollouts.filters[key as FilterKey] ?? key,
      Array.isArray(value) ? value.join(", ") : Object.entries(value as object).map(([name, each]) => `${name}=${String(each)}`).join(", "),
    ])
    .filter(([, text]) => text !== "")
    .map(([name, text]) => `${name}: ${text}`)
    .join("; ");
}

