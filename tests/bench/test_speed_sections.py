"""The sections of the speed measurement beside the comparison: drafts, embeddings, experts; and ready memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from polarlm.bench.gpu.products import MATRICES, shape_of
from polarlm.bench.gpu.shapes import SHAPES
from polarlm.bench.result import Result, read
from polarlm.bench.speed import drafts, embeddings, starts
from polarlm.bench.speed.__main__ import main
from polarlm.bench.speed.drafts import Offer, Replay, offers
from polarlm.bench.speed.parts import KINDS, REST, WHOLE, kind_of
from polarlm.engine.backends.cuda.device.kernel_source import folder
from scripts.make_random_model import write
from tests.cuda_emulator.build import kernel_names
from tests.random_model import TINY, random_model
from tests.tiny import make_model

GIB = 1 << 30


def measured(tmp_path: Path, weights: Path, *flags: str) -> Result:
    output = tmp_path / "result.json"
    assert main(["--weights", str(weights), "--output", str(output), *flags]) == 0
    result = read(output)
    assert "polarlm speed --weights " in result["command"]
    return result


class Embedder:
    """A stand-in for llama.cpp's process."""

    def __init__(self, module: str, python: str) -> None:
        assert module == "polarlm.bench.speed.peers.llama_cpp_python"

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "start":
            self._batch = arguments[1]
        return {"seconds": float(self._batch), "first": [1.0, *[0.0] * 383], "version": "1"}

    def close(self) -> None:
        pass


def test_offers_are_what_prompt_lookup_finds() -> None:
    prompt, answer = [1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 3, 4, 8]
    drafted = offers(prompt, answer, 2, 10)
    assert [offer.right for offer in drafted] == [0, 0, 0, 2, 1, 0]  # after 1 2 come 3 and 4, and then 5 instead of 8
    assert [offer.tokens > 0 for offer in drafted] == [False, False, False, True, True, True]


def test_a_replay_is_right_where_it_was_offered() -> None:
    replay = Replay(2, [5, 6, 7, 8], [Offer(0, 0), Offer(3, 2), Offer(2, 0)], 10)
    assert replay.draft([1, 1], 3) == []
    assert replay.draft([1, 1, 5], 15) == [6, 7, 9]
    assert replay.draft([1, 1, 5], 1) == [6]
    assert replay.draft([1, 1, 5, 6], 15) == [8, 9]
    assert replay.draft([1, 1, 5, 6, 7], 15) == []


def test_answers_with_and_without_drafts_are_measured_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drafts, "BEGINNINGS", {"copy": "the sea the sea the sea", "prose": "the end"})
    flags = ["--only", "drafts", "--tokens", "12", "--repeat", "1", "--threads", "1"]
    tasks = {task: figures for task, _, figures in measured(tmp_path, random_model(tmp_path), *flags).parts()}
    assert [*tasks] == ["copy", "prose"]
    for row in tasks.values():
        assert row["accepted"].value <= row["offered"].value
        assert len(row["plain"].runs) == len(row["drafted"].runs) == 1
        assert min(row[name].value for name in ("plain", "drafted", "ratio")) > 0
    printed = capsys.readouterr()
    assert "| copy " in printed.out
    assert "differs" not in printed.err


def test_the_parts_of_a_prompt_are_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llvmlite")
    flags = ["--parts", "--device", "cpu", "--threads", "1", "--prompt", "40,200", "--repeat", "1"]
    result = measured(tmp_path, random_model(tmp_path), *flags)
    shapes, layers = {name: math.prod(shape_of(TINY, name)) for name in MATRICES}, len(TINY.layers)
    for length in (40, 200):
        parts = {part: figures for part, who, figures in result.parts() if who == str(length)}
        seconds = {part: figures["seconds"].value for part, figures in parts.items()}
        assert min(taken for part, taken in seconds.items() if part != REST) > 0  # the rest is a difference of two runs
        assert sum(seconds.values()) == pytest.approx(2 * seconds[WHOLE])
        assert {part.partition(":")[0] for part in parts} <= {*KINDS, REST, WHOLE}
        work = sum(row["rate"].value * row["seconds"].value for row in parts.values() if "rate" in row)
        *others, head = [*shapes.values(), TINY.vocab_size * TINY.hidden_size]
        rows = length * (layers - 1) + 1  # of the last layer only the last row is needed behind keys and values
        assert work == pytest.approx(shapes["qkv"] * length * layers + sum(others[1:]) * rows + head)
    assert "| products: q8_0 512 × 256 " in capsys.readouterr().out


def test_a_kernel_without_a_kind_is_a_part_by_its_name() -> None:
    assert kind_of("later_64") == "later_64"
    kernels = [name for file in folder().rglob("*.cu") for name in kernel_names(file.read_text(encoding="utf-8"))]
    assert {kind_of(kernel) for kernel in kernels} <= {*KINDS}
    assert (kind_of("dequantize_kernel"), kind_of("dequantize_q8_0")) == ("weights of products", "embedding")


@pytest.mark.slow
def test_texts_of_an_encoder_are_measured_beside_batches_of_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow: it writes an encoder. A batch of n tokens takes llama.cpp n seconds here."""
    path = tmp_path / "minilm.gguf"
    write(path, "minilm-l6", SHAPES["minilm-l6"], "q8_0", None)
    monkeypatch.setattr(embeddings, "Child", Embedder)
    result = measured(tmp_path, path, "--only", "embeddings", "--tokens", "256", "--repeat", "2")
    fixed, mixed = "Q8_0, texts of 32 tokens", "Q8_0, texts of 8 to 128 tokens"
    for size in (128, 256, 512, 1024):
        assert result.figures(fixed, str(size))["tokens/s"].runs == (256 / size,) * 2
    ours = result.figures(fixed, "polarlm")["tokens/s"]
    assert (ours.more["tokens"], len(ours.runs)) == (256, 2)
    assert 8 * 4 <= result.figures(mixed, "polarlm")["tokens/s"].more["tokens"] <= 128 * 4
    assert abs(result.value(fixed, "polarlm", "cosine")) < 0.9  # to the stand-in's vector
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    (row,) = [row for row in rows if row[1:3] == ["Q8_0", "32 tokens"]]
    assert row[3:6] == [f"{max(ours.runs):,.0f}", "0", "2 (128)"]


def test_each_size_of_the_expert_cache_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llvmlite")
    flags = ["--only", "experts", "--expert-cache", "all,50K", "--tokens", "5", "--repeat", "1", "-t", "1"]
    result = measured(tmp_path, make_model(tmp_path, "mixtral_window"), *flags)
    every, some = (figures for _, _, figures in result.parts())
    assert every["tokens/s"].value > 0
    assert "hits" not in every
    assert 0 < some["hits"].value < 1
    assert some["read"].value > 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (line for line in lines if line.startswith("| --expert-cache "))
    assert "| all " in " ".join(first.split())
    assert " tokens/s" in second


def test_what_is_made_ready_is_what_a_start_may_need_and_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB of weights need half as much again and half a GiB. The file stays in memory, and a GiB stays free."""
    for available, size in ((32, 6.5), (8, 3), (4, 0)):  # GiB
        monkeypatch.setattr(starts.host_memory, "available", lambda available=available: available * GIB)
        assert starts.memory_of_a_start(4 * GIB) == size * GIB
