// Every view with data in it: by axe in both themes, at 360 px; and what a viewer is not shown there is refused as well.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";

import { accessible, accountButton, announce, settings, fitsNarrow, isOneLine, open, run, WIDE } from "./support.mjs";

const { url, admin, viewer, ids } = settings;
const opened = await open(url);
const { page } = opened;
const SOURCES = new URL("../src/", import.meta.url);

/** Views by their place; `extra` opens what is folded. */
const VIEWS = {
  overview: "overview",
  fleet: "fleet",
  "fleet-pending": "fleet?state=pending",
  device: `devices/${ids.device}`,
  runs: "runs",
  "run-new": "runs/new",
  "run-finished": `runs/${ids.finished}`,
  "run-cancelled": `runs/${ids.cancelled}`,
  "run-live": `runs/${ids.run}`,
  simulation: "simulation",
  "simulation-new": "simulation/new",
  "simulation-job": `simulation/${ids.simulation}`,
  datacenter: "datacenter",
  "datacenter-new": "datacenter/new?kind=compression",
  "datacenter-job": `datacenter/${ids.job}`,
  "datacenter-stopped": `datacenter/${ids.stopped}`,
  models: "models",
  model: "models/pumps",
  rollouts: "rollouts",
  rollout: `rollouts/${ids.rollout}`,
  "rollout-halted": `rollouts/${ids.halted}`,
  releases: "releases",
  audit: "audit",
  settings: "settings",
  "not-found": "nowhere",
};

/** What is shown to those who may: view, role and name of the element, and the route behind it. */
const ACTIONS = [
  ["fleet", "button", "Enrol a device", "POST /tokens"],
  ["fleet", "button", "Approve", "POST /devices/{device}/approve"],
  ["fleet", "button", "Reject", "POST /devices/{device}/revoke"],
  ["device", "button", "Revoke", "POST /devices/{device}/revoke"],
  ["device", "button", "Change the group", "POST /devices/{device}/group"],
  ["runs", "link", "Start a run", "POST /runs"],
  ["run-new", "button", "Start", "POST /experiments/check"],
  ["run-finished", "link", "Start another like it", "POST /runs"],
  ["run-finished", "button", "Model (safetensors)", "GET /runs/{run}/model"],
  ["run-cancelled", "button", "Resume", "POST /runs/{run}/resume"],
  ["run-live", "button", "Cancel the run", "POST /runs/{run}/cancel"],
  ["simulation", "link", "Start a simulation", "POST /jobs"],
  ["simulation-new", "button", "Start", "POST /jobs"],
  ["datacenter", "link", "Start a job", "POST /jobs"],
  ["datacenter-new", "button", "Start", "POST /jobs"],
  ["datacenter-job", "button", "Remove", "DELETE /jobs/{job}"],
  ["datacenter-job", "button", "model.safetensors", "GET /jobs/{job}/files/{name}"],
  ["datacenter-job", "link", "Compress it", "POST /jobs"],
  ["datacenter-stopped", "button", "Resume", "POST /jobs/{job}/resume"],
  ["model", "button", "Make it @champion", "PUT /models/{name}/aliases/{alias}"],
  ["rollouts", "button", "Start a rollout", "POST /rollouts"],
  ["rollout", "button", "Resume", "POST /rollouts/{rollout}/resume"],
  ["rollout", "button", "Abort", "POST /rollouts/{rollout}/abort"],
  ["settings", "button", "Add a user", "POST /users"],
  ["settings", "button", "Change role", "PATCH /users/{user}"],
  ["settings", "button", "Set password", "PUT /users/{user}/password"],
  ["settings", "button", "Add a project", "POST /projects"],
  ["settings", "button", "Archive", "PATCH /projects/{project}"],
  ["settings", "button", "Members", "GET /projects/{project}/members"],
  ["settings", "heading", "Sign-in at an OpenID provider", "GET /oidc"],
  ["overview", "link", "Audit", "GET /audit"],
];
/** Shown in another state than these views are in, or the same button as one above. */
const ALIKE = {
  "POST /rollouts/{rollout}/pause": "POST /rollouts/{rollout}/resume",
  "POST /rollouts/{rollout}/force": "POST /rollouts/{rollout}/resume",
  "GET /users": "POST /users",
};

