"""A transformer for PyTerrier: queries to results.

retriever = IsthmusRetriever("http://127.0.0.1:8100", k=100)
pt.Experiment([retriever, retriever % 10], topics, qrels, ["ndcg_cut_10"])
"""

from __future__ import annotations

from typing import Any

import numpy as np

from isthmus.errors import MissingExtra
from isthmus.integrations.passages import Passages
from isthmus.service import DEFAULT_URL

try:
    import pandas as pd  # type: ignore[import-untyped]
    import pyterrier as pt
except ImportError:
    raise MissingExtra("pyterrier", "the transformer for PyTerrier") from None

COLUMNS = ("docno", "score", "rank", "probability", "silo", "title", "text")


class IsthmusRetriever(pt.Transformer):
    """Searches all silos through a broker. A frame of `qid` and `query` becomes one of results, whose `score`
    is the probability, or the silo's score if there is none, made strictly decreasing in the broker's
    order.

    A `docno` is `silo/id`, or the silo's id alone with `bare`. Options are those of `Passages`.
    """

    def __init__(self, url: str = DEFAULT_URL, *, bare: bool = False, **options: Any) -> None:
        self.passages, self.bare = Passages(url, **options), bare

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """The results of every query, in the order of the queries."""
        pt.validate.query_frame(inp, extra_columns=["query"])
        columns = list(pt.model.query_columns(inp))
        rows = [
            {**{name: query[name] for name in columns}, **row}
            for query in inp.to_dict("records")
            for row in self._rows(str(query["query"]))
        ]
        return pd.DataFrame(rows, columns=[*columns, *COLUMNS])

    def _rows(self, query: str) -> list[dict[str, Any]]:
        rows, last = [], np.float32(np.inf)  # trec_eval compares float32 scores, and breaks ties by id
        for rank, passage in enumerate(self.passages.find(query), start=pt.model.FIRST_RANK):
            last = min(np.float32(passage.score), np.nextafter(last, np.float32(-np.inf)))
            row = {name: passage.metadata[name] for name in ("probability", "silo", "title")}
            docno = passage.address.partition("/")[2] if self.bare else passage.address
            rows.append({"docno": docno, "score": float(last), "rank": rank, "text": passage.text, **row})
        return rows
