"""Parses cache types, which settings name, into the codecs of each layer's keys and values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from polarlm.engine import codecs
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.state.shapes import CacheShape


class Preset(NamedTuple):
    """Types of keys and of values, and how many of a sequence's newest complete blocks stay in full precision: their
    errors cost more than those of all older blocks together (docs/quality.md)."""

    keys: str
    values: str
    recent_blocks: int


# Chosen by measurement: see docs/quality.md.
PRESETS = {
    "quality": Preset("ring4", "ring4", 2),
    "balanced": Preset("ring3", "ring3", 4),
    "compact": Preset("ring3", "ring2.5", 4),
}
_OF_FOUR_BITS = "ring4, which has four bits a value, too, or cache_type=balanced, the default"
# Type that has left → what to take.
FORMER_TYPES = {
    "auto": "bits by room are no more: choose compact, which has room for as many tokens, balanced (the default) or "
    "quality; in all of them the newest tokens are in full precision",
    "by-age": "it is balanced, the default, by another name: choose balanced",
    "q8_0": "it is a type of weights here: for the cache choose linear8, which has eight bits a value, too",
    "q4_0": f"it is a type of weights here: for the cache choose {_OF_FOUR_BITS}",
    "kivi4": f"it is no more: choose {_OF_FOUR_BITS}",
    **{f"trellis{bits}": f"it is no more: choose ring{bits}, with as many bits" for bits in ("2.5", "3", "3.5", "4")},
}
_PART = re.compile(r"(?P<name>[^@]+)(?:@(?P<first>\d+)(?:-(?P<last>\d+))?)?")


def preset(config: EngineConfig) -> Preset | None:
    """Return the preset of a store; None if a type is named, also for one side alone: all blocks have that then."""
    return PRESETS.get(config.cache_type) if config.cache_type_k is config.cache_type_v is None else None


def types_by_side(config: EngineConfig) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return (setting, types) for keys and for values: cache_type_k and cache_type_v if set, else cache_type. Raises
    EngineError for a cache_type that is neither one type nor two."""
    if cache_preset := PRESETS.get(config.cache_type):
        k, v, _ = cache_preset
    else:
        k, v = _split_pair(config.cache_type)
    return (
        ("cache_type", k) if config.cache_type_k is None else ("cache_type_k", config.cache_type_k),
        ("cache_type", v) if config.cache_type_v is None else ("cache_type_v", config.cache_type_v),
    )


def _split_pair(types: str) -> tuple[str, str]:
    """ "ring5/ring4" → ("ring5", "ring4"), "ring4" → ("ring4", "ring4")."""
    k, slash, v = types.partition("/")
    if slash and not (k.strip() and v.strip() and "/" not in v):
        raise _refusal("cache_type", types, "write one type, or KEYS/VALUES as in ring5/ring4")
    return k, v if slash else k


def layer_codecs(config: EngineConfig, head_dims: Sequence[int | None]) -> list[tuple[codecs.Codec, codecs.Codec]]:
    """Return (codec of keys, codec of values) of every layer. head_dims: one per layer; None: its codecs are unchecked.
    Raises an EngineError that names the setting."""
    sides = []
    for side, (setting, types) in zip("kv", types_by_side(config), strict=True):
        names = _names(setting, types, len(head_dims))
        named = zip(names, head_dims, strict=True)
        sides.append([_codec(side, setting, name, head_dim, config.block_size) for name, head_dim in named])
    return list(zip(*sides, strict=True))


def check_names(config: EngineConfig) -> None:
    """Check the cache types as far as no model is needed. Raises an EngineError that names the setting."""
    for side, (setting, types) in zip("kv", types_by_side(config), strict=True):
        for part in types.split(","):
            _codec(side, setting, _parse(setting, types, part)["name"], None, config.block_size)


