/** Every text of the console. A second language is a second object of this type. */
export const texts = {
  product: "Fedloop",
  nav: { overview: "Overview", fleet: "Fleet", runs: "Runs", models: "Models", rollouts: "Rollouts" },
  theme: { label: "Theme", system: "System", light: "Light", dark: "Dark" },
  signIn: {
    title: "Sign in",
    token: "Admin token",
    hint: "The content of the file admin.token in the coordinator's home. It stays in this page's memory only.",
    submit: "Sign in",
    out: "Sign out",
  },
  state: {
    loading: "Loading…",
    retry: "Try again",
    stale: "Not connected. What you see may be out of date; reconnecting…",
  },
  overview: {
    needsYou: "Needs a person",
    nothing: "Nothing waits for you.",
    pending: (count: number) => `${count} ${count === 1 ? "device waits" : "devices wait"} for approval`,
    failed: (name: string) => `Run ${name} failed`,
    fleet: "Fleet",
    inProgress: "Runs in progress",
    none: "No run is in progress. Start one:",
    uptime: "up since",
  },
} as const;
