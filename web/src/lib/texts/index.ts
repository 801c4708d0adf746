import { en } from "./en";

/** What a catalogue has, so that none lacks a text of the English one. */
export type Texts = Widened<typeof en>;
type Widened<T> = T extends string ? string : T extends (...given: infer Given) => string ? (...given: Given) => string : { readonly [Key in keyof T]: Widened<T[Key]> };

export const LANGUAGES = ["en", "zh-Hans"] as const;
export type Language = (typeof LANGUAGES)[number];

/** The texts in the language of the page. Views are made anew when it changes, so that they read them again. */
export let texts: Texts = en;
/** The language of numbers and dates: the browser's own variety of the language of the page, if it has one. */
export let locale: string | undefined = undefined;

/** Makes a language that of the page; one other than English is fetched first. */
export async function use(language: Language): Promise<void> {
  texts = language === "en" ? en : (await import("./zh")).zh;
  const base = language.split("-", 1)[0];
  locale = navigator.languages.find((each) => each.split("-", 1)[0] === base) ?? language;
}

type Words = Texts["words"];

/** What the API calls `word`, in the language of the page. */
export function said(kind: keyof Words, word: string): string {
  return (texts.words[kind] as Readonly<Record<string, string>>)[word] ?? word.replaceAll("_", " ");
}
