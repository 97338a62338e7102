"""The page in every state that people meet: looked over at both widths, and used by keyboard alone."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from browsing import focused, look_over, opened, press, tab_to
from isthmus.service.reliability import reliability_curve
from isthmus.service.stores import Draft
from isthmus.service.wire import RIGHTS
from searching_silos import NORTH, OPEN, SOUTH, searching

pytestmark = pytest.mark.timeout(600)
PATIENCE = 30.0
ODD = Draft(
    "Ω-مرحبا-" + "x" * 200 + ".md",
    "Très ‮long‬ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 " + "unbroken" * 30,
    "tidal " + "é̂🇺🇳漢字" * 40,
)
STATES = {
    "start": ("search", ".here"),
    "results, a silo down and a new one": ("search?q=tidal+power", ".hit"),
    "narrowed": ("search?q=tidal+-flats+type:md", ".facets .chosen"),
    "another page": ("search?q=tidal&page=2", "a[rel=prev]"),
    "nothing found": ("search?q=watr", "#suggestion"),
    "without words, by date": ("search?q=type:md", ".status :text('ranked by date')"),
    "long titles, odd characters": ("search?q=unbroken+漢字", ".hit"),
    "silos": ("silos", ".card .warn"),
    "nothing learned": ("training", "section[aria-label=Learning]"),
    "one silo off": ("calibration", ".warn"),
    "no requests": ("requests", ".cards .hint"),
    "not for administrators": ("admin", ".notice"),
}
"""Where each state is, and what shows that it is there; page_checklist.md has all, with the other tests'."""


SLOW_STREAM = """() => {
  const event = (name, data) => `event: ${name}\\ndata: ${JSON.stringify(data)}\\n\\n`;
  const north = event("silo", { silo: "north", status: "answered", count: 3, took_ms: 12 });
  const failed = event("error", { title: "Gateway Timeout", status: 504, detail: "out of time" });
  const encoder = new TextEncoder();
  window.fetch = async () => new Response(new ReadableStream({ start(controller) {
    controller.enqueue(encoder.encode(north + failed.slice(0, 20)));
    window.finish = () => { controller.enqueue(encoder.encode(failed.slice(20))); controller.close(); };
  } }));
}"""
"""A broker whose answer comes bit by bit."""
ROUND = {"seconds": 1.0, "asked": ["north"], "weights": {"north": 1.0}, "risks": {}, "rejected": {}}
RUN = {
    "run": "journey",
    "strategy": "fedavg",
    "finished": True,
    "final": {},
    "rounds": [{**ROUND, "round": at, "measure": 0.5 + at / 10} for at in (1, 2, 3)],
}
"""What a broker says of a run of `isthmus train`."""


def judged(silo, retriever, right):
    """The curve of a silo whose hits of probability p were right in `right` × p of all cases."""
    shown = [0.1, 0.3, 0.5, 0.7, 0.9]
    relevant = [at < round(40 * p * right) for p in shown for at in range(40)]
    return reliability_curve(np.repeat(shown, 40), relevant, silo=silo, retriever=retriever)


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    drafts = {"north": NORTH, "south": [*SOUTH, ODD], "new": []}
    curves = {
        "north": [judged("north", "bm25", 0.9), judged("north", "shown", 1)],
        "south": [judged("south", "shown", 0.5)],
    }
    policies = dict.fromkeys(drafts, OPEN)
    folder = tmp_path_factory.mktemp("page")
    with searching(folder, policies, drafts=drafts, unreachable=("west",), curves=curves) as made:
        yield made


def page_at(browser, silos, place, **context):
    return opened(browser, f"{silos.http.base_url}/#/{place}", patience=PATIENCE, **context)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_state_is_whole_and_usable(browser, silos, width, scheme):
    shape = {"viewport": {"width": width, "height": 850}, "color_scheme": scheme, "reduced_motion": "reduce"}
    with page_at(browser, silos, "search", **shape) as page:
        for state, (place, sign) in STATES.items():
            page.goto(f"{silos.http.base_url}/#/{place}")
            page.locator(sign).first.wait_for()
            page.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
            look_over(page, state, (width,))


def test_silos_that_are_down_or_new_are_plain_at_once(browser, silos):
    with page_at(browser, silos, "search") as page:
        here = page.locator(".here")
        here.get_by_text("west").wait_for()
        assert "is down" in here.locator("li", has_text="west").inner_text()
        assert "no document in its index yet" in here.locator("li", has_text="new").inner_text()
        assert "Papers of north." in here.inner_text()
        assert "in 3 of 4 silos." in page.locator("h2:has-text('What is here') + p").inner_text()
        assert {"west (down)", "new (new)"} <= set(page.locator("#silo-filter label").all_inner_texts())
        page.goto(f"{silos.http.base_url}/#/search?q=tidal")
        page.locator(".status .warn", has_text="west").wait_for()
        page.goto(f"{silos.http.base_url}/#/silos")
        page.get_by_text("in 3 of 4 silos; ").wait_for()
        facts = page.locator(".card[aria-label=west]").inner_text().split()
        assert facts[-3:] == ["Last", "training", "–"], "nobody knows what it learned"


