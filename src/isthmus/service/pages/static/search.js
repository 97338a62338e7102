// One box over all silos: hits with their probability, where they are, and why.

import * as api from "./api.js";
import { asker, counts } from "./counts.js";
import { actions } from "./documents.js";
import { chip, count, decimal, hue, make, percent, rememberSilos, several, show, table, took } from "./dom.js";

const WORDS = {
  answered: "answered", late: "did not answer in time", refused: "refused", down: "is down", broken: "answered nonsense",
};
const SCORERS = { bm25: "BM25", hybrid: "BM25 and encoder in equal shares", learned: "what silos have learned", date: "date", engine: "the engine's own score" };
const MEANT = {
  phrase: (value) => `“${value}”`, without: (value) => `without ${value}`, prefix: (value) => `${value}…`,
  silo: (value) => `in ${value}`, other_silo: (value) => `not in ${value}`, type: (value) => `type ${value}`,
  other_type: (value) => `not type ${value}`, after: (value) => `from ${value}`, before: (value) => `before ${value}`,
};
const PAUSE = 250; // milliseconds between two questions of one person
const PAGE = 20, DEEPEST = 100; // hits of a page, and of all pages
const SHOWN = 8; // values of a facet
let places = null; // the elements of the view that is open

export async function open(view, { parameters, signal, failed, may }) {
  const state = {
    query: parameters.get("q") ?? "", above: Number(parameters.get("above") ?? 0), failed, may, page: pageOf(parameters),
    without: new Set(parameters.getAll("without")), names: [], asking: null,
  };
  places = build(state);
  show(view, places.root);
  places.query.focus();
  signal.addEventListener("abort", () => { clearTimeout(state.later); state.asking?.abort(); });
  await introduce(state, signal);
  if (!state.query) return;
  keep(state, "replaceState");
  await run(state);
}

const pageOf = (parameters) => Math.min(Math.max(Math.trunc(Number(parameters.get("page"))) || 1, 1), DEEPEST / PAGE);

function build(state) {
  const query = make("input", {
    id: "query", type: "search", name: "q", maxlength: "2000", autocomplete: "off", spellcheck: "false", enterkeyhint: "search",
    placeholder: "Ask all silos", "aria-label": "Search all silos", value: state.query,
  });
  const form = make("form", {
    role: "search", class: "ask",
    onsubmit: (event) => { event.preventDefault(); go(state, { query: query.value.trim() }); },
  }, query, make("button", { class: "main" }, "Search"));
  const label = make("output", { class: "above", for: "above" }, words(state.above));
  const slider = make("input", {
    id: "above", type: "range", min: "0", max: "95", step: "5", value: String(Math.round(state.above * 100)), "aria-describedby": "no-probabilities", disabled: true,
    oninput: () => { state.above = Number(slider.value) / 100; label.textContent = words(state.above); },
    onchange: () => go(state, {}),
  });
  const reason = make("p", { class: "hint", id: "no-probabilities", role: "status" });
  const filters = make("div", { class: "filters" },
    make("div", { class: "threshold" }, make("label", { for: "above" }, "Only hits that are likely right"), slider, label),
    make("fieldset", { class: "silos", id: "silo-filter" }, make("legend", { class: "unseen" }, "Silos to ask")), reason);
  const status = make("div", { class: "status", role: "status", "aria-live": "polite" });
  const hits = make("ol", { class: "hits", "aria-label": "Hits, best first" });
  const understood = make("div", { class: "understood", id: "understood" });
  const facets = make("aside", { class: "facets", "aria-label": "Matches by silo, type and year", hidden: true });
  const pages = make("nav", { class: "pages", "aria-label": "Pages" });
  const root = make("div", { class: "search" }, make("h1", { class: "unseen" }, "Search"), form, understood, filters, status,
    make("div", { class: "results" }, make("div", {}, hits, pages), facets));
  return { root, query, status, hits, slider, label, reason, understood, facets, pages, filter: filters.querySelector("fieldset") };
}

/** A threshold needs probabilities: without any its control is off, and says what to do. */
function allowThreshold(state, probable) {
  const { slider, label, reason } = places;
  slider.disabled = !probable;
  if (!probable && state.above) {
    state.above = 0;
    keep(state, "replaceState");
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
    state.counting = new Set(state.may("counts") ? silos.filter(counts).map((silo) => silo.silo) : []);
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
      go(state, {});
    },
  });
  const tick = () => places.filter.querySelectorAll("input").forEach((each) => { each.checked = true; });
  return make("label", { class: `chip pick ${hue(name)}` }, box, name);
}

