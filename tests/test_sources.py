"""Sources: every kind of file gives its text, and one bad file is one error."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime

import pytest

from isthmus.errors import ConfigError, DataError
from isthmus.service.row_files import Columns
from isthmus.service.settings import PathRule, Source
from isthmus.service.sources import SourceReport, load, load_all, read
from isthmus.service.stores import Counts, SqliteStore
from office_files import docx, eml, parquet, pptx, xlsx


@pytest.fixture
def store(tmp_path):
    made = SqliteStore(tmp_path / "store.db")
    yield made
    made.close()


def pdf_of(text):
    """The smallest PDF that says something."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        out
        + b"xref\n0 6\n0000000000 65535 f \n%strailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
        % (
            table,
            len(out),
        )
    )


@pytest.fixture
def papers(tmp_path):
    pytest.importorskip("pypdf")
    root = tmp_path / "papers"
    (root / "deep" / ".hidden").mkdir(parents=True)
    (root / "a note.txt").write_text("plain words")
    (root / "old.txt").write_bytes("caf\xe9".encode("latin-1"))
    (root / "wide.txt").write_text("wide words", encoding="utf-16")
    (root / "deep" / "b.md").write_text("intro\n\n# The heading #\n\nwords *here*")
    (root / "c.html").write_text(
        "<html><head><title>A &amp; B</title><style>p{}</style><script>alert(1)</script></head>"
        "<body><p>First <b>bold</b></p><p>Second<br>line</body>"
    )
    (root / "d.pdf").write_bytes(pdf_of("Portable words"))
    (root / "deep" / ".hidden" / "x.txt").write_text("secret")
    (root / "picture.png").write_bytes(b"\x89PNG")
    return root


def test_every_kind_of_file_gives_title_and_body(papers):
    errors = []
    found = {draft.id: draft for draft in read(Source("folder", papers), errors.append)}
    assert not errors
    assert set(found) == {"a note.txt", "old.txt", "wide.txt", "deep/b.md", "c.html", "d.pdf"}
    assert (found["a note.txt"].title, found["a note.txt"].body) == ("a note", "plain words")
    assert found["old.txt"].body == "café"
    assert found["wide.txt"].body == "wide words"
    assert found["deep/b.md"].title == "The heading"
    assert found["c.html"].title == "A & B"
    assert found["c.html"].body == "First bold\n\nSecond\nline"
    assert found["d.pdf"].body == "Portable words"


def test_one_bad_file_is_one_error_and_the_rest_goes_on(papers, store):
    assert load(Source("folder", papers), store, pytest.fail) == Counts(added=6)
    (papers / "d.pdf").write_bytes(b"%PDF-1.4 nonsense")
    (papers / "e.pdf").write_bytes(b"not one")
    (papers / "empty.md").write_text("  \n")
    (papers / "binary.txt").write_bytes(b"\0\1\2")
    (papers / "old.txt").unlink()
    (papers / "wide.txt").write_text("other words")
    (papers / "gone.txt").symlink_to("/nowhere")
    errors = []
    assert load(Source("folder", papers), store, errors.append) == Counts(changed=1, removed=1)
    assert sorted(error.file.rpartition("/")[2] for error in errors) == [
        "binary.txt",
        "d.pdf",
        "e.pdf",
        "empty.md",
    ]
    assert store.get(["d.pdf"])["d.pdf"].body == "Portable words", "what could be read once is kept"


def test_links_do_not_lead_out_of_the_folder(papers, tmp_path):
    (tmp_path / "outside.txt").write_text("not mine")
    (papers / "in.txt").symlink_to(tmp_path / "outside.txt")
    assert "in.txt" not in {draft.id for draft in read(Source("folder", papers), pytest.fail)}


def test_a_beir_collection_and_one_part_of_it(tmp_path, store):
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": "d1", "title": "One", "text": "first", "metadata": {"silo": "north"}}\n'
        '{"_id": "d2", "title": "Two", "text": "second", "metadata": {"silo": "south"}}\n'
    )
    assert [draft.id for draft in read(Source("beir", tmp_path), pytest.fail)] == ["d1", "d2"]
    north = Source("beir", tmp_path / "corpus.jsonl", part="north")
    assert load(north, store, pytest.fail) == Counts(added=1)
    (tmp_path / "corpus.jsonl").write_text("nonsense\n")
    errors = []
    assert load_all((north,), store, errors.append) == Counts()
    assert "corpus.jsonl" in str(errors[0])
    assert store.count() == 1, "a damaged file takes nothing away"


