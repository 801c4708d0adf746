/** The place in the console, as the URL's fragment says: `#/runs/1234?state=running`. */
export interface Place {
  readonly path: readonly string[];
  readonly query: URLSearchParams;
}

function read(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

let place = $state.raw<Place>(read());
addEventListener("hashchange", () => {
  place = read();
});

export const router = {
  get place(): Place {
    return place;
  },
};

/** The link of a place; each part of the path is encoded. */
export function href(path: readonly string[], query: Record<string, string> = {}): string {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "")).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Replaces the query of the present place, as filters do, without a new entry in the history. */
export function filter(query: Record<string, string>): void {
  history.replaceState(null, "", href(place.path, query));
  place = read();
}
