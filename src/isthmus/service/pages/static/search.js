// One box over all silos: hits with their probability, where they are, and why.

import * as api from "./api.js";
import { asker, counts } from "./counts.js";
import { chip, count, decimal, hue, make, percent, rememberSilos, several, show, table, took } from "./dom.js";

const WORDS = {
  answered: "answered", late: "did not answer in time", refused: "refused", down: "is down", broken: "answered nonsense",
};
const SCORERS = { bm25: "BM25", hybrid: "BM25 and encoder in equal shares", learned: "what silos have learned", engine: "the engine's own score" };
const PAUSE = 250; // milliseconds between two questions of one person
let places = null; // the elements of the view that is open

export async function open(view, { parameters, signal, failed, may }) {
  const state = {
    query: parameters.get("q") ?? "", above: Number(parameters.get("above") ?? 0), failed, may,
    without: new Set(parameters.getAll("without")), names: [], asking: null,
  };
  places = build(state);
  show(view, places.root);
  places.query.focus();
  signal.addEventListener("abort", () => { clearTimeout(state.later); state.asking?.abort(); });
  await introduce(state, signal);
  if (state.query) await run(state);
}

function build(state) {
  const query = make("input", {
    id: "query", type: "search", name: "q", maxlength: "2000", autocomplete: "off", spellcheck: "false", enterkeyhint: "search",
    placeholder: "Ask all silos", "aria-label": "Search all silos", value: state.query,
  });
  const form = make("form", {
    role: "search", class: "ask",
    onsubmit: (event) => { event.preventDefault(); state.query = query.value.trim(); keep(state); if (state.query) run(state); },
  }, query, make("button", { class: "main" }, "Search"));
  const label = make("output", { class: "above", for: "above" }, words(state.above));
  const slider = make("input", {
    id: "above", type: "range", min: "0", max: "95", step: "5", value: String(Math.round(state.above * 100)), "aria-describedby": "no-probabilities", disabled: true,
    oninput: () => { state.above = Number(slider.value) / 100; label.textContent = words(state.above); },
    onchange: () => { keep(state); if (state.query) run(state); },
  });
  const reason = make("p", { class: "hint", id: "no-probabilities", role: "status" });
  const filters = make("div", { class: "filters" },
    make("div", { class: "threshold" }, make("label", { for: "above" }, "Only hits that are likely right"), slider, label),
    make("fieldset", { class: "silos", id: "silo-filter" }, make("legend", { class: "unseen" }, "Silos to ask")), reason);
  const status = make("div", { class: "status", role: "status", "aria-live": "polite" });
  const hits = make("ol", { class: "hits", "aria-label": "Hits, best first" });
  const root = make("div", { class: "search" }, make("h1", { class: "unseen" }, "Search"), form, filters, status, hits);
  return { root, query, status, hits, slider, label, reason, filter: filters.querySelector("fieldset") };
}

/** A threshold needs probabilities: without any its control is off, and says what to do. */
function allowThreshold(state, probable) {
  const { slider, label, reason } = places;
  slider.disabled = !probable;
  if (!probable && state.above) {
    state.above = 0;
    keep(state);
  }
  slider.value = String(Math.round(state.above * 100));
  label.textContent = probable ? words(state.above) : "off";
  show(reason, probable ? null : [
    "No probabilities yet: the silos have not learned from judgements. Say right or wrong to hits, or import judgements (",
    make("code", {}, "isthmus judgements import"), "); then ",
    state.may("admin") ? [make("a", { href: "#/training" }, "let the silos learn"), "."] : "an administrator lets the silos learn."].flat());
}

const words = (above) => (above ? `${percent(above)} or more` : "all");