def test_a_query_of_a_database(tmp_path, store):
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE thing (number INTEGER, name TEXT, told TEXT)")
        db.executemany(
            "INSERT INTO thing VALUES (?, ?, ?)", [(1, "Lamp", "light"), (2, None, "dark"), (None, "x", "y")]
        )
    errors = []
    source = Source("sql", url=f"sqlite:///{path}", query="SELECT number, name, told FROM thing")
    assert load(source, store, errors.append) == Counts(added=2)
    assert "row 3" in str(errors[0])
    assert store.get(["1"])["1"].title == "Lamp"
    short = Source("sql", url=f"sqlite:///{path}", query="SELECT number, told FROM thing WHERE number = 1")
    assert [draft.body for draft in read(short, pytest.fail)] == ["light"]
    with pytest.raises(DataError, match="query failed"):
        list(read(Source("sql", url=f"sqlite:///{path}", query="DELETE FROM thing"), pytest.fail))
    with pytest.raises(DataError, match="no such database"):
        list(read(Source("sql", url="sqlite:///nowhere.db", query="SELECT 1"), pytest.fail))
    with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
        list(read(Source("sql", url="env:NOT_SET_ANYWHERE", query="SELECT 1"), pytest.fail))


def test_a_query_of_postgres(postgres_url, store):
    source = Source(
        "sql", url=postgres_url, query="SELECT n, 'title ' || n, '100% of it' FROM generate_series(1, 3) n"
    )
    assert load(source, store, pytest.fail) == Counts(added=3)
    errors = []
    broken = Source("sql", url=postgres_url, query="SELECT nothing")
    assert load_all((broken,), store, errors.append) == Counts()
    assert "does not exist" in str(errors[0])


@pytest.fixture
def office(tmp_path):
    root = tmp_path / "office"
    root.mkdir()
    docx(root / "report.docx", "Tidal power & more", "second paragraph", title="The report")
    pptx(root / "talk.pptx", "first slide", "second slide", notes="say this")
    xlsx(root / "sheet.xlsx", [["place", "metres"], ["Saint-Malo", 13.5]])
    eml(root / "letter.eml", "The barrage", "It turns tomorrow.\n", attached="plan.pdf")
    (root / "rows.csv").write_text('id;title;text\nr1;One;first row\nr2;Two;"second; row"\n')
    parquet(root / "rows.parquet", {"key": ["p1", "p2"], "place": ["Brest", "Rance"], "turbines": [3, 24]})
    return root


def test_documents_of_office_programs_mail_and_tables_are_read(office):
    texts = {draft.id: (draft.title, draft.body) for draft in read(Source("folder", office), pytest.fail)}
    assert texts["report.docx"] == ("The report", "Tidal power & more\nsecond paragraph")
    assert texts["talk.pptx"] == ("talk", "first slide\n\nsecond slide\n\nsay this")
    assert texts["sheet.xlsx"] == ("sheet", "place metres\nSaint-Malo 13.5")
    title, body = texts["letter.eml"]
    assert title == "The barrage"
    assert body.startswith("From: ada@example.org\nTo: ben@example.org\nDate: Tue, 03 Feb 2026")
    assert body.endswith("It turns tomorrow.\n\nAttached: plan.pdf")
    assert texts["rows.csv#r1"] == ("One", "first row")
    assert texts["rows.csv#r2"] == ("Two", "second; row")
    assert texts["rows.parquet#p2"] == ("", "place: Rance\nturbines: 24")
    assert len(texts) == 8


