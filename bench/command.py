"""The command line of the benchmarks: models and cache types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polarlm import model_loaders
from polarlm.engine import EngineConfig, codecs
from polarlm.engine.backends.select import select
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import Check, FlagError
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.encoding import FULL_ENCODING, Encoding
from polarlm.engine.loading.placement.request import fit_check
from polarlm.engine.state.cache_types import FORMER_TYPES, PRESETS
from polarlm.model_loaders import hub

_PLAIN = ":plain"

TYPES_HELP = (
    "cache types, separated by commas: polarquant for keys and values alike, f16/polarquant for one each, "
    "balanced or another preset, polarquant:plain without key conditioning"
)
LAYERS_HELP = "; ring3/ring3.5,ring5@1-2 has another type in some layers"


@dataclass(frozen=True)
class CacheType:
    """A cache type for keys and for values: a row of a table."""

    label: str
    key: str
    value: str
    key_conditioning: bool
    encoding: Encoding = field(default=FULL_ENCODING, repr=False)

    @classmethod
    def read(cls, text: str) -> CacheType:
        """The cache type of KEYS[/VALUES][:plain] or PRESET[:plain], where KEYS and VALUES may have other types in some
        layers, as in ring3,ring5@1-2. Raises FlagError for an unknown codec.

        >>> CacheType.read("f16/polarquant:plain")
        CacheType(label='f16/polarquant:plain', key='f16', value='polarquant', key_conditioning=False)
        """
        names = text.removesuffix(_PLAIN)
        if names in PRESETS:
            return cls(text, names, names, key_conditioning=not text.endswith(_PLAIN))
        key, _, value = names.partition("/")
        parsed = cls(text, key, value or key, key_conditioning=not text.endswith(_PLAIN))
        for name in parsed.names():
            try:
                codecs.get(name)
            except ValueError as error:
                why = FORMER_TYPES.get(name.partition("+")[0], str(error).rstrip("."))
                raise FlagError(f"--types {text}: {why}") from None
        return parsed

    @property
    def pair(self) -> str:
        """The types of keys and of values, such as "ring4/ring3.5", or one name for both."""
        return self.key if self.key == self.value else f"{self.key}/{self.value}"

    @property
    def codes(self) -> CacheType:
        """The type of the quantized blocks."""
        if self.key not in PRESETS:
            return self
        return replace(self, key=PRESETS[self.key].keys, value=PRESETS[self.key].values)

    @property
    def recent_blocks(self) -> int:
        """How many of a sequence's newest complete blocks are in full precision."""
        return PRESETS[self.key].recent_blocks if self.key in PRESETS else 0

    def check(self, head_dim: int) -> None:
        """Raises FlagError if a codec does not support this head dim."""
        for name in self.names():
            try:
                codecs.get(name).check(head_dim, EngineConfig().block_size)
            except ValueError as error:
                raise FlagError(f"--types {self.label}: {str(error).rstrip('.')}") from None

    def names(self) -> list[str]:
        """The names of the codecs of keys and of values in any layer."""
        codes = self.codes
        return [part.partition("@")[0] for part in f"{codes.key},{codes.value}".split(",")]

    def settings(self) -> dict[str, Any]:
        """The fields of EngineConfig that set this cache type."""
        if self.key in PRESETS:
            return {"cache_type": self.key, "key_conditioning": self.key_conditioning}
        return {"cache_type_k": self.key, "cache_type_v": self.value, "key_conditioning": self.key_conditioning}


def model_named(weights: str | None, hf_repo: str | None) -> str | None:
    """The model of these two flags, as `model_loaders.load` takes it. Raises EngineError if both are given."""
    return settle(None, EngineConfig(weights=weights, hf_repo=hf_repo), {}).weights


def model_files(path: str | None) -> tuple[str, str]:
    """The path of a model's files, which are downloaded if necessary, and its name. Raises LoadError."""
    if path is not None and (name := hub.hub_name(path)) is not None:
        ops = select("auto", 0)[0]
        where = hub.fetch(name, fit_check(EngineConfig(), ops), note)
        return str(where), name.short if where.is_dir() else where.stem
    where = model_loaders.locate(path, verbose=note)
    return str(where), where.resolve().name if where.is_dir() else where.stem


def weight_files(model: str | None) -> frozenset[Path]:
    """The files of a model's weights. Raises LoadError."""
    source = model_loaders.load_weights(model_files(model)[0])[1]
    try:
        return source.files()
    finally:
        source.close()


_MOVED = {"--tools": "tool_cost", "--kld-base": "kld", "--parts": "parts"}


def refuse_what_moved(argv: Sequence[str]) -> None:
    """Raises FlagError for a measurement that `bench.lab` has or that has left, and says what to take instead."""
    if argv[:1] == ["compare"]:
        raise FlagError("compare has left: the JSON of a result has the figures of each window, as runs of its rows")
    for name in (word.partition("=")[0] for word in argv if word.startswith("--")):
        if name in _MOVED:
            raise FlagError(
                f"{name} has a command of its own, in a checkout: python -m polarlm.bench.lab.{_MOVED[name]}"
            )


def file_names(weights: str | None) -> str:
    """The names of model files without their endings, for the name of a result; "demo" without a model."""
    return "demo" if weights is None else Path(weights).name.removesuffix(".gguf")


def at_least(least: int) -> Check:
    """A check for `engine.cli.flags` that refuses numbers below `least`."""
    return lambda number: None if number >= least else f"must be at least {least}"


def numbers(flag: str, text: str, least: int = 1) -> list[int]:
    """The distinct numbers in a list separated by commas, in its order. Raises FlagError for one below `least`."""
    values = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(values) < least:
        raise FlagError(f"{flag} takes numbers from {least} up, separated by commas, not {text!r}")
    return list(dict.fromkeys(values))


def cache_types(text: str) -> list[CacheType]:
    """The distinct types in a list separated by commas; a type with "@" belongs to the type before it. Raises
    FlagError."""
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        if names and "@" in name:
            names[-1] += f",{name}"
        else:
            names.append(name)
    return [CacheType.read(name) for name in dict.fromkeys(names)]
