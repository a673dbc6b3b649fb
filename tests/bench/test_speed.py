"""The speed measurement: the order of runs, figures and tables. No test asserts a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from bench.speed import __main__ as speed
from bench.speed import full_precision, peer
from bench.speed.timing import Rates, Streams, generation_rate, prompt_rate, weights_rate
from engine import Engine
from engine.backends.numpy.ops import NumpyOps
from engine.model.forward import Transformer
from engine.weight_formats import Linear
from tests.bare import bare_model, read_model
from tests.conftest import FIXTURES
from tests.shared_data import shared

SMALL = ["--device", "cpu", "--prompt", "40", "--depth", "100", "--repeat", "2", "--threads", "1,2"]


@pytest.fixture(autouse=True)
def no_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_REST_SECONDS", 0)


def run(output: Path, *flags: str) -> int:
    return speed.main(["--weights", str(shared("models", "stories260K")), "--output", str(output), *SMALL, *flags])


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def blas_threads() -> int:
    (threads,) = {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}
    return threads


# -- what is counted -----------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(1, 64), st.lists(st.floats(1, 1e5), min_size=1, max_size=5), min_size=1))
def test_the_best_thread_count_is_that_of_the_best_median(runs: dict[int, list[float]]) -> None:
    rates = Rates()
    for threads, values in runs.items():
        for value in values:
            rates.add(threads, value)
    medians = {threads: float(np.median(values)) for threads, values in runs.items()}
    assert rates.median == pytest.approx(max(medians.values()))
    assert medians[rates.threads] == max(medians.values())
    assert rates.fastest == max(max(values) for values in runs.values())


def test_reading_the_weights_alone_multiplies_by_each_matrix_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = read_model(FIXTURES / "llama_gqa_linear")
    model = bare_model(config, weights)
    multiplied: list[Linear] = []

    def linear(self: NumpyOps, x: np.ndarray, w: Linear) -> np.ndarray:
        assert x.shape == (1, w.shape[1])
        multiplied.append(w)
        return x @ self.rows(w).T

    monkeypatch.setattr(NumpyOps, "linear", linear)
    assert weights_rate(model, passes=3) > 0
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert [id(m) for m in multiplied] == (2 + 3) * [id(m) for m in (*matrices, weights.head)]


def test_a_cached_prompt_is_not_a_measurement() -> None:
    with Engine.load(shared("models", "stories260K"), ctx_size=64, kept_sequences=1) as engine:
        assert prompt_rate(engine, range(5, 45)) > 0
        with pytest.raises(RuntimeError, match="cached_tokens=3"):
            prompt_rate(engine, range(5, 45))


def test_generation_takes_the_requested_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end token does not end it, and the first token, which the prefill returns, is not a step."""
    steps = []
    take = Transformer.step
    monkeypatch.setattr(Transformer, "step", lambda *given: (steps.append(1), take(*given))[1])
    with Engine.load(shared("models", "stories260K"), ctx_size=320, kept_sequences=0) as engine:
        assert generation_rate(engine, [1, 403, 407], 300) > 0
    assert len(steps) == 300


def test_streams_step_together_and_restart_with_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = read_model(FIXTURES / "llama_gqa_linear")
    model, steps = bare_model(config, weights), []
    take = Transformer.step
    monkeypatch.setattr(Transformer, "step", lambda *of: (steps.append([span.start for span in of[1]]), take(*of))[1])
    streams = Streams(model, [[5] * 64, [6] * 128, [7] * 64])
    free = [(group.quantized.free, group.full.free) for group in model.store.groups]
    for _ in range(2):
        assert streams.rate(2, 5) > 0
        assert steps == [[64 + i, 128 + i] for i in range(5)]
        steps.clear()
    assert [(group.quantized.free, group.full.free) for group in model.store.groups] == free


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_table_comes_last_and_the_file_says_how_it_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as if it were not installed
    assert run(tmp_path / "out.json", "--types", "f16,polarquant:plain") == 0
    header, _, *rows = [cells(line) for line in capsys.readouterr().out.splitlines()[-9:]]
    columns = ["cache", "tokens/s", "threads", "fastest", "weights alone", "share", "one stream", "times", peer.NAME]
    assert header[1:] == [*columns, "ratio"]
    assert [row[:2] for row in rows] == [
        ["prompt of 40", "f16"],
        ["generation, depth ≤ 64", "f16"],
        ["steps of 1 at 128", "f16"],
        ["steps of 8 at 128", "f16"],
        ["steps of 16 at 128", "f16"],
        ["generation at 100", "f16"],
        ["generation at 100", "polarquant:plain"],
    ]
    assert all(float(row[column].replace(",", "")) > 0 for row in rows for column in (2, 3, 4))
    assert [row[5] == "—" for row in rows] == [True, False, True, True, True, False, False]
    assert [row[7:9] == ["—", "—"] for row in rows] == [True, True, True, False, False, True, True]
    assert rows[3][7] == rows[4][7] == rows[2][2]
    assert [row[9:] for row in rows] == 2 * [["not installed", "—"]] + 5 * [["—", "—"]]

    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert {"cpu", "cores", "numpy", "blas"} <= found["machine"].keys()
    assert found["date"]
    assert found["command"].startswith("python -m bench.speed --weights ")
    assert found["peer"] == {"name": "llama-cpp-python", "version_or_absence": "not installed"}
    for figure in found["figures"]:
        assert {threads: len(rates) for threads, rates in figure["ours"]["runs"].items()} == {"1": 2, "2": 2}
        assert all(rate > 0 for rates in figure["ours"]["runs"].values() for rate in rates)


