"""Extract text from office documents and mail: .docx, .pptx, .xlsx (zipped XML) and .eml.

    .docx    paragraphs, footnotes and endnotes; text deleted in a tracked change is not read
    .pptx    slide by slide, then the speaker's notes
    .xlsx    sheet by sheet, a line per row, cells between tabs; values, not formulas
    .eml     sender, receivers, date, the text (or its HTML), and the names of attachments

Anyone who may put a file into a silo's folder chooses its contents. XML is therefore read as a stream, by a
parser that refuses any document type, so no entity can be declared, and that allows nesting to a depth of
`DEEPEST`. A file may unpack to `MOST_UNPACKED` bytes and have `limits.characters` of text; reading stops with
an error beyond either limit.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from pathlib import Path
from xml.parsers import expat
from zipfile import BadZipFile, LargeZipFile, ZipFile

from isthmus.errors import DataError

DEEPEST = 200
"""Deepest allowed nesting of elements; office documents have about thirty levels."""
MOST_UNPACKED = 512 << 20
"""Bytes that all parts of one file together may unpack to."""
_BLOCK = 1 << 16
_NUMBER = re.compile(r"(\d+)\.xml$")
_BLANK_TITLES = frozenset(
    {"", "powerpoint presentation", "powerpoint-präsentation", "présentation powerpoint"}
)
_SHEET = "xl/worksheets/"
_CELLS = 1 << 14
"""Columns of a sheet that are read: the limit of spreadsheet programs."""

Start = Callable[[str, dict[str, str]], None]
End = Callable[[str], None]


class OfficeFile:
    """The parts of a zipped document; the limits hold for all of them together."""

    def __init__(self, zipped: ZipFile, characters: int) -> None:
        self._zipped, self._bytes, self._characters = zipped, MOST_UNPACKED, characters
        self.names = zipped.namelist()

    def parts(self, prefix: str) -> list[str]:
        """The parts `prefix1.xml`, `prefix2.xml`, … in the order of their numbers."""
        numbered = re.compile(re.escape(prefix) + r"(\d+)\.xml")
        known = [(int(match[1]), name) for name in self.names if (match := numbered.fullmatch(name))]
        return [name for _, name in sorted(known)]

    def say(self, pieces: list[str], text: str) -> None:
        """Append text to `pieces`; raises TooMuch beyond the limit of characters."""
        self._characters -= len(text)
        if self._characters < 0:
            raise TooMuch("characters")
        pieces.append(text)

    def read(self, name: str, start: Start, end: End, text: End = lambda words: None) -> None:
        """Parse a part as a stream of elements, whose names are passed on without namespaces."""
        depth = 0

        def opened(tag: str, attributes: dict[str, str]) -> None:
            nonlocal depth
            depth += 1
            if depth > DEEPEST:
                raise TooMuch("depth")
            start(_local(tag), {_local(key): value for key, value in attributes.items()})

        def closed(tag: str) -> None:
            nonlocal depth
            depth -= 1
            end(_local(tag))

        def refused(*declaration: object) -> int:
            raise TooMuch("entities")

        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartElementHandler, parser.EndElementHandler = opened, closed
        parser.CharacterDataHandler = text
        parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refused
        parser.ExternalEntityRefHandler = refused
        with self._zipped.open(name) as stream:
            while block := stream.read(_BLOCK):
                self._bytes -= len(block)
                if self._bytes < 0:
                    raise TooMuch("bytes")
                parser.Parse(block, False)
        parser.Parse(b"", True)


class TooMuch(ValueError):
    """A part exceeds a limit (bytes, characters, depth) or declares entities."""

    def __init__(self, limit: str) -> None:
        self.limit = limit
        super().__init__(limit)


def _local(name: str) -> str:
    return name.rpartition(" ")[2]


def read_office(path: Path, characters: int) -> tuple[str, str]:
    """Return title and body of a .docx, .pptx or .xlsx; its parts identify the kind, not its suffix."""
    try:
        with ZipFile(path) as zipped:
            file = OfficeFile(zipped, characters)
            for part, reader in _READERS.items():
                if part in file.names:
                    return _title(file), reader(file)
    except (BadZipFile, LargeZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(
            "is not an office document that can be read",
            file=path,
            text=type(error).__name__,
            cure="save it again, without a password",
        ) from error
    except expat.ExpatError as error:
        raise DataError(
            "has XML that cannot be read", file=path, text=str(error), cure="save it again"
        ) from error
    except TooMuch as error:
        raise _beyond(error.limit, characters, path) from None
    raise DataError(
        "is no document of Word, PowerPoint or Excel", file=path, cure="save it as one, or remove it"
    )


def _beyond(limit: str, characters: int, path: Path) -> DataError:
    problems = {
        "bytes": (f"unpacks to more than {MOST_UNPACKED >> 20} MB", "split it"),
        "characters": (
            f"takes more than {characters:,} characters of text",
            "split it, or raise reading.characters",
        ),
        "depth": (f"nests deeper than {DEEPEST} elements", "save it again"),
        "entities": ("declares entities, which no office program does", "remove it"),
    }
    problem, cure = problems[limit]
    return DataError(problem, file=path, cure=cure)


def _title(file: OfficeFile) -> str:
    """Return the title in the document's properties; "" if there is none or it is a program's default."""
    name, inside, words = "docProps/core.xml", False, list[str]()
    if name not in file.names:
        return ""

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal inside
        inside = tag == "title"

    def end(tag: str) -> None:
        nonlocal inside
        inside = False

    file.read(name, start, end, lambda text: file.say(words, text) if inside else None)
    title = " ".join("".join(words).split())
    return "" if title.lower() in _BLANK_TITLES else title


def _flow(file: OfficeFile, names: list[str]) -> str:
    """Return the running text of parts: `t` has text, `p` is a paragraph, `_SPACES` stand for text."""
    pieces: list[str] = []
    hidden = 0
    inside = False

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal hidden, inside
        hidden += tag == "Fallback"  # repeats the content for older programs
        inside = tag == "t" and not hidden
        if tag in _SPACES and not hidden:
            file.say(pieces, _SPACES[tag])

    def end(tag: str) -> None:
        nonlocal hidden, inside
        hidden -= tag == "Fallback"
        inside = False
        if tag == "p" and not hidden:
            file.say(pieces, "\n")

    for name in names:
        file.read(name, start, end, lambda text: file.say(pieces, text) if inside else None)
        file.say(pieces, "\n")
    return "".join(pieces)


_SPACES = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def _word(file: OfficeFile) -> str:
    notes = [name for name in ("word/footnotes.xml", "word/endnotes.xml") if name in file.names]
    return _flow(file, ["word/document.xml", *notes])


def _slides(file: OfficeFile) -> str:
    return _flow(file, [*file.parts("ppt/slides/slide"), *file.parts("ppt/notesSlides/notesSlide")])


def _sheets(file: OfficeFile) -> str:
    shared = list(_shared_strings(file))
    pieces: list[str] = []
    for name in file.parts(f"{_SHEET}sheet"):
        _sheet(file, name, shared, pieces)
        file.say(pieces, "\n")
    return "".join(pieces)


def _shared_strings(file: OfficeFile) -> Iterator[str]:
    """Yield the strings that cells refer to by number, without phonetic guides."""
    name, strings, words = "xl/sharedStrings.xml", list[str](), list[str]()
    if name not in file.names:
        return
    inside, spoken = False, 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal inside, spoken
        spoken += tag == "rPh"
        inside = tag == "t" and not spoken
        if tag == "si":
            words.clear()

    def end(tag: str) -> None:
        nonlocal inside, spoken
        spoken -= tag == "rPh"
        inside = False
        if tag == "si":
            strings.append("".join(words))

    file.read(name, start, end, lambda text: words.append(text) if inside else None)
    yield from strings


def _sheet(file: OfficeFile, name: str, shared: list[str], pieces: list[str]) -> None:
    """Append a sheet's rows to `pieces`, one line each."""
    kind, value, cells = "", list[str](), list[str]()
    inside = False

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal kind, inside
        if tag == "c":
            kind = attributes.get("t", "n")
            value.clear()
        inside = tag in ("v", "t")

    def end(tag: str) -> None:
        nonlocal inside
        inside = False
        if tag == "c" and len(cells) < _CELLS:
            text = "".join(value)
            if kind == "s":
                at = int(text) if text.isdecimal() and len(text) < 10 else -1
                text = shared[at] if 0 <= at < len(shared) else ""
            cells.append(text)
        elif tag == "row":
            for at, cell in enumerate(cells):
                file.say(pieces, f"\t{cell}" if at else cell)
            file.say(pieces, "\n")
            cells.clear()

    file.read(name, start, end, lambda text: value.append(text) if inside else None)