/** Who can be asked, before anything is. */
async function introduce(state, signal) {
  try {
    const [view, learning] = await Promise.all([api.silos(signal), api.learning(signal)]);
    const { silos } = view;
    state.names = silos.map((silo) => silo.silo);
    state.counting = new Set(silos.filter(counts).map((silo) => silo.silo));
    state.learned = Boolean(learning.current) && learning.current !== "none";
    if (state.learned || !state.query) allowThreshold(state, state.learned);
    rememberSilos(state.names);
    const documents = silos.reduce((sum, silo) => sum + (silo.ready?.documents ?? 0), 0);
    if (!state.query) show(places.status, make("p", {}, `${several(documents, "document")} in ${several(state.names.length, "silo")}.`), invite(view));
    show(places.filter, places.filter.querySelector("legend"), state.names.map((name) => toggle(name, state)));
  } catch (error) {
    state.failed(error, places.status);
  }
}

/** What the operator says is right here, and queries to try. */
function invite({ about, queries = [] }) {
  const links = queries.map((query) => make("li", {}, make("a", { href: `#/search?${new URLSearchParams({ q: query })}` }, query)));
  return [about ? make("p", { id: "about" }, about) : null, links.length ? make("ul", { id: "queries", "aria-label": "Queries to try" }, links) : null];
}

function toggle(name, state) {
  const box = make("input", {
    type: "checkbox", checked: !state.without.has(name),
    onchange: () => {
      if (box.checked) state.without.delete(name); else state.without.add(name);
      if (state.without.size === state.names.length) { state.without.clear(); tick(); }
      keep(state);
      if (state.query) run(state);
    },
  });
  const tick = () => places.filter.querySelectorAll("input").forEach((each) => { each.checked = true; });
  return make("label", { class: `chip pick ${hue(name)}` }, box, name);
}

/** The address says what is shown, so that it can be sent to somebody. */
function keep(state) {
  const kept = new URLSearchParams();
  if (state.query) kept.set("q", state.query);
  if (state.above) kept.set("above", String(state.above));
  for (const name of state.without) kept.append("without", name);
  history.replaceState(null, "", `#/search${[...kept].length ? `?${kept}` : ""}`);
}

/** Ask at once; but not again while the same is being asked, nor more often than anybody reads answers. */
function run(state) {
  const question = JSON.stringify([state.query, state.above, [...state.without]]);
  if (state.asking && state.question === question) return state.running;
  state.question = question;
  state.asking?.abort();
  clearTimeout(state.later);
  const wait = (state.asked ?? -PAUSE) + PAUSE - performance.now();
  if (wait <= 0) return (state.running = ask(state));
  places.root.classList.add("busy");
  state.later = setTimeout(() => { state.running = ask(state); }, wait);
  return state.running;
}

async function ask(state) {
  state.asked = performance.now();
  const asking = (state.asking = new AbortController());
  const asked = { query: state.query, k: 20, explain: true, threshold: state.above };
  if (state.without.size) asked.silos = state.names.filter((name) => !state.without.has(name));
  places.root.classList.add("busy");
  try {
    const answer = await api.search(asked, asking.signal);
    rememberSilos(answer.silos.map((silo) => silo.silo));
    const probable = answer.hits.some((hit) => hit.probability !== null) || answer.below > answer.without_probability;
    if (answer.hits.length + answer.below || places.slider.disabled) allowThreshold(state, probable || state.learned);
    if (asked.threshold && !state.above) return (state.running = ask(state)); // nothing could pass it
    const verdicts = new Map();
    show(places.status, summary(answer, state), answer.unlike ? unlike() : null, answer.hits.length ? null : nothing(answer));
    show(places.hits, answer.hits.map((hit) => item(hit, asked.query, probable, state.may("feedback") ? verdicts : null)));
    places.root.classList.remove("busy");
    await remember(asked.query, verdicts, asking.signal);
  } catch (error) {
    if (error.name === "AbortError") return; // another question has taken its place
    show(places.hits);
    state.failed(error, places.status);
  } finally {
    if (state.asking === asking) {
      places.root.classList.remove("busy");
      state.asking = null;
    }
  }
}

