/** One action of a page at a time: whether it is under way, and what the coordinator refused, in its own words. */
export class Attempt {
  busy = $state(false);
  problem = $state<string | null>(null);

  /** Whether the action worked. */
  async run(action: () => Promise<unknown>): Promise<boolean> {
    this.busy = true;
    this.problem = null;
    try {
      await action();
      return true;
    } catch (error) {
      this.problem = error instanceof Error ? error.message : String(error);
      return false;
    } finally {
      this.busy = false;
    }
  }
}
