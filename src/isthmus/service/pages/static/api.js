// The broker's API, version 1.

/** A failure as the broker tells it (problem details), or in our words when it did not answer. */
export class Problem extends Error {
  constructor(status, title, detail, wait) {
    super(detail || title);
    Object.assign(this, { status, title, detail, wait });
  }
}

async function ask(method, path, body, signal) {
  let reply;
  try {
    reply = await fetch(`/v1${path}`, {
      method, signal, credentials: "same-origin",
      headers: body ? { "content-type": "application/json" } : {},
      body: body ? JSON.stringify(body) : undefined,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The broker does not answer", "Is it still running? The page goes on when it is back.");
  }
  if (reply.ok) return reply.status === 204 ? null : reply.json();
  const told = await reply.json().catch(() => ({}));
  throw new Problem(reply.status, told.title ?? reply.statusText, told.detail ?? "", Number(reply.headers.get("retry-after")) || null);
}

export const search = (asked, signal) => ask("POST", "/search", asked, signal);
export const count = (asked) => ask("POST", "/noised-counts", asked);
export const judge = (verdict) => ask("POST", "/feedback", verdict);
export const judged = (hits, signal) => ask("POST", "/judged", hits, signal);
export const open = (silo, id, by) => ask("GET", `/documents/${encodeURIComponent(silo)}/${id.split("/").map(encodeURIComponent).join("/")}?${new URLSearchParams(by)}`);
const asking = (request) => ask("POST", "/requests", request);
export { asking as ask };
export const requests = (all, signal) => ask("GET", `/requests${all ? "?all=true" : ""}`, null, signal);
export const answer = (silo, number, said) => ask("POST", `/requests/${encodeURIComponent(silo)}/${number}`, said);
export const silos = (signal) => ask("GET", "/silos", null, signal);
export const training = (signal) => ask("GET", "/training", null, signal);
export const learning = (signal) => ask("GET", "/learning", null, signal);
export const learn = () => ask("POST", "/learning", { mode: "masked" });
export const rollback = (version) => ask("POST", "/learning/rollback", { version });
export const calibration = (signal) => ask("GET", "/calibration", null, signal);
export const me = () => ask("GET", "/me");
export const ways = () => ask("GET", "/session");
export const enter = (key) => ask("POST", "/session", { key });
export const leave = () => ask("DELETE", "/session");
