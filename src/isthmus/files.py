"""Files that are written as a whole or not at all, files with secrets, and locks between processes."""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import IO

from isthmus.errors import DataError


@contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[IO[bytes]]:
    """Yield a stream whose content replaces the file once it is complete and on disk.

    A reader sees the old file or the new one, never half of it, whatever happens in between. A name that ends
    in `.gz` is compressed. If the path is a link, the file that it points to is replaced; what is not a
    regular file (a pipe, a terminal, /dev/stdout) is written to directly, after its present content. With
    `private`, only the owner can read the file, from its first byte on.
    """
    target = Path(path)
    packed = target.suffix == ".gz"
    if (target.is_absolute() and target.parts[1:2] in (("dev",), ("proc",))) or _is_special(target):
        with open(target, "ab") as stream:
            yield stream
        return
    if target.is_symlink():
        target = target.resolve()
    temporary = target.with_name(f".{os.getpid()}-{token_hex(8)}.part")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "wb", opener=partial(_create, mode=0o600 if private else 0o666)) as raw:
            if packed:
                with gzip.GzipFile(target.stem, "wb", fileobj=raw, mtime=0) as squeezed:
                    yield squeezed  # type: ignore[misc]
            else:
                yield raw
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, target)
    except OSError as error:
        if error.filename == str(temporary):  # name the caller's file instead
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: bytes, *, private: bool = False) -> None:
    """Write a file as a whole or not at all; with `private`, only its owner can read it."""
    with replacing(path, private=private) as stream:
        stream.write(content)


write_private = partial(write_whole, private=True)


@contextmanager
def locked(path: str | os.PathLike[str], *, wait: bool = True) -> Iterator[int]:
    """Hold a file's lock, which one thread of one process has at a time and which ends with its process.

    Yields the descriptor of the open file. Others wait, or get a BlockingIOError without `wait`.
    """
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(opened, wait=wait)
        yield opened
    finally:
        os.close(opened)


def lock(opened: int, *, wait: bool = True) -> None:
    """Lock an open file until it is closed; does nothing on a system without such locks."""
    if os.name == "posix":
        import fcntl

        fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def private_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file with a secret. Raises DataError, with the cure, if others than its owner can read
    it."""
    file = Path(path)
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=file, cure="check the path") from error
    if os.name == "posix" and mode & 0o077:
        problem = f"a secret that can be read by others (mode {mode:o})"
        raise DataError(problem, file=file, cure=f"chmod 600 {file}, if it is still a secret")
    return file


def _create(path: str, flags: int, *, mode: int) -> int:
    """Open a new file. Raises an error if there is a file or a link of that name."""
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
