const EVERY_MILLISECONDS = 10_000;
let at = $state(Date.now());
if (typeof document !== "undefined") setInterval(() => (at = Date.now()), EVERY_MILLISECONDS);

/** The time, for texts such as "3 minutes ago", which go on while nothing else of the page changes. */
export const now = {
  get milliseconds(): number {
    void at; // whoever shows the time is told when it changes
    return Date.now();
  },
};
