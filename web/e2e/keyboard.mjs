// What an operator does in a day with the keys of a keyboard and nothing else: the pointer is never used. The page comes through a line that
// is cut and mended. Steps are announced as in `console.mjs`.

import assert from "node:assert/strict";

import { chromium } from "playwright-core";

const { url, link, experiment, chromium: executablePath, pictures } = JSON.parse(process.env.CONSOLE_TEST);
const MOST_STOPS = 300;

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"] });
const page = await browser.newPage({ viewport: { width: 1280, height: 800 } });
page.setDefaultTimeout(90_000);
page.mouse.click = () => assert.fail("the pointer was used");

function announce(step, more = {}) {
  console.log(JSON.stringify({ step, ...more }));
}

/** Moves the focus to an element, with Tab alone, as far as it takes. */
async function reach(locator) {
  await locator.waitFor();
  for (let stop = 0; stop < MOST_STOPS; stop += 1) {
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

/** Times of the events that the page shows, newest first. */
const shown = () => page.locator("time").evaluateAll((all) => all.map((each) => each.getAttribute("datetime")));

async function start() {
  await visit("Runs");
  await press(page.getByRole("link", { name: "Start a run" }));
  await press(button("File"));
  await type(page.getByLabel("Experiment (TOML)"), experiment);
  await press(button("Form"));
  await type(page.getByLabel("rounds", { exact: true }), "10");
  await press(button("Start"));
  await page.getByRole("heading", { level: 1, name: "watched" }).waitFor();
}

async function followed(step) {
  await page.getByText("round committed").first().waitFor();
  if (step) {
    announce("cut");
    await page.getByText("Not connected").first().waitFor();
    announce("mend");
  }
  await badge("finished");
  await page.locator("time").first().waitFor();
  const run = page.url().split("/").at(-1);
  const told = await page.evaluate(async (id) => (await (await fetch(`/api/v1/runs/${id}/events`)).json()).events.map((each) => each.time), run);
  assert.deepEqual(await shown(), told.toReversed(), "every event is there once, in order");
}

async function rollOut(version) {
  await visit("Rollouts");
  await press(button("Start a rollout"));
  await reach(page.getByRole("dialog").getByRole("combobox"));
  await page.keyboard.type(`digits:${version}`);
  await type(page.getByLabel("Shares of the devices, %"), "50, 100");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { level: 1, name: `digits:${version}` }).waitFor();
}

try {
  await page.goto(link);
  await type(page.getByLabel("Name"), "ada");
  await type(page.getByLabel("Password"), "correct horse battery");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  announce("signed in");

  await visit("Fleet");
  await press(button("Enrol a device"));
  await press(inDialog("Create the command"));
  const command = await page.getByRole("dialog").locator("pre").innerText();
  await page.keyboard.press("Escape");
  announce("enrol", { command });
  await page.getByRole("link", { name: "pump-2" }).waitFor();
  announce("enrolled");

  await start();
  await followed(false);
  await start();
  await followed(true);
  announce("followed across a cut");

  await visit("Runs");
  await page.getByRole("checkbox").nth(1).waitFor(); // the list of an earlier visit is there first
  for (const index of [0, 1]) await press(page.getByRole("checkbox").nth(index), "Space");
  await page.locator("canvas").first().waitFor();
  announce("compared");

  await visit("Models");
  await press(page.getByRole("link", { name: "pumps" }));
  await press(button("Make it @champion").last());
  await press(inDialog("Make it @champion"));
  await page.getByText("@champion", { exact: true }).waitFor();
  announce("promoted");

  await rollOut(1);
  await badge("finished");
  announce("rolled out");
  await rollOut(2);
  await badge("rolled back");
  await page.getByRole("alert").filter({ hasText: "champion" }).waitFor();
  if (pictures) await page.screenshot({ path: `${pictures}/rollout.png`, fullPage: true });
  announce("a gate halted the bad one");

  await visit("Fleet");
  await press(page.getByRole("link", { name: "pump-2" }));
  await press(button("Revoke"));
  await type(page.getByLabel("Reason, for the audit log"), "stolen from the depot");
  await page.keyboard.press("Enter");
  await badge("revoked");
  await visit("Audit");
  announce("verify", { command: await page.getByRole("main").locator("pre").innerText() });
  await press(button("Sign out"));
  await button("Sign in").waitFor();
  announce("signed out");
} catch (error) {
  if (pictures) await page.screenshot({ path: `${pictures}/failed.png`, fullPage: true });
  console.error(error);
  process.exitCode = 1;
} finally {
  await browser.close();
}
