import type { QueryFunctionContext } from "@tanstack/svelte-query";

import { api, body, type Schemas } from "./api";
import type { JobReport, Kind, Point } from "./jobs";
import type { Final } from "./results";

/** Devices that come in one answer; more are asked for less often, a megabyte per thousand. */
const LARGE_FLEET = 1000;
const SMALL_FLEET_MILLISECONDS = 5_000;
const LARGE_FLEET_MILLISECONDS = 30_000;
const RUN_MILLISECONDS = 5_000;
const ENDED_RUN_MILLISECONDS = 60_000;

/** Options of `createQuery` for each resource, so that views that show the same thing share one answer. */
export const queries = {
  system: () => ({ queryKey: ["system"], queryFn: async () => body(await api.GET("/api/v1/system")) }),
  experimentSchema: () => ({
    queryKey: ["experiment schema"],
    queryFn: async () => body(await api.GET("/api/v1/experiments/schema")),
    staleTime: Infinity,
    refetchInterval: false as const,
  }),
  runs: () => ({
    queryKey: ["runs"],
    queryFn: async () => body(await api.GET("/api/v1/runs", { params: { query: { limit: 200 } } })),
  }),
  run: (run: string) => ({
    queryKey: ["runs", run],
    queryFn: async () => body(await api.GET("/api/v1/runs/{run}", { params: { path: { run } } })),
  }),
  /** `state`: of the run, as far as it is known. Of one that has ended the report, which has a line for each round, hardly changes. */
  runReport: (run: string, state: string | undefined) => ({
    queryKey: ["runs", run, "report"],
    refetchInterval: state === undefined || state === "running" || state === "queued" ? RUN_MILLISECONDS : ENDED_RUN_MILLISECONDS,
    queryFn: async () => body(await api.GET("/api/v1/runs/{run}/report", { params: { path: { run } } })) as unknown as RunReport,
  }),
  privateRuns: () => ({
    queryKey: ["private runs"],
    initialPageParam: null as string | null,
    queryFn: async ({ pageParam }: { pageParam: string | null }) => {
      const query = pageParam === null ? {} : { before: pageParam };
      return body(await api.GET("/api/v1/privacy/runs", { params: { query } }));
    },
    getNextPageParam: (page: Schemas["PrivateRuns"]) => page.next,
  }),
  runPrivacy: (run: string) => ({
    queryKey: ["runs", run, "privacy"],
    queryFn: async () => body(await api.GET("/api/v1/runs/{run}/privacy", { params: { path: { run } } })),
  }),
  runSpending: (run: string) => ({
    queryKey: ["runs", run, "spending"],
    initialPageParam: null as string | null,
    queryFn: async ({ pageParam }: { pageParam: string | null }) => {
      const query = pageParam === null ? {} : { after: pageParam };
      return body(await api.GET("/api/v1/runs/{run}/privacy/devices", { params: { path: { run }, query } }));
    },
    getNextPageParam: (page: Schemas["RunDevicesPrivacy"]) => page.next,
  }),
  openRound: (run: string) => ({
    queryKey: ["runs", run, "open-round"],
    refetchInterval: 1_000,
    queryFn: async () => body(await api.GET("/api/v1/runs/{run}/open-round", { params: { path: { run } } })).round ?? null,
  }),
  runDevices: (run: string) => ({
    queryKey: ["runs", run, "devices"],
    queryFn: async () => body(await api.GET("/api/v1/runs/{run}/devices", { params: { path: { run }, query: { limit: 1000 } } })),
  }),
  devices: () => ({
    queryKey: ["devices"],
    queryFn: allDevices,
    structuralSharing: false, // comparing ten thousand devices takes longer than drawing the rows in sight
    refetchInterval: (query: { state: { data?: readonly unknown[] | undefined } }) =>
      (query.state.data?.length ?? 0) > LARGE_FLEET ? LARGE_FLEET_MILLISECONDS : SMALL_FLEET_MILLISECONDS,
  }),
  device: (device: string) => ({
    queryKey: ["devices", device],
    queryFn: async () => body(await api.GET("/api/v1/devices/{device}", { params: { path: { device } } })),
  }),
  why: (device: string) => ({
    queryKey: ["devices", device, "why"],
    queryFn: async () => body(await api.GET("/api/v1/devices/{device}/why", { params: { path: { device } } })),
  }),
  devicePrivacy: (device: string) => ({
    queryKey: ["devices", device, "privacy"],
    queryFn: async () => body(await api.GET("/api/v1/devices/{device}/privacy", { params: { path: { device } } })),
  }),
  deviceTasks: (device: string) => ({
    queryKey: ["devices", device, "tasks"],
    initialPageParam: null as string | null,
    queryFn: async ({ pageParam }: { pageParam: string | null }) => {
      const query = pageParam === null ? {} : { after: pageParam };
      return body(await api.GET("/api/v1/devices/{device}/tasks", { params: { path: { device }, query } }));
    },
    getNextPageParam: (page: Schemas["DeviceTasks"]) => page.next,
  }),
  deviceEvents: (device: string) => ({
    queryKey: ["devices", device, "events"],
    initialPageParam: null as number | null,
    queryFn: async ({ pageParam }: { pageParam: number | null }) => {
      const query = pageParam === null ? {} : { before: pageParam };
      return body(await api.GET("/api/v1/devices/{device}/events", { params: { path: { device }, query } }));
    },
    getNextPageParam: (page: Schemas["DeviceEvents"]) => page.next,
  }),
  oidc: () => ({ queryKey: ["oidc"], queryFn: async () => body(await api.GET("/api/v1/oidc")) }),
  releases: () => ({ queryKey: ["releases"], queryFn: async () => body(await api.GET("/api/v1/releases/status")) }),
  accessTokens: () => ({ queryKey: ["access tokens"], queryFn: async () => body(await api.GET("/api/v1/access-tokens")) }),
  projects: () => ({ queryKey: ["projects"], queryFn: async () => body(await api.GET("/api/v1/projects")) }),
  members: (project: string) => ({
    queryKey: ["projects", project],
    queryFn: async () => body(await api.GET("/api/v1/projects/{project}/members", { params: { path: { project } } })),
  }),
  users: () => ({ queryKey: ["users"], queryFn: async () => body(await api.GET("/api/v1/users")) }),
  models: () => ({ queryKey: ["models"], queryFn: async () => body(await api.GET("/api/v1/models")) }),
  versions: (name: string) => ({
    queryKey: ["models", name],
    queryFn: async () => body(await api.GET("/api/v1/models/{name}/versions", { params: { path: { name } } })),
  }),
  lineage: (version: string) => ({
    queryKey: ["lineage", version],
    queryFn: async () => body(await api.GET("/api/v1/versions/{version}/lineage", { params: { path: { version } } })),
  }),
  jobs: (kinds: readonly Kind[]) => ({
    queryKey: ["jobs", "of", ...kinds],
    queryFn: async () => body(await api.GET("/api/v1/jobs", { params: { query: { kind: [...kinds], limit: 200 } } })),
  }),
  failedJobs: () => ({
    queryKey: ["jobs", "failed"],
    queryFn: async () => body(await api.GET("/api/v1/jobs", { params: { query: { state: "failed", limit: 20 } } })),
  }),
  finishedJobs: () => ({
    queryKey: ["jobs", "finished"],
    queryFn: async () => body(await api.GET("/api/v1/jobs", { params: { query: { state: "finished", limit: 200 } } })),
  }),
  job: (job: string) => ({
    queryKey: ["jobs", job],
    refetchInterval: 2_000,
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}", { params: { path: { job } } })),
  }),
  jobCurve: (job: string) => ({
    queryKey: ["jobs", job, "curve"],
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}/curve", { params: { path: { job }, query: { points: 500 } } })) as Point[],
  }),
  jobEvents: (job: string) => ({
    queryKey: ["jobs", job, "events"],
    queryFn: ({ client, queryKey }: QueryFunctionContext) => allEvents(job, client.getQueryData<JobEvent[]>(queryKey) ?? []),
  }),
  jobReport: (job: string) => ({
    queryKey: ["jobs", job, "report"],
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}/report", { params: { path: { job } } })) as JobReport,
  }),
  rollouts: () => ({ queryKey: ["rollouts"], queryFn: async () => body(await api.GET("/api/v1/rollouts")) }),
  rollout: (rollout: string) => ({
    queryKey: ["rollouts", rollout],
    queryFn: async () => body(await api.GET("/api/v1/rollouts/{rollout}", { params: { path: { rollout } } })),
  }),
  rolloutDevices: (rollout: string, standing: Standing | null) => ({
    queryKey: ["rollouts", rollout, "devices", standing],
    queryFn: async () =>
      body(await api.GET("/api/v1/rollouts/{rollout}/devices", { params: { path: { rollout }, query: { limit: 1000, ...(standing && { standing: [standing] }) } } })),
  }),
};

