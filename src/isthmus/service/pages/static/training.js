// A training run as it goes: the curve, what every silo's update was worth, and which were refused.

import * as api from "./api.js";
import { chip, count, decimal, hue, make, rememberSilos, several, show, table } from "./dom.js";
import { heat, lines } from "./charts.js";
import { pause } from "./silos.js";

const EVERY = 2000;

export async function open(view, { signal, failed }) {
  const body = make("div", { class: "page" });
  show(view, body);
  let seen = null;
  while (!signal.aborted) {
    try {
      const run = await api.training(signal);
      const mark = `${run.run} ${run.rounds.length} ${run.finished}`;
      if (mark !== seen) show(body, picture(run));
      seen = mark;
    } catch (error) {
      failed(error, body);
      seen = null;
    }
    await pause(EVERY, signal);
  }
}

function picture(run) {
  const head = make("h1", {}, "Training");
  if (!run.rounds.length) {
    return [head, make("p", { class: "notice" }, run.run
      ? `${run.run} has not finished a round yet.` : "No training run is known to this broker: name its folder as `training` in broker.toml.")];
  }
  const last = run.rounds.at(-1);
  const silos = [...new Set(run.rounds.flatMap((round) => round.asked))].sort();
  const names = [...new Set([...silos, ...run.rounds.flatMap((round) => Object.keys(round.weights))])];
  rememberSilos(silos);
  const finals = Object.entries(run.final).map(([name, value]) => `${name} ${decimal(value, 4)}`).join(", ");
  return [head,
    make("p", { class: "hint" }, `${run.run}: ${run.strategy || "federated"}, ${several(run.rounds.length, "round")}, ${several(silos.length, "silo")}, `
      + (run.finished ? `finished${finals ? `: ${finals}` : ""}.` : `running; round ${last.round} took ${decimal(last.seconds, 1)} s.`)),
    curve(run), bySilo("Weights", "The share of every silo's update in the round's model; memory is the model of the round before", run, names, "weights"),
    bySilo("Risks", "The risk of every silo's update, where the strategy measures one", run, names, "risks"), rejected(run)];
}

function curve(run) {
  const points = run.rounds.filter((round) => round.measure !== null && round.measure !== undefined).map((round) => [round.round, round.measure]);
  if (!points.length) return null;
  return figure("Held-out queries", "The measure on held-out queries after every round",
    lines([{ name: "all silos together", className: "accent", points }], { x: "round", y: "measure" }));
}

function bySilo(title, told, run, names, key) {
  const series = names.map((name) => ({
    name, className: hue(name),
    points: run.rounds.filter((round) => Number.isFinite(round[key][name])).map((round) => [round.round, round[key][name]]),
  })).filter((each) => each.points.length);
  if (!series.length) return null;
  const drawn = series.length > 8 ? heat(series, run.rounds.map((round) => round.round)) : lines(series, { x: "round", y: key.slice(0, -1), zero: true });
  return figure(title, told, drawn, series.length > 8 ? null : make("p", { class: "legend" }, series.map((each) => chip(each.name))));
}

function figure(title, told, ...drawn) {
  return make("section", { class: "card" }, make("h2", {}, title), make("p", { class: "hint" }, told), drawn);
}

function rejected(run) {
  const rows = run.rounds.flatMap((round) => Object.entries(round.rejected).map(([silo, why]) => [String(round.round), chip(silo), why]));
  return make("section", { class: "card" }, make("h2", {}, "Refused updates"),
    rows.length ? table("Updates that were refused", ["round", "silo", "why"], rows.reverse())
      : make("p", { class: "hint" }, `None in ${count(run.rounds.length)} rounds.`));
}
