// What was found, opened: by whose right it is, else asked of its owner; and what owners answer.

import * as api from "./api.js";
import { chip, make, moment, several, show } from "./dom.js";

const STATES = { waiting: "waits for the owner", allowed: "allowed: opens once", denied: "denied", opened: "opened", expired: "allowed too long ago" };

/** What a person may do with a hit's document: buttons, and the place where the document or the form stands. */
export function actions(hit, query, may) {
  const access = hit.access ?? [];
  const place = make("div", { class: "opened" });
  const opens = access.includes("open") && may("documents");
  const parts = [hit.link && URL.canParse(hit.link) ? link(hit.link) : null];
  if (opens) parts.push(button("open", hit, () => toggle(place, () => opened(place, () => api.open(hit.silo, hit.document, { ticket: hit.ticket })))));
  else if (access.includes("ask")) parts.push(button("ask the owner", hit, () => toggle(place, () => ask(place, form(hit, query, access.includes("name"), place)))));
  return parts.some(Boolean) ? { element: make("span", { class: "document-acts" }, parts), place } : null;
}

/** A link shows where it leads: the silo chose it. */
function link(address) {
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer", class: "small" }, `at ${new URL(address).host}`);
}

function button(text, hit, onclick) {
  return make("button", { type: "button", class: "quiet small", "aria-label": `${text}: ${hit.title || hit.document}`, onclick }, text);
}

/** Open what belongs to the button that has the focus, or close it; so does Escape. */
function toggle(place, fill) {
  if (place.childNodes.length) { show(place); return; }
  const button = document.activeElement;
  place.onkeydown = (event) => { if (event.key === "Escape") { show(place); button.focus(); } };
  fill();
}

/** Words in the place of what had the focus, which goes to them. */
function say(place, ...words) {
  const told = make("p", { class: "hint", role: "status", tabindex: "-1" }, ...words);
  show(place, told);
  told.focus();
}

async function opened(place, fetch) {
  show(place, make("p", { class: "hint", role: "status" }, "opening…"));
  try {
    const { title, body, characters } = await fetch();
    const cut = characters > body.length ? make("p", { class: "hint" }, `The beginning; the whole has ${several(characters, "character")}.`) : null;
    show(place, make("article", { class: "text", tabindex: "0", "aria-label": title }, make("h3", {}, title), make("div", { class: "body" }, body), cut));
    place.firstElementChild.focus();
  } catch (error) {
    show(place, make("p", { class: "hint bad", role: "alert" }, error.message));
  }
}

function ask(place, form) {
  show(place, form);
  form.querySelector("textarea").focus();
}

/** A request, which the silo keeps for its owner. */
function form(hit, query, wantsName, place) {
  const reason = make("textarea", { rows: "2", maxlength: "1000", "aria-label": "Why you want it" });
  const named = make("input", { type: "checkbox", checked: wantsName, disabled: wantsName });
  const send = async (event) => {
    event.preventDefault();
    try {
      await api.ask({ silo: hit.silo, ticket: hit.ticket, query, reason: reason.value.trim(), named: named.checked });
      say(place, "Asked. The answer will stand under ", make("a", { href: "#/requests" }, "Requests"), ".");
    } catch (error) {
      show(place, make("p", { class: "hint bad", role: "alert" }, error.message));
    }
  };
  return make("form", { class: "asking", onsubmit: send },
    make("label", {}, "Why you want it ", reason),
    make("label", { class: "pick" }, named, wantsName ? " The owner wants to know who asks: your key's name goes with it." : " Let the owner know my key's name."),
    make("p", { class: "hint" }, `${hit.silo} keeps this with your query; the broker keeps nothing.`),
    make("button", { class: "main small" }, "Ask"));
}

/** The view: one's own requests, and for administrators those that wait. */
export async function open(view, { signal, failed, may }) {
  const own = make("div", { class: "cards" }), others = make("div", { class: "cards" }), closed = make("div");
  show(view, make("div", { class: "page" }, make("h1", {}, "Requests"),
    may("admin") ? [make("h2", { id: "to-answer", tabindex: "-1" }, "To answer"), others] : null, make("h2", {}, "Yours"), own, closed));
  const refresh = async () => {
    try {
      const silentToAll = may("admin") ? await toAnswer(others, refresh, signal) : {};
      const { requests, unanswered } = await api.requests(false, signal);
      show(own, requests.length ? requests.map(card) : make("p", { class: "hint" }, "You have asked for no document. A search offers it where an owner takes requests."));
      show(closed, silent({ ...silentToAll, ...unanswered }));
    } catch (error) {
      failed(error, own);
    }
  };
  await refresh();
}

/** Silos that list no requests, those with the same reason together. */
function silent(unanswered) {
  const silos = Object.keys(unanswered).sort();
  return [...new Set(silos.map((silo) => unanswered[silo]))].map((reason) => make("p", { class: "hint" },
    silos.filter((silo) => unanswered[silo] === reason).map((silo) => [chip(silo), " "]), reason));
}

function facts(each) {
  return [make("p", { class: "where" }, chip(each.silo), make("code", {}, each.document), ` ${moment(each.at)}`),
    make("p", {}, "Searched for ", make("q", {}, each.query)), each.reason ? make("p", {}, each.reason) : null];
}

function card(each) {
  const place = make("div", { class: "opened" });
  const act = each.state === "allowed"
    ? button("open once", each, () => toggle(place, () => opened(place, () => api.open(each.silo, each.document, { request: each.number })))) : null;
  return make("section", { class: "card request", "aria-label": each.document }, facts(each),
    make("p", { class: `state ${each.state}` }, STATES[each.state] ?? each.state, each.word ? `: ${each.word}` : ""), act, place);
}

async function toAnswer(place, refresh, signal) {
  const { requests, unanswered } = await api.requests(true, signal);
  const waiting = requests.filter((each) => each.state === "waiting");
  show(place, waiting.length ? waiting.map((each) => answering(each, refresh)) : make("p", { class: "hint" }, "Nothing waits."));
  return unanswered;
}

function answering(each, refresh) {
  const word = make("input", { type: "text", maxlength: "1000", "aria-label": "A word to the asker" });
  const status = make("span", { class: "hint", role: "status" });
  const say = (allow) => async () => {
    try {
      await api.answer(each.silo, each.number, { allow, word: word.value.trim() });
      await refresh();
      document.getElementById("to-answer")?.focus(); // the buttons are gone
    } catch (error) {
      status.textContent = error.message;
    }
  };
  return make("section", { class: "card request", "aria-label": `${each.person} asks for ${each.document}` }, make("p", {}, make("strong", {}, each.person), " asks for"), facts(each),
    make("label", {}, "A word to them ", word),
    make("p", {}, make("button", { type: "button", class: "main small", onclick: say(true) }, "allow once"), " ",
      make("button", { type: "button", class: "quiet small", onclick: say(false) }, "deny"), " ", status));
}
