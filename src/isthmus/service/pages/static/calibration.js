// Is 0.8 eighty percent? Reliability silo by silo, in words and in diagrams, and what a threshold keeps.

import * as api from "./api.js";
import { chip, count as counted, make, percent, rememberSilos, several, show, table } from "./dom.js";
import { reliability } from "./charts.js";

const SOURCES = { validation: "on judged queries kept for it", feedback: "on what people said of hits" };
const ALL = "all silos"; // what the broker calls the curve of what silos have learned together
const FEW = 30; // hits of a curve that say little
const TENTHS = 10;
const points = (share) => `${(100 * share).toFixed(1)} points`;

export async function open(view, { signal, failed }) {
  const body = make("div", { class: "page" }, make("h1", {}, "Calibration"));
  const place = make("div", {}, make("p", { class: "hint", role: "status" }, "Asking the silos …"));
  body.append(place);
  show(view, body);
  try {
    const { curves } = await api.calibration(signal);
    rememberSilos(curves.map((curve) => curve.silo).filter((name) => name !== ALL));
    if (!curves.length) {
      show(place, make("p", { class: "notice" }, "Nothing is learned yet, and no silo has judged hits of its own to show."));
      return;
    }
    const groups = grouped(curves);
    show(place, summary(groups), picker(curves),
      make("p", { class: "hint" },
        "Each dot is a group of hits: how likely they were said to be right, and how many were. On the dashed line the two agree."
          + " The stroke through a dot is how far chance alone can move it (95 %); hollow dots are of fewer than ten hits. Bars count the hits."),
      make("div", { class: "groups" }, groups.map(({ silo, curves: own }) => make("section", { class: "apart", "aria-label": silo },
        make("h2", {}, silo === ALL ? "All silos together" : chip(silo)), make("div", { class: "cards small" }, own.map(diagram))))));
  } catch (error) {
    failed(error, place);
  }
}

/** Curves by silo, hits that were shown first; the total of all silos before them. */
function grouped(curves) {
  const names = [...new Set(curves.map((curve) => curve.silo))].filter((name) => name !== ALL).sort((one, other) => one.localeCompare(other));
  const own = (name) => curves.filter((curve) => curve.silo === name)
    .sort((one, other) => Number(other.retriever === "shown") - Number(one.retriever === "shown") || one.retriever.localeCompare(other.retriever));
  const shown = curves.filter((curve) => curve.silo !== ALL && curve.retriever === "shown");
  const total = own(ALL).concat(shown.length > 1 ? [together(shown)] : []);
  return [...(total.length ? [{ silo: ALL, curves: total }] : []), ...names.map((silo) => ({ silo, curves: own(silo) }))];
}

/** What silos show each, added up: groups of hits that were said to be about as likely. */
function together(curves) {
  const bins = Array.from({ length: TENTHS }, (_, at) => ({ low: at / TENTHS, high: (at + 1) / TENTHS, predicted: 0, observed: 0, count: 0 }));
  for (const each of curves.flatMap((curve) => curve.bins).filter((bin) => bin.count)) {
    const bin = bins[Math.min(Math.floor(each.predicted * TENTHS + 1e-9), TENTHS - 1)];
    const size = bin.count + each.count;
    bin.predicted = (bin.predicted * bin.count + each.predicted * each.count) / size;
    bin.observed = (bin.observed * bin.count + each.observed * each.count) / size;
    bin.count = size;
  }
  const sum = (key) => curves.reduce((total, curve) => total + curve[key], 0);
  const ece = bins.reduce((total, bin) => total + bin.count * Math.abs(bin.predicted - bin.observed), 0) / Math.max(sum("count"), 1);
  const floor = Math.sqrt(curves.reduce((total, { floor: each, count }) => total + ((each ?? 0) * count) ** 2, 0)) / Math.max(sum("count"), 1);
  return { silo: ALL, retriever: "shown", source: curves[0].source, count: sum("count"), relevant: sum("relevant"), ece, floor, bins, thresholds: [], added: curves.length };
}