def setting_by_layer(names: Sequence[str | None]) -> str:
    """Return the setting that gives each layer its type: the commonest type first, then other layers' types. None: any.

    >>> setting_by_layer(["ring3", "ring4", "ring4", "ring3", "ring5", "ring3"])
    'ring3,ring4@1-2,ring5@4'
    """
    types = [name for name in names if name is not None]
    common = max(sorted(set(types)), key=types.count)
    parts, first = [common], 0
    for name, run in itertools.groupby(names):
        last = first + len(list(run)) - 1
        if name not in (common, None):
            parts.append(f"{name}@{first}" + (f"-{last}" if last > first else ""))
        first = last + 1
    return ",".join(parts)


def type_pair(config: EngineConfig) -> tuple[str, str]:
    """Return the types of keys and of values of a store, as cache_type_k and cache_type_v."""
    (_, k), (_, v) = types_by_side(config)
    return k, v


def name_types(config: EngineConfig) -> str:
    """Return the preset of a store, or its types, such as "ring4/ring3.5"."""
    return config.cache_type if preset(config) else "/".join(dict.fromkeys(type_pair(config)))


def describe_types(config: EngineConfig, shape: CacheShape) -> str:
    """Return the types of a store of this shape for people."""
    if (types := preset(config)) is None:
        return name_types(config)
    recent = shape.recent_blocks * shape.block_size
    return f"{config.cache_type}: {'/'.join(dict.fromkeys(types[:2]))}, the newest {recent} tokens in full precision"


def _names(setting: str, types: str, layers: int) -> list[str]:
    """ "ring4@0-1,ring3.5" → one name per layer. A part without "@" is for the layers that no other part names."""
    names: list[str | None] = [None] * layers
    rest = None
    for part in types.split(","):
        match = _parse(setting, types, part)
        if match["first"] is None:
            if rest is not None:
                raise _refusal(setting, types, f"{rest} and {match['name']} are both for all other layers; keep one")
            rest = match["name"]
            continue
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if not first <= last < layers:
            raise _refusal(setting, types, f"there are no layers {first}-{last}; this model has 0 to {layers - 1}")
        names[first : last + 1] = [match["name"]] * (last + 1 - first)
    if rest is None and None in names:
        raise _refusal(setting, types, f"layer {names.index(None)} has no type; add one without @ for the rest")
    return [name or str(rest) for name in names]


def _parse(setting: str, types: str, part: str) -> dict[str, str]:
    match = _PART.fullmatch(part.strip())
    if match is None:
        raise _refusal(setting, types, "write a type, or types for some layers as in ring4@0-1,ring3.5")
    return match.groupdict()


def _codec(side: str, setting: str, name: str, head_dim: int | None, block_size: int) -> codecs.Codec:
    """Return the codec called `name`, checked for the head dim unless that is None. Raises EngineError."""
    if name.split("+")[0] not in codecs.available():
        raise _unknown(setting, name)
    try:
        codec = codecs.get(name)
        if side not in codec.serves:
            stored, pair = ("values", f"f16/{name}") if side == "k" else ("keys", f"{name}/f16")
            others = f"give the others a type of their own, as in {pair}"
            others = others if setting == "cache_type" else "choose another type here"
            raise ValueError(f"it stores {stored} only; {others}")
        if head_dim is not None:
            codec.check(head_dim, block_size)
    except ValueError as error:
        raise _refusal(setting, name, str(error)) from None
    return codec


def _unknown(setting: str, name: str) -> EngineError:
    types = ", ".join(codecs.available())
    if former := FORMER_TYPES.get(name.split("+")[0]):
        problem = former
    elif name in PRESETS:
        problem = f"a preset stands alone, as cache_type={name}; choose one of {types} here"
    elif setting == "cache_type":
        problem = (
            f"there is no such type; choose {', '.join(PRESETS)}, one of {types}, or two as "
            "KEYS/VALUES; cache_type_k and cache_type_v set keys and values by themselves"
        )
    else:
        pair = "; KEYS/VALUES is for cache_type" if "/" in name else ""
        problem = f"there is no such type; choose one of {types}{pair}"
    return _refusal(setting, name, problem)


def _refusal(setting: str, types: str, problem: str) -> EngineError:
    return EngineError(f"{setting}={types}: {problem}", settings=("cache_type", "cache_type_k", "cache_type_v"))
