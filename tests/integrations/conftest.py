"""The broker of tests/test_integrations.py: a silo `north`, and `sure`, which has probabilities."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["ISTHMUS_TEST_BROKER"]
