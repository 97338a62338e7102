"""Documents that were made to stop a node: none takes more than its share, and the others are read."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from isthmus.errors import DataError
from isthmus.service import sources
from isthmus.service.display import QueryWords, snippet
from isthmus.service.parsing import READERS, FileText, Parser, ParsingLimits
from isthmus.service.settings import Source
from isthmus.service.sources import load, load_all
from isthmus.service.stores import Counts, SqliteStore
from isthmus.tables.files import NUMBER
from isthmus.text import tokenise
from office_files import docx, parquet, word_part, xlsx, zipped


@pytest.fixture
def store(tmp_path):
    opened = SqliteStore(tmp_path / "store.db")
    yield opened
    opened.close()


def pdf_sharing(pages, stream):
    """A PDF whose pages all show the same stream."""
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [%s] /Count %d >>"
        % (b" ".join(b"%d 0 R" % (at + 5) for at in range(pages)), pages),
        3: b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        4: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    page = (
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 3 0 R"
        b" /Resources << /Font << /F1 4 0 R >> >> >>"
    )
    objects |= {at + 5: page for at in range(pages)}
    out, places = b"%PDF-1.4\n", []
    for number, content in objects.items():
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    ending = b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
    return out + ending % (size, table, size, len(out))


def shown(words):
    return b"BT /F1 12 Tf 72 720 Td " + b" ".join(b"(%s) Tj" % word for word in words) + b" ET"


def growth(work, make, size):
    """Processor time for four times the input over that for once; the least of some trials of each."""

    def seconds(data):
        times = []
        for _ in range(3):
            began = time.process_time()
            work(data)
            times.append(time.process_time() - began)
        return min(times)

    return seconds(make(4 * size)) / max(seconds(make(size)), 1e-3)


WIDE = "\N{DUCK}".encode() + b"tide " * 8_000_000  # one such letter, and each takes four bytes
LINEAR = 9.0
"""Four times the input takes four times as long; squares would make it sixteen, cubes sixty-four."""

HOSTILE = {
    "a heading of blanks": (".md", lambda n: "# a" + " " * n + "x", 200_000),
    "a heading of blanks and signs": (".md", lambda n: "# a" + " #" * n + "x", 100_000),
    "headings without words": (".md", lambda n: "#" + " " * n + "\n" + "# \n" * n, 50_000),
    "tags that do not end": (".html", lambda n: "<a " * n, 16_000),
    "tags that end in quotes": (".html", lambda n: '</a =">" ' * n, 16_000),
    "quotes that do not end": (".html", lambda n: "<a x='" * n, 16_000),
    "comments that do not end": (".html", lambda n: "<!--" * n, 16_000),
    "sections that do not end": (".html", lambda n: "<![CDATA[" * n, 16_000),
    "declarations that do not end": (".html", lambda n: "<!<?</" * n, 16_000),
    "scripts that do not end": (".html", lambda n: "<script></scrip" * n, 16_000),
    "titles that do not end": (".html", lambda n: "<title>" * n + "<b>a" * n, 16_000),
    "hidden elements that others close": (
        ".html",
        lambda n: "<template>" * n + "</noscript>" * n,
        16_000,
    ),
    "a reference of many digits": (".html", lambda n: "a &#" + "9" * n + " &#x" + "f" * n, 100_000),
    "references that are none": (".html", lambda n: "&a&#" * n, 20_000),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_reading_takes_time_in_proportion_to_the_file(attack, tmp_path):
    suffix, make, size = HOSTILE[attack]

    def work(text):
        path = tmp_path / f"hostile{suffix}"
        path.write_text(text)
        READERS[suffix](path, ParsingLimits())

    assert growth(work, make, size) < LINEAR


QUERY = QueryWords.of("a tide", ("a", "tide"))
TEXTS = {
    "a number that is none": (lambda n: NUMBER.fullmatch(b"1" * n + b"x"), 100_000),
    "a fraction that is none": (
        lambda n: NUMBER.fullmatch(b"1." + b"1" * n + b"e" + b"1" * n + b"x"),
        100_000,
    ),
    "a snippet of one word": (lambda n: snippet("a " * n, QUERY), 2_500),
    "a snippet of one word with an accent": (lambda n: snippet("à " * n, QUERY), 2_500),
    "words of one letter": (lambda n: tokenise(["a " * n]), 100_000),
    "marks upon marks": (lambda n: tokenise(["a" + "\u0301\u0327" * n]), 50_000),
    "a word without end": (lambda n: tokenise(["ational" * n]), 100_000),
    "letters that are many": (lambda n: tokenise(["\ufdfa" * n]), 20_000),
}


@pytest.mark.parametrize("attack", TEXTS)
def test_words_and_numbers_take_time_in_proportion_to_their_length(attack):
    work, size = TEXTS[attack]
    assert growth(work, lambda n: n, size) < LINEAR


def test_documents_that_freeze_a_reader_are_one_line_each_and_the_rest_goes_on(tmp_path, store, soak_count):
    pytest.importorskip("pypdf")
    papers = tmp_path / "papers"
    papers.mkdir()
    blanks, tags, pages = soak_count(3_500, 350_000), soak_count(16_000, 1_600_000), soak_count(100, 5_000)
    (papers / "a.md").write_text("# a" + " " * blanks + "x\n\ntide tables")
    (papers / "b.html").write_text("tide tables" + "<a " * tags)
    (papers / "c.pdf").write_bytes(pdf_sharing(1, shown([b"tide tables"])))
    (papers / "d.txt").write_text("tide tables")
    source, limits = Source("folder", papers), ParsingLimits(seconds=1)
    assert load(source, store, pytest.fail, limits) == Counts(added=4)

    (papers / "c.pdf").write_bytes(pdf_sharing(pages, shown([b"tide"] * 4_000)))
    (papers / "d.txt").write_text("other tables")
    errors = []
    began = time.monotonic()
    assert load(source, store, errors.append, limits) == Counts(changed=1)
    assert time.monotonic() - began < 120
    (told,) = map(str, errors)
    assert "c.pdf: takes more than 1 seconds of processor time" in told
    assert "reading.seconds" in told
    assert "\n" not in told
    assert store.get(["c.pdf"])["c.pdf"].body == "tide tables", "what it gave before is kept"


@pytest.mark.parametrize(
    ("name", "data", "limits", "told"),
    [
        ("x.pdf", pdf_sharing(4, shown([b"tide"])), ParsingLimits(pages=3), "3 pages: it has 4 (split it"),
        ("x.pdf", pdf_sharing(50, shown([b"tide"] * 20)), ParsingLimits(characters=1_000), "1,000 char"),
        ("x.txt", b"tide " * 300, ParsingLimits(characters=1_000), "1,000 characters of text"),
        ("x.txt", WIDE, ParsingLimits(memory_mb=256, characters=50_000_000), "256 MB of memory"),
        ("x.txt", "\ufdfa".encode() * 100, ParsingLimits(characters=1_000), "1,000 characters of text"),
        ("x.html", b"&#" + b"9" * 5_000, ParsingLimits(), None),
        ("x.txt", b"x" * ((50 << 20) + 1), ParsingLimits(), "larger than 50 MB"),
    ],
    ids=["pages", "text of pages", "text", "memory", "ligatures", "digits", "size"],
)  # fmt: skip
def test_a_file_beyond_a_limit_is_one_line_that_names_it(name, data, limits, told, tmp_path):
    if name.endswith(".pdf"):
        pytest.importorskip("pypdf")
    (tmp_path / name).write_bytes(data)
    (tmp_path / "y.txt").write_text("tide")
    with Parser(limits) as parser:
        (_, answer), (_, after) = parser.parse_all([tmp_path / name, tmp_path / "y.txt"])
    assert after == FileText("y", "tide")
    if told is None:
        assert answer == FileText(Path(name).stem, "\ufffd")
    else:
        assert isinstance(answer, DataError)
        assert f"{name}: " in str(answer)
        assert told in str(answer)


def test_a_parser_that_is_killed_costs_one_file(tmp_path):
    paths = [tmp_path / f"{number}.txt" for number in range(30)]
    for path in paths:
        path.write_text(path.stem)
    with Parser() as parser:
        answers = {}
        for path, answer in parser.parse_all(paths):
            answers[path.stem] = answer
            if path.stem == "9":
                os.kill(parser._process.pid, signal.SIGSTOP)  # so that it cannot be done with the others
                os.kill(parser._process.pid, signal.SIGKILL)
    failed = [stem for stem, answer in answers.items() if isinstance(answer, DataError)]
    assert len(answers) == 30
    assert len(failed) <= 1
    assert all("ended the process that read it" in str(answers[stem]) for stem in failed)


@pytest.mark.parametrize(
    ("put", "problem"),
    [
        ("link", "a link out of its source's folder"),
        ("folder", "a link out of"),
        ("pipe", "is not a regular file"),
    ],
)
def test_what_takes_a_files_place_after_it_was_listed_is_not_read(put, problem, tmp_path, monkeypatch):
    """Files are listed ahead of being read, by as long as those before them take."""
    source, other = tmp_path / "source", tmp_path / "other"
    for folder in (source / "below", other):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("the key of the node" if folder == other else "tide")
    (source / "b.txt").write_text("harbour")

    def swapped(root, tell):
        for path in listed(root, tell):
            if path.name == "a.txt":
                path.unlink()
                if put == "pipe":
                    os.mkfifo(path)
                elif put == "link":
                    path.symlink_to(other / "a.txt")
                else:
                    path.parent.rmdir()
                    path.parent.symlink_to(other)
            yield path

    listed = sources._files
    monkeypatch.setattr(sources, "_files", swapped)
    errors = []
    drafts = list(sources.read(Source("folder", path=source), errors.append))
    assert [(draft.id, draft.body) for draft in drafts] == [("b.txt", "harbour")]
    assert [problem in str(error) for error in errors] == [True]


def test_a_parser_knows_no_secret_of_the_node(tmp_path, monkeypatch):
    monkeypatch.setenv("NORTH_DB", "postgresql://north:secret@db/north")
    (tmp_path / "x.txt").write_text("tide")
    with Parser() as parser:
        list(parser.parse_all([tmp_path / "x.txt"]))
        known = Path(f"/proc/{parser._process.pid}/environ").read_bytes()
        limits = Path(f"/proc/{parser._process.pid}/limits").read_text()
    assert b"NORTH_DB" not in known
    assert b"secret" not in known
    assert [row.split()[3:5] for row in limits.splitlines() if row.startswith("Max file size")] == [
        ["0", "unlimited"]
    ]


@pytest.mark.parametrize(
    "line", [json.dumps({"_id": "x" * 2_000, "text": "tide"}), "[" * 100_000, '{"_id": %s}' % ("9" * 5_000)]
)
def test_a_line_that_is_no_document_leaves_the_other_sources_alone(line, tmp_path, store):
    (tmp_path / "corpus.jsonl").write_text(line + "\n" + json.dumps({"_id": "d1", "text": "tide"}) + "\n")
    (tmp_path / "other.jsonl").write_text(json.dumps({"_id": "d2", "text": "tide"}) + "\n")
    errors = []
    load_all(
        (Source("beir", tmp_path / "corpus.jsonl"), Source("beir", tmp_path / "other.jsonl")),
        store,
        errors.append,
    )
    assert errors
    assert "d2" in store.get(["d2"])
    assert all(len(change.id) <= 1_000 for change in store.changes(0, 10)), (
        "a hit with such an id fails a search"
    )


LAUGHS = '<!DOCTYPE w [<!ENTITY a "ha">' + "".join(
    f'<!ENTITY {chr(98 + at)} "{("&" + chr(97 + at) + ";") * 10}">' for at in range(9)
)
SMALL = ParsingLimits(seconds=5, memory_mb=512, characters=100_000)


def bomb(path):
    """Half a megabyte that unpacks to more than a file may have."""
    return zipped(path, {"word/document.xml": word_part("<w:p/>" + " " * (520 << 20))})


def laughing(path):
    inner = word_part("<w:p><w:r><w:t>&j;</w:t></w:r></w:p>").removeprefix('<?xml version="1.0"?>')
    return zipped(path, {"word/document.xml": f"{LAUGHS}]>{inner}"})


def outward(path):
    doctype = '<!DOCTYPE w [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    inner = word_part("<w:p><w:r><w:t>&x;</w:t></w:r></w:p>").removeprefix('<?xml version="1.0"?>')
    return zipped(path, {"word/document.xml": doctype + inner})


def deep(path):
    return zipped(path, {"word/document.xml": word_part("<w:p>" * 100_000 + "</w:p>" * 100_000)})


def repeating(path):
    """One long string that a hundred thousand cells show."""
    xlsx(path, [["tide " * 10_000]])
    cells = '<row><c t="s"><v>0</v></c></row>' * 100_000
    ns = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    parts = {
        "xl/workbook.xml": f'<workbook xmlns="{ns}"/>',
        "xl/sharedStrings.xml": f'<sst xmlns="{ns}"><si><t>{"tide " * 10_000}</t></si></sst>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{ns}"><sheetData>{cells}</sheetData></worksheet>',
    }
    return zipped(path, parts)


def wide_field(path):
    """A table with a field of 100 MB."""
    path.write_bytes(b'id,text\n1,"' + b"tide\n" * (20 << 20) + b'"\n')
    return path


def long_line(path):
    path.write_bytes(b"id,text\n1," + b"tide " * (20 << 20))
    return path


def dictionary(path):
    """A Parquet file of some kilobytes whose column is one long text ten thousand times."""
    return parquet(path, {"id": [str(at) for at in range(10_000)], "text": ["tide " * 15_000] * 10_000})


def nested_mail(path):
    depth = 3_000
    heads = b"".join(
        b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (at, at) for at in range(depth)
    )
    path.write_bytes(b"Subject: x\n" + heads + b"Content-Type: text/plain\n\ntide")
    return path


ATTACKS = {
    "a bomb of zeros": ("x.docx", bomb, "unpacks to more than 512 MB"),
    "a billion laughs": ("x.docx", laughing, "declares entities"),
    "an entity of a file": ("x.docx", outward, "declares entities"),
    "deep XML": ("x.docx", deep, "nests deeper than 200"),
    "a string shown again and again": ("x.xlsx", repeating, "100,000 characters"),
    "a field of 100 MB": ("x.csv", wide_field, "not a table that can be read"),
    "a line of 100 MB": ("x.csv", long_line, "a line of more than 100,000 characters"),
    "a text repeated by a dictionary": ("x.parquet", dictionary, "characters"),
    "mail inside mail": ("x.eml", nested_mail, "cannot be read"),
    "no zip at all": ("x.docx", lambda path: path.write_bytes(b"PK" + bytes(100)), "not an office document"),
    "another zip": ("x.pptx", lambda path: zipped(path, {"a": "b"}), "no document of Word"),
    "no Parquet": ("x.parquet", lambda path: path.write_bytes(b"PAR1PAR1"), "not a Parquet file"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_office_file_is_one_line_and_the_next_is_read(attack, tmp_path):
    """Bombs, laughs, depth and endless fields: the limit is named, within its time, and the node goes on."""
    name, make, problem = ATTACKS[attack]
    make(tmp_path / name)
    docx(tmp_path / "y.docx", "calm water")
    with Parser(SMALL, within=tmp_path) as parser:
        answers = list(parser.parse_all([tmp_path / name, tmp_path / "y.docx"]))
    errors = [answer for _, answer in answers if isinstance(answer, DataError)]
    assert len(errors) == 1, errors
    assert problem in str(errors[0])
    assert answers[-1] == (tmp_path / "y.docx", FileText("y", "calm water"))


def test_a_broken_table_gives_the_rows_before_the_break_and_keeps_those_it_had(tmp_path, store):
    root = tmp_path / "in"
    root.mkdir()
    rows = [f"{at},tide {at}" for at in range(2_000)]
    (root / "x.csv").write_text("\n".join(["id,text", *rows]))
    source = Source("folder", root)
    assert load(source, store, pytest.fail).added == 2_000
    (root / "x.csv").write_text("\n".join(["id,text", *rows[:1_500], "z," + "wave " * 50_000]))
    errors = []
    assert load(source, store, errors.append, SMALL) == Counts()
    assert len(errors) == 1
    assert store.count() == 2_000
