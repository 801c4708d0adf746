// Pictures of the console for the documentation: of a run in progress and the fleet, light, dark and narrow.

import { chromium } from "playwright-core";

const { url, token, folder, chromium: executablePath } = JSON.parse(process.env.CONSOLE_TEST);
const WIDE = { width: 1200, height: 1240 };
const NARROW = { width: 390, height: 1240 };
const ROUNDS = 12;

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"] });
try {
  const page = await browser.newPage({ viewport: WIDE });
  page.setDefaultTimeout(240_000);
  const take = async (name, colorScheme, size = WIDE) => {
    await page.emulateMedia({ colorScheme });
    await page.setViewportSize(size);
    await page.waitForTimeout(300); // charts are drawn anew for the new width and colours
    await page.screenshot({ path: `${folder}/${name}.png` });
  };
  await page.goto(url);
  await page.getByRole("button", { name: "Use the admin token instead" }).click();
  await page.getByLabel("Admin token").fill(token);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("link", { name: "demo-fleet" }).first().click();
  await page.locator("strong", { hasText: "round committed" }).nth(3).waitFor();
  await page.getByText(new RegExp(`Round (${ROUNDS}|[2-9]\\d|1[3-9]) /`)).waitFor();
  await take("console", "light");
  await take("console-dark", "dark");
  await take("console-narrow", "light", NARROW);
  await page.setViewportSize(WIDE);
  await page.getByRole("navigation").getByRole("link", { name: "Fleet", exact: true }).click();
  await page.getByRole("link", { name: "gateway" }).waitFor();
  await take("console-fleet", "light", { width: 1200, height: 460 });
} finally {
  await browser.close();
}
