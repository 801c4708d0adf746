import { parse, type FleetEvent } from "./event_stream";
import { session } from "./session.svelte";

const KEPT = 500;
const RETRY_MILLISECONDS = 1_000;
const SILENCE_MILLISECONDS = 45_000; // the server sends a comment at least every 15 seconds

/**
 * The events of one run as they happen, from its first on. After a cut the stream goes on behind the last event it
 * has seen, so that none is missed and none comes twice.
 */
export class EventFeed {
  events = $state.raw<readonly FleetEvent[]>([]);
  live = $state(false);
  #last = 0;
  #stopped = false;
  #cut: AbortController | null = null;

  constructor(readonly run: string) {}

  /** Follows until the returned function is called. */
  start(): () => void {
    void this.#follow();
    return () => {
      this.#stopped = true;
      this.#cut?.abort();
    };
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
    const query = new URLSearchParams({ run: this.run, after: String(this.#last) });
    const response = await fetch(`/api/v1/events?${query}`, { headers: session.headers, signal: cut.signal });
    if (response.status === 401 && !this.#stopped) session.end();
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
      this.#take(blocks.flatMap(parse));
    }
  }

  #take(found: readonly FleetEvent[]): void {
    const fresh = found.filter((event) => event.id > this.#last);
    const newest = fresh.at(-1);
    if (!newest) return;
    this.#last = newest.id;
    this.events = [...this.events, ...fresh].slice(-KEPT);
  }
}
