// An operator's day with the mouse, against a real coordinator. Steps are announced; see `support.mjs`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { accessible as examined, accountButton, announce, settings, fitsNarrow, open, run, showsEveryEvent } from "./support.mjs";

const { url, link, token, password, form, endless, odd, simulation } = settings;
const opened = await open(url);
const { page } = opened;
const accessible = (view) => examined(page, view);

async function signIn(name, password, button = "Sign in") {
  await page.getByLabel("Name").fill(name);
  await page.getByLabel("Password").fill(password);
  await page.getByRole("button", { name: button, exact: true }).click();
}

async function signOut() {
  await accountButton(page).click();
  await page.getByRole("button", { name: "Sign out", exact: true }).click();
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

/** Fills inputs of the form by their keys; options of a model are there once it is chosen. */
async function fillForm(values) {
  for (const [key, value] of Object.entries(values)) {
    const input = page.locator(`[id="key-${key}"]`);
    await input.waitFor({ state: "attached" });
    if (!(await input.isVisible())) await page.locator("details", { has: input }).locator("summary").click();
    if ((await input.evaluate((element) => element.tagName)) === "SELECT") await input.selectOption(value);
    else await input.fill(value);
  }
}

async function finished(name) {
  await page.getByRole("heading", { level: 1, name }).waitFor();
  await badge("finished");
}

const badge = (state) => page.locator("h1 + .badge", { hasText: state }).waitFor();

async function rollOut(release) {
  await visit("Rollouts");
  await page.getByRole("button", { name: "Start a rollout" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Release").selectOption({ label: release });
  await dialog.getByLabel("Shares of the devices, %").fill("50, 100");
  if (release === "digits:1") await accessible("dialog-rollout");
  await dialog.getByRole("button", { name: "Start", exact: true }).click();
  await page.getByRole("heading", { level: 1, name: release }).waitFor();
}

async function confirm(label) {
  await page.getByRole("button", { name: label }).click();
  await page.getByRole("dialog").getByRole("button", { name: label }).click();
}

await run(opened, async () => {
  await page.goto(link);
  await accessible("first-account");
  assert.ok(!page.url().includes("setup="), "the secret of the link is not kept in the address");
  await signIn("ada", "short", "Create the account");
  await page.getByRole("alert").filter({ hasText: "password" }).waitFor();
  await signIn("ada", password, "Create the account");
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  await signOut();
  await accessible("sign-in");
  await fitsNarrow(page, "sign-in");
  await signIn("ada", "not the password of ada");
  await page.getByRole("alert").filter({ hasText: "wrong name or password" }).waitFor();
  await page.getByRole("button", { name: "Use the admin token instead" }).click();
  await page.getByLabel("Admin token").fill(token);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  await page.reload();
  await signIn("ada", password);
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  await page.reload(); // the cookie of the session is still there
  await page.getByText("No run is in progress").waitFor();
  announce("signed in");

  await accountButton(page).click();
  await accessible("account-menu");
  await fitsNarrow(page, "account-menu");
  await page.getByLabel("Theme").selectOption("dark");
  await page.reload();
  assert.equal(await page.locator("html").getAttribute("data-theme"), "dark");
  await accountButton(page).click();
  await page.getByLabel("Theme").selectOption("system");
  await page.getByLabel("Language").selectOption("zh-Hans");
  await page.getByRole("heading", { level: 1, name: "概览" }).waitFor();
  await page.reload();
  await page.getByRole("navigation").getByRole("link", { name: "设备群" }).waitFor();
  assert.equal(await page.locator("html").getAttribute("lang"), "zh-Hans");
  await accessible("overview-chinese");
  await fitsNarrow(page, "overview-chinese");
  await accountButton(page).click();
  await page.getByLabel("语言").selectOption("en");
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  announce("read Chinese");

  await visit("Fleet");
  await page.getByRole("link", { name: "pump-1" }).waitFor();
  await page.getByRole("button", { name: "Enrol a device" }).click();
  await page.getByRole("button", { name: "Create the command" }).click();
  const command = await page.getByRole("dialog").locator("pre").innerText();
  await accessible("dialog-enrol");
  await page.getByRole("dialog").getByRole("button", { name: "Close" }).click();
  announce("enrol", { command });
  await page.getByRole("link", { name: "pump-2" }).waitFor();
  await page.getByLabel("Name or id").fill("pump-2");
  await page.getByText("1 of 2 devices").waitFor();
  assert.match(page.url(), /search=pump-2/);
  announce("enrolled");

  await visit("Runs");
  await page.getByText("There is no run yet").waitFor();
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
  announce("refused a wrong experiment");

  await visit("Runs");
  await page.getByRole("link", { name: "Start a run" }).click();
  await fillForm(form);
  await accessible("run-form");
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await page.getByText("round committed").first().waitFor();
  await finished(form.name);
  await page.locator("canvas").first().waitFor();
  const [saved] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Rounds (CSV)" }).click()]);
  assert.match(readFileSync(await saved.path(), "utf8"), /^round,.*\r\n1,.*\r\n2,/);
  await page.getByRole("link", { name: "Start another like it" }).click();
  const inputs = { name: form.name, "local.lr": form["local.lr"] };
  await page.waitForFunction((wanted) => Object.entries(wanted).every(([key, value]) => document.getElementById(`key-${key}`)?.value === value), inputs);
  await page.locator("[id='key-local.lr']").fill("0.002");
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await finished(form.name);
  announce("trained twice from the form");

  await visit("Runs");
  await page.getByRole("checkbox").nth(1).waitFor();
  await accessible("runs");
  for (const box of await page.getByRole("checkbox").all()) await box.check();
  await page.getByRole("row", { name: /local\.lr 0\.002 0\.001/ }).waitFor();
  await page.locator("canvas").first().waitFor();
  await accessible("compare");
  await fitsNarrow(page, "compare");
  announce("compared");

  await visit("Models");
  await page.getByRole("link", { name: "pumps" }).click();
  await page.getByRole("heading", { level: 2, name: "pumps:2" }).waitFor();
  await page.getByRole("region", { name: "Lineage of pumps:2" }).getByRole("link", { name: `run ${form.name}` }).waitFor();
  await page.getByRole("button", { name: "Make it @champion" }).last().click();
  await accessible("dialog-confirm");
  await page.getByRole("dialog").getByRole("button", { name: "Make it @champion" }).click();
  await page.getByText("@champion", { exact: true }).waitFor();
  announce("promoted");

  await visit("Rollouts");
  await page.getByText("Nothing was rolled out yet").waitFor();
  await rollOut("digits:1");
  await badge("finished");
  announce("rolled out");
  await rollOut("digits:2");
  await badge("rolled back");
  await page.getByRole("alert").filter({ hasText: "champion" }).waitFor();
  announce("a gate halted the bad one");

  await start(endless);
  await page.getByText("Live", { exact: true }).waitFor();
  await page.getByText("round committed").first().waitFor();
  await accessible("run-live");
  await fitsNarrow(page, "run-live");
  await page.locator("ol time").nth(59).waitFor(); // as many as are shown at first
  announce("kill");
  await page.getByText("Not connected").first().waitFor();
  await accessible("run-stale");
  announce("restart");
  await page.getByText("Live", { exact: true }).waitFor();
  await page.getByText("run resumed").first().waitFor();
  await confirm("Cancel the run");
  await badge("cancelled");
  await showsEveryEvent(page, "run_resumed");
  await page.reload(); // now with the newest page of events and none before it
  await badge("cancelled");
  assert.ok(!(await showsEveryEvent(page)), "at first only the newest events are shown");
  const shown = () => page.locator("ol time").count();
  const earlier = page.getByRole("button", { name: "Earlier events" });
  for (let before = await shown(); await earlier.count(); before = await shown()) {
    await earlier.click();
    await page.waitForFunction((count) => document.querySelectorAll("ol time").length > count, before);
  }
  assert.ok(await showsEveryEvent(page), "earlier events are shown up to the first");
  announce("cancelled");

  announce("an odd device");
  await visit("Fleet");
  await page.getByRole("link", { name: "odd-pump" }).waitFor();
  await start(odd);
  announce("an odd update");
  const rejected = page.getByRole("listitem").filter({ hasText: "update rejected" });
  await rejected.filter({ hasText: "odd-pump" }).filter({ hasText: "reason non_finite" }).waitFor();
  await badge("finished");
  announce("saw a rejected update");

  await visit("Fleet");
  await page.getByRole("link", { name: "pump-2" }).click();
  await page.getByText(/its update of round \d+ was accepted/).first().waitFor();
  await page.getByRole("button", { name: "Revoke" }).click();
  await page.getByLabel("Reason, for the audit log").fill("stolen from the depot");
  await accessible("dialog-revoke");
  await page.getByRole("dialog").getByRole("button", { name: "Revoke" }).click();
  await badge("revoked");
  announce("revoked");

  await visit("Simulation");
  await page.getByText("Nothing was simulated yet").waitFor();
  await page.getByRole("link", { name: "Start a simulation" }).click();
  await page.getByLabel("Document (TOML)").fill("[federation]\nrounds = -1\n[data]\ndataset = \"mine:load\"\n");
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await page.getByRole("alert").filter({ hasText: "federation.rounds" }).waitFor();
  await page.getByLabel("Document (TOML)").fill(simulation);
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await finished("small");
  await page.getByText("round 2 / 2").waitFor();
  await page.getByRole("heading", { name: "Result" }).waitFor();
  announce("simulated");

  await visit("Audit");
  await page.getByRole("row", { name: /ada session POST \/devices\/\{device\}\/revoke done .*stolen from the depot/ }).waitFor();
  await page.getByRole("button", { name: "Verify the chain" }).click();
  await page.getByText(/entries are intact/).waitFor();
  announce("verify", { command: await page.getByRole("main").locator("pre", { hasText: "audit verify" }).innerText() });
  await visit("Settings");
  await page.getByRole("button", { name: "New access token" }).click();
  await page.getByLabel("What it is for").fill("nightly");
  await page.getByRole("dialog").getByLabel("Role").selectOption("viewer");
  await page.getByRole("button", { name: "Create", exact: true }).click();
  assert.match(await page.getByRole("dialog").locator("pre").innerText(), /^fla_/);
  await page.getByRole("dialog").getByRole("button", { name: "Close" }).click();
  const nightly = (state) => page.getByRole("row", { name: new RegExp(`nightly ada viewer .*${state}`) });
  await nightly("active").getByRole("button", { name: "Revoke" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Revoke" }).click();
  await nightly("revoked").waitFor();
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
  const next = "a newer mule in the flats";
  await page.getByLabel("Current password").fill(password);
  await page.getByLabel("New password", { exact: true }).fill(next);
  await page.getByLabel("New password again").fill(next);
  await page.getByRole("button", { name: "Change", exact: true }).click();
  await page.getByText("The password is changed.").waitFor();
  announce("changed the password", { password: next });
  await signOut();
  assert.equal(await page.evaluate(() => Object.keys({ ...localStorage }).sort().join()), "language,theme", "no secret is stored");
  announce("signed out");
});
