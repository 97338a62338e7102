"""Judge, learn, see the version, roll back: in a browser, with silos and broker in processes of their own."""

from __future__ import annotations

import os
import random
import re
from itertools import combinations
from pathlib import Path

import pytest

from browsing import focused, look_over, press
from isthmus.cli import main
from isthmus.service.client import Client
from isthmus.service.judgement_files import write_judgements
from isthmus.service.security import ApiKeys
from isthmus.service.wire import NamedJudgement
from running_federation import RunningFederation, page_of, searched, until

SILOS = ("north", "south", "west", "east")
UNLEARNED = "east"
"""The silo whose policy lets nobody learn with it, so that it never has the current model."""
WORDS = [
    "tide",
    "wave",
    "turbine",
    "harbour",
    "lamp",
    "bridge",
    "river",
    "iron",
    "apple",
    "pear",
    "ferry",
    "gravel",
]

pytestmark = pytest.mark.timeout(900)


def fill(folder: Path) -> list[NamedJudgement]:
    """Documents of every silo, and judgements: a document is right if a word of the query is its subject,
    which its title says, but for one in ten; in its text words stand by chance."""
    draw = random.Random(1)
    subjects: dict[tuple[str, str], str] = {}
    texts: dict[tuple[str, str], list[str]] = {}
    for silo in SILOS:
        for number in range(36):
            place = (silo, f"{silo}{number}.md")
            subjects[place] = WORDS[number % len(WORDS)]
            texts[place] = draw.choices(WORDS, k=10)
            text = f"# {subjects[place]}\n\n{' '.join(texts[place])} {silo}{number}\n"
            (folder / silo / "documents" / place[1]).write_text(text)
    return [
        NamedJudgement(query=" ".join(pair), document=place[1], relevant=right, silo=place[0])
        for pair in combinations(WORDS, 2)
        for place, words in texts.items()
        if (about := subjects[place] in pair) or (set(pair) & set(words) and draw.random() < 0.1)
        for right in [about != (draw.random() < 0.1)]
    ]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    running = RunningFederation(tmp_path_factory.mktemp("journey") / "learning", SILOS)
    running.judgements = fill(running.folder)
    try:
        for name in SILOS:
            running.start(name, *(["peers.broker.learning=false"] if name == UNLEARNED else []))
        running.start("broker")
        until(lambda: all(running.holds(f"{silo}35") for silo in SILOS), "all documents are found")
        yield running
    finally:
        running.close()


def training_of(page, federation):
    page.goto(f"http://127.0.0.1:{federation.port}/#/training")
    page.get_by_role("heading", name="Learning").wait_for()
    return page.get_by_role("button", name="Learn now")


def learn(page, federation):
    """Press the button by keyboard, and wait for the version that comes of it."""
    button = training_of(page, federation)
    versions = page.locator("section[aria-label^=Version]")
    before = versions.evaluate_all("all => all.map((each) => each.ariaLabel)")
    press(page, "Learn now")

    def name():
        latest = versions.evaluate_all("all => all.map((each) => each.ariaLabel)")
        return latest[0] if button.is_enabled() and latest and latest[0] not in before else None

    return page.locator(f"section[aria-label='{until(name, 'a new version')}']")


def test_too_few_judgements_are_said_to_be_that(federation, browser):
    with page_of(browser, federation) as page:
        training_of(page, federation).click()
        page.locator(".warn, .notice", has_text=re.compile("judge", re.IGNORECASE)).first.wait_for()
        assert "in use" not in page.locator("main").inner_text()


def test_import_judge_learn_see_the_version_and_roll_back(federation, browser, tmp_path, capsys):
    file = tmp_path / "judged.csv"
    write_judgements(federation.judgements, file)
    where = ["--broker", f"http://127.0.0.1:{federation.port}"]
    where += ["--key", str(federation.folder / "broker" / "admin.key")]
    assert main(["judgements", "import", str(file), *where]) == 0
    assert f"{len(federation.judgements):,}" in capsys.readouterr().err
    with page_of(browser, federation) as page:
        hit = searched(page, "lamp bridge").last
        hit.get_by_role("button", name="wrong").click()
        hit.get_by_text("kept by").wait_for()
        hit.get_by_role("button", name="wrong").click()
        hit.get_by_text("taken back").wait_for()
        assert page.locator(".chance").count() == 0
        version = learn(page, federation)
        version.get_by_text("in use").wait_for()
        text = version.inner_text()
        assert re.search(
            r"Adopted: .* over the baseline \(.* helped, \d+ hurt|Not adopted: learning gained nothing", text
        )
        assert "baseline" in version.locator("table").first.inner_text()
        assert "by admin" in text
        assert f"{UNLEARNED} took no part" in " ".join(text.split())
        first = version.get_attribute("aria-label")
        other = learn(page, federation)
        other.get_by_text("in use").wait_for()
        press(page, "Use this one")
        page.locator(f"section[aria-label='{first}']").get_by_text("in use").wait_for()
        other.get_by_role("button", name="Use this one").wait_for()
        assert page.get_by_text("in use").count() == 1
    with federation.client() as broker:
        assert f"Version {broker.learning().current}" == first


