"""All learning runs on the broker's disk, and which of their models is in use.

    learned/20261116-181500/record.json    the results of the run
    learned/20261116-181500/model          to search with; a run that failed has none
    learned/current                        the version in use, or "none"

A version's folder appears whole, under its name, or not at all; `current` is replaced in one step. If the
process is killed, the previous version stays in use.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.errors import DataError, Refused
from isthmus.files import locked, replacing
from isthmus.service.wire import LearnedVersion

NONE = "none"
"""Stands for no version: nothing that was learned is used."""
_BEGUN = ".begun"


@dataclass(frozen=True)
class ModelVersions:
    """The versions in one folder, oldest first by name."""

    folder: Path

    @property
    def current(self) -> str:
        """The version in use; empty before anything was learned."""
        try:
            return (self.folder / "current").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return ""

    def model(self, version: str) -> bytes:
        """Return the model of a version, as it was written; raises DataError if there is none."""
        try:
            return (self.folder / version / "model").read_bytes()
        except OSError as error:
            cure = "isthmus learn --list says which versions have one"
            raise DataError(f"no model of a version {version}", cure=cure) from error

    def new(self) -> str:
        """Return the name of a version that begins now: the time, with a number if another version has it."""
        name = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        same = sum(path.name.startswith(name) for path in self._folders())
        return f"{name}-{same + 1}" if same else name

    def add(self, version: LearnedVersion, model: bytes | None) -> None:
        """Store a run; it is on disk when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"*{_BEGUN}"):  # left by a process that was killed
            shutil.rmtree(left)
        begun = self.folder / (version.version + _BEGUN)
        begun.mkdir()
        record = version.model_dump(exclude={"current", "usable"})
        files = {"record.json": json.dumps(record, indent=1, ensure_ascii=False).encode()}
        for name, content in (files | ({} if model is None else {"model": model})).items():
            with replacing(begun / name) as stream:
                stream.write(content)
        os.replace(begun, self.folder / version.version)

    def remove(self, version: str) -> None:
        """Delete a run without results."""
        shutil.rmtree(self.folder / version)

    def latest(self) -> float | None:
        """When the last run ended, in seconds since 1970; None before there was one."""
        return max((path.stat().st_mtime for path in self._folders()), default=None)

    def use(self, version: str) -> None:
        """Use a version for searches from now on, or none; raises DataError for one that has no model."""
        if version != NONE:
            self.model(version)
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / "current") as stream:
            stream.write(f"{version}\n".encode("ascii"))

    def before(self) -> str:
        """Return the latest version with a model before the current one; "none" if there is none."""
        current = self.current
        usable = [path.name for path in self._folders() if (path / "model").exists() and path.name < current]
        return max(usable, default=NONE)

    def history(self) -> list[LearnedVersion]:
        """All versions, the latest first."""
        current = self.current
        versions = (self._read(path, current) for path in sorted(self._folders(), reverse=True))
        return [version for version in versions if version is not None]

    def in_use(self) -> LearnedVersion | None:
        """Return the version that searches use; None if none is used."""
        current = self.current
        return None if current in ("", NONE) else self._read(self.folder / current, current)

    def _folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if path.is_dir() and path.suffix != _BEGUN]

    def _read(self, path: Path, current: str) -> LearnedVersion | None:
        try:
            record: Mapping[str, Any] = json.loads((path / "record.json").read_bytes())
            usable = (path / "model").exists()
            return LearnedVersion(**{**record, "usable": usable, "current": path.name == current})
        except (OSError, ValueError, TypeError, ValidationError):
            return None  # no version of a model

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Allow one run at a time, over all processes with this folder; raises Refused while another runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder / ".lock", wait=False))
            except BlockingIOError:
                raise Refused("the silos are learning already (wait until that has ended)") from None
            yield
