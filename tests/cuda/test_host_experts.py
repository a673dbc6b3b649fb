"""Experts in the computer's memory: the GPU's steps are recorded in parts, between which the CPU's kernels compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm import model_loaders
from polarlm.engine import EngineConfig, EngineError, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.ops import Load, Ops
from polarlm.engine.loading.fit import DeviceFit, advise, fit_weights
from polarlm.engine.loading.placement.experts import CpuExperts
from polarlm.engine.loading.placement.request import PlacementRequest, Sizes
from polarlm.engine.model import weights as model_weights
from tests.cuda import test_model_emulated
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.test_model_emulated import Rounded, SameWeights, close, model_of, talk
from tests.test_expert_cache import load, sizes_of
from tests.tiny import VOCABULARY, make_model

F16 = "f16", "f16"
SOME = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPT = np.random.default_rng(0).integers(5, VOCABULARY, 20).tolist()


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch):
    """A function that sets how many layers have their experts on the host, in models that are loaded afterwards."""

    def layers(count: int) -> None:
        def load(ops: Ops, *args: Any, **options: Any) -> Any:
            options["on_host"] = count if ops.host is not None else 0
            return model_weights.load_weights(ops, *args, **options)

        monkeypatch.setattr(test_model_emulated, "load_weights", load)

    return layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt_oss_transposed", "qwen3_moe_normed", "gemma4_experts_beside", "qwen2_moe_shared"]
)
def test_logits_equal_those_of_numpy(name: str, on_host) -> None:
    """In prompts, steps and batches; with the experts of one layer on the host, and of all."""
    plain = CudaOps(EmulatedDevice(checked=False))
    exact, rounded = (talk(model_of(ops, name, F16)) for ops in (SameWeights(plain), Rounded(plain)))
    for layers in (1, 2):
        on_host(layers)
        device = EmulatedDevice(checked=False)
        close(talk(model_of(CudaOps(device, NativeOps(1)), name, F16)), exact, rounded)
        assert "host" in device.launches
        assert ("route_kernel" in device.launches) == ("add_experts_kernel" in device.launches or layers == 2)


class Small(EmulatedDevice):
    """A device with this much free memory."""

    def __init__(self, free: int) -> None:
        super().__init__(checked=False)
        self.free = free

    def memory(self) -> tuple[int, int]:
        return self.free, 2 << 30


def test_an_engine_says_where_its_experts_are(tmp_path: Path) -> None:
    path, answers = make_model(tmp_path, "qwen3_moe_normed"), []
    for asked in (None, "1", "99"):
        with load(path, CudaOps(EmulatedDevice(checked=False), NativeOps(1)), cpu_moe=asked) as engine:
            answers.append(engine.generate(PROMPT, SOME).token_ids)
            weights, line = engine._model.weights, engine.fit_line()
            assert [layer.ffn.down.on_host for layer in weights.layers] == [n < int(asked or 0) for n in range(2)]
            assert (f"experts of the first {min(2, int(asked or 0))} layers in the computer's memory" in line) == bool(
                asked
            )
            assert (engine.status().threads is not None) is True
    assert answers[1:] == answers[:1] * 2


def test_auto_leaves_no_more_on_the_host_than_it_has_to(tmp_path: Path) -> None:
    """As much free memory as a store of this context takes beside all weights but some layers' experts."""
    path = make_model(tmp_path, "qwen3_moe_normed")
    whole = sizes_of(path, CudaOps(EmulatedDevice(), NativeOps(1)))
    context = {"ctx_size": 64, "parallel": 1, "kept_sequences": 0}
    with load(path, CudaOps(Small(1 << 30), NativeOps(1)), cpu_moe="auto", **context) as engine:
        assert not any(layer.ffn.down.on_host for layer in engine._model.weights.layers)
        plan, ops = engine._store.plan, engine._model.ops
        needed = plan.bytes + ops.work_bytes(Load(engine.model.config, plan.shape.widest, 64, 1))
    for layers in (1, 2):
        free = -(-(needed + whole.weights - sum(whole.expert_bytes[:layers])) * 10 // 9) + 100  # a tenth is not counted
        with load(path, CudaOps(Small(free), NativeOps(1)), cpu_moe="auto", **context) as engine:
            held = [layer.ffn.down.on_host for layer in engine._model.weights.layers]
            assert held == [number < layers for number in range(2)]
            assert engine.context == 64
            assert engine._model.weights.bytes == whole.weights - sum(whole.expert_bytes[:layers])


def test_fit_says_what_stays_in_the_computer_s_memory(tmp_path: Path) -> None:
    path, whole = make_model(tmp_path, "qwen3_moe_normed"), Sizes(1 << 30, (400 << 20,) * 2, (500 << 20,) * 2)
    model, source, _ = model_loaders.load_weights(path)
    source.close()
    free, config = 700 << 20, EngineConfig()
    ops = CudaOps(Small(free), NativeOps(1))
    fit = fit_weights(PlacementRequest(config, model, whole), ops)
    assert fit.lacking == 0
    assert fit.cpu_experts == CpuExperts(1, 500 << 20, 400 << 20, 250 << 20)
    advice = advise([DeviceFit("cuda", "a GPU", free, (fit,))], config, model)
    assert advice.settings == {"cpu_moe": "1"}
    assert "a token reads 250.0 MiB: 5.2 ms at 50 GB/s" in advice.sentence
    alone = fit_weights(PlacementRequest(config, model, whole), CudaOps(Small(free)))
    assert (alone.cpu_experts, alone.lacking) == (None, (1 << 30) - free)


def test_what_has_no_effect_is_said(tmp_path: Path, tiny_path: Path) -> None:
    said: list[str] = []
    load(make_model(tmp_path, "qwen3_moe_normed"), NativeOps(1), said, cpu_moe="1").close()
    load(tiny_path, CudaOps(EmulatedDevice(), NativeOps(1)), said, cpu_moe="1").close()
    assert "cpu_moe has no effect on a CPU: all experts are in its memory." in said
    assert "cpu_moe has no effect on this model: it has no experts." in said


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_moe_normed")
    with pytest.raises(EngineError, match="cpu_moe needs the compiled kernels of the CPU"):
        load(path, CudaOps(EmulatedDevice()), cpu_moe="1")
    for wrong in ("some", "-1", ""):
        with pytest.raises(EngineError, match=f"cpu_moe={wrong}: give a number of layers, or auto"):
            load(path, CudaOps(EmulatedDevice(), NativeOps(1)), cpu_moe=wrong)
