"""The engines to compare speed with: what they are asked, and what is made of their answers.

The answers in tests/fixtures/peers come from the real packages and programs, of the versions that they name.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polarlm.bench.speed import peers
from polarlm.bench.speed.child import Child
from polarlm.bench.speed.peers import NoPeer, ik_llama_cpp, openvino_genai, xllamacpp
from polarlm.bench.speed.peers.llama_cpp_python import Model
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


# -- ik_llama.cpp ---------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program that prints what `llama-bench` has printed for the same flags, and notes them."""
    if os.name == "nt":
        pytest.skip("the stand-in is a script, which Windows does not start by its name")
    path = tmp_path / "llama-bench"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        f"runs = json.load(open({str(SAID / 'ik_llama_cpp.json')!r}, encoding='utf-8'))\n"
        "flags = ' '.join(sys.argv[sys.argv.index('json') + 1:])\n"
        "run = runs.get(flags if '-m model.gguf' in ' '.join(sys.argv) else 'missing')\n"
        "sys.stdout.write(run['stdout']), sys.stderr.write(run['stderr']), sys.exit(run['status'])\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


def test_llama_bench_is_run_for_each_figure(program: str) -> None:
    runs = recorded("ik_llama_cpp")
    other = ik_llama_cpp.start("model.gguf", 4096, 2, "f16", program)
    (prompt,) = json.loads(runs["-p 100 -n 0 -r 2"]["stdout"])
    assert len(prompt["samples_ts"]) == 2
    assert (prompt["n_prompt"], prompt["n_gen"], prompt["n_threads"]) == (100, 0, 2)
    assert other.prompt_rate([5] * 100) == prompt["samples_ts"][1], "the first one is a warm-up"
    (steps,) = json.loads(runs["-p 0 -n 0 -gp 101,16 -r 1"]["stdout"])
    assert steps["test"] == "tg16@pp101"
    assert other.generation_rate([5] * 100, [6] * 17) == steps["samples_ts"][0]
    assert steps["samples_ts"][0] == pytest.approx(16 / (steps["samples_ns"][0] / 1e9)), "of the steps alone"
    # Linux counts a program's memory from its parent's memory, here a process of the tests.
    resource = pytest.importorskip("resource")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert 1 << 20 < other.memory()["peak"] < max(1 << 30, 2 * own)
    calls = [json.loads(line) for line in (Path(program).parent / "calls").read_text(encoding="utf-8").splitlines()]
    for call in calls:
        assert call[:12] == ["-m", "model.gguf", "-t", "2", "-ctk", "f16", "-ctv", "f16", "-fa", "1", "-rtr", "1"]


def test_llama_bench_says_what_it_was_built_with(program: str) -> None:
    about = ik_llama_cpp.start("model.gguf", 64, 2, "f16", program).about()
    assert about == {"version": "8337e4cd3 (build 4840)", "built_with": "AVX2 kernels; -fa 1 -rtr 1"}


def test_what_llama_bench_cannot_do_is_named(program: str, tmp_path: Path) -> None:
    with pytest.raises(NoPeer, match=r"^llama-bench ended with exit code 1: .*failed to load model 'missing\.gguf'$"):
        ik_llama_cpp.start("missing.gguf", 64, 2, "f16", program).prompt_rate([5] * 8)
    with pytest.raises(NoPeer, match=r"nowhere/llama-bench does not exist$"):
        ik_llama_cpp.start("model.gguf", 64, 2, "f16", str(tmp_path / "nowhere" / "llama-bench"))
    with pytest.raises(NoPeer, match=r"^no-such-llama-bench cannot be started: No such file or directory$"):
        ik_llama_cpp.start("model.gguf", 64, 2, "f16", "no-such-llama-bench").prompt_rate([5] * 8)
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\n", encoding="utf-8")
    silent.chmod(0o755)
    with pytest.raises(NoPeer, match=r"^llama-bench has printed no figures$"):
        ik_llama_cpp.start("model.gguf", 64, 2, "f16", str(silent)).prompt_rate([5] * 8)


