"""What the accesses of kernels cost, counted on the emulator: wavefronts of shared memory, sectors of global memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from polarlm.bench.gpu.shapes import llama
from polarlm.bench.random_weights import RandomWeights
from polarlm.engine.backends.cuda.device.kernel_source import prelude
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda.emulated import EmulatedDevice, _program
from tests.cuda.test_docs import table
from tests.cuda.test_model_emulated import Talk, model_from
from tests.cuda_emulator import Program


def counted(body: str, arguments: str, *args: np.ndarray, threads: int = 32) -> dict[bool, tuple[int, int, int]]:
    """Whether in shared memory → requests, wavefronts or sectors, and the least of them, of a kernel's accesses."""
    text = f'{prelude()}\nextern "C" __global__ void tried({arguments}) {{ const int t = threadIdx.x;\n{body}}}\n'
    sums: dict[bool, np.ndarray] = defaultdict(lambda: np.zeros(3, int))
    for row in Program(text).traffic("tried", (1,), (threads,), *args):
        sums[row.is_shared] += (row.requests, row.used, row.least)
    return {shared: (int(total[0]), int(total[1]), int(total[2])) for shared, total in sums.items()}


@pytest.mark.parametrize(("index", "wavefronts"), [("t", 1), ("2 * t", 2), ("9 * t", 1), ("32 * t", 32), ("t / 8", 1)])
def test_words_of_one_bank_take_wavefronts_of_their_own(index: str, wavefronts: int) -> None:
    """The store of all lanes takes one."""
    body = f"""
    __shared__ float s[1024];
    for (int i = 0; i < 32; ++i) s[32 * i + t] = 2;
    __syncwarp();
    y[t] = s[{index}];
    """
    requests, used, _ = counted(body, "float *y", np.zeros(32, np.float32))[True]
    assert (requests, used - 32) == (33, wavefronts)


@pytest.mark.parametrize(("index", "sectors"), [("t", 4), ("t + 1", 5), ("8 * t", 32)])
def test_sectors_are_counted_once_for_a_warp(index: str, sectors: int) -> None:
    """The store of a float by each lane takes four, which is the least of a load as well."""
    y, x = np.zeros(32, np.float32), np.zeros(512, np.float32)
    assert counted(f"y[t] = x[{index}];", "float *y, const float *x", y, x)[False] == (2, sectors + 4, 8)


def test_a_copy_is_counted_where_it_begins() -> None:
    body = """
    __shared__ uint4 s[32];
    cp_async<16>(s + t, x + 16 * t);
    cp_async_commit();
    cp_async_wait<0>();
    y[t] = s[t].x;
    """
    given = counted(body, "unsigned *y, const unsigned char *x", np.zeros(32, np.uint32), np.zeros(512, np.uint8))
    assert given[True][:2] == (2, 4 + 4)
    assert given[False] == (2, 16 + 4, 16 + 4)


# -- kernels -------------------------------------------------------------------------------------------------------

CONFIG = llama(layers=1, hidden_size=256, ffn_size=512, heads=2, kv_heads=1, head_dim=128, vocab_size=512)
TYPES = ("ring4", "ring3.5")  # the default ones


class CountingDevice(EmulatedDevice):
    """totals: kernel → wavefronts and the least of them, sectors and the least of them, of all launches."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4, int))

    def run(self, text: str, kernel: str, grid: Sequence[int], block: Sequence[int], args: list, shared: int) -> None:
        total = self.totals[kernel.removesuffix("_kernel")]
        for row in _program(text, True).traffic(kernel, grid, block, *args, shared=shared):
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
    ("q4_k", "gemm_packed"): (1.40, 1.05),
    ("q4_k", "prefill_attention"): (1.30, 1.05),
    ("q4_k", "sample"): (1.00, 1.10),
    ("bf16", "gemv"): (1.00, 1.55),
    ("bf16", "gemm_small"): (1.05, 1.05),
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


def test_the_table_in_the_document_has_the_budgets() -> None:
    rows = table("Weights", "Kernel", "Wavefronts / least, at most", "Sectors / least, at most")
    assert rows == [
        (weights, f"`{kernel}`", f"{one:.2f}", f"{other:.2f}") for (weights, kernel), (one, other) in BUDGETS.items()
    ]