export type Standing = Schemas["RolloutMember"]["standing"];

/** What a run has found so far, as far as the console shows it. `final`: of its last round, until it has ended. */
export interface RunReport {
  readonly rounds: readonly Round[];
  readonly final: Final & { readonly round: number };
  readonly per_site?: Readonly<Record<string, SiteFigures>> | null;
  readonly secure_aggregation?: { readonly in_words: string };
}

/** Figures of a site's rows. */
export interface SiteFigures extends Final {
  readonly test_accuracy: number | null;
  readonly test_rows?: number;
}

/** A committed round, a line of a run's report. */
export interface Round {
  readonly round: number;
  readonly selected: number;
  readonly accepted: number;
  readonly rejected: number;
  readonly silent: number;
  readonly train_loss: number | null;
  readonly test_loss: number | null;
  readonly test_accuracy: number | null;
  readonly client_accuracy_min: number | null;
  readonly client_accuracy_median: number | null;
  readonly client_accuracy_max: number | null;
  readonly bytes_up: number;
  readonly bytes_down: number;
  readonly seconds: number;
  /** That this and all rounds before it have spent, with differential privacy. */
  readonly epsilon?: number;
  /** Of the devices' own rows, in rounds after which they evaluate. */
  readonly on_devices?: { readonly metrics?: Readonly<Record<string, unknown>> };
  readonly per_site?: Groups;
  readonly per_runtime?: Groups;
  readonly per_class?: Groups;
  readonly per_model_class?: Groups;
}

