import { afterAll, beforeAll, expect, it, vi } from "vitest";

/** Of a busy machine: the modules are compiled within the test. */
const PATIENCE_MILLISECONDS = 60_000;
const answers: Record<string, (response: Response) => void> = {};
const answer = (path: string, status: number, body: object | null = {}) =>
  answers[path]?.(new Response(body && JSON.stringify(body), { status, headers: { "content-type": "application/json" } }));
const soon = () => new Promise((resolve) => setTimeout(resolve));

beforeAll(() => {
  vi.stubGlobal("location", { origin: "http://localhost", pathname: "/" });
  vi.stubGlobal("sessionStorage", { getItem: () => null, setItem: () => undefined, removeItem: () => undefined });
  vi.stubGlobal("fetch", (request: Request | string) => {
    const path = typeof request === "string" ? request : new URL(request.url).pathname;
    return new Promise<Response>((resolve) => (answers[path] = resolve));
  });
});
afterAll(() => vi.unstubAllGlobals());

it("goes on under a new secret though requests under the old one are refused meanwhile and afterwards", async () => {
  const { api } = await import("./api");
  const { session } = await import("./session.svelte");
  const ada = { name: "ada", role: "admin", kind: "session", grants: [], projects: ["default"], project: "default" };
  const found = session.find();
  answer("/api/v1/session", 200, ada);
  await found;
  expect(session.name).toBe("ada");

  const early = api.GET("/api/v1/devices").catch((error: Error) => error);
  const late = api.GET("/api/v1/runs").catch((error: Error) => error);
  const renewed = session.renew(() =>
    api.PUT("/api/v1/session/password", { body: { current_password: "a", new_password: "b" } }),
  );
  await soon();
  answer("/api/v1/devices", 401);
  await early;
  expect(session.active).toBe(true);
  answer("/api/v1/session/password", 204, null);
  await soon();
  answer("/api/v1/session", 200, ada);
  await renewed;
  answer("/api/v1/runs", 401);
  await late;
  expect(session.active).toBe(true);

  const now = api.GET("/api/v1/runs").catch((error: Error) => error);
  await soon();
  answer("/api/v1/runs", 401);
  await now;
  expect(session.active).toBe(false);
}, PATIENCE_MILLISECONDS);
