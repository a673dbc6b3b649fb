"""What a conversation launches is known, and expected of the device, before its first request."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.cuda.launch_configs import ROWS_WITH_KERNELS, SMALL_ROWS
from polarlm.engine.backends.cuda.ops import CudaOps, FirstRow
from polarlm.engine.backends.ops import Fusion
from polarlm.engine.loading import assembly
from polarlm.engine.model.weights import FileMatrix
from polarlm.engine.requests import prefills
from polarlm.engine.weight_formats import Linear, WeightFormat, get
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.cuda.emulated import DeviceArray, EmulatedDevice
from tests.tiny import VOCABULARY, by_count, load_tiny, make_model

PROMPT = np.random.default_rng(0).integers(5, VOCABULARY, 150).tolist()
SETTINGS: dict[str, Any] = {"device": "cuda", "block_size": 16, "ctx_size": 512, "calibration": False}
SOME = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


class Watched(EmulatedDevice):
    """Notes the texts that are expected, those that are waited for, and those that are launched.

    Once `computes` is False it runs nothing, and results are zeros: what is launched does not depend on values.
    """

    def __init__(self) -> None:
        super().__init__(checked=False)
        self.expected: list[str] = []
        self.awaited: list[str] = []
        self.launched: dict[str, None] = {}
        self.kernels: dict[str, str] = {}
        self.computes = True

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return super().empty(shape, dtype) if self.computes else self._new(np.zeros(shape, dtype))

    def expect(self, text: str) -> None:
        self.expected.append(text)

    def wait_for(self, text: str) -> None:
        self.awaited.append(text)

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        self.launched[text] = None
        self.kernels[text] = kernel
        if self.computes:
            super().launch(kernel, text, grid, block, args, shared)

    def gemm(self, *arrays: Any, add: bool) -> None:
        if self.computes:
            super().gemm(*arrays, add=add)

    def unexpected(self) -> set[str]:
        """Names of the kernels that were launched so far from texts that were not expected; then they are forgotten."""
        names = {self.kernels[text] for text in self.launched if text not in self.expected}
        self.launched.clear()
        return names


def converse(engine: Engine, length: int) -> None:
    """A prompt of `length` tokens, an answer that completes blocks, and a second turn that reads them."""
    answer = engine.generate(PROMPT[:length], SOME)
    assert len(answer.token_ids) == SOME.max_tokens
    engine.generate([*PROMPT[:length], *answer.token_ids, *PROMPT[:length]], SOME)


@pytest.mark.usefixtures("warmed_up_at_once")
@pytest.mark.parametrize(
    "settings",
    [
        {"cache_type": "f16"},
        {"cache_type": "ring4/ring3.5", "calibration": True},
        {"cache_type": "turbo4", "weight_type": "q8_0", "parallel": 3, "block_size": 64},
    ],
    ids=str,
)
def test_a_conversation_launches_nothing_unexpected(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Nor does loading the model, but for its calibration, once. Prompts of all lengths for which there are kernels."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))  # other tests may have calibrated this model
    device = Watched()
    with load_tiny(tiny_path, ops=CudaOps(device), **{**SETTINGS, **settings}) as engine:
        once = {"transform_heads_kernel"} if settings.get("calibration") else set()
        assert device.unexpected() == once
        device.computes = False
        for length in (1, 3, 7, 12, 20, 40, 60, 100, 150):
            converse(engine, length)
        assert not device.unexpected() - {"copy_full_kernel"}  # it takes over a part of a block
        monkeypatch.setattr(prefills, "GAP", math.inf)
        for prompt in (PROMPT[:60], PROMPT[:60], PROMPT[50:110], PROMPT[60:150]):  # the last ones in a batch
            engine.submit(prompt, SOME, into=[])
            engine.work()
        while engine.work():
            pass
        assert not device.unexpected()


@pytest.mark.usefixtures("warmed_up_at_once")
@pytest.mark.parametrize(
    ("fixture", "kernels"),
    [
        ("qwen3_5_tied", "delta_step delta_scan"),
        ("kimi_linear_nope", "channel_delta"),
        ("granite_hybrid_tied", "delta_step delta_scan"),
        ("nemotron_h_experts", "delta_step delta_scan"),
    ],
)
def test_a_conversation_of_a_hybrid_launches_nothing_unexpected(tmp_path: Path, fixture: str, kernels: str) -> None:
    """Kernels of its states: rows of prompts and of steps, ends of blocks, and what is kept and restored."""
    device = Watched()
    with load_tiny(make_model(tmp_path, fixture), ops=CudaOps(device), **SETTINGS, cache_type="f16") as engine:
        assert not device.unexpected()
        device.computes = False
        for length in (1, 7, 20, 100, 150):
            converse(engine, length)
        engine.generate([*PROMPT[:144], 5], SOME)
        seen = {kernel for text, kernel in device.kernels.items() if text in device.launched}
        assert seen > {f"{kernel}_kernel" for kernel in (*kernels.split(), "advance_delta", "state_matrices")}
        assert not device.unexpected() - {"copy_full_kernel"}


@pytest.mark.usefixtures("warmed_up_at_once")
def test_the_first_prompt_and_steps_are_waited_for_and_further_turns_and_batches_are_expected(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Watched()
    with load_tiny(tiny_path, ops=CudaOps(device), **{**SETTINGS, "cache_type": "ring4", "parallel": 6}) as engine:
        device.computes = False
        device.launched.clear()
        engine.generate(PROMPT[:40], SOME)
        assert set(device.launched) <= set(device.awaited)
        for length in (40, 100):
            converse(engine, length)
        few = set(device.launched)

        streams = [engine.stream(PROMPT[number : number + 40], SOME) for number in range(6)]
        for stream in streams:
            next(stream)
        by_count(engine, monkeypatch)
        for _ in zip(*streams, strict=True):
            pass
        assert set(device.launched) - few - set(device.awaited)
        assert not device.unexpected() - {"copy_full_kernel"}


def test_there_are_no_kernels_for_numbers_of_rows_between(tiny_path: Path) -> None:
    """Steps of every number of rows launch texts of the next greater one that is warmed up."""
    device = Watched()
    device.computes = False
    for out, width, format in ((512, 256, "f16"), (4096, 512, "bf16"), (512, 256, "q4_k"), (16384, 512, "q6_k")):
        texts = {rows: product_texts(device, rows, out, width, format) for rows in range(1, SMALL_ROWS + 1)}
        for fewer, rows in itertools.pairwise((0, 1, *ROWS_WITH_KERNELS)):
            for between in range(fewer + 1, rows):
                assert texts[between] <= texts[rows], (format, between, rows)
    assert rows == SMALL_ROWS


@dataclass(frozen=True)
class Zeros:
    """The format and shape of a stored matrix."""

    format: WeightFormat
    shape: tuple[int, int]


def product_texts(device: Watched, rows: int, out: int, width: int, format: str) -> set[str]:
    """The texts of products in a step: plain, with a norm, added to a residual, and gated."""
    device.launched.clear()
    ops, x, norm = CudaOps(device), np.zeros((rows, width), np.float32), (np.ones(width, np.float32), 1e-5)
    (matrix,) = ops.load([FirstRow(Zeros(get(format), (out, width)))])
    w = Linear((matrix,))
    ops.linear(x, w, Fusion(norm))
    ops.linear(x, w, residual=np.zeros((rows, out), np.float32))
    ops.linear(x, w, Fusion(norm, "silu"))
    return {text for text in device.launched if "repack" not in device.kernels[text]}


def test_what_weights_need_is_expected_before_they_are_read(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, before = Watched(), []
    slabs = FileMatrix.slabs

    def watched(matrix: FileMatrix, nbytes: int) -> Any:
        before.append(len(device.expected))
        return slabs(matrix, nbytes)

    monkeypatch.setattr(FileMatrix, "slabs", watched)
    with load_tiny(tiny_path, ops=CudaOps(device), **SETTINGS, weight_type="q8_0"):
        assert before[0] > 15
        assert "repack" in device.expected[0]


def test_a_bar_shows_the_kernels_that_are_waited_for(
    tiny_path: Path, bars: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Watched()
    monkeypatch.setattr(assembly, "select", lambda *args: (CudaOps(device), ""))
    with Engine.load(tiny_path, verbose=print, **SETTINGS):
        pass
    compiling = bars[-1]
    assert compiling.desc.startswith("Compiling kernels for this GPU (once)")
    assert compiling.n == compiling.total == len(device.awaited) > 10
    assert compiling.settings["delay"] < 1
