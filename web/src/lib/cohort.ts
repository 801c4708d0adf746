import type { Schemas } from "./api";
import type { FleetEvent } from "./event_stream";

/** A member of a cohort: what it does, or how its task ended and why. */
export interface Member {
  readonly state: string;
  readonly reason: string;
  readonly runtime?: string;
  readonly received?: number;
  readonly expected?: number;
  readonly seconds?: number | null;
  /** Whether it takes far longer than those that have answered. */
  readonly straggles?: boolean;
}

/** The newest round, as its events and the open round tell it. */
export interface LiveRound {
  readonly number: number;
  readonly members: ReadonlyMap<string, Member>;
  readonly committed: boolean;
}

/** A member is a straggler if it takes so many times the median of the members that were accepted. */
const STRAGGLER = 2;

const OUTCOMES: Readonly<Record<string, string>> = {
  update_accepted: "accepted",
  update_rejected: "rejected",
  update_excluded: "rejected",
  task_declined: "declined",
  client_silent: "silent",
};

/** The newest round among the events, or null before the first. */
export function newestRound(events: readonly FleetEvent[]): LiveRound | null {
  const begin = events.findLastIndex((event) => event.event === "round_started");
  const started = events[begin];
  if (!started) return null;
  const members = new Map<string, Member>();
  for (const device of (started["cohort"] as string[] | undefined) ?? []) members.set(device, { state: "selected", reason: "" });
  let committed = false;
  for (const event of events.slice(begin + 1)) {
    const state = OUTCOMES[event.event];
    const device = event.device ?? event["client"];
    if (state && typeof device === "string") members.set(device, { state, reason: reason(event) });
    committed ||= event.event === "round_committed";
  }
  return { number: Number(started["round"]), members, committed };
}

/** The round that is open, where its first event is not among those that are here. */
export function openedRound(open: Schemas["OpenRound"] | null | undefined): LiveRound | null {
  return open ? { number: open.number, members: new Map(), committed: false } : null;
}

/** The round with what the members that have not ended do now. Events are newer than `open`, which is polled: what they say of an end stays. */
export function withProgress(live: LiveRound, open: Schemas["OpenRound"] | null | undefined, now: number): LiveRound {
  if (!open || open.number !== live.number || live.committed) return live;
  const running = (now - new Date(open.started_at).getTime()) / 1000;
  const limit = STRAGGLER * median(open.members.flatMap((each) => (each.state === "accepted" && each.seconds !== null ? [each.seconds] : [])));
  const members = new Map(live.members);
  for (const each of open.members) {
    const before = members.get(each.device);
    const ended = before !== undefined && before.state !== "selected";
    const active = !ended && ["selected", "training", "uploading"].includes(each.state);
    members.set(each.device, {
      state: ended ? before.state : each.state,
      reason: ended ? before.reason : [each.reason, each.message].filter(Boolean).join(": "),
      runtime: each.runtime,
      received: each.received_bytes,
      expected: each.expected_bytes,
      seconds: each.seconds ?? (active ? running : null),
      straggles: active && limit > 0 && running > limit,
    });
  }
  return { ...live, members };
}

/** Number of members by state, in the order in which a task goes. */
export function counts(live: LiveRound): readonly (readonly [string, number])[] {
  const order = ["selected", "training", "uploading", "accepted", "rejected", "declined", "expired", "silent", "cancelled"];
  const states = [...live.members.values()].map((each) => each.state);
  return order.map((state) => [state, states.filter((each) => each === state).length] as const).filter(([, count]) => count > 0);
}

function median(values: readonly number[]): number {
  const sorted = values.toSorted((left, right) => left - right);
  return sorted[Math.floor((sorted.length - 1) / 2)] ?? 0;
}

function reason(event: FleetEvent): string {
  return [event["reason"], event["message"], event["words"]].filter((part) => typeof part === "string").join(": ");
}
