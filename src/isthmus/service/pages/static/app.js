// Which view is shown, who is signed in, and the keys that work everywhere.

import * as api from "./api.js";
import { make, moment, show } from "./dom.js";
import * as admin from "./admin.js";
import * as calibration from "./calibration.js";
import * as requests from "./documents.js";
import * as search from "./search.js";
import * as silos from "./silos.js";
import * as training from "./training.js";

const VIEWS = { search, silos, training, calibration, requests, admin };
const TITLES = { search: "Search", silos: "Silos", training: "Training", calibration: "Calibration", requests: "Requests", admin: "Admin" };
const place = document.getElementById("view");
let leaving = new AbortController();
let who = { name: "anonymous", scopes: [] };

/** "#/search?q=tides" → ["search", URLSearchParams]. */
function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return [path in VIEWS ? path : "search", new URLSearchParams(query)];
}

const may = (scope) => who.scopes.includes(scope) || (scope !== "audit" && who.scopes.includes("admin"));

/** Show the view of the address. Whoever came from another one is taken to its heading, with keyboard and ear. */
async function route(moved = false) {
  const [name, parameters] = address();
  leaving.abort();
  leaving = new AbortController();
  document.title = `${TITLES[name]} · Isthmus`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!may("search")) { noRights(); return; }
  const opening = VIEWS[name].open(place, { parameters, signal: leaving.signal, failed, may, me: who.name });
  if (moved && !place.contains(document.activeElement)) toHeading();
  await opening;
}

function toHeading() {
  const heading = place.querySelector("h1");
  heading?.setAttribute("tabindex", "-1");
  heading?.focus();
  window.scrollTo(0, 0);
}

/** Somebody who is known, and may not search. */
function noRights() {
  const scopes = who.scopes.length ? `Your key is good for: ${who.scopes.join(", ")}.` : "Your key is good for nothing here.";
  show(place, make("div", { class: "page" }, make("h1", {}, "No right to search"),
    make("p", { class: "notice" }, `${scopes} Searching needs the scope search: ask the operator of this page.`)));
}

const sentence = (text) => text && `${text[0].toUpperCase()}${text.slice(1)}${/[.?!]$/.test(text) ? "" : "."}`;

/** What went wrong, in the place where the answer would be; a missing key asks for one, and says why that of a link is none (`refusal`). */
function failed(error, where = place, refusal = "") {
  if (error.name === "AbortError") return;
  if (error.status === 401) { signIn(error.detail, refusal).catch((other) => failed(other)); return; }
  const wait = error.wait ? ` Try again in ${error.wait} s.` : "";
  show(where, make("div", { class: "notice bad", role: "alert" },
    make("strong", {}, error.title ?? "Something went wrong"), make("p", {}, `${sentence(error.detail ?? error.message)}${wait}`)));
}

/** Why nobody came back signed in from the provider, by the broker's word for it. */
const REFUSALS = {
  again: "That sign-in was not begun in this browser, or took too long. Please try again.",
  denied: "The provider did not sign you in.",
  groups: "You are known to the provider, but none of your groups may search here. Ask the operator of this search for access.",
  provider: "The provider does not answer as it should. Try again later; the broker's log says why.",
};

/** The ways in: through a provider, with an API key, or both. */
async function signIn(detail, ofLink) {
  const [, parameters] = address();
  const refusal = ofLink || REFUSALS[parameters.get("signin")];
  const ways = await api.ways();
  who = { name: "anonymous", scopes: [] };
  identify(who);
  const over = detail.startsWith("the session has ended") ? "Your session has ended. Please sign in again." : "";
  const keyed = "This broker answers those who have a key. Your operator makes one with: isthmus keys api add.";
  const told = make("p", { class: refusal ? "hint bad" : "hint", role: refusal ? "alert" : "status" },
    refusal || over || (ways.provider ? `You sign in at ${ways.provider}, where your organisation knows you.` : keyed));
  const field = make("input", { id: "key", type: "password", required: true, autocomplete: "current-password", spellcheck: "false" });
  const submit = async (event) => {
    event.preventDefault();
    try {
      await api.enter(field.value.trim());
      await begin();
    } catch (error) {
      told.textContent = error.message;
      told.className = "hint bad";
      field.select();
    }
  };
  const button = make("button", { class: ways.provider ? "" : "main" }, "Sign in");
  const form = make("form", { onsubmit: submit }, make("label", { for: "key" }, "API key"), field, button);
  const away = make("a", { class: "main", href: "/v1/signin", onclick: remember }, `Sign in at ${ways.provider}`);
  show(place, make("div", { class: "card narrow" }, make("h1", {}, "Sign in"), told,
    ways.provider ? away : "",
    ways.provider && ways.key ? make("details", {}, make("summary", {}, "With an API key"), form) : "",
    !ways.provider ? form : ""));
  (ways.provider ? away : field).focus();
}