/** What this person judged of the hits before, on each of them. */
async function remember(query, verdicts, signal) {
  if (!verdicts.size) return;
  const hits = [...verdicts.keys()];
  try {
    const { relevant } = await api.judged({ query, hits: hits.map(({ silo, token }) => ({ silo, token })) }, signal);
    hits.forEach((hit, at) => verdicts.get(hit)(relevant[at]));
  } catch (error) {
    if (error.name === "AbortError") throw error; // otherwise the hits stand without
  }
}

const unlike = () => make("p", { class: "notice" },
  "No judged query is like this one: how likely its hits are is little known, and stands near the share of all hits that were right.");

function summary(answer, { query, above, counting }) {
  const answered = answer.silos.filter((silo) => silo.status === "answered");
  const others = answer.silos.filter((silo) => silo.status !== "answered" || silo.detail);
  const searched = answered.reduce((sum, silo) => sum + (silo.documents ?? 0), 0);
  const unlikely = answer.below - answer.without_probability;
  const left = (unlikely ? `, ${several(unlikely, "hit")} below ${percent(answer.threshold)} left out` : "")
    + (answer.without_probability ? `, ${several(answer.without_probability, "hit")} without a probability left out` : "");
  const ways = [...new Set(answered.map((silo) => SCORERS[silo.scorer] ?? silo.scorer).filter(Boolean))].sort();
  return make("div", {},
    make("p", {}, `${answered.length} of ${several(answer.silos.length, "silo")} answered in ${took(answer.took_ms)}`
      + ` from ${several(searched, "document")}${left}${ways.length ? `, ranked by ${ways.join(" / ")}` : ""}.`),
    others.map((silo) => make("p", { class: "warn" }, chip(silo.silo), ` ${WORDS[silo.status] ?? silo.status}${silo.detail ? `: ${silo.detail}` : ""}`,
      silo.status === "refused" && counting?.has(silo.silo) ? asker(silo.silo, query, above) : null)));
}

function nothing(answer) {
  if (!answer.silos.some((silo) => silo.status === "answered")) return make("p", { class: "notice bad" }, "No silo answered.");
  const unlikely = answer.below - answer.without_probability;
  const message = unlikely
    ? `Nothing is ${percent(answer.threshold)} likely or more. ${several(unlikely, "hit")} would show below that.`
    : answer.without_probability
      ? `${several(answer.without_probability, "hit")} without a probability: set the threshold to 0 to see them.`
      : "No silo holds a document with these words.";
  return make("p", { class: "notice" }, message);
}

function item(hit, query, probable, verdicts) {
  const known = hit.probability !== null && hit.probability !== undefined;
  const bar = !probable ? null : known
    ? make("div", { class: "chance", role: "img", "aria-label": `${percent(hit.probability)} likely to be right` },
      make("span", { class: "number" }, percent(hit.probability)),
      make("span", { class: "track" }, make("span", { class: "fill", width: `${hit.probability * 100}%` })))
    : make("div", { class: "chance none" }, "no probability");
  const judging = hit.token && verdicts ? verdict(hit, query) : null;
  if (judging) verdicts.set(hit, judging.tell);
  const why = hit.explanation?.length ? make("details", { class: "why" }, make("summary", {}, "Why this result?"), reasons(hit)) : null;
  return make("li", { class: probable ? "hit" : "hit plain", tabindex: "-1" }, bar,
    make("div", { class: "found" },
      make("h2", {}, hit.title || hit.document),
      make("p", { class: "where" }, chip(hit.silo), make("code", {}, hit.document)),
      hit.snippet ? make("p", { class: "snippet" }, marked(hit.snippet, query))
        : make("p", { class: "snippet none" }, "This silo shows no text."),
      make("div", { class: "acts" }, why, judging?.element)));
}

