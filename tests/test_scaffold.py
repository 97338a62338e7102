"""What `isthmus new` writes is read back as what was meant."""

from __future__ import annotations

from pathlib import Path

from isthmus.service.scaffold import create_federation
from isthmus.service.settings import PageText, Source, read_broker, read_node


def test_sources_and_the_text_of_the_page_are_values_whatever_they_contain(tmp_path):
    queries = ('who said "no"?', "a \\ b", "tab\there")
    page = PageText(about='Right is what "people" linked:\n[tls] = {x} # no comment', queries=queries)
    odd = Path('in "quotes" {here}')
    north = (Source("beir", odd, name="first"), Source("sql", url="sqlite:///x.db", query="select 'a''b'"))
    create_federation(tmp_path / "new", ["north", "south"], sources={"north": north}, page=page)
    read = read_node(tmp_path / "new" / "north" / "silo.toml").sources
    assert [each.path for each in read] == [tmp_path / "new" / "north" / odd, None]
    assert [(each.name, each.url, each.query) for each in read] == [
        ("first", "", ""),
        ("", "sqlite:///x.db", "select 'a''b'"),
    ]
    assert read_broker(tmp_path / "new" / "broker.toml").page == page
    assert not (tmp_path / "new" / "north" / "documents").exists()
    (example,) = (tmp_path / "new" / "south" / "documents").iterdir()
    assert read_node(tmp_path / "new" / "south" / "silo.toml").sources == (Source("folder", example.parent),)


def test_the_readme_fits_the_sources(tmp_path):
    page = PageText(queries=("read a file's lines",))
    create_federation(tmp_path / "a", ["north"], sources={"north": (Source("beir", Path("x")),)}, page=page)
    text = (tmp_path / "a" / "README.md").read_text()
    assert """isthmus search 'read a file'"'"'s lines' --broker""" in text
    assert "`sources` in `silo.toml` says where" in text
    assert "*/documents" not in text
    create_federation(tmp_path / "b", ["north"])
    text = (tmp_path / "b" / "README.md").read_text()
    assert "isthmus search 'first document' --broker" in text
    assert "Put them into `*/documents`" in text


def test_without_either_there_is_an_example_and_no_text(tmp_path):
    create_federation(tmp_path / "new", ["north"])
    assert read_broker(tmp_path / "new" / "broker.toml").page == PageText()
    text = (tmp_path / "new" / "north" / "silo.toml").read_text()
    assert 'sources = [{kind = "folder", path = "documents"}]' in text
