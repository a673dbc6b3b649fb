"""KV codecs: how the K or V vectors of one block become bytes, and back. One codec per file.

A module of this folder whose name does not begin with an underscore is a codec. It has two names: `NAMES`, what the
command line calls it, and `create(name, options)`, which makes it. There is no list to edit.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from engine.codecs._arrays import NotFinite as NotFinite


class Field(NamedTuple):
    """One array of an encoded block: N tokens of one KV head."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


FULL = "f16"
"""The codec that does not quantize: full precision, as a cache type, is half precision."""

KEYS_AND_VALUES = frozenset({"k", "v"})


class Table(Protocol):
    """A table of values, pairs or paths as an encoder sees it that chooses codes by its own measure.

    `decode` of assembled codes gives norm · point.
    """

    @property
    def width(self) -> int:
        """Values of one code: 2 (pairs of channels 2j, 2j+1) or 1."""

    def assemble(self, codes: np.ndarray, norms: np.ndarray) -> dict[str, np.ndarray]:
        """codes (..., N, D / width), norms (..., N) float32 → the codec's fields."""


class Rounding(Table, Protocol):
    """A table in which each value or pair is rounded by itself."""

    def nearest(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, width) float32, unit variance → codes (R,) uint8 or uint16, their points (R, width) float32."""


@runtime_checkable
class PathRounding(Table, Protocol):
    """A table in which a code's point depends on the codes before it, so that vectors are rounded as a whole."""

    def best_path(
        self,
        unit: np.ndarray,
        feedback: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        survivors: int = 1,
    ) -> tuple[np.ndarray, np.ndarray]:
        """unit (K, R, D) float32, unit variance → codes (K, R, P) uint8, their points (K, R, D) float32; P = D / width.

        For each of K heads: feedback (K, D, D), strictly lower in blocks of width: j aims at x_j + F_j·e_{<j} with the
        errors e before it on the same path. weights (K, P): what the squared distance of each from its aim counts.
        survivors: paths that stay in the race for each state of the table, a power of two: more cost time and find
        better paths where feedback is strong.
        """


class Codec(Protocol):
    """What every codec can do. N tokens in a block, D values in a vector; `...` are any leading dimensions."""

    def __hash__(self) -> int:
        """Codecs are values: two of the same name are equal, unless they learn (`per_layer`)."""

    @property
    def name(self) -> str:
        """The name on the command line that gives this codec, options included."""

    @property
    def serves(self) -> frozenset[str]:
        """What it can store: keys ("k"), values ("v"), or both."""

    @property
    def per_layer(self) -> bool:
        """Whether it learns from the first blocks it encodes: each layer's keys, and its values, need their own then.

        `get` makes a new codec each time.
        """

    @property
    def rounding(self) -> Rounding | PathRounding | None:
        """How it rounds, if it is a table of values or of pairs."""

    def check(self, head_dim: int, block_size: int) -> None:
        """Raises ValueError, with a sentence for the user, if the codec cannot serve this head dim and block size."""

    def rotation(self, head_dim: int) -> np.ndarray | None:
        """Orthogonal W, (D, D) float32, read-only: a vector x is encoded as x @ W. None: as it is."""

    def fields(self, block_size: int, head_dim: int) -> dict[str, Field]:
        """The arrays of one encoded block, in the order in which they are stored."""

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """x: (..., N, D) float32, already rotated → every field, (..., *shape). ValueError on NaN or infinity."""

    def decode(self, codes: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Fields of `encode` → (..., N, D) float32, C-contiguous and rotated; in `out` where one is given."""


@cache
def _modules() -> dict[str, ModuleType]:
    """Codec name → the module that creates it, in the order of file names."""
    stems = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{stem}") for stem in stems]
    return {name: module for module in modules for name in module.NAMES}


def available() -> tuple[str, ...]:
    """Names that `get` knows, without their options."""
    return tuple(_modules())


def is_quantized(codec: Codec) -> bool:
    """Whether it stores anything else than full precision."""
    return codec.name != FULL


def get(name: str) -> Codec:
    """The codec called `name`, such as "polarquant" or, with an option, "polarquant+dense".

    Raises ValueError, with a sentence for the user, on a name or an option that there is not.
    """
    base, *options = name.split("+")
    module = _modules().get(base)
    if module is None:
        raise ValueError(f"There is no cache type {base!r}: choose one of {', '.join(available())}.")
    return module.create(base, tuple(options))


def file_of(codec: Codec) -> str:
    """The name of the codec's file, without `.py`: its twins elsewhere are called like it."""
    return _modules()[codec.name.split("+")[0]].__name__.rsplit(".", 1)[1]


def bits_per_value(codec: Codec, block_size: int, head_dim: int) -> float:
    """Bytes of one encoded block, in bits, over its values."""
    stored = sum(field.nbytes for field in codec.fields(block_size, head_dim).values())
    return 8 * stored / (block_size * head_dim)
