"""Small files as office programs write them, for tests."""

from __future__ import annotations

import zipfile
from email.message import EmailMessage
from pathlib import Path
from xml.sax.saxutils import escape

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_A = "http://schemas.openxmlformats.org/drawingml/2006/main"
_P = "http://schemas.openxmlformats.org/presentationml/2006/main"
_X = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_CORE = (
    '<cp:coreProperties xmlns:cp="http://schemas.openxmlformats.org/package/2006/metadata/core-properties"'
    ' xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{}</dc:title></cp:coreProperties>'
)


def zipped(path: Path, parts: dict[str, str | bytes], title: str = "") -> Path:
    """A zip file of these parts."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in parts.items():
            out.writestr(name, content)
        if title:
            out.writestr("docProps/core.xml", _CORE.format(escape(title)))
    return path


def word_part(inner: str) -> str:
    return f'<?xml version="1.0"?><w:document xmlns:w="{_W}"><w:body>{inner}</w:body></w:document>'


def docx(path: Path, *paragraphs: str, title: str = "") -> Path:
    inner = "".join(f"<w:p><w:r><w:t>{escape(text)}</w:t></w:r></w:p>" for text in paragraphs)
    deleted = "<w:p><w:del><w:r><w:delText>struck out</w:delText></w:r></w:del></w:p>"
    return zipped(path, {"word/document.xml": word_part(inner + deleted)}, title)


def pptx(path: Path, *slides: str, notes: str = "") -> Path:
    def page(text: str) -> str:
        return f'<p:sld xmlns:p="{_P}" xmlns:a="{_A}"><a:p><a:r><a:t>{escape(text)}</a:t></a:r></a:p></p:sld>'

    parts: dict[str, str | bytes] = {"ppt/presentation.xml": f'<p:presentation xmlns:p="{_P}"/>'}
    parts |= {f"ppt/slides/slide{at}.xml": page(text) for at, text in enumerate(slides, 1)}
    parts |= {"ppt/notesSlides/notesSlide1.xml": page(notes)} if notes else {}
    return zipped(path, parts, "PowerPoint Presentation")


def xlsx(path: Path, rows: list[list[str | float]]) -> Path:
    shared: list[str] = []

    def cell(value: str | float) -> str:
        if isinstance(value, str):
            shared.append(value)
            return f'<c t="s"><v>{len(shared) - 1}</v></c>'
        return f"<c><v>{value}</v></c>"

    lines = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows)
    strings = "".join(f"<si><t>{escape(text)}</t></si>" for text in shared)
    parts: dict[str, str | bytes] = {
        "xl/workbook.xml": f'<workbook xmlns="{_X}"/>',
        "xl/sharedStrings.xml": f'<sst xmlns="{_X}">{strings}</sst>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{_X}"><sheetData>{lines}</sheetData></worksheet>',
    }
    return zipped(path, parts)


def eml(path: Path, subject: str, text: str, *, attached: str = "") -> Path:
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, "ada@example.org", "ben@example.org"
    message["Date"] = "Tue, 03 Feb 2026 10:00:00 +0000"
    message.set_content(text)
    if attached:
        message.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename=attached)
    path.write_bytes(bytes(message))
    return path


def parquet(path: Path, columns: dict[str, list[object]]) -> Path:
    import pyarrow as pa
    from pyarrow import parquet as files

    files.write_table(pa.table(columns), path)
    return path
