/** A query of the fleet's address under a name that somebody chose. */
export interface SavedFilter {
  readonly name: string;
  readonly query: Readonly<Record<string, string>>;
}

/** The filters kept in this browser for a project; none if what is kept cannot be read. */
export function savedFilters(project: string | null, storage: Pick<Storage, "getItem"> = localStorage): SavedFilter[] {
  try {
    const found: unknown = JSON.parse(storage.getItem(key(project)) ?? "[]");
    return Array.isArray(found) ? found.filter(isFilter) : [];
  } catch {
    return [];
  }
}

/** Keeps a filter in place of one with the same name; returns all, by name. */
export function saveFilter(project: string | null, filter: SavedFilter, storage: Pick<Storage, "getItem" | "setItem"> = localStorage): SavedFilter[] {
  const query = Object.fromEntries(Object.entries(filter.query).filter(([, value]) => value !== ""));
  const others = savedFilters(project, storage).filter((each) => each.name !== filter.name);
  return keep(project, [...others, { name: filter.name, query }].sort((one, other) => one.name.localeCompare(other.name)), storage);
}

/** Forgets the filter of this name; returns those left. */
export function forgetFilter(project: string | null, name: string, storage: Pick<Storage, "getItem" | "setItem"> = localStorage): SavedFilter[] {
  return keep(project, savedFilters(project, storage).filter((each) => each.name !== name), storage);
}

/** The saved filter that is the same as this one. */
export function sameFilter(saved: readonly SavedFilter[], query: Readonly<Record<string, string>>): SavedFilter | undefined {
  const text = (values: Readonly<Record<string, string>>): string => JSON.stringify(Object.entries(values).filter(([, value]) => value !== "").sort());
  return saved.find((each) => text(each.query) === text(query));
}

function keep(project: string | null, filters: SavedFilter[], storage: Pick<Storage, "setItem">): SavedFilter[] {
  storage.setItem(key(project), JSON.stringify(filters));
  return filters;
}

function key(project: string | null): string {
  return `fleet filters ${project ?? ""}`;
}

function isFilter(found: unknown): found is SavedFilter {
  const { name, query } = (found ?? {}) as { name?: unknown; query?: unknown };
  return typeof name === "string" && typeof query === "object" && query !== null && Object.values(query).every((value) => typeof value === "string");
}
