"""The cache types that a quality measurement compares: named ones, all, or one with parts switched off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from polarlm.bench.command import CacheType, cache_types
from polarlm.bench.quality import peers
from polarlm.engine import codecs
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading.encoding import Encoding
from polarlm.engine.state.cache_types import PRESETS

_OWN = ("ring", "trellis")  # this project's designs, which have no published form without conditioning
FULL_PRECISION = codecs.FULL


def chosen_types(types: str | None, ablate: str | None, *, key_conditioning: bool) -> list[CacheType]:
    """The types of --types and of --ablate; empty if neither is given. Raises FlagError."""
    chosen = [] if types is None else cache_types(types, key_conditioning=key_conditioning, by_layer=True)
    return chosen if ablate is None else [*chosen, *_ablation(ablate)]


def all_types(head_dim: int, *, key_conditioning: bool) -> list[CacheType]:
    """Every codec that supports the head dim, published ones also without conditioning, and the mixed presets."""
    found = cache_types(",".join(_labels()), key_conditioning=key_conditioning)
    return [one for one in found if _serves(one, head_dim)]


def _labels() -> Iterator[str]:
    """Yields the labels of all types but those of other projects.

    With a codec for keys only, values have half precision; mixed presets are last.
    """
    for name in (name for name in codecs.available() if name not in peers.NAMES):
        label = name if "v" in codecs.get(name).serves else f"{name}/{FULL_PRECISION}"
        yield label
        if name != FULL_PRECISION and not name.startswith(_OWN):
            yield f"{label}:plain"
    for key, value in PRESETS.values():
        if key != value:
            yield f"{key}/{value}"


def _serves(cache_type: CacheType, head_dim: int) -> bool:
    try:
        cache_type.check(head_dim)
    except FlagError:
        return False
    return True


def _ablation(text: str) -> list[CacheType]:
    """The type with all parts of the encoding, without each one, and without any. Raises FlagError."""
    try:
        whole = CacheType.read(text)
    except FlagError as error:
        raise FlagError(str(error).replace("--types", "--ablate", 1)) from None
    if not whole.key_conditioning:
        raise FlagError(f"--ablate {text}: give a type without :plain, whose parts are switched off one after another")
    parts = [part.name for part in fields(Encoding)]

    def without(label: str, *off: str) -> CacheType:
        encoding = Encoding(**{part: part not in off for part in parts})
        return CacheType(label, whole.key, whole.value, True, encoding)

    return [
        without(f"{text} encoded well"),
        *(without(f"{text} without {part.replace('_', ' ')}", part) for part in parts),
        without(f"{text} without any", *parts),
    ]
