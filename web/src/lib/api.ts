import createClient, { type Middleware } from "openapi-fetch";

import type { components, paths } from "./schema";
import { session } from "./session.svelte";

export type Schemas = components["schemas"];

/** What the API refused, in its own words. `code` is stable. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

const generations = new Map<string, number>();

const credentials: Middleware = {
  onRequest({ request, id }) {
    generations.set(id, session.generation);
    for (const [name, value] of Object.entries(session.headers)) request.headers.set(name, value);
    return request;
  },
  onError({ id }) {
    generations.delete(id);
  },
  async onResponse({ response, id }) {
    const generation = generations.get(id);
    generations.delete(id);
    if (response.ok) return undefined;
    const body: unknown = await response
      .clone()
      .json()
      .catch(() => null);
    const error = (body as { error?: { code?: string; message?: string } } | null)?.error;
    if (response.status === 401 && generation !== undefined) session.refused(generation);
    throw new ApiError(response.status, error?.code ?? "unknown", error?.message ?? response.statusText);
  },
};

export const api = createClient<paths>({ baseUrl: location.origin });
api.use(credentials);

/** The body of a response that the middleware has let through. */
export function body<T>(result: { data?: T }): T {
  return result.data as T;
}
