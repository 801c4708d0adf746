import type { FleetEvent } from "./event_stream";

/** The round in progress as its events tell it. */
export interface LiveRound {
  readonly number: number;
  readonly members: ReadonlyMap<string, { readonly state: string; readonly reason: string }>;
  readonly committed: boolean;
}

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
  const members = new Map<string, { state: string; reason: string }>();
  for (const device of (started["cohort"] as string[] | undefined) ?? []) members.set(device, { state: "selected", reason: "" });
  let committed = false;
  for (const event of events.slice(begin + 1)) {
    const state = OUTCOMES[event.event];
    const device = event.device ?? event["client"];
    if (state && typeof device === "string") members.set(device, { state, reason: reason(event) });
    committed ||= event.event === "round_committed";
  }
  return {
    number: Number(started["round"]),
    members,
    committed,
  };
}

function reason(event: FleetEvent): string {
  return [event["reason"], event["message"], event["words"]].filter((part) => typeof part === "string").join(": ");
}
