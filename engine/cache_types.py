"""Names of cache types, as people write them → which codec each layer has for keys and for values."""

from __future__ import annotations

import re

from engine import codecs
from engine.config import EngineConfig
from engine.errors import EngineError

# Types for keys and values, chosen by measurement: see the table in the README and `bench.quality`.
PRESETS = {
    "quality": ("ring5", "ring4"),
    "balanced": ("ring4", "ring3.5"),
    "compact": ("ring3", "ring3.5"),
}

_PART = re.compile(r"(?P<name>[^@]+)(?:@(?P<first>\d+)(?:-(?P<last>\d+))?)?")


def chosen(config: EngineConfig) -> tuple[tuple[str, str], tuple[str, str]]:
    """(flag, types) for keys and for values: --cache-type-k and -v, else what --cache-type says."""
    k, v = PRESETS.get(config.cache_type, (config.cache_type, config.cache_type))
    return (
        ("--cache-type", k) if config.cache_type_k is None else ("--cache-type-k", config.cache_type_k),
        ("--cache-type", v) if config.cache_type_v is None else ("--cache-type-v", config.cache_type_v),
    )


def layer_codecs(config: EngineConfig, layers: int, head_dim: int) -> list[tuple[codecs.Codec, codecs.Codec]]:
    """The codecs of keys and of values for every layer. Raises EngineError, naming the flag."""
    sides = []
    for side, (flag, types) in zip("kv", chosen(config), strict=True):
        sides.append([_codec(side, flag, name, head_dim, config.block_size) for name in _names(flag, types, layers)])
    return list(zip(*sides, strict=True))


def check_names(config: EngineConfig) -> None:
    """What can be told without a model. Raises EngineError, naming the flag."""
    for side, (flag, types) in zip("kv", chosen(config), strict=True):
        for part in types.split(","):
            _codec(side, flag, _parse(flag, types, part)["name"], None, config.block_size)


def _names(flag: str, types: str, layers: int) -> list[str]:
    """ "ring4@0-1,ring3.5" → one name a layer: parts with numbers for those layers, the one without for the rest."""
    names: list[str | None] = [None] * layers
    rest = None
    for part in types.split(","):
        found = _parse(flag, types, part)
        if found["first"] is None:
            if rest is not None:
                raise EngineError(f"{flag} {types}: {rest} and {found['name']} are both for all other layers; keep one")
            rest = found["name"]
            continue
        first, last = int(found["first"]), int(found["last"] or found["first"])
        if not first <= last < layers:
            raise EngineError(f"{flag} {types}: there are no layers {first}-{last}; this model has 0 to {layers - 1}")
        names[first : last + 1] = [found["name"]] * (last + 1 - first)
    if rest is None and None in names:
        raise EngineError(f"{flag} {types}: layer {names.index(None)} has no type; add one without @ for the rest")
    return [name or str(rest) for name in names]


def _parse(flag: str, types: str, part: str) -> dict[str, str]:
    found = _PART.fullmatch(part.strip())
    if found is None:
        raise EngineError(f"{flag} {types}: write a type, or types for some layers as in ring4@0-1,ring3.5")
    return found.groupdict()


def _codec(side: str, flag: str, name: str, head_dim: int | None, block_size: int) -> codecs.Codec:
    """The codec called `name`; checked against a head dim where there is one already."""
    try:
        codec = codecs.get(name)
        if side not in codec.serves:
            raise ValueError(f"it stores {'values' if side == 'k' else 'keys'} only")
        if head_dim is not None:
            codec.check(head_dim, block_size)
    except ValueError as error:
        raise EngineError(f"{flag} {name}: {error}") from None
    return codec
