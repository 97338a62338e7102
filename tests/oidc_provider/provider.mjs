// A certified OpenID Connect provider for tests: node provider.mjs PEOPLE.json REDIRECT_URI CLIENT_SECRET
// People are read again for every question about them; whoever types a name that is listed is signed in.

import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { Provider } from "oidc-provider";

const [people, redirect, secret] = process.argv.slice(2);
const server = createServer();
server.listen(0, "127.0.0.1", () => {
  const issuer = `http://localhost:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [{
      client_id: "isthmus", client_secret: secret, redirect_uris: [redirect],
      grant_types: ["authorization_code", "refresh_token"], response_types: ["code"],
    }],
    pkce: { required: () => true },
    claims: { openid: ["sub"], profile: ["name", "groups"], email: ["email", "email_verified"] },
    issueRefreshToken: () => true,
    findAccount: (context, id) => {
      const person = JSON.parse(readFileSync(people, "utf8"))[id];
      return person && { accountId: id, claims: () => ({ sub: id, ...person }) };
    },
  });
  server.on("request", provider.callback());
  console.log(issuer);
});
process.stdin.on("end", () => process.exit(0)).resume();
