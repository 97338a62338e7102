// Who has it? A silo that shows no hits may say how many documents answer, with noise.

import * as api from "./api.js";
import { count, decimal, make, percent } from "./dom.js";

const LEVELS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], USUAL = 0.2;

/** Whether a silo, as /v1/silos shows it, gives noised counts to somebody. */
export const counts = (silo) => Boolean(silo.release?.peers?.some((peer) => peer.noised_counts));

/** A button that asks one silo, because a new question spends its budget. */
export function asker(silo, query, above) {
  const threshold = LEVELS.filter((level) => level <= above + 1e-9).at(-1) ?? USUAL;
  const told = make("span", { class: "hint", role: "status" });
  const button = make("button", {
    type: "button", class: "quiet small", title: "A new question spends the silo's privacy budget; one that was asked before costs nothing",
    onclick: async () => {
      button.disabled = true;
      try {
        const [{ answer, detail, status }] = (await api.count({ query, threshold, silos: [silo] })).silos;
        told.textContent = answer ? said(answer, threshold) : detail || status;
      } catch (error) {
        told.textContent = error.message;
        button.disabled = false;
      }
    },
  }, "How many has it?");
  return make("span", { class: "noised" }, " ", button, " ", told);
}

function said(answer, threshold) {
  const what = answer.by === "words" ? "have all words" : `are ${percent(threshold)} likely or more`;
  const cost = answer.repeated ? "asked before, nothing spent" : `ε = ${decimal(answer.epsilon)} spent`;
  return `about ${count(answer.count)} ${answer.unit}s ${what} (${count(answer.low)} to ${count(answer.high)}, by noise alone); ${cost}`;
}