/** Figures of a round by site, runtime, device class or model class. */
type Groups = Readonly<Record<string, { readonly test_accuracy: number | null; readonly test_loss?: number | null }>>;

type JobEvent = Schemas["JobEvents"]["events"][number];

/** All events of a job, page by page, behind those that are known. */
async function allEvents(job: string, known: readonly JobEvent[]): Promise<JobEvent[]> {
  const found = [...known];
  let after: number | null = known.length;
  do {
    const page: Schemas["JobEvents"] = body(await api.GET("/api/v1/jobs/{job}/events", { params: { path: { job }, query: { after, limit: 1000 } } }));
    found.push(...page.events);
    after = page.next;
  } while (after !== null);
  return found;
}

/** All devices, a page at a time; the first time each page is shown as it arrives. */
async function allDevices({ client, queryKey }: QueryFunctionContext): Promise<Schemas["Device"][]> {
  const isFirst = client.getQueryData(queryKey) === undefined;
  const found: Schemas["Device"][] = [];
  let after: string | null = null;
  do {
    const query: { limit: number; after?: string } = after === null ? { limit: LARGE_FLEET } : { limit: LARGE_FLEET, after };
    const page: Schemas["Devices"] = body(await api.GET("/api/v1/devices", { params: { query } }));
    found.push(...page.devices);
    after = page.next;
    if (isFirst && after !== null) client.setQueryData(queryKey, [...found]);
  } while (after !== null);
  return found;
}
