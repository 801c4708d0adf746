import { ApiError } from "./api";
import { texts } from "./texts";

/** What to try after a request failed. An error that is not of the API means that no answer came. */
export function advice(error: unknown): string {
  const { advice: words } = texts.state;
  if (!(error instanceof ApiError)) return words.unreachable;
  if (error.status === 403) return words.forbidden;
  if (error.status === 404) return words.absent;
  if (error.status === 429) return words.busy;
  return error.status >= 500 ? words.failed : words.other;
}
