"""Adapters (LoRA) of experts, as peft writes them: requests compute what transformers computes with peft."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.model_loaders import LoadError
from polarlm.model_loaders.adapters import read_adapter
from tests.adapters import write_gguf, write_peft
from tests.bare import log_softmax, spread
from tests.conftest import FIXTURES
from tests.cuda.emulated import open_device
from tests.model_loaders import checkpoints
from tests.model_loaders.checkpoints import config_of
from tests.tiny import load_tiny, make_model

ADAPTERS = FIXTURES.parent / "adapters"
MODELS = ("qwen3_moe_normed", "gpt_oss_transposed")  # gate before up; and rows of both in turn
SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 16, "cache_type": "f16", "calibration": False}
RANK = 3


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / request.param).mkdir()
    return make_model(tmp_path / request.param, request.param)


def adapter_of(model: Path) -> Path:
    return ADAPTERS / model.name


def apart(model: Path, folder: Path) -> Path:
    """The same adapter with a matrix of each expert, as earlier versions of transformers; returns its folder."""
    changes = {}
    for label, a in load_file(adapter_of(model) / "adapter_model.safetensors").items():
        module, is_a, _ = label.removeprefix("base_model.model.").partition(".lora_A")
        if not is_a:
            continue
        b = load_file(adapter_of(model) / "adapter_model.safetensors")[label.replace("lora_A", "lora_B")]
        if "experts" not in module:
            changes[f"{module}.weight"] = a, b
            continue
        experts = module.removesuffix(".base_layer")
        parts = ("gate_proj", "up_proj") if module != experts else ("down_proj",)
        for expert, rows in enumerate(np.split(a, len(a) // RANK)):
            columns = b.reshape(len(b), RANK, -1)[:, :, expert]
            for number, part in enumerate(parts):
                half = len(b) // len(parts)
                taken = slice(number * half, (number + 1) * half)
                if model.name.startswith("gpt_oss"):
                    taken = slice(number, None, len(parts))
                changes[f"{experts}.{expert}.{part}.weight"] = rows, np.ascontiguousarray(columns[taken])
    return write_peft(folder, changes, 9)


def prompt_logprobs(engine: Engine, ids: Sequence[int], name: str = "one") -> np.ndarray:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    return np.array([one.logprob for one in engine.generate(ids, params, PromptOptions(lora=name)).prompt_logprobs])


@pytest.mark.parametrize("form", ["joined", "apart"])
@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_logits_are_those_of_transformers_with_peft(model: Path, tmp_path: Path, backend: str, form: str) -> None:
    if backend == "native":
        pytest.importorskip("llvmlite")
    reference = np.load(adapter_of(model) / "reference.npz")
    ids, logits = reference["ids"], reference["logits"]
    wanted = np.take_along_axis(log_softmax(logits[:-1]), ids[1:, None], 1)[:, 0]
    path = adapter_of(model) if form == "joined" else apart(model, tmp_path / "apart")
    with load_tiny(model, ops=NumpyOps() if backend == "numpy" else None, **SETTINGS) as engine:
        assert engine.status().backend == backend
        engine.load_adapter("one", path)
        found, without = (prompt_logprobs(engine, ids.tolist(), name) for name in ("one", ""))
    allowed = 1e-3 if backend == "numpy" else 4e-3
    assert np.abs(found - wanted).max() <= allowed * spread(logits)
    assert np.abs(found - without).max() > 1


def test_rows_of_a_step_have_experts_of_their_own(model: Path, tmp_path: Path) -> None:
    """In recorded steps, too, and where experts are read when they are chosen: as each request alone in NumPy."""
    pytest.importorskip("llvmlite")
    lora = {"one": str(adapter_of(model)), "half": f"{adapter_of(model)}:0.5"}
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    names = ("one", "", "half", "one", "")
    prompts = [[5 + (7 + number) * i % 90 for i in range(11 + 3 * number)] for number in range(len(names))]
    with load_tiny(model, ops=NumpyOps(), lora=lora, **SETTINGS) as engine:
        wanted = [
            engine.generate(prompt, params, PromptOptions(lora=name)).token_ids
            for prompt, name in zip(prompts, names, strict=True)
        ]
    for more in ({}, {"expert_cache": "100K"}):
        with load_tiny(model, lora=lora, parallel=8, weight_type="f32", **more, **SETTINGS) as engine:
            outboxes: list[deque[Any]] = [deque() for _ in names]
            for prompt, name, outbox in zip(prompts, names, outboxes, strict=True):
                engine.submit(prompt, params, PromptOptions(lora=name), into=outbox)
            while engine.work():
                pass
            found = [tuple(token for chunk in outbox for token in chunk.token_ids) for outbox in outboxes]
        assert found == wanted


def test_what_is_not_computed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    base = make_model(tmp_path / "base", MODELS[0])
    adapter = ADAPTERS / MODELS[0]
    with pytest.raises(
        EngineError, match="of experts, which is computed on a CPU alone: run the model with device=cpu"
    ):
        load_tiny(base, ops=CudaOps(open_device()), lora={"one": str(adapter)}, **{**SETTINGS, "block_size": 64})
    config = config_of(base)
    a, b = np.zeros((24, 32), np.float32), np.zeros((32, 24), np.float32)
    folder = write_peft(tmp_path / "other", {"model.layers.0.mlp.experts": (a, b)}, 4)
    with pytest.raises(LoadError, match=r"changes model.layers.0.mlp.experts, .* does not have"):
        read_adapter(folder, config, is_gguf=False)
    changes = {"model.layers.0.mlp.experts.0.up_proj.weight": (np.zeros((4, 32)), np.zeros((24, 4)))}
    monkeypatch.setattr(checkpoints, "gguf_name", lambda name: "blk.0.ffn_up_exps.weight")
    file = write_gguf(tmp_path / "adapter.gguf", changes, 4, {}, "qwen3moe")
    with pytest.raises(LoadError, match="of experts: give their adapter as a folder of peft"):
        read_adapter(file, config, is_gguf=True)


def test_the_memory_of_adapters_of_experts_is_counted(model: Path) -> None:
    with load_tiny(model, **SETTINGS) as engine:
        before = engine._model.weights.bytes
        engine.load_adapter("one", adapter_of(model))
        taken = engine._model.weights.bytes - before
        sizes = [a.nbytes for a in load_file(adapter_of(model) / "adapter_model.safetensors").values()]
        assert taken > 2 * sum(sizes)  # ranks are filled up to 8
        engine.unload_adapter("one")
        assert engine._model.weights.bytes == before
