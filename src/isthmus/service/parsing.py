"""Convert files to text: the contents of each kind of file, in one pass over it.

    .txt .rst     as they are
    .md           as they are; the first heading is the title, `allow` and `subject` of its front matter apart
    .html         text between tags, without scripts and styles; block elements begin a new line
    .pdf          page by page, by pypdf (extra `pdf`) or by the program pdftotext
    .docx .pptx .xlsx .eml      see `office`
    .csv .tsv .parquet          one document per row, see `row_files`

Anyone who may put a file into a silo's folder chooses its contents, so every reader takes time at most
proportional to the size of the file. PDF is the exception: its pages may share their contents, and each page
costs as much as it shows. The process in which readers run limits that.

Files are parsed in a separate process, which may be ended: no content of a file can stop the node.

    node                                    parser
    {"path": …, "within": …}       →        soft limit of processor time from now on
    length, {"title", "body", …}   ←        or {"error", "text", "cure"}
    length, {"rows", "more"}       ←        of a table, until there are no more

The parser has limits of processor time, memory and output, only the environment variables that are needed to
find programs and modules and for the language, and may write no file. It is started with the first file and
reads one after the other. A file that ends the process is one DataError, and the next file starts another
process.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from html import unescape
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from isthmus.config import require
from isthmus.errors import DataError
from isthmus.service.row_files import LARGEST as LARGEST_TABLE
from isthmus.service.row_files import Columns, Row, read_rows

LARGEST = 50 << 20
"""Bytes of the largest file that is read; larger ones are hardly documents."""
PATIENCE = 60
"""Seconds of wall-clock time to wait for a file, plus ten per second of processor time that it may take."""
AHEAD = 8
"""Files sent to the parser ahead of its answers; few enough for their names to fit into a pipe."""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL")
_PREFIX = 8
_UTF8 = ("utf-8", "surrogatepass")


@dataclass(frozen=True)
class ParsingLimits:
    """Limits for reading one file, which is logged and skipped beyond them, and when files are read again."""

    seconds: int = 20
    """Seconds of processor time for one file."""
    memory_mb: int = 1_024
    pages: int = 5_000
    """Pages of a PDF."""
    characters: int = 10_000_000
    """Characters of a file's text, as an index reads it."""
    watch: float = 0.0
    """Seconds between two checks whether files of sources have changed and must be read again; 0: never."""

    def __post_init__(self) -> None:
        for name, least in (
            ("seconds", 1),
            ("memory_mb", 256),
            ("pages", 1),
            ("characters", 1_000),
            ("watch", 0),
        ):
            require(getattr(self, name) >= least, f"{name} = {getattr(self, name)} must be at least {least}")

    def beyond(self, name: str, what: str, file: Path) -> DataError:
        """Make the error for a file that exceeds the limit `name`."""
        return DataError(f"takes more than {what}", file=file, cure=f"split it, or raise reading.{name}")


class FileText(NamedTuple):
    """The text of a file; `date` is a Unix time, if the file states one."""

    title: str
    body: str
    date: int | None = None
    allow: str = ""
    subject: str = ""
    """`allow` and `subject`: who may see the file and the person it is about, as the file states them."""


def parse(path: Path, limits: ParsingLimits, *, within: Path | None = None) -> FileText:
    """Read the text of a file, by its suffix. With `within`, the file must really lie in that folder."""
    with _opened(path, within) as content:
        _check_size(content, path, LARGEST)
        text = READERS[path.suffix.lower()](content, limits)
    text = text._replace(title=text.title or path.stem)
    if _length(text.title) + _length(text.body) > limits.characters:
        raise limits.beyond("characters", f"{limits.characters:,} characters of text", path)
    if not text.body.strip():  # not the title, which may be just the file name
        raise DataError("has no text", file=path, cure="a scanned PDF needs text recognition first")
    return text


def parse_table(
    path: Path, limits: ParsingLimits, columns: Columns, *, within: Path | None = None
) -> Iterator[list[Row]]:
    """Yield the rows of a table in batches; `within` as for `parse`."""
    with _opened(path, within) as content:
        _check_size(content, path, LARGEST_TABLE)
        yield from read_rows(content, path.suffix.lower(), columns, limits.characters)


