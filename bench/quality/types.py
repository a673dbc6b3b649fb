"""Which cache types a quality measurement compares: those named, all there are, or one with parts of it left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from bench.command import CacheType, cache_types
from engine import codecs
from engine.assembly import Encoding
from engine.flags import FlagError
from engine.kv.cache_types import PRESETS

_OWN = ("ring", "trellis")  # designs of this project: there is no publication that leaves out conditioning
FULL_PRECISION = codecs.FULL


def chosen_types(types: str | None, ablate: str | None, *, key_conditioning: bool) -> list[CacheType]:
    """The types of --types and of --ablate, none where neither is given. Raises FlagError."""
    chosen = [] if types is None else cache_types(types, key_conditioning=key_conditioning)
    return chosen if ablate is None else [*chosen, *_ablation(ablate)]


def all_types(head_dim: int, *, key_conditioning: bool) -> list[CacheType]:
    """Every codec that serves the head dim, those of a publication as published, too, and what presets mix."""
    found = cache_types(",".join(_worth_a_look()), key_conditioning=key_conditioning)
    return [one for one in found if _serves(one, head_dim)]


def _worth_a_look() -> Iterator[str]:
    """A codec for keys alone leaves values in half precision; presets that mix codecs come last."""
    for name in codecs.available():
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
    """The type with all parts of encoding on, without one after the other, and without any."""
    try:
        whole = CacheType.read(text)
    except FlagError as error:
        raise FlagError(str(error).replace("--types", "--ablate", 1)) from None
    if not whole.key_conditioning:
        raise FlagError(f"--ablate {text}: give a type without :plain, whose parts are left out one after the other")
    parts = [part.name for part in fields(Encoding)]

    def without(label: str, *off: str) -> CacheType:
        encoding = Encoding(**{part: part not in off for part in parts})
        return CacheType(label, whole.key, whole.value, True, encoding)

    return [
        without(f"{text} encoded well"),
        *(without(f"{text} without {part.replace('_', ' ')}", part) for part in parts),
        without(f"{text} without any", *parts),
    ]