/** What a search is called in the address, so that it can be sent to somebody. */
function address({ query, above, without, page }) {
  const kept = new URLSearchParams();
  if (query) kept.set("q", query);
  if (above) kept.set("above", String(above));
  for (const name of without) kept.append("without", name);
  if (page > 1) kept.set("page", String(page));
  return `#/search${[...kept].length ? `?${kept}` : ""}`;
}

/** The address says what is shown, and the way back leads to what was. */
function keep(state, how = "pushState") {
  const next = address(state);
  if (next !== location.hash) history[how](null, "", next);
  const page = state.page > 1 ? ` (page ${state.page})` : "";
  document.title = `${state.query ? state.query + page : "Search"} · Isthmus`;
}

/** Another search: the first page of it, unless one is named. */
function go(state, changes) {
  Object.assign(state, { page: 1 }, changes);
  if (!state.query) { location.hash = "#/search"; return; }
  places.query.value = state.query;
  keep(state);
  run(state);
}

/** A link to another search, which is made in place. */
function link(state, changes, attributes, ...children) {
  const onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a window of its own
    event.preventDefault();
    go(state, changes);
    window.scrollTo(0, 0);
  };
  return make("a", { ...attributes, href: address({ ...state, page: 1, ...changes }), onclick }, ...children);
}

