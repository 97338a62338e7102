"""One silo of this process, as a peer that writes what it likes sees it, and behind its broker."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import httpx

from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.client import Client
from isthmus.service.limits import message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.security import ApiKeys
from isthmus.service.settings import (
    BrokerSettings,
    EncoderSettings,
    NodeSettings,
    Policy,
    SiloAddress,
    Source,
)
from silo_stand_in import Loop

QUERY = "tide turbine"
"""What finds all documents but one."""
LINK = "https://wiki.example.org/{id}"


@contextmanager
def a_node(folder, rows=(), **rights):
    """A node on a port of its own, in the loop that comes with it, whose peer has these rights."""
    rows = rows or [f"d {at}/x,tide,turbine number{at}" for at in range(5)]
    path = folder / "corpus.csv"
    path.write_text("\n".join(["id,title,text", *rows, "secret-merger,merger,nobody may know"]))
    settings = NodeSettings(
        silo="north",
        folder=folder / "north",
        sources=(Source("table", path, link=LINK),),
        peers={"anonymous": Policy(**({"search": True, "snippets": True} | rights))},
        encoder=EncoderSettings("none"),
    )
    loop = Loop()
    with Node(settings).offline() as node:
        node.read_sources()
        node.index.catch_up()
        node._read.set()
        try:
            yield node, loop, f"http://127.0.0.1:{loop.serve(node_app(node)).port}"
        finally:
            loop.close()


@contextmanager
def a_peer(folder, rows=(), **rights):
    """A node, and a peer that writes to it what it likes."""
    with (
        a_node(folder, rows, **rights) as (node, _, address),
        httpx.Client(base_url=f"{address}/v1", timeout=30) as client,
    ):
        client.event_hooks = {"request": [lambda request: request.headers.update(message_header())]}
        client.node = node
        yield client


@contextmanager
def federation(folder, scopes, **rights):
    """A node behind its broker, and people with keys of their own, by the scopes of each."""
    with a_node(folder, **rights) as (node, loop, address):
        keys = ApiKeys(folder / "api-keys.json")
        settings = BrokerSettings(
            folder=folder / "broker",
            keys=keys.path,
            silos={"north": SiloAddress(address)},
            share_statistics=False,
            deadline_ms=10_000,
        )

        async def made():
            return Broker(settings)

        url = f"http://127.0.0.1:{loop.serve(broker_app(loop.run(made())), lifespan='on').port}"
        with ExitStack() as stack:
            yield (
                node,
                {
                    name: stack.enter_context(Client(url, key=keys.add(name, scopes=each), patience=0))
                    for name, each in scopes.items()
                },
            )
