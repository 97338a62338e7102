"""A federation as `isthmus new` writes it, in processes of its own, and its page in a browser."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from browsing import opened, tab_to
from isthmus.cli import main
from isthmus.errors import ServiceError
from isthmus.service.client import Client
from loopback_ports import free_base

PATIENCE = 240.0
DEADLINE = 2.0


def until(what, told):
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        if time.monotonic() > end:
            pytest.fail(f"not within {PATIENCE:.0f} s: {told}")
        time.sleep(0.2)
    return found


class RunningFederation:
    """Silos and their broker; `start` starts one of them."""

    def __init__(self, folder: Path, silos: tuple[str, ...]) -> None:
        self.folder, self.port = folder, free_base(len(silos) + 1)
        assert main(["new", str(folder), "--silos", ",".join(silos), "--port", str(self.port)]) == 0
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *changes: str) -> None:
        verb, config = ("broker", "broker.toml") if name == "broker" else ("node", f"{name}/silo.toml")
        changes += (f"deadline_ms={DEADLINE * 1000:.0f}",) if name == "broker" else ()
        more = [word for change in changes for word in ("--set", change)]
        command = [sys.executable, "-m", "isthmus", verb, "--config", config, *more]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", key=self.folder / "broker" / "admin.key")

    def statuses(self) -> dict[str, str]:
        began = time.monotonic()
        with self.client() as broker:
            told = {each.silo: each.status for each in broker.search("tidal power").silos}
        assert time.monotonic() - began < DEADLINE + 3  # the machine may be busy
        return told

    def answered(self) -> set[str]:
        return {silo for silo, status in self.statuses().items() if status == "answered"}

    def found(self) -> set[str]:
        try:
            with self.client() as broker:
                return {each.silo for each in broker.search("tidal power").hits}
        except ServiceError:
            return set()

    def holds(self, word: str) -> bool:
        try:
            with self.client() as broker:
                return bool(broker.search(word).hits)
        except ServiceError:
            return False

    def restart(self, name: str) -> None:
        self.running[name].terminate()
        self.running[name].wait(PATIENCE)
        self.start(name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def close(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def page_of(browser, federation, *, key="", **context):
    """The page, signed in: as the administrator, or with a key."""
    home = f"http://127.0.0.1:{federation.port}"
    key = key or (federation.folder / "broker" / "admin.key").read_text().strip()
    with opened(browser, home, patience=PATIENCE, **context) as page:
        page.get_by_label("API key").wait_for()
        tab_to(page, "key")
        page.keyboard.type(key)
        page.keyboard.press("Enter")
        page.get_by_label("Search all silos").wait_for()
        yield page


def searched(page, query):
    page.get_by_label("Search all silos").fill(query)
    page.keyboard.press("Enter")
    page.locator(".hit").first.wait_for()
    return page.locator(".hit")
