"""The adapters (LoRA) of a model: which one a request asks for, and the matrices of all that change a product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polarlm.engine.backends.ops import Ops
from polarlm.engine.errors import EngineError
from polarlm.engine.state.store import RowAdapter
from polarlm.engine.weight_formats import Deltas, ExpertLinear, WeightFormat, get
from polarlm.model_loaders.adapters import Adapter
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families import tensors

_RANKS = 8  # ranks are filled up to a multiple of this, for a GPU's rows of weights


@dataclass(frozen=True)
class Loaded:
    """An adapter of an engine: `scale` multiplies what it adds."""

    adapter: Adapter
    scale: float


@dataclass(frozen=True)
class Adapters:
    """The adapters that requests choose among, by their names."""

    by_name: Mapping[str, Loaded] = field(default_factory=dict)

    @property
    def all(self) -> tuple[Loaded, ...]:
        return tuple(self.by_name.values())

    def asked(self, name: str, scale: float) -> tuple[RowAdapter | None, str]:
        """Return the adapter that a request names, times a factor, and what tells its K/V from others, as `joined`
        takes it; (None, "") for no name. Raises EngineError for an unknown one."""
        if not name or scale == 0:
            return None, ""
        if name not in self.by_name:
            there = ", ".join(self.by_name) or "none: give some with --lora NAME=PATH"
            raise EngineError(f"lora is {name!r}, but there is no adapter of this name; there are {there}")
        number, own = [*self.by_name].index(name), self.by_name[name]
        return RowAdapter(number, own.scale * scale), f"{own.adapter.digest} {own.scale * scale!r}"

    def knows(self, adapter: str) -> bool:
        """Whether an adapter in a salt is one of these."""
        return adapter.partition(" ")[0] in {one.adapter.digest for one in self.by_name.values()}


def deltas(ops: Ops, adapters: Sequence[Loaded], names: Sequence[str], rows: Sequence[int]) -> Deltas | None:
    """Load what adapters add to the product of a `Linear`; None if none changes it.

    names, rows: of the tensors that it consists of, one after another. The rank of each adapter is the sum of those of
    its changes of these tensors.
    """
    rank = _rank(adapters, names)
    if not rank:
        return None
    columns = next(len(own.a[0]) for one in adapters for name in names if (own := one.adapter.changes.get(name)))
    a = np.zeros((len(adapters), rank, columns), np.float32)
    b = np.zeros((len(adapters), sum(rows), rank), np.float32)
    for number, one in enumerate(adapters):
        first, begin = 0, 0
        for name, count in zip(names, rows, strict=True):
            if (own := one.adapter.changes.get(name)) is not None:
                a[number, begin : begin + own.rank] = own.a
                b[number, first : first + count, begin : begin + own.rank] = own.b
                begin += own.rank
            first += count
    format = _format(adapters)
    parts = (ops.load_experts([[_Values(one, format)] for one in each]) for each in (a, b))
    return Deltas(*(ExpertLinear(len(adapters), part) for part in parts))


def delta_bytes(ops: Ops, config: ModelConfig, adapters: Sequence[Loaded]) -> int:
    """Return the bytes of what adapters add to all layers, on the device."""
    if not adapters:
        return 0
    counts = (
        _rank(adapters, [spec.name for spec in specs]) * (specs[0].shape[1] + sum(spec.shape[0] for spec in specs))
        for slots in tensors(config).layers
        for specs in slots.values()
        if all(len(spec.shape) == 2 for spec in specs)
    )
    return len(adapters) * ops.matrix_bytes(_format(adapters), sum(counts))


def _rank(adapters: Sequence[Loaded], names: Sequence[str]) -> int:
    """The rank that matrices for these tensors have; 0 if no adapter changes them."""
    changes = [one.adapter.changes for one in adapters]
    most = max((sum(own[name].rank for name in names if name in own) for own in changes), default=0)
    return -(-most // _RANKS) * _RANKS


def _format(adapters: Sequence[Loaded]) -> WeightFormat:
    """The format of all changes: 16 bits if all files have the same ones."""
    kinds = {one.adapter.dtype for one in adapters}
    return get(kinds.pop().lower() if len(kinds) == 1 else "f32")


@dataclass(frozen=True)
class _Values:
    """A `StoredMatrix` in memory. values (out, in) float32: they are rounded to the format."""

    values: np.ndarray
    format: WeightFormat

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def dequantize(self, out: np.ndarray) -> None:
        for rows, raw in self.slabs(1 << 20):
            self.format.dequantize(raw, out[rows])

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        assert self.format.quantize is not None
        count, columns = self.values.shape
        step = max(1, nbytes // self.format.size(columns))
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            yield rows, self.format.quantize(np.ascontiguousarray(self.values[rows]))
