"""PyTerrier: its own tests of transformers, experiments, and results in the broker's order."""

from __future__ import annotations

import os

import pandas as pd
import pyterrier as pt
import pytest

from isthmus.integrations.pyterrier import IsthmusRetriever

TOPICS = pd.DataFrame({"qid": ["1", "2"], "query": ["tidal power", "lagoon turbines"]})


pt.documentation._cached_objects_inv = {}  # where its pages are, which it would download


class TestTransformer(pt.testing.TransformerTestCase):
    @staticmethod
    def get_transformer():
        return IsthmusRetriever(os.environ["ISTHMUS_TEST_BROKER"])


def test_results_have_what_the_broker_says_in_its_order(url):
    retriever = IsthmusRetriever(url, k=4)
    results = retriever(TOPICS)
    pt.validate.result_frame(results, extra_columns=["probability", "silo", "text"])
    assert pt.inspect.transformer_outputs(retriever, ["qid", "query"]) == list(results.columns)
    first = results[results.qid == "1"]
    assert list(first["docno"]) == [f"sure/sure/{at}" for at in range(4)]
    assert list(first["probability"]) == [0.9, 0.8, 0.8, 0.1]
    assert list(first["rank"]) == [0, 1, 2, 3]
    assert first["score"].is_monotonic_decreasing
    assert first["score"].nunique() == 4  # ties would be broken by ids
    ranked = pt.model.add_ranks(results.copy())
    assert list(ranked["rank"]) == list(results["rank"])
    with pytest.raises(pt.validate.InputValidationError):
        retriever(pd.DataFrame({"docno": ["d1"]}))


def test_an_experiment(url):
    retriever = IsthmusRetriever(url, silos=["north"], bare=True)
    qrels = pd.DataFrame({"qid": ["2"], "docno": ["lagoon.md"], "label": [1]})
    table = pt.Experiment([retriever, retriever % 1], TOPICS[1:], qrels, ["recip_rank", "ndcg_cut_10"])
    assert list(table["recip_rank"]) == [1.0, 1.0]