/** Ask at once; but not again while the same is being asked, nor more often than anybody reads answers. */
function run(state) {
  const question = JSON.stringify([state.query, state.above, [...state.without], state.page]);
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
  const asked = {
    query: state.query, k: PAGE, offset: (state.page - 1) * PAGE, explain: true, threshold: state.above, facets: true, suggest: true,
  };
  if (state.without.size) asked.silos = state.names.filter((name) => !state.without.has(name));
  places.root.classList.add("busy");
  try {
    const answer = await api.search(asked, asking.signal);
    rememberSilos(answer.silos.map((silo) => silo.silo));
    const probable = answer.hits.some((hit) => hit.probability !== null) || answer.below > answer.without_probability;
    if (answer.hits.length + answer.below || places.slider.disabled) allowThreshold(state, probable || state.learned);
    if (asked.threshold && !state.above) return (state.running = ask(state)); // nothing could pass it
    const verdicts = new Map();
    show(places.understood, understood(state, answer.understood));
    show(places.status, summary(answer, state), answer.unlike ? unlike() : null, suggestion(state, answer.suggestion),
      answer.hits.length ? null : nothing(answer));
    show(places.hits, answer.hits.map((hit) => item(hit, asked.query, probable, state.may("feedback") ? verdicts : null, answer.understood.marked, state.may)));
    show(places.pages, pages(state, answer));
    show(places.facets, facets(state, answer));
    places.facets.hidden = !places.facets.children.length;
    places.root.classList.remove("busy");
    await remember(asked.query, verdicts, asking.signal);
  } catch (error) {
    if (error.name === "AbortError") return; // another question has taken its place
    for (const place of ["hits", "pages", "facets", "understood"]) show(places[place]);
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

/** What the query was understood as, every part with a way to take it out; and what may have been meant. */
function understood(state, { parts, hints }) {
  const without = ({ start, end }) => {
    const signs = [...state.query]; // characters, as the broker counts them
    signs.splice(start, end - start);
    return signs.join("").replace(/\s+/g, " ").trim();
  };
  return [
    ...parts.map((part) => {
      const meant = (MEANT[part.kind] ?? String)(part.value);
      return make("span", { class: "chip accent part" }, meant,
        make("button", { type: "button", "aria-label": `Remove: ${meant}`, onclick: () => go(state, { query: without(part) }) }, "×"));
    }),
    ...hints.map((hint) => make("p", { class: "hint" }, hint)),
  ];
}

const suggestion = (state, other) => (other
  ? make("p", { class: "notice", id: "suggestion" }, "Did you mean ", link(state, { query: other.query }, {}, other.query), "?") : null);

/** The page before and the page after, as far as pages go. */
function pages(state, { more, hits }) {
  if (state.page === 1 && !more) return null;
  return [
    state.page > 1 ? link(state, { page: state.page - 1 }, { rel: "prev" }, "← Previous") : null,
    make("span", {}, hits.length ? `Hits ${(state.page - 1) * PAGE + 1} to ${(state.page - 1) * PAGE + hits.length}` : "No further hits"),
    more ? link(state, { page: state.page + 1 }, { rel: "next" }, "Next →") : null,
  ];
}

/** How many documents match, by silo, type and year; each value leads to the search that has it. */
function facets(state, { facets: counts, understood: { parts }, silos: asked }) {
  if (!counts) return null;
  const has = (...kinds) => parts.some((part) => kinds.includes(part.kind));
  const quoted = (value) => (/\s/.test(value) ? `"${value}"` : value);
  const groups = [
    ["Silo", counts.silos, has("silo"), (value) => `silo:${value}`],
    ["Type", counts.types, has("type"), (value) => `type:${quoted(value)}`],
    ["Year", counts.years, has("after", "before"), (value) => `after:${value.padStart(4, "0")} before:${String(Number(value) + 1).padStart(4, "0")}`],
  ];
  const entries = (values) => Object.entries(values).slice(-SHOWN).reverse(); // years: an object has numbers in ascending order
  const first = (values) => Object.entries(values).slice(0, SHOWN);
  const some = asked.length > Object.keys(counts.silos).length ? " in silos that count" : "";
  return [
    make("p", { class: "hint" }, `${several(counts.matches, "document")}${some} with any of the words${has("phrase", "without", "prefix", "type", "after", "before") ? " and all the rest" : ""}.`),
    groups.map(([head, values, chosen, written]) => {
      const rows = head === "Year" ? entries(values) : first(values);
      return rows.length ? make("section", {}, make("h2", {}, head), make("ul", {}, rows.map(([value, number]) => make("li", {},
        chosen ? make("span", {}, value) : link(state, { query: `${state.query} ${written(value)}` }, {}, value),
        make("span", { class: "number" }, count(number)))))) : null;
    })];
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
  if (answer.offset) return null; // the pages say so
  if (!answer.silos.some((silo) => silo.status === "answered")) return make("p", { class: "notice bad" }, "No silo answered.");
  const unlikely = answer.below - answer.without_probability;
  const message = unlikely
    ? `Nothing is ${percent(answer.threshold)} likely or more. ${several(unlikely, "hit")} would show below that.`
    : answer.without_probability
      ? `${several(answer.without_probability, "hit")} without a probability: set the threshold to 0 to see them.`
      : answer.understood.parts.length ? "No silo holds a document that meets all of this." : "No silo holds a document with these words.";
  return make("p", { class: "notice" }, message);
}

function item(hit, query, probable, verdicts, words, may) {
  const known = hit.probability !== null && hit.probability !== undefined;
  const bar = !probable ? null : known
    ? make("div", { class: "chance", role: "img", "aria-label": `${percent(hit.probability)} likely to be right` },
      make("span", { class: "number" }, percent(hit.probability)),
      make("span", { class: "track" }, make("span", { class: "fill", width: `${hit.probability * 100}%` })))
    : make("div", { class: "chance none" }, "no probability");
  const judging = hit.token && verdicts ? verdict(hit, query) : null;
  if (judging) verdicts.set(hit, judging.tell);
  const documents = actions(hit, query, may);
  const copies = hit.also.map((copy) => ({ ...copy, acts: actions(copy, query, may) }));
  const why = hit.explanation?.length ? make("details", { class: "why" }, make("summary", {}, "Why this result?"), reasons(hit)) : null;
  return make("li", { class: probable ? "hit" : "hit plain", tabindex: "-1" }, bar,
    make("div", { class: "found" },
      make("h2", {}, hit.title || hit.document),
      make("p", { class: "where" }, chip(hit.silo), make("code", {}, hit.document), hit.date ? make("span", { class: "hint" }, hit.date) : null),
      copies.length ? make("p", { class: "where also" }, "the same text: ", copies.map((copy) => [chip(copy.silo), make("code", {}, copy.document), copy.acts?.element])) : null,
      hit.snippet ? make("p", { class: "snippet" }, marked(hit.snippet, words))
        : make("p", { class: "snippet none" }, "This silo shows no text."),
      make("div", { class: "acts" }, why, judging?.element, documents?.element), documents?.place, copies.map((copy) => copy.acts?.place)));
}

/** The snippet with the words of the query marked, but stop words; of a longer word the beginning is enough, as the index stems. */
function marked(text, words) {
  const stems = words.filter((word) => word.length > 3).map((word) => word.slice(0, Math.max(4, word.length - 3)));
  const short = new Set(words.filter((word) => word.length < 4));
  const fits = (word) => short.has(word) || stems.some((stem) => word.startsWith(stem));
  return text.split(/([\p{L}\p{N}]+)/u).map((part) => (fits(part.toLowerCase()) ? make("mark", {}, part) : part));
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