def _check_size(content: Path, path: Path, largest: int) -> None:
    if content.stat().st_size > largest:
        raise DataError(f"larger than {largest >> 20} MB", file=path, cure="split it")


@contextmanager
def _opened(path: Path, within: Path | None) -> Iterator[Path]:
    """Open a regular file and yield a path to it; a link or pipe that replaced it since is refused."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise DataError("is not a regular file", file=path, cure="remove it")
        own = os.readlink(f"/proc/self/fd/{number}") if sys.platform == "linux" else os.path.realpath(path)
        if within is not None and not Path(own).is_relative_to(within):
            raise DataError("is a link out of its source's folder", file=path, cure="remove it")
        yield Path(f"/dev/fd/{number}")
    finally:
        os.close(number)


def _length(text: str) -> int:
    """Most characters after normalisation: two ligatures become more than six letters each."""
    return len(text) + 17 * text.count("\ufdfa") + 7 * text.count("\ufdfb")


def _text(path: Path) -> str:
    """Decode a text file by its byte-order mark, else as UTF-8, else as Windows-1252."""
    data = path.read_bytes()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    if "\0" in text:
        raise DataError("is not text", file=path, cure="give it the suffix of what it is")
    return text


def _plain(path: Path, limits: ParsingLimits) -> FileText:
    return FileText("", _text(path))


# Possessive quantifiers (`++`) never backtrack, so a heading that does not match is read once.
_HEADING = re.compile(r"^#{1,6}[ \t]++([^\n]++)", re.MULTILINE)


_MATTER = re.compile(r"---[ \t\r]*+\n((?:(?!---[ \t\r]*+\n)[^\n]*+\n)*+)---[ \t\r]*+(?:\n|\Z)")
_LIKE_MATTER = re.compile(r"\s*+---[ \t\r]*+\n((?:(?![ \t\r]*+(?:\n|\Z))[^\n]*+\n?+)*+)")
"""Matches text that may have been intended as front matter, up to an empty line."""
_LIKE_ALLOW = re.compile(
    r"^[\"']?allow[\"']?[ \t]*+:([^\n]*+)(\n[ \t]*+-|\n[ \t]++\S)?+", re.IGNORECASE | re.MULTILINE
)
_EMPTY = ("", "[]", '""', "''")
_STATED = re.compile(
    r"^(allow|subject)[ \t]*+:[ \t]*+([^\n]*+)\n((?:[ \t]*+-[ \t][^\n]*+\n)*+)", re.MULTILINE
)


def _markdown(path: Path, limits: ParsingLimits) -> FileText:
    """Read Markdown. The first heading is the title and not part of the body too: a word is counted, and paid
    for, in one field. `allow` and `subject` of the front matter are not part of the body either."""
    text, stated = _text(path), {"allow": "", "subject": ""}
    if (matter := _MATTER.match(text)) is not None:
        for name, value, items in _STATED.findall(matter[1]):
            lines = [value.strip().removeprefix("[").removesuffix("]").replace(",", "\n"), items]
            parts = (re.sub(r"^[ \t]*-[ \t]", "", line) for line in "\n".join(lines).split("\n"))
            stated[name] = "\n".join(part.strip().strip("\"'") for part in parts).strip()
        stated["allow"] = _doubtful(matter[1], stated["allow"]) or stated["allow"]
        text = text[: matter.start(1)] + _STATED.sub("", matter[1]) + text[matter.end(1) :]
    elif (like := _LIKE_MATTER.match(text)) is not None:
        stated["allow"] = _doubtful(like[1], "")
    heading = _HEADING.search(text)
    if heading is None:
        return FileText("", text, None, *stated.values())
    title = heading.group(1).rstrip().rstrip("#").rstrip()
    rest = text[: heading.start()] + text[heading.end() :].removeprefix("\n")
    is_title = title and rest.strip()
    return FileText(*((title, rest) if is_title else ("", text)), None, *stated.values())


def _doubtful(matter: str, read: str) -> str:
    """Return an invalid principal if front matter restricts who may see the document in a way that was not
    understood, so that the document is refused instead of shown to all. Returns "" if there is no doubt."""
    stated = _LIKE_ALLOW.findall(matter)
    is_said = any(value.strip() not in _EMPTY or following for value, following in stated)
    return "front matter:allow" if len(stated) > 1 or (is_said and not read) else ""


# A tag's name, and the rest up to `>`, which may stand inside a quoted value.
_TAG = re.compile(
    r"""<(/?)([a-zA-Z][^\s/>]*+)
    (?:[^>=]++|=\s*+(?:"[^"]*+"|'[^']*+'|[^\s>"'][^\s>]*+)?+)*+>""",
    re.VERBOSE,
)
_OPENS = re.compile(r"</?[a-zA-Z]")
_SKIPPED = (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<!", ">"), ("<?", ">"), ("</", ">"))
_RAW = {
    name: re.compile(rf"</{name}(?=[\s/>])[^>]*+>?", re.IGNORECASE) for name in ("script", "style", "title")
}
_HIDDEN = frozenset(("noscript", "template"))
_INLINE = frozenset(("a", "b", "i", "em", "strong", "span", "code", "sub", "sup", "small", "u", "q"))
_LONG_REFERENCE = re.compile(r"&#(?:\d{8,}+|[xX][0-9a-fA-F]{8,}+);?")
_SPACE = re.compile(r"[ \t\r\f\v]+")


@dataclass
class _Page:
    """Reads an HTML page from start to end; a construct that is never closed counts as text."""

    text: str
    titles: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    _hidden: list[str] = field(default_factory=list)
    _missing: set[str] = field(default_factory=set)
    """Closing marks that the rest of the page lacks. Each is searched for once; otherwise every `<` would
    cause a search to the end of the page."""

    def read(self) -> tuple[str, str]:
        at = 0
        while (mark := self.text.find("<", at)) >= 0:
            self._say(self.text[at:mark])
            at = self._markup(mark)
        self._say(self.text[at:])
        return "".join(self.titles), "".join(self.words)

    def _say(self, words: str) -> None:
        if words and not self._hidden:
            self.words.append(words)

    def _markup(self, at: int) -> int:
        """Return the position after the markup that begins here, or after a `<` that begins none."""
        if _OPENS.match(self.text, at):
            tag = None if ">" in self._missing else _TAG.match(self.text, at)
            if tag is not None:
                return self._tag(tag)
            self._missing.add(">")
        for opening, closing in _SKIPPED:
            if self.text.startswith(opening, at) and closing not in self._missing:
                end = self.text.find(closing, at + 2)
                if end >= 0:
                    return end + len(closing)
                self._missing.add(closing)
        self._say("<")
        return at + 1

    def _tag(self, tag: re.Match[str]) -> int:
        closes, name = bool(tag.group(1)), tag.group(2).lower()
        empty = not closes and self.text[tag.end() - 2] == "/"
        if name in _RAW and not closes:
            return tag.end() if empty else self._raw(name, tag.end())
        if name in _HIDDEN:
            self._hide(name, closes or empty)
        elif name not in _INLINE:
            self.words.append("\n\n" if empty else "\n")
        return tag.end()

    def _raw(self, name: str, at: int) -> int:
        """Return the position after an element whose contents are no markup, or after the page."""
        end = _RAW[name].search(self.text, at)
        last = len(self.text) if end is None else end.start()
        if name == "title":
            self.titles.append(self.text[at:last])
        return last if end is None else end.end()

    def _hide(self, name: str, closes: bool) -> None:
        if not closes and name not in self._hidden:
            self._hidden.append(name)
        elif closes and name in self._hidden:
            del self._hidden[self._hidden.index(name) :]


def _html(path: Path, limits: ParsingLimits) -> FileText:
    title, body = _Page(_text(path)).read()
    return FileText(_tidy(_resolved(title)).replace("\n", " "), _tidy(_resolved(body)))


def _resolved(text: str) -> str:
    """Replace character references by characters; numbers beyond Unicode become U+FFFD."""
    return unescape(_LONG_REFERENCE.sub("\ufffd", text))


def _tidy(text: str) -> str:
    lines = (_SPACE.sub(" ", line).strip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _pdf(path: Path, limits: ParsingLimits) -> FileText:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        if shutil.which("pdftotext") is None:
            raise DataError("PDF files need pypdf", file=path, cure="pip install 'isthmus[pdf]'") from error
        return FileText("", _pdftotext(path, limits))
    try:
        pages = PdfReader(path, strict=False)
        title = pages.metadata.title if pages.metadata is not None else None
        count = len(pages.pages)
        if count > limits.pages:
            raise limits.beyond("pages", f"{limits.pages:,} pages: it has {count:,}", path)
        texts = (page.extract_text() for page in pages.pages)
        return FileText(str(title or "").strip(), _tidy("\n".join(_within(texts, limits, path))))
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a broken file makes pypdf raise anything
        raise DataError("is not a PDF that can be read", file=path, text=str(error)) from error


def _within(texts: Iterator[str], limits: ParsingLimits, path: Path) -> Iterator[str]:
    """Yield the texts; raises DataError once all of them together are longer than allowed."""
    length = 0
    for text in texts:
        length += len(text)
        if length > limits.characters:
            raise limits.beyond("characters", f"{limits.characters:,} characters of text", path)
        yield text


def _pdftotext(path: Path, limits: ParsingLimits) -> str:
    command = ["pdftotext", "-q", "-enc", "UTF-8", "-", "-"]
    with path.open("rb") as content:
        done = subprocess.run(command, stdin=content, capture_output=True, check=False)
    if done.returncode:
        raise DataError("is not a PDF that can be read", file=path)
    if done.stdout.count(b"\f") > limits.pages:
        raise limits.beyond("pages", f"{limits.pages:,} pages", path)
    return _tidy(done.stdout.decode("utf-8", "replace"))


def _office(path: Path, limits: ParsingLimits) -> FileText:
    from isthmus.service.office import read_office

    title, body = read_office(path, limits.characters)
    return FileText(title, _tidy(body))


def _mail(path: Path, limits: ParsingLimits) -> FileText:
    from isthmus.service.office import read_mail

    return FileText(*read_mail(path, lambda page: _tidy(_resolved(_Page(page).read()[1]))))


READERS: dict[str, Callable[[Path, ParsingLimits], FileText]] = {
    ".txt": _plain,
    ".text": _plain,
    ".rst": _plain,
    ".md": _markdown,
    ".markdown": _markdown,
    ".html": _html,
    ".htm": _html,
    ".xhtml": _html,
    ".pdf": _pdf,
    ".docx": _office,
    ".pptx": _office,
    ".xlsx": _office,
    ".eml": _mail,
}
"""Functions that return title (empty if there is none) and body of a file, by its suffix."""
TABLES = (".csv", ".tsv", ".parquet")
"""Files whose rows are documents."""


Parsed = FileText | Row

# the parser process


class Parser:
    """Parses files in a separate process; to be used by one thread at a time.

    A file that does not lie in the folder `within` when it is opened is not read. `columns` are those of
    tables.
    """

    def __init__(
        self,
        limits: ParsingLimits | None = None,
        *,
        within: Path | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.limits = limits or ParsingLimits()
        self._columns = asdict(columns or Columns())
        self._within = "" if within is None else os.path.realpath(within)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Parser:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def parse_all(self, paths: Iterable[Path]) -> Iterator[tuple[Path, Parsed | DataError]]:
        """Yield every file, in order, with its text or the error. A table comes once for each row, and once
        more with an error if it cannot be read to its end."""
        rest, sent = iter(paths), deque[Path]()
        while True:
            for path in islice(rest, AHEAD - len(sent)):
                self._send(path, sent)
            if not sent:
                return
            path = sent[0]
            for answer in self._parsed(path):
                yield path, answer
            sent.popleft()
            if self._process is None:  # the process ended at this file: send the others again
                again = list(sent)
                sent.clear()
                for each in again:
                    self._send(each, sent)

    def _send(self, path: Path, sent: deque[Path]) -> None:
        with suppress(BrokenPipeError):  # noticed when the answer is read
            message = {"path": os.path.abspath(path), "within": self._within, "columns": self._columns}
            _write(self._running().stdin, message)
        sent.append(path)

    def _parsed(self, path: Path) -> Iterator[Parsed | DataError]:
        while True:
            process = self._running()
            try:
                answer = self._answer(process)
            except EOFError:
                yield self._ended(process, path)
                return
            except TimeoutError:
                self._end()
                yield self.limits.beyond("seconds", f"{self._patience:,} seconds on the clock", path)
                return
            if answer.get("spent"):
                self._end()
            if "error" in answer:
                yield DataError(answer["error"], file=path, text=answer["text"], cure=answer["cure"])
            elif "rows" in answer:
                yield from (Row(*row) for row in answer["rows"])
            else:
                yield FileText(**{name: answer[name] for name in FileText._fields})
            if not answer.get("more"):
                return

    @property
    def _patience(self) -> int:
        return PATIENCE + 10 * self.limits.seconds

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            limits = self.limits
            values = (limits.seconds, limits.memory_mb, limits.pages, limits.characters)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-B", "-m", __name__, *map(str, values)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # a terminal's Ctrl-C is for the node only
            )
        return self._process

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Read the parser's next answer; EOFError if the process has ended, TimeoutError if none came."""
        until = time.monotonic() + self._patience
        size = int.from_bytes(_bytes(process, _PREFIX, until), "little")
        answer: dict[str, Any] = json.loads(_bytes(process, size, until).decode(*_UTF8))
        return answer

    def _ended(self, process: subprocess.Popen[bytes], path: Path) -> DataError:
        """The error for a parser process that ended in the middle of a file."""
        self._end()
        if process.returncode == -signal.SIGXCPU:
            return self.limits.beyond("seconds", f"{self.limits.seconds:,} seconds of processor time", path)
        return DataError("ended the process that read it", file=path, cure="remove or repair the file")

    def _end(self) -> None:
        """End the parser and the programs it started."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)  # it ends by itself between two files
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process stuck in a system call ends after it
            process.wait(5)


def _bytes(process: subprocess.Popen[bytes], size: int, until: float) -> bytes:
    pipe, data = process.stdout, bytearray()
    if pipe is None:
        raise EOFError
    while len(data) < size:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError
        block = os.read(pipe.fileno(), min(size - len(data), 1 << 20))
        if not block:
            raise EOFError
        data += block
    return bytes(data)


def _write(pipe: IO[bytes] | None, message: dict[str, Any]) -> None:
    if pipe is None:
        raise EOFError
    data = json.dumps(message, ensure_ascii=False).encode(*_UTF8)
    pipe.write(len(data).to_bytes(_PREFIX, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> dict[str, Any] | None:
    """Read the next message; None at the end of the stream."""
    prefix = pipe.read(_PREFIX)
    if len(prefix) < _PREFIX:
        return None
    message: dict[str, Any] = json.loads(pipe.read(int.from_bytes(prefix, "little")).decode(*_UTF8))
    return message


def main(values: list[str]) -> None:
    """Run the parser process: read paths from stdin and write texts until stdin ends."""
    limits = ParsingLimits(*map(int, values))
    _limit(resource.RLIMIT_AS, limits.memory_mb << 20)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # libraries print to stderr, not among answers
    while (request := _read(sys.stdin.buffer)) is not None:
        path = Path(request["path"])
        _allow_time(limits)
        try:
            for answer in _parsed(request, path, limits):
                _write(answers, answer)
                _allow_time(limits)
        except MemoryError:  # also while the answer is written; memory is fragmented now
            error = limits.beyond("memory_mb", f"{limits.memory_mb:,} MB of memory", path)
            _write(answers, _problem(error) | {"spent": True})


def _allow_time(limits: ParsingLimits) -> None:
    """Limit the processor time for a file, or for the next rows of a table."""
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + limits.seconds)


def _parsed(request: dict[str, Any], path: Path, limits: ParsingLimits) -> Iterator[dict[str, Any]]:
    within = Path(request["within"]) if request["within"] else None
    try:
        if path.suffix.lower() in TABLES:
            for rows in parse_table(path, limits, Columns(**request["columns"]), within=within):
                yield {"rows": rows, "more": True}
            yield {"rows": []}
        else:
            yield parse(path, limits, within=within)._asdict()
    except DataError as error:
        yield _problem(error)
    except OSError as error:
        yield _problem(DataError(f"cannot be read: {error.strerror or error}", cure="check the file"))
    except MemoryError:
        raise
    except Exception as error:  # a failure that no reader foresees
        yield _problem(DataError("cannot be read", text=type(error).__name__, cure="check the file"))


def _problem(error: DataError) -> dict[str, Any]:
    return {"error": error.problem, "text": error.text, "cure": error.cure}


def _limit(kind: int, value: int) -> None:
    """Set a soft limit, if the system has it; the hard limit stays, so the next file can get its own."""
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
