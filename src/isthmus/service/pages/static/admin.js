// For administrators: who has a key or a session, the members of the federation, their budgets, and what waits for an answer.

import * as api from "./api.js";
import { chip, count, decimal, make, moment, several, show, state, table } from "./dom.js";

const SOON = 14 * 86400e3;

export async function open(view, { signal, failed, may, me }) {
  const names = { keys: "API keys", sessions: "Signed in", members: "Members", budgets: "Privacy budgets", requests: "Requests to owners" };
  const parts = Object.fromEntries(Object.keys(names).map((name) => [name, make("div", {}, make("p", { class: "hint" }, "Loading …"))]));
  const said = make("p", { class: "hint", role: "status", tabindex: "-1" });
  show(view, make("div", { class: "page" }, make("h1", {}, "Admin"),
    may("admin") ? [said, Object.entries(names).map(([name, title]) => make("section", { class: "card", "aria-label": title }, make("h2", {}, title), parts[name]))]
      : make("p", { class: "notice" }, "This view is for administrators: it needs a key with the scope admin.")));
  if (!may("admin")) return;
  const fill = async (wanted, fetch, ...draw) => {
    try {
      const answer = await fetch(signal);
      draw.forEach((each, at) => show(parts[wanted[at]], each(answer)));
    } catch (error) {
      failed(error, parts[wanted[0]]);
    }
  };
  /** Do something, say so, and show what is left. */
  const act = (work, told, again) => async () => {
    try {
      await work();
      said.textContent = told;
      await again();
      said.focus(); // the button is gone
    } catch (error) {
      said.textContent = error.message;
    }
  };
  const drawKeys = () => fill(["keys"], api.keys, ({ keys }) => keyTable(keys, me, (key) => act(() => api.revoke(key.id), `The key ${key.id} of ${key.name} is revoked.`, drawKeys)));
  const drawSessions = () => fill(["sessions"], api.sessions, ({ sessions }) => sessionTable(sessions, (person) => act(() => api.endSessions(person), `The sessions of ${person} are ended.`, drawSessions)));
  await Promise.all([
    drawKeys(), drawSessions(), fill(["members", "budgets"], api.silos, members, budgets),
    fill(["requests"], (signal) => api.requests(true, signal), requests)]);
}

/** A button that asks once more before it acts, and forgets it where the focus goes elsewhere. */
function sure(text, what, work) {
  let armed = false;
  const arm = (yes) => {
    armed = yes;
    button.textContent = yes ? `${text}, surely` : text;
    button.setAttribute("aria-label", `${button.textContent}: ${what}`);
  };
  const button = make("button", {
    type: "button", class: "quiet small", onclick: () => (armed ? work() : arm(true)), onblur: () => arm(false),
    onkeydown: (event) => { if (event.key === "Escape") arm(false); },
  });
  arm(false);
  return button;
}

/** One's own key and an auditor's cannot be revoked here. */
function keyTable(keys, me, revoke) {
  const ends = ({ expires }) => (expires ? make("span", { class: new Date(expires) - Date.now() < SOON ? "bad" : "" }, moment(expires)) : "never");
  return [
    make("p", { class: "hint" }, "New keys are made on the broker's machine, because silos decide by their owner: ", make("code", {}, "isthmus keys api add FILE NAME --scopes search,feedback"), "."),
    keys.length ? table("API keys", ["owner", "id", "good for", "groups", "made", "ends", ""], keys.map((key) => [
      key.name, make("code", {}, key.id), key.scopes.join(", "), key.groups.join(", ") || "–", moment(key.created), ends(key),
      key.name === me || key.scopes.includes("audit") ? "" : sure("Revoke", `${key.id} of ${key.name}`, revoke(key))])) : make("p", {}, "There are none: people sign in at the provider, or nobody has to.")];
}

function sessionTable(sessions, end) {
  return sessions.length ? table("Sessions of the page", ["person", "good for", "since", "used", ""], sessions.map((each) => [
    each.name === each.person ? each.name : `${each.name} (${each.person})`, each.scopes.join(", "), moment(each.since), moment(each.used),
    sure("End", each.name, end(each.person))])) : make("p", {}, "Nobody has a session.");
}

function members({ silos }) {
  return table("Silos of this federation", ["silo", "state", "documents", "model", "at"], silos.map((silo) => [
    chip(silo.silo), [state(silo), silo.detail ? ` ${silo.detail}` : ""],
    count(silo.ready?.documents), silo.ready?.model || "–", make("code", {}, silo.url)]));
}

function budgets({ silos }) {
  const rows = silos.flatMap((silo) => (silo.release?.peers ?? []).map((peer) => [
    chip(silo.silo), peer.peer, silo.release.unit, peer.budget === null || peer.budget === undefined ? "none set" : `${decimal(peer.left)} of ${decimal(peer.budget)}`,
    peer.seen === null || peer.seen === undefined ? "–" : `${(100 * peer.seen).toFixed(peer.seen < 0.1 ? 1 : 0)} %`]));
  return rows.length ? table("What peers have left in each silo", ["silo", "peer", "left for each", "ε left", "documents seen in a year"], rows)
    : make("p", {}, "No silo says what its peers have left.");
}

function requests({ requests: all }) {
  const waiting = all.filter((each) => each.state === "waiting").length;
  return make("p", {}, waiting ? `${several(waiting, "request")} for a document ${waiting === 1 ? "waits" : "wait"}: ` : "Nothing waits for an answer. All of them: ",
    make("a", { href: "#/requests" }, "Requests"), ".");
}
