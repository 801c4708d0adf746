// A real OpenID provider on loopback: `oidc-provider`, with its own pages to sign in. Its first line of output is its issuer.
// Arguments: a JSON object {clients, users: {login: claims}, alg}.
import { createRequire } from "node:module";
import { generateKeyPairSync } from "node:crypto";
import { pathToFileURL } from "node:url";

const require = createRequire(process.argv[2] + "/");
const { Provider } = await import(pathToFileURL(require.resolve("oidc-provider")));
const { clients, users } = JSON.parse(process.argv[3]);
const { privateKey } = generateKeyPairSync("ec", { namedCurve: "P-256" });

const server = (await import("node:http")).createServer();
server.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients,
    jwks: { keys: [{ ...privateKey.export({ format: "jwk" }), kid: "current", use: "sig", alg: "ES256" }] },
    claims: { openid: ["sub"], profile: ["preferred_username", "groups"], email: ["email"] },
    conformIdTokenClaims: false, // claims of the scopes in the ID token, as most providers can be set to
    pkce: { required: () => true },
    findAccount: (context, login) => ({ accountId: login, claims: () => ({ sub: login, ...users[login] }) }),
    enabledJWA: { idTokenSigningAlgValues: ["ES256"] },
    cookies: { keys: ["a key of tests"] },
  });
  server.on("request", provider.callback());
  console.log(issuer);
});
process.stdin.resume().on("end", () => process.exit(0)); // ends with the test
