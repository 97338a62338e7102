// Is 0.8 eighty percent? Reliability by silo and retriever, and what a threshold keeps.

import * as api from "./api.js";
import { chip, decimal, make, percent, rememberSilos, several, show, table } from "./dom.js";
import { reliability } from "./charts.js";

const SOURCES = { validation: "on judged queries kept for it", feedback: "on what people said of hits" };

export async function open(view, { signal, failed }) {
  const body = make("div", { class: "page" }, make("h1", {}, "Calibration"));
  show(view, body);
  try {
    const { curves } = await api.calibration(signal);
    rememberSilos(curves.map((curve) => curve.silo));
    if (!curves.length) {
      body.append(make("p", { class: "notice" }, "Nothing is learned yet, and no silo has judged hits of its own to show."));
      return;
    }
    body.append(make("p", { class: "hint" },
      "Each dot is a group of hits: how likely they were said to be right, and how many were. On the dashed line the two agree."
        + " The stroke through a dot is how far chance alone can move it (95 %); hollow dots are of fewer than ten hits. Bars count the hits."),
    picker(curves), diagrams(curves));
  } catch (error) {
    failed(error, body);
  }
}

function diagrams(curves) {
  const order = [...curves].sort((one, other) => Number(other.retriever === "shown") - Number(one.retriever === "shown")
    || one.silo.localeCompare(other.silo) || one.retriever.localeCompare(other.retriever));
  return make("div", { class: "cards small" }, order.map((curve) => make("section", { class: "card" },
    make("h2", {}, chip(curve.silo), make("span", {}, curve.retriever === "shown" ? "hits shown" : curve.retriever)),
    reliability(curve.bins, `Reliability of ${curve.retriever} in ${curve.silo}`),
    make("p", { class: "hint" }, `Off by ${decimal(curve.ece, 3)} on average`
      + (curve.floor === null || curve.floor === undefined ? "" : `; a perfect model would show ${decimal(curve.floor, 3)} at this size`)
      + `. ${several(curve.count, "hit")}, ${curve.relevant} right, ${SOURCES[curve.source]}.`))));
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
    show(rows, table("What this threshold keeps", heads, picked.map((curve) => {
      const kept = curve.thresholds.filter((each) => each.threshold <= at + 1e-9).at(-1) ?? curve.thresholds[0];
      return [chip(curve.silo), ...(many ? [curve.retriever] : []), String(kept.kept),
        kept.kept ? percent(kept.precision) : "–", percent(kept.recall)];
    })));
  };
  tell();
  return make("section", { class: "card" }, make("h2", {}, "Pick a threshold"),
    make("div", { class: "threshold" }, make("label", { for: "keep" }, "Keep hits of"), slider, told), rows);
}
