let token = $state<string | null>(null);

/** Who is signed in. The token is in this page's memory only, and goes when the page does. */
export const session = {
  get active(): boolean {
    return token !== null;
  },
  get headers(): Record<string, string> {
    return token === null ? {} : { authorization: `Bearer ${token}` };
  },
  async begin(candidate: string): Promise<string | null> {
    const response = await fetch("/api/v1/system", { headers: { authorization: `Bearer ${candidate}` } });
    if (response.ok) {
      token = candidate;
      return null;
    }
    const answer = (await response.json()) as { error?: { message?: string } };
    return answer.error?.message ?? response.statusText;
  },
  end(): void {
    token = null;
  },
};
