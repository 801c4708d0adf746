import type { Schemas } from "./api";
import { figure } from "./format";
import { texts } from "./texts";

/** What is known of a run's budget: in a list of runs, of one run, and in its report. */
export type Budgeted = Pick<Schemas["PrivateRun"], "epsilon" | "budget" | "rounds" | "rounds_planned" | "rounds_left" | "ended_by_budget">;

/**
 * How far a budget is spent. `ended`: no round begins any more, although more are planned; `ending`: that is near, or hardly anything is left
 * for the rounds that are planned; `done`: all planned rounds are played.
 */
export type Spent = "unlimited" | "within" | "ending" | "ended" | "done";

const NEARLY_ALL = 0.9; // of the budget
const FEW_ROUNDS = 3;

export function spentOf(run: Budgeted): Spent {
  if (run.ended_by_budget) return "ended";
  if (run.rounds >= run.rounds_planned) return "done";
  if (run.budget === null) return "unlimited";
  const isNear = run.epsilon >= NEARLY_ALL * run.budget || (endsEarly(run) && run.rounds_left <= FEW_ROUNDS);
  return isNear ? "ending" : "within";
}

/** Whether the budget ends the run before its last planned round. */
export function endsEarly(run: Budgeted): boolean {
  return run.rounds + run.rounds_left < run.rounds_planned;
}

/** What to say before a budget ends and when it has ended; null while there is nothing to say. */
export function warningOf(run: Budgeted): string | null {
  const { privacy: words } = texts;
  const spent = spentOf(run);
  if (run.budget === null || (spent !== "ending" && spent !== "ended")) return null;
  if (spent === "ended") return words.ended(run.rounds, run.rounds_planned);
  const left = figure(Math.max(0, run.budget - run.epsilon));
  return endsEarly(run) ? words.endsEarly(left, run.rounds_left, run.rounds_planned - run.rounds) : words.justSuffices(left, run.rounds_left);
}

/** Whether a run's experiment has differential privacy or secure aggregation. */
export function isPrivate(experiment: Readonly<Record<string, unknown>>): { noise: boolean; sums: boolean } {
  const table = (experiment["privacy"] ?? {}) as Readonly<Record<string, unknown>>;
  return { noise: typeof table["mechanism"] === "string", sums: table["secure_aggregation"] === true };
}

/** The lines of a forecast: epsilon, and the budget where it is in sight. */
export function linesOf({ spent, budget }: Pick<Schemas["PrivacyForecast"], "spent" | "budget">): { label: string; values: number[] }[] {
  const most = Math.max(...spent.map((each) => each.epsilon));
  const line = { label: texts.privacy.epsilon, values: spent.map((each) => each.epsilon) };
  return budget === null || budget > 4 * most ? [line] : [line, { label: texts.privacy.budget, values: spent.map(() => budget) }];
}

/** What a run would spend by its last round, or by the one at which its budget ends it. */
export function endOf(found: Pick<Schemas["PrivacyForecast"], "spent" | "budget" | "rounds" | "rounds_within_budget" | "delta">): string {
  const { outlook: words } = texts.privacy;
  const last = found.spent.at(-1);
  if (found.budget !== null && found.rounds_within_budget !== null && found.rounds_within_budget < found.rounds) {
    return words.ends(figure(found.budget), found.rounds_within_budget, found.rounds);
  }
  if (!last || last.rounds < found.rounds) return words.beyond(figure(last?.epsilon ?? 0), last?.rounds ?? 0);
  const spends = words.spends(figure(last.epsilon), deltaOf(found.delta), found.rounds);
  return found.budget === null ? spends : `${spends} ${words.within(figure(found.budget))}`;
}

/** A delta, as powers of ten where it is small. */
export function deltaOf(value: number): string {
  return value < 0.001 ? Number(value.toPrecision(3)).toExponential() : figure(value);
}
