/** The settings in which documents differ: dotted key and one text for each document, a dash where it is absent. */
export function differences(documents: readonly object[]): [string, string[]][] {
  const flat = documents.map((document) => flatten(document));
  const keys = [...new Set(flat.flatMap((each) => [...each.keys()]))].sort();
  return keys
    .map((key): [string, string[]] => [key, flat.map((each) => each.get(key) ?? "–")])
    .filter(([, values]) => new Set(values).size > 1);
}

function flatten(value: object, prefix = ""): Map<string, string> {
  const found = new Map<string, string>();
  for (const [key, each] of Object.entries(value)) {
    const name = prefix ? `${prefix}.${key}` : key;
    if (each !== null && typeof each === "object" && !Array.isArray(each)) {
      for (const [inner, text] of flatten(each as object, name)) found.set(inner, text);
    } else found.set(name, typeof each === "string" ? each : JSON.stringify(each));
  }
  return found;
}