def test_a_mail_and_a_row_have_the_dates_that_they_state(tmp_path, store):
    eml(tmp_path / "letter.eml", "The barrage", "It turns tomorrow.")
    for name, date in (("none", b""), ("wrong", b"Date: tomorrow\n"), ("far", b"Date: 1 Jan 99999 00:00\n")):
        (tmp_path / f"{name}.eml").write_bytes(b"Subject: x\n" + date + b"\ntext")
    dates = ["2021-05-06", "2021-05-06T12:00:00+02:00", "2021", "2021-05", "1620259200", "soon", ""]
    rows = "".join(f"r{at},{date},text {at}\n" for at, date in enumerate(dates))
    (tmp_path / "rows.csv").write_text("id,date,text\n" + rows)
    moments = [datetime(2021, 5, 6, tzinfo=UTC), datetime(2021, 5, 6, 3, tzinfo=UTC)]
    parquet(tmp_path / "rows.parquet", {"key": ["p1", "p2"], "when": moments, "text": ["one", "two"]})
    columns = Columns(date="when", body=("text",))
    source = Source("table", tmp_path / "rows.parquet", columns=columns, name="parquet")
    drafts = {draft.id: draft for draft in read(Source("folder", tmp_path), pytest.fail)}
    drafts |= {draft.id: draft for draft in read(source, pytest.fail)}
    day = int(moments[0].timestamp())
    year, month = (int(datetime(2021, at, 1, tzinfo=UTC).timestamp()) for at in (1, 5))
    assert drafts["letter.eml"].date == int(datetime(2026, 2, 3, 10, tzinfo=UTC).timestamp())
    assert [drafts[f"{name}.eml"].date for name in ("none", "wrong", "far")] == [None] * 3
    stated = [drafts[f"rows.csv#r{at}"].date for at in range(len(dates))]
    assert stated == [day, day + 36_000, year, month, 1_620_259_200, None, None]
    assert (drafts["p1"].date, drafts["p2"].date) == (day, day + 10_800)
    load(Source("folder", tmp_path), store, pytest.fail)
    assert store.get(["letter.eml"])["letter.eml"].date == drafts["letter.eml"].date
    written = int((tmp_path / "none.eml").stat().st_mtime)
    assert store.get(["none.eml"])["none.eml"].date == written, (
        "when its file was written, where it says none"
    )


def test_a_mail_of_html_alone_is_read_as_a_page(tmp_path):
    (tmp_path / "a.eml").write_bytes(
        b"Subject: =?utf-8?q?caf=C3=A9?=\nContent-Type: text/html; charset=utf-8\n\n"
        b"<style>p{}</style><p>Tea &amp; cake</p>"
    )
    (draft,) = read(Source("folder", tmp_path), pytest.fail)
    assert (draft.title, draft.body) == ("café", "Tea & cake")


def test_a_table_is_a_source_with_ids_of_its_own(tmp_path, store):
    path = tmp_path / "people.csv"
    path.write_text("nr,who,what,else\n7,Ada,engines,numbers\n8,Ben,,\n9,Cy,lamps,\n")
    columns = Columns(id="nr", title="who", body=("what", "else"))
    source = Source("table", path, columns=columns)
    report = SourceReport(source.label)
    errors = []
    assert load(source, store, errors.append, report=report) == Counts(added=3)
    assert store.get(["7"])["7"].body == "engines\nnumbers"
    assert not errors, "a title alone is a document"
    path.write_text("nr,who,what,else\n7,Ada,engines,numbers\n")
    assert load(source, store, pytest.fail) == Counts(removed=2)
    path.write_text("number,who\n7,Ada\n")
    errors = []
    assert load(source, store, errors.append) == Counts(), "what could be read once is kept"
    assert "has no column" in str(errors[0])


def test_a_separator_that_nobody_quoted_loses_no_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        'id,title,text\n1,One,tides, lagoons, mills\n2,"Two, too","a ""mark""\nand a line"\n3,Three\n'
    )
    drafts = {draft.id: draft for draft in read(Source("table", path), pytest.fail)}
    assert {id: draft.body for id, draft in drafts.items()} == {
        "1": "tides, lagoons, mills",
        "2": 'a "mark"\nand a line',
        "3": "",
    }
    assert drafts["2"].title == "Two, too"


