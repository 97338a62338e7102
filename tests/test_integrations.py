"""The retrievers for other libraries, tested in an environment of their own against a running broker.

`make test` makes that environment from requirements-integrations.txt; ISTHMUS_INTEGRATIONS_PYTHON names
another. The pytest of that environment runs `tests/integrations`; what fails there is shown here.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import isthmus
from isthmus.errors import MissingExtra
from isthmus.integrations.passages import Passages
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.security import ApiKeys
from isthmus.service.settings import SiloAddress
from isthmus.service.wire import Answer, Hit, SiloStatus
from searching_silos import NORTH, OPEN, searching
from silo_stand_in import StandIn

TESTS = Path(__file__).parent / "integrations"
QUIET = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "PT_TEST_TRANSFORMER_REPORTS": "0",
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A silo with documents that may be opened, one that states probabilities, a key for both, and one that
    may search alone."""
    folder = tmp_path_factory.mktemp("integrations")
    keys = ApiKeys(folder / "api-keys.json")
    token, searcher = keys.add("ada", scopes=["search", "documents"]), keys.add("ben", scopes=["search"])
    with searching(folder, {"north": replace(OPEN, open=True)}, drafts={"north": NORTH}) as silos:
        sure = silos.loop.serve(StandIn("sure", (0.9, 0.8, 0.8, 0.1)))
        both = {**silos.settings.silos, "sure": SiloAddress(f"http://127.0.0.1:{sure.port}")}
        settings = replace(silos.settings, folder=folder / "both", silos=both, keys=keys.path)

        async def made():
            return Broker(settings)

        server = silos.loop.serve(broker_app(silos.loop.run(made())), lifespan="on")
        yield f"http://127.0.0.1:{server.port}", token, searcher


@pytest.mark.timeout(900)
def test_the_suite_of_the_integrations_passes_in_their_environment(integrations_python, broker, tmp_path):
    url, token, _ = broker
    own = {"HOME": str(tmp_path), "PYTHONPATH": str(Path(isthmus.__file__).parents[1])}
    own |= {"ISTHMUS_TEST_BROKER": url, "ISTHMUS_API_KEY": token, "IR_DATASETS_HOME": str(tmp_path / "ir")}
    options = [
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_mode=auto",
        "--import-mode=importlib",
    ]
    options += ["--disable-socket", "--allow-unix-socket", "--allow-hosts=127.0.0.1"]
    options += ["-c", os.devnull, "--rootdir", str(TESTS), "--confcutdir", str(TESTS)]
    command = [integrations_python, "-m", "pytest", *options, str(TESTS)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | QUIET | own, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_a_document_that_cannot_be_opened_has_its_snippet(broker):
    """Where the key, the silo's limit of a day or a change meanwhile is in the way: nothing else is lost."""
    url, token, searcher = broker

    def passages(key):
        retriever = Passages(url, key, silos=["north"], whole=True)
        found = retriever.find("lagoon turbines")
        assert asyncio.run(retriever.afind("lagoon turbines")) == found
        return found

    opened, shown = passages(token), passages(searcher)
    assert [each.address for each in opened] == [each.address for each in shown]
    assert {each.metadata["whole"] for each in opened} == {True}
    assert {each.metadata["whole"] for each in shown} == {False}
    assert not any(each.metadata["withheld"] for each in shown)


def test_ids_have_no_letters_that_nobody_sees():
    hit = Hit(document="a\u2028b\U000e0041", silo="north", probability=None, score=1.0, title="a")
    answer = Answer.model_construct(hits=[hit], silos=[SiloStatus(silo="north", status="answered")])
    (passage,) = Passages("http://127.0.0.1:1")._passages(answer, {})
    assert passage.address == "north/a%E2%80%A8b%F3%A0%81%81"
    plain = answer.model_copy(update={"hits": [hit.model_copy(update={"document": "papers/a b.md"})]})
    (passage,) = Passages("http://127.0.0.1:1")._passages(plain, {})
    assert passage.address == "north/papers/a b.md"


def test_without_ir_datasets_its_names_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'isthmus\[irds\]'"):
        isthmus.load("irds:beir/scifact/test")


@pytest.mark.parametrize(
    ("extra", "library"),
    [
        ("langchain", "langchain_core"),
        ("llamaindex", "llama_index"),
        ("haystack", "haystack"),
        ("pyterrier", "pyterrier"),
    ],
)
def test_without_the_library_the_extra_is_named(extra, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'isthmus\[{extra}\]'"):
        __import__(f"isthmus.integrations.{extra}")
