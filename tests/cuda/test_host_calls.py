"""The function calls that a prompt and a step make in Python: a host's time, in a number that no machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polarlm import engine
from polarlm.bench.random_weights import RandomWeights
from polarlm.engine import SamplingParams
from polarlm.engine.backends.cuda.device.tracing import TracingDevice
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.sampling.sample import greedy
from polarlm.engine.state.store import SequenceKV
from tests.bare import forward, forward_together
from tests.cuda import test_model_emulated
from tests.cuda.test_cupy_device import imported
from tests.cuda.test_model_emulated import model_from
from tests.cuda.test_packed_model import mixed_model
from tests.tiny import by_count, load_tiny

LAYERS, TOKENS = 16, 64
ENGINE = str(Path(engine.__file__).parent)
# Calls before Python 3.12 alone; attributes of CuPy's arrays and pinned memory, which the stand-in computes.
UNCOUNTED = {"<listcomp>", "<setcomp>", "<dictcomp>", "data", "ptr"}


def calls_of(work: Callable[[], object]) -> int:
    """The functions of the engine that `work` calls, and those that they call, in Python or in C."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        code, caller = frame.f_code, frame.f_back
        if event == "c_call":
            count += code.co_filename.startswith(ENGINE)
        elif event == "call" and code.co_name not in UNCOUNTED and "weakref" not in code.co_filename:
            files = code.co_filename, "" if caller is None else caller.f_code.co_filename
            count += any(file.startswith(ENGINE) for file in files)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_calls_of_a_prompt_and_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each launch, of a model in the formats of Q4_K_M on a GPU that does nothing; for a step that is run again, in
    all. Before arguments were packed and configurations kept, they were 82, 134 and 278."""
    monkeypatch.setattr(test_model_emulated, "N", TOKENS)
    config = mixed_model()[0]
    config = replace(config, layers=config.layers[:1] * LAYERS)
    sampled, launched = greedy(config.vocab_size), list[object]()
    with imported(monkeypatch) as (_, module):
        driver = SimpleNamespace(cuLaunchKernelEx=lambda *handles: launched.append(handles) or 0)
        monkeypatch.setattr(module, "load_driver", lambda: driver)
        ops, weights = CudaOps(module.CupyDevice()), RandomWeights.for_kind(config, "q4_k")
        model = model_from(ops, config, weights, ("ring4", "ring3.5"), room=(512, 2))
        sequences = [model.store.new_sequence() for _ in range(2)]

        def prompt(sequence: SequenceKV) -> None:
            span = model.store.open(sequence, TOKENS)
            hidden = forward(model, [span], range(5, 5 + TOKENS), 1)
            model.store.commit(span)
            model.choose(hidden, [sampled]).wait()

        def step() -> None:
            spans = [model.store.open_step(sequence, 1) for sequence in sequences]
            model.step(StepBatch(spans, [5, 6], [sampled] * 2)).wait()
            model.store.commit_steps(spans)

        def together() -> None:
            spans = model.store.open_batch([(sequences[0], TOKENS)])
            hidden = forward_together(model, spans, [range(5, 5 + TOKENS)])
            model.store.commit_steps(spans)
            model.choose(hidden, [sampled]).wait()

        for _ in range(3):  # launched, recorded, and run again
            model.store.release(sequences[0])
            launched.clear()
            calls = calls_of(together)
        assert calls <= 96 * LAYERS  # of a prompt that is not recorded, 246
        assert len(launched) <= 3 * LAYERS
        launched.clear()
        assert calls_of(lambda: prompt(sequences[1])) <= 22 * len(launched)
        assert len(launched) > 11 * LAYERS
        step()
        launched.clear()
        assert calls_of(step) <= 28 * len(launched)  # it is recorded
        assert len(launched) > 6 * LAYERS
        launched.clear()
        assert calls_of(step) <= 300
        assert not launched


class Recorded(TracingDevice):
    """A GPU whose kernels do nothing, and which draws one token again and again. What runs as a graph has a result from
    its first run."""

    def __init__(self) -> None:
        super().__init__(lambda launch: None, 4, 228 << 10)
        self._results: dict[Hashable, Any] = {}

    def to_host(self, x: Any) -> np.ndarray:
        return np.full(x.shape, 5, x.dtype)

    def run_graph(self, key: Hashable, work: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        shapes = key, *(x.shape for x in inputs)
        if shapes not in self._results:
            self._results[shapes] = super().run_graph(key, work, inputs)
        return self._results[shapes]


def test_calls_of_a_row_of_a_step(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 requests, from one step to the next, and the time in which each of them fills a block. When every row was
    packed anew, a row was 127 calls."""
    rows, steps, settings = 64, 64, {"ctx_size": 256, "cache_type": "balanced", "kv_memory": "8M", "calibration": False}
    with load_tiny(tiny_path, ops=CudaOps(Recorded()), parallel=rows, block_size=steps, **settings) as served:
        by_count(served, monkeypatch)
        for number in range(rows):
            params = SamplingParams(max_tokens=200, temperature=0.8, seed=number, ignore_eos=True)
            served.submit([*range(5, 8 + number % 9)], params, into=[])
        while served.status().running < rows:
            served.work()
        calls = calls_of(lambda: [served.work() for _ in range(steps)])
        assert served.status().running == rows
    assert calls <= 43 * rows * steps
