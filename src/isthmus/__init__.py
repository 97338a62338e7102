"""Isthmus: search and ranking across data silos that may not share their data.

    from isthmus import BM25, evaluate, load

    world = load("pydocs")  # a collection that every installation has, in four silos
    run = BM25().index(world.documents).search(world.queries, k=30)
    print(evaluate(world.qrels, run, ["nDCG@10"]))

docs/start.md in the repository is a five-minute start, docs/api.md lists the names below and what is promised
about them, `isthmus --help` lists the commands. A name is loaded when it is first used.
"""

from isthmus.facade import contents

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = contents(__name__)
