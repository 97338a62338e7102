// Every silo: is it well, what does it hold, what has it released and what may it still.

import * as api from "./api.js";
import { chip, count, decimal, documentsIn, make, moment, rememberSilos, several, show, state, table } from "./dom.js";

const EVERY = 5000;
const LEVELS = { full: "full", scores: "scores only" };

export async function open(view, { signal, failed }) {
  const cards = make("div", { class: "cards" });
  const told = make("p", { class: "hint" });
  const meanings = make("div");
  show(view, make("div", { class: "page" },
    make("h1", {}, "Silos"), told, cards,
    make("div", { class: "notice" }, make("p", {}, "Counts, sketches and statistics leave a silo with noise and spend ε."
      + " Scores, snippets and explanations of hits are exact: for whoever may search, no ε is claimed."), meanings)));
  while (!signal.aborted) {
    try {
      const { silos, statistics, encoder } = await api.silos(signal);
      rememberSilos(silos.map((silo) => silo.silo));
      const opened = new Set([...cards.querySelectorAll("details[open]")].map((each) => each.dataset.about));
      const focus = cards.contains(document.activeElement) ? document.activeElement.parentElement.dataset.about : null;
      told.textContent = `${documentsIn(silos)}; `
        + (statistics ? `word statistics are shared (version ${statistics.slice(0, 8)}).` : "every silo scores with its own word statistics.")
        + (encoder && encoder !== "none" ? ` Silos share the encoder ${encoder}.`
          : " Silos share no encoder, so that only words are compared between them."
            + " An encoder in every silo finds more: with bge-small nDCG@10 rose from .417 to .470 (collection cisi) and from .436 to .504 (npl).");
      show(cards, silos.map(card));
      show(meanings, [...new Set(silos.map((silo) => silo.release?.meaning).filter(Boolean))].map((meaning) => make("p", { class: "hint" }, `${meaning}.`)));
      for (const each of cards.querySelectorAll("details")) {
        each.open = opened.has(each.dataset.about);
        if (each.dataset.about === focus) each.firstElementChild.focus({ preventScroll: true });
      }
    } catch (error) {
      failed(error, cards);
    }
    await pause(EVERY, signal);
  }
}

export function pause(time, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, time);
    signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
  });
}

function card(silo) {
  const { ready, release } = silo;
  const facts = [
    ["Documents", count(ready?.documents ?? release?.documents)],
    ["Indexed", ready ? count(ready.indexed) : "–"],
    ["Encoder", encoder(ready)],
    ...(ready?.engine ? [["Engine", `${ready.engine}, ${LEVELS[ready.level] ?? ready.level}`]] : []),
    ["Last training", release?.last_training ? moment(release.last_training) : release ? "none" : "–"],
  ];
  return make("section", { class: "card", "aria-label": silo.silo },
    make("h2", {}, chip(silo.silo), state(silo)),
    silo.about ? make("p", {}, silo.about) : null,
    ready?.ready && !ready.documents ? make("p", { class: "warn" }, "New: it has no document in its index yet.") : null,
    silo.detail || (ready && !ready.ready && ready.detail) ? make("p", { class: "warn" }, silo.detail || ready.detail) : null,
    make("dl", { class: "facts" }, facts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    unread(silo),
    release ? [budget(release), departures(release, silo.silo)] : null);
}

/** Its name and version, without the name once more where the version begins with it. */
function encoder(ready) {
  const { encoder_name: name, encoder: version } = ready ?? {};
  return name && version && !version.startsWith(name) ? `${name}, ${version}` : version || name || "–";
}

/** How much of its sources could not be read; administrators see what, where the silo lets them manage. */
function unread(silo) {
  const sources = silo.sources ?? [];
  const failed = sources.filter((each) => each.failed);
  if (!silo.ready?.unread && !failed.length) return null;
  const lines = sources.flatMap((each) => (each.failed ? [each.failed] : each.errors));
  return make("div", { class: "unread" },
    make("p", { class: "warn" }, `${several(silo.ready?.unread ?? 0, "document")} of its sources could not be read.`),
    lines.length ? make("details", { "data-about": `unread by ${silo.silo}` }, make("summary", {}, "Which"), make("ul", {}, lines.map((line) => make("li", {}, line)))) : null);
}

function budget(release) {
  const spent = release.most_spent;
  const left = release.least_left;
  if (left === null || left === undefined) {
    return make("p", { class: "budget" }, `Privacy: ε = ${decimal(spent)} spent on the ${release.unit} with most spent; no budget is set.`);
  }
  const share = spent + left > 0 ? spent / (spent + left) : 0;
  return make("div", { class: "budget" },
    make("div", { class: "track", role: "img", "aria-label": `ε ${decimal(spent)} of ${decimal(spent + left)} spent` },
      make("span", { class: `fill ${share > 0.9 ? "down" : ""}`, width: `${share * 100}%` })),
    make("p", {}, `Privacy budget: ε = ${decimal(spent)} spent on the ${release.unit} with most spent, ${decimal(left)} left.`),
    release.outdated_model ? make("p", { class: "warn" }, "Its model was learned with judgements of documents that were erased since: let the silos learn again.") : null);
}

function departures(release, name) {
  const rows = release.departures.map((each) => [each.kind, each.peer, each.guarantee, `${count(each.times)} ×`, count(each.items), moment(each.last)]);
  const peers = release.peers.map((peer) => [peer.peer, RIGHTS.filter((right) => peer[right]).map((right) => right.replace("_", " ")).join(", ") || "nothing",
    peer.budget === null || peer.budget === undefined ? "–" : `${decimal(peer.left)} of ${decimal(peer.budget)}`,
    peer.seen === null || peer.seen === undefined ? "–" : `${(100 * peer.seen).toFixed(peer.seen < 0.1 ? 1 : 0)} %`]);
  return make("details", { "data-about": `left ${name}` },
    make("summary", {}, rows.length ? `What has left it: ${several(rows.length, "kind")}` : "Nothing has left it"),
    rows.length ? table(`What has left ${name}`, ["what", "to", "guarantee", "how often", "items", "last"], rows) : null,
    peers.length ? [make("h3", {}, "What its peers may do, and the share of its documents that they have seen"), table(`What peers of ${name} may do`, ["peer", "may", "ε left", "seen in a year"], peers)] : null);
}

/** What a policy allows a peer, by its names in the silo's settings. */
const RIGHTS = ["search", "snippets", "counts", "noised_counts", "matches", "suggestions", "open", "feedback", "learning", "judgements", "manage", "operate"];