_READERS: dict[str, Callable[[OfficeFile], str]] = {
    "word/document.xml": _word,
    "ppt/presentation.xml": _slides,
    "xl/workbook.xml": _sheets,
}
"""Readers by the part that identifies the kind of file."""


def read_mail(path: Path, html: Callable[[str], str]) -> tuple[str, str, int | None]:
    """Return subject and text of a message, and the Unix time of its Date. `html` converts a page to text,
    for a message without plain text."""
    with path.open("rb") as stream:
        message = BytesParser(policy=policy.default).parse(stream)
    if not isinstance(message, EmailMessage) or not message.keys():
        raise DataError("is no message with headers", file=path, cure="save it as .eml, or as .txt")
    heads = [f"{name}: {message[name]}" for name in ("From", "To", "Cc", "Date") if message[name]]
    part = message.get_body(("plain", "html"))
    text = ""
    if part is not None:
        content = str(part.get_content())
        text = html(content) if part.get_content_subtype() == "html" else content
    attached = [each.get_filename() or each.get_content_type() for each in message.iter_attachments()]
    names = [f"Attached: {name}" for name in attached]
    title, body = str(message["Subject"] or "").strip(), "\n".join((*heads, "", text, *names)).strip()
    return title, body, _sent(message)


def _sent(message: EmailMessage) -> int | None:
    """Return the Unix time at which a message says it was sent; None if it has no readable date."""
    try:
        moment = getattr(message["Date"], "datetime", None)
        if moment is None:
            return None
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return None
