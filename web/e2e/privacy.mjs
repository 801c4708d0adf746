// What a data scientist sees of privacy: which budgets end, what a run guarantees and what its devices have spent, and what a run would spend
// before it begins. By axe in both themes, and at 360 px.

import assert from "node:assert/strict";

import { accessible, announce, settings, fitsNarrow, isOneLine, open, run } from "./support.mjs";

const { url, token, ids, expected } = settings;
const opened = await open(url);
const { page } = opened;
const main = page.getByRole("main");

async function show(place) {
  await page.evaluate((each) => (location.hash = `#/${each}`), place);
  await main.locator("h1").first().waitFor();
  await page.waitForFunction(() => !document.querySelector("[aria-busy=true]"));
}

async function examine(view) {
  await accessible(page, view);
  await fitsNarrow(page, view);
}

await run(opened, async () => {
  await page.goto(url);
  await page.getByRole("button", { name: "Use the admin token instead" }).click();
  await page.getByLabel("Admin token").fill(token);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("link", { name: "The privacy budget of run nearly is nearly spent" }).waitFor();
  announce("overview");

  await page.getByRole("navigation").getByRole("link", { name: "Privacy", exact: true }).click();
  const row = (name) => main.getByRole("row").filter({ has: page.getByRole("link", { name, exact: true }) });
  await row("spent").getByText(`${expected.spent} of ${expected.budget}`).waitFor();
  await row("spent").getByText("budget spent", { exact: true }).waitFor();
  assert.equal(await row("spent").getByRole("progressbar").evaluate((bar) => bar.position > 0.9), true);
  await row("nearly").getByText("0 / 4", { exact: true }).waitFor();
  await page.getByRole("alert").filter({ hasText: "2 more rounds of the 4 still planned" }).waitFor();
  assert.equal(await page.getByRole("alert").filter({ hasText: "no round begins after" }).count(), 0, "of a finished run nothing is left to do");
  await isOneLine(page);
  await examine("privacy");
  announce("budgets");

  await row("spent").getByRole("link", { name: "spent", exact: true }).click();
  await page.getByRole("alert").filter({ hasText: "no round begins after 2 of 4" }).waitFor();
  await main.getByText(expected.in_words).waitFor();
  await main.getByText("nothing is claimed of how rounds get their clients", { exact: true }).waitFor();
  await main.getByText(/^statistics rounds on the same devices/).waitFor();
  const devices = page.getByRole("region", { name: `${expected.devices.length} devices have spent something` });
  for (const [name, epsilon] of expected.devices) await devices.getByRole("row").filter({ hasText: name }).getByText(epsilon, { exact: true }).first().waitFor();
  await examine("privacy-run");
  announce("a guarantee");

  await devices.getByRole("link", { name: expected.devices[0][0] }).click();
  await page.getByRole("region", { name: "Runs in which it has spent something" }).getByRole("link", { name: "spent" }).waitFor();
  await show(`runs/${ids.spent}`);
  await main.getByText(`${expected.spent} of ${expected.budget}`).waitFor();
  await page.getByRole("link", { name: "Guarantee, assumptions, devices" }).waitFor();
  await examine("run-private");
  announce("a run and a device");

  await show(`runs/new?clone=${ids.spent}`);
  const outlook = page.getByRole("region", { name: "Privacy of this run" });
  await outlook.getByText(`The budget of ${expected.budget} ends the run after 2 of 4 rounds.`).waitFor();
  await outlook.getByText(/^1 earlier run on rows may have spent epsilon/).waitFor();
  await outlook.locator("canvas").waitFor();
  await examine("run-new-private");
  await page.getByLabel("delta", { exact: true }).fill("0.9");
  await outlook.getByRole("alert").filter({ hasText: "not below one over the number of clients" }).waitFor();
  await page.getByLabel("delta", { exact: true }).fill("");
  await page.getByLabel("budget", { exact: true }).fill("");
  await outlook.getByText(/^All 4 rounds together spend epsilon/).waitFor();
  announce("before a run");
});
