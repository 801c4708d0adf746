import type { Schemas } from "./api";
import { texts } from "./texts";

/** A key of an experiment as an input: `text` is a string, `structure` a list or table in TOML. */
export interface Field {
  readonly key: string;
  readonly kind: "choice" | "number" | "text" | "structure";
  readonly choices: readonly string[];
  readonly range: string;
  readonly help: string;
}

/** A table of the file; `basic` keys are shown at once, the others on demand. */
export interface Section {
  readonly name: string;
  readonly basic: readonly Field[];
  readonly further: readonly Field[];
}

interface Property {
  readonly type?: string;
  readonly enum?: readonly string[];
  readonly const?: string;
  readonly anyOf?: readonly Property[];
  readonly items?: Property;
  readonly $ref?: string;
  readonly properties?: Readonly<Record<string, Property>>;
  readonly description?: string;
  readonly default?: unknown;
  readonly minimum?: number;
  readonly maximum?: number;
  readonly exclusiveMinimum?: number;
  readonly exclusiveMaximum?: number;
  readonly multipleOf?: number;
}

export type Values = Readonly<Record<string, string>>;

const BASIC = new Set([
  "name", "seed", "data.dataset", "model.name", "federation.rounds", "federation.clients_per_round", "federation.min_updates",
  "federation.deadline_seconds", "local.epochs", "local.batch_size", "local.lr", "strategy.name", "devices.groups",
  "privacy.mechanism", "privacy.clip_norm", "privacy.epsilon", "privacy.noise_multiplier", "privacy.delta", "privacy.budget", "privacy.secure_aggregation",
  "privacy.group_size",
]);
/** Keys that are for simulations. */
const SIMULATED = new Set(["data.partition", "data.public_samples", "federation.relays", "federation.malicious_relays"]);
const SIMULATED_TABLES = new Set(["simulation", "downlink", "server_data"]);

/** The form of an experiment. Options of the chosen model and strategy are keys of their tables. */
export function sections(schema: Schemas["ExperimentSchema"], model: string, strategy: string): Section[] {
  const root: Property & { readonly $defs?: Readonly<Record<string, Property>> } = schema.experiment;
  const options: Record<string, Property | undefined> = {
    model: schema.models[model] as Property | undefined,
    strategy: schema.strategies[strategy] as Property | undefined,
  };
  const tables: Record<string, Record<string, Property>> = { "": {} };
  for (const [name, property] of Object.entries(root.properties ?? {})) {
    const table = property.$ref ? root.$defs?.[property.$ref.split("/").at(-1) ?? ""] : undefined;
    if (table) tables[name] = { ...table.properties, ...options[name]?.properties };
    else tables[""] = { ...tables[""], [name]: property };
  }
  return Object.entries(tables)
    .filter(([name]) => !SIMULATED_TABLES.has(name))
    .map(([name, properties]) => {
      const found = Object.entries(properties)
        .map(([key, property]) => field(name ? `${name}.${key}` : key, property))
        .filter((each) => !SIMULATED.has(each.key));
      const isOption = (each: Field): boolean => each.key.slice(name.length + 1) in (options[name]?.properties ?? {});
      const isBasic = (each: Field): boolean => BASIC.has(each.key) || isOption(each);
      return { name, basic: found.filter(isBasic), further: found.filter((each) => !isBasic(each)) };
    });
}

function field(key: string, property: Property): Field {
  const given = property.anyOf?.find((each) => each.type !== "null") ?? property;
  const choices = given.enum ?? (given.const === undefined ? given.type === "boolean" ? ["true", "false"] : [] : [given.const]);
  const kinds: Record<string, Field["kind"]> = { integer: "number", number: "number", string: "text" };
  const kind = choices.length ? "choice" : (kinds[given.type ?? ""] ?? "structure");
  return { key, kind, choices, range: range(given), help: property.description ?? "" };
}

function range(property: Property): string {
  const bounds: [string, number | undefined][] = [
    ["≥", property.minimum], [">", property.exclusiveMinimum], ["≤", property.maximum], ["<", property.exclusiveMaximum],
  ];
  const parts = bounds.filter(([, at]) => at !== undefined && at < Number.MAX_SAFE_INTEGER).map(([sign, at]) => `${sign} ${at}`);
  if (property.multipleOf) parts.push(texts.newRun.multiple(property.multipleOf));
  const kinds: Record<string, string> = texts.newRun.kinds;
  const kind = property.items?.type === "string" ? "texts" : (property.type ?? (property.$ref ? "object" : ""));
  return [kinds[kind], ...parts].filter(Boolean).join(", ");
}

/** `--set` settings that make the experiment of a form. */
export function settings(values: Values, fields: readonly Field[]): string[] {
  const kinds = new Map(fields.map((each) => [each.key, each]));
  return Object.entries(values)
    .filter(([, text]) => text.trim() !== "")
    .map(([key, text]) => `${key}=${isString(kinds.get(key)) ? JSON.stringify(text) : text}`);
}

/** The file of a form. Text of an unknown key is quoted unless it looks like TOML. */
export function toToml(values: Values, fields: readonly Field[]): string {
  const kinds = new Map(fields.map((each) => [each.key, each]));
  const tables = new Map<string, string[]>([["", []]]);
  for (const [key, text] of Object.entries(values)) {
    if (text.trim() === "") continue;
    const dot = key.indexOf(".");
    const table = key.slice(0, Math.max(0, dot));
    const known = kinds.get(key);
    const quoted = known ? isString(known) : !/^(true|false|[-+]?\d[\d_.e+-]*|\[.*|\{.*)$/su.test(text);
    tables.set(table, [...(tables.get(table) ?? []), `${key.slice(dot + 1)} = ${quoted ? JSON.stringify(text) : text}`]);
  }
  return [...tables]
    .filter(([, lines]) => lines.length)
    .map(([table, lines]) => [...(table ? [`[${table}]`] : []), ...lines, ""].join("\n"))
    .join("\n");
}

function isString(known: Field | undefined): boolean {
  return known?.kind === "text" || (known?.kind === "choice" && known.choices[0] !== "true");
}

/** Without the keys that a run on devices ignores. */
export function ofDevices(values: Values): Values {
  const isKept = (key: string): boolean => !SIMULATED.has(key) && !SIMULATED_TABLES.has(key.split(".")[0] ?? "");
  return Object.fromEntries(Object.entries(values).filter(([key]) => isKept(key)));
}

/** Problems by the input that they belong to: the one of their key, or of the longest beginning of it; the others apart. */
export function placed(
  problems: readonly Schemas["ExperimentProblem"][],
  keys: ReadonlySet<string>,
): { at: ReadonlyMap<string, string[]>; elsewhere: string[] } {
  const at = new Map<string, string[]>();
  const elsewhere: string[] = [];
  for (const { key, message } of problems) {
    const parts = key.split(".");
    while (parts.length && !keys.has(parts.join("."))) parts.pop();
    const place = parts.join(".");
    if (place) at.set(place, [...(at.get(place) ?? []), message]);
    else elsewhere.push(message);
  }
  return { at, elsewhere };
}
