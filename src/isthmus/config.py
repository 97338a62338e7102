"""Configuration: TOML to frozen dataclasses and back.

    @dataclass(frozen=True)
    class Local:
        epochs: int = 1

    @dataclass(frozen=True)
    class Training:
        rounds: int = 100
        local: Local = field(default_factory=Local)

    load(Training, "run.toml", ["local.epochs=5"])   # Training(rounds=20, local=Local(epochs=5))

The dataclass is the schema. Its fields may be bool, int, float, str, Path, `Literal`, tuples,
`Mapping[str, …]`, other dataclasses, and unions of these; its `__post_init__` may refuse a value with a
ValueError. TOML has no null, so where None is allowed the word "none" stands for it. A class variable
`retired` names keys of earlier releases, each with a cure: an empty one is ignored, a filled one refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from inspect import Parameter, signature
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from isthmus.errors import ConfigError

T = TypeVar("T")
Source: TypeAlias = "str | PathLike[str] | Mapping[str, Any] | None"
NONE = "none"
"""The word for None in TOML."""


def load(cls: type[T], source: Source = None, overrides: Iterable[str] = ()) -> T:
    """The configuration in a TOML file or a mapping, with `key.key=value` overrides on top.

    An override's value is read as TOML, and as a plain string where it is not TOML or where only a
    string fits. An unknown key, a missing one or a value of the wrong type is a ConfigError.
    """
    table, origin = _read(source)
    for override in overrides:
        _override(table, override)
    built: T = _Reader(origin).build(cls, table, "")
    return built


def require(holds: object, message: str) -> None:
    """Raise ValueError with the message unless the condition holds; for `__post_init__` of configurations."""
    if not holds:
        raise ValueError(message)


def to_mapping(config: Any) -> dict[str, Any]:
    """The configuration as plain tables, lists and scalars, complete with its defaults."""
    return {each.name: _plain(getattr(config, each.name)) for each in fields(config)}


def to_toml(config: Any) -> str:
    """The configuration as TOML that `load` reads back to an equal one."""
    return "\n".join(_lines(to_mapping(config), ())) + "\n"


def toml_value(value: Any) -> str:
    """One value as TOML, to stand after `key = `; for a dataclass, only what differs from its defaults."""
    return _value(_plain(_changed(value)))


def settings_repr(thing: object) -> str:
    """`Name(setting=value, …)` as scikit-learn prints an estimator: the settings that differ from their
    defaults.

    Positional settings are always included: `MLP(hidden=(32,))`.
    """
    settings = []
    for name, parameter in _parameters(type(thing)).items():
        value = getattr(thing, name)
        if parameter.kind is not parameter.KEYWORD_ONLY or value != parameter.default:
            settings.append(f"{name}={_short(value)}")
    return f"{type(thing).__name__}({', '.join(settings)})"


def _short(value: Any) -> str:
    """The `repr` of a value; for a dataclass, only the settings that differ from their defaults."""
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    defaults = {name: each.default for name, each in _parameters(type(value)).items()}
    changed = [each.name for each in fields(value) if getattr(value, each.name) != defaults.get(each.name)]
    return f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in changed)})"


def _parameters(cls: type) -> dict[str, Parameter]:
    """The constructor's parameters with their defaults, including those that it passes on to its base
    class."""
    own = dict(signature(cls).parameters)
    if passed_on := [name for name, each in own.items() if each.kind is each.VAR_KEYWORD]:
        del own[passed_on[0]]
        above = _parameters(cls.__mro__[1])
        own |= {name: each for name, each in above.items() if each.kind is each.KEYWORD_ONLY}
    for each in fields(cls) if is_dataclass(cls) else ():
        if each.default_factory is not MISSING:
            own[each.name] = own[each.name].replace(default=each.default_factory())
    return own


def _read(source: Source) -> tuple[dict[str, Any], str]:
    if source is None:
        return {}, ""
    if isinstance(source, Mapping):
        return _copied(source), ""
    try:
        return tomllib.loads(Path(source).read_text(encoding="utf-8")), f"{source}: "
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error} (check the path)") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from error


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as fresh dicts, so that overrides never reach the caller's mapping."""
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in table.items()}


@dataclass(frozen=True, slots=True)
class _Said:
    """A value from the command line: its text, and its value as TOML."""

    text: str
    value: Any


