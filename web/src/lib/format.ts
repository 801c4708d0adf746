import { now } from "./now.svelte";
import { locale, said } from "./texts";

function formats() {
  return {
    moment: new Intl.DateTimeFormat(locale, { dateStyle: "medium", timeStyle: "short" }),
    wall: new Intl.DateTimeFormat(locale, { timeStyle: "medium" }),
    relative: new Intl.RelativeTimeFormat(locale, { numeric: "auto" }),
    percent: new Intl.NumberFormat(locale, { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1 }),
    whole: new Intl.NumberFormat(locale, { maximumFractionDigits: 0 }),
  };
}

const made = new Map<string | undefined, ReturnType<typeof formats>>();

/** Those of the language of the page; making them takes longer than using them. */
function present(): ReturnType<typeof formats> {
  const found = made.get(locale) ?? formats();
  made.set(locale, found);
  return found;
}

const UNITS: readonly [Intl.RelativeTimeFormatUnit, number][] = [
  ["day", 86_400],
  ["hour", 3_600],
  ["minute", 60],
  ["second", 1],
];

/** An ISO time in the reader's zone; a dash where there is none. */
export function time(iso: string | null | undefined): string {
  return iso ? present().moment.format(new Date(iso)) : "–";
}

/** "3 minutes ago", by the largest unit that fits. */
export function ago(iso: string | null | undefined, at: number = now.milliseconds): string {
  if (!iso) return "–";
  const seconds = (new Date(iso).getTime() - at) / 1000;
  const [unit, size] = UNITS.find(([, size]) => Math.abs(seconds) >= size) ?? ["second", 1];
  return present().relative.format(Math.round(seconds / size), unit);
}

/** A share from 0 to 1 as percent. */
export function share(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : present().percent.format(value);
}

/** A whole number with the separators of the language. */
export function whole(value: number): string {
  return present().whole.format(value);
}

/** Bytes in decimal units. */
export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"] as const;
  let index = 0;
  while (value >= 1000 && index < units.length - 1) {
    value /= 1000;
    index += 1;
  }
  return `${index ? value.toFixed(1) : value} ${units[index]}`;
}

/** The first eight characters of an id, which commands accept too. */
export function short(id: string): string {
  return id.slice(0, 8);
}

/** The time of day, for lists of what happened just now. */
export function clock(iso: string): string {
  return present().wall.format(new Date(iso));
}

/** A value of an event or a report: fractions with four digits, objects as JSON. */
export function figure(value: unknown): string {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** What an object says, as one line: its keys and values, but those of `without` and those that are null. */
export function facts(found: object, without: readonly string[] = []): string {
  return Object.entries(found)
    .filter(([key, value]) => !without.includes(key) && value !== null && value !== undefined)
    .map(([key, value]) => (key === "message" ? figure(value) : `${said("fact", key)} ${fact(key, value)}`))
    .join(" · ");
}

/** A value of a report by its key: bytes in their unit, everything else as a figure. */
export function fact(key: string, value: unknown): string {
  return typeof value === "number" && /(^|_)bytes(_|$)/.test(key) ? bytes(value) : figure(value);
}
