// How fast the fleet's table is with as many devices as there are: one line of JSON with figures of the browser's own clock.

import { gzipSync } from "node:zlib";

import { chromium } from "playwright-core";

const { url, token, devices, chromium: executablePath } = JSON.parse(process.env.CONSOLE_TEST);
const SCROLL_FRAMES = 240;
const SCROLL_PIXELS = 600;
const KEY_MILLISECONDS = 120;

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"] });
try {
  const page = await browser.newPage({ viewport: { width: 1280, height: 800 } });
  page.setDefaultTimeout(60_000);
  const scripts = [];
  page.on("response", (response) => {
    if (response.request().resourceType() === "script") scripts.push(response.body());
  });
  await page.goto(url);
  await page.getByRole("button", { name: "Use the admin token instead" }).click();
  await page.getByLabel("Admin token").fill(token);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("heading", { level: 1, name: "Overview" }).waitFor();
  const firstView = (await Promise.all(scripts)).reduce((sum, each) => sum + gzipSync(each, { level: 9 }).length, 0);

  await page.goto(`${url}/#/runs`); // the table is opened with nothing loaded but the page
  await page.evaluate(() => {
    window.frames_of = (act) =>
      new Promise((done) => {
        const times = [];
        const long = [];
        const observer = new PerformanceObserver((list) => long.push(...list.getEntries().map((each) => each.duration)));
        observer.observe({ type: "longtask" });
        const frame = (now) => {
          times.push(now);
          if (act(times.length)) requestAnimationFrame(frame);
          else
            setTimeout(() => {
              observer.disconnect();
              done({ times, long });
            }, 100);
        };
        requestAnimationFrame(frame);
      });
    window.opened = new Promise((done) => {
      const seen = new MutationObserver(() => {
        if (!document.querySelector(".rows [role=row]")) return;
        seen.disconnect();
        requestAnimationFrame(() => requestAnimationFrame((now) => done(now)));
      });
      seen.observe(document.body, { childList: true, subtree: true });
    });
    performance.clearResourceTimings();
  });
  await page.getByRole("navigation").getByRole("link", { name: "Fleet" }).click();
  const opened = await page.evaluate(() => window.opened);
  await page.getByText(`${devices} devices`, { exact: true }).waitFor();
  const complete = await page.evaluate(() => performance.now());
  const answers = await page.evaluate(() =>
    performance.getEntriesByType("resource").filter((each) => new URL(each.name).pathname === "/api/v1/devices").map((each) => [each.startTime, each.responseEnd, each.decodedBodySize]));

  const scrolled = await page.evaluate(
    ([frames, pixels]) => {
      const table = document.querySelector("[role=region]");
      return window.frames_of((count) => {
        table.scrollTop += pixels;
        return count < frames;
      });
    },
    [SCROLL_FRAMES, SCROLL_PIXELS],
  );
  const rowsThere = await page.locator(".rows [role=row]").count();

  const filtering = page.evaluate(() => window.frames_of(() => !window.filtered));
  const box = page.getByLabel("Name or id");
  await box.click();
  for (let round = 0; round < 3; round += 1) {
    await box.pressSequentially("device-012", { delay: KEY_MILLISECONDS });
    for (let key = 0; key < "device-012".length; key += 1) await page.keyboard.press("Backspace", { delay: KEY_MILLISECONDS });
  }
  await page.evaluate(() => (window.filtered = true));
  console.log(JSON.stringify({ firstView, opened, complete, answers, scrolled, rowsThere, filtered: await filtering }));
} finally {
  await browser.close();
}
