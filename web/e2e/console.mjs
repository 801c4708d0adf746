// An operator's day in the browser, against a real coordinator. Steps are announced as lines of JSON on standard output;
// what a step needs from outside, such as a command to run on a device, is in its line.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

import { chromium } from "playwright-core";

const { url, link, token, viewer, experiment, endless, odd, simulation, datacenter, chromium: executablePath, pictures } = JSON.parse(process.env.CONSOLE_TEST);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run", "--disable-sync"];

const browser = await chromium.launch({ executablePath, args: FLAGS });
const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, permissions: ["clipboard-read", "clipboard-write"] });
const page = await context.newPage();
page.setDefaultTimeout(60_000);
const problems = [];
page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
page.on("request", (request) => {
  const { protocol, origin } = new URL(request.url());
  if (protocol !== "blob:" && origin !== new URL(url).origin) problems.push(`request to ${request.url()}`);
});
await page.addInitScript(() => {
  addEventListener("securitypolicyviolation", (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));
});
page.on("console", (message) => {
  if (message.type() === "error" && message.text().startsWith("policy:")) problems.push(message.text());
});

const ADMIN_PASSWORD = "correct horse battery";
let pictured = 0;

function announce(step, more = {}) {
  console.log(JSON.stringify({ step, ...more }));
}

async function accessible(view) {
  for (const theme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: theme });
    await page.evaluate(axe);
    const { violations } = await page.evaluate(() => window.axe.run());
    const grave = violations.filter((each) => ["serious", "critical"].includes(each.impact));
    assert.deepEqual(grave.map((each) => [each.id, each.nodes.map((node) => node.html)]), [], `${view}, ${theme}`);
    if (pictures) await page.screenshot({ path: `${pictures}/${String(pictured).padStart(2, "0")}-${view}-${theme}.png`, fullPage: true });
  }
  pictured += 1;
  await page.emulateMedia({ colorScheme: "light" });
}

async function signIn(name, password, button = "Sign in") {
  await page.getByLabel("Name").fill(name);
  await page.getByLabel("Password").fill(password);
  await page.getByRole("button", { name: button, exact: true }).click();
}

async function signOut() {
  await page.getByRole("button", { name: "Sign out" }).click();
  await page.getByRole("button", { name: "Sign in", exact: true }).waitFor();
}

async function visit(name) {
  await page.getByRole("navigation").getByRole("link", { name }).click();
  await page.getByRole("heading", { level: 1, name }).waitFor();
}

async function start(text) {
  await visit("Runs");
  await page.getByRole("link", { name: "Start a run" }).click();
  await page.getByRole("button", { name: "File", exact: true }).click();
  await page.getByLabel("Experiment (TOML)").fill(text);
  await page.getByRole("button", { name: "Start", exact: true }).click();
}

async function confirm(label) {
  await page.getByRole("button", { name: label }).click();
  await page.getByRole("dialog").getByRole("button", { name: label }).click();
}

/** A training and what follows from it, with a picture of each; too long for the edition without pictures. */
async function pictureDatacenter() {
  for (const [kind, document, view] of datacenter) {
    await visit("Datacenter");
    await page.getByRole("link", { name: "Start a job" }).click();
    await page.getByLabel("Kind").selectOption(kind);
    if (["compression", "export"].includes(kind)) await page.getByLabel("Model of").selectOption({ index: 1 });
    if (view === "new") await accessible(`datacenter-new-${kind}`);
    await page.getByLabel("Document (TOML)").fill(document);
    await page.getByRole("button", { name: "Start", exact: true }).click();
    if (kind === "pretraining") {
      await page.locator("canvas").first().waitFor();
      await accessible("datacenter-running");
    }
    await page.locator("h1 + .badge", { hasText: /finished|failed/ }).waitFor({ timeout: 300_000 });
    await page.getByRole("heading", { name: "Result" }).waitFor();
    await accessible(`datacenter-${kind}`);
  }
  await visit("Datacenter");
  await page.getByRole("row").nth(1).waitFor();
  await accessible("datacenter");
}

