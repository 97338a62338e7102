// The broker's API, version 1.

/** A failure as the broker tells it (problem details), or in our words when it did not answer. */
export class Problem extends Error {
  constructor(status, title, detail, wait) {
    super(detail || title);
    Object.assign(this, { status, title, detail, wait });
  }
}

/** Send a request; a reply that is no success is a Problem. */
async function send(method, path, body, signal) {
  let reply;
  try {
    reply = await fetch(`/v1${path}`, {
      method, signal, credentials: "same-origin",
      headers: body ? { "content-type": "application/json" } : {},
      body: body ? JSON.stringify(body) : undefined,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The broker does not answer", "Is it still running? Try again when it is back.");
  }
  if (reply.ok) return reply;
  const told = await reply.json().catch(() => ({}));
  throw problem(told, reply.status, reply.statusText, Number(reply.headers.get("retry-after")) || null);
}

const problem = (told, status, title, wait = null) => new Problem(status, told.title ?? title, told.detail ?? "", wait);

async function ask(method, path, body, signal) {
  const reply = await send(method, path, body, signal);
  return reply.status === 204 ? null : reply.json();
}

/** A search; `heard` learns of every silo as it answers. What stands between may not let events through: then it is asked plainly. */
export async function search(asked, signal, heard) {
  try {
    const reply = await send("POST", "/search/stream", asked, signal);
    for await (const [name, data] of events(reply.body)) {
      if (name === "silo") heard(data);
      else if (name === "answer") return data;
      else if (name === "error") throw problem(data, data.status, "The search failed");
    }
  } catch (error) {
    const unheard = error.name === "AbortError" || (error instanceof Problem && ![0, 404, 405].includes(error.status));
    if (unheard) throw error;
  }
  return ask("POST", "/search", asked, signal);
}

/** Server-sent events of a body: [name, data] each. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const [, name] = /^event: (.*)$/m.exec(part) ?? [], [, data] = /^data: (.*)$/m.exec(part) ?? [];
      if (name && data) yield [name, JSON.parse(data)];
    }
  }
}

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
export const keys = (signal) => ask("GET", "/keys", null, signal);
export const revoke = (id) => ask("DELETE", `/keys/${id}`);
export const sessions = (signal) => ask("GET", "/sessions", null, signal);
export const endSessions = (person) => ask("DELETE", `/sessions?${new URLSearchParams({ person })}`);
export const me = () => ask("GET", "/me");
export const ways = () => ask("GET", "/session");
export const enter = (key) => ask("POST", "/session", { key });
export const leave = () => ask("DELETE", "/session");
