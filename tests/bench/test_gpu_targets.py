"""What the compiled kernels are predicted to reach on an H200, and what the README says of it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from polarlm.bench.command import CacheType
from polarlm.bench.gpu.cards import MACHINES
from polarlm.bench.gpu.cost import Prediction, overlapped, predict
from polarlm.bench.gpu.parts import step_parts
from polarlm.bench.gpu.shapes import LLAMA_8B
from tests.bench.test_gpu_sass import skip_without_the_recorded_compiler

H200 = MACHINES["h200"]
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
US = 1e-6


@pytest.fixture(autouse=True)
def _can_predict() -> None:
    skip_without_the_recorded_compiler()


def predicted(weights: str, cache: str, context: int, batch: int, only: str = "") -> list[Prediction]:
    """The parts of a step, or one of them."""
    sizes = H200.processors, H200.shared_memory
    parts = step_parts(LLAMA_8B, weights, CacheType.read(cache), context, batch, *sizes)
    return predict([part for part in parts if only in ("", part.name)], H200, LLAMA_8B)


def attention(cache: str, context: int, batch: int) -> float:
    """Seconds of a layer."""
    (part,) = predicted("bf16", cache, context, batch, "attention")
    return part.seconds / part.repeats


@pytest.mark.slow
def test_a_step_with_4_bit_weights_takes_as_long_as_the_readme_says() -> None:
    parts = predicted("q4_k_m", "balanced", 2048, 1)
    seconds, floor = sum(part.seconds for part in parts), sum(part.floor for part in parts)
    assert seconds <= 2.5e-3
    text = " ".join(README.read_text(encoding="utf-8").split())
    said = re.search(
        r"`python -m polarlm.bench.gpu.predict --weights q4_k_m` .* says (\S+) ms for a step of an 8B model at 2,048 "
        r"tokens on an H200; (\S+) ms of that is memory traffic",
        text,
    )
    assert said.groups() == (f"{1e3 * seconds:.1f}", f"{1e3 * floor:.1f}")


def measured_attention(gpu: str) -> dict[tuple[int, int], dict[str, float]]:
    """(Context, batch) → cache type, or "peer" for the best kernel of others → µs."""
    (file,) = (ROOT / "bench" / "results").glob(f"gpu-nvidia-{gpu}-*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in (*found["attention_peers"], *found["attention"]):
        if row["seconds"]:
            name = row.get("cache_type", "peer")
            own = times.setdefault((row["context"], row["batch"]), {})
            own[name] = min(own.get(name, math.inf), 1e6 * row["seconds"])
    return times


def test_the_readme_s_attention_is_what_was_measured() -> None:
    h100, h200 = measured_attention("h100"), measured_attention("h200")
    rows = re.findall(
        r"^\| +([\d,]+) × (\d+) \|" + r" +([\d.,]+) \|" * 5 + "$", README.read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) == 6
    for context, batch, *shown in rows:
        place = int(context.replace(",", "")), int(batch)
        own = h100[place]
        times = [own[name] for name in ("peer", "f16", "ring4/ring3.5")]
        ratios = [min(one["peer"], one["f16"]) / one["ring4/ring3.5"] for one in (own, h200[place])]
        assert shown == [*(f"{x:,.1f}" for x in times), *(f"{x:.2f}" for x in ratios)]


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "in_turn", "together"), [(1, 0.76, 0.79), (8, 0.57, 0.60), (16, 0.57, 0.59)])
def test_a_step_in_bfloat16_takes_little_longer_than_reading_its_bytes(
    batch: int, in_turn: float, together: float
) -> None:
    """Shares of the byte floor, with launches in turn and with overlapped ones."""
    parts = predicted("bf16", "balanced", 2048, batch)
    floor, best = sum(part.floor for part in parts), overlapped(parts, H200)
    assert best is not None
    assert floor / sum(part.seconds for part in parts) >= in_turn
    assert floor / best >= together


def test_attention_takes_little_longer_than_reading_the_bytes() -> None:
    """13 µs of them are its beginning and its end."""
    assert attention("balanced", 32768, 1) <= 23 * US
    assert attention("balanced", 131072, 1) <= 51 * US
    assert attention("balanced", 32768, 16) <= 164 * US


@pytest.mark.slow
def test_attention_over_polarquant_is_much_faster_than_over_f16() -> None:
    assert attention("f16", 131072, 1) >= 2.3 * attention("polarquant", 131072, 1)
