export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

const KEPT = "theme";
let current = $state<Theme>("system");

/** The theme of the page: as chosen before in this browser, or else that of the system. */
export const theme = {
  get current(): Theme {
    return current;
  },
  start(): void {
    const kept = localStorage.getItem(KEPT);
    show(THEMES.find((each) => each === kept) ?? "system");
  },
  choose(wanted: Theme): void {
    show(wanted);
    localStorage.setItem(KEPT, wanted);
  },
};

function show(wanted: Theme): void {
  if (wanted === "system") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = wanted;
  current = wanted;
}
