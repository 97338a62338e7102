"""Files with secrets: nobody but their owner reads them, whatever lies in their folder before."""

from __future__ import annotations

import os
import stat
from threading import get_ident

import pytest

from isthmus import files
from isthmus.files import replacing, write_private
from isthmus.tables import Bundle


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_stray_temporary_of_a_killed_writer_does_not_open_a_secret(tmp_path):
    stray = tmp_path / f".{os.getpid()}-{get_ident()}.part"
    stray.write_bytes(b"")
    stray.chmod(0o644)
    write_private(tmp_path / "secret", b"s")
    assert mode(tmp_path / "secret") == 0o600


@pytest.mark.parametrize("planted", ["link", "file"])
def test_a_secret_is_not_written_to_what_lies_in_its_temporary_place(tmp_path, planted, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"")
    monkeypatch.setattr(files, "token_hex", lambda size: "00" * size)
    with replacing(tmp_path / "probe", private=True):
        (temporary,) = tmp_path.glob(".*.part")
    temporary.symlink_to(elsewhere) if planted == "link" else os.link(elsewhere, temporary)
    write_private(tmp_path / "secret", b"s")
    assert elsewhere.read_bytes() == b""
    assert not (tmp_path / "secret").is_symlink()
    assert mode(tmp_path / "secret") == 0o600


def test_two_files_of_a_folder_can_be_written_at_once(tmp_path):
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "b") as second:
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert (tmp_path / "b").read_bytes() == b"second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_private_bundle_is_private_from_its_first_byte(tmp_path, monkeypatch):
    modes = []
    fill = Bundle._fill
    monkeypatch.setattr(
        Bundle, "_fill", lambda self, s: (modes.append(os.fstat(s.fileno()).st_mode), fill(self, s))
    )
    Bundle({}, {}).write(tmp_path / "bundle", private=True)
    assert stat.S_IMODE(modes[0]) == mode(tmp_path / "bundle") == 0o600
