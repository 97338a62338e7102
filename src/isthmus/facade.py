"""Facades: the public names of a package are listed once, in the stub `__init__.pyi` beside its
`__init__.py`.

Type checkers and editors read the stub. At run time a name is loaded, with its module, when it is used, so
that importing a package costs nothing and loads no module that is not needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_STATEMENT = re.compile(r"from (\S+) import|(\w+) as \w+")


def contents(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the imports in its stub.

    `__getattr__` raises AttributeError for a name that the stub does not have.
    """
    module = sys.modules[package]
    stub = Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    homes, home = dict[str, str](), ""
    for source, name in _STATEMENT.findall(stub):
        home = source or home
        if name:
            homes[name] = home

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load, lambda: [*vars(module), *homes], sorted(homes)