@pytest.mark.skipif(os.name == "nt", reason="needs a pipe with a name")
def test_a_program_ends_with_the_measurement_that_runs_it(tmp_path: Path) -> None:
    """Also during a run: nobody would read its figures."""
    lasting, pipe = tmp_path / "lasting", tmp_path / "pipe"
    os.mkfifo(pipe)
    lasting.write_text(f"#!/bin/sh\nexec > {pipe}\nsleep 10\necho survived\n", encoding="utf-8")
    lasting.chmod(0o755)
    child = Child("polarlm.bench.speed.peers.ik_llama_cpp")
    child.call("start", "model.gguf", 64, 1, "f16", str(lasting))
    child._process.tell(["prompt_rate", [[5] * 8]])
    with pipe.open(encoding="utf-8") as held:  # opens when the program runs
        child.close()
        assert held.read() == "", "its end closes the pipe"


# -- llama-cpp-python -----------------------------------------------------------------------------------------------


class Library(SimpleNamespace):
    """A stand-in for the package llama_cpp, which keeps the tokens of its cache and notes its calls."""

    __version__ = "0.0.1"
    LLAMA_FLASH_ATTN_TYPE_ENABLED = 1

    def __init__(self) -> None:
        super().__init__(calls=[], tokens=[], room=1 << 20, llama_token=IdArray())

    def __getattr__(self, name: str) -> Callable[..., SimpleNamespace]:
        """Functions whose results are only passed on."""
        return lambda *arguments: SimpleNamespace()

    def llama_model_load_from_file(self, path: bytes, settings: object) -> bool:
        self.calls.append(path.decode())
        return path.endswith(b".gguf")

    def llama_init_from_model(self, model: object, settings: SimpleNamespace) -> str:
        self.calls.append(vars(settings))
        return "context"

    def llama_memory_seq_rm(self, memory: object, sequence: int, first: int, last: int) -> None:
        assert (sequence, last) == (0, -1)
        del self.tokens[first:]

    def llama_batch_get_one(self, ids: Sequence[int], count: int) -> list[int]:
        assert len(ids) == count
        return list(ids)

    def llama_decode(self, context: str, batch: list[int]) -> int:
        self.calls.append((len(self.tokens), len(batch)))
        self.tokens += batch
        return int(len(self.tokens) > self.room)

    def llama_synchronize(self, context: str) -> None:
        self.calls.append("done")

    def llama_print_system_info(self) -> bytes:
        return b"CPU : AVX2 = 1 | "


class IdArray:
    """`llama_token * n`, which is called with n tokens."""

    def __mul__(self, count: int) -> object:
        return lambda *ids: list(ids)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    return made


def test_the_peer_runs_the_file_with_the_given_threads_and_cache(library: Library) -> None:
    other = Model("a/model.gguf", 99, 2, "q4_0")
    assert other.about() == {"version": "0.0.1", "built_with": "CPU : AVX2 = 1"}
    path, settings = library.calls
    assert path == "a/model.gguf"
    threads, types = {"n_threads": 2, "n_threads_batch": 2}, {"type_k": 2, "type_v": 2}
    assert settings == {"n_ctx": 99, "n_batch": 2048, "flash_attn_type": 1, **threads, **types}


def test_the_peer_s_context_is_computed_once_and_all_runs_step_from_its_end(library: Library) -> None:
    other = Model("model.gguf", 4096, 1, "f16")
    library.calls.clear()
    for _ in range(2):
        assert other.generation_rate([3, 4, 5], [6, 7, 8]) > 0
    steps = [(3, 1), "done", (4, 1), "done", (5, 1), "done"]
    assert library.calls == [(0, 3), "done", *steps, *steps]
    library.calls.clear()
    other.generation_rate([3, 4, 5, 9], [6, 7])
    assert library.calls[:2] == [(3, 1), "done"], "a longer context goes on from the shorter one"
    other.generation_rate([3, 8], [6, 7])
    assert library.tokens == [3, 8], "another one from where they part"


def test_what_the_peer_cannot_do_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPeer, match=r"^cannot load the model$"):
        Model("model.bin", 99, 1, "f16")
    other = Model("model.gguf", 99, 1, "f16")
    library.room = 10
    with pytest.raises(NoPeer, match=r"^cannot compute 11 tokens after 0$"):
        other.prompt_rate([5] * 11)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(NoPeer, match=r"^not installed \(pip install llama-cpp-python\)$"):
        Model("model.gguf", 99, 1, "f16")
