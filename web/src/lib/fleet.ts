import type { Schemas } from "./api";

type Device = Schemas["Device"];

/** What a device said of a release at its last check-in, as in `edge_client.wire.device`. */
export interface Slot {
  readonly model: string;
  readonly version: number;
  readonly standing: string;
  readonly code: string;
  readonly words: string;
  readonly golden_accuracy: number | null;
}

/** The filters of the fleet by name, as the page's address holds them; an empty one admits all. */
export type Filters = Readonly<Record<(typeof FILTERS)[number], string>>;
export const FILTERS = ["search", "state", "presence", "group", "class", "runtime", "release", "seen", "expires"] as const;

const SECONDS: Readonly<Record<string, number>> = { hour: 3_600, day: 86_400, week: 7 * 86_400, month: 30 * 86_400 };
export const SEEN = ["hour", "day", "week", "not-hour", "not-day", "not-week", "never"] as const;
export const EXPIRES = ["expired", "day", "week", "month"] as const;
/** Stands for devices without any release. */
export const NO_RELEASE = "-";

export function classOf(device: Device): string {
  return String(device.report["device_class"] ?? "");
}

export function runtimesOf(device: Device): string[] {
  return Object.keys((device.report["runtimes"] as object | undefined) ?? {});
}

export function slotsOf(device: Device): readonly Slot[] {
  return Array.isArray(device.report["releases"]) ? (device.report["releases"] as Slot[]) : [];
}

/** The releases that the device runs, as `model:version`. */
export function releasesOf(device: Device): string[] {
  return slotsOf(device).filter((each) => each.standing === "active").map((each) => `${each.model}:${each.version}`);
}

/** The filters that a query string holds. */
export function filtersOf(query: URLSearchParams): Filters {
  return Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""])) as unknown as Filters;
}

/** Whether a device passes all filters. What does not depend on the device is worked out once. */
export function matcher(wanted: Filters, now: number = Date.now()): (device: Device) => boolean {
  const text = wanted.search.toLowerCase();
  const tests: ((device: Device) => boolean)[] = [];
  const check = (value: string, test: (device: Device) => boolean): void => {
    if (value) tests.push(test);
  };
  check(wanted.state, (device) => device.state === wanted.state);
  check(wanted.presence, (device) => device.state === "active" && device.presence === wanted.presence);
  check(wanted.group, (device) => device.group === wanted.group);
  check(wanted.class, (device) => classOf(device) === wanted.class);
  check(wanted.runtime, (device) => runtimesOf(device).includes(wanted.runtime));
  check(wanted.release, (device) => (wanted.release === NO_RELEASE ? releasesOf(device).length === 0 : releasesOf(device).includes(wanted.release)));
  check(wanted.seen, seen(wanted.seen, now));
  check(wanted.expires, expires(wanted.expires, now));
  check(text, (device) => device.name.toLowerCase().includes(text) || device.id.startsWith(text));
  return (device) => tests.every((test) => test(device));
}

function seen(when: string, now: number): (device: Device) => boolean {
  if (when === "never") return (device) => device.last_seen_at === null;
  const isLonger = when.startsWith("not-");
  const since = moment(now - (SECONDS[isLonger ? when.slice(4) : when] ?? 0) * 1e3);
  return (device) => device.last_seen_at !== null && (isLonger ? device.last_seen_at < since : device.last_seen_at >= since);
}

function expires(when: string, now: number): (device: Device) => boolean {
  const until = moment(now + (SECONDS[when] ?? 0) * 1e3);
  return (device) => device.certificate_until !== null && device.certificate_until < until;
}

/** As the API writes times, so that texts compare as times do: parsing ten thousand would be felt while typing. */
function moment(milliseconds: number): string {
  return new Date(milliseconds).toISOString();
}

/** What the filters of the fleet can be set to. */
export interface Choices {
  readonly groups: readonly string[];
  readonly classes: readonly string[];
  readonly runtimes: readonly string[];
  readonly releases: readonly string[];
}

export function choicesOf(devices: readonly Device[]): Choices {
  const sorted = (values: (device: Device) => readonly string[]): string[] => [...new Set(devices.flatMap(values))].filter(Boolean).sort();
  return { groups: sorted((device) => [device.group]), classes: sorted((device) => [classOf(device)]), runtimes: sorted(runtimesOf), releases: sorted(releasesOf) };
}
