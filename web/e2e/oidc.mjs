// Signs in at a real OpenID provider from the console. Prints what the console then shows, as one line of JSON.

import { chromium } from "playwright-core";

import { accessible, accountButton, settings, fitsNarrow } from "./support.mjs";

const { url, provider, login, chromium: executablePath } = settings;
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"] });
const context = await browser.newContext({ viewport: { width: 1280, height: 800 } });
const page = await context.newPage();
page.setDefaultTimeout(60_000);
const problems = [];
page.on("pageerror", (error) => problems.push(error.message));
page.on("console", (message) => {
  if (message.type() === "error" && message.text().includes("Content Security Policy") && page.url().startsWith(url)) problems.push(message.text());
});

/** Goes to the provider and signs in there; its pages are its own. */
async function signIn(name) {
  await page.getByRole("button", { name: `Sign in with ${provider}` }).click();
  await page.waitForURL((address) => address.host === provider);
  if (await page.locator("input[name=login]").count()) {
    await page.locator("input[name=login]").fill(name);
    await page.locator("input[name=password]").fill("any");
    await page.locator("button[type=submit]").click();
  }
  await page.getByRole("button", { name: "Continue" }).click();
  await page.waitForURL((address) => address.origin === new URL(url).origin);
}

await page.goto(url);
await page.getByRole("button", { name: `Sign in with ${provider}` }).waitFor();
await accessible(page, "sign-in-provider");
await fitsNarrow(page, "sign-in-provider");
await signIn("nobody");
const refusal = await page.getByRole("alert").textContent();
const afterRefusal = page.url();
await context.clearCookies();
await signIn(login);
await accountButton(page).click();
await page.getByRole("button", { name: "Sign out" }).waitFor();
const address = page.url();
const who = await page.evaluate(() => fetch("/api/v1/session").then((response) => response.json()));
const cookie = (await context.cookies(url)).find((each) => each.name.startsWith("fedloop-session"));
await page.getByRole("button", { name: "Sign out" }).click();
await page.getByRole("button", { name: `Sign in with ${provider}` }).waitFor();
await browser.close();
console.log(JSON.stringify({ refusal, afterRefusal, address, name: who.name, role: who.role, sameSite: cookie.sameSite, httpOnly: cookie.httpOnly, problems }));
