import { describe, expect, it } from "vitest";

import { newestRound } from "./cohort";
import { differences } from "./differences";
import { parse } from "./event_stream";
import { ago, bytes, figure, share } from "./format";

const event = (id: number, kind: string, more: object = {}) => ({ id, time: "2026-01-01T00:00:00Z", event: kind, ...more });

describe("newestRound", () => {
  it("is null before the first round", () => {
    expect(newestRound([event(1, "run_created")])).toBeNull();
  });

  it("tells what became of each member of the newest cohort", () => {
    const round = newestRound([
      event(1, "round_started", { round: 1, cohort: ["a", "b"] }),
      event(2, "update_accepted", { device: "a" }),
      event(3, "round_committed", { round: 1 }),
      event(4, "round_started", { round: 2, cohort: ["a", "b", "c"] }),
      event(5, "update_rejected", { device: "b", reason: "stale_base", words: "trained on another model" }),
      event(6, "client_silent", { client: "c", reason: "deadline" }),
    ]);
    expect(round?.number).toBe(2);
    expect(round?.committed).toBe(false);
    expect([...(round?.members ?? [])]).toEqual([
      ["a", { state: "selected", reason: "" }],
      ["b", { state: "rejected", reason: "stale_base: trained on another model" }],
      ["c", { state: "silent", reason: "deadline" }],
    ]);
  });
});

describe("differences", () => {
  it("lists what differs by dotted key, and what one document lacks", () => {
    expect(differences([{ local: { lr: 0.1, epochs: 1 }, name: "a" }, { local: { lr: 0.2, epochs: 1 } }])).toEqual([
      ["local.lr", ["0.1", "0.2"]],
      ["name", ["a", "–"]],
    ]);
  });

  it("finds none between equal documents", () => {
    expect(differences([{ a: [1, 2] }, { a: [1, 2] }])).toEqual([]);
  });
});

describe("parse", () => {
  it("reads the data of a block and skips comments", () => {
    expect(parse('id: 7\ndata: {"id": 7, "event": "x", "time": ""}')).toEqual([{ id: 7, event: "x", time: "" }]);
    expect(parse(": ping")).toEqual([]);
  });
});

describe("format", () => {
  it("shows a dash where nothing was measured, never a zero", () => {
    expect([share(null), share(undefined), bytes(null), ago(null)]).toEqual(["–", "–", "–", "–"]);
  });

  it("shows decimal units and four digits", () => {
    expect([bytes(0), bytes(999), bytes(183_852), bytes(2_000_000)]).toEqual(["0 B", "999 B", "183.9 kB", "2.0 MB"]);
    expect([figure(3), figure(0.062429), figure({ a: 1 })]).toEqual(["3", "0.06243", '{"a":1}']);
  });
});
