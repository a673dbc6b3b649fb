"""`bench.quality --weight-types`: what converting weights costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from polarlm.bench.quality.reference import Reference
from polarlm.bench.quality.weight_types import bits_per_weight, chosen_weight_types, measure_weights

from polarlm.bench.quality import __main__ as quality
from polarlm.bench.quality import weight_types
from polarlm.model_loaders import load_weights
from tests.model_loaders.checkpoints import quantized_model

STORY = "once upon a time there was a cat on the mat and then the rain began and the cat went in again " * 6


def run(model: Path, folder: Path, *flags: str) -> int:
    text = folder / "story.txt"
    text.write_text(STORY, encoding="utf-8")
    paths = ["--weights", str(model), "--text", str(text), "--output", str(folder / "out.json")]
    return quality.main([*paths, "--window", "100", *flags])


def test_coarser_weights_cost_more(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["as-stored", "f16", "q8_0", "q5_0", "q4_0"]
    assert run(tiny_path, tmp_path, "--windows", "2", "--weight-types", ",".join(names)) == 0
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["complete"] is True
    assert (found["windows"], found["scored_tokens"], found["stored_bits"]) == (2, 198, 16)
    rows = found["weight_rows"]
    assert [row["type"] for row in rows] == names
    for row in rows[:2]:  # the file's type is f16
        assert (row["kl_mean"], row["perplexity"], row["same_top1"]) == (0, found["exact_perplexity"], 1)
    assert 0 < rows[2]["kl_mean"] < rows[3]["kl_mean"] < rows[4]["kl_mean"]
    assert [row["bits_per_weight"] for row in rows] == sorted([row["bits_per_weight"] for row in rows], reverse=True)
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-6].startswith("| as stored (F16) |")
    assert "q4_0: " in printed.err


def test_bits_count_every_matrix_in_the_format_that_it_gets(tiny_path: Path, tmp_path: Path) -> None:
    """Rows of 48 values are not whole blocks, those of 64 are."""
    _, source, _ = load_weights(tiny_path)
    shapes = [source.shape(name) for name in source.names() if len(source.shape(name)) > 1]
    counts = {width: sum(rows for rows, columns in shapes if columns == width) * width for width in (48, 64)}
    wanted = (16 * counts[48] + 4.5 * counts[64]) / (counts[48] + counts[64])
    assert bits_per_weight(source, "q4_0") == pytest.approx(wanted)
    source.close()
    quantized_model(tmp_path / "model.gguf", "IQ2_XS")
    _, source, _ = load_weights(tmp_path / "model.gguf")
    assert bits_per_weight(source, "as-stored") == 8 * 74 / 256
    assert bits_per_weight(source, "q8_0") == 8.5
    source.close()


def test_figures_do_not_depend_on_whether_logits_are_kept(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = [list(range(5, 60)), list(range(20, 80))]
    with Reference(str(tiny_path), 64) as reference:
        kept = measure_weights(reference, ["q4_0"], cut)
        monkeypatch.setattr("polarlm.bench.quality.scores._KEPT_LOGITS", 0)
        assert measure_weights(reference, ["q4_0"], cut) == kept


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--weight-types", "q8_0,q4_k"], "--weight-types q4_k: the package gguf reads this type but cannot make it"),
        (["--weight-types", "q8_0,"], "--weight-types : there is no such type; choose from as-stored, "),
        (["--weight-types", "q8_0", "--types", "f16"], "--weight-types measures weights alone; leave --types, "),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    flags: list[str], sentence: str, tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_path, tmp_path, *flags) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {sentence}")


def test_types_are_measured_once() -> None:
    assert chosen_weight_types("q8_0, BF16,q8_0") == ["q8_0", "bf16"]


def test_figures_are_kept_when_the_command_is_stopped(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, compared = weight_types.compare, []

    def stopped_at_the_second(*logits):
        if compared:
            raise KeyboardInterrupt
        compared.append(logits)
        return compare(*logits)

    monkeypatch.setattr(weight_types, "compare", stopped_at_the_second)
    assert run(tiny_path, tmp_path, "--windows", "1", "--weight-types", "q8_0,q4_0") == 130
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["type"] for row in found["weight_rows"]] == ["q8_0"]
    assert found["complete"] is False