def test_results_are_kept_when_the_command_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(speed, "_measure_deep", stopped)
    assert run(tmp_path / "out.json", "--types", "f16") == 130
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [figure["name"] for figure in found["figures"]][:2] == ["prompt of 40", "generation, depth ≤ 64"]
    assert found["complete"] is False
    messages = capsys.readouterr().err
    assert "Takes about " in messages
    assert "steps of 16 at 128, f16: " in messages


class FakePeer:
    """Records its runs and their threads, and generates faster with more threads."""

    version = "1.2.3"
    calls: list[tuple[str, int]]

    def __init__(self, source: object, context: int) -> None:
        assert context >= 65
        FakePeer.calls = []

    def prompt_rate(self, ids: Sequence[int], threads: int) -> float:
        assert len(ids) == 40
        self.calls.append(("peer", threads))
        return 500.0

    def generation_rate(self, ids: Sequence[int], following: Sequence[int], threads: int) -> float:
        assert len(ids) + len(following) <= 64
        self.calls.append(("peer", threads))
        return 50.0 * threads

    def close(self) -> None:
        self.calls.append(("closed", 0))


def test_runs_of_the_peer_alternate_and_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = set()

    def ours(rate: float) -> object:
        def measured(engine: Engine, ids: Sequence[int], *steps: int) -> float:
            prompts.add(tuple(ids))
            threads = blas_threads()
            if len(ids) < 100:
                FakePeer.calls.append(("ours", threads))
            return rate * threads

        return measured

    monkeypatch.setattr(speed, "Peer", FakePeer)
    monkeypatch.setattr(speed, "prompt_rate", ours(1000.0))
    monkeypatch.setattr(speed, "generation_rate", ours(40.0))
    monkeypatch.setattr(speed, "weights_rate", lambda model, steps: 160.0)
    monkeypatch.setattr(Streams, "rate", lambda self, batch, steps: 10.0 * blas_threads())
    assert run(tmp_path / "out.json", "--types", "f16") == 0
    warm_up = [("ours", 1), ("peer", 1)]
    turns = [("ours", 1), ("peer", 1), ("ours", 2), ("peer", 2)]
    first_look = [("ours", 1), ("ours", 1)]  # how long it will all take
    assert FakePeer.calls == first_look + 2 * (warm_up + 2 * turns) + [("closed", 0)]
    assert len(prompts) == 2 + 3 * 5, "each run has a prompt of its own"
    prompt, short, *batches, deep = [cells(line) for line in capsys.readouterr().out.splitlines()[-6:]]
    assert prompt[2:] == ["2,000.0", "2", "2,000.0", "—", "—", "—", "—", "500.0", "4.00"]
    assert short[2:] == ["80.0", "2", "80.0", "160.0", "50 %", "—", "—", "100.0", "0.80"]
    assert [row[2:9] for row in batches] == [
        ["20.0", "2", "20.0", "—", "—", *times] for times in (["—", "—"], ["20.0", "1.00"], ["20.0", "1.00"])
    ]
    assert deep[2:] == ["80.0", "2", "80.0", "160.0", "50 %", "—", "—", "—", "—"]


def test_on_a_gpu_there_are_no_threads_and_no_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu(NumpyOps):
        name = "Some GPU"

    monkeypatch.setattr("engine.backends.select._cuda", Gpu)
    monkeypatch.setattr(speed, "about_gpu", lambda: {"name": "Some GPU", "driver": "1.2"})
    assert run(tmp_path / "out.json", "--device", "cuda", "--types", "f16") == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["machine"]["gpu"] == {"name": "Some GPU", "driver": "1.2"}
    assert found["peer"]["version_or_absence"] == "on the CPU only"
    assert all(list(figure["ours"]["runs"]) == ["1"] for figure in found["figures"])
    printed = capsys.readouterr().out
    assert printed.startswith("stories260K (F32 weights) on the Some GPU.\nTokens/s: median of 2. ")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--types", "int3"], "--types int3: There is no cache type 'int3'"),
        (["--threads", "0"], "--threads takes numbers from 1 up, separated by commas, not '0'"),
        (["--threads", "two"], "--threads takes numbers from 1 up, separated by commas, not 'two'"),
        (["--repeat", "0"], "--repeat: must be at least 1"),
        (["--depth", "5000"], "--prompt and --depth: 5033 tokens of context are needed, but stories260K has 512"),
        (["--weights", "{tmp}/none"], "{tmp}/none does not exist"),
        (["--output", "{tmp}/none/out.json"], "--output {tmp}/none/out.json cannot be written"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "out.json", *(flag.format(tmp=tmp_path) for flag in flags)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"error: {sentence.format(tmp=tmp_path)}")
    assert "Traceback" not in printed.err


