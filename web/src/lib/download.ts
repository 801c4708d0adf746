import { session } from "./session.svelte";

/** Fetches a file with the credentials of the session and hands it to the browser to save. */
export async function download(path: string, name: string): Promise<void> {
  const response = await fetch(path, { headers: session.headers });
  if (!response.ok) throw new Error(`${path}: ${response.status} ${response.statusText}`);
  const url = URL.createObjectURL(await response.blob());
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}
