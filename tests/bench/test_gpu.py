"""The measurement of a GPU, on an emulated one: what is measured, in which order, and what is left out.

Times are what the clock or the stand-in's events say. No test looks at a clock.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from polarlm.bench.command import CacheType
from polarlm.bench.lab import load
from polarlm.bench.lab.gpu import __main__ as gpu_bench
from polarlm.bench.lab.gpu import plan
from polarlm.bench.lab.gpu.attention import measure_attention
from polarlm.bench.lab.gpu.cache import ALLOWED_ERROR, Content
from polarlm.bench.lab.gpu.peer import NAMES, attention_at, half_attention
from polarlm.bench.lab.gpu.setup import Gpu, Sizes
from polarlm.bench.lab.gpu.tables import report_of
from polarlm.bench.result import Result, read
from polarlm.bench.shapes import llama
from polarlm.bench.speed import ours
from polarlm.engine.backends.cuda.attention import AttentionOps
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda.emulated import EmulatedDevice

CONFIG = replace(
    llama(layers=1, hidden_size=256, ffn_size=256, heads=16, kv_heads=2, head_dim=16, vocab_size=64), max_context=128
)
SMALL = {"block_size": 16, "blocks": 3, "rotated": 1 << 13, "copied": 1 << 12, "gemm": 32, "rows": (1, 65)}
ASKED = {"prompts": (4,), "depths": (8,), "steps": 2, "sequences": (1,), "asked": (4, 2)}
SIZES = Sizes(CONFIG, **SMALL, **ASKED, runs=1)


# -- the machine ---------------------------------------------------------------------------------------------------


class HostClock:
    """Runs the work once; every time is a millisecond."""

    def seconds(self, work: Callable[[], object], runs: int) -> float:
        work()
        return 1e-3

    held = seconds

    def copy(self, to: Any, source: Any) -> None:
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


def run(output: Path, *flags: str, gpu: Gpu | None = None, sizes: Sizes = SIZES, peers: Any = None) -> int:
    argv = ["--output", str(output), "--contexts", "64", *flags]
    with mock.patch.object(plan, "half_attention", peers or mock.Mock()):
        return gpu_bench.main(argv, gpu, sizes)


# -- the command ---------------------------------------------------------------------------------------------------


PRINTED = {
    "llama-bench": '[{"n_prompt": 4, "samples_ts": [9]}, {"n_prompt": 0, "n_depth": 8, "samples_ts": [7]}]',
    "llama-batched-bench": 'main: n_kv_max = 8\n{"pp": 8, "tg": 4, "pl": 2, "t_pp": 0.5, "t_tg": 1.0}\n',
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, list[Any]]:
    """An emulated GPU for a model of the tests, and the programs and loads of a server that were asked for."""
    commands = list[Any]()

    def serving(options: Any, destination: Any, argv: Sequence[str]) -> None:
        asked = options.clients, options.requests, options.prompt_tokens, options.max_tokens
        commands.append([options.weights, *asked])
        loaded = Result({})
        loaded.add("load", "polarlm", "tokens/s", value=1000.0)
        for name in ("first token", "between two tokens"):
            loaded.add("load", "polarlm", name, range(101))
        Path(destination.output).write_text(json.dumps(loaded.as_json()))

    gpu = emulated()
    assemble = ours.assemble
    plain = {"calibration": False, "block_size": 16}
    monkeypatch.setattr(ours, "assemble", lambda config, say: assemble(replace(config, **plain), say, gpu.open()[0]))
    monkeypatch.setattr(plan, "MATRICES", ("out",))
    programs = SimpleNamespace(
        run=lambda command, **_: commands.append(command) or SimpleNamespace(stdout=PRINTED[Path(command[0]).name]),
        PIPE=None,
    )
    monkeypatch.setattr(plan, "subprocess", programs)
    monkeypatch.setattr(load, "run", serving)
    return gpu, commands


@pytest.mark.slow
def test_every_section_is_measured_in_the_order_of_its_importance(
    tiny: tuple[Gpu, list[Any]], tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, model = tmp_path / "out.json", str(tiny_path)
    flags = ["--weights", model, "--llama-cpp", "bin", "--types", "ring4/ring3.5", "--budget", "100000"]
    assert run(output, *flags, "--batches", "1", gpu=tiny[0]) == 0
    results = read(output)
    assert (results["not_measured"], results["complete"]) == ([], True)
    done = [line.split("s  ", 1)[1].split(",")[0] for line in capsys.readouterr().err.splitlines()[1:-1]]
    requested = ["prompt of 4", "generation at 8", "llama-bench", "1 sequences", "llama-batched-bench"]
    assert done[:7] == [*requested, "server of 32 clients", "limits of the device"]

    who = "polarlm ring4/ring3.5"
    assert results.value("prompt of 4", who, "device") == 1e-3
    here = {name: row.value for name, row in results.figures("1 sequences", who).items()}
    assert 0 < here["first"] < here["seconds"]
    there = {name: row.value for name, row in results.figures("2 sequences", "llama.cpp f16").items()}
    assert there == {"first": 0.5, "seconds": 1.5, "step": 0.25}
    server = results.figures("server", "polarlm")
    assert (server["first token"].runs, server["between two tokens"].runs) == ((50, 95), (50, 95))
    assert all(0 < row.value < 4e-3 for row in results.rows("error"))
    assert {rows for _, rows, _ in results.parts(prefix="product of ")} == {"1", "65"}
    rates = {(row.contestant, row.subject) for row in results.rows("tokens/s") if "section" in row.more}
    assert rates == {(one, subject) for one in (who, "llama.cpp f16") for subject in ("prompt of 4", "generation at 8")}
    prompts, steps, batched, serving = tiny[1]
    assert prompts[:3] == steps[:3] == ["bin/llama-bench", "-m", model]
    assert (prompts[-4:], steps[-6:]) == (["-p", "4", "-n", "0"], ["-p", "0", "-n", "2", "-d", "8"])
    assert batched[:3] == ["bin/llama-batched-bench", "-m", model]
    assert serving == [model, 32, 96, 512, 128]


def test_a_failing_task_does_not_affect_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*shape: Any) -> None:
        raise RuntimeError("an illegal access\nwas encountered")

    monkeypatch.setattr(plan, "MATRICES", ())
    flags = "--only", "kernels", "--types", "balanced", "--batches", "1"
    assert run(tmp_path / "out.json", *flags, gpu=emulated(), peers=broken) == 0
    results = read(tmp_path / "out.json")
    assert [(one["what"], one["why"]) for one in results["not_measured"]] == [
        ("fp16 kernels of PyTorch, 64 × 1", "failed: RuntimeError: an illegal access")
    ]
    assert len([*results.parts(prefix="attention")]) == 1
    assert "Traceback" in capsys.readouterr().err, "a fault of a kernel is worth its place"


def test_what_does_not_fit_is_reported(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, assemble = emulated(free=8000), ours.assemble
    monkeypatch.setattr(ours, "assemble", lambda config, say: assemble(config, say, gpu.open()[0]))
    flags = "--only", "prompts,kernels", "--types", "f16", "--batches", "1", "--weights", str(tiny_path)
    assert run(tmp_path / "out.json", *flags, gpu=gpu) == 0
    reasons = {one["what"]: one["why"] for one in read(tmp_path / "out.json")["not_measured"]}
    assert reasons["attention, f16, 64 × 1"] == "its 8.0 KiB do not fit into the 7.0 KiB that are free"
    assert reasons["prompt of 4, f16"].startswith("there is no model: The model's weights take 0.0 GiB on emulated GPU")
    assert reasons["down, bf16"] == "their 128.0 KiB do not fit into the 7.0 KiB that are free"
    assert reasons["encoding"] == "f16 and f16 do not round by a metric"


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = AttentionOps.attention

    def off(self: AttentionOps, q: Any, *rest: Any) -> Any:
        out = self._device.to_host(attention(self, q, *rest))
        return self._device.from_host(out + 0.01 * np.abs(out).max())

    content = Content.random(3, 16, 2, 16)
    result, at = Result({}), (attention_at(64, 1), "f16", "error")
    arguments = SIZES, content, CacheType.read("f16"), 64, 1
    measure_attention(result, emulated(), *arguments)
    assert result.value(*at) < ALLOWED_ERROR
    monkeypatch.setattr(AttentionOps, "attention", off)
    measure_attention(result, emulated(), *arguments)
    assert result.value(*at) == pytest.approx(0.01, rel=0.5)
    assert result.value(*at) > ALLOWED_ERROR


# -- tables --------------------------------------------------------------------------------------------------------


def test_times_are_compared_with_the_limits_and_with_the_best_fp16_kernel() -> None:
    machine = {"cpu": "", "cores": 2, "system": "", "gpu": {"name": "A GPU"}}
    about = {"date": "", "command": "", "complete": True, "machine": machine, "load": {"before": 0.0, "after": 0.0}}
    result = Result({"model": "m", **about, "not_measured": []})
    at, batched = ({"context": 1024, "batch": batch} for batch in (1, 16))
    for subject, who, values, more in (
        ("device", "copy", {"bytes/s": 4e12}, {}),
        ("attention, 1024 × 1", "f16", {"seconds": 20e-6, "bytes": 4e7, "error": 1e-4}, at),
        ("attention, 1024 × 1", "ring4", {"seconds": 10e-6, "bytes": 1e7, "error": 2e-4}, at),
        ("attention, 1024 × 1", "torch", {"seconds": 30e-6}, at),
        ("attention, 1024 × 16", "f16", {"seconds": 5e-6, "bytes": 1e7, "error": 1e-2}, batched),
    ):
        result.add_all(subject, who, values, **more)
    printed = re.sub(r" +\|", " |", re.sub(r"\| +", "| ", report_of(result).terminal()))
    lines = (
        "| torch | 1,024 | 1 | 30.0 | — | — | 0.67 | — |\n"
        "| f16 | 1,024 | 1 | 20.0 | 2,000 | 50 % | 1.00 | 1.0e-04 |\n"
        "| ring4 | 1,024 | 1 | 10.0 | 1,000 | 25 % | 2.00 | 2.0e-04 |\n"
        "| f16 | 1,024 | 16 | 5.0 | 2,000 | 50 % | — | WRONG 1.0e-02 |"
    )
    assert lines in printed


# -- PyTorch -------------------------------------------------------------------------------------------------------


def test_a_missing_peer_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = Result({})
    half_attention(result, CONFIG, 64, 1, 1, 1)
    assert {(row.contestant, row.failure) for row in result.rows()} == {
        (name, "PyTorch is not installed") for name in NAMES
    }
