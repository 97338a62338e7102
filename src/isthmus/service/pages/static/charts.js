// Small SVG charts: lines over rounds, a map of many silos, reliability diagrams.

import { decimal, draw, percent, signed } from "./dom.js";

/** A phone gets a narrower drawing, not a smaller one: its letters stay readable. */
export const wide = () => Math.max(300, Math.min(640, document.documentElement.clientWidth - 80));
const HIGH = 250, LEFT = 52, RIGHT = 12, TOP = 22, BOTTOM = 36;

function ticks(low, high, wanted = 5) {
  const step = 10 ** Math.floor(Math.log10((high - low) / wanted || 1));
  const size = [1, 2, 5, 10].map((each) => each * step).find((each) => (high - low) / each <= wanted) ?? step;
  const found = [];
  for (let at = Math.ceil(low / size - 1e-9) * size; at <= high + size * 1e-9; at += size) found.push(Number(at.toPrecision(12)));
  return found;
}

function frame(label, width, height = HIGH) {
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "chart" });
}

/** Series of [x, y] points over one pair of axes. */
export function lines(series, { x, y, zero = false }) {
  const width = wide();
  const points = series.flatMap((each) => each.points);
  const xs = points.map(([at]) => at), ys = points.map(([, at]) => at);
  const [left, right] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
  let low = zero ? Math.min(0, ...ys) : Math.min(...ys), high = Math.max(...ys);
  if (high - low < 1e-9) { low -= 0.01; high += 0.01; }
  const room = (high - low) * 0.06;
  [low, high] = [zero ? low : low - room, high + room];
  const px = (value) => LEFT + ((value - left) / (right - left)) * (width - LEFT - RIGHT);
  const py = (value) => HIGH - BOTTOM - ((value - low) / (high - low)) * (HIGH - TOP - BOTTOM);
  const last = series.map((each) => `${each.name} ${decimal(each.points.at(-1)[1], 3)}`).join(", ");
  const chart = frame(`${y} by ${x}; last: ${last}`, width);
  for (const at of ticks(low, high)) {
    chart.append(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(at), y2: py(at) }),
      draw("text", { class: "tick", x: LEFT - 8, y: py(at) + 4, "text-anchor": "end" }, String(at)));
  }
  for (const at of ticks(left, right, 8).filter(Number.isInteger)) {
    chart.append(draw("text", { class: "tick", x: px(at), y: HIGH - BOTTOM + 18, "text-anchor": "middle" }, String(at)));
  }
  chart.append(draw("text", { class: "tick", x: width - RIGHT, y: HIGH - 4, "text-anchor": "end" }, x),
    draw("text", { class: "tick", x: 4, y: TOP }, y));
  for (const { name, className, points: path } of series) {
    const steps = path.map(([a, b], at) => `${at ? "L" : "M"}${px(a).toFixed(1)} ${py(b).toFixed(1)}`).join("");
    const [a, b] = path.at(-1);
    chart.append(draw("path", { class: `line ${className}`, d: steps }, draw("title", {}, name)),
      draw("circle", { class: `dot ${className}`, cx: px(a), cy: py(b), r: 4 }, draw("title", {}, `${name}: ${decimal(b, 4)}`)));
  }
  return chart;
}

/** Differences with their intervals, a row each, and a line at zero: [{name, mean, low, high, className}]. */
export function intervals(rows, label, x) {
  const high = 26, left = 76, width = wide(), height = TOP + rows.length * high + BOTTOM + 8;
  const low = Math.min(0, ...rows.map((row) => row.low)), most = Math.max(0, ...rows.map((row) => row.high));
  const room = (most - low || 0.01) * 0.06;
  const px = (value) => left + ((value - low + room) / (most - low + 2 * room || 1)) * (width - left - RIGHT);
  const chart = frame(label, width, height);
  for (const at of ticks(low, most)) {
    chart.append(draw("line", { class: at === 0 ? "ideal" : "grid", x1: px(at), x2: px(at), y1: TOP, y2: height - BOTTOM - 8 }),
      draw("text", { class: "tick", x: px(at), y: height - BOTTOM + 10, "text-anchor": "middle" }, String(at)));
  }
  rows.forEach((row, at) => {
    const y = TOP + at * high + high / 2;
    chart.append(draw("text", { class: "tick", x: left - 8, y: y + 4, "text-anchor": "end" }, row.name),
      draw("line", { class: `whisker ${row.className}`, x1: px(row.low), x2: px(row.high), y1: y, y2: y }),
      draw("circle", { class: `dot ${row.className}`, cx: px(row.mean), cy: y, r: 4 },
        draw("title", {}, `${row.name}: ${signed(row.mean, 3)} (${signed(row.low, 3)} to ${signed(row.high, 3)})`)));
  });
  chart.append(draw("text", { class: "tick", x: width - RIGHT, y: height - 4, "text-anchor": "end" }, x));
  return chart;
}

