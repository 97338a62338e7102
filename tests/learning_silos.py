"""Three silos of three topics, with judged queries, for tests of learning together."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import cache

import httpx
import numpy as np

from isthmus.private.totals import family_of
from isthmus.service.http_client import HttpReply
from isthmus.service.limits import message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.scaffold import KEYS, introduce
from isthmus.service.settings import Learning, NodeSettings, SharedStatistics
from isthmus.service.stores import Draft
from isthmus.service.wire import BUNDLE_TYPE

FAMILY = family_of("key", 1 << 12)
TOPICS = ("tide wave turbine harbour", "lamp bridge river iron", "apple pear plum cherry")


def texts(seed, count=40):
    """Documents of three topics; each has words of its own topic and some of any."""
    rng = np.random.default_rng(seed)
    every = " ".join(TOPICS).split()
    for at in range(count):
        own = TOPICS[at % 3].split()
        words = [*rng.choice(own, 6), *rng.choice(every, 3)]
        yield Draft(f"{seed}-{at}", own[at % 4], " ".join(words))


QUERIES = tuple(
    f"{first} {second}"
    for topic in TOPICS
    for first in topic.split()
    for second in topic.split()
    if first < second
)


@cache
def judged():
    """Right is a document of the query's topic whose title is one of its words."""
    found = {}
    for query in QUERIES:
        topic = next(at for at, words in enumerate(TOPICS) if query.split()[0] in words)
        for seed in (1, 2, 3):
            for at, draft in enumerate(texts(seed)):
                right = at % 3 == topic and draft.title in query.split()
                found.setdefault(query, {})[draft.id] = right
    return found


class AtHand:
    """A node's API without a network, as the broker talks to it."""

    def __init__(self, node):
        self.name = node.settings.silo
        transport = httpx.ASGITransport(node_app(node), client=("127.0.0.1", 1))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/v1")

    async def ask(self, method, path, body=b"", kind=BUNDLE_TYPE, *, unless=""):
        headers = {"content-type": kind, **message_header()}
        told = await self.client.request(method, path, content=body, headers=headers)
        return HttpReply(told.status_code, told.headers.get("content-type", ""), told.content)


@contextmanager
def nodes(tmp_path, policy, names=("anonymous",), seeds=(1, 2, 3), **learning):
    """Silos that know each other by their cards, with documents and without judgements."""
    introduce(tmp_path, [f"silo{seed}" for seed in seeds])
    with ExitStack() as held:
        made = []
        for seed in seeds:
            own = {"keys": tmp_path / f"silo{seed}" / KEYS, **learning}
            settings = NodeSettings(
                silo=f"silo{seed}",
                folder=tmp_path / f"silo{seed}",
                peers=dict.fromkeys(names, policy),
                statistics=SharedStatistics(form="exact", width=1 << 12),
                depth=20,
                learning=Learning(**own),
            )
            node = held.enter_context(Node(settings).offline())
            node._read.set()
            node.store.put(texts(seed))
            node.index.catch_up()
            made.append(node)
        yield made
