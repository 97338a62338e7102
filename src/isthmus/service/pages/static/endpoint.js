// One person judges the answers of one search interface, a hit at a time, with the keyboard.

import { decimal, make, percent, several, show } from "./dom.js";
import { reliability } from "./charts.js";

const IDLE = 1200; // milliseconds without a judgement before they are worked out
const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
let state = null, busy = false, later = null;

async function ask(method, path, body) {
  const headers = { authorization: `Bearer ${token}`, ...(body ? { "content-type": "application/json" } : {}) };
  const reply = await fetch(`/v1${path}`, { method, headers, body: body ? JSON.stringify(body) : undefined })
    .catch(() => { throw new Error("The program does not answer. Is it still running? What was judged is kept."); });
  const told = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(told.detail || told.title || reply.statusText);
  return told;
}

const place = { hit: make("section", { "aria-live": "polite" }), progress: make("p", { class: "hint", id: "progress" }),
  problem: make("p", { class: "bad", role: "alert" }), report: make("section", { id: "report", "aria-live": "polite" }), queries: make("div") };

function build() {
  const query = make("input", { id: "query", type: "search", maxlength: "2000", autocomplete: "off", placeholder: "Another query to judge answers of", "aria-label": "Another query" });
  const form = make("form", { class: "ask", onsubmit: (event) => {
    event.preventDefault();
    const text = query.value.trim();
    if (text) act(() => ask("POST", "/queries", { query: text })).then((done) => { if (done) { query.value = ""; query.blur(); } });
  } }, query, make("button", { class: "main" }, "Ask"));
  show(document.getElementById("view"), make("div", { class: "page" },
    make("h1", {}, "Is this a right answer?"), place.progress, place.problem, place.hit, place.report, make("h2", {}, "Queries"), form, place.queries));
}

/** Do something that answers with the new state; one thing at a time. */
async function act(work) {
  if (busy) return false;
  busy = true;
  try {
    state = await work();
    place.problem.textContent = "";
    draw();
    clearTimeout(later);
    later = setTimeout(report, IDLE);
    return true;
  } catch (error) {
    place.problem.textContent = error.message;
    return false;
  } finally {
    busy = false;
  }
}

function draw() {
  const { next, queries, judged, right } = state;
  document.getElementById("endpoint").textContent = state.endpoint;
  place.progress.textContent = `${several(judged, "judgement")}, ${right} right.`;
  show(place.hit, next ? hit(next) : make("p", { class: "notice" },
    queries.length ? "All answers are judged. Ask another query below, or read the report." : "Ask a query below: its answers come here, one by one."));
  show(place.queries, make("ul", {}, queries.map((each) => make("li", {}, `${each.query} `, make("span", { class: "hint" }, each.hits ? `${each.judged} of ${each.hits}` : "no hits")))));
}

function hit(next) {
  const button = (key, text, relevant) => make("button", { type: "button", class: relevant === null ? "quiet" : "main", onclick: () => judge(relevant) }, `${text} `, make("kbd", {}, key));
  return make("article", { class: "card", id: "hit" },
    make("p", {}, "For the query ", make("strong", { id: "asked" }, next.query)),
    make("h2", {}, next.title || next.id),
    next.snippet ? make("p", { class: "snippet" }, next.snippet) : null,
    make("p", { class: "where" }, make("code", {}, next.id)),
    make("div", { class: "acts" }, button("y", "Right", true), button("n", "Wrong", false), button("s", "Skip", null),
      make("button", { type: "button", class: "quiet", onclick: undo }, "Undo ", make("kbd", {}, "u"))));
}

const judge = (relevant) => { if (state?.next) act(() => ask("POST", "/judgements", { query: state.next.query, document: state.next.id, relevant })); };
const undo = () => act(() => ask("DELETE", "/judgements"));

async function report() {
  try {
    const told = await ask("GET", "/report");
    show(place.report, told.problem ? make("p", { class: "notice" }, `${told.problem}.`) : findings(told));
  } catch (error) {
    place.problem.textContent = error.message;
  }
}

function findings({ curve, method, threshold, threshold_problem: problem, judgements_needed: needed, judged, wanted_precision: wanted, wanted_width: width }) {
  const point = threshold
    ? [make("p", { id: "threshold" }, `From a probability of ${decimal(threshold.threshold, 3)} on, ${percent(threshold.precision)} of hits are right`
        + ` (${percent(threshold.low)} to ${percent(threshold.high)}, 95 %), by ${several(threshold.rows, "judged hit")} of ${several(threshold.queries, "query", "queries")}.`),
      make("p", { id: "needed" }, needed === null ? `No number of judgements within reach narrows that to ${percent(width)}.`
        : needed > judged ? `Some ${needed.toLocaleString("en-GB")} judgements in all would narrow that to a width of ${percent(width)}.`
          : `That is as narrow as ${percent(width)}.`)]
    : make("p", { class: "notice" }, `For a precision of ${percent(wanted)}: ${problem}.`);
  return make("div", { class: "cards" },
    make("section", { class: "card" }, make("h2", {}, "Reliability"), reliability(curve.bins, "Reliability of the probabilities")),
    make("section", { class: "card" }, make("h2", {}, "What the judgements say"), point,
    make("p", { class: "hint" }, `Dots on the dashed line: of hits said to be 80 % likely, 80 % are right. Off by ${decimal(curve.ece, 3)} on average;`
      + ` a perfect model would show ${decimal(curve.floor, 3)} with so few. Every hit is measured by a curve (${method}) that has not seen its query.`)));
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea") || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const keys = { y: () => judge(true), n: () => judge(false), s: () => judge(null), u: undo };
  if (event.key in keys) { event.preventDefault(); keys[event.key](); }
});

build();
act(() => ask("GET", "/state")).then((done) => { if (done && !state.next) document.getElementById("query").focus(); });
