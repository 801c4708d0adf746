import { LANGUAGES, use, type Language } from "./texts";

const KEPT = "language";
let current = $state<Language>("en");

/** The language of the page: as chosen before in this browser, or else the first of the browser's own that there is. */
export const language = {
  get current(): Language {
    return current;
  },
  async start(): Promise<void> {
    const kept = localStorage.getItem(KEPT);
    await show(LANGUAGES.find((each) => each === kept) ?? spoken(navigator.languages));
  },
  async choose(wanted: Language): Promise<void> {
    await show(wanted);
    localStorage.setItem(KEPT, wanted);
  },
};

/** The first language of a reader that the console has; English if there is none. Chinese of any kind is read as simplified. */
export function spoken(wanted: readonly string[]): Language {
  for (const each of wanted) {
    const found = LANGUAGES.find((known) => known.split("-", 1)[0] === each.split("-", 1)[0]?.toLowerCase());
    if (found) return found;
  }
  return "en";
}

async function show(wanted: Language): Promise<void> {
  await use(wanted);
  document.documentElement.lang = wanted;
  current = wanted;
}
