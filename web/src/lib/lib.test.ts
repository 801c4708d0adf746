import { describe, expect, it } from "vitest";

import { counts, newestRound, withProgress } from "./cohort";
import { csv } from "./csv";
import { differences } from "./differences";
import { parse } from "./event_stream";
import { ofDevices, placed, sections, settings, toToml } from "./experiment_form";
import { DATACENTER, SIMULATION, split, TEMPLATES } from "./jobs";
import { layout } from "./lineage";
import { groupBySeed, overSeeds } from "./seeds";
import { ago, bytes, fact, figure, share } from "./format";

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

describe("withProgress", () => {
  const live = newestRound([
    event(1, "round_started", { round: 2, cohort: ["a", "b", "c", "d"] }),
    event(2, "update_rejected", { device: "b", reason: "non_finite" }),
  ]);
  const member = (device: string, state: string, more: object = {}) => ({
    device, state, runtime: "torch", reason: null, message: null, received_bytes: 0, expected_bytes: 0, seconds: null, ...more,
  });
  const open = {
    number: 2, state: "open", wanted: 3, min_updates: 1, started_at: "2026-01-01T00:00:00Z", deadline_at: "2026-01-01T00:10:00Z",
    members: [member("a", "accepted", { seconds: 4 }), member("b", "training"), member("c", "uploading", { received_bytes: 5, expected_bytes: 10 }), member("d", "selected")],
  } as Parameters<typeof withProgress>[1];

  it("adds what members do now, and keeps what events said of an end", () => {
    const seen = withProgress(live!, open, Date.parse("2026-01-01T00:00:07Z"));
    expect([...seen.members].map(([device, each]) => [device, each.state, each.seconds, each.straggles])).toEqual([
      ["a", "accepted", 4, false],
      ["b", "rejected", null, false],
      ["c", "uploading", 7, false],
      ["d", "selected", 7, false],
    ]);
    expect(counts(seen)).toEqual([["selected", 1], ["uploading", 1], ["accepted", 1], ["rejected", 1]]);
  });

  it("marks members that take twice as long as those that answered", () => {
    const seen = withProgress(live!, open, Date.parse("2026-01-01T00:00:09Z"));
    expect([...seen.members].filter(([, each]) => each.straggles).map(([device]) => device)).toEqual(["c", "d"]);
  });

  it("ignores an open round of another number", () => {
    expect(withProgress(live!, { ...open!, number: 3 }, 0)).toBe(live);
  });
});

describe("groupBySeed", () => {
  const run = (seed: number, lr: number) => ({ experiment: { seed, local: { lr }, data: { seed, dataset: "digits" } } });

  it("joins runs that differ by their seeds only", () => {
    const groups = groupBySeed([run(1, 0.1), run(1, 0.2), run(2, 0.1)]);
    expect(groups.map((group) => group.runs.map((each) => [each.experiment.seed, each.experiment.local.lr]))).toEqual([
      [[1, 0.1], [2, 0.1]],
      [[1, 0.2]],
    ]);
  });

  it("takes mean, least and greatest over the runs that have the round", () => {
    const round = (value: number | null) => ({ test_accuracy: value }) as Parameters<Parameters<typeof overSeeds>[1]>[0];
    expect(overSeeds([[round(0.5), round(0.6)], [round(0.7)]], (each) => each.test_accuracy, 3)).toEqual({
      mean: [0.6, 0.6, null],
      low: [0.5, 0.6, null],
      high: [0.7, 0.6, null],
    });
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
    expect([fact("bytes_up", 2_000_000), fact("memory_bytes", 999), fact("rounds", 2)]).toEqual(["2.0 MB", "999 B", "2"]);
    expect([figure(3), figure(0.062429), figure({ a: 1 })]).toEqual(["3", "0.06243", '{"a":1}']);
  });
});

describe("csv", () => {
  it("quotes what needs quotes, and leaves absent values empty", () => {
    expect(csv([{ round: 1, loss: null, why: { a: 1 } }, { round: 2, text: 'say "x", y' }])).toBe(
      'round,loss,why,text\r\n1,,"{""a"":1}",\r\n2,,,"say ""x"", y"\r\n',
    );
  });
});

