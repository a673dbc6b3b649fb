"""Typed, bounds-checked access to the configuration files of models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from polarlm.model_loaders.errors import LoadError, stand_in

_LOG = logging.getLogger(__name__)
_Value = TypeVar("_Value")
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e12
_MOST_SHOWN, _LONGEST = 8, 60  # items of a list, and characters of a value, in a sentence
_SMALLEST_POSITIVE = 1e-15  # below the least epsilon of files, 1e-12, rounded to float32


def read_json(path: Path, kind: type[Any] = dict, *, required: bool = True) -> Any:
    """The JSON object in `path`, or the list; an empty one if the file is absent and not required."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        if not required:
            return kind()
        raise LoadError(f"{path} is missing; download the model's folder completely.") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise (stand_in(path, raw) or LoadError(f"{path} is not valid JSON; download it again.")) from None
    if not isinstance(content, kind):
        expected = "object" if kind is dict else "list"
        raise LoadError(
            f"{path} should hold a JSON {expected} but holds a {type(content).__name__}; download it again."
        )
    return content


def usable(read: Callable[[], _Value]) -> _Value | None:
    """What `read()` returns of a setting that a model works without; None, with a warning, if it raises LoadError."""
    try:
        return read()
    except LoadError as problem:
        _LOG.warning("%s It is left out.", problem)
        return None


@lru_cache(maxsize=256)
def _warn_once(sentence: str) -> None:
    _LOG.warning("%s", sentence)


def describe(value: object) -> str:
    """A value of a file as a sentence has it: what is short as it is, an object or a long list by what it is."""
    if isinstance(value, Mapping):
        if isinstance(content := value.get("content"), str):  # how tokens are written
            return f"the token {describe(content)}"
        return f"an object with {_cut(', '.join(map(repr, [*value][:_MOST_SHOWN])))}" if value else "an empty object"
    if isinstance(value, Sequence) and not isinstance(value, str):
        is_short = len(value) <= _MOST_SHOWN and not any(isinstance(one, Mapping) for one in value)
        if is_short and len(items := repr([*value])) <= _LONGEST:
            return items
        return f"a list of {len(value):,} value{'s' * (len(value) != 1)}"
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


