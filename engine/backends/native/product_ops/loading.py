"""Weights in memory: matrices are packed into tiles (`engine.backends.native.tiles`) as they are read, and experts that
do not all fit are read when they are chosen."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.native.kernels.linear.packing import PackArguments, pack
from polarlm.engine.backends.native.launch import KernelOps
from polarlm.engine.backends.ops import ExpertCache
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import Matrix, RereadMatrix, StoredMatrix, WeightFormat
from polarlm.model_loaders.errors import LoadError

ExpertMatrices = Sequence[RereadMatrix]  # an expert's matrices that are packed as one


class CachedTiles:
    """The tiles of the experts that are in memory.

    memory: uint8 (slots · tiles of an expert, bytes of a tile). slots: experts that fit. matrices: the matrices of
    every expert. pack(matrices, tiles): packs one expert's matrices.
    """

    def __init__(
        self,
        memory: np.ndarray,
        slots: int,
        matrices: Sequence[ExpertMatrices],
        pack: Callable[[ExpertMatrices, np.ndarray], None],
        cache: ExpertCache,
    ) -> None:
        self.memory, self.slots = memory, slots
        self._matrices, self._pack, self._cache = matrices, pack, cache
        self._slots_by_expert: OrderedDict[int, int] = OrderedDict()  # expert → its slot, the least recently used first
        self._free = list(range(slots))
        self._tiles = len(memory) // slots  # tiles of an expert

    def expect(self, experts: Sequence[int]) -> None:
        """Let the system read ahead the experts that are not in memory."""
        for expert in experts:
            if expert not in self._slots_by_expert:
                for matrix in self._matrices[expert]:
                    matrix.expect()

    def batches(self, experts: Sequence[int]) -> Iterator[list[int]]:
        """Indices into `experts`, at most `slots` at a time; experts in memory first: later batches may evict them."""
        order = sorted(range(len(experts)), key=lambda index: experts[index] not in self._slots_by_expert)
        for first in range(0, len(order), self.slots):
            yield order[first : first + self.slots]

    def take(self, experts: Sequence[int]) -> list[int]:
        """The slots of at most `slots` different experts, which are read if need be. The least recently used are
        evicted. Raises EngineError if the file cannot be read."""
        missing = sum(expert not in self._slots_by_expert for expert in experts)
        self._cache.hits += len(experts) - missing
        self._cache.misses += missing
        self._cache.bytes += missing * (self.memory.nbytes // self.slots)
        return self._load_experts(experts)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """The rows of `memory` that hold `rows` (n,) int64 of all experts; they are read if need be."""
        expert_rows, slot_rows = sum(matrix.shape[0] for matrix in self._matrices[0]), self._tiles * tiles.ROWS
        experts = np.unique(rows // expert_rows).tolist()
        slots = np.array(self._load_experts(experts))[np.searchsorted(experts, rows // expert_rows)]
        return np.asarray(slots * slot_rows + rows % expert_rows)

    def _load_experts(self, experts: Sequence[int]) -> list[int]:
        """As `take`, but counts nothing."""
        missing = [expert for expert in experts if expert not in self._slots_by_expert]
        for expert in experts:
            if expert in self._slots_by_expert:
                self._slots_by_expert.move_to_end(expert)
        for expert in missing:
            self._slots_by_expert[expert] = self._read(expert)
        return [self._slots_by_expert[expert] for expert in experts]

    def _read(self, expert: int) -> int:
        if not self._free:
            self._free.append(self._slots_by_expert.popitem(last=False)[1])
        slot = self._free[-1]
        try:
            self._pack(self._matrices[expert], self.memory[slot * self._tiles : (slot + 1) * self._tiles])
        except LoadError as error:
            raise EngineError(str(error), "model_unavailable") from error
        return self._free.pop()


AnyMatrix = TypeVar("AnyMatrix", bound=StoredMatrix)
_SLAB_BYTES = 8 << 20  # bytes of the file that a launch packs: enough for all threads, little compared with the weights


@dataclass(frozen=True, eq=False)
class MatrixTiles:
    """A matrix in tiles: uint8 (tiles, bytes of a tile)."""

    memory: np.ndarray


class LoadOps(KernelOps):
    """The ops that load matrices. Matrices that are packed as one are a group: consecutive, of the same format, all but
    the last with whole tiles."""

    def matrix_bytes(self, format: WeightFormat, count: int) -> int:
        if format.unpack is None:
            return count * format.nbytes
        return count // format.values * tiles.block_bytes(format) // tiles.ROWS

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        """Consecutive matrices of the same format become one."""
        return self.load_experts([matrices])

    def load_experts(self, matrices: Sequence[Sequence[StoredMatrix]]) -> tuple[Matrix, ...]:
        """As `load`; an expert's matrices begin with a tile."""
        return tuple(self._load(groups) for groups in _groups(matrices))

    def cache_experts(self, matrices: Sequence[Sequence[RereadMatrix]], cache: ExpertCache) -> tuple[Matrix, ...]:
        """As `load_experts`, but reads an expert when it is chosen; the data is `CachedTiles`."""
        parts = []
        for groups in _groups(matrices):
            format, rows, columns = _size(groups[0])
            expert_tiles, tile_bytes = -(-rows // tiles.ROWS), _tile_bytes(groups[0])
            memory = self._launch.arena.take(cache.experts * expert_tiles * tile_bytes).reshape(-1, tile_bytes)
            data = CachedTiles(memory, cache.experts, groups, self._pack_group, cache)
            parts.append(Matrix(format, data, (len(groups) * rows, columns)))
        return tuple(parts)

    def _load(self, groups: Sequence[Sequence[StoredMatrix]]) -> Matrix:
        """Groups of equal sizes, one after another."""
        format, rows, columns = _size(groups[0])
        group_tiles, tile_bytes = -(-rows // tiles.ROWS), _tile_bytes(groups[0])
        shape = len(groups) * group_tiles, tile_bytes
        if not self._launch.computes:
            self._launch.library.expect([pack(format)])
            memory = np.broadcast_to(np.uint8(0), shape)
        else:
            memory = self._launch.arena.take(math.prod(shape)).reshape(shape)
            for number, group in enumerate(groups):
                self._pack_group(group, memory[number * group_tiles :])
        return Matrix(format, MatrixTiles(memory), (len(groups) * rows, columns))

    def _pack_group(self, group: Sequence[StoredMatrix], target: np.ndarray) -> None:
        for first, raw in _slabs(group):
            self._pack(raw, group[0].format, target[first:])

    def _pack(self, raw: np.ndarray, format: WeightFormat, target: np.ndarray) -> None:
        """Pack raw (rows, bytes of a row) uint8, as in the file, into the first tiles of `target`."""
        whole = len(raw) // tiles.ROWS
        parts = [(raw, target, whole)]
        if rest := len(raw) % tiles.ROWS:
            last = np.zeros((tiles.ROWS, raw.shape[1]), np.uint8)
            last[:rest] = raw[whole * tiles.ROWS :]
            parts.append((last, target[whole:], 1))
        for rows, memory, count in parts:
            arguments = PackArguments(
                raw=rows,
                tiles=memory,
                row_bytes=raw.shape[1],
                blocks=raw.shape[1] // format.nbytes,
                tile_bytes=target.shape[1],
            )
            self._launch(pack(format), count, arguments)


def _groups(matrices: Sequence[Sequence[AnyMatrix]]) -> list[list[Sequence[AnyMatrix]]]:
    """For each group of an expert's matrices, that group of every expert.

    Raises EngineError if their formats differ.
    """
    expert_groups = [_join_groups(expert) for expert in matrices]
    for groups in expert_groups:
        if [_size(group) for group in groups] != [_size(group) for group in expert_groups[0]]:
            raise EngineError(
                "The experts of a layer are stored in different formats, which is not supported; use another copy of "
                "the model, or set weight_type (--weight-type q8_0) to convert them."
            )
    return [list(group) for group in zip(*expert_groups, strict=True)]


def _join_groups(matrices: Sequence[AnyMatrix]) -> list[list[AnyMatrix]]:
    groups: list[list[AnyMatrix]] = []
    for matrix in matrices:
        last = groups[-1][-1] if groups else None
        if last is None or last.format != matrix.format or last.shape[0] % tiles.ROWS:
            groups.append([])
        groups[-1].append(matrix)
    return groups


def _slabs(matrices: Sequence[StoredMatrix]) -> Iterator[tuple[int, np.ndarray]]:
    """The first tile and the rows, uint8 (rows, bytes of a row), of every slab of matrices that are packed as one."""
    format, _, columns = _size(matrices)
    row_size = format.size(columns)
    step = max(1, _SLAB_BYTES // row_size // tiles.ROWS) * tiles.ROWS
    first = 0
    for matrix in matrices:
        for slab, raw in matrix.slabs(step * row_size):
            yield (first + slab.start) // tiles.ROWS, raw
        first += matrix.shape[0]


def _tile_bytes(matrices: Sequence[StoredMatrix]) -> int:
    format, _, columns = _size(matrices)
    return tiles.tile_bytes(format, tiles.ROWS, columns)


def _size(matrices: Sequence[StoredMatrix]) -> tuple[WeightFormat, int, int]:
    return matrices[0].format, sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
