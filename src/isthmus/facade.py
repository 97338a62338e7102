"""Facades: the public names of a folder stand once, in the stub `__init__.pyi` beside its `__init__.py`.

Type checkers and editors read the stub. At run time a name is loaded, with the module it lives in, when it is
used, so that importing a folder costs nothing and nobody imports what they do not need.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_STATEMENT = re.compile(r"from (\S+) import|(\w+) as \w+")


def contents(
    package: str, renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the imports in its stub.

    `__getattr__` raises AttributeError for a name that the stub does not have. `renamed` has the present
    names of those of the previous release, which work with a FutureWarning.
    """
    module = sys.modules[package]
    stub = Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    homes, home = dict[str, str](), ""
    for source, name in _STATEMENT.findall(stub):
        home = source or home
        if name:
            homes[name] = home

    former = former_names(package, renamed or {}, stacklevel=3)

    def load(name: str) -> Any:
        if name not in homes:
            return former(name)
        return getattr(import_module(homes[name]), name)

    return load, lambda: [*vars(module), *homes], sorted(homes)


def former_names(module: str, renamed: Mapping[str, str], *, stacklevel: int = 2) -> Callable[[str], Any]:
    """`__getattr__` of a module whose names of the previous release work with a FutureWarning."""

    def load(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is called {renamed[name]} now; change the name"
        warnings.warn(message, FutureWarning, stacklevel=stacklevel)
        return getattr(sys.modules[module], renamed[name])

    return load