def test_a_quotation_mark_that_never_closes_takes_no_other_rows(tmp_path, store):
    path = tmp_path / "rows.csv"
    rows = ["id,title,text", "1,One,tides", "2,Two,mills", '3,"Three",lamps', "4,Four,gates"]
    path.write_text("\n".join(rows))
    assert load(Source("table", path), store, pytest.fail) == Counts(added=4)
    path.write_text("\n".join(rows).replace("Two", '"Two').replace('"Three"', "Three"))
    errors = []
    assert load(Source("table", path), store, errors.append) == Counts(), "what could be read once is kept"
    assert "the quotation mark of the row in line 3 is not closed" in str(errors[0])
    assert store.get(["4"])["4"].body == "gates"


def test_a_quotation_mark_that_never_closes_in_the_last_row_is_an_error(tmp_path):
    path = tmp_path / "rows.csv"
    for end in ("", "\n", "\r\n"):
        path.write_text(f'id,title,text\nr1,One,tides\nr3,"Broken, unclosed text{end}')
        errors = []
        assert not any(read(Source("table", path), errors.append))
        assert "the quotation mark of the row in line 3 is not closed" in str(errors[0])
    path.write_text('id,title,text\nr1,"One\n","tides\n"\n')
    (draft,) = read(Source("table", path), pytest.fail)
    assert (draft.title, draft.body) == ("One\n", "tides\n")


def test_files_have_the_type_of_their_extension_and_records_with_dots_in_their_ids_have_none(tmp_path, store):
    folder, corpus = tmp_path / "papers", tmp_path / "corpus.jsonl"
    folder.mkdir()
    for name in ("a.md", "report.v2.md"):
        (folder / name).write_text("Tides.\n")
    ids = ("scipy.stats.norm.pdf", "tides.pdf")
    corpus.write_text("".join(json.dumps({"_id": id, "title": "", "text": "tides"}) + "\n" for id in ids))
    load(Source("folder", folder), store, pytest.fail)
    load(Source("beir", corpus), store, pytest.fail)
    types = {each.id: each.type for each in store.changes(0, 9)}
    assert types == {"a.md": "md", "report.v2.md": "md", "scipy.stats.norm.pdf": "", "tides.pdf": "pdf"}


def test_a_table_in_a_folder_that_breaks_keeps_its_rows_and_a_row_that_went_goes(office, store):
    source = Source("folder", office)
    assert load(source, store, pytest.fail).added == 8
    (office / "rows.csv").write_text("id;title;text\nr1;One;first row\n")
    assert load(source, store, pytest.fail) == Counts(removed=1)
    (office / "rows.csv").write_bytes(b"id;title\0;text\n")
    assert load(source, store, lambda error: None) == Counts()
    assert store.present(["rows.csv#r1"])


def test_what_cannot_be_read_is_counted_and_named(office, store, tmp_path):
    (office / "broken.docx").write_bytes(b"no zip")
    (office / "picture.png").write_bytes(b"\x89PNG")
    (office / "Makefile").write_text("all:")
    missing = Source("folder", tmp_path / "nowhere")
    reports = []
    load_all((Source("folder", office), missing), store, lambda error: None, reports=reports)
    first, second = reports
    assert (first.documents, first.unread, dict(first.skipped)) == (8, 1, {".png": 1, "": 1})
    assert "broken.docx" in first.errors[0]
    assert not first.failed
    assert "not a folder" in second.failed
    assert "1 could not be read" in str(first)
    assert "1 .png" in str(first)


def test_a_source_of_which_nothing_can_be_read_fails(store, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "broken.docx").write_bytes(b"no zip")
    reports = []
    load_all((Source("folder", tmp_path / "in"),), store, lambda error: None, reports=reports)
    assert "broken.docx" in reports[0].failed


def test_a_new_source_of_which_nothing_can_be_read_removes_no_others(store, tmp_path):
    """It may be the same one under another path."""
    (tmp_path / "old.csv").write_text("id,text\n1,tides\n1,again\n")
    (tmp_path / "new.csv").write_text("")
    errors = []
    load_all((Source("table", tmp_path / "old.csv"),), store, errors.append)
    assert "twice in table:" in str(errors[0])
    assert "old.csv" in str(errors[0])
    assert load_all((Source("table", tmp_path / "new.csv"),), store, lambda error: None) == Counts()
    assert store.present(["1"])
    (tmp_path / "new.csv").write_text("id,text\n2,mills\n")
    done = load_all((Source("table", tmp_path / "new.csv"),), store, pytest.fail)
    assert done == Counts(added=1, removed=1)


