"""Experts that are not all in memory: an expert is read from the file when it is chosen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.ops import ExpertCache
from polarlm.engine.errors import EngineError
from polarlm.engine.weight_formats import RereadMatrix
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
