"""The packages to compare speed with beside llama-cpp-python: what they are asked, and what is made of their answers.

The answers in tests/fixtures/peers come from the real packages, of the versions that they name.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from polarlm.bench.speed import peers
from polarlm.bench.speed.peers import NoPeer, openvino_genai, xllamacpp
from tests.conftest import FIXTURES

SAID = FIXTURES.parent / "peers"


def recorded(name: str) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((SAID / f"{name}.json").read_text(encoding="utf-8"))
    return answers


@pytest.mark.parametrize(
    "peer", [peer for peer in peers.every().values() if not peer.program], ids=lambda peer: peer.name
)
def test_a_peer_imports_nothing_that_its_own_python_lacks(peer: peers.Peer) -> None:
    """Its Python has the package and the standard library alone."""
    program = f"import sys, {peer.module}; print([m for m in ('numpy', 'polarlm.engine') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


# -- xllamacpp -----------------------------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package: the parameters of the server, then its requests. It answers as the real one did."""
    said = recorded("xllamacpp")
    calls: list[Any] = []

    class Server:
        listening_address = "http://127.0.0.1:1"

        def __init__(self, params: Any) -> None:
            if not params.model.path.endswith(".gguf"):
                raise RuntimeError("Failed to init server, please check the input params.")
            calls.append(params)

        def handle_completions(self, request: dict[str, Any]) -> Any:
            calls.append(request)
            return said[
                "too_long" if len(request["prompt"]) > 101 else "steps" if request["cache_prompt"] else "prompt"
            ]

    package = SimpleNamespace(
        Server=Server,
        CommonParams=lambda: SimpleNamespace(
            model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
        ),
        llama_flash_attn_type=SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_ENABLED="enabled"),
        ggml_type=SimpleNamespace(GGML_TYPE_F16=1, GGML_TYPE_Q8_0=8, GGML_TYPE_Q4_0=2),
        get_system_info=lambda: said["system_info"],
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: said["version"])
    return calls


def test_xllamacpp_is_asked_for_ids_and_measures_by_its_own_clock(requests: list[Any]) -> None:
    said = recorded("xllamacpp")
    other = xllamacpp.Server("model.gguf", 512, 2, "q8_0")
    (params,) = requests
    assert (params.model.path, params.n_ctx, params.cache_type_k, params.cache_type_v) == ("model.gguf", 512, 8, 8)
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2
    assert params.flash_attn_type == "enabled"
    assert params.n_parallel == 1
    assert other.about()["version"] == "2026.10.11549"
    assert "AVX2 = 1" in other.about()["built_with"]

    ids = list(range(5, 105))
    assert other.prompt_rate(ids) == pytest.approx(100 / (said["prompt"]["timings"]["prompt_ms"] / 1e3))
    assert requests[1]["prompt"] == ids
    assert (requests[1]["n_predict"], requests[1]["cache_prompt"]) == (1, False)
    rate = other.generation_rate(ids, [6] * 17)
    assert rate == pytest.approx(16 / (said["steps"]["timings"]["predicted_ms"] / 1e3)), "the prompt gives the first"
    assert rate == pytest.approx(said["steps"]["timings"]["predicted_per_second"])
    assert (requests[2]["prompt"], requests[2]["n_predict"]) == ([*ids, 6], 17)
    assert said["steps"]["timings"]["cache_n"] == 100, "its prefix was not computed again"


def test_xllamacpp_has_room_for_each_client_of_a_server(requests: list[Any]) -> None:
    assert xllamacpp.Server("model.gguf", 512, 2, "f16", 16).address() == "http://127.0.0.1:1"
    (params,) = requests
    assert (params.n_parallel, params.n_ctx) == (16, 16 * 512)


def test_what_xllamacpp_cannot_do_is_named(requests: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPeer, match=r"^cannot load the model: Failed to init server"):
        xllamacpp.Server("model.bin", 512, 2, "f16")
    other = xllamacpp.Server("model.gguf", 512, 2, "f16")
    with pytest.raises(NoPeer, match=r"^request \(800 tokens\) exceeds the available context size \(512 tokens\)"):
        other.prompt_rate([5] * 800)
    with pytest.raises(NoPeer, match=r"^cannot generate 5 tokens after 101$"):
        other.generation_rate([5] * 100, [6] * 5)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(NoPeer, match=r"^not installed \(pip install xllamacpp\)$"):
        xllamacpp.Server("model.gguf", 512, 2, "f16")


# -- OpenVINO ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the packages: the settings of the pipeline, then its requests. It measures what the real one has
    measured."""
    said = recorded("openvino_genai")
    calls: list[Any] = []

    class Pipeline:
        def __init__(self, path: str, device: str, **settings: Any) -> None:
            if "unknown" in path:
                raise IndexError("unordered_map::at")
            calls.append((path, device, settings))

        def generate(self, inputs: Any, settings: Any) -> Any:
            calls.append((inputs, settings))
            one = said["prompt" if settings.max_new_tokens == 1 else "steps"]
            return SimpleNamespace(
                perf_metrics=SimpleNamespace(
                    get_ttft=lambda: SimpleNamespace(mean=one["ttft_mean"]),
                    get_tpot=lambda: SimpleNamespace(mean=one["tpot_mean"]),
                    get_num_generated_tokens=lambda: one["generated"],
                )
            )

    genai = SimpleNamespace(
        LLMPipeline=Pipeline,
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        TokenizedInputs=lambda *arrays: arrays,
        get_version=lambda: said["version"],
    )
    core = SimpleNamespace(get_property=lambda device, name: said["capabilities"])
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Core=lambda: core, Tensor=lambda array: array))
    return calls


def test_openvino_is_asked_for_ids_and_measures_by_its_own_clock(pipelines: list[Any]) -> None:
    said = recorded("openvino_genai")
    other = openvino_genai.Pipeline("model.gguf", 512, 2, "u8")
    ((path, device, settings),) = pipelines
    assert (path, device) == ("model.gguf", "CPU")
    assert (settings["INFERENCE_NUM_THREADS"], settings["KV_CACHE_PRECISION"]) == (2, "u8")
    assert settings["scheduler_config"].enable_prefix_caching is False, "a prompt is computed as a whole"
    assert other.about() == {"version": said["version"], "built_with": "FP32 INT8 BIN EXPORT_IMPORT"}

    assert other.prompt_rate(list(range(5, 105))) == pytest.approx(100 / (said["prompt"]["ttft_mean"] / 1e3))
    (ids, mask), request = pipelines[1]
    assert (ids.tolist(), mask.tolist()) == ([list(range(5, 105))], [[1] * 100])
    assert (request.max_new_tokens, request.ignore_eos) == (1, True)
    rate = other.generation_rate([5] * 100, [6] * 17)
    _, *steps = said["steps"]["durations_ms"]
    assert rate == pytest.approx(16 / (sum(steps) / 1e3), rel=0.02), "the first token is the prompt's"


def test_what_openvino_cannot_do_is_named(pipelines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPeer, match=r"^cannot load the model: unordered_map::at$"):
        openvino_genai.Pipeline("unknown.gguf", 512, 2, "u8")
    with pytest.raises(NoPeer, match=r"^cannot generate 5 tokens after 101$"):
        openvino_genai.Pipeline("model.gguf", 512, 2, "u8").generation_rate([5] * 100, [6] * 5)
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(NoPeer, match=r"^not installed \(pip install openvino-genai\)$"):
        openvino_genai.Pipeline("model.gguf", 512, 2, "u8")
