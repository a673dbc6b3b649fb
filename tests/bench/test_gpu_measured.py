"""Results of a GPU beside its predictions; the results are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from polarlm.bench import report
from polarlm.bench.command import CacheType
from polarlm.bench.gpu import cost, measured, predict
from polarlm.bench.gpu.attention import AttentionTime
from polarlm.bench.gpu.cards import MACHINES
from polarlm.bench.gpu.cost import Prediction
from polarlm.bench.gpu.measured import Pair, runs_of
from polarlm.bench.gpu.shapes import LLAMA_8B, llama, shape_of
from polarlm.bench.gpu.steps import MatrixTime, PrefillTime, StepTime
from polarlm.bench.gpu.tables import Results, Row
from polarlm.model_loaders.config import ModelConfig
from tests.bench.test_gpu_predict import IDLE

H200 = "NVIDIA H200"


def results(
    path: Path, *rows: Row, gpu: str = H200, date: str = "2026-12-01", config: ModelConfig = LLAMA_8B, kind: str = "gpu"
) -> None:
    """A file as `bench.gpu` writes it."""
    report.write(path, kind, [], Results([*rows], model=shape_of(config)).as_json(), gpu={"name": gpu})
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "date": date}), encoding="utf-8")


def step(seconds: float, **other: Any) -> StepTime:
    row = StepTime("bf16", 2048, 2048, 1, seconds, seconds, 0.9 * seconds, 1 << 30, 0.95 * seconds)
    return replace(row, **other)


def attention(seconds: float, cache_type: str = "ring4/ring3.5", error: float = 0.0) -> AttentionTime:
    return AttentionTime(cache_type, 2048, 1, seconds, 1 << 20, error)


def part(name: str, repeats: int, seconds: float) -> Prediction:
    return Prediction(name, repeats, (), repeats * seconds, 0.0, "memory")


PARTS = [part("attention", 32, 9e-6), part("down (q4_k)", 24, 10e-6), part("down (q6_k)", 8, 14e-6)]


def found(folder: Path, cache: str = "balanced", weights: str = "bf16", batch: int = 1) -> dict[str, Pair]:
    runs, shape = runs_of("h200", [folder]), (LLAMA_8B, weights, CacheType.read(cache))
    return {pair.what: pair for pair in measured.pairs(runs, measured.times_of_step(*shape, 2048, batch, PARTS))}


def test_every_time_that_was_measured_has_its_prediction(tmp_path: Path) -> None:
    results(tmp_path / "gpu.json", step(6e-3), attention(12e-6), MatrixTime("bf16", "down", 1, 22e-6, 1 << 20))
    pairs = found(tmp_path)
    whole = 32 * 9e-6 + 24 * 10e-6 + 8 * 14e-6
    assert list(pairs) == [
        *("step, bf16, 2,048 × 1, without the host", "step, bf16, 2,048 × 1, with the host and encoding"),
        "step, bf16, 2,048 × 1, begun ahead, with encoding",
        *("attention of a layer, 2,048 × 1", "down, bf16, batch 1"),
    ]
    seconds = [value for pair in pairs.values() for value in (pair.predicted, pair.measured)]
    assert seconds == pytest.approx([whole, 5.4e-3, whole, 6e-3, whole, 5.7e-3, 9e-6, 12e-6, 11e-6, 22e-6])
    assert {pair.file for pair in pairs.values()} == {"gpu.json"}


def test_a_product_is_measured_with_the_rounding_of_its_x(tmp_path: Path) -> None:
    """From 3 rows on, also where a step has x rounded already."""
    rows = [MatrixTime("bf16", "down", batch, 22e-6, 1 << 20) for batch in (2, 16)]
    results(tmp_path / "gpu.json", *rows)
    few, many = (found(tmp_path, batch=batch)[f"down, bf16, batch {batch}"].predicted for batch in (2, 16))
    assert many - few == pytest.approx(cost.NARROW)


@pytest.mark.parametrize(
    ("row", "more"),
    [
        (step(6e-3, weights="q4_k_m"), {}),
        (step(6e-3, shortest=1024), {}),
        (step(6e-3, batch=2), {}),
        (step(6e-3, overlapped=True), {}),
        (step(6e-3), {"config": llama(layers=2)}),
        (step(6e-3), {"gpu": "NVIDIA A100-SXM4-80GB"}),
        (step(6e-3), {"kind": "gpu.predict"}),
        (attention(12e-6, "ring4/ring3.5:plain"), {}),
        (attention(12e-6, error=0.5), {}),
        (attention(12e-6), {"config": llama(heads=16)}),
        (MatrixTime("bf16", "down", 8, 22e-6, 1), {}),
        (MatrixTime("bf16", "down", 1, 22e-6, 1), {"config": llama(layers=2)}),
    ],
)
def test_measurements_of_something_else_do_not_count(tmp_path: Path, row: Row, more: Mapping[str, Any]) -> None:
    results(tmp_path / "gpu.json", row, **more)
    assert not found(tmp_path)


def test_overlapped_launches_and_prompts_have_predictions_of_their_own(tmp_path: Path) -> None:
    overlapped = step(3e-3, device=2.5e-3, overlapped=True)
    results(tmp_path / "gpu.json", overlapped, PrefillTime("bf16", 8192, 0.3, 1e14, 2e-3, 1e12))
    runs, shape = runs_of("h200", [tmp_path]), (LLAMA_8B, "bf16", CacheType.read("balanced"))
    times = [*measured.times_of_step(*shape, 2048, 1, PARTS, 4e-3)]
    times += measured.times_of_prompt(*shape, 8192, PARTS)
    whole = sum(part.seconds for part in PARTS)
    assert [(pair.what, pair.predicted, pair.measured) for pair in measured.pairs(runs, times)] == [
        ("step, bf16, 2,048 × 1, overlapped, without the host", 4e-3, 2.5e-3),
        ("prompt of 8,192, bf16, with encoding", pytest.approx(whole), 0.3),
        ("attention of a layer, prompt of 8,192", pytest.approx(9e-6), 2e-3),
    ]
    assert not list(measured.times_of_prompt(LLAMA_8B, "bf16", CacheType.read("f16"), 8192, PARTS))


def test_single_kernels_that_are_furthest_off_are_named() -> None:
    """As a ratio, in either direction; whole steps are no kernels."""
    of = [
        Pair("step", 1e-3, 9e-3, "a"),
        Pair("right", 1e-6, 1e-6, "a", ("gemv",)),
        Pair("slow", 1e-6, 1.5e-6, "a", ("gemv",)),
        Pair("fast", 4e-6, 2e-6, "a", ("narrow", "gemm_small")),
        Pair("near", 4e-6, 3.5e-6, "a", ("gemv",)),
    ]
    assert [pair.what for pair in measured.furthest_off(of, 3)] == ["fast", "slow", "near"]
    shown = predict.format_measured(MACHINES["h200"], [measured.Run("a", H200, "", {}, {})], of)
    assert shown.split("Furthest off, of single kernels:\n")[1].splitlines()[:2] == [
        "fast (narrow, gemm_small) takes 0.50 times as long as predicted",
        "slow (gemv) takes 1.50 times as long as predicted",
    ]


def test_attention_is_that_of_a_layer_whatever_the_other_sizes(tmp_path: Path) -> None:
    """And steps are measured with the default cache type alone."""
    results(tmp_path / "gpu.json", attention(12e-6), attention(15e-6, "f16"), config=llama(layers=2))
    results(tmp_path / "steps.json", step(6e-3))
    (pair,) = found(tmp_path, "f16").values()
    assert pair.measured == 15e-6
    assert "attention of a layer, 2,048 × 1" in found(tmp_path, weights="q4_k_m")


def test_the_newest_measurement_counts(tmp_path: Path) -> None:
    results(tmp_path / "a.json", step(5e-3), attention(12e-6), date="2026-12-03")
    results(tmp_path / "b.json", step(4e-3), date="2026-12-05")
    (tmp_path / "c.json").write_text('{"benchmark": "gpu", "cut o', encoding="utf-8")
    pairs = found(tmp_path)
    assert pairs["step, bf16, 2,048 × 1, with the host and encoding"].measured == 4e-3
    assert pairs["attention of a layer, 2,048 × 1"].file == "a.json"


@pytest.mark.parametrize(("name", "gpu"), [("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA A100 80GB PCIe", "a100")])
def test_a_gpu_is_found_by_its_name(tmp_path: Path, name: str, gpu: str) -> None:
    results(tmp_path / "gpu.json", step(4e-3), gpu=name)
    assert [run.gpu for run in runs_of(gpu, [tmp_path, tmp_path / "none"])] == [name]
    assert not runs_of("h200", [tmp_path])


def test_the_report_has_measured_times_beside_predicted_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "_compiled", lambda *given: (168, IDLE))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "LOCAL", tmp_path / "local")
    output = tmp_path / "predicted" / "predicted.json"
    output.parent.mkdir()
    assert predict.main(["--output", str(output)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Not measured: there are no results of NVIDIA H200")
    assert json.loads(output.read_text(encoding="utf-8"))["measured"] == []

    (tmp_path / "local").mkdir()
    results(tmp_path / "local" / "gpu.json", step(4e-3))
    assert predict.main(["--output", str(output)]) == 0
    *_, title, _, _, _, device, with_host, _ = capsys.readouterr().out.splitlines()
    assert title == "Measured on NVIDIA H200, next to the predictions"
    assert "step, bf16, 2,048 × 1, without the host" in device
    written = json.loads(output.read_text(encoding="utf-8"))
    predicted = written["steps"][0]["seconds"]
    cells = [cell.strip() for cell in with_host.strip("|").split("|")]
    assert cells[1:] == [f"{1e6 * predicted:,.1f}", "4,000.0", f"{4e-3 / predicted:.2f}", "gpu.json"]
    assert written["measured"][1] == {**asdict(Pair(cells[0], predicted, 4e-3, "gpu.json")), "kernels": []}

    assert predict.main(["--batch", "2", "--output", str(output)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Not measured: the results of NVIDIA H200 have none of these steps."
