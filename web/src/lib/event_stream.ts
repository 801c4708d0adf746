/** An event of the coordinator: its id, time, kind, and what belongs to the kind. */
export interface FleetEvent {
  readonly id: number;
  readonly time: string;
  readonly event: string;
  readonly run?: string;
  readonly device?: string;
  readonly [key: string]: unknown;
}

/** The events of one block of a Server-Sent Events stream; comments have none. */
export function parse(block: string): FleetEvent[] {
  const data = block
    .split(/\r?\n/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart())
    .join("\n");
  return data ? [JSON.parse(data) as FleetEvent] : [];
}

/** Events in order, without a gap, up to the newest that is known; `hasEarlier`: the run has others before them. */
export interface Recent {
  readonly events: readonly FleetEvent[];
  readonly hasEarlier: boolean;
}

/** A page of events, newest first; `next` is null if there are no more of those that were asked for. */
export interface Page {
  readonly events: readonly FleetEvent[];
  readonly next: number | null;
}

export const NOTHING: Recent = { events: [], hasEarlier: false };

/** With the newest of the events behind those that are known. If they are more than a page, there would be a gap: then the page stands alone. */
export function caughtUp(known: Recent, page: Page): Recent {
  const found = page.events.toReversed();
  return page.next === null ? { ...known, events: [...known.events, ...found] } : { events: found, hasEarlier: true };
}

/** With a page of events from before the first. */
export function reachingBack(known: Recent, page: Page): Recent {
  return { events: [...page.events.toReversed(), ...known.events], hasEarlier: page.next !== null };
}

/** With those of a stream that are new, and no more than `most` events, the newest. */
export function followed(known: Recent, streamed: readonly FleetEvent[], most: number): Recent {
  const last = known.events.at(-1)?.id ?? 0;
  const fresh = streamed.filter((event) => event.id > last);
  if (fresh.length === 0) return known;
  const events = [...known.events, ...fresh];
  return events.length > most ? { events: events.slice(-most), hasEarlier: true } : { ...known, events };
}
