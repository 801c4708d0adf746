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