def test_every_right_of_a_peer_is_listed(browser, silos):
    with page_at(browser, silos, "silos") as page:
        page.locator('details[data-about="left north"] summary').click()
        row = page.get_by_role("table", name="What peers of north may do").get_by_role("row").nth(1)
        rights = [name for name in RIGHTS if getattr(OPEN, name)]
        assert {"search", "feedback"} < set(rights)
        row.get_by_text(", ".join(rights).replace("_", " ")).wait_for()
        look_over(page, "rights of peers")


def test_calibration_has_a_total_and_a_verdict_by_silo(browser, silos):
    with page_at(browser, silos, "calibration") as page:
        verdicts = page.get_by_role("table", name="Verdict for every silo")
        verdicts.wait_for()
        rows = [row.split("\t") for row in verdicts.locator("tbody tr").all_inner_texts()]
        assert [row[:3] for row in rows] == [
            ["all silos", "400", "150"],
            ["north", "200", "100"],
            ["south", "200", "50"],
        ]
        north, south = rows[1][-1], rows[2][-1]
        assert north == "Percentages hold, as far as so many hits can tell."
        assert south == "Too sure: on average it said 50 %, and 25 % were right."
        groups = page.locator("section.apart").evaluate_all("all => all.map((each) => each.ariaLabel)")
        assert groups == ["all silos", "north", "south"]
        names = page.locator("section.apart[aria-label=north] h3").all_inner_texts()
        assert names == ["hits shown", "bm25"]
        titles = page.locator("section.apart svg").first.locator(".tick").all_text_contents()
        assert {"share that was right, %", "probability shown, %"} <= set(titles)
        page.get_by_label("Keep hits of").press("End")
        kept = page.get_by_role("table", name="What this threshold keeps")
        assert kept.locator("tbody tr").count() == 2
        assert kept.locator("tfoot td").all_inner_texts() == ["all silos", "80", "68 %", "36 %"]


def test_silos_that_list_no_requests_for_one_reason_say_it_once(browser, silos):
    with page_at(browser, silos, "requests") as page:
        page.locator("p.hint .chip", has_text="west").wait_for()
        silent = page.locator("p.hint:has(.chip)")
        reasons = silent.evaluate_all("all => all.map((each) => each.lastChild.textContent)")
        assert len(reasons) == len(set(reasons)) < silent.locator(".chip").count()


def test_waiting_a_failure_and_no_answer_are_said(browser, silos):
    with page_at(browser, silos, "search?q=tidal") as page:
        page.locator(".hit").first.wait_for()
        waiting = []
        page.route("**/v1/search**", lambda route: waiting.append(route))
        page.fill("#query", "tidal power")
        page.keyboard.press("Enter")
        page.locator(".waiting", has_text="Asking 4 silos").wait_for()
        look_over(page, "waiting")
        told = {"title": "Service Unavailable", "status": 503, "detail": "it is too busy"}
        waiting.pop().fulfill(status=503, json=told, headers={"retry-after": "7"})
        page.get_by_role("alert").get_by_text("It is too busy. Try again in 7 s.").wait_for()
        assert page.locator(".hit, .waiting p").count() == 0
        look_over(page, "a failure")
        page.unroute("**/v1/search**")
        page.route("**/v1/search**", lambda route: route.abort())
        page.fill("#query", "tidal")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("The broker does not answer").wait_for()
        page.unroute("**/v1/search**")
        page.keyboard.press("Enter")
        page.locator(".hit").first.wait_for()


def test_a_link_that_is_no_address_costs_no_hit(browser, silos):
    """A silo chooses its links, and the address of one may not be one."""

    def broken(route):
        answer = route.fetch()
        route.fulfill(response=answer, body=re.sub(r'"link": ?""', '"link": "http://["', answer.text()))

    with page_at(browser, silos, "silos") as page:
        page.route("**/v1/search**", broken)
        page.goto(f"{silos.http.base_url}/#/search?q=tidal")
        page.locator(".hit").first.wait_for()
        assert page.get_by_role("alert").count() == 0
        assert page.locator(".document-acts a").count() == 0


def test_silos_are_shown_as_they_answer_and_a_search_without_events_is_the_same(browser, silos):
    def silent(route):
        route.fulfill(status=404, json={"title": "Not Found", "status": 404})

    with page_at(browser, silos, "search?q=tidal") as page:
        page.locator(".hit").first.wait_for()
        streamed = page.locator(".hit .where code").all_inner_texts()
        with page.expect_request("**/v1/search"):
            page.route("**/v1/search/stream", silent)
            page.reload()
        page.locator(".hit").first.wait_for()
        assert page.locator(".hit .where code").all_inner_texts() == streamed
        # a body that comes in two parts, cut inside an event
        page.unroute("**/v1/search/stream")
        page.evaluate(SLOW_STREAM)
        page.fill("#query", "tidal power")
        page.keyboard.press("Enter")
        page.locator(".waiting", has_text="north 3 hits, 12 ms").wait_for()
        assert "south …" in page.locator(".waiting").inner_text()
        look_over(page, "silos as they answer")
        page.evaluate("finish()")
        page.get_by_role("alert").get_by_text("out of time").wait_for()
        assert page.locator(".waiting p").count() == 0


