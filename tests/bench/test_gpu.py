"""The measurement of a GPU's kernels, on CuPy's stand-in: what is measured, in which order, and what is left out.

The emulator computes; times are what the stand-in's events say. No test looks at a clock.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polarlm.bench.command import CacheType
from polarlm.bench.gpu import __main__ as kernels
from polarlm.bench.gpu import setup
from polarlm.bench.gpu.attention import AttentionTime, measure_attention
from polarlm.bench.gpu.cache import Content
from polarlm.bench.gpu.peer import NAMES, PeerTime, PromptPeerTime, half_attention
from polarlm.bench.gpu.setup import Gpu, Sizes
from polarlm.bench.gpu.shapes import llama
from polarlm.bench.gpu.steps import MatrixTime, PrefillTime, StepTime
from polarlm.bench.gpu.tables import Limits, Results, format_tables
from polarlm.engine.backends.cuda.attention import AttentionOps
from polarlm.engine.backends.cuda.device import cublas_lt, overlap
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda import fake_cublas_lt, fake_cupy
from tests.cuda.emulated import EmulatedDevice

CONFIG = replace(
    llama(layers=1, hidden_size=32, ffn_size=64, heads=4, kv_heads=2, head_dim=16, vocab_size=64), max_context=128
)
SMALL = {"block_size": 16, "blocks": 3, "rotated": 1 << 13, "copied": 1 << 12, "gemm": 32, "prompt": 48}
SIZES = Sizes(CONFIG, **SMALL, step_contexts=(64,), runs=1)
DEVICE, *OTHERS = (
    f"polarlm.engine.backends.cuda.device.{name}" for name in ("cupy_device", "cupy_recording", "cupy_compiler")
)


# -- the machine ---------------------------------------------------------------------------------------------------


class HostClock:
    """Runs the work once; every time is a millisecond."""

    def seconds(self, work: Callable[[], object], runs: int) -> float:
        work()
        return 1e-3

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        assert to.shape == source.shape
        to[...] = source

    def free(self) -> None:
        pass


def emulated(free: int = 1 << 30) -> Gpu:
    def fresh() -> tuple[CudaOps, EmulatedDevice]:
        device = EmulatedDevice(checked=False)
        device.memory = lambda: (free, 2 << 30)
        return CudaOps(device), device

    return Gpu(fresh, HostClock(), {"name": "Emulated GPU", "driver": "1.2"})


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`open_gpu` finds CuPy's stand-in."""
    machine, modules = fake_cupy.make()
    monkeypatch.setattr(setup, "WARM_SECONDS", 0)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in (DEVICE, *OTHERS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(setup, "select", lambda device, threads: importlib.import_module(DEVICE))
    monkeypatch.setattr(overlap, "load_driver", lambda: fake_cupy.Driver(machine))
    monkeypatch.setattr(cublas_lt, "load_library", lambda: fake_cublas_lt.Library(machine))
    yield machine
    for name in (DEVICE, *OTHERS):
        sys.modules.pop(name, None)


def no_peers(config: Any, context: int, batch: int, rotated: int, runs: int) -> list[PeerTime]:
    return [PeerTime("one", context, batch, 4e-3), PeerTime("two", context, batch, None, "not installed")]


def run(output: Path, *flags: str, gpu: Gpu | None = None, sizes: Sizes = SIZES, peers: Any = no_peers) -> int:
    argv = ["--output", str(output), "--layers", "1", "--contexts", "64", *flags]
    return kernels.main(argv, gpu, sizes, peers)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_measurements_are_in_the_order_of_their_importance(
    fake_gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    types = "f16,ring4/ring3.5"
    assert run(tmp_path / "out.json", "--types", types, "--batches", "1,2", "--budget", "100000") == 0
    printed = capsys.readouterr()
    assert "Not measured" not in printed.out
    parts = [line.split("s  ", 1)[1].split(",")[0].split(" × ")[0] for line in printed.err.splitlines()[1:-1]]
    attention = ["fp16 kernels of PyTorch", "attention", "attention"]
    products = ["qkv", "out", "gate_up", "down"]
    steps, products = ["steps", "steps", "prefill of 48 tokens"], [*products, "head", *products, *products, *products]
    model = [*steps, *steps, "fp16 kernels of PyTorch", *products, *products, "steps", "steps"]
    limits = "limits of the device"
    assert parts == [limits, *attention, *model, *attention, "encoding", limits]

    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (results["machine"]["gpu"]["driver_cuda"], results["machine"]["gpu"]["runtime_cuda"]) == ("13.2", "13.0")
    assert all(0 < row["error"] < 4e-3 for row in results["attention"])
    assert [row["overlapped"] for row in results["steps"]] == 4 * [False] + 2 * [True]
    assert "place_kv_kernel" in fake_gpu.overlapped
    assert not results["not_measured"]
    table = printed.out.split("Attention of one token")[1].splitlines()[2:]
    assert [cells(line)[0] for line in table[2:10]] == 2 * ["one", "two", "f16", "ring4/ring3.5"]


def test_measurements_beyond_the_budget_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.chain([0, 1, 2, 3, 4], itertools.repeat(11))  # the start, two looks at the time for each task
    monkeypatch.setattr(kernels, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert run(tmp_path / "out.json", "--budget", "10", gpu=emulated()) == 0
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert len(results["limits"]) == 1
    assert len(results["attention_peers"]) == 2
    assert not results["attention"]
    cut = [one["what"] for one in results["not_measured"]]
    assert cut[0] == "attention, f16, 64 × 1"
    assert cut[-2:] == ["encoding", "limits of the device, once more"]
    assert not results["complete"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Not measured: limits of the device, once more: the 10 s of --budget were over."


def only(*names: str) -> Callable[[kernels.Plan], Any]:
    """Tasks whose names begin with a string."""
    tasks = kernels.Plan.tasks

    return lambda plan: (task for task in tasks(plan) if task[0].startswith(names))


def test_a_failing_task_does_not_affect_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*shape: Any) -> list[PeerTime]:
        raise RuntimeError("an illegal access\nwas encountered")

    monkeypatch.setattr(kernels.Plan, "tasks", only("fp16", "limits", "attention"))
    assert run(tmp_path / "out.json", "--types", "f16", "--batches", "1", gpu=emulated(), peers=broken) == 0
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [(one["what"], one["why"]) for one in results["not_measured"]] == [
        ("fp16 kernels of PyTorch, 64 × 1", "failed: RuntimeError: an illegal access")
    ]
    assert len(results["attention"]) == 1
    assert "Traceback" in capsys.readouterr().err, "a fault of a kernel is worth its place"


def test_the_file_is_written_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*shape: Any) -> list[PeerTime]:
        raise KeyboardInterrupt

    assert run(tmp_path / "out.json", gpu=emulated(), peers=stopped) == 130
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["limits"]


def test_what_does_not_fit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Plan, "tasks", only("attention", "steps", "qkv"))
    assert run(tmp_path / "out.json", "--types", "f16", "--batches", "1", gpu=emulated(free=8000)) == 0
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    reasons = {one["what"]: one["why"] for one in results["not_measured"]}
    assert reasons["attention, f16, 64 × 1"] == "its 8.0 KiB do not fit into the 7.0 KiB that are free"
    assert reasons["steps, bf16, 64 × 1"].startswith(
        "no model of 1 layers (The model's weights take 0.0 GiB on emulated GPU"
    )
    assert reasons["qkv × 1 rows, bf16"] == "there is no model"


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = AttentionOps.attention

    def off(self: AttentionOps, q: Any, *rest: Any) -> Any:
        out = self._device.to_host(attention(self, q, *rest))
        return self._device.from_host(out + 0.01 * np.abs(out).max())

    content = Content.random(3, 16, 2, 16)
    arguments = SIZES, content, CacheType.read("f16"), 64, 1
    assert measure_attention(emulated(), *arguments).right
    monkeypatch.setattr(AttentionOps, "attention", off)
    wrong = measure_attention(emulated(), *arguments)
    assert not wrong.right
    assert wrong.error == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--types", "int3"], "--types int3: There is no cache type 'int3'"),
        (["--contexts", "63"], "--contexts takes numbers from 64 up, separated by commas, not '63'"),
        (["--batches", "0"], "--batches takes numbers from 1 up, separated by commas, not '0'"),
        (["--layers", "0"], "--layers: must be at least 1"),
        (["--output", "{tmp}/none/out.json"], "--output {tmp}/none/out.json cannot be written"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "out.json", *(flag.format(tmp=tmp_path) for flag in flags), gpu=emulated()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"error: {sentence.format(tmp=tmp_path)}")


# -- tables --------------------------------------------------------------------------------------------------------


def test_times_are_compared_with_the_limits_and_with_the_best_fp16_kernel() -> None:
    results = Results(
        [
            Limits(copy=4e12, gemm=700e12),
            Limits(copy=3e12, gemm=800e12),
            PeerTime("torch", 1024, 1, 30e-6),
            AttentionTime("f16", 1024, 1, 20e-6, 40_000_000, 1e-4),
            AttentionTime("ring4", 1024, 1, 10e-6, 10_000_000, 2e-4),
            AttentionTime("f16", 1024, 16, 5e-6, 10_000_000, 1e-2),
            StepTime("q4_k_m", 1024, 512, 4, 10e-3, 9e-3, 8e-3, 20_000_000_000, 8.0e-3, overlapped=True),
            MatrixTime("bf16", "qkv", 1, 10e-6, 30_000_000),
            PrefillTime("bf16", 1000, 0.5, 200e12, 1e-3, 300e9),
            PromptPeerTime("torch flash", 1000, 2e-3, 300e9),
        ],
        [("encoding", "there is not enough memory")],
    )
    lines = [cells(line) for line in format_tables(results).splitlines()]
    assert ["torch", "1,024", "1", "30.0", "—", "—", "0.67", ""] in lines
    assert ["f16", "1,024", "1", "20.0", "2,000", "50 %", "1.00", "1.0e-04"] in lines
    assert ["ring4", "1,024", "1", "10.0", "1,000", "25 %", "2.00", "2.0e-04"] in lines
    assert ["f16", "1,024", "16", "5.0", "2,000", "50 %", "—", "WRONG 1.0e-02"] in lines
    step = ["q4_k_m", "overlapped", "1,024, others 512", "4", "10.00", "9.00", "8.00", "8.00", "5.00", "50 %", "500"]
    assert step in lines
    assert ["bf16", "qkv", "1", "10.0", "3,000", "75 %"] in lines
    assert ["bf16", "1,000", "500.0", "2,000", "50 %", "300"] in lines
    assert ["torch flash", "1,000", "2.00", "150", ""] in lines
    assert lines[-1] == ["Not measured: encoding: there is not enough memory."]


# -- PyTorch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "note"),
    [
        (None, "PyTorch is not installed"),
        (SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)), "PyTorch sees no GPU"),
    ],
)
def test_a_missing_peer_has_a_reason(monkeypatch: pytest.MonkeyPatch, torch: Any, note: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    times = half_attention(CONFIG, 64, 1, 1, 1)
    assert [(time.name, time.note) for time in times] == [(name, note) for name in NAMES]
