// Which view is shown, who is signed in, and the keys that work everywhere.

import * as api from "./api.js";
import { make, moment, show } from "./dom.js";
import * as calibration from "./calibration.js";
import * as requests from "./documents.js";
import * as search from "./search.js";
import * as silos from "./silos.js";
import * as training from "./training.js";

const VIEWS = { search, silos, training, calibration, requests };
const TITLES = { search: "Search", silos: "Silos", training: "Training", calibration: "Calibration", requests: "Requests" };
const place = document.getElementById("view");
let leaving = new AbortController();
let who = { name: "anonymous", scopes: [] };

/** "#/search?q=tides" → ["search", URLSearchParams]. */
function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return [path in VIEWS ? path : "search", new URLSearchParams(query)];
}

async function route() {
  const [name, parameters] = address();
  leaving.abort();
  leaving = new AbortController();
  document.title = `${TITLES[name]} · Isthmus`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  await VIEWS[name].open(place, { parameters, signal: leaving.signal, failed, may: (scope) => who.scopes.includes(scope) || who.scopes.includes("admin") });
}

/** What went wrong, in the place where the answer would be; a missing key asks for one. */
function failed(error, where = place) {
  if (error.name === "AbortError") return;
  if (error.status === 401) { signIn(); return; }
  const wait = error.wait ? ` Try again in ${error.wait} s.` : "";
  show(where, make("div", { class: "notice bad", role: "alert" },
    make("strong", {}, error.title ?? "Something went wrong"), make("p", {}, `${error.detail ?? error.message}${wait}`)));
}

function signIn() {
  const told = make("p", { class: "hint", role: "status" }, "This broker answers those who have a key. Your operator makes one with: isthmus keys api add.");
  const field = make("input", { id: "key", type: "password", required: true, autocomplete: "current-password", spellcheck: "false" });
  const form = make("form", {
    class: "card narrow",
    onsubmit: async (event) => {
      event.preventDefault();
      try {
        await api.enter(field.value.trim());
        await begin();
      } catch (error) {
        told.textContent = error.message;
        told.className = "hint bad";
        field.select();
      }
    },
  }, make("h1", {}, "Sign in"), make("label", { for: "key" }, "API key"), field, told, make("button", { class: "main" }, "Sign in"));
  show(place, form);
  field.focus();
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
  const typing = event.target.closest("input, textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    if (address()[0] !== "search") location.hash = "#/search";
    else document.getElementById("query")?.focus();
  } else if (address()[0] === "search") search.key(event);
});

/** A key in the address, after the # where no server sees it, is taken out, and used by whoever has none yet. */
async function useKey() {
  const [name, parameters] = address();
  const key = parameters.get("key");
  if (!key) return;
  parameters.delete("key");
  history.replaceState(null, "", `#/${name}${[...parameters].length ? `?${parameters}` : ""}`);
  const unknown = await api.me().then(() => false, (error) => error.status === 401);
  if (unknown) await api.enter(key).catch(() => {}); // a wrong one is asked for again
}

async function begin() {
  try {
    await useKey();
    who = await api.me();
    document.getElementById("leave").hidden = who.name === "anonymous";
    warn(who.expires);
    await route();
  } catch (error) {
    failed(error);
  }
}

document.getElementById("leave").addEventListener("click", async () => {
  await api.leave().catch(() => {});
  await begin();
});
window.addEventListener("hashchange", () => { (address()[1].has("key") ? begin() : route()).catch(failed); });
colours();
begin();