/** Whether probabilities are meant, in words; `off` where they are not. */
function verdict({ count, relevant, ece, floor, bins }) {
  if (count < FEW) return { text: `Too few to tell: ${several(count, "hit")}.` };
  if (ece <= 2 * (floor ?? 0) + 0.02) return { text: "Percentages hold, as far as so many hits can tell." };
  const said = bins.reduce((sum, bin) => sum + bin.predicted * bin.count, 0) / count, right = relevant / count;
  const how = Math.abs(said - right) < 0.02 ? "Off, too sure of some hits and not sure enough of others"
    : said > right ? "Too sure" : "Not sure enough";
  return { off: true, text: `${how}: on average it said ${percent(said)}, and ${percent(right)} were right.` };
}

function summary(groups) {
  const rows = groups.flatMap(({ silo, curves }) => curves.filter((curve) => curve.retriever === "shown").slice(0, silo === ALL ? 1 : undefined).map((curve) => {
    const { text, off } = verdict(curve);
    return [silo === ALL ? make("strong", {}, "all silos") : chip(silo), counted(curve.count), counted(curve.relevant), points(curve.ece), make("span", { class: off ? "warn" : "" }, text)];
  }));
  const off = rows.length && groups.some(({ silo, curves }) => silo !== ALL && curves.some((curve) => curve.retriever === "shown" && verdict(curve).off));
  return rows.length ? make("section", { class: "card" }, make("h2", {}, "Is 80 % eighty percent?"),
    table("Verdict for every silo", ["silo", "hits", "right", "off by", "verdict"], rows),
    groups.every(({ silo }) => silo === ALL) ? make("p", { class: "hint" }, "What silos have learned together is counted over all of them: there are no numbers of single silos.") : null,
    off ? make("p", { class: "hint" }, "Where a silo is off, let the silos learn again from these judgements, and compare what is judged right there with the others.") : null) : null;
}

function diagram(curve) {
  const { text, off } = verdict(curve);
  const name = curve.added ? `what ${several(curve.added, "silo")} show, added up` : curve.retriever === "shown" ? "hits shown" : curve.retriever;
  return make("section", { class: "card", "aria-label": `${curve.silo}, ${name}` }, make("h3", {}, name),
    reliability(curve.bins, `Reliability of ${curve.retriever} in ${curve.silo}`),
    make("p", { class: off ? "warn" : "" }, text),
    make("p", { class: "hint" }, `Off by ${points(curve.ece)} on average`
      + (curve.floor === null || curve.floor === undefined ? "" : `; a perfect model would show ${points(curve.floor)} at this size`)
      + `. ${several(curve.count, "hit")}, ${counted(curve.relevant)} right, ${SOURCES[curve.source]}.`));
}

/** What a threshold keeps, in every silo. */
function picker(curves) {
  const judged = curves.filter((curve) => curve.thresholds.length);
  const shown = judged.filter((curve) => curve.retriever === "shown");
  const picked = shown.length ? shown : judged;
  if (!picked.length) return null;
  const rows = make("div");
  const told = make("output", { for: "keep" });
  const slider = make("input", { id: "keep", type: "range", min: "0", max: "95", step: "5", value: "50", oninput: () => tell() });
  const tell = () => {
    const at = Number(slider.value) / 100;
    told.textContent = `${percent(at)} or more`;
    const many = picked.some((curve) => curve.retriever !== "shown");
    const heads = ["silo", ...(many ? ["retriever"] : []), "kept", "right among them", "of all right ones"];
    const cells = (kept, right, all) => [counted(kept), kept ? percent(right / kept) : "–", all ? percent(right / all) : "–"];
    const sums = picked.map((curve) => {
      const { kept, precision } = curve.thresholds.filter((each) => each.threshold <= at + 1e-9).at(-1) ?? curve.thresholds[0];
      return [kept, kept * precision, curve.relevant];
    });
    const total = picked.length > 1 && !many && !picked.some((curve) => curve.silo === ALL)
      ? ["all silos", ...cells(...[0, 1, 2].map((column) => sums.reduce((sum, row) => sum + row[column], 0)))] : null;
    show(rows, table("What this threshold keeps", heads, picked.map((curve, row) => [
      curve.silo === ALL ? make("strong", {}, ALL) : chip(curve.silo), ...(many ? [curve.retriever] : []), ...cells(...sums[row])]), total));
  };
  tell();
  return make("section", { class: "card" }, make("h2", {}, "Pick a threshold"),
    make("div", { class: "threshold" }, make("label", { for: "keep" }, "Keep hits of"), slider, told), rows);
}