async function signIn({ name, password }) {
  await page.goto(url);
  await page.getByLabel("Name").fill(name);
  await page.getByLabel("Password").fill(password);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
}

/** Goes there and waits until nothing is being loaded. */
async function show(view) {
  await page.evaluate((place) => (location.hash = `#/${place}`), VIEWS[view]);
  await page.getByRole("main").locator("h1, p").first().waitFor();
  await page.waitForFunction(() => !document.querySelector("[aria-busy=true]"));
}

const found = ([, role, name]) => page.getByRole(role, { name, exact: true });

function ask(route) {
  const [method, template] = route.split(" ");
  const path = template.replaceAll(/\{(\w+)\}/g, (_, key) => ids[key] ?? "champion");
  return page.evaluate(async ([method, path]) => {
    const { csrf_token } = await (await fetch("/api/v1/session")).json();
    const headers = { "x-csrf-token": csrf_token, "content-type": "application/json" };
    const answer = await fetch(`/api/v1${path}`, { method, headers, ...(method === "GET" ? {} : { body: "{}" }) });
    return [answer.status, (await answer.json()).error?.code];
  }, [method, path]);
}

/** Every route that a component asks about before it shows something. */
function asksAbout() {
  const files = readdirSync(SOURCES, { recursive: true }).filter((name) => name.endsWith(".svelte"));
  const text = files.map((name) => readFileSync(new URL(name, SOURCES), "utf8")).join("\n");
  return new Set([...text.matchAll(/session\.may\("([^"]+)"\)/g)].map((match) => match[1]));
}

await run(opened, async () => {
  const covered = new Set(ACTIONS.map((each) => each[3]));
  const missing = [...asksAbout()].filter((route) => !covered.has(ALIKE[route] ?? route));
  assert.deepEqual(missing, [], "routes whose buttons are in no line of the table");

  await signIn(admin);
  const wide = [];
  for (const view of Object.keys(VIEWS)) {
    await show(view);
    const mine = ACTIONS.filter((each) => each[0] === view);
    for (const action of mine) await found(action).first().waitFor();
    for (const folded of await page.getByRole("main").locator("details:not([open]) > summary").all()) {
      if (await folded.isVisible()) await folded.click();
    }
    await page.waitForFunction(() => !document.querySelector("[aria-busy=true]"));
    await accessible(page, view);
    await fitsNarrow(page, view).catch((error) => wide.push(error.message));
    await page.setViewportSize(WIDE);
  }
  assert.deepEqual(wide, []);
  announce("every view");
  await page.getByLabel("Project", { exact: true }).waitFor();
  await isOneLine(page);
  await accountButton(page).click();
  await page.getByRole("button", { name: "Sign out", exact: true }).click();
  await page.getByRole("button", { name: "Sign in", exact: true }).waitFor();

  await signIn(viewer);
  for (const view of new Set(ACTIONS.map((each) => each[0]))) {
    await show(view);
    for (const action of ACTIONS.filter((each) => each[0] === view)) {
      assert.equal(await found(action).count(), 0, `a viewer is shown ${action[2]} in ${view}`);
      assert.deepEqual(await ask(action[3]), [403, "forbidden"], action[3]);
    }
  }
  for (const route of Object.keys(ALIKE)) assert.deepEqual(await ask(route), [403, "forbidden"], route);
  assert.deepEqual(
    await page.evaluate(async () => {
      const answer = await fetch("/api/v1/runs", { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });
      return [answer.status, (await answer.json()).error.code];
    }),
    [403, "csrf"],
  );
  announce("a viewer");
});