describe("the form of an experiment", () => {
  const schema = {
    experiment: {
      properties: { name: { type: "string" }, federation: { $ref: "#/$defs/Federation" }, model: { $ref: "#/$defs/Model" }, simulation: { $ref: "#/$defs/Model" } },
      $defs: {
        Federation: {
          properties: {
            rounds: { type: "integer", minimum: 1, description: "How many." },
            keep: { enum: ["last", "best"], type: "string" },
            runtimes: { type: "object" },
          },
        },
        Model: { properties: { name: { anyOf: [{ type: "string" }, { type: "null" }] } } },
      },
    },
    models: { mlp: { properties: { hidden: { type: "array" }, tie: { type: "boolean" } } } },
    strategies: {},
    datasets: [],
  };
  const form = sections(schema, "mlp", "");
  const fields = form.flatMap((each) => [...each.basic, ...each.further]);

  it("has a field for each key, with the options of the chosen model", () => {
    expect(form.map((each) => each.name)).toEqual(["", "federation", "model"]);
    expect(fields.map((each) => [each.key, each.kind])).toEqual([
      ["name", "text"], ["federation.rounds", "number"], ["federation.keep", "choice"], ["federation.runtimes", "structure"],
      ["model.name", "text"], ["model.hidden", "structure"], ["model.tie", "choice"],
    ]);
    expect(fields[1]).toMatchObject({ range: "Integer, ≥ 1", help: "How many." });
    expect(sections(schema, "own:build", "")[2]?.basic.map((each) => each.key)).toEqual(["model.name"]);
  });

  const values = { name: "7", "federation.rounds": "5", "federation.keep": "", "model.hidden": "[8]", "model.tie": "true", "model.act": "relu", "model.n": "3" };

  it("sends texts as strings and everything else as written", () => {
    expect(settings(values, fields)).toEqual(['name="7"', "federation.rounds=5", "model.hidden=[8]", "model.tie=true", "model.act=relu", "model.n=3"]);
  });

  it("writes a file", () => {
    expect(toToml(values, fields)).toBe('name = "7"\n\n[federation]\nrounds = 5\n\n[model]\nhidden = [8]\ntie = true\nact = "relu"\nn = 3\n');
    expect(ofDevices({ "simulation.workers": "1", "data.partition": "iid", seed: "1" })).toEqual({ seed: "1" });
  });

  it("shows a problem at the longest beginning of its key", () => {
    const found = placed(
      [{ key: "federation.runtimes.x", message: "a" }, { key: "federation.runtimes", message: "b" }, { key: "federation.client", message: "c" }, { key: "", message: "d" }],
      new Set(fields.map((each) => each.key)),
    );
    expect([...found.at]).toEqual([["federation.runtimes", ["a", "b"]]]);
    expect(found.elsewhere).toEqual(["c", "d"]);
  });
});

describe("layout of a lineage", () => {
  const node = (id: string) => ({ id, kind: "version", facts: {} });
  const edge = (parent: string, child: string) => ({ parent, child, relation: "params" });

  it("puts each node behind the last of its parents, and connected ones beside each other", () => {
    const graph = {
      of: "c", cut: false,
      nodes: ["a", "b", "c", "d", "x", "y"].map(node),
      edges: [edge("a", "c"), edge("c", "d"), edge("a", "d"), edge("b", "y"), edge("c", "x")],
    };
    expect(layout(graph).map((each) => [each.node.id, each.column, each.row])).toEqual([
      ["a", 0, 0], ["b", 0, 1], ["c", 1, 0], ["y", 1, 1], ["d", 2, 0], ["x", 2, 1],
    ]);
  });

  it("draws a version that stands alone, and does not hang on a circle", () => {
    expect(layout({ of: "a", cut: false, nodes: [node("a")], edges: [] })).toHaveLength(1);
    expect(layout({ of: "a", cut: false, nodes: ["a", "b"].map(node), edges: [edge("a", "b"), edge("b", "a")] })).toHaveLength(2);
  });
});

describe("jobs", () => {
  it("show a step's time as shares, in the order of a step", () => {
    expect(split({ other: 1, compute: 3 })).toEqual([["compute", 0.75], ["other", 0.25]]);
    expect(split({ compute: 0 })).toEqual([]);
  });
  it("of every kind have a document to begin with, and belong to one section", () => {
    expect([...SIMULATION, ...DATACENTER].sort()).toEqual(Object.keys(TEMPLATES).sort());
  });
});