def test_a_key_that_may_not_search_is_told_so(browser, silos):
    def nobody(route):
        route.fulfill(json={"name": "gauge", "scopes": ["metrics"]})

    with page_at(browser, silos, "search") as page:
        page.route("**/v1/me", nobody)
        page.reload()
        page.get_by_role("heading", name="No right to search").wait_for()
        assert page.locator("nav[aria-label=Views] a:visible").count() == 0
        look_over(page, "no right to search")


def test_everything_by_keyboard_alone(browser, silos):
    with page_at(browser, silos, "silos") as page:
        page.locator(".card").first.wait_for()
        page.keyboard.press("Tab")
        assert focused(page) == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "view"
        # cards are drawn anew while somebody reads: what is open stays so, and keeps the focus
        press(page, ("What has left it", "Nothing has left it"))
        page.evaluate("() => { document.activeElement.old = true; }")
        page.wait_for_function("() => (e => e.tagName === 'SUMMARY' && !e.old)(document.activeElement)")
        assert page.locator(".card details[open]").count() == 1
        assert page.url.endswith("#/silos"), "it leads to the content, not to another view"
        # every view by its link, and the focus is on its heading
        for view in ("Training", "Requests", "Calibration"):
            press(page, view, "Shift+Tab")
            page.wait_for_function(
                "view => (e => e.tagName === 'H1' && e.textContent === view)(document.activeElement)",
                arg=view,
            )
            assert page.title() == f"{view} · Isthmus"
        page.locator("#keep").wait_for()
        tab_to(page, "keep")  # a slider, in which nobody types
        page.keyboard.press("/")
        page.wait_for_function("() => document.activeElement.id === 'query'")
        page.keyboard.type("tidal")
        page.keyboard.press("Enter")
        page.locator(".hit").first.wait_for()
        assert page.evaluate("document.activeElement.id") == "query"
        # hits, and why
        press(page, "Why this result?")
        page.locator(".hit details[open] table").first.wait_for()
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.className") == "hit plain"
        page.keyboard.press("w")
        assert page.locator(".hit details[open]").count() == 2
        press(page, "right: ")
        page.locator(".hit", has_text="kept by").wait_for()
        # a facet chosen and taken out again: the focus is never lost
        press(page, "md")
        page.locator(".facets .chosen").wait_for()
        assert page.evaluate("document.activeElement.className") == "status"
        press(page, "md: chosen")
        page.wait_for_function("() => !location.hash.includes('type')")
        page.locator("a[rel=next]").wait_for()
        press(page, "Next →")
        page.locator("text=Hits 21 to 40").wait_for()
        assert page.evaluate("document.activeElement.className") == "status"
        press(page, "Colours: as", "Shift+Tab")
        assert focused(page) == "Colours: light"
        # silos to ask
        tab_to(page, "Search")  # the query, then the button beside it
        tab_to(page, "Search")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        page.wait_for_function("() => location.hash.includes('without')")
        # the way back through all of it
        for wanted in ("page=2", "tidal", "type", "tidal"):
            page.go_back()
            page.wait_for_function("wanted => location.hash.includes(wanted)", arg=wanted)


def test_charts_of_training_fit_a_window_that_has_changed(browser, silos):
    with page_at(browser, silos, "silos", viewport={"width": 1280, "height": 850}) as page:
        page.route("**/v1/training", lambda route: route.fulfill(json=RUN))
        page.goto(f"{silos.http.base_url}/#/training")
        label = page.locator("svg.chart .tick").first
        label.wait_for()
        heights = []
        for width in (1280, 390, 1280):
            page.set_viewport_size({"width": width, "height": 850})
            page.wait_for_function(
                "wide => document.querySelector('svg.chart').viewBox.baseVal.width === wide",
                arg=min(640, width - 80),
            )
            heights.append(label.bounding_box()["height"])
        assert min(heights) > 0.8 * max(heights), heights


def test_suggestions_while_typing_are_the_operators_queries_and_ones_own(browser, silos):
    with page_at(browser, silos, "search?q=tidal") as page:
        page.locator(".hit").first.wait_for()
        page.goto(f"{silos.http.base_url}/#/search")
        page.locator(".here").wait_for()
        assert "tidal" in page.locator("#former option").evaluate_all("all => all.map((each) => each.value)")
        stored = page.evaluate("JSON.stringify([localStorage, sessionStorage])")
        assert "tidal" not in json.dumps(stored), "what was searched is stored nowhere"
