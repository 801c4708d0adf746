import permissions from "./permissions.json";
import type { components } from "./schema";

type Schemas = components["schemas"];
type Session = Schemas["Session"];
type Problem = { error?: { message?: string } };
export type Route = keyof typeof permissions;

let current = $state.raw<Session | null>(null);
let token: string | null = null;
/** The project that requests name: of this tab, also after a reload; null leaves the choice to the coordinator. */
let chosen = sessionStorage.getItem("project");
let known = $state(false);
let generation = 0;
let renewing = false;

/** Where the OpenID provider sends the browser back to. */
const CALLBACK = "/sign-in/oidc";
let refusal = $state<string | null>(null);

/**
 * Who is signed in: a user by the session's cookie, which no script can read, or the admin token, which is in this page's memory only
 * and goes when the page does.
 */
export const session = {
  /** Whether it is known yet if the browser has a session. */
  get known(): boolean {
    return known;
  },
  get active(): boolean {
    return current !== null;
  },
  get name(): string {
    return current?.name ?? "";
  },
  get role(): Session["role"] {
    return current?.role ?? "viewer";
  },
  /** How the requests are made: by a session, an access token or the admin token. */
  get kind(): Session["kind"] | null {
    return current?.kind ?? null;
  },
  get expiresAt(): string | null {
    return current?.expires_at ?? null;
  },
  /** The project whose resources are shown; null if the user is in none. */
  get project(): string | null {
    return current?.project ?? null;
  },
  /** Those that the user may choose. */
  get projects(): readonly string[] {
    return current?.projects ?? [];
  },
  /** Shows another project from now on, in this tab. */
  async choose(project: string): Promise<void> {
    name(project);
    const response = await fetch("/api/v1/session", { headers: session.headers }).catch(() => null);
    if (response?.ok) current = (await response.json()) as Session;
    else if (response) name(null);
  },
  /** Whether the role includes another. */
  has(role: Session["role"]): boolean {
    return current?.grants.includes(role) ?? false;
  },
  /** Whether the role may use a route; what it may not is not shown. */
  may(route: Route): boolean {
    return current?.grants.some((role) => role === permissions[route]) ?? false;
  },
  /** What a request needs besides the cookie. */
  get headers(): Record<string, string> {
    const project: Record<string, string> = chosen === null ? {} : { "x-fedloop-project": chosen };
    if (token !== null) return { authorization: `Bearer ${token}`, ...project };
    return current?.csrf_token ? { "x-csrf-token": current.csrf_token, ...project } : project;
  },
  /** Why the sign-in at the OpenID provider was refused; null if it was not. */
  get refusal(): string | null {
    return refusal;
  },
  /** Looks whether the browser has a session already, as after a reload, or comes back from the OpenID provider with a new one. */
  async find(): Promise<void> {
    if (location.pathname === CALLBACK) {
      const { state = "", code, iss, error } = Object.fromEntries(new URLSearchParams(location.search));
      history.replaceState(null, "", "/"); // the code is spent, and belongs in no bookmark
      refusal = await send("/api/v1/session/oidc", { state, code, iss, error }).then(take, String);
      known = true;
      return;
    }
    const response = await fetch("/api/v1/session").catch(() => null);
    current = response?.ok ? ((await response.json()) as Session) : null;
    await settle();
    known = true;
  },
  /** Returns the reason of a refusal; null if it worked. */
  async signIn(name: string, password: string): Promise<string | null> {
    return take(await send("/api/v1/session", { name, password }));
  },
  /** Host of the OpenID provider at which people may sign in; null without one. */
  async provider(): Promise<string | null> {
    const response = await fetch("/api/v1/session/methods").catch(() => null);
    return response?.ok ? ((await response.json()) as Schemas["SignInMethods"]).oidc : null;
  },
  /** Goes to the provider, which sends the browser back to `CALLBACK`. Returns the reason of a refusal. */
  async signInAtProvider(): Promise<string | null> {
    const response = await send("/api/v1/session/oidc/begin", {});
    const answer = (await response.json().catch(() => null)) as (Schemas["OidcBegun"] & Problem) | null;
    if (!response.ok || !answer) return answer?.error?.message ?? response.statusText;
    location.assign(answer.authorization_url);
    return null;
  },
  /** Creates the first account by the secret of the link that `fedloop serve` printed. */
  async setUp(secret: string, name: string, password: string): Promise<string | null> {
    return take(await send("/api/v1/setup", { secret, name, password }));
  },
  async useToken(candidate: string): Promise<string | null> {
    const response = await fetch("/api/v1/session", { headers: { authorization: `Bearer ${candidate}` } });
    if (response.ok) token = candidate; // before views that need it appear
    return take(response);
  },
  async signOut(): Promise<void> {
    // It reaches the coordinator also if the page is left at once.
    if (token === null) await fetch("/api/v1/session", { method: "DELETE", headers: session.headers, keepalive: true });
    session.end();
  },
  /** Makes a request that gives the session a new secret: one under the old secret that is refused meanwhile does not end it. */
  async renew(request: () => Promise<unknown>): Promise<void> {
    renewing = true;
    try {
      await request();
      generation += 1;
      await session.find();
    } finally {
      renewing = false;
    }
  },
  /** What happens when a request is answered 401 that was made in this generation of the session. */
  refused(made: number): void {
    if (made === generation && !renewing) session.end();
  },
  end(): void {
    generation += 1;
    current = null;
    token = null;
    name(null);
  },
  /** Another after every end and every new secret, so that a late answer to one session does not end the next. */
  get generation(): number {
    return generation;
  },
};

function send(path: string, body: object): Promise<Response> {
  return fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
}

async function take(response: Response): Promise<string | null> {
  const answer = (await response.json().catch(() => null)) as (Session & Problem) | null;
  if (!response.ok || !answer) return answer?.error?.message ?? response.statusText;
  current = answer;
  refusal = null;
  await settle();
  return null;
}

function name(project: string | null): void {
  chosen = project;
  if (project === null) sessionStorage.removeItem("project");
  else sessionStorage.setItem("project", project);
}

/** Takes the project of before, or the first one of a user for whom the coordinator cannot choose. */
async function settle(): Promise<void> {
  if (current === null) return;
  const wanted = chosen !== null && current.projects.includes(chosen) ? chosen : (current.project ?? current.projects[0]);
  if (wanted === undefined || wanted === current.project) name(chosen === wanted ? chosen : null);
  else await session.choose(wanted);
}