# -- the peer ------------------------------------------------------------------------------------------------------


def library(calls: list[object]) -> SimpleNamespace:
    """A stand-in for the package llama_cpp."""

    class Llama:
        ctx = "context"

        def __init__(self, path: str, **settings: object) -> None:
            calls.append((Path(path).name, settings["n_ctx"]))

        def reset(self) -> None:
            calls.append("reset")

        def eval(self, ids: Sequence[int]) -> None:
            calls.append(list(ids))

        def close(self) -> None:
            calls.append("close")

    return SimpleNamespace(
        __version__="0.0.1",
        Llama=Llama,
        llama_set_n_threads=lambda ctx, threads, batch_threads: calls.append((ctx, threads, batch_threads)),
        llama_synchronize=lambda ctx: calls.append("done"),
    )


def test_the_peer_runs_the_same_prompt_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setitem(sys.modules, "llama_cpp", library(calls))
    file = tmp_path / "model.gguf"
    file.touch()
    other = peer.Peer(SimpleNamespace(path=file, dtype="F32"), 99)
    assert other.version == "0.0.1"
    assert other.prompt_rate([3, 4, 5], threads=2) > 0
    assert other.generation_rate([6, 7], [8, 9], threads=1) > 0
    other.close()
    assert calls == [
        ("model.gguf", 99),
        *("reset", ("context", 2, 2), [3, 4, 5], "done"),
        *("reset", ("context", 1, 1), [6, 7], "done", [8], "done", [9], "done"),
        "close",
    ]


def test_the_peer_reads_gguf_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", library([]))
    with pytest.raises(peer.NoPeer, match=r"needs a \.gguf file"):
        peer.Peer(SimpleNamespace(path=tmp_path, dtype="F32"), 99)


@pytest.fixture
def quantized(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A .gguf file with metadata of several types and tensors of several precisions."""
    path = tmp_path / "tiny-Q4_1.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_quantization_version(2)
    writer.add_context_length(77)
    writer.add_rope_freq_base(1e4)
    writer.add_add_bos_token(False)
    writer.add_token_list(["<s>", "é", "b"])
    writer.add_token_types([3, 1, 1])
    writer.add_chat_template("{{ messages }}")
    for name, kind in (("a.weight", "Q4_1"), ("b.weight", "Q8_0"), ("c.weight", "F16")):
        quantization = gguf.GGMLQuantizationType[kind]
        values = gguf.quants.quantize(rng.normal(size=(3, 64)).astype(np.float32), quantization)
        writer.add_tensor(name, values, raw_dtype=quantization)
    writer.add_tensor("d.weight", rng.normal(size=5).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def contents(reader: gguf.GGUFReader) -> dict[str, object]:
    return {name: (f.types, f.contents()) for name, f in reader.fields.items() if not name.startswith("GGUF.")}


def test_the_float32_copy_has_the_same_metadata_and_values(quantized: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    full_precision.write_float32(quantized, copy)
    before, after = gguf.GGUFReader(quantized), gguf.GGUFReader(copy)
    expected = contents(before)
    del expected["general.quantization_version"]
    expected["general.file_type"] = (expected["general.file_type"][0], int(gguf.LlamaFileType.ALL_F32))
    assert contents(after) == expected
    assert [t.name for t in after.tensors] == [t.name for t in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.tensor_type == gguf.GGMLQuantizationType.F32
        assert new.shape.tolist() == old.shape.tolist()
        np.testing.assert_array_equal(new.data, gguf.quants.dequantize(old.data, old.tensor_type))


def test_the_float32_copy_is_made_once_and_again_for_a_newer_file(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, written = tmp_path / "cache", []
    monkeypatch.setenv(full_precision.CACHE_VARIABLE, str(cache))
    write = full_precision.write_float32
    monkeypatch.setattr(full_precision, "write_float32", lambda *paths: (written.append(1), write(*paths)))
    copy = full_precision.float32_copy(quantized)
    assert (copy.parent, full_precision.float32_copy(quantized), len(written)) == (cache, copy, 1)
    later = copy.stat().st_mtime_ns + 10**9
    os.utime(quantized, ns=(later, later))
    assert (full_precision.float32_copy(quantized), len(written)) == (copy, 2)
    assert [file.name for file in cache.iterdir()] == [copy.name], "nothing unfinished is left"
