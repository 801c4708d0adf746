import type uPlot from "uplot";

export type PlotClass = typeof uPlot;

/** The library of plots, which the first view does not need. */
export async function plots(): Promise<PlotClass> {
  return (await import("uplot")).default;
}

/** Height of every plot, in pixels. */
export const HEIGHT = 220;

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