def access_of(source):
    """What the documents of a source say of who may see them and whom they are about, and what is wrong."""
    errors = []
    return {each.id: (each.allow, each.subject) for each in read(source, errors.append)}, errors


def test_every_kind_of_source_says_who_may_see_a_document_and_whom_it_is_about(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    matter = "---\ntitle: kept\nallow: [doctors, 'user:ada']\nsubject: 4711\n---\n# Ward\n\nwords"
    (folder / "a.md").write_text(matter)
    (folder / "b.md").write_text("---\nallow:\n  - group:nurses\n  - everyone\n---\nwords")
    (folder / "c.txt").write_text("words")
    (folder / "c.txt.meta.json").write_text('{"allow": ["user:bob"], "subject": 12}')
    (folder / "d.csv").write_text("id,patient,body,allow\n1,p1,words,nurses;user:ada\n2,,words,\n")
    (folder / "open").mkdir()
    (folder / "open" / "e.txt").write_text("words")
    rules = Source(
        "folder",
        folder,
        columns=Columns(subject="patient"),
        allow=("staff",),
        rules=(PathRule("open/*", ("everyone",)),),
    )
    stated, errors = access_of(rules)
    assert not errors
    assert stated == {
        "a.md": (("group:doctors", "user:ada"), "4711"),
        "b.md": (("everyone", "group:nurses"), ""),
        "c.txt": (("user:bob",), "12"),
        "d.csv#1": (("group:nurses", "user:ada"), "p1"),
        "d.csv#2": (("group:staff",), ""),
        "open/e.txt": (("everyone",), ""),
    }
    (text,) = (each for each in read(rules, errors.append) if each.id == "a.md")
    assert (text.title, text.body.split()) == ("Ward", ["---", "title:", "kept", "---", "words"])
    lines = tmp_path / "corpus.jsonl"
    lines.write_text(
        '{"_id": "1", "text": "words", "allow": ["group:a"], "subject": "x"}\n'
        '{"_id": "2", "text": "words", "metadata": {"allow": "b"}}\n{"_id": "3", "text": "words"}\n'
    )
    assert access_of(Source("beir", lines))[0] == {
        "1": (("group:a",), "x"),
        "2": (("group:b",), ""),
        "3": ((), ""),
    }
    with sqlite3.connect(tmp_path / "rows.db") as db:
        db.execute("CREATE TABLE d (id, body, wards, person)")
        db.execute("INSERT INTO d VALUES (1, 'words', 'a|b', 'p7')")
    query = "SELECT id, wards AS allow, body, person AS subject FROM d"
    source = Source("sql", url=f"sqlite:///{tmp_path / 'rows.db'}", query=query)
    assert access_of(source)[0] == {"1": (("group:a", "group:b"), "p7")}


def test_lists_in_parquet_are_principals_and_a_path_has_a_rule_of_its_own(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet as files

    table = pa.table({"id": ["1", "2"], "body": ["words", "words"], "allow": [["a", "user:b"], None]})
    files.write_table(table, tmp_path / "t.parquet")
    rules = (PathRule("2*", ("second",)),)
    stated, _ = access_of(Source("table", tmp_path / "t.parquet", rules=rules))
    assert stated == {"1": (("group:a", "user:b"), ""), "2": (("group:second",), "")}


@pytest.mark.parametrize("allow", ['"role:doctor"', "7", "[7]", '"user: "', '["a\\u0000"]'])
def test_a_document_whose_rule_nobody_understands_is_not_read(tmp_path, allow):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "a.txt.meta.json").write_text(f'{{"allow": {allow}}}')
    stated, errors = access_of(Source("folder", tmp_path))
    assert not stated
    assert len(errors) == 1
    assert "a.txt" in str(errors[0])