def test_probabilities_a_threshold_and_the_silo_without_the_model(federation, browser):
    with federation.client() as broker:
        current = broker.learning().current
        learned = {silo for silo in SILOS if silo != UNLEARNED}
        until(
            lambda: (
                {each.silo for each in broker.search("tide wave").silos if each.model == current} == learned
            ),
            "the silos that may have the model have it",
        )
    with page_of(browser, federation) as page:
        hits = searched(page, "tide wave")
        page.locator(".chance .number").first.wait_for()
        assert page.locator(".chance .number").count() == hits.count(), "of the silo without the model too"
        slider = page.get_by_label("Only hits at least this likely")
        assert slider.is_enabled()
        assert page.locator("#no-probabilities").inner_text() == ""
        remark = page.locator(".status .warn", has_text=UNLEARNED).inner_text()
        assert "current model" in remark
        assert page.get_by_text("No judged query is like this one").count() == 0
        assert page.get_by_text("Percentages are too high").count() == 0
        press(page, "Why this result?")
        page.get_by_role("cell", name="list and curve").first.wait_for()
        page.locator("#percentages summary").click()
        page.get_by_text("relevant documents found by the search").wait_for()
        searched(page, "north3 south7 west9")
        page.get_by_text("No judged query is like this one").wait_for()
        best = max(float(text.strip("<> %")) for text in page.locator(".chance .number").all_inner_texts())
        assert page.get_by_text("No hit here is likely").count() == (best < 50)
        page.goto(f"http://127.0.0.1:{federation.port}/#/search?q=-north3")  # by date, without percentages
        page.locator(".status", has_text="ranked by date").wait_for()
        assert page.get_by_text("No judged query is like this one").count() == 0
        page.goto(f"http://127.0.0.1:{federation.port}/#/search?q=tide+wave")
        page.locator(".hit", has_text="tide").first.wait_for()
        slider.focus()
        for key in ["ArrowRight", "ArrowDown", *["ArrowRight"] * 19]:  # the slider's, not the hits'
            page.keyboard.press(key)
        page.locator(".status", has_text="left out").wait_for()
        assert "above=0.95" in page.url
        page.get_by_text(re.compile(r"of the best 20 of each silo, \d+ are less likely")).wait_for()
        look_over(page, "nothing above the threshold")
        press(page, "Show all hits")
        page.locator(".hit", has_text="tide").first.wait_for()
        assert "above" not in page.url
        assert slider.input_value() == "0"
        page.go_back()
        page.wait_for_function("() => location.hash.includes('above=0.95')")
        page.go_back()  # all steps of the slider are one
        page.wait_for_function("() => !location.hash.includes('above')")
        page.goto(f"http://127.0.0.1:{federation.port}/#/search?q=tide+wave&above=7")
        page.wait_for_function("() => location.hash.includes('above=0.95')")
        assert page.locator(".threshold output").inner_text() == "95 %"
        page.goto(f"http://127.0.0.1:{federation.port}/#/search?q=tide+wave+silo:north")
        page.locator(".chance .number").first.wait_for()
        assert page.get_by_text("Percentages are too high").count() == 0
        page.goto(f"http://127.0.0.1:{federation.port}/#/silos")
        page.locator(f"section[aria-label={UNLEARNED}]", has_text="current model").wait_for()
        page.goto(f"http://127.0.0.1:{federation.port}/#/training")
        page.locator("section[aria-label=Learning] .warn", has_text=UNLEARNED).wait_for()


def test_who_may_only_search_sees_runs_and_no_buttons(federation, browser):
    token = ApiKeys(federation.folder / "broker" / "api-keys.json").add("ada", scopes=["search"])
    with page_of(browser, federation, key=token) as page:
        page.goto(f"http://127.0.0.1:{federation.port}/#/training")
        page.locator("section[aria-label^=Version]").first.wait_for()
        assert page.locator("main").get_by_role("button").count() == 0
        assert page.get_by_role("link", name="Admin").count() == 0
    with Client(f"http://127.0.0.1:{federation.port}", key=token) as reader:
        assert reader.learning().versions


def test_an_administrator_revokes_a_key_and_presses_twice(federation, browser):
    keys = ApiKeys(federation.folder / "broker" / "api-keys.json")
    number = keys.add("ben", scopes=["search"]).split("_")[1]
    with page_of(browser, federation) as page:
        press(page, "Admin")
        page.get_by_role("button", name=f"Revoke: {number} of ben").wait_for()
        press(page, f"Revoke: {number} of ben")
        assert "ben" in {key.name for key in keys.all()}
        look_over(page, "admin, a key to be revoked")
        assert focused(page) == f"Revoke, surely: {number} of ben"
        page.keyboard.press("Enter")
        page.get_by_text(f"The key {number} of ben is revoked.").wait_for()
        assert "ben" not in {key.name for key in keys.all()}
        assert page.get_by_role("button", name=re.compile("of admin")).count() == 0, "one's own stays"
        table = page.get_by_role("table", name="Silos of this federation")
        assert UNLEARNED in table.inner_text()
        press(page, "Sign out", "Shift+Tab")
        page.get_by_label("API key", exact=True).wait_for()
        assert page.locator("nav[aria-label=Views] a:visible").count() == 0
        look_over(page, "sign in")
        page.goto(f"http://127.0.0.1:{federation.port}/#/search?key=bad&q=lamp")
        problem = "The key of this link is unknown, revoked or expired."
        page.get_by_role("alert").get_by_text(problem).wait_for()
        assert page.url.endswith("#/search?q=lamp")
        look_over(page, "a bad key in a link")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_views_at_every_size(federation, browser, tmp_path, scheme, width):
    shape = {"viewport": {"width": width, "height": 850}, "color_scheme": scheme}
    with page_of(browser, federation, **shape) as page:
        searched(page, "tide wave")
        folder = Path(os.environ.get("ISTHMUS_SCREENSHOTS", tmp_path))
        for view, sign in (("Search", ".hit .chance"), ("Training", "section[aria-label^=Version] table")):
            if view != "Search":
                page.get_by_role("link", name=view, exact=True).click()
            page.locator(sign).first.wait_for()
            look_over(page, f"learned {view.lower()}", (width,))
            page.screenshot(path=folder / f"learned-{view.lower()}-{scheme}-{width}.png")
