"""`bench.quality --arithmetic`: what compiled kernels cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine.loading.checks import settle

pytest.importorskip("llvmlite")

from polarlm.bench.quality.arithmetic import chunk_logits, step_logits

from polarlm.bench.quality import __main__ as quality
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading import assembly
from tests.random_model import random_model

IDS = np.random.default_rng(0).integers(5, 250, 160).tolist()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("prompt", [64, 80])
def test_rows_of_a_block_at_once_are_the_same_as_steps(model_path: Path, prompt: int) -> None:
    """But for their last bits, which give a few numbers another half, and then a few another code, in a full block."""
    settings = {"cache_type": "balanced", "calibration": False, "ctx_size": 256}
    parts = assembly.assemble(settle(model_path, None, settings), None, ops=NumpyOps(1))
    by_steps, by_chunks = (score(parts.model, IDS, prompt) for score in (step_logits, chunk_logits))
    parts.close()
    assert by_steps.shape == (len(IDS) - prompt, 262)
    np.testing.assert_allclose(by_steps[: 128 - prompt], by_chunks[: 128 - prompt], atol=2**-11)
    np.testing.assert_allclose(by_steps, by_chunks, atol=0.01)


@pytest.mark.slow
def test_the_command_measures_both_costs(model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("the cat and the hat in the end " * 20, encoding="utf-8")
    arguments = ["--weights", str(model_path), "--text", str(text), "--output", str(output), "--window", "224"]
    assert quality.main([*arguments, "--windows", "1", "--types", "f16,ring3", "--arithmetic"]) == 0
    found = json.loads(output.read_text(encoding="utf-8"))
    f16, coded = found["arithmetic"]
    assert found["complete"] is True
    assert 0 < f16["kl_between"] < 1e-6
    assert f16["kl_between"] < coded["kl_between"] < coded["kl_float32"] / 10
    for row in (f16, coded):
        assert row["kl_compiled"] == pytest.approx(row["kl_float32"], rel=0.2, abs=2e-8)
    assert capsys.readouterr().out.splitlines()[-1].startswith("| ring3")


def test_a_machine_without_kernels_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "polarlm.bench.quality.arithmetic.select",
        lambda device, threads, compiled: (NumpyOps(), "llvmlite is missing."),
    )
    assert quality.main(["--text", "none.txt", "--arithmetic"]) == 2
    assert "--arithmetic measures compiled kernels. llvmlite is missing." in capsys.readouterr().err
