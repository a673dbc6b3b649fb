"""The cache types that a quality measurement compares: named types, or one with parts of its encoding switched off."""

from __future__ import annotations

from dataclasses import fields

from polarlm.bench.command import CacheType, cache_types
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading.encoding import Encoding
from polarlm.model_loaders.config import ModelConfig

DEFAULT_TYPES = "f16,q8_0,quality,balanced,compact,q4_0:plain,turbo4:plain"


def chosen(types: str, ablate: str | None, config: ModelConfig) -> list[CacheType]:
    """The types of --types and of --ablate; with --ablate alone, its types. Default types that do not support the
    model's head dim are left out, with a note. Raises FlagError."""
    ablated = [] if ablate is None else _ablation(ablate)
    if ablated and types == DEFAULT_TYPES:
        types = ""
    supported = []
    for cache_type in [*(cache_types(types) if types else []), *ablated]:
        try:
            cache_type.check(config.attention.head_dim)
        except FlagError as error:
            if types != DEFAULT_TYPES:
                raise
            note(f"{cache_type.label} is left out. {str(error).partition(': ')[2]}")
        else:
            supported.append(cache_type)
    return supported


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
