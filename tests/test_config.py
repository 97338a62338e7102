"""Configuration: the dataclass is the schema, TOML the text, errors name key, value and cure."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.config import load, to_mapping, to_toml
from isthmus.errors import ConfigError

Loss = Literal["squared", "lambdarank"]


@dataclass(frozen=True)
class Local:
    epochs: int = 1
    rate: float = 0.01

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs = {self.epochs} is not positive")


@dataclass(frozen=True)
class Peer:
    name: str
    limit: float | None = None


@dataclass(frozen=True)
class Training:
    rounds: int = 100
    verbose: bool = False
    loss: Loss = "lambdarank"
    mode: Literal["sound", "paper"] = "sound"
    out: Path = Path("runs")
    probe: int | Path | None = 40
    measures: tuple[str, ...] = ("nDCG@10",)
    span: tuple[int, float] = (1, 2.0)
    local: Local = field(default_factory=Local)
    backup: Local | None = None
    peers: tuple[Peer, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    name: str


def test_defaults_without_a_source() -> None:
    assert load(Training) == Training()


def test_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rounds = 7\nloss = "squared"\nprobe = "probe.txt"\nmeasures = ["MAP", "P@5"]\nspan = [3, 4]\n'
        '[local]\nepochs = 5\nrate = 1\n[[peers]]\nname = "north"\n[limits]\n"a b" = 0.5\n'
    )
    assert load(Training, file) == Training(
        rounds=7,
        loss="squared",
        probe=Path("probe.txt"),
        measures=("MAP", "P@5"),
        span=(3, 4.0),
        local=Local(5, 1.0),
        peers=(Peer("north"),),
        limits={"a b": 0.5},
    )
    assert isinstance(load(Training, file).local.rate, float)


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[local]\nepohcs = 3\n")
    with pytest.raises(
        ConfigError, match=r"run\.toml: unknown key 'local\.epohcs' \(did you mean 'epochs'\?\)"
    ):
        load(Training, file)
    with pytest.raises(ConfigError) as caught:
        load(Training, {"ronuds": 3})
    assert (caught.value.key, caught.value.nearest) == ("ronuds", "rounds")


def test_an_unknown_key_unlike_any_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'local\.zzz' \(known: epochs, rate\)"):
        load(Training, {"local": {"zzz": 1}})


@pytest.mark.parametrize(
    ("table", "key", "expected"),
    [
        ({"rounds": "ten"}, "rounds", "a whole number"),
        ({"rounds": 3.0}, "rounds", "a whole number"),
        ({"rounds": True}, "rounds", "a whole number"),
        ({"verbose": 1}, "verbose", "true or false"),
        ({"local": {"rate": "fast"}}, "local.rate", "a number"),
        ({"local": 3}, "local", "a table: local.epochs, local.rate"),
        ({"backup": 3}, "backup", 'a table or "none"'),
        ({"mode": "papers"}, "mode", 'one of "sound", "paper"'),
        ({"loss": "hinge"}, "loss", 'one of "squared", "lambdarank"'),
        ({"measures": "MAP"}, "measures", "a list, each a string"),
        ({"measures": ["MAP", 3]}, "measures[1]", "a string"),
        ({"span": [1]}, "span", "a list of 2: a whole number, a number"),
        ({"probe": 2.5}, "probe", 'a whole number or a path or "none"'),
        ({"probe": ""}, "probe", 'a whole number or a path or "none"'),
        ({"limits": {"x": "y"}}, "limits.x", "a number"),
        ({"limits": 3}, "limits", "a table"),
        ({"peers": [{"name": 3}]}, "peers[0].name", "a string"),
    ],
)
def test_a_wrong_value_names_key_value_and_expectation(table: dict, key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Training, table)
    assert caught.value.key == key
    assert caught.value.expected == expected
    assert expected in str(caught.value)
    assert repr(caught.value.value) in str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="key 'name' is missing"):
        load(Needs)
    with pytest.raises(ConfigError, match=r"'peers\[0\]\.name' is missing"):
        load(Training, {"peers": [{}]})


def test_what_the_dataclass_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="local: epochs = 0 is not positive"):
        load(Training, {"local": {"epochs": 0}})
    with pytest.raises(ConfigError, match="backup: epochs = 0 is not positive"):
        load(Training, {"backup": {"epochs": 0}})


def test_overrides() -> None:
    built = load(
        Training,
        {"rounds": 3, "local": {"rate": 0.5}},
        [
            "rounds=4",
            "local.epochs = 2",
            "loss=squared",
            'measures=["MAP"]',
            "probe=none",
            "out=3",
            "backup.rate=1",
        ],
    )
    assert built == Training(
        rounds=4,
        local=Local(2, 0.5),
        loss="squared",
        measures=("MAP",),
        probe=None,
        out=Path("3"),
        backup=Local(1, 1.0),
    )


def test_an_override_of_a_table_names_its_keys() -> None:
    @dataclass(frozen=True)
    class Run:
        training: Training = field(default_factory=Training)

    message = r"training = 'abc' \(expected a table: training\.rounds, training\.verbose, training\.loss, …\)"
    with pytest.raises(ConfigError, match=message):
        load(Run, overrides=["training=abc"])


def test_an_override_is_a_string_where_only_a_string_fits() -> None:
    assert load(Needs, overrides=["name=2020-01-01"]) == Needs("2020-01-01")
    assert load(Needs, overrides=["name=true"]) == Needs("true")
    assert load(Needs, overrides=["name=a = b"]) == Needs("a = b")
    assert load(Needs, overrides=["name="]) == Needs("")
    assert load(Needs, overrides=['name="true"']) == Needs("true")
    assert load(Needs, overrides=["name=1\nrounds=2"]) == Needs("1\nrounds=2")


@pytest.mark.parametrize("override", ["rounds", "=3", "a..b=3", ""])
def test_a_malformed_override(override: str) -> None:
    with pytest.raises(ConfigError, match=r"is not key=value \(expected a\.b=3\)"):
        load(Training, overrides=[override])


def test_an_override_through_a_scalar() -> None:
    with pytest.raises(ConfigError, match="rounds holds a value, not a table"):
        load(Training, {"rounds": 3}, ["rounds.x=4"])
    with pytest.raises(ConfigError, match=r"rounds = 'ten' \(expected a whole number\)"):
        load(Training, overrides=["rounds=ten"])


def test_the_callers_mapping_is_untouched() -> None:
    table = {"local": {"epochs": 3}}
    load(Training, table, ["local.epochs=5", "local.rate=1"])
    assert table == {"local": {"epochs": 3}}


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load(Training, tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("rounds = 3\nlocal = = 4\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML: .*line 2"):
        load(Training, tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b'out = "\xe9"\n')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 7"):
        load(Training, tmp_path / "latin.toml")


def test_the_resolved_configuration_is_complete_and_reads_back() -> None:
    built = Training(
        probe=None, peers=(Peer("north", 1.5), Peer("south")), limits={"a b": math.inf, "c": 1e-5}
    )
    told = to_toml(built)
    assert load(Training, tomllib.loads(told)) == built
    assert set(tomllib.loads(told)) == set(to_mapping(Training()))
    assert 'probe = "none"' in told
    assert "[local]\nepochs = 1\n" in told


texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        Training,
        rounds=st.integers(-(2**63), 2**63 - 1),
        verbose=st.booleans(),
        loss=st.sampled_from(["squared", "lambdarank"]),
        measures=st.lists(texts).map(tuple),
        probe=st.none() | st.integers(0, 10) | st.just(Path("probe.txt")),
        local=st.builds(Local, epochs=st.integers(1, 9), rate=st.floats(allow_nan=False)),
        peers=st.lists(st.builds(Peer, name=texts, limit=st.none() | st.floats(allow_nan=False))).map(tuple),
        limits=st.dictionaries(texts, st.floats(allow_nan=False)),
    )
)
def test_round_trip(built: Training) -> None:
    assert load(Training, tomllib.loads(to_toml(built))) == built


def test_an_unsupported_field_type_is_the_programmers_error() -> None:
    @dataclass(frozen=True)
    class Odd:
        what: complex = 1j

    Odd.__annotations__["what"] = complex
    with pytest.raises(TypeError, match="cannot be of type"):
        load(Odd, {"what": 1})
