"""Who may see a document, as sources state it: what is malformed, unusual or changed opens nothing."""

from __future__ import annotations

import json

import pytest

from isthmus.engines import ANYBODY
from isthmus.errors import DataError
from isthmus.service.settings import PathRule, Source
from isthmus.service.sources import load, read
from isthmus.service.stores import SqliteStore


def texts(source):
    """Ids with who may see them, and how many could not be read."""
    errors: list[DataError] = []
    return {each.id: each.allow for each in read(source, errors.append)}, len(errors)


@pytest.mark.parametrize(
    "matter",
    [
        "---\r\nallow: group:doctors\r\n---\r\n",
        "---\r\nallow:\r\n  - group:doctors\r\n---\r\n",
        "\ufeff---\nallow: [doctors]\n---\n",
        "---  \nallow: 'doctors'\n--- \n",
    ],
)
def test_front_matter_of_other_editors_is_read(tmp_path, matter):
    (tmp_path / "a.md").write_bytes(f"{matter}# Tide\n\nturbine\n".encode())
    assert texts(Source("folder", tmp_path)) == ({"a.md": ("group:doctors",)}, 0)


@pytest.mark.parametrize(
    "matter",
    [
        "---\nAllow: group:doctors\n---\n",
        '---\n"allow": group:doctors\n---\n',
        "---\nallow: [\n  group:doctors,\n]\n---\n",
        "---\nallow: [\ngroup:doctors\n]\n---\n",
        "---\nallow:\n  -group:doctors\n---\n",
        "---\nallow:\n  read: group:doctors\n---\n",
        "---\nallow: group:doctors\nallow:\n---\n",
        "---\nallow: group:doctors\n...\n",
        "\n---\nallow: group:doctors\n---\n",
        "---\nallow: group:doctors\n",
    ],
)
def test_front_matter_that_is_not_understood_opens_nothing(tmp_path, matter):
    (tmp_path / "a.md").write_text(f"{matter}\n# Tide\n\nturbine\n")
    assert texts(Source("folder", tmp_path)) == ({}, 1)


@pytest.mark.parametrize(
    "matter", ["---\nallow:\n---\n", "---\nallow: []\ntitle: x\n---\n", "---\n\nAllow: it\n"]
)
def test_front_matter_that_names_nobody_is_left_to_the_source(tmp_path, matter):
    (tmp_path / "a.md").write_text(f"{matter}\n# Tide\n\nturbine\n")
    source = Source("folder", tmp_path, allow=("doctors",))
    assert texts(source) == ({"a.md": ("group:doctors",)}, 0)


@pytest.mark.parametrize(
    "beside", ['{"allow": 0}', '{"allow": false}', '{"allow": {}}', "[]", "{", '{"allow": ["a:b"]}', None]
)
def test_a_file_beside_another_that_is_not_understood_opens_nothing(tmp_path, beside):
    (tmp_path / "a.txt").write_text("turbine")
    if beside is None:
        (tmp_path / "a.txt.meta.json").symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "a.txt.meta.json").write_text(beside)
    assert texts(Source("folder", tmp_path)) == ({}, 1)


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_a_file_beside_a_table_is_of_its_rows_that_do_not_say_otherwise(tmp_path, kind):
    (tmp_path / "rows.csv").write_text("id,body,allow\n1,turbine,\n2,mill,nurses\n")
    (tmp_path / "rows.csv.meta.json").write_text(json.dumps({"allow": ["doctors"]}))
    allowed, errors = texts(Source(kind, tmp_path if kind == "folder" else tmp_path / "rows.csv"))
    assert list(allowed.values()) == [("group:doctors",), ("group:nurses",)]
    assert not errors


@pytest.mark.parametrize("how", ["front matter", "beside", "both unreadable", "row"])
def test_what_was_open_is_not_kept_when_its_new_rule_is_not_understood(tmp_path, how):
    folder, store = tmp_path / "files", SqliteStore(tmp_path / "documents.db")
    folder.mkdir()
    (folder / "a.md").write_text("turbine")
    (folder / "rows.csv").write_text("id,body,allow\n1,turbine,\n2,mill,\n")
    source = Source("folder", folder)
    load(source, store, lambda error: None)
    before = store.present(["a.md", "rows.csv#1", "rows.csv#2"], ANYBODY)
    assert len(before) == 3
    if how == "row":
        (folder / "rows.csv").write_text("id,body,allow\n1,turbine,role:x\n2,mill,\n")
    elif how == "front matter":
        (folder / "a.md").write_text("---\nallow: role:doctors\n---\nturbine")
    else:
        (folder / "a.md.meta.json").write_text('{"allow": ' if how == "beside" else '{"allow": ["doctors"]}')
        (folder / "a.md").write_bytes(b"turbine" if how == "beside" else b"\0" * 9)
    load(source, store, lambda error: None)
    gone = "rows.csv#1" if how == "row" else "a.md"
    assert store.present(before) == before - {gone}
    store.close()


def test_a_path_is_one_however_its_accents_are_written(tmp_path):
    (tmp_path / "me\u0301decins.txt").write_text("turbine")
    source = Source("folder", tmp_path, rules=(PathRule("m\u00e9decins*", ("doctors",)),))
    assert list(texts(source)[0].values()) == [("group:doctors",)]
