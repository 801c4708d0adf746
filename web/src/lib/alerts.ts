import type { Schemas } from "./api";
import { warningOf } from "./privacy";
import { texts } from "./texts";

/** Something that needs a person, with the place where to do what comes next. */
export interface Alert {
  readonly key: string;
  readonly text: string;
  readonly detail: string;
  readonly path: readonly string[];
  readonly query: Record<string, string>;
}

/** What is known of the coordinator; what has not been answered yet is undefined. */
export interface Known {
  readonly system?: Schemas["System"] | undefined;
  readonly runs?: readonly Schemas["Run"][] | undefined;
  readonly jobs?: readonly Schemas["JobSummary"][] | undefined;
  readonly rollouts?: readonly Schemas["Rollout"][] | undefined;
  readonly releases?: Schemas["ReleasesStatus"] | undefined;
  readonly budgets?: readonly Schemas["PrivateRun"][] | undefined;
}

const SHOWN_FAILED = 5;
const DAYS = 86_400_000;
/** A failure of longer ago was seen, or concerns nobody any more. */
const RECENT_MILLISECONDS = 7 * DAYS;

/** What needs a person, the most urgent first. */
export function alertsOf({ system, runs = [], jobs = [], rollouts = [], releases, budgets = [] }: Known, now: number = Date.now()): Alert[] {
  const { overview: words } = texts;
  const isRecent = (at: string | null): boolean => at === null || now - Date.parse(at) < RECENT_MILLISECONDS;
  const release = (each: Schemas["Rollout"]): string => `${each.model}:${each.version}`;
  const pending = system?.devices["pending"] ?? 0;
  const unrenewed = system?.late_renewals ?? 0;
  return [
    ...rollouts
      .filter((each) => each.state === "halted" || each.state === "paused")
      .map((each) => alert(each.id, each.state === "halted" ? words.halted(release(each)) : words.paused(release(each)), each.reason, ["rollouts", each.id])),
    ...(system?.waiting_runs ?? []).map((each) =>
      each.why === "stalled"
        ? alert(each.run, words.stalled(each.name), each.reason, ["runs", each.run])
        : alert(each.run, words.waitsForDevices(each.name, each.eligible ?? 0, each.wanted ?? 0), null, ["runs", each.run]),
    ),
    ...budgets
      .filter((each) => (each.state === "finished" ? each.ended_by_budget && isRecent(each.charged_at) : each.state === "running"))
      .flatMap((each) => {
        const warning = warningOf(each);
        return warning ? [alert(`privacy ${each.run}`, each.ended_by_budget ? words.budgetSpent(each.name) : words.budgetEnds(each.name), warning, ["privacy", each.run])] : [];
      }),
    ...(pending ? [alert("pending", words.pending(pending), null, ["fleet"], { state: "pending" })] : []),
    ...(unrenewed ? [alert("certificates", words.renewals(unrenewed), null, ["fleet"], { state: "active", expires: "week" })] : []),
    ...(releases?.exists ? releases.needs : []).map((each) => alert(each.what, each.what, null, ["releases"])),
    ...runs
      .filter((each) => each.state === "failed" && isRecent(each.finished_at))
      .slice(0, SHOWN_FAILED)
      .map((each) => alert(each.id, words.failed(each.name), each.error, ["runs", each.id])),
    ...jobs
      .filter((each) => isRecent(each.finished_at))
      .slice(0, SHOWN_FAILED)
      .map((each) => alert(each.id, words.failedJob(texts.jobs.kinds[each.kind], each.name), each.error, [each.kind === "simulation" ? "simulation" : "datacenter", each.id])),
  ];
}

function alert(key: string, text: string, detail: string | null | undefined, path: readonly string[], query: Record<string, string> = {}): Alert {
  return { key, text, detail: detail ?? "", path, query };
}