/** Where somebody was, for when they are back from the provider. */
function remember() {
  const [name, parameters] = address();
  parameters.delete("signin");
  try { sessionStorage.setItem("isthmus-place", `#/${name}${[...parameters].length ? `?${parameters}` : ""}`); } catch { /* then they begin anew */ }
}

function goBack() {
  let before = null;
  try {
    before = sessionStorage.getItem("isthmus-place");
    sessionStorage.removeItem("isthmus-place");
  } catch { /* nothing was remembered */ }
  if (address()[1].has("signin")) before ??= "#/search";
  if (before && ["", "#/search"].includes(location.hash.split("?")[0])) history.replaceState(null, "", before);
}

/** Who is signed in, at the top. */
function identify({ name = "anonymous", label = "", groups = [] }) {
  const mark = document.getElementById("who");
  mark.textContent = label || name;
  mark.title = groups.length ? `Groups: ${groups.join(", ")}` : "";
  mark.hidden = document.getElementById("leave").hidden = name === "anonymous";
  for (const link of document.querySelectorAll("nav[aria-label=Views] a")) {
    link.hidden = !may(link.hash === "#/admin" ? "admin" : "search");
  }
}

/** A key that ends within two weeks, above every view. */
function warn(expires) {
  document.getElementById("key-ends")?.remove();
  if (!expires || new Date(expires) - Date.now() > 14 * 86400e3) return;
  place.before(make("p", { id: "key-ends", class: "notice", role: "status" },
    `Your API key ends on ${moment(expires)}. Ask your operator for a new one.`));
}

function colours() {
  const button = document.getElementById("theme");
  const choices = ["auto", "light", "dark"];
  const words = { auto: "as the system has them", light: "light", dark: "dark" };
  const marks = { auto: "◐", light: "○", dark: "●" };
  const tell = (chosen) => {
    button.textContent = marks[chosen];
    button.setAttribute("aria-label", `Colours: ${words[chosen]}`);
    button.title = `Colours: ${words[chosen]}`;
  };
  let chosen = document.documentElement.dataset.theme ?? "auto";
  tell(chosen);
  button.addEventListener("click", () => {
    chosen = choices[(choices.indexOf(chosen) + 1) % 3];
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    try { localStorage.setItem("isthmus-theme", chosen); } catch { /* it then lasts as long as the page */ }
    tell(chosen);
  });
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=checkbox], [type=range]), textarea, select");
  const slides = event.target.matches("input[type=range]") && event.key.startsWith("Arrow");
  if (typing || slides || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    if (address()[0] !== "search") location.hash = "#/search";
    else document.getElementById("query")?.focus();
  } else if (address()[0] === "search") search.key(event);
});

/** A key in the address, after the # where no server sees it, is taken out, and used by whoever has none yet. Returns why it is none, or "". */
async function useKey() {
  const [name, parameters] = address();
  const key = parameters.get("key");
  if (!key) return "";
  parameters.delete("key");
  history.replaceState(null, "", `#/${name}${[...parameters].length ? `?${parameters}` : ""}`);
  const unknown = await api.me().then(() => false, (error) => error.status === 401);
  if (!unknown) return "";
  return api.enter(key).then(() => "", (error) => (error.status === 401 ? "The key of this link is unknown, revoked or expired." : error.message));
}

async function begin() {
  let refusal = "";
  try {
    refusal = await useKey();
    who = await api.me();
    identify(who);
    goBack();
    warn(who.expires);
    await route();
  } catch (error) {
    failed(error, place, refusal);
  }
}

document.getElementById("leave").addEventListener("click", async () => {
  await api.leave().catch(() => {});
  await begin();
  const { provider } = await api.ways().catch(() => ({}));
  if (provider) place.querySelector(".card")?.append(make("a", { href: "/v1/signin/end" }, `Sign out at ${provider} too`));
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names a view, not a place in it
  place.focus();
  place.scrollIntoView();
});
window.addEventListener("hashchange", () => { (address()[1].has("key") || !who.scopes.length ? begin() : route(true)).catch(failed); });
colours();
begin();