def _override(table: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    path = key.strip().split(".")
    if not sign or not all(path):
        raise ConfigError(f"override {override!r} is not key=value", value=override, expected="a.b=3")
    for depth, name in enumerate(path[:-1], 1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"override {override!r}: {'.'.join(path[:depth])} holds a value, not a table", key=key
            )
    table[path[-1]] = _Said(text.strip(), _as_toml(text.strip()))


def _as_toml(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _number(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


_SCALARS: dict[Any, tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool), bool),
    int: ("a whole number", _number(int), lambda value: value),
    float: ("a number", _number(int, float), float),
    str: ("a string", lambda value: isinstance(value, str), lambda value: value),
    bytes: ("bytes", lambda value: isinstance(value, bytes), bytes),
    Path: ("a path", lambda value: isinstance(value, (str, PathLike)) and str(value) != "", Path),
    NoneType: (f'"{NONE}"', lambda value: value is None or value == NONE, lambda value: None),
}
"""For every scalar type: its description, a test of whether a value suits it, and the conversion."""


class _Reader:
    """Builds typed values; its errors name the key and the origin of a wrong value."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def build(self, cls: Any, table: Any, at: str) -> Any:
        hints = _hints(cls)
        if not isinstance(table, Mapping):
            raise self._wrong(at, table, cls, [_join(at, key) for key in hints])
        table = self._without_retired(cls, table, at)
        for key in table:
            if key not in hints:
                raise ConfigError(
                    f"{self.origin}unknown key {_join(at, key)!r}", key=_join(at, key), known=hints
                )
        values = {key: self.convert(hints[key], value, _join(at, key)) for key, value in table.items()}
        for name in _required(cls):
            if name not in values:
                raise ConfigError(f"{self.origin}key {_join(at, name)!r} is missing", key=_join(at, name))
        try:
            return cls(**values)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{self.origin}{at + ': ' if at else ''}{error}", key=at or None) from error

    def _without_retired(self, cls: Any, table: Mapping[str, Any], at: str) -> dict[str, Any]:
        """The table without keys of earlier releases. Raises ConfigError if one of them has a value."""
        retired = {key: cure for key, cure in getattr(cls, "retired", {}).items() if key not in _hints(cls)}
        for key, cure in retired.items():
            value = table.get(key)
            if (value.value if isinstance(value, _Said) else value) not in (None, NONE, "", [], (), {}):
                raise ConfigError(
                    f"{self.origin}{_join(at, key)} is no longer a key: {cure}", key=_join(at, key)
                )
        return {key: value for key, value in table.items() if key not in retired}

    def convert(self, kind: Any, value: Any, at: str) -> Any:
        if not isinstance(value, _Said):
            return self._convert(kind, value, at)
        try:
            return self._convert(kind, value.value, at)
        except ConfigError:
            if isinstance(value.value, str):
                raise
        try:
            return self._convert(kind, value.text, at)
        except ConfigError:
            return self._convert(kind, value.value, at)

    def _convert(self, kind: Any, value: Any, at: str) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return self._one_of(kind, arguments, value, at)
        if origin is Literal:
            if any(type(choice) is type(value) and choice == value for choice in arguments):
                return value
            raise self._wrong(at, value, kind)
        if is_dataclass(kind):
            return self.build(kind, value, at)
        if origin is tuple:
            return self._tuple(kind, arguments, value, at)
        if origin in (dict, Mapping):
            if not isinstance(value, Mapping):
                raise self._wrong(at, value, kind)
            return {key: self.convert(arguments[1], item, _join(at, key)) for key, item in value.items()}
        return self._scalar(kind, value, at)

    def _scalar(self, kind: Any, value: Any, at: str) -> Any:
        if kind is Any:
            return value
        if kind not in _SCALARS:
            raise TypeError(f"{at}: configuration fields cannot be of type {kind}")
        _, suits, convert = _SCALARS[kind]
        if not suits(value):
            raise self._wrong(at, value, kind)
        return convert(value)

    def _one_of(self, kind: Any, kinds: tuple[Any, ...], value: Any, at: str) -> Any:
        if NoneType in kinds and (value is None or value == NONE):
            return None
        tables = [choice for choice in kinds if is_dataclass(choice)]
        if isinstance(value, Mapping) and len(tables) == 1:
            return self.build(tables[0], value, at)
        for choice in kinds:
            try:
                return self._convert(choice, value, at)
            except ConfigError:
                continue
        raise self._wrong(at, value, kind)

    def _tuple(self, kind: Any, kinds: tuple[Any, ...], value: Any, at: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise self._wrong(at, value, kind)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            kinds = (kinds[0],) * len(value)
        if len(kinds) != len(value):
            raise self._wrong(at, value, kind)
        pairs = zip(kinds, value, strict=True)
        return tuple(self.convert(each, item, f"{at}[{row}]") for row, (each, item) in enumerate(pairs))

    def _wrong(self, at: str, value: Any, kind: Any, keys: Sequence[str] = ()) -> ConfigError:
        problem = f"{self.origin}{at or 'the configuration'} = {value!r}"
        some = [*keys[:3], "…"] if len(keys) > 3 else keys
        expected = _describe(kind) + (f": {', '.join(some)}" if some else "")
        return ConfigError(problem, key=at, value=value, expected=expected)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def _required(cls: Any) -> list[str]:
    return [
        field.name
        for field in fields(cls)
        if field.init and field.default is MISSING and field.default_factory is MISSING
    ]


def _describe(kind: Any) -> str:
    """Describe a type in words for an author of TOML."""
    if kind in _SCALARS:
        return _SCALARS[kind][0]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_describe(choice) for choice in arguments)
    if origin is Literal:
        return "one of " + ", ".join(_value(choice) for choice in arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return f"a list, each {_describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: {', '.join(_describe(each) for each in arguments)}"
    return "a table"


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else str(key)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, PathLike):
        return str(value)
    return NONE if value is None else value


def _changed(value: Any) -> Any:
    """Dataclasses as tables of the fields that differ from their defaults."""
    if isinstance(value, (list, tuple)):
        return [_changed(item) for item in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    values = {each.name: (getattr(value, each.name), each.default) for each in fields(value)}
    return {name: _changed(item) for name, (item, default) in values.items() if item != default}


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterable[str]:
    """Scalars first, then the tables below: a key after a [header] would belong to that header."""
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            below = (*path, key)
            yield f"\n[{'.'.join(_key(part) for part in below)}]"
            yield from _lines(value, below)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return _quoted(str(value))


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else _quoted(key)


def _quoted(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\"}
    escaped = (
        escapes.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char)
        for char in text
    )
    return '"' + "".join(escaped) + '"'
