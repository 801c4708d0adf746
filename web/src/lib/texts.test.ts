/// <reference types="vite/client" />
import { afterEach, beforeAll, expect, test, vi } from "vitest";

import { share, time, whole } from "./format";
import { ranked, type Target } from "./palette";
import { said, texts, use } from "./texts";
import { en } from "./texts/en";
import { zh } from "./texts/zh";

beforeAll(() => vi.stubGlobal("navigator", { languages: ["fr-FR", "en-GB"] }));
afterEach(() => use("en"));

/** Every key with the kind of its value; of a function, the number of its parameters. */
function keys(catalogue: object, path = ""): string[] {
  return Object.entries(catalogue).flatMap(([key, value]: [string, unknown]) => {
    const here = `${path}.${key}`;
    if (typeof value === "function") return [`${here}(${value.length})`];
    return typeof value === "string" ? [`${here}${value === "" ? " empty" : ""}`] : keys(value as object, here);
  });
}

test("both languages have the same texts, none of them missing", () => {
  expect(keys(zh).sort()).toEqual(keys(en).sort());
});

test("a chosen language is that of texts, words of the API, numbers and dates", async () => {
  await use("zh-Hans");
  expect(texts.nav.fleet).toBe("设备群");
  expect(said("state", "rolled_back")).toBe("已回滚");
  expect(said("event", "something_new")).toBe("something new");
  expect(time("2026-11-20T12:00:00Z")).toContain("年");
  await use("en");
  expect(texts.nav.fleet).toBe("Fleet");
  expect(time("2026-11-20T12:00:00Z")).toMatch(/^20 Nov 2026/); // as the browser's own English has it
  expect([share(0.5), whole(12345)]).toEqual(["50.0%", "12,345"]);
});

/** Markup of a component without its script, style, comments and expressions. */
function markup(source: string): string {
  let text = source.replace(/<script[\s\S]*?<\/script>|<style[\s\S]*?<\/style>|<!--[\s\S]*?-->/g, "");
  for (let before = ""; before !== text; ) {
    before = text;
    text = text.replace(/\{[^{}]*\}/g, "…"); // from the innermost outwards
  }
  return text;
}

const SPOKEN = /(?:>([^<>]*\p{L}[^<>]*)<)|(?:\s(?:aria-label|placeholder|title|alt)="([^"]*\p{L}[^"]*)")/gu;
const components = Object.entries(import.meta.glob<string>("../**/*.svelte", { query: "?raw", import: "default", eager: true }));

test("the scan finds what is written into markup", () => {
  const found = [...markup('<p class="a">{#if a}{b({c: 1})}{/if} Hello</p><img alt="A cat"><b>{x}</b>').matchAll(SPOKEN)];
  expect(found.map((match) => (match[1] ?? match[2])?.replaceAll("…", "").trim())).toEqual(["Hello", "A cat"]);
});

test.each(components)("%s takes what a person reads from the catalogue", (_, source) => {
  expect([...markup(source.replaceAll("=>", "")).matchAll(SPOKEN)].map((match) => match[0])).toEqual([]);
});

test("the scan reads the components", () => expect(components.length).toBeGreaterThan(30));

test("the palette finds by words and by the beginning of an id, names that begin with it first", () => {
  const target = (name: string, id?: string): Target => ({ kind: "run", name, href: name, ...(id && { id }) });
  const all = [target("new fleet", "ab12"), target("fleet new"), target("overview", "fe34")];
  expect(ranked(all, "", 2).map((each) => each.name)).toEqual(["new fleet", "fleet new"]);
  expect(ranked(all, "Fle", 9).map((each) => each.name)).toEqual(["fleet new", "new fleet"]);
  expect(ranked(all, "new fl", 9).map((each) => each.name)).toEqual(["new fleet", "fleet new"]);
  expect(ranked(all, "fe3", 9).map((each) => each.name)).toEqual(["overview"]);
  expect(ranked(all, "nothing", 9)).toEqual([]);
});
