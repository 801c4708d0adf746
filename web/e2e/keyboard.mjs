// What an operator does in a day with the keys of a keyboard and nothing else: the pointer is never used. The page comes through a line that
// is cut and mended. `brief` leaves out what waits for devices. Steps are announced; see `support.mjs`.

import assert from "node:assert/strict";

import { accessible, accountButton, announce, settings, open, run, showsEveryEvent } from "./support.mjs";

const { url, password, experiment, odd, brief } = settings;
const MAX_STOPS = 300;
const opened = await open(url);
const { page } = opened;
page.mouse.click = () => assert.fail("the pointer was used");

/** Moves the focus to an element, with Tab alone, as far as it takes. */
async function reach(locator) {
  await locator.waitFor();
  for (let stop = 0; stop < MAX_STOPS; stop += 1) {
    if (await locator.evaluate((element) => element === document.activeElement)) return;
    await page.keyboard.press("Tab");
  }
  assert.fail(`Tab does not reach ${locator}`);
}

async function press(locator, key = "Enter") {
  await reach(locator);
  await page.keyboard.press(key);
}

async function type(locator, text) {
  await reach(locator);
  await page.keyboard.press("ControlOrMeta+A");
  await page.keyboard.insertText(text);
}

async function visit(name) {
  await press(page.getByRole("navigation").getByRole("link", { name, exact: true }));
  await page.getByRole("heading", { level: 1, name }).waitFor();
}

const button = (name) => page.getByRole("button", { name, exact: true });
const inDialog = (name) => page.getByRole("dialog").getByRole("button", { name, exact: true });
const badge = (state) => page.locator("h1 + .badge", { hasText: state }).waitFor();

/** Reads a file into the form, changes the rounds there, and starts. */
async function start(text, rounds) {
  await visit("Runs");
  await press(page.getByRole("link", { name: "Start a run" }));
  await press(button("File"));
  const check = "**/api/v1/experiments/check";
  // By then another check was due for what was typed. Those that are held at the end go on by themselves.
  await page.route(check, (route) => setTimeout(() => route.continue().catch(() => undefined), 2_000));
  await type(page.getByLabel("Experiment (TOML)"), text);
  await press(button("Form"));
  await page.getByLabel("rounds", { exact: true }).waitFor();
  await page.unroute(check);
  await type(page.getByLabel("rounds", { exact: true }), String(rounds));
  await press(button("Start"));
}

async function rollOut(release) {
  await visit("Rollouts");
  await press(button("Start a rollout"));
  await reach(page.getByRole("dialog").getByLabel("Release"));
  await page.keyboard.type(release);
  await type(page.getByLabel("Shares of the devices, %"), "50, 100");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { level: 1, name: release }).waitFor();
}

await run(opened, async () => {
  await page.goto(url);
  await type(page.getByLabel("Name"), "ada");
  await type(page.getByLabel("Password"), password);
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  announce("signed in");

  await visit("Fleet");
  await press(button("Enrol a device"));
  await press(inDialog("Create the command"));
  const command = await page.getByRole("dialog").locator("pre").innerText();
  await page.keyboard.press("Escape");
  announce("enrol", { command });
  await page.getByRole("link", { name: "pump-3" }).waitFor();
  announce("enrolled");

  if (!brief) {
    await start(odd, 1);
    announce("an odd update");
    const rejected = page.getByRole("listitem").filter({ hasText: "update rejected" });
    await rejected.filter({ hasText: "odd-pump" }).filter({ hasText: "reason non_finite" }).waitFor();
    await badge("finished");
    announce("saw a rejected update");
  }

  await visit("Fleet");
  await press(page.getByRole("link", { name: "odd-pump" }));
  await press(button("Revoke"));
  await type(page.getByLabel("Reason, for the audit log"), "sends nonsense");
  await page.keyboard.press("Enter");
  await badge("revoked");
  announce("revoked");

  await start(experiment, brief ? 1 : 10);
  await page.getByRole("heading", { level: 1, name: "watched" }).waitFor();
  if (!brief) {
    await page.getByText("round committed").first().waitFor();
    announce("cut");
    await page.getByText("Not connected").first().waitFor();
    announce("mend");
    await badge("finished");
    await showsEveryEvent(page, "round_committed");
    announce("followed across a cut");

    await visit("Runs");
    await page.getByRole("checkbox", { name: /^Compare watched / }).waitFor(); // the list of an earlier visit is there first
    for (const index of [0, 1]) await press(page.getByRole("checkbox").nth(index), "Space");
    await page.locator("canvas").first().waitFor();
    announce("compared");
  }

  await page.keyboard.press("ControlOrMeta+K");
  await page.getByRole("combobox", { name: "Page, device, run, model or action" }).waitFor();
  await page.keyboard.type("pumps");
  await page.getByRole("option", { name: "pumps model", selected: true }).waitFor();
  await accessible(page, "palette");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { level: 1, name: "pumps" }).waitFor();
  announce("found by the palette");
  await press(button("Make it @champion").first());
  await press(inDialog("Make it @champion"));
  await page.getByText("@champion", { exact: true }).waitFor();
  announce("promoted");

  await rollOut("digits:3");
  await badge("finished");
  announce("rolled out");
  if (!brief) {
    await rollOut("digits:4");
    await badge("rolled back");
    await page.getByRole("alert").filter({ hasText: "champion" }).waitFor();
    announce("a gate halted the bad one");
  }

  await visit("Audit");
  await press(button("Verify the chain"));
  await page.getByText(/entries are intact/).waitFor();
  announce("verify", { command: await page.getByRole("main").locator("pre", { hasText: "audit verify" }).innerText() });
  await press(accountButton(page), "Space");
  await reach(page.getByLabel("Theme"));
  await page.keyboard.press("Escape");
  await button("Sign out").waitFor({ state: "hidden" });
  assert.ok(await accountButton(page).evaluate((element) => element === document.activeElement), "Escape goes back to the button");
  await press(accountButton(page));
  await reach(button("Sign out"));
  await page.keyboard.press("Tab");
  await button("Sign out").waitFor({ state: "hidden" });
  await press(accountButton(page));
  await press(button("Sign out"));
  await button("Sign in").waitFor();
  announce("signed out");
});
