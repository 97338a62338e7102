// Every silo: is it well, what does it hold, what has it released and what may it still.

import * as api from "./api.js";
import { chip, count, decimal, make, moment, rememberSilos, several, show, table } from "./dom.js";

const EVERY = 5000;
const LEVELS = { full: "full", scores: "scores only" };
const WORDS = { answered: "up", late: "late", refused: "refuses", down: "down", broken: "broken" };

export async function open(view, { signal, failed }) {
  const cards = make("div", { class: "cards" });
  const told = make("p", { class: "hint" });
  show(view, make("div", { class: "page" },
    make("h1", {}, "Silos"), told, cards,
    make("p", { class: "notice" }, "Towards a peer that may search no ε is claimed: scores and explanations are exact."
      + " ε is spent by counts, sketches and statistics that leave a silo with noise.")));
  while (!signal.aborted) {
    try {
      const { silos, statistics, encoder } = await api.silos(signal);
      rememberSilos(silos.map((silo) => silo.silo));
      const opened = new Set([...cards.querySelectorAll("details[open]")].map((each) => each.dataset.silo));
      const held = silos.reduce((sum, silo) => sum + (silo.ready?.documents ?? 0), 0);
      told.textContent = `${several(held, "document")} in ${several(silos.length, "silo")}; `
        + (statistics ? `word statistics are shared (version ${statistics.slice(0, 8)}).` : "every silo scores with its own word statistics.")
        + (encoder && encoder !== "none" ? ` Silos share the encoder ${encoder}.`
          : " Silos share no encoder, so that only words are compared between them."
            + " With bge-small in every silo nDCG@10 was .470 instead of .417 (cisi), .504 instead of .436 (npl).");
      show(cards, silos.map((silo) => card(silo, opened.has(silo.silo))));
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

function card(silo, open) {
  const { ready, release } = silo;
  const facts = [
    ["Documents", count(ready?.documents ?? release?.documents)],
    ["Indexed", ready ? count(ready.indexed) : "–"],
    ["Encoder", [ready?.encoder_name, ready?.encoder].filter(Boolean).join(", ") || "–"],
    ...(ready?.engine ? [["Engine", `${ready.engine}, ${LEVELS[ready.level] ?? ready.level}`]] : []),
    ["Last training", release?.last_training ? moment(release.last_training) : "none"],
  ];
  return make("section", { class: "card", "aria-label": silo.silo },
    make("h2", {}, chip(silo.silo), make("span", { class: `state ${silo.status}` }, WORDS[silo.status] ?? silo.status)),
    silo.detail || (ready && !ready.ready && ready.detail) ? make("p", { class: "warn" }, silo.detail || ready.detail) : null,
    make("dl", { class: "facts" }, facts.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    unread(silo),
    release ? [budget(release), departures(release, silo.silo, open)] : null);
}

/** How much of its sources could not be read; administrators see what, where the silo lets them manage. */
function unread(silo) {
  const sources = silo.sources ?? [];
  const failed = sources.filter((each) => each.failed);
  if (!silo.ready?.unread && !failed.length) return null;
  const lines = sources.flatMap((each) => (each.failed ? [each.failed] : each.errors));
  return make("div", { class: "unread" },
    make("p", { class: "warn" }, `${several(silo.ready?.unread ?? 0, "document")} of its sources could not be read.`),
    lines.length ? make("details", {}, make("summary", {}, "Which"), make("ul", {}, lines.map((line) => make("li", {}, line)))) : null);
}

function budget(release) {
  const spent = release.most_spent;
  const left = release.least_left;
  if (left === null || left === undefined) {
    return make("p", { class: "budget" }, `Spent on the dearest ${release.unit}: ε = ${decimal(spent)}; no budget is set.`);
  }
  const share = spent + left > 0 ? spent / (spent + left) : 0;
  return make("div", { class: "budget" },
    make("div", { class: "track", role: "img", "aria-label": `ε ${decimal(spent)} of ${decimal(spent + left)} spent` },
      make("span", { class: `fill ${share > 0.9 ? "down" : ""}`, width: `${share * 100}%` })),
    make("p", {}, `ε = ${decimal(spent)} spent on the dearest ${release.unit}, ${decimal(left)} left.`),
    release.meaning ? make("p", { class: "hint" }, release.meaning) : null,
    release.outdated_model ? make("p", { class: "warn" }, "Its model was learned with judgements of documents that were erased since: let the silos learn again.") : null);
}

function departures(release, name, open) {
  const rows = release.departures.map((each) => [each.kind, each.peer, each.guarantee, `${count(each.times)} ×`, count(each.items), moment(each.last)]);
  const peers = release.peers.map((peer) => [peer.peer, yes(peer.search), yes(peer.snippets), yes(peer.counts), yes(peer.noised_counts), yes(peer.matches), yes(peer.suggestions), yes(peer.open),
    peer.budget === null || peer.budget === undefined ? "–" : `${decimal(peer.left)} of ${decimal(peer.budget)}`,
    peer.seen === null || peer.seen === undefined ? "–" : `${(100 * peer.seen).toFixed(peer.seen < 0.1 ? 1 : 0)} %`]);
  return make("details", { "data-silo": name, open },
    make("summary", {}, rows.length ? `What has left it: ${several(rows.length, "kind")}` : "Nothing has left it"),
    rows.length ? table(`What has left ${name}`, ["what", "to", "guarantee", "how often", "items", "last"], rows) : null,
    peers.length ? table(`What peers of ${name} may do`, ["peer", "search", "snippets", "counts", "noised counts", "matches", "suggestions", "opens", "ε left", "seen in a year"], peers) : null);
}

const yes = (may) => (may ? "yes" : "no");
