// What the scripts of this folder share: a browser on the console, axe, and what a coordinator says of a run.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

import { chromium } from "playwright-core";

export const settings = JSON.parse(process.env.CONSOLE_TEST);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run", "--disable-sync"];
export const WIDE = { width: 1280, height: 800 };
const NARROW = { width: 360, height: 740 };

/** A step is a line of JSON on standard output; what it needs from outside, such as a command to run on a device, is in its line. */
export function announce(step, more = {}) {
  console.log(JSON.stringify({ step, ...more }));
}

/** A page of a browser. `problems` gets errors of scripts, breaches of the policy and requests to anything but `url`. */
export async function open(url, patience = 240_000) {
  const browser = await chromium.launch({ executablePath: settings.chromium, args: FLAGS });
  const context = await browser.newContext({ viewport: WIDE, locale: "en-US", permissions: ["clipboard-read", "clipboard-write"] });
  const page = await context.newPage();
  page.setDefaultTimeout(patience);
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
  return { browser, page, problems };
}

/** Runs a script's steps; afterwards the browser is closed, and what went wrong is on standard error and in the exit status. */
export async function run({ browser, page, problems }, steps) {
  try {
    await steps();
    assert.deepEqual(problems, []);
  } catch (error) {
    if (settings.pictures) await page.screenshot({ path: `${settings.pictures}/failed.png`, fullPage: true });
    console.error(error, problems, page.url(), await page.locator("body").innerText().catch(String));
    process.exitCode = 1;
  } finally {
    await browser.close();
  }
}

/** No serious or critical issue by axe in the light theme, and in the dark one, which differs in its colours only, none of contrast. */
export async function accessible(page, view) {
  for (const [theme, options] of [["light", {}], ["dark", { runOnly: ["color-contrast"] }]]) {
    await page.emulateMedia({ colorScheme: theme });
    await page.evaluate(axe);
    const { violations } = await page.evaluate((given) => window.axe.run(given), options);
    const grave = violations.filter((each) => ["serious", "critical"].includes(each.impact));
    assert.deepEqual(grave.map((each) => [each.id, each.nodes.map((node) => node.html)]), [], `${view}, ${theme}`);
    const fullPage = (await page.locator("dialog[open]").count()) === 0; // what is behind a dialog is dimmed in sight only
    if (settings.pictures) await page.screenshot({ path: `${settings.pictures}/${view}-${theme}.png`, fullPage });
  }
  await page.emulateMedia({ colorScheme: "light" });
}

/** 360 px are enough: nothing has to be scrolled sideways but tables and graphs in themselves. */
export async function fitsNarrow(page, view) {
  await page.setViewportSize(NARROW);
  const fits = () => document.documentElement.scrollWidth <= innerWidth; // charts follow in the next frame
  await page.waitForFunction(fits, null, { timeout: 60_000 }).catch(async () => assert.fail(`${view} is too wide: ${await page.evaluate(tooWide)}`));
  if (settings.pictures) await page.screenshot({ path: `${settings.pictures}/${view}-narrow.png`, fullPage: true });
  await page.setViewportSize(WIDE);
}

/** The button at the top that opens the menu with the language, the theme and the way out. */
export const accountButton = (page) => page.getByRole("banner").locator("button[aria-expanded]");

/** The header is one line: all that is in it has some height in common. */
export async function isOneLine(page) {
  const boxes = await page.locator("header > *").evaluateAll((all) => all.map((each) => each.getBoundingClientRect().toJSON()));
  assert.ok(Math.max(...boxes.map((box) => box.top)) < Math.min(...boxes.map((box) => box.bottom)), `the header wraps: ${JSON.stringify(boxes)}`);
}

/** Elements that reach beyond the page, without those that are scrolled in themselves. */
function tooWide() {
  const scrolled = (element) => element && (getComputedStyle(element).overflowX !== "visible" || scrolled(element.parentElement));
  const found = [...document.body.querySelectorAll("*")].filter((each) => each.getBoundingClientRect().right > innerWidth + 0.5 && !scrolled(each.parentElement));
  return found.map((each) => each.outerHTML.slice(0, 120)).join("\n");
}

/**
 * Every event that the page of a run shows is one of the coordinator's, none is missing or there twice, and they are in order, newest first.
 * Returns whether it shows all.
 */
export async function showsEveryEvent(page, reaching = null) {
  const id = page.url().split("/").at(-1);
  const told = await page.evaluate(async (run) => {
    const all = [];
    for (let after = 0; after !== null; ) {
      const answer = await (await fetch(`/api/v1/runs/${run}/events?after=${after}`)).json();
      all.push(...answer.events);
      after = answer.next;
    }
    return all;
  }, id);
  const newest = told.at(-1).time;
  await page.locator(`ol time[datetime="${newest}"]`).first().waitFor();
  const shown = await page.locator("ol time").evaluateAll((all) => all.map((each) => each.getAttribute("datetime")));
  assert.deepEqual(shown, told.map((each) => each.time).toReversed().slice(0, shown.length), "every event is there once, in order");
  if (shown.length < told.length) assert.ok(shown.length >= 60, "only old events are left out");
  if (reaching) {
    const kinds = told.slice(-shown.length).map((each) => each.event);
    assert.ok(kinds.indexOf(reaching) > 0, `what is shown reaches back beyond ${reaching}`);
  }
  return shown.length === told.length;
}