try {
  await page.goto(link);
  await accessible("first-account");
  assert.ok(!page.url().includes("setup="), "the secret of the link is not kept in the address");
  await signIn("ada", "short", "Create the account");
  await page.getByRole("alert").filter({ hasText: "password" }).waitFor();
  await signIn("ada", ADMIN_PASSWORD, "Create the account");
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  await signOut();
  await accessible("sign-in");
  await signIn("ada", "not the password of ada");
  await page.getByRole("alert").filter({ hasText: "wrong name or password" }).waitFor();
  await page.getByRole("button", { name: "Use the admin token instead" }).click();
  await page.getByLabel("Admin token").fill(token);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  await page.reload();
  await signIn("ada", ADMIN_PASSWORD);
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  await page.reload(); // the cookie of the session is still there
  await page.getByText("No run is in progress").waitFor();
  await accessible("overview");
  announce("signed in");

  await visit("Fleet");
  await page.getByRole("link", { name: "pump-1" }).waitFor();
  await page.getByRole("button", { name: "Enrol a device" }).click();
  await page.getByRole("button", { name: "Create the command" }).click();
  const command = await page.getByRole("dialog").locator("pre").innerText();
  await accessible("enrol");
  await page.getByRole("dialog").getByRole("button", { name: "Close" }).click();
  announce("enrol", { command });
  await page.getByRole("link", { name: "pump-2" }).waitFor();
  await accessible("fleet");
  await page.getByLabel("Name or id").fill("pump-2");
  await page.getByText("1 of 2 devices").waitFor();
  assert.match(page.url(), /search=pump-2/);

  await visit("Runs");
  await accessible("runs-empty");
  await start('name = "wrong"\n[federation]\nrounds = -1\nclient = 3\n');
  const refusal = page.getByRole("alert").filter({ hasText: "2 problems" });
  await refusal.filter({ hasText: "federation.rounds" }).waitFor();
  assert.match(await refusal.innerText(), /federation\.client\b/);
  await page.getByRole("button", { name: "Form", exact: true }).click();
  await page.getByLabel("rounds", { exact: true }).fill("3");
  await page.getByRole("button", { name: "Remove" }).click();
  await page.getByText(/\d of 2 devices/).waitFor();
  await refusal.waitFor({ state: "detached" });
  await accessible("run-form");
  announce("refused a wrong experiment");

  for (const text of [experiment, experiment.replace("lr = 0.001", "lr = 0.002")]) {
    await start(text);
    await page.getByRole("heading", { level: 1, name: "first" }).waitFor();
    await page.getByText("round committed").first().waitFor();
    await page.locator("h1 + .badge", { hasText: "finished" }).waitFor();
  }
  await page.locator("canvas").first().waitFor();
  await accessible("run-finished");
  const [saved] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Rounds (CSV)" }).click()]);
  assert.match(readFileSync(await saved.path(), "utf8"), /^round,.*\r\n1,.*\r\n2,/);
  await page.getByRole("link", { name: "Start another like it" }).click();
  await page.locator("[id='key-local.lr']").and(page.locator(":not([value=''])")).waitFor();
  assert.deepEqual(await page.locator("[id='key-name'], [id='key-local.lr']").evaluateAll((all) => all.map((each) => each.value)), ["first", "0.002"]);
  announce("trained twice");

  await visit("Runs");
  await page.getByRole("checkbox").nth(1).waitFor();
  for (const box of await page.getByRole("checkbox").all()) await box.check();
  await page.getByRole("row", { name: /local\.lr 0\.002 0\.001/ }).waitFor();
  await page.locator("canvas").first().waitFor();
  await accessible("compare");
  announce("compared");

  await start(endless);
  await page.getByText("Live", { exact: true }).waitFor();
  await page.getByText("round committed").first().waitFor();
  await accessible("run-live");
  announce("kill");
  await page.getByText("Not connected").first().waitFor();
  await accessible("run-stale");
  announce("restart");
  await page.getByText("Live", { exact: true }).waitFor();
  await page.getByText("run resumed").first().waitFor();
  const ids = await page.locator("time").evaluateAll((all) => all.map((each) => each.getAttribute("datetime")));
  assert.deepEqual(ids, [...ids].sort().reverse(), "after the cut events go on in order");
  await confirm("Cancel the run");
  await page.locator("h1 + .badge", { hasText: "cancelled" }).waitFor();
  announce("cancelled");

  announce("an odd device");
  await visit("Fleet");
  await page.getByRole("link", { name: "odd-pump" }).waitFor();
  await start(odd);
  announce("an odd update");
  const rejected = page.getByRole("listitem").filter({ hasText: "update rejected" });
  await rejected.filter({ hasText: "odd-pump" }).filter({ hasText: "reason non_finite" }).waitFor();
  await page.locator("h1 + .badge", { hasText: "finished" }).waitFor();
  await page.locator("summary", { hasText: "Rounds" }).click();
  await accessible("run-rejected");
  announce("saw a rejected update");

  await visit("Fleet");
  await page.getByRole("link", { name: "pump-2" }).click();
  await page.getByText(/its update of round \d+ was accepted/).first().waitFor();
  await accessible("device");
  await page.getByRole("button", { name: "Revoke" }).click();
  await page.getByLabel("Reason, for the audit log").fill("stolen from the depot");
  await page.getByRole("dialog").getByRole("button", { name: "Revoke" }).click();
  await page.locator("h1 + .badge", { hasText: "revoked" }).waitFor();
  announce("revoked");

  await visit("Datacenter");
  await page.getByText("There is no job yet").waitFor();
  await accessible("datacenter-empty");
  await visit("Simulation");
  await page.getByText("Nothing was simulated yet").waitFor();
  await page.getByRole("link", { name: "Start a simulation" }).click();
  await page.getByLabel("Document (TOML)").fill("[federation]\nrounds = -1\n[data]\ndataset = \"mine:load\"\n");
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await page.getByRole("alert").filter({ hasText: "federation.rounds" }).waitFor();
  await accessible("simulation-new");
  await page.getByLabel("Document (TOML)").fill(simulation);
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await page.getByRole("heading", { level: 1, name: "small" }).waitFor();
  await page.locator("h1 + .badge", { hasText: "finished" }).waitFor();
  await page.getByText("round 2 / 2").waitFor();
  await page.getByRole("heading", { name: "Result" }).waitFor();
  await page.locator("canvas").first().waitFor();
  await accessible("simulation");
  if (pictures) await pictureDatacenter();
  announce("simulated");

  await visit("Models");
  await page.getByRole("link", { name: "pumps" }).click();
  await page.getByRole("heading", { level: 2, name: "pumps:2" }).waitFor();
  await page.getByRole("region", { name: "Lineage of pumps:2" }).getByRole("link", { name: "run first" }).waitFor();
  await page.getByRole("button", { name: "Make it @champion" }).last().click();
  await page.getByRole("dialog").getByRole("button", { name: "Make it @champion" }).click();
  await page.getByText("@champion", { exact: true }).waitFor();
  await accessible("model");
  announce("promoted");
  await visit("Rollouts");
  await page.getByText("Nothing was rolled out yet").waitFor();
  await visit("Audit");
  await page.getByRole("row", { name: /ada session POST \/devices\/\{device\}\/revoke done .*stolen from the depot/ }).waitFor();
  await accessible("audit");
  announce("verify", { command: await page.getByRole("main").locator("pre").innerText() });
  await visit("Releases");
  await page.getByText("Nothing is signed yet").waitFor();
  await accessible("releases");
  await visit("Settings");
  await page.getByRole("button", { name: "New access token" }).click();
  await page.getByLabel("What it is for").fill("nightly");
  await page.getByRole("dialog").getByLabel("Role").selectOption("viewer");
  await page.getByRole("button", { name: "Create", exact: true }).click();
  assert.match(await page.getByRole("dialog").locator("pre").innerText(), /^fla_/);
  await page.getByRole("dialog").getByRole("button", { name: "Close" }).click();
  await page.getByRole("row", { name: /nightly ada viewer active/ }).waitFor();
  await confirm("Revoke");
  await page.getByRole("row", { name: /nightly ada viewer revoked/ }).waitFor();
  await page.getByRole("row", { name: /vera viewer active/ }).getByRole("button", { name: "Disable" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Disable" }).click();
  await page.getByRole("row", { name: /vera viewer disabled/ }).getByRole("button", { name: "Enable" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Enable" }).click();
  await page.getByRole("row", { name: /vera viewer active/ }).waitFor();
  await page.getByRole("button", { name: "Add a project" }).click();
  await page.getByRole("dialog").getByLabel("Name").fill("clinic-a");
  await page.getByRole("dialog").getByRole("button", { name: "Create" }).click();
  await page.getByRole("row", { name: /clinic-a active/ }).getByRole("button", { name: "Members" }).click();
  await page.getByRole("button", { name: "Add a member" }).click();
  await page.getByRole("dialog").getByLabel("Name").fill("vera");
  await page.getByRole("dialog").getByRole("button", { name: "Add", exact: true }).click();
  await page.getByRole("row", { name: /vera viewer Remove/ }).getByRole("button", { name: "Remove" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Remove" }).click();
  await page.getByText("The project has no members").waitFor();
  const NEW_PASSWORD = "a newer mule in the flats";
  await page.getByLabel("Current password").fill(ADMIN_PASSWORD);
  await page.getByLabel("New password", { exact: true }).fill(NEW_PASSWORD);
  await page.getByLabel("New password again").fill(NEW_PASSWORD);
  await page.getByRole("button", { name: "Change", exact: true }).click();
  await page.getByText("The password is changed.").waitFor();
  await accessible("settings");
  announce("changed the password");
  await page.setViewportSize({ width: 360, height: 740 });
  for (const name of ["Overview", "Fleet", "Releases", "Settings", "Simulation", "Datacenter", "Runs", "Start a run"]) {
    if (name === "Start a run") await page.getByRole("link", { name }).click();
    else await visit(name);
    await page.getByRole("heading", { level: 1, name }).waitFor();
    const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    assert.ok(overflow <= 0, `${name} is ${overflow} px too wide for 360`);
    if (pictures) await page.screenshot({ path: `${pictures}/narrow-${name}.png`, fullPage: true });
  }
  await page.setViewportSize({ width: 1280, height: 800 });
  await signOut();
  assert.equal(await page.evaluate(() => Object.keys({ ...localStorage }).join()), "theme", "no secret is stored");

  await signIn(viewer.name, viewer.password);
  await visit("Runs");
  await page.getByRole("link", { name: "first" }).first().waitFor();
  assert.equal(await page.getByRole("link", { name: "Start a run" }).count(), 0);
  await visit("Fleet");
  await page.getByRole("link", { name: "pump-1" }).click();
  await page.getByText("What it reported").waitFor();
  assert.equal(await page.getByRole("button", { name: "Revoke" }).count(), 0);
  assert.equal(await page.getByRole("link", { name: "Audit" }).count(), 0);
  const codes = await page.evaluate(async () => {
    const { csrf_token } = await (await fetch("/api/v1/session")).json();
    const ask = async (headers) => {
      const answer = await fetch("/api/v1/runs", { method: "POST", headers: { "content-type": "application/json", ...headers }, body: '{"experiment": ""}' });
      return [answer.status, (await answer.json()).error.code];
    };
    return [await ask({}), await ask({ "x-csrf-token": csrf_token })];
  });
  assert.deepEqual(codes, [[403, "csrf"], [403, "forbidden"]]);
  await signOut();
  assert.deepEqual(problems, []);
  announce("signed out");
} catch (error) {
  if (pictures) await page.screenshot({ path: `${pictures}/failed.png`, fullPage: true });
  console.error(error, problems);
  process.exitCode = 1;
} finally {
  await browser.close();
}
