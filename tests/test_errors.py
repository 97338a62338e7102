"""The error tree is what its docstring draws, and every message has both facts and the cure."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from isthmus import errors
from isthmus.errors import (
    BudgetExhausted,
    ConfigError,
    DataError,
    IncompatibleUpdate,
    IsthmusError,
    MissingExtra,
    RoundFailed,
    nearest,
)


def test_the_drawing_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?: \((\w+)\))?", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            drawn[found[2]] = path[depth - 1] if depth else "Exception"
            if found[3]:
                assert found[3] in [base.__name__ for base in getattr(errors, found[2]).__bases__]
    real = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, IsthmusError)
    }
    assert drawn == real


def test_data_error_names_file_line_text_and_cure() -> None:
    error = DataError("not a number", file="a.txt", line=3, text="x" * 100, cure="write a number")
    assert str(error) == f"a.txt:3: not a number: '{'x' * 79}…' (write a number)"
    assert (error.file, error.line, error.cure) == ("a.txt", 3, "write a number")
    assert str(DataError("empty", file="a.txt")) == "a.txt: empty"
    assert isinstance(error, ValueError)


def test_config_error_names_the_nearest_or_all() -> None:
    assert str(ConfigError("unknown key 'train.ronuds'", key="train.ronuds", known=["rounds", "seed"])) == (
        "unknown key 'train.ronuds' (did you mean 'rounds'?)"
    )
    assert str(ConfigError("no x", key="x", known=["rounds", "seed"])) == "no x (known: rounds, seed)"
    both = ConfigError("mode = 'papr'", key="papr", value="papr", expected="a mode", known=["paper", "sound"])
    assert str(both) == "mode = 'papr' (expected a mode; did you mean 'paper'?)"
    assert ConfigError("plain").nearest is None


def test_nearest() -> None:
    assert nearest("lamdarank", ["lambdarank", "ranknet"]) == "lambdarank"
    assert nearest("zzz", ["lambdarank"]) is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DataError("bad", file="f", line=2, cure="c"), "f:2: bad (c)"),
        (ConfigError("bad", key="k", value=3, expected="e"), "bad (expected e)"),
        (
            MissingExtra("trees", "LambdaMART"),
            "LambdaMART needs an optional package: pip install 'isthmus[trees]'",
        ),
        (BudgetExhausted("north", 2.0, 0.5), "ε = 2 but only 0.5 is left for north"),
        (RoundFailed(4, {"north": "late"}, 2), "round 4 needs 2 usable answers (north: late)"),
        (IncompatibleUpdate("north", "3 × 4", "4 × 3"), "north sent 4 × 3 where the model has 3 × 4"),
    ],
)
def test_errors_travel_between_processes(error: IsthmusError, told: str) -> None:
    assert told in str(error)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
