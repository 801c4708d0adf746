import { untrack } from "svelte";

import { api, body } from "./api";
import { caughtUp, followed, NOTHING, parse, reachingBack, type FleetEvent, type Page, type Recent } from "./event_stream";
import { session } from "./session.svelte";

const PAGE = 200;
const KEPT = 500; // and as many more as were asked for
const RETRY_MILLISECONDS = 1_000;
const SILENCE_MILLISECONDS = 45_000; // the server sends a comment at least every 15 seconds

/**
 * The events of one run as they happen, beginning with the newest page; earlier ones are fetched when asked for. After a cut the
 * stream goes on behind the last event it has seen, so that none is missed and none comes twice.
 */
export class EventFeed {
  live = $state(false);
  #recent = $state.raw<Recent>(NOTHING);
  #kept = KEPT;
  #stopped = false;
  #cut: AbortController | null = null;

  constructor(readonly run: string) {}

  get events(): readonly FleetEvent[] {
    return this.#recent.events;
  }
  /** Whether the run has events before those that are here. */
  get hasEarlier(): boolean {
    return this.#recent.hasEarlier;
  }

  /** Follows until the returned function is called. */
  start(): () => void {
    untrack(() => void this.#follow()); // the effect that starts it must not start anew with every event
    return () => {
      this.#stopped = true;
      this.#cut?.abort();
    };
  }

  /** Fetches the page of events before the first. */
  async earlier(): Promise<void> {
    const first = this.events[0]?.id;
    if (first === undefined) return;
    const page = await this.#page({ before: first });
    if (this.events[0]?.id !== first) return; // others were dropped meanwhile, and this page would leave a gap
    this.#kept += PAGE;
    this.#recent = reachingBack(this.#recent, page);
  }

  async #follow(): Promise<void> {
    while (!this.#stopped) {
      try {
        await this.#stream();
      } catch {
        // cut off, or not reachable: what was seen stays, and the next connection goes on behind it
      }
      this.live = false;
      if (!this.#stopped) await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
    }
  }

  async #stream(): Promise<void> {
    const cut = new AbortController();
    this.#cut = cut;
    const page = await this.#page({ after: this.#last }, cut.signal);
    this.#recent = caughtUp(this.#recent, page);
    const query = new URLSearchParams({ run: this.run, after: String(this.#last) });
    const generation = session.generation;
    const response = await fetch(`/api/v1/events?${query}`, { headers: session.headers, signal: cut.signal });
    if (response.status === 401 && !this.#stopped) session.refused(generation);
    if (!response.ok || !response.body) return;
    this.live = true;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const timer = setTimeout(() => cut.abort(), SILENCE_MILLISECONDS);
      const { done, value } = await reader.read();
      clearTimeout(timer);
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop() ?? "";
      this.#recent = followed(this.#recent, blocks.flatMap(parse), this.#kept);
    }
  }

  get #last(): number {
    return this.events.at(-1)?.id ?? 0;
  }

  /** The newest events between these, newest first. */
  async #page(between: { readonly after?: number; readonly before?: number }, signal: AbortSignal | null = null): Promise<Page> {
    const query = { ...between, order: "newest" as const, limit: PAGE };
    return body(await api.GET("/api/v1/runs/{run}/events", { params: { path: { run: this.run }, query }, signal })) as unknown as Page;
  }
}