class Fields:
    """The keys of one configuration; null counts as absent.

    `where` names the file in errors, and `names` maps translated keys to the file's own spelling. A default of None
    makes a key required. Every method raises LoadError for a value of another type or out of range.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        where: str | Path,
        names: Mapping[str, str] | None = None,
        keys_read: set[str] | None = None,
    ) -> None:
        """keys_read: gets the keys that are asked for."""
        self._values, self.where, self._names = values, str(where), names or {}
        self._keys_read = set() if keys_read is None else keys_read

    @classmethod
    def read(cls, path: Path, *, required: bool = True) -> Fields:
        """The fields of a JSON file; none if it is absent and not required."""
        return cls(read_json(path, required=required), path)

    def has(self, key: str) -> bool:
        return self.value(key) is not None

    def present(self) -> list[str]:
        """The keys that are not absent."""
        return [key for key, value in self._values.items() if value is not None]

    def value(self, key: str) -> object:
        """What the key has, of any type; None if it is absent."""
        self._keys_read.add(key)
        return self._values.get(key)

    def warn_of_unread(self, harmless: Collection[str] = ()) -> None:
        """Log the keys that nobody has asked for and that are not `harmless`, unless they are null, false, 0 or empty.

        Call it when all is read.
        """
        known = self._keys_read.union(harmless)
        if unread := [key for key, value in self._values.items() if value and key not in known]:
            more = ", ..." if len(unread) > _MOST_SHOWN else ""
            shown = ", ".join(map(describe, unread[:_MOST_SHOWN]))
            _warn_once(f"{self.where} has keys that are unknown here and ignored: {shown}{more}")

    def refuse(self, key: str, problem: str) -> LoadError:
        """The error for a key whose value cannot be used; the caller raises it."""
        name, value = self._names.get(key, key), describe(self._values.get(key))
        return LoadError(f"{self.where}: {name if name.isprintable() else repr(name)} is {value}, {problem}.")

    def _check(self, key: str, default: Any, is_right: Callable[[Any], bool], expected: str) -> Any:
        """The value of a key, or its default. Raises LoadError with what is `expected` unless the value `is_right`."""
        value = self.value(key)
        if value is None:
            if default is None:
                raise LoadError(
                    f"{self.where} lacks the key {self._names.get(key, key)!r}, which the model cannot be built "
                    "without; use a complete copy of the model."
                )
            return default
        if not is_right(value):
            raise self.refuse(key, f"but must be {expected}")
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        def is_right(value: object) -> bool:
            return _is_number(value) and minimum <= value <= maximum and float(value).is_integer()

        return int(self._check(key, default, is_right, f"a whole number from {minimum} to {maximum}"))

    def number(
        self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = _MAX_NUMBER
    ) -> float:
        def is_right(value: object) -> bool:
            return _is_number(value) and minimum <= value <= maximum

        return float(self._check(key, default, is_right, f"a number from {minimum:g} to {maximum:g}"))

    def positive(self, key: str, default: float | None = None) -> float:
        return self.number(key, default, minimum=_SMALLEST_POSITIVE)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._check(key, default, lambda value: isinstance(value, bool), "true or false"))

    def require(self, key: str, expected: object) -> None:
        """Raises LoadError unless the key is absent or has the value `expected`, the only one that is supported."""
        if self.value(key) not in (None, expected):
            raise self.refuse(key, f"but only {expected!r} is supported")

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._check(key, default, lambda value: isinstance(value, str), "a string"))

    def texts(self, key: str) -> list[str]:
        """A list of strings, or one string; empty if the key is absent."""
        if isinstance(self._values.get(key), str):
            return [self.text(key)]
        return list(self._check(key, [], _list_of(lambda item: isinstance(item, str)), "a list of strings"))

    def numbers(self, key: str, *, minimum: float = _SMALLEST_POSITIVE) -> tuple[float, ...]:
        """Numbers from `minimum` on, positive or from 0; the key is required."""
        are_right = _list_of(lambda item: _is_number(item) and minimum <= item <= _MAX_NUMBER)
        expected = f"a list of {'positive' if minimum else 'non-negative'} numbers"
        return tuple(map(float, self._check(key, None, are_right, expected)))

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers; empty if the key is absent."""
        return list(self._check(key, [], _list_of(lambda item: type(item) is int), "a list of whole numbers"))

    def section(self, key: str) -> Fields | None:
        """The object under `key`; None if it is absent or empty, in whatever form."""
        value = self.value(key)
        if value in (None, {}, [], "", False):
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "but must be an object")
        return Fields(value, f"{self.where}, {key}", self._names)

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        """These fields with `defaults` for keys that are absent."""
        present = {key: self._values[key] for key in self.present()}
        return Fields({**defaults, **present}, self.where, self._names, self._keys_read)

    def with_values(self, values: Mapping[str, object]) -> Fields:
        """These fields with other `values` for some keys."""
        return Fields({**self._values, **values}, self.where, self._names, self._keys_read)

    def with_file_keys(self, keys: Mapping[str, str]) -> Fields:
        """These fields, whose file may spell some keys in another way: ours → the file's."""
        values = {ours: self.value(theirs) for ours, theirs in keys.items() if theirs in self._values}
        return Fields({**self._values, **values}, self.where, {**keys, **self._names}, self._keys_read)

    def names(self) -> list[str]:
        """All keys, in the file's order."""
        return list(self._values)

    def sections(self) -> list[str]:
        """The keys whose values are objects."""
        return [key for key, value in self._values.items() if isinstance(value, dict)]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))
