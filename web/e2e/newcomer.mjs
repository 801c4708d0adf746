// Somebody who opens the console of `fedloop demo-fleet --serve` for the first time, with the admin token, and looks for what happens.

import { announce, settings, open, run } from "./support.mjs";

const { url, token } = settings;
const MINUTE = 60_000;
const opened = await open(url, MINUTE);
const { page } = opened;

await run(opened, async () => {
  await page.goto(url);
  const end = Date.now() + MINUTE;
  const left = () => ({ timeout: Math.max(1, end - Date.now()) });
  await page.getByRole("button", { name: "Use the admin token instead" }).click();
  await page.getByLabel("Admin token").fill(token);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("link", { name: "demo-fleet" }).first().click(left());
  await page.getByText("Live", { exact: true }).waitFor(left());
  await page.getByRole("heading", { level: 2, name: /^Round \d+$/ }).waitFor(left());
  await page.locator("strong", { hasText: "round committed" }).first().waitFor(left());
  announce("saw a live round");
});
