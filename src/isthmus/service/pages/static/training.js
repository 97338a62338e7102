// Learning runs, live: what was tried, what it gained and whom it hurt, and which version is used; then rounds of `isthmus train`.

import * as api from "./api.js";
import { chip, count, decimal, hue, make, moment, percent, rememberSilos, several, show, signed, table } from "./dom.js";
import { heat, intervals, lines, wide } from "./charts.js";
import { pause } from "./silos.js";

const EVERY = 2000;
const MODELS = {
  baseline: "BM25 and encoder in equal shares, or BM25 alone", weight: "one weight between BM25 and encoder", stack: "a stack over retrievers",
  linear: "a linear model of all features", mlp: "a neural network of all features",
};
const MODES = { masked: "masked sums: the broker sees totals of all silos", fedrisk: "FedRisk: every silo's small report is seen" };

export async function open(view, { signal, failed, may }) {
  const parts = { state: make("div"), versions: make("div"), rounds: make("div") };
  const problem = make("div", { role: "status" });
  show(view, make("div", { class: "page" }, make("h1", {}, "Training"), problem, parts.state, parts.versions, parts.rounds));
  const marks = {}, again = {};
  /** Draw a part anew where what it shows, or the width of its charts, has changed; details stay open, and the focus where it was. */
  const draw = (name, value, picture) => {
    const mark = JSON.stringify([value, wide()]);
    if (marks[name] === mark) return;
    marks[name] = mark;
    again[name] = () => draw(name, value, picture);
    const place = parts[name], opened = new Map([...place.querySelectorAll("details")].map((each) => [each.dataset.version, each.open]));
    const focus = place.contains(document.activeElement) ? document.activeElement.dataset.act : null;
    show(place, picture(value));
    for (const each of place.querySelectorAll("details")) if (opened.has(each.dataset.version)) each.open = opened.get(each.dataset.version);
    if (focus) place.querySelector(`[data-act="${focus}"]`)?.focus();
  };
  const act = (work) => async () => {
    try {
      drawLearning(await work());
      show(problem);
    } catch (error) {
      failed(error, problem);
    }
  };
  const drawLearning = (learning) => {
    draw("state", { ...learning, versions: learning.versions.length }, () => progress(learning, may("admin"), act));
    draw("versions", [learning.versions, learning.state === "running"], () => versions(learning, may("admin"), act));
  };
  window.addEventListener("resize", () => { for (const redraw of Object.values(again)) redraw(); }, { signal });
  let lost = false; // whether the problem that is shown is that nothing was to be had
  while (!signal.aborted) {
    try {
      const [learning, run] = await Promise.all([api.learning(signal), api.training(signal)]);
      if (lost) show(problem);
      lost = false;
      drawLearning(learning);
      draw("rounds", run, rounds);
    } catch (error) {
      lost = true;
      failed(error, problem);
    }
    await pause(EVERY, signal);
  }
}

/** What goes on now, and the button that begins a run. */
function progress(learning, admin, act) {
  const running = learning.state === "running";
  const silos = Object.entries(learning.silos).filter(([, version]) => learning.current && version !== (learning.current === "none" ? "" : learning.current));
  const about = running
    ? `Learning since ${moment(learning.started)}${learning.stage ? `: ${learning.stage}` : ""}.`
    : !learning.versions.length
      ? "The silos have not learned yet. They learn from judgements: say right or wrong to hits, or import judgements with isthmus judgements import."
        + (admin ? "" : " An administrator then lets them learn.")
      : learning.current && learning.current !== "none" ? `Searches use version ${learning.current}.` : "Searches use nothing that was learned.";
  return make("section", { class: "card", "aria-label": "Learning" },
    make("h2", {}, "Learning", admin ? make("button", {
      type: "button", class: "main", "data-act": "learn", disabled: running, onclick: act(api.learn),
    }, running ? "Learning …" : "Learn now") : null),
    make("p", { role: "status" }, about),
    running ? make("p", { class: "hint" }, MODES[learning.mode] ?? learning.mode, learning.done ? `; ${several(learning.done, "step")} done` : "", ".") : null,
    !running && learning.problem ? make("p", { class: "warn" }, `The last run came to nothing: ${learning.problem}`) : null,
    learning.every ? make("p", { class: "hint" }, `Runs by itself every ${learning.every}${learning.next ? `, next ${moment(learning.next)}` : ""}.`) : null,
    silos.map(([silo, version]) => make("p", { class: "warn" }, chip(silo), version
      ? ` searches with version ${version}: its hits are merged by the baseline's probabilities.`
      : " has not the current model: its hits are merged by the baseline's probabilities.")));
}