/** The snippet with the words of the query marked; a word's beginning is enough, as the index stems. */
function marked(text, query) {
  const stems = query.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter((word) => word.length > 2)
    .map((word) => word.slice(0, Math.max(4, word.length - 3)));
  if (!stems.length) return text;
  return text.split(/([\p{L}\p{N}]+)/u).map((part) => (stems.some((stem) => part.toLowerCase().startsWith(stem)) ? make("mark", {}, part) : part));
}

function reasons(hit) {
  const most = Math.max(...hit.explanation.map((part) => Math.abs(part.contribution)), 1e-9);
  const sum = hit.explanation.reduce((total, part) => total + part.contribution, 0);
  const logit = hit.probability > 0 && hit.probability < 1 ? Math.log(hit.probability / (1 - hit.probability)) : null;
  const columns = [
    ["retriever", (part) => part.retriever],
    ["raw score", (part) => (part.raw === null ? (["start", "profile"].includes(part.retriever) ? "" : "not returned") : decimal(part.raw, 3))],
    ["probability", (part) => percent(part.probability), (part) => part.probability],
    ["weight", (part) => decimal(part.weight), (part) => part.weight],
    [hit.probability === null ? "adds to the score" : "adds to the log-odds", (part) => pull(part.contribution, most)],
  ].filter(([, , given]) => !given || hit.explanation.some((part) => given(part) !== null)); // what nobody knows is not asked
  return make("div", {},
    table("What every retriever said about this hit", columns.map(([head]) => head),
      hit.explanation.map((part) => columns.map(([, cell]) => cell(part)))),
    logit === null ? null : make("p", { class: "hint" },
      `Together ${odds(sum)}; added to the start that all hits of this silo share, the log-odds are ${odds(logit)}, which is ${percent(hit.probability)}.`));
}

const odds = (value) => (Math.abs(value) < 0.005 ? "0.00" : decimal(value));

function pull(value, most) {
  const half = `${(Math.abs(value) / most) * 50}%`;
  return make("span", { class: "pull" },
    make("span", { class: "side" }, make("span", { class: `fill ${value < 0 ? "down" : "up"}`, width: half })),
    make("span", { class: "number" }, `${value < 0 ? "" : "+"}${odds(value)}`));
}

/** Right or wrong, as this person has it; pressed again it is taken back. `tell` shows what was judged before. */
function verdict(hit, query) {
  const status = make("span", { class: "hint", role: "status" });
  let current = null, touched = false;
  const tell = (relevant) => {
    current = relevant ?? null;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.relevant === String(current)));
    status.textContent = current === null ? "" : `kept by ${hit.silo} alone`;
  };
  const say = (relevant) => async () => {
    const wanted = relevant === current ? null : relevant;
    touched = true;
    try {
      await api.judge({ query, silo: hit.silo, token: hit.token, relevant: wanted });
      tell(wanted);
      if (wanted === null) status.textContent = "taken back";
    } catch (error) {
      status.textContent = error.message;
    }
  };
  const button = (relevant, text) => make("button", {
    type: "button", class: "quiet small", "data-relevant": String(relevant), "aria-pressed": "false",
    "aria-label": `${text}: ${hit.title || hit.document}`, title: `${text}; once more takes it back`, onclick: say(relevant),
  }, text);
  const buttons = [button(true, "right"), button(false, "wrong")];
  return { element: make("span", { class: "verdict" }, buttons, status), tell: (relevant) => { if (!touched) tell(relevant); } };
}

/** j and k walk through the hits, w opens the reasons. */
export function key(event) {
  const hits = [...(places?.hits.children ?? [])];
  const at = hits.findIndex((hit) => hit.contains(document.activeElement));
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  if (step && hits.length && (at >= 0 || step > 0)) {
    event.preventDefault();
    const next = hits[Math.min(Math.max(at + step, 0), hits.length - 1)];
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  } else if (event.key === "w" && at >= 0) {
    const why = hits[at].querySelector("details");
    if (why) why.open = !why.open;
  }
}
