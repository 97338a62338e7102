// Elements from plain values. Strings become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** make("p", {class: "lead"}, "text", child): attributes as they are named, on… as listeners. */
export function make(tag, attributes = {}, ...children) {
  return dress(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function draw(tag, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width" && element.style && !(element instanceof SVGElement) && String(value).endsWith("%")) {
      element.style.width = value; // a style attribute would need a weaker content policy
    } else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function show(place, ...children) {
  place.replaceChildren(...children.flat(Infinity).filter(Boolean));
}

/** A table with a caption for those who hear it. On a phone every row is a card: roles say that it is a table still. */
export function table(caption, heads, rows, last = null) {
  const line = (cells) => make("tr", { role: "row" }, cells.map((cell, at) => make("td", { role: "cell", "data-head": heads[at] }, cell === "" ? null : make("span", {}, cell))));
  return make("table", { role: "table" },
    make("caption", { class: "unseen" }, caption),
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, heads.map((head) => make("th", { scope: "col", role: "columnheader" }, head)))),
    make("tbody", { role: "rowgroup" }, rows.map(line)),
    last ? make("tfoot", { role: "rowgroup" }, line(last)) : null);
}

export const percent = (share) => {
  if (share === null || share === undefined) return "–";
  if (share > 0 && share < 0.005) return "<1 %";
  if (share < 1 && share > 0.995) return ">99 %";
  return `${Math.round(share * 100)} %`;
};

export const count = (number) => (number === null || number === undefined ? "–" : number.toLocaleString("en-GB"));

export function several(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** How many documents the silos have; where some do not say, in how many of them. */
export function documentsIn(silos) {
  const up = silos.filter((silo) => silo.ready);
  const documents = up.reduce((sum, silo) => sum + silo.ready.documents, 0);
  return `${several(documents, "document")} in ${up.length < silos.length ? `${up.length} of ` : ""}${several(silos.length, "silo")}`;
}

export function decimal(number, digits = 2) {
  if (number === null || number === undefined) return "–";
  if (number !== 0 && Math.abs(number) < 10 ** -digits) return number.toExponential(1).replace("-", "−");
  return number.toFixed(digits).replace("-", "−");
}

/** A difference, with its sign. */
export function signed(number, digits = 3) {
  if (number === null || number === undefined) return "–";
  return `${number > 0 ? "+" : ""}${number.toFixed(digits).replace("-", "−")}`;
}

/** A time that something took: "under 1 ms", "12 ms", "1.2 s". */
export function took(milliseconds) {
  if (milliseconds < 1) return "under 1 ms";
  return milliseconds < 1000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

export function moment(text) {
  const when = new Date(text);
  return Number.isNaN(when.getTime()) ? text : when.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** The same colour for the same silo everywhere: its place among all names. */
const places = new Map();
export function rememberSilos(names) {
  for (const name of [...names].sort()) if (!places.has(name)) places.set(name, places.size % 8);
}
export function hue(silo) {
  if (!places.has(silo)) places.set(silo, places.size % 8);
  return `hue-${places.get(silo)}`;
}
export function chip(silo, attributes = {}) {
  return make("span", { ...attributes, class: `chip ${hue(silo)}` }, silo);
}

const STATES = { answered: "up", late: "late", refused: "refuses", down: "down", broken: "broken" };
/** A silo's state, by word and by colour. */
export const state = ({ status }) => make("span", { class: `state ${status}` }, STATES[status] ?? status);
