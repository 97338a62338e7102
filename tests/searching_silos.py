"""Silos of this process with documents of some types and dates, behind one broker."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager

import httpx

from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.reliability import save_curves
from isthmus.service.settings import (
    BrokerSettings,
    EncoderSettings,
    Models,
    NodeSettings,
    Policy,
    RequestLimits,
    SharedStatistics,
    SiloAddress,
)
from isthmus.service.stores import Draft
from silo_stand_in import Loop

DAY = 86_400
OPEN = Policy(search=True, snippets=True, matches=True, suggestions=True, feedback=True)
SAME = "The spring tide report: water rises twice a day, higher when sun and moon stand in line."
TIDES = "tidal power of the sea "
NORTH = [
    *(
        Draft(
            f"tide-{at:02d}.pdf",
            f"Tide {at}",
            "tidal power of the sea " + "tide " * (at % 5),
            date=at * 90 * DAY,
        )
        for at in range(40)
    ),
    Draft("lagoon.md", "Lagoon", "a tidal lagoon stores water behind turbines", date=18_000 * DAY),
    Draft("power.txt", "Power", "power of wind, and tidal flats", date=17_000 * DAY),
    Draft("same.txt", "Report", SAME),
    Draft("secret.txt", "", "zyzzogeton and wyvernfly are written once"),
]
SOUTH = [
    *(Draft(f"moon/{at}.html", f"Moon {at}", f"the moon moves water and sea, phase {at}") for at in range(8)),
    Draft("copy.md", "Report", SAME.upper()),
    Draft("turbine.md", "", "tidal turbines turn", date=15_000 * DAY),
]


class SearchingSilos:
    """`search` asks the broker; `nodes` are the silos by name."""

    def __init__(
        self,
        folder,
        policies,
        *,
        key="a secret of the silos",
        drafts=None,
        limits=None,
        unreachable=(),
        curves=None,
    ):
        self.loop, self.stack = Loop(), ExitStack()
        self.nodes, ports = {}, {}
        for name, policy in policies.items():
            settings = NodeSettings(
                silo=name,
                folder=folder / name,
                peers={"anonymous": policy},
                encoder=EncoderSettings("none"),
                statistics=SharedStatistics(form="none", hash_key=key),
                **({} if limits is None else {"limits": limits}),
                **({} if curves is None else {"models": Models(reliability=folder / f"{name}.json")}),
            )
            if curves is not None:
                save_curves(curves.get(name, []), folder / f"{name}.json")
            node = self.nodes[name] = self.stack.enter_context(Node(settings))
            node.put((drafts or {"north": NORTH, "south": SOUTH})[name])
            ports[name] = self.loop.serve(node_app(node)).port
        self.settings = BrokerSettings(
            folder=folder / "broker",
            silos={
                name: SiloAddress(f"http://127.0.0.1:{port}", about=f"Papers of {name}.")
                for name, port in {**ports, **dict.fromkeys(unreachable, 9)}.items()
            },
            deadline_ms=20_000,
            share_statistics=False,
            limits=RequestLimits(per_second=1000, burst=1000),
        )
        self.broker = self.loop.run(self._made())
        url = f"http://127.0.0.1:{self.loop.serve(broker_app(self.broker), lifespan='on').port}"
        self.http = httpx.Client(base_url=url, timeout=60)
        until = time.monotonic() + 30
        here = [self.broker.silos[name] for name in ports]
        while not all(silo.search_level for silo in here) and time.monotonic() < until:
            self.search("water")

    async def _made(self):
        return Broker(self.settings)

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def search(self, query, **more):
        reply = self.post("/v1/search", query=query, **more)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def found(self, query, **more):
        """Which documents, in order."""
        return [hit["document"] for hit in self.search(query, **more)["hits"]]

    def close(self):
        self.http.close()
        self.loop.close()
        self.stack.close()


@contextmanager
def searching(folder, policies, **more):
    silos = SearchingSilos(folder, policies, **more)
    try:
        yield silos
    finally:
        silos.close()
