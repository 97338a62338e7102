// One box over all silos: hits with their probability, where they are, and why.

import * as api from "./api.js";
import { asker, counts } from "./counts.js";
import { actions } from "./documents.js";
import { chip, count, decimal, documentsIn, hue, make, moment, percent, rememberSilos, several, show, table, took } from "./dom.js";

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
const HIGHEST = 0.95; // threshold
const SHOWN = 8; // values of a facet
const PATIENT = 300; // milliseconds after which people are told who is being waited for
const NAMES = {
  bm25: "words", dense: "meaning, by the encoder", engine: "the engine's own score", start: "the same for every hit",
  profile: "the rest, from how the query's whole list scores and from the calibration's curve", calibration: "by the silo's calibrator",
};
const LABELS = { profile: "list and curve" }; // of parts whose name on the wire says too little
const LANGUAGE = [
  ["tidal power", "any of the words"], ['"spring tide"', "these words together"], ["-lagoon", "without the word"], ["turb*", "words that begin so"],
  ["silo:north", "only this silo"], ["type:pdf", "only this type"], ["after:2019 before:2024-06", "only of that time"],
];
// the answer where every silo is unticked
const NOBODY = { hits: [], silos: [], below: 0, without_probability: 0, offset: 0, understood: { parts: [], hints: [], marked: [] } };
const former = []; // what was searched since the page was opened; it is stored nowhere
let places = null; // the elements of the view that is open

export async function open(view, { parameters, signal, failed, may }) {
  const state = {
    query: parameters.get("q") ?? "", above: aboveOf(parameters), failed, may, page: pageOf(parameters),
    without: new Set(parameters.getAll("without")), names: [], asking: null,
  };
  places = build(state);
  show(view, places.root);
  if (!state.query) places.query.focus();
  signal.addEventListener("abort", () => { clearTimeout(state.later); state.asking?.abort(); });
  await introduce(state, signal);
  if (!state.query || signal.aborted) return; // another view, or search, has taken its place
  keep(state, "replaceState");
  await run(state);
}

const pageOf = (parameters) => Math.min(Math.max(Math.trunc(Number(parameters.get("page"))) || 1, 1), DEEPEST / PAGE);
const aboveOf = (parameters) => Math.min(Math.max(Number(parameters.get("above")) || 0, 0), HIGHEST);