function versions(learning, admin, act) {
  rememberSilos(learning.versions.flatMap((version) => version.record?.silos ?? []));
  return learning.versions.map((version, at) => make("section", { class: "card", "aria-label": `Version ${version.version}` },
    make("h2", {}, make("span", {}, `Version ${version.version}`, version.current ? make("span", { class: "chip accent" }, "in use") : null),
      admin && version.usable && !version.current ? make("button", {
        type: "button", "data-act": `use ${version.version}`, disabled: learning.state === "running", onclick: act(() => api.rollback(version.version)),
      }, "Use this one") : null),
    make("p", {}, verdict(version)),
    make("p", { class: "hint" }, `${moment(version.learned)}${version.by ? `, by ${version.by}` : ""}; ${MODES[version.mode] ?? version.mode}. What left each silo for it is under `, make("a", { href: "#/silos" }, "Silos"), "."),
    version.record ? make("details", { "data-version": version.version, open: at === 0 || version.current }, make("summary", { "data-act": `see ${version.version}` }, "What was tried and measured"), record(version.record)) : null));
}

/** Adopted or not, and why, in a sentence. */
function verdict(version) {
  const { record } = version;
  if (version.problem || !record?.kind) return version.problem || "Nothing came of it.";
  const gain = record.models[record.kind]?.difference;
  if (record.adopted) {
    return `Adopted: ${MODELS[record.kind] ?? record.kind}, nDCG@10 ${signed(gain?.mean)} over the baseline (${signed(gain?.low)} to ${signed(gain?.high)}); `
      + `${several(gain?.helped ?? 0, "query", "queries")} helped, ${count(gain?.hurt ?? 0)} hurt.`;
  }
  const needed = record.queries_needed ? ` About ${several(record.queries_needed, "judged query", "judged queries")} might change that.` : "";
  return `Not adopted: ${record.why}. The baseline stays, with probabilities.${needed}`;
}

function record(record) {
  const names = Object.keys(record.models ?? {});
  return make("div", {}, record.models ? [
    make("p", { class: "hint" }, `${several(record.queries, "judged query", "judged queries")} with ${several(record.relevant, "relevant document")} found by the search in ${several(record.silos.length, "silo")}, `
      + `${record.folds} folds; ${several(record.rows, "row")}, ${several(record.questions, "question")} to each silo, ${decimal(record.seconds, 1)} s. `
      + "nDCG@10 says how good the first ten hits of a query are, from 0 to 1; no model is measured on queries that it has learned from."),
    table("Models tried, cross-validated", ["model", "parameters", "nDCG@10", "to the baseline", "helped", "hurt", "lost over 0.2 (share, at most)"], names.map((name) => {
      const { parameters, difference, "nDCG@10": ndcg } = record.models[name];
      const mark = name === record.kind ? `${name} ✓` : name;
      return [make("span", { title: MODELS[name] }, mark), count(parameters), decimal(ndcg, 3),
        difference ? `${signed(difference.mean)} (${signed(difference.low)} to ${signed(difference.high)})` : "–",
        difference ? count(difference.helped) : "–", difference ? count(difference.hurt) : "–",
        difference ? `${count(difference.lost_much)} (${percent(difference.lost_much_high)})` : "–"];
    })),
    gains(record, names), honesty(record.calibration ?? {})] : null,
  bySiloTable(record));
}

function gains(record, names) {
  const rows = names.filter((name) => Number.isFinite(record.models[name].difference?.low)).map((name) => ({
    name, className: name === record.kind ? "accent" : "hue-7", ...record.models[name].difference,
  }));
  return rows.length ? intervals(rows, "Difference of nDCG@10 to the baseline with its 95 % interval", "nDCG@10, difference to the baseline") : null;
}

/** Whether probabilities are meant: on queries that the calibration has not seen. */
function honesty(calibration) {
  const points = (number) => (Number.isFinite(number) ? `${(100 * number).toFixed(1)} points` : "–");
  const words = { before: "before those of unlike queries were lowered", after: "as used", "one silo": "as used where one silo is searched" };
  const rows = Object.entries(calibration).map(([name, each]) => [words[name] ?? name, points(each.ece), `${points(each.floor)}, 95 % below ${points(each.floor_high)}`, count(each.hits), percent(each.base_rate)]);
  return rows.length ? table("Calibration of hits shown", ["probabilities", "off by (ECE)", "a perfect model", "hits", "right among them"], rows) : null;
}

/** What silos counted for, where the mode weighs them; and those that took no part. */
function bySiloTable(record) {
  const weights = record.weights ?? {}, risks = record.risks ?? {}, refused = record.left_out ?? {};
  const names = [...new Set([...Object.keys(weights), ...Object.keys(risks)])].sort();
  const rows = names.map((name) => [chip(name), decimal(weights[name], 3), decimal(risks[name], 3)]);
  return [rows.length ? table("Silos", ["silo", "weight", "risk"], rows) : null,
    Object.entries(refused).map(([silo, why]) => make("p", { class: "warn" }, chip(silo), ` took no part: ${why}`))];
}

/** Rounds of `isthmus train`, where the broker knows of a run. */
function rounds(run) {
  if (!run.run) return null;
  const head = make("h2", { class: "apart" }, "Rounds of isthmus train");
  if (!run.rounds.length) return [head, make("p", { class: "notice" }, `${run.run} has not finished a round yet.`)];
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
