import type uPlot from "uplot";

export type PlotClass = typeof uPlot;

/** The library of plots, which the first view does not need. */
export async function plots(): Promise<PlotClass> {
  return (await import("uplot")).default;
}

/** Height of every plot, in pixels. */
export const HEIGHT = 220;

/** The ends of an axis for values from `least` to `most`; both are null where there is no value. */
export type Range = (least: number | null, most: number | null) => [number, number];

const ROOM = 0.1; // of the values' extent, at both ends
const LEAST_ROOM = 0.02; // of the greatest value, so that numbers along the axis differ
const LEAST_EXTENT = 0.05; // of shares

/** With room at both ends, also around equal values; not below zero unless a value is. */
export const around: Range = (least, most) => {
  if (least === null || most === null) return [0, 1];
  const room = Math.max((most - least) * ROOM, Math.max(Math.abs(least), Math.abs(most)) * LEAST_ROOM) || 1;
  return [least < 0 ? least - room : Math.max(0, least - room), most + room];
};

/** From zero on. */
export const fromZero: Range = (_, most) => [0, (most ?? 0) * 1.05 || 1];

/** Of shares: never beyond 0 to 100 %. */
export const ofShares: Range = (least, most) => {
  if (least === null || most === null) return [0, 1];
  const room = Math.max((most - least) * ROOM, (LEAST_EXTENT - (most - least)) / 2);
  return [Math.max(0, least - room), Math.min(1, most + room)];
};

/** Of a single round or step: with room for one number only. */
export const aroundStep = (step: number): [number, number] => [step - 0.5, step + 0.5];

/** Distances of whole numbers along an axis, however many rounds or steps there are. */
export const WHOLE_STEPS: number[] = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat();

/** A token's colour as the browser computes it in the present theme: a canvas does not know `light-dark()`. */
export function resolved(element: HTMLElement, name: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

/** An axis in the colours of the present theme. */
export function axisOf(element: HTMLElement): uPlot.Axis {
  const colour = (name: string): string => resolved(element, name);
  return { stroke: colour("--ink-soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
}

/** Keeps a plot as wide as its element, and has it made anew when the theme changes; until the returned function is called. */
export function keptUp(element: HTMLElement, plot: () => uPlot | null, make: () => void): () => void {
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const resized = new ResizeObserver(() => plot()?.setSize({ width: element.clientWidth, height: HEIGHT }));
  resized.observe(element);
  const themed = new MutationObserver(make);
  themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  scheme.addEventListener("change", make);
  return () => {
    resized.disconnect();
    themed.disconnect();
    scheme.removeEventListener("change", make);
    plot()?.destroy();
  };
}