function build(state) {
  const query = make("input", {
    id: "query", type: "search", name: "q", maxlength: "2000", autocomplete: "off", spellcheck: "false", enterkeyhint: "search",
    placeholder: "Ask all silos", "aria-label": "Search all silos", value: state.query, list: "former",
  });
  const form = make("form", {
    role: "search", class: "ask",
    onsubmit: (event) => { event.preventDefault(); go(state, { query: query.value.trim() }); },
  }, query, make("datalist", { id: "former" }, former.map((value) => make("option", { value }))), make("button", { class: "main" }, "Search"));
  const label = make("output", { class: "above", for: "above" }, words(state.above));
  const slider = make("input", {
    id: "above", type: "range", min: "0", max: String(100 * HIGHEST), step: "5", value: String(Math.round(state.above * 100)), "aria-describedby": "no-probabilities", disabled: true,
    oninput: () => { state.above = Number(slider.value) / 100; label.textContent = words(state.above); },
    onchange: () => go(state, { sliding: true }),
  });
  const reason = make("p", { class: "hint", id: "no-probabilities", role: "status" });
  const filters = make("div", { class: "filters" },
    make("div", { class: "threshold" }, make("label", { for: "above" }, "Only hits at least this likely to be right"), slider, label),
    make("fieldset", { class: "silos", id: "silo-filter" }, make("legend", { class: "unseen" }, "Silos to ask")), reason);
  const waiting = make("div", { class: "waiting" });
  const status = make("div", { class: "status", role: "status", tabindex: "-1" });
  const start = make("div", { class: "start" }), meaning = make("div");
  const hits = make("ol", { class: "hits", "aria-label": "Hits, best first" });
  const understood = make("div", { class: "understood", id: "understood" });
  const facets = make("aside", { class: "facets", "aria-label": "Matches by silo, type and year", hidden: true });
  const pages = make("nav", { class: "pages", "aria-label": "Pages" });
  const root = make("div", { class: "search" }, make("h1", { class: "unseen" }, "Search"), form, understood, filters, waiting, status, meaning, start,
    make("div", { class: "results" }, make("div", {}, hits, pages), facets));
  return { root, query, waiting, status, start, legend: meaning, hits, slider, label, reason, understood, facets, pages, filter: filters.querySelector("fieldset") };
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

const words = (above) => (above ? percent(above) : "off: all hits");

/** Who can be asked, before anything is. */
async function introduce(state, signal) {
  try {
    const [view, learning] = await Promise.all([api.silos(signal), api.learning(signal)]);
    const { silos } = view;
    state.names = silos.map((silo) => silo.silo);
    state.counting = new Set(state.may("counts") ? silos.filter(counts).map((silo) => silo.silo) : []);
    state.learned = Boolean(learning.current) && learning.current !== "none";
    state.basis = state.learned ? learning.versions.find((version) => version.current) : null;
    if (state.learned || !state.query) allowThreshold(state, state.learned);
    rememberSilos(state.names);
    if (!state.query) show(places.start, start(view, state));
    show(places.filter, places.filter.querySelector("legend"), silos.map((silo) => toggle(silo, state)));
    const options = [...new Set([...former, ...(view.queries ?? [])])];
    show(places.root.querySelector("datalist"), options.map((value) => make("option", { value })));
  } catch (error) {
    state.failed(error, places.status);
  }
}

/** What keeps a silo from taking part as it should; "" where nothing does. */
function trouble({ status, detail, ready }) {
  if (status !== "answered") return `${WORDS[status] ?? status}${detail ? `: ${detail}` : ""}`;
  if (ready && !ready.ready) return `not ready${ready.detail ? `: ${ready.detail}` : ""}`;
  if (ready && !ready.documents) return "new: it has no document in its index yet";
  return detail;
}

/** The start: what the operator says is right here, queries to try, what silos have, whether they have learned, and how to ask. */
function start(view, state) {
  const { silos, about, queries = [] } = view;
  const to = (query) => make("li", {}, make("a", { href: `#/search?${new URLSearchParams({ q: query })}` }, query));
  return [
    about ? make("p", { id: "about" }, about) : null,
    queries.length ? [make("h2", {}, "Good questions to begin with"), make("ul", { id: "queries" }, queries.map(to))] : null,
    make("h2", {}, "What is here"),
    make("p", {}, `${documentsIn(silos)}.`),
    make("ul", { class: "here" }, silos.map((silo) => {
      const wrong = trouble(silo);
      const has = [silo.ready ? several(silo.ready.documents, "document") : "", silo.about].filter(Boolean).join(": ");
      return make("li", {}, chip(silo.silo), ` ${has}`, wrong ? make("span", { class: "warn" }, ` — ${wrong}`) : "");
    })),
    state.basis ? make("p", { id: "basis" }, `${MEANING} ${basis(state.basis)}`) : null,
    make("details", {}, make("summary", {}, "How to ask"),
      table("What a query may say", ["written", "finds"], LANGUAGE.map(([written, found]) => [make("code", {}, written), found]))),
  ];
}

const MEANING = "A hit's percentage is how likely it is to be right, and means the same for every silo: of a hundred hits shown with 80 %, about eighty should be right."
  + " It depends on the other hits of the search: where fewer silos are asked, the same hit may get a higher or a lower percentage.";

/** What percentages rest on. */
function basis({ record, learned }) {
  if (!record?.queries) return `Percentages come from what the silos learned on ${moment(learned)}.`;
  return `Percentages rest on ${several(record.queries, "judged query", "judged queries")} with ${several(record.relevant, "relevant document")} found by the search, learned on ${moment(learned)}.`;
}

/** What a percentage means, beside what it rests on. */
function legend({ basis: version }) {
  const after = version?.record?.calibration?.after;
  return make("details", { id: "percentages" }, make("summary", {}, "What the percentages mean",
    version?.record?.queries ? `, and the ${several(version.record.queries, "judged query", "judged queries")} they rest on` : ""),
    make("p", {}, MEANING),
    version ? make("p", {}, basis(version),
      after ? ` On ${several(after.hits, "hit")} of queries that were kept apart they were off by ${decimal(100 * after.ece, 1)} points on average; a perfect model would show ${decimal(100 * after.floor, 1)} at this size.` : "")
      : make("p", {}, "They come from silos' own models, which their owners have calibrated."),
    make("p", {}, make("a", { href: "#/calibration" }, "Calibration"), " compares them with what was right."));
}

function toggle(silo, state) {
  const name = silo.silo, wrong = trouble(silo);
  const box = make("input", {
    type: "checkbox", value: name, checked: !state.without.has(name),
    onchange: () => {
      if (box.checked) state.without.delete(name); else state.without.add(name);
      if (state.without.size === state.names.length) state.without.clear();
      go(state, {});
    },
  });
  const mark = silo.status !== "answered" ? ` (${silo.status})` : silo.ready && !silo.ready.documents ? " (new)" : "";
  return make("label", { class: `chip pick ${hue(name)}`, title: wrong || null }, box, name, mark);
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
  const slides = state.sliding && changes.sliding; // one way back for all steps of the slider
  Object.assign(state, { page: 1, sliding: false }, changes);
  for (const box of places.filter.querySelectorAll("input")) box.checked = !state.without.has(box.value);
  if (!state.query) { if (location.hash.includes("?")) location.hash = "#/search"; return; }
  places.query.value = state.query;
  keep(state, slides ? "replaceState" : "pushState");
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
  show(places.start);
  if (!former.includes(state.query)) former.unshift(state.query);
  const waiting = waitFor(asked.silos ?? state.names);
  try {
    const answer = asked.silos?.length === 0 ? NOBODY : await api.search(asked, asking.signal, waiting.heard);
    waiting.stop();
    rememberSilos(answer.silos.map((silo) => silo.silo));
    const probable = answer.hits.some((hit) => hit.probability !== null) || answer.below > answer.without_probability;
    if (answer.hits.length + answer.below || places.slider.disabled) allowThreshold(state, probable || state.learned);
    if (asked.threshold && !state.above) return (state.running = ask(state)); // nothing could pass it
    const verdicts = new Map();
    const held = places.root.contains(document.activeElement);
    show(places.understood, understood(state, answer.understood));
    show(places.status, summary(answer, state), doubts(answer), suggestion(state, answer.suggestion),
      answer.hits.length ? null : nothing(answer, state));
    show(places.legend, probable ? legend(state) : null);
    show(places.hits, answer.hits.map((hit) => item(hit, asked.query, probable, state.may("feedback") ? verdicts : null, answer.understood, state.may)));
    show(places.pages, pages(state, answer));
    show(places.facets, facets(state, answer));
    places.facets.hidden = !places.facets.children.length;
    places.root.classList.remove("busy");
    if (held && !places.root.contains(document.activeElement)) places.status.focus({ preventScroll: true }); // what had it is gone
    await remember(asked.query, verdicts, asking.signal);
  } catch (error) {
    if (error.name === "AbortError") return; // another question has taken its place
    for (const place of ["hits", "pages", "facets", "understood", "legend"]) show(places[place]);
    places.facets.hidden = true;
    state.failed(error, places.status);
  } finally {
    waiting.stop();
    if (state.asking === asking) {
      places.root.classList.remove("busy");
      state.asking = null;
    }
  }
}

/** Say who is being waited for, when it takes a moment: `heard` takes what a silo did, `stop` ends it. */
function waitFor(names) {
  const said = new Map(names.map((name) => [name, "…"]));
  let shown = false, over = false;
  const told = make("p", { role: "status" }), list = make("p", { class: "where" });
  const draw = () => {
    if (!shown || over) return;
    const open = [...said.values()].filter((word) => word === "…").length;
    told.textContent = open ? `Asking ${several(said.size, "silo")} …` : "All have answered.";
    show(list, [...said].map(([name, word]) => make("span", {}, chip(name), ` ${word}`)));
  };
  const later = setTimeout(() => { shown = true; show(places.status); show(places.waiting, told, list); draw(); }, PATIENT);
  const heard = ({ silo, status, count: hits, took_ms: time }) => {
    said.set(silo, status === "answered" ? `${several(hits, "hit")}, ${took(time)}` : WORDS[status] ?? status);
    draw();
  };
  return { heard, stop: () => { over = true; clearTimeout(later); show(places.waiting); } };
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
  return [
    ...parts.map((part) => {
      const meant = (MEANT[part.kind] ?? String)(part.value);
      return make("span", { class: "chip accent part" }, meant,
        make("button", { type: "button", "aria-label": `Remove: ${meant}`, onclick: () => go(state, { query: without(state.query, [part]) }) }, "×"));
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

/** The query without these parts of it. */
function without(query, parts) {
  const signs = [...query]; // characters, as the broker counts them
  for (const { start, end } of [...parts].sort((one, other) => other.start - one.start)) signs.splice(start, end - start);
  return signs.join("").replace(/\s+/g, " ").trim();
}

/** How many documents match, by silo, type and year; each value leads to the search that has it, or back where it is chosen. */
function facets(state, { facets: counts, understood: { parts }, silos: asked }) {
  if (!counts?.matches) return null;
  const of = (...kinds) => parts.filter((part) => kinds.includes(part.kind));
  const quoted = (value) => (/\s/.test(value) ? `"${value}"` : value);
  const next = (year) => String(Number(year) + 1).padStart(4, "0");
  const groups = [
    ["Silo", counts.silos, (value) => of("silo").filter((part) => part.value === value), (value) => `silo:${value}`],
    ["Type", counts.types, (value) => of("type").filter((part) => part.value === value), (value) => `type:${quoted(value)}`],
    ["Year", counts.years, () => of("after", "before"), (value) => `after:${value.padStart(4, "0")} before:${next(value)}`],
  ];
  const entries = (values) => Object.entries(values).slice(-SHOWN).reverse(); // years: an object has numbers in ascending order
  const first = (values) => Object.entries(values).slice(0, SHOWN);
  const some = asked.length > Object.keys(counts.silos).length ? ", in the silos that give counts" : "";
  const choice = (value, chosen, written) => (chosen.length
    ? link(state, { query: without(state.query, chosen) }, { class: "chosen", "aria-label": `${value}: chosen, take it out` }, `✓ ${value} ×`)
    : link(state, { query: `${state.query} ${written(value)}` }, {}, value));
  return [
    make("p", { class: "hint" }, `${several(counts.matches, "document")} with any of the words${of("phrase", "without", "prefix", "type", "after", "before").length ? " and all the rest" : ""}${some}.`),
    groups.map(([head, values, chosen, written]) => {
      const rows = (head === "Year" ? entries(values) : first(values)).filter(([, number]) => number);
      return rows.length ? make("section", {}, make("h2", {}, head), make("ul", {}, rows.map(([value, number]) => make("li", {},
        choice(value, chosen(value), written), make("span", { class: "number" }, count(number)))))) : null;
    })];
}

const SURE = 0.5;

function doubts({ hits, offset, unlike, overrated }) {
  const best = Math.max(...hits.map((hit) => hit.probability ?? NaN)); // NaN where a hit has none, -Infinity where there is none
  const weak = !offset && best >= 0 && best < SURE ? make("strong", {}, `No hit here is likely to be right: the best has ${percent(best)}. `) : "";
  const rough = unlike && hits.length ? "No judged query is like this one: its percentages are rough, and high ones were lowered." : "";
  const fewer = overrated ? "Percentages are too high: they were learned from searches of all silos, and this one is of fewer. Learn again." : "";
  return weak || rough || fewer ? make("p", { class: "notice doubt" }, weak, [rough, fewer].filter(Boolean).join(" ")) : null;
}

/** Hits that every silo was asked for: those below a threshold are counted among them. */
const deepest = ({ offset }) => `the best ${Math.min(offset + PAGE, DEEPEST)} of each silo`;

function summary(answer, { query, above, counting }) {
  if (!answer.silos.length) return null;
  const answered = answer.silos.filter((silo) => silo.status === "answered");
  const others = answer.silos.filter((silo) => silo.status !== "answered" || silo.detail);
  const searched = answered.reduce((sum, silo) => sum + (silo.documents ?? 0), 0);
  const unlikely = answer.below - answer.without_probability;
  const left = (unlikely ? `, ${several(unlikely, "hit")} below ${percent(answer.threshold)} left out` : "")
    + (answer.without_probability ? `, ${several(answer.without_probability, "hit")} without a probability left out` : "")
    + (answer.below ? `, of ${deepest(answer)}` : "");
  const ways = [...new Set(answered.map((silo) => SCORERS[silo.scorer] ?? silo.scorer).filter(Boolean))].sort();
  return make("div", {},
    make("p", {}, `${answered.length} of ${several(answer.silos.length, "silo")} answered in ${took(answer.took_ms)}`
      + ` from ${several(searched, "document")}${left}${ways.length ? `, ranked by ${ways.join(" / ")}` : ""}.`),
    others.map((silo) => make("p", { class: "warn" }, chip(silo.silo), ` ${silo.status === "answered" ? silo.detail : trouble(silo)}`,
      silo.status === "refused" && counting?.has(silo.silo) ? asker(silo.silo, query, above) : null)));
}

function nothing(answer, state) {
  if (!answer.silos.length) return unasked(answer, state);
  if (answer.offset) return null; // the pages say so
  if (!answer.silos.some((silo) => silo.status === "answered")) return make("p", { class: "notice bad" }, "No silo answered.");
  const unlikely = answer.below - answer.without_probability;
  const message = unlikely
    ? `No hit is ${percent(answer.threshold)} likely or more to be right; of ${deepest(answer)}, ${count(unlikely)} ${unlikely === 1 ? "is" : "are"} less likely.`
    : answer.without_probability
      ? `${several(answer.without_probability, "hit")} without a probability.`
      : answer.understood.parts.length ? "No silo holds a document that meets all of this." : "No silo holds a document with these words.";
  return make("p", { class: "notice doubt" }, message, answer.below ? [" ", link(state, { above: 0 }, {}, "Show all hits"), "."] : "");
}

/** Why no silo was asked, and the way to ask all. */
function unasked({ understood: { parts } }, state) {
  const chosen = parts.filter((part) => ["silo", "other_silo"].includes(part.kind));
  const rest = without(state.query, chosen) || state.query;
  return make("p", { class: "notice doubt" }, "The filters leave no silo to ask. Tick a silo above, or remove silo: from the query. ",
    link(state, { query: rest, without: new Set() }, {}, "Ask all silos"), ".");
}

function item(hit, query, probable, verdicts, understood, may) {
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
      make("p", { class: "where" }, chip(hit.silo), hit.title && hit.title !== hit.document ? make("code", {}, hit.document) : null, hit.date ? make("span", { class: "hint" }, hit.date) : null),
      copies.length ? make("p", { class: "where also" }, "the same text: ", copies.map((copy) => [chip(copy.silo), make("code", {}, copy.document), copy.acts?.element])) : null,
      hit.snippet ? make("p", { class: "snippet" }, marked(hit.snippet, understood))
        : make("p", { class: "snippet none" }, "This silo shows no text."),
      make("div", { class: "acts" }, why, judging?.element, documents?.element), documents?.place, copies.map((copy) => copy.acts?.place)));
}

/** The snippet with the words of the query marked, but stop words: those with the same stem, and those that begin as `begin*` says. */
function marked(text, { marked: words, parts }) {
  const stems = new Set(words.map(stem));
  const prefixes = parts.filter((part) => part.kind === "prefix").map((part) => part.value.toLowerCase());
  prefixes.push(...words.filter((word) => OTHER_SCRIPT.test(word) && word.length > 3).map((word) => word.slice(0, Math.max(4, word.length - 2))));
  const fits = (word) => stems.has(stem(word)) || prefixes.some((prefix) => word.startsWith(prefix));
  return text.split(/([\p{L}\p{N}]+)/u).map((part) => (fits(part.toLowerCase()) ? make("mark", {}, part) : part));
}

const OTHER_SCRIPT = /[^\p{Script=Latin}\p{N}]/u; // its words have endings of their own, or no blanks between them
const SHORT = /^[^aeiouy]*[aeiouy][^aeiouywx]$/; // "us", "hop", "rat": with another vowel behind, another word

/** About what the index makes of an English word (Snowball): no -s, -ed, -ing, -er, -en, -ly, no last e, and i for y. */
function stem(word) {
  let rest = word.replace(/(?<=...)(?<![us])s$/, "");
  const verb = /^(.*[aeiouy].*)(?<!e)(?:ed|ing)$/.exec(rest)?.[1];
  if (verb && verb.length > 1) rest = SHORT.test(verb) ? `${verb}e` : verb.replace(/([bdfgmnprt])\1$/, "$1");
  rest = rest.replace(/(?<=.{6})e[rn]$/, "").replace(/(?<=.{4})(?<=[cdeghkmnrt]|al)ly$/, "");
  if (rest.length > 3 && !SHORT.test(rest.slice(0, -1))) rest = rest.replace(/e$/, "");
  return rest.replace(/(?<=..)(?<![aeiou])y$/, "i");
}

const logit = (probability) => Math.log(probability) - Math.log1p(-probability);

/** What a part is before its weight: the logit of the retriever's probability, or what a model makes of its scores. */
function weighed(part) {
  if (!part.weight) return "";
  const own = part.probability === null ? part.contribution / part.weight : logit(Math.min(Math.max(part.probability, 1e-15), 1 - 1e-15));
  const rest = part.contribution - own * part.weight; // of a document that the retriever did not return
  return `${odds(own)} × ${decimal(part.weight)}${Math.abs(rest) < 0.005 ? "" : ` ${rest < 0 ? "" : "+"}${odds(rest)}`}`;
}

/** Every part of a hit's log-odds, or score, and their sum; what nobody knows is no column. */
function reasons(hit) {
  const known = hit.probability !== null && hit.probability !== undefined;
  const most = Math.max(...hit.explanation.map((part) => Math.abs(part.contribution)), 1e-9);
  const sum = hit.explanation.reduce((total, part) => total + part.contribution, 0);
  const some = (key) => hit.explanation.some((part) => part[key] !== null);
  const unit = known ? "log-odds" : "score";
  const columns = [
    ["part", (part) => [make("strong", {}, LABELS[part.retriever] ?? part.retriever), NAMES[part.retriever] ? make("span", { class: "hint" }, ` ${NAMES[part.retriever]}`) : ""], () => "together"],
    some("raw") ? ["raw score", (part) => (part.raw === null ? (part.retriever in NAMES && !["bm25", "dense", "engine"].includes(part.retriever) ? "" : "not returned") : decimal(part.raw, 3))] : null,
    some("probability") ? ["its probability", (part) => percent(part.probability)] : null,
    some("weight") ? [some("probability") ? "logit × weight" : "value × weight", weighed] : null,
    [`adds to the ${unit}`, (part) => pull(part.contribution, most), () => make("span", { class: "pull" }, make("strong", { class: "number" }, plus(sum)))],
  ].filter(Boolean);
  return make("div", {},
    table("What every part adds", columns.map(([head]) => head), hit.explanation.map((part) => columns.map(([, cell]) => cell(part))),
      columns.map(([, , total]) => (total ? total() : ""))),
    make("p", { class: "hint" }, known ? `Log-odds of ${plus(sum)} are a probability of ${percent(hit.probability)}.` : `Together they are the score, ${odds(sum)}.`));
}

const plus = (value) => `${value < 0 ? "" : "+"}${odds(value)}`;
const odds = (value) => (Math.abs(value) < 0.005 ? "0.00" : decimal(value));

function pull(value, most) {
  return make("span", { class: "pull" },
    make("span", { class: "side" }, make("span", { class: `fill ${value < 0 ? "down" : "up"}`, width: `${(Math.abs(value) / most) * 100}%` })),
    make("span", { class: "number" }, plus(value)));
}

/** Right or wrong, as this person has it; pressed again it is taken back. `tell` shows what was judged before. */
function verdict(hit, query) {
  const status = make("span", { class: "hint", role: "status" });
  let current = null, touched = false;
  const tell = (relevant) => {
    current = relevant ?? null;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.relevant === String(current)));
    status.textContent = current === null ? "" : `kept by ${hit.silo} only`;
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
