"""A silo that answers as it is told to: well, late, with nonsense, or not at all. For faults on demand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager

from isthmus.service import connections


def hit(silo, number, probability, **more):
    return {
        "document": f"{silo}/{number}",
        "silo": silo,
        "probability": probability,
        "score": 10.0 - number,
        "title": f"Document {number}",
        "snippet": f"what {number} says",
        "token": f"{silo}-{number}",
        **more,
    }


def answer(silo, hits, **more):
    return {"silo": silo, "hits": hits, "documents": 100, "statistics": "", "took_ms": 1.0, **more}


class StandIn:
    """An ASGI app; `behave` is a name from below, bytes to answer with, or a function of the request."""

    def __init__(self, name, probabilities=(0.9, 0.5, 0.1)):
        self.name, self.behave = name, "well"
        self.hits = [hit(name, number, each) for number, each in enumerate(probabilities)]
        self.asked = []
        self.delay = 0.0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = (await receive()).get("body", b"")
        self.asked.append(
            (scope["method"], scope["path"], dict(scope["headers"]), body, scope.get("extensions"))
        )
        await asyncio.sleep(self.pause())
        status, kind, content = self.reply(scope["path"], body)
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def pause(self):
        """Seconds before it answers."""
        return self.delay

    def reply(self, path, body):
        if isinstance(self.behave, tuple):
            return self.behave
        if path == "/v1/search":
            k = json.loads(body)["k"]
            return 200, b"application/json", json.dumps(answer(self.name, self.hits[:k])).encode()
        if path == "/v1/feedback":
            return 204, b"application/json", b""
        if path == "/v1/ready":
            return 200, b"application/json", b'{"ready": true, "documents": 100, "indexed": 100}'
        if path == "/v1/release":
            return 200, b"application/json", json.dumps({"silo": self.name, "documents": 100}).encode()
        return 404, b"application/problem+json", b"{}"

    def searches(self):
        return [json.loads(body) for method, path, _, body, _ in self.asked if path == "/v1/search"]


class Loop:
    """An event loop in a thread, with servers in it."""

    def __init__(self, new_loop=asyncio.new_event_loop):
        self.loop = new_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.servers = []

    def run(self, work, seconds=20):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def serve(self, app, *, port=0, lifespan="off", **options):
        """Start a server; returns it, with `.port`."""
        server = connections.server(app, port=port, **options)
        server.config.lifespan = lifespan
        server.capture_signals = _nothing  # signals belong to the main thread
        done = asyncio.run_coroutine_threadsafe(server.serve(), self.loop)
        until = time.monotonic() + 60
        while not server.started and not done.done() and time.monotonic() < until:
            time.sleep(0.005)
        if done.done():
            done.result()
        server.port = server.servers[0].sockets[0].getsockname()[1]
        server.finished = done
        self.servers.append(server)
        return server

    def stop(self, server):
        server.should_exit = True
        server.force_exit = server.config.lifespan == "off"  # a stand-in may be asleep
        server.finished.result(60)
        self.servers.remove(server)

    def close(self):
        for server in list(self.servers):
            self.stop(server)
        self.run(_ended())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)
        self.loop.close()


@contextmanager
def _nothing():
    yield


async def _ended():
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
