"""The cache types that a quality measurement compares: named types, or one with parts of its encoding switched off."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import numpy as np

from polarlm.bench.command import CacheType, cache_types
from polarlm.bench.quality.codecs import ggml, kivi4
from polarlm.engine import codecs
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.encoding import Encoding
from polarlm.model_loaders.config import ModelConfig

_HEAD_DIMS = 128, 64, 256, 80  # of models; a codec is tried with the first that it supports
_TO_COMPARE = ggml, kivi4
DEFAULT_TYPES = "f16,balanced,q4_0:plain,q8_0,quality,compact,turbo4:plain"  # the last are left out first


def choose_types(types: str, ablate: str | None, config: ModelConfig) -> list[CacheType]:
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


@contextmanager
def more_types(path: str | None) -> Iterator[tuple[str, ...]]:
    """Know the types of `quality/codecs`, and of a codec's file, for a while; yields the names of the file's, none
    without a file. Raises FlagError."""
    with codecs.more_types(_TO_COMPARE):
        modules = [] if path is None else [_module(path)]
        with codecs.more_types(modules):
            yield tuple(name for module in modules for name in module.NAMES)


def is_in_engine(cache_type: CacheType) -> bool:
    """Whether an engine can be loaded with this type; those of `quality/codecs` are here to be compared alone."""
    to_compare = {name for module in _TO_COMPARE for name in module.NAMES}
    return to_compare.isdisjoint(name.partition("+")[0] for name in cache_type.names())


def _module(path: str) -> ModuleType:
    """The codec of a file outside of the package. Raises FlagError."""
    name = f"polarlm_codec.{Path(path).stem} of a file"  # no file of kernels has such a name
    spec = importlib.util.spec_from_file_location(name, path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("its name does not end with .py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = {one: module.create(one, ()) for one in module.NAMES}
    except Exception as error:  # whatever a stranger's file raises
        raise FlagError(
            f"--codec {path} is no codec ({type(error).__name__}: {error}); docs/adding.md shows what a file has"
        ) from None
    for one, codec in made.items():
        why = ""
        if one in codecs.available() or not isinstance(codec, codecs.Codec):
            why = "there is such a cache type already" if one in codecs.available() else "create returns no Codec"
        if why or (why := _fault(codec)):
            raise FlagError(f"--codec {path}: {one!r}: {why}")
    return module


def _fault(codec: codecs.Codec) -> str:
    """What goes wrong when two random blocks are encoded and decoded; "" if nothing does."""
    n = EngineConfig.block_size
    for dim in _HEAD_DIMS:
        with suppress(ValueError):
            codec.check(dim, n)
            break
    x, step = np.random.default_rng(0).standard_normal((2, n, dim), np.float32), "encoding"
    try:
        fields, step = codec.encode(x), "sizes"
        if (sizes := codec.sizes(fields)) != (n, dim):
            return f"sizes says {sizes} of blocks with {n} vectors of {dim} values: packed codes are flat"
        step = "decoding"
        codec.decode(fields)
    except Exception as error:  # whatever a stranger's codec raises
        return f"{step} of blocks with {n} vectors of {dim} values fails ({type(error).__name__}: {error})"
    return ""


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
