import { session } from "./session.svelte";

/** Fetches a file with the credentials of the session and hands it to the browser to save. */
export async function download(path: string, name: string): Promise<void> {
  const response = await fetch(path, { headers: session.headers });
  if (!response.ok) throw new Error(`${path}: ${response.status} ${response.statusText}`);
  save(await response.blob(), name);
}

/** Hands content to the browser to save. */
export function save(content: Blob, name: string): void {
  const url = URL.createObjectURL(content);
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  URL.revokeObjectURL(url);
}
