import { describe, expect, it } from "vitest";

import { alertsOf } from "./alerts";
import type { Schemas } from "./api";
import { counts, newestRound, openedRound, withProgress } from "./cohort";
import { csv } from "./csv";
import { differences } from "./differences";
import { caughtUp, followed, NOTHING, parse, reachingBack } from "./event_stream";
import { ofDevices, placed, sections, settings, toToml } from "./experiment_form";
import { DATACENTER, SIMULATION, split, TEMPLATES } from "./jobs";
import { layout } from "./lineage";
import { baselinesOf, finalFigures, onDevices, result, scoreOf } from "./results";
import { groupBySeed, overSeeds } from "./seeds";
import { ago, bytes, fact, figure, share } from "./format";
import { around, fromZero, ofShares } from "./plot";
import { choicesOf, filtersOf, matcher } from "./fleet";
import { filterOf, filterText, gatesOf, inUnit, limitOf } from "./rollouts";
import { forgetFilter, sameFilter, saveFilter, savedFilters } from "./saved_filters";
import { endOf, isPrivate, linesOf, spentOf, warningOf, type Budgeted } from "./privacy";
import { along, measurements } from "./tradeoff";

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

  it("shows the members of an open round whose first event is not here", () => {
    const seen = withProgress(openedRound(open)!, open, Date.parse("2026-01-01T00:00:07Z"));
    expect([seen.number, ...[...seen.members].map(([device, each]) => `${device} ${each.state}`)]).toEqual([2, "a accepted", "b training", "c uploading", "d selected"]);
    expect(openedRound(null)).toBeNull();
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
    expect(ofDevices({ "simulation.workers": "1", "downlink.code": "drive", "data.partition": "iid", seed: "1" })).toEqual({ seed: "1" });
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

const DEVICE = {
  id: "ab12", name: "Pump-1", group: "hall-7", state: "active", presence: "online", serial_number: null, enrolled_at: "2026-01-01T00:00:00Z",
  certificate_until: "2026-02-01T00:00:00Z", last_seen_at: "2026-01-10T11:30:00Z", expected_at: null,
  report: { device_class: "gateway", runtimes: { litert: "2", torch: "2" }, releases: [{ model: "pumps", version: 2, standing: "active" }, { model: "fans", version: 1, standing: "failed" }] },
} as unknown as Schemas["Device"];
const BARE = { ...DEVICE, id: "cd34", name: "bare", last_seen_at: null, certificate_until: null, report: {} } as Schemas["Device"];
const NOW = Date.parse("2026-01-10T12:00:00Z");

describe("the filters of the fleet", () => {
  const passes = (query: string, device = DEVICE) => matcher(filtersOf(new URLSearchParams(query)), NOW)(device);

  it("admit by class, runtime and release, of which only active ones count", () => {
    expect(["class=gateway", "runtime=torch", "release=pumps:2", "search=pump", "search=ab", ""].map((each) => passes(each))).toEqual(Array(6).fill(true));
    expect(["class=server", "runtime=jax", "release=fans:1", "release=-", "state=active&group=other"].map((each) => passes(each))).toEqual(Array(5).fill(false));
    expect([passes("release=-", BARE), passes("class=gateway", BARE)]).toEqual([true, false]);
  });

  it("admit by how long ago a device was seen, and by when its certificate ends", () => {
    expect(["seen=hour", "seen=day", "expires=month"].map((each) => passes(each))).toEqual([true, true, true]);
    expect(["seen=not-hour", "seen=never", "expires=expired", "expires=week"].map((each) => passes(each))).toEqual([false, false, false, false]);
    expect([passes("seen=never", BARE), passes("seen=not-week", BARE), passes("expires=month", BARE)]).toEqual([true, false, false]);
  });

  it("offer what devices have, each once", () => {
    expect(choicesOf([DEVICE, DEVICE, BARE])).toEqual({ groups: ["hall-7"], classes: ["gateway"], runtimes: ["litert", "torch"], releases: ["pumps:2"] });
  });
});

describe("saved filters", () => {
  const memory = () => {
    const kept = new Map<string, string>();
    return { getItem: (key: string) => kept.get(key) ?? null, setItem: (key: string, value: string) => void kept.set(key, value) };
  };

  it("are kept by name for one project, replaced and forgotten", () => {
    const storage = memory();
    saveFilter("a", { name: "late", query: { presence: "late", state: "" } }, storage);
    saveFilter("a", { name: "hall", query: { group: "hall-7" } }, storage);
    saveFilter("a", { name: "late", query: { presence: "offline" } }, storage);
    expect(savedFilters("a", storage)).toEqual([{ name: "hall", query: { group: "hall-7" } }, { name: "late", query: { presence: "offline" } }]);
    expect(savedFilters("b", storage)).toEqual([]);
    expect(sameFilter(savedFilters("a", storage), { group: "hall-7", state: "" })?.name).toBe("hall");
    expect(forgetFilter("a", "hall", storage).map((each) => each.name)).toEqual(["late"]);
  });

  it("are none where what is kept cannot be read", () => {
    expect(savedFilters("a", { getItem: () => "{" })).toEqual([]);
    expect(savedFilters("a", { getItem: () => '[{"name": 1}, {"name": "x", "query": {"a": 2}}]' })).toEqual([]);
  });
});

describe("what a rollout is asked", () => {
  it("takes the gates that were entered, and none as off", () => {
    expect(gatesOf({ install: " 0.9", max_accuracy_drop: "none", min_labels: "" })).toEqual({ install: 0.9, max_accuracy_drop: null });
    expect(() => gatesOf({ install: "most" })).toThrow("most: expected a number");
  });

  it("reads lists and labels, and refuses a label without a value", () => {
    expect(filterOf({ groups: "a, b,", labels: "hall=7" })).toEqual({ groups: ["a", "b"], device_classes: [], runtimes: [], ids: [], labels: { hall: "7" } });
    expect(() => filterOf({ labels: "hall" })).toThrow("hall: expected key=value");
    expect(filterText({ groups: ["a", "b"], labels: { hall: "7" }, ids: [] })).toBe("Groups: a, b; Labels, as hall=7: hall=7");
  });

  it("shows each limit in its unit and direction", () => {
    const at = (gate: string, limit: number | null) => limitOf({ gate, limit } as Schemas["Measured"]);
    expect([at("install", 0.95), at("max_accuracy_drop", 0.02), at("soak_seconds", 60), at("golden_accuracy", null)]).toEqual(["at least 95.0%", "at most 2.0%", "at least 60 s", "off"]);
    expect([inUnit("min_labels", 120), inUnit("install", null)]).toEqual(["120", "–"]);
  });
});

describe("the trade-off of versions", () => {
  const version = (number: number, metrics: object) =>
    ({ version: `pumps:${number}`, number, metrics, files: [{ path: "model.safetensors", sha256: "0", size_bytes: 900 }, { path: "report.json", sha256: "1", size_bytes: 50 }] }) as unknown as Schemas["Version"];

  it("takes each stage with an accuracy, and the model's size where the stage is the version's own", () => {
    const found = measurements([version(2, { source: { accuracy: 0.9, bytes: 9 }, "step-1": { accuracy: 0.8, bytes: 500, latency_us: 7 }, final: { accuracy: 0.7 } }), version(1, { run: { test_loss: 1 } })]);
    expect(found.map((each) => [each.stage, each.accuracy, each.bytes, each.latency_us])).toEqual([["step-1", 0.8, 500, 7], ["final", 0.7, 900, null]]);
    expect(along(found, "latency_us").map((each) => each.stage)).toEqual(["step-1"]);
    expect(along(found, "bytes").map((each) => each.bytes)).toEqual([500, 900]);
  });
});

describe("alerts", () => {
  const known = (more: object) => alertsOf({ system: { devices: {}, late_renewals: 0, waiting_runs: [], ...more } as unknown as Schemas["System"] }, NOW);

  it("are none while all is well", () => {
    expect(known({ devices: { active: 3 } })).toEqual([]);
  });

  it("lead to what a person does next", () => {
    const waits = { run: "r1", name: "nightly", why: "devices", eligible: 1, wanted: 4, reason: null, since: "" };
    expect(known({ devices: { pending: 2 }, late_renewals: 1, waiting_runs: [waits] }).map((each) => [each.text, each.path.join("/"), each.query])).toEqual([
      ["Run nightly waits for devices: 1 of 4 may take part", "runs/r1", {}],
      ["2 devices wait for approval", "fleet", { state: "pending" }],
      ["1 device has not renewed its certificate, which ends soon", "fleet", { state: "active", expires: "week" }],
    ]);
  });

  it("leave out failures of long ago", () => {
    const run = (id: string, finished_at: string) => ({ id, name: id, state: "failed", finished_at, error: "it broke" }) as unknown as Schemas["Run"];
    const found = alertsOf({ runs: [run("new", "2026-01-10T00:00:00Z"), run("old", "2025-12-01T00:00:00Z")] }, NOW);
    expect(found.map((each) => [each.text, each.detail])).toEqual([["Run new failed", "it broke"]]);
  });
});

describe("recent events", () => {
  const events = (...ids: number[]) => ids.map((id) => event(id, "update_accepted"));
  const page = (next: number | null, ...ids: number[]) => ({ events: events(...ids), next });
  const ids = (recent: { events: readonly { id: number }[] }) => recent.events.map((each) => each.id);

  it("begin with the newest page, reach back page by page, and go on with the stream", () => {
    let recent = caughtUp(NOTHING, page(8, 9, 8));
    expect([ids(recent), recent.hasEarlier]).toEqual([[8, 9], true]);
    recent = reachingBack(recent, page(3, 6, 3));
    recent = reachingBack(recent, page(null, 1));
    expect([ids(recent), recent.hasEarlier]).toEqual([[1, 3, 6, 8, 9], false]);
    recent = followed(recent, events(8, 9, 12), 10);
    expect([ids(recent), recent.hasEarlier]).toEqual([[1, 3, 6, 8, 9, 12], false]);
    recent = followed(recent, events(13), 4);
    expect([ids(recent), recent.hasEarlier]).toEqual([[8, 9, 12, 13], true]);
  });

  it("have no gap after a cut, however much happened meanwhile", () => {
    const known = { events: events(1, 2), hasEarlier: false };
    expect(caughtUp(known, page(null))).toEqual(known);
    expect(caughtUp(known, page(null, 7, 5))).toEqual({ events: events(1, 2, 5, 7), hasEarlier: false });
    expect(caughtUp(known, page(8, 9, 8))).toEqual({ events: events(8, 9), hasEarlier: true });
  });
});

describe("results", () => {
  const final = {
    round: 3, stopped_early: false, test_accuracy: null, test_loss: 0.25, test_rows: 40, model_sha256: "ab",
    metrics: { r2: 0.8125, mae: 12.3456, rmse: null }, baselines: { mean: { value: 7, r2: 0, mae: 30 }, local: { r2: null, mae: 20 } },
  };

  it("are the single numbers of a report, with those of the baselines", () => {
    expect(finalFigures(final).map(([key, value]) => `${key} ${result(key, value)}`)).toEqual(["test_loss 0.25", "test_rows 40", "r2 0.8125", "mae 12.35"]);
    expect(baselinesOf(final)).toEqual([["mean", [["r2", 0], ["mae", 30]]], ["local", [["mae", 20]]]]);
    expect(baselinesOf({ baselines: { majority: { class: "7", test_accuracy: 0.25 } } })).toEqual([["majority", [["test_accuracy", 0.25]]]]);
    expect([result("test_accuracy", 0.75), result("bytes", 2000), result("r2", undefined)]).toEqual(["75.0%", "2.0 kB", "–"]);
  });

  it("name a run by accuracy, or R2 of one that predicts quantities", () => {
    expect(scoreOf({ test_accuracy: 0.5, r2: null })).toBe("50.0%");
    expect(scoreOf({ test_accuracy: null, r2: -0.25 })).toBe("R2 -0.25");
    expect(scoreOf({ test_accuracy: null, r2: null })).toBe("–");
  });

  it("of rounds are those that devices measured", () => {
    expect(onDevices({ on_devices: { metrics: { r2: 0.5, mae: null } } }, "r2")).toBe(0.5);
    expect(onDevices({ on_devices: { metrics: { r2: 0.5, mae: null } } }, "mae")).toBeNull();
    expect(onDevices({}, "r2")).toBeNull();
  });
});

describe("axes", () => {
  it("of shares stay within 0 and 100 %, and have an extent around equal values", () => {
    const values: [number, number][] = [[1, 1], [0, 0], [0.5, 0.5], [0, 1], [0.02, 0.97], [0.99, 1]];
    for (const [least, most] of values) {
      const [low, high] = ofShares(least, most);
      expect(low).toBeGreaterThanOrEqual(0);
      expect(high).toBeLessThanOrEqual(1);
      expect(high - low).toBeGreaterThan(0.02);
      expect([low <= least, high >= most]).toEqual([true, true]);
    }
    expect(ofShares(1, 1)).toEqual([0.975, 1]);
  });

  it("of other figures hold every value, have an extent, and do not begin below zero for nothing", () => {
    for (const range of [around, fromZero]) {
      const values: [number, number][] = [[1.83, 1.83], [0, 0], [0.01, 2.3], [7, 7]];
      for (const [least, most] of values) {
        const [low, high] = range(least, most);
        expect([low <= least, high >= most, high > low]).toEqual([true, true, true]);
      }
      expect(range(null, null)).toEqual([0, 1]);
    }
    expect(around(0.01, 2.3)[0]).toBe(0);
    expect(around(-2, 0.5)[0]).toBeLessThan(-2);
  });
});

describe("privacy", () => {
  const run: Budgeted = { epsilon: 4, budget: 8, rounds: 10, rounds_planned: 40, rounds_left: 30, ended_by_budget: false };

  it("warns before a budget ends, and when it has ended", () => {
    expect([spentOf(run), warningOf(run)]).toEqual(["within", null]);
    const few = { ...run, rounds_left: 3 };
    expect([spentOf(few), warningOf(few)]).toEqual(["ending", expect.stringContaining("3 more rounds of the 30 still planned")]);
    expect(warningOf({ ...run, rounds_left: 1 })).toContain("1 more round of");
    expect(spentOf({ ...run, rounds_left: 4 })).toBe("within");
    const nearly = { ...run, epsilon: 7.2 };
    expect([spentOf(nearly), warningOf(nearly)]).toEqual(["ending", expect.stringContaining("Epsilon 0.8 is left")]);
    expect(warningOf(nearly)).toContain("suffices for the 30 rounds still planned");
    expect(spentOf({ ...run, epsilon: 7.19 })).toBe("within");
    const ended = { ...run, rounds_left: 0, ended_by_budget: true };
    expect([spentOf(ended), warningOf(ended)]).toEqual(["ended", expect.stringContaining("no round begins after 10 of 40")]);
  });

  it("says nothing of a run without a limit, or whose rounds are all played", () => {
    const done = { ...run, epsilon: 8, rounds: 40, rounds_left: 0 };
    expect([spentOf(done), warningOf(done)]).toEqual(["done", null]);
    const free = { ...run, budget: null, rounds: 38, rounds_left: 2 };
    expect([spentOf(free), warningOf(free)]).toEqual(["unlimited", null]);
  });

  it("is among what needs a person while its run goes on, and for a week behind the round that spent it", () => {
    const now = Date.parse("2026-11-20T12:00:00Z");
    const listed = { ...run, run: "r1", name: "pumps", state: "running", dataset: "d", mechanism: "central", delta: 1e-5, charged_at: "2026-11-19T12:00:00Z" } as const;
    const ended = { ...listed, state: "finished", rounds_left: 0, ended_by_budget: true } as const;
    const of = (budgets: Schemas["PrivateRun"][]) => alertsOf({ budgets }, now).map((each) => [each.text, each.path]);
    expect(of([listed])).toEqual([]);
    expect(of([{ ...listed, rounds_left: 2 }])).toEqual([["The privacy budget of run pumps is nearly spent", ["privacy", "r1"]]]);
    expect(of([{ ...listed, rounds_left: 2, state: "cancelled" }])).toEqual([]);
    expect(of([ended])).toEqual([["The privacy budget of run pumps is spent", ["privacy", "r1"]]]);
    expect(of([{ ...ended, charged_at: "2026-11-01T12:00:00Z" }])).toEqual([]);
  });

  it("says what a run will spend, and where it ends", () => {
    const spent = [{ rounds: 1, epsilon: 2 }, { rounds: 40, epsilon: 8 }];
    const found = { spent, budget: null, rounds: 40, rounds_within_budget: 40, delta: 1e-5 };
    expect(endOf(found)).toBe("All 40 rounds together spend epsilon 8 (delta 1e-5).");
    expect(endOf({ ...found, budget: 9 })).toContain("within the budget of 9");
    expect(endOf({ ...found, budget: 4, rounds_within_budget: 9 })).toBe("The budget of 4 ends the run after 9 of 40 rounds.");
    expect(endOf({ ...found, spent: [{ rounds: 1, epsilon: 2 }, { rounds: 20, epsilon: 120 }] })).toContain("After 20 rounds epsilon is 120 already");
    expect(linesOf({ spent, budget: 9 }).map((line) => line.values)).toEqual([[2, 8], [9, 9]]);
    expect(linesOf({ spent, budget: 33 }).length).toBe(1); // far above, it would flatten the curve
  });

  it("is noise, secure aggregation, or both, by the experiment", () => {
    expect(isPrivate({})).toEqual({ noise: false, sums: false });
    expect(isPrivate({ privacy: { mechanism: "ftrl" } })).toEqual({ noise: true, sums: false });
    expect(isPrivate({ privacy: { mechanism: null, secure_aggregation: true } })).toEqual({ noise: false, sums: true });
  });
});