/** Many silos: a row each, a column per round, darker is more. */
export function heat(series, rounds) {
  const high = 14, width = wide(), shown = series.slice(0, 60);
  const height = TOP + shown.length * high + BOTTOM;
  const place = new Map(rounds.map((round, at) => [round, at]));
  const column = (width - 110 - RIGHT) / rounds.length;
  const most = Math.max(...shown.flatMap((each) => each.points.map(([, value]) => value)), 1e-12);
  const chart = frame(`${shown.length} silos over ${rounds.length} rounds, darker is more`, width, height);
  shown.forEach(({ name, points }, row) => {
    chart.append(draw("text", { class: "tick", x: 104, y: TOP + row * high + 11, "text-anchor": "end" }, name.slice(0, 16)));
    for (const [round, value] of points) {
      chart.append(draw("rect", {
        class: "cell", x: 110 + place.get(round) * column, y: TOP + row * high, width: Math.max(column - 0.5, 1), height: high - 1,
        "fill-opacity": Math.max(0.05, value / most).toFixed(2),
      }, draw("title", {}, `${name}, round ${round}: ${decimal(value, 3)}`)));
    }
  });
  chart.append(draw("text", { class: "tick", x: width - RIGHT, y: height - 6, "text-anchor": "end" }, "round"));
  return chart;
}

/** Predicted against observed, with what chance may do to every bin, and the number of its hits below. */
export function reliability(bins, label) {
  const size = 250, low = 30, high = 194, floor = 246;
  const px = (value) => low + value * (size - low - 10);
  const py = (value) => high - value * (high - 24);
  const filled = bins.filter((bin) => bin.count);
  const most = Math.max(...filled.map((bin) => bin.count), 1);
  const told = filled.map((bin) => `${percent(bin.predicted)} said, ${percent(bin.observed)} right of ${bin.count}`).join("; ");
  const chart = frame(`${label}: ${told}`, size, 284);
  for (const at of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(draw("line", { class: "grid", x1: px(0), x2: px(1), y1: py(at), y2: py(at) }),
      draw("text", { class: "tick", x: low - 5, y: py(at) + 4, "text-anchor": "end" }, String(at * 100)),
      draw("text", { class: "tick", x: px(at), y: 262, "text-anchor": at === 1 ? "end" : "middle" }, String(at * 100)));
  }
  chart.append(draw("text", { class: "tick", x: 2, y: 12 }, "share that was right, %"),
    draw("text", { class: "tick", x: size - 10, y: 279, "text-anchor": "end" }, "probability shown, %"));
  chart.append(draw("line", { class: "ideal", x1: px(0), y1: py(0), x2: px(1), y2: py(1) }));
  for (const bin of filled) {
    const tall = Math.max(1.5, (Math.sqrt(bin.count / most)) * 40);
    chart.append(draw("rect", { class: "count", x: px(bin.low) + 1, width: Math.max(px(bin.high) - px(bin.low) - 2, 1), y: floor - tall, height: tall },
      draw("title", {}, `${bin.count} hits`)));
  }
  const sound = filled.filter((bin) => bin.count >= FEW);
  chart.append(draw("path", { class: "line accent", d: sound.map((bin, at) => `${at ? "L" : "M"}${px(bin.predicted)} ${py(bin.observed)}`).join("") }));
  for (const bin of filled) {
    const [least, greatest] = interval(bin.observed, bin.count);
    const x = px(bin.predicted);
    chart.append(draw("line", { class: "whisker accent", x1: x, x2: x, y1: py(least), y2: py(greatest) }),
      draw("circle", { class: `dot accent${bin.count < FEW ? " few" : ""}`, cx: x, cy: py(bin.observed), r: 4 },
        draw("title", {}, `said ${percent(bin.predicted)}, right ${percent(bin.observed)} of ${bin.count}`)));
  }
  return chart;
}

const FEW = 10; // hits in a bin that say little

/** Where a share of so many lies with 95 % confidence (Wilson). */
function interval(share, number) {
  const z = 1.96, weight = 1 + (z * z) / number;
  const middle = (share + (z * z) / (2 * number)) / weight;
  const reach = (z / weight) * Math.sqrt((share * (1 - share)) / number + (z * z) / (4 * number * number));
  return [Math.max(0, middle - reach), Math.min(1, middle + reach)];
}
