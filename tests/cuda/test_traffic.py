"""What the accesses of kernels cost, counted on the emulator: wavefronts of shared memory, sectors of global memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from polarlm.bench.random_weights import RandomWeights
from polarlm.bench.shapes import llama
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda.emulated import EmulatedDevice, program_of
from tests.cuda.test_model_emulated import Talk, model_from

CONFIG = llama(layers=1, hidden_size=256, ffn_size=512, heads=2, kv_heads=1, head_dim=128, vocab_size=512)
TYPES = ("ring4", "ring3.5")  # the default ones


class CountingDevice(EmulatedDevice):
    """totals: kernel → wavefronts and the least of them, sectors and the least of them, of all launches."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4, int))

    def run(self, text: str, kernel: str, grid: Sequence[int], block: Sequence[int], args: list, shared: int) -> None:
        total = self.totals[kernel.removesuffix("_kernel")]
        for row in program_of(text, True).traffic(kernel, grid, block, *args, shared=shared):
            total[:2] += np.array([row.used, row.least]) * row.is_shared
            total[2:] += np.array([row.used, row.least]) * (not row.is_shared)


@cache
def totals(weights: str) -> dict[str, np.ndarray]:
    """The totals of a prompt and of steps of one, two and five sequences over a block's end."""
    device = CountingDevice()
    dialogue = Talk(model_from(CudaOps(device), CONFIG, RandomWeights(CONFIG, lambda _: weights), TYPES), 5)
    for index, count in enumerate([62, 5, 5, 5, 5]):
        dialogue.prompt(list(range(5, 5 + count)), outputs=1, index=index)
    for rows in (1, 2, 5):
        dialogue.step([7] * rows)
    return dict(device.totals)


# Most wavefronts, and sectors, over the least of them, of kernels that a step or a prompt spends its time in.
BUDGETS = {
    ("q4_k", "decode_attention"): (1.00, 1.20),
    ("q4_k", "gemv_packed"): (1.10, 1.55),
    ("q4_k", "gemm_wide"): (1.20, 1.05),
    ("q4_k", "prefill_attention"): (1.30, 1.05),
    ("q4_k", "sample"): (1.00, 1.10),
    ("bf16", "gemv"): (1.00, 1.55),
}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["q4_k", "bf16"])
def test_accesses_stay_within_their_budgets(weights: str) -> None:
    for (kind, kernel), (wavefronts, sectors) in BUDGETS.items():
        if kind == weights:
            used, least, used_sectors, least_sectors = totals(weights)[kernel].tolist()
            print(weights, kernel, used, least, used_sectors, least_sectors)
            assert used <= wavefronts * least
            assert used_sectors <= sectors * least_sectors
