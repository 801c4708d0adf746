/** Rows as CSV (RFC 4180) with a header; a value that is an object is JSON, an absent one an empty cell. */
export function csv(rows: readonly object[]): string {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const lines = rows.map((row) => names.map((name) => cell((row as Record<string, unknown>)[name])));
  return [names.map(cell), ...lines].map((cells) => `${cells.join(",")}\r\n`).join("");
}

function cell(value: unknown): string {
  if (value === null || value === undefined) return "";
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return /[",\r\n]/u.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
