/** What the palette can go to. */
export interface Target {
  readonly kind: "page" | "action" | "device" | "run" | "model";
  readonly name: string;
  readonly id?: string;
  readonly href: string;
}

/**
 * The first `most` targets that match all words of `wanted`, those whose name begins with it first, otherwise in their own order. An id matches
 * by its beginning.
 */
export function ranked(targets: readonly Target[], wanted: string, most: number): Target[] {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const first: Target[] = [];
  const others: Target[] = [];
  for (const target of targets) {
    const name = target.name.toLowerCase();
    if (!words.every((word) => name.includes(word) || target.id?.startsWith(word))) continue;
    (words[0] !== undefined && name.startsWith(words.join(" ")) ? first : others).push(target);
    if (first.length === most) break;
  }
  return [...first, ...others].slice(0, most);
}
