"""Proof by mutation: the page of papers and its faults, of which one is run here and all in `make soak`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def mutation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_row_has_a_fault_that_stands_in_its_code(mutation: ModuleType) -> None:
    faults = mutation.mutants()
    assert len(faults) > 80
    for fault in faults:
        assert fault.mutated() != (ROOT / fault.file).read_text(encoding="utf-8"), fault.row


def test_a_fault_is_noticed_and_a_test_that_sees_nothing_is_told(mutation: ModuleType) -> None:
    first = mutation.mutants()[0]
    blind = mutation.Mutant("blind", first.function, first.test, "1.0 - values", "1 - values")
    (told,) = mutation.survivors([first, blind], say=False)
    assert told.startswith("blind")
