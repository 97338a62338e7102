"""The search page in a browser: filters as chips, facets, pages, another spelling, and the way back."""

from __future__ import annotations

import time

import pytest

from browsing import look_over, opened
from isthmus.service.stores import Draft
from searching_silos import NORTH, OPEN, SOUTH, searching

pytestmark = pytest.mark.timeout(600)
PATIENCE = 60.0
FORMS = Draft(
    "forms.md",
    "Forms",
    "Normalize a norm, or two norms: an open door opens, opening is an operation. A test tested queries of"
    " a query. Les cafés; тест тесты; 漢字 漢.",
)
"""Words in several forms, and words that only begin alike."""


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    drafts = {"north": [*NORTH, FORMS], "south": SOUTH}
    with searching(tmp_path_factory.mktemp("page"), dict.fromkeys(drafts, OPEN), drafts=drafts) as made:
        yield made


@pytest.fixture
def page(browser, silos):
    with opened(browser, f"{silos.http.base_url}/#/search", patience=PATIENCE) as shown:
        yield shown


def until(what, wanted):
    """Look again until it is so."""
    end = time.monotonic() + PATIENCE
    while what() != wanted and time.monotonic() < end:
        time.sleep(0.05)
    assert what() == wanted


def asked(page, query):
    page.fill("#query", query)
    page.keyboard.press("Enter")
    until(page.title, f"{query} · Isthmus")
    page.wait_for_selector(".search:not(.busy) .status p")


def documents(page):
    """The documents of hits, without their copies; a title that is the document's name stands alone."""
    return page.locator(".hit").evaluate_all(
        "all => all.map((each) => (each.querySelector('.where:not(.also) code')"
        " ?? each.querySelector('h2')).textContent)"
    )


def test_a_search_is_narrowed_widened_paged_and_undone(page):
    asked(page, "tidal -flats")
    assert page.inner_text(".part").startswith("without flats")
    assert "42 documents" in page.inner_text(".facets")
    # facets narrow it
    page.click(".facets a:text-is('md')")
    page.wait_for_selector(".part:has-text('type md')")
    assert page.input_value("#query") == "tidal -flats type:md"
    until(lambda: set(documents(page)), {"lagoon.md", "turbine.md"})
    # a chip takes a part out
    page.click("[aria-label='Remove: without flats']")
    until(lambda: page.locator(".part").count(), 1)
    assert page.input_value("#query") == "tidal type:md"
    # the way back, twice, and forward
    page.go_back()
    until(lambda: page.input_value("#query"), "tidal -flats type:md")
    page.go_back()
    until(lambda: len(documents(page)), 20)
    assert page.title() == "tidal -flats · Isthmus"
    first = documents(page)
    page.click("a[rel=next]")
    page.wait_for_selector("text=Hits 21 to 40")
    assert page.title() == "tidal -flats (page 2) · Isthmus"
    second = documents(page)
    assert len(set(first) | set(second)) == 40
    page.reload()
    page.wait_for_selector("text=Hits 21 to 40")
    assert documents(page) == second
    page.click("a[rel=next]")
    page.wait_for_selector("text=Hits 41 to 42")
    assert not page.query_selector("a[rel=next]")
    page.go_back()
    page.go_back()
    page.wait_for_selector("text=Hits 1 to 20")
    assert documents(page) == first


def test_the_way_back_taken_twice_at_once_leads_to_the_search_before(page):
    for query in ("tidal", "turbine", "lagoon"):
        asked(page, query)
    held = []
    page.route("**/v1/silos", lambda route: held.append(route))
    for steps in (1, 2):
        page.go_back()
        while len(held) < steps:
            page.wait_for_timeout(20)
    assert page.url.endswith("q=tidal"), "the search between them does not take the address back"
    held[1].continue_()
    page.wait_for_selector(".search:not(.busy) .status p")
    assert page.url.endswith("q=tidal")
    assert page.title() == "tidal · Isthmus"
    assert page.input_value("#query") == "tidal"


def test_another_spelling_is_offered_and_taken_by_a_person_alone(page):
    asked(page, "watr")
    assert "Did you mean water?" in page.inner_text("#suggestion")
    assert not documents(page)
    page.click("#suggestion a")
    page.wait_for_selector(".hit")
    assert page.input_value("#query") == "water"
    until(lambda: page.locator("#suggestion").count(), 0)


def test_duplicates_hints_and_marks(page):
    asked(page, 'the "spring tide" x:y')
    assert page.locator(".hit").count() == 1
    assert set(page.locator(".hit .where .chip").all_inner_texts()) == {"north", "south"}
    assert "x: is no filter" in page.inner_text("#understood")
    marks = {each.lower() for each in page.locator("mark").all_inner_texts()}
    assert marks == {"spring", "tide"}
    asked(page, "silo:nowhere tide")
    assert "no silo is called nowhere" in page.inner_text("#understood")


def test_words_are_marked_by_their_stems(page):
    for query, marks in {
        "norm": {"norm", "norms"},
        "norm*": {"Normalize", "norm", "norms"},
        "testing a hypothesis, openings": {"test", "tested", "open", "opens", "opening"},
        "query": {"queries", "query"},
        "café": {"cafés"},
        "тест": {"тест", "тесты"},
        "漢字": {"漢字"},
    }.items():
        asked(page, query)
        assert set(page.locator(".hit:has-text('Forms') mark").all_inner_texts()) == marks, query


@pytest.mark.parametrize("filters", ["silo:north+tide&without=north", "tide&without=north&without=south"])
def test_filters_that_leave_no_silo_to_ask_are_said_and_undone(browser, silos, filters):
    with opened(browser, f"{silos.http.base_url}/#/search?q={filters}", patience=PATIENCE) as shown:
        shown.get_by_text("The filters leave no silo to ask.").wait_for()
        assert "answered" not in shown.inner_text(".status")
        assert shown.locator(".status .bad").count() == 0
        look_over(shown, "no silo to ask")
        shown.get_by_role("link", name="Ask all silos").click()
        shown.wait_for_selector(".hit")
        assert shown.url.endswith("#/search?q=tide")
        assert shown.locator("#silo-filter :checked").count() == 2


@pytest.mark.parametrize("above", ["7", "-1", "abc"])
def test_a_threshold_in_the_address_that_is_none_does_no_harm(browser, silos, above):
    with opened(browser, f"{silos.http.base_url}/#/search?q=tide&above={above}", patience=PATIENCE) as shown:
        shown.wait_for_selector(".hit")
        assert shown.get_by_role("alert").count() == 0


def test_at_390_pixels_facets_stand_below_and_nothing_is_cut_off(browser, silos):
    size = {"viewport": {"width": 390, "height": 844}}
    with opened(browser, f"{silos.http.base_url}/#/search?q=tidal", patience=PATIENCE, **size) as shown:
        shown.wait_for_selector(".facets a")
        hits, facets = (shown.locator(each).bounding_box() for each in (".hits", ".facets"))
        assert facets["y"] >= hits["y"] + hits["height"]
        look_over(shown, "facets", (390,))
        for query in (f"tidal -{'x' * 300}", f"tidal silo:{'x' * 90}", f"tidal type:{'x' * 90}"):
            asked(shown, query)
            look_over(shown, "a long filter", (390,))
