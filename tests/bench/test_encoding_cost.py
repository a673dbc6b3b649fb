"""What each part of encoding costs compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llvmlite")

from polarlm.bench.quality.encoding_cost import LEAST, measure_costs
from polarlm.bench.quality.reference import Reference

from polarlm.bench.quality import __main__ as quality
from polarlm.bench.quality import encoding_cost
from polarlm.bench.quality.types import chosen_types
from polarlm.engine.backends.native.ops import NativeOps


@pytest.mark.slow
def test_only_means_change_what_is_read(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops over codes are the same, and attention has other instructions for means of 16 bits alone."""
    monkeypatch.setattr(encoding_cost, "_ROUNDS", 1)
    parts = "encoded well", "without smoothing", "without small means"
    types = [one for one in chosen_types(None, "ring3", key_conditioning=True) if one.label[6:] in parts]
    ops = NativeOps(1)
    encode = ops.encode_blocks
    with Reference(str(tiny_path), LEAST) as reference:
        costs = {one.type: one for one in measure_costs(reference, types, [5 + i % 90 for i in range(LEAST)], ops)}
    assert [*costs] == [one.label for one in types]
    assert all(one.microseconds > 0 for one in costs.values())
    assert len({(one.keys, one.values) for one in costs.values()}) == 1
    whole, others, of_16_bits = (one.kernel for one in costs.values())
    assert whole == others != of_16_bits
    assert ops.encode_blocks == encode


@pytest.mark.parametrize(
    ("has_kernels", "tokens", "said"), [(False, LEAST, "compiled kernels"), (True, 8, "192 tokens")]
)
def test_nothing_is_measured_without_kernels_or_blocks(
    has_kernels: bool, tokens: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_kernels:
        monkeypatch.setattr(quality, "select", lambda *given, **more: (quality.NumpyOps(1), "They are missing."))
    types = chosen_types(None, "ring3", key_conditioning=True)
    assert quality._encoding_costs(None, types, [1] * tokens) == []  # type: ignore[arg-type]
    assert said in capsys.readouterr().err
