"""Cache types by layer: bits go where they save most, and the command measures what the codes of a side cost."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.command import CacheType, cache_types
from polarlm.bench.quality import allocation
from polarlm.bench.quality.allocation import allocate, by_layer, costs
from polarlm.bench.quality.coded_prompt import whole_store
from polarlm.engine import EngineConfig
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.state.cache_types import layer_codecs

STEPS = [3.0, 3.5, 4.0]


@pytest.mark.parametrize("budget", [3.0, 3.2, 3.5, 4.0])
def test_no_other_choice_under_the_budget_costs_less(rng: np.random.Generator, budget: float) -> None:
    """Greedy steps are the best ones, since each half bit more saves less than the one before."""
    cost = np.exp(rng.standard_normal((5, 1)))
    chosen = allocate(cost, STEPS, budget)

    def total(steps: np.ndarray) -> float:
        return float((cost.ravel() * 4.0 ** -np.array(STEPS)[steps]).sum())

    every = (np.array(one) for one in itertools.product(range(len(STEPS)), repeat=cost.size))
    assert total(chosen.ravel()) == pytest.approx(min(total(one) for one in every if _mean(one) <= budget + 1e-9))
    assert _mean(chosen.ravel()) <= budget + 1e-9


def _mean(steps: np.ndarray) -> float:
    return float(np.array(STEPS)[steps].mean())


@pytest.mark.parametrize("names", [["ring3"], ["ring3", "ring4", "ring4", "ring3"], ["ring5", "ring3", "ring4"]])
def test_the_setting_gives_each_layer_its_type(names: list[str]) -> None:
    config = EngineConfig(cache_type_k=by_layer(names), cache_type_v=by_layer(names[::-1]))
    found = layer_codecs(config, [64] * len(names))
    assert [(k.name, v.name) for k, v in found] == list(zip(names, names[::-1], strict=True))
    (read,) = cache_types(f"{config.cache_type_k}/{config.cache_type_v}", by_layer=True)
    assert isinstance(read, CacheType)
    assert (read.key, read.value) == (config.cache_type_k, config.cache_type_v)


def test_exact_keys_cost_nothing(tiny_path: Path) -> None:
    """Only the side that is read as codes differs from full precision."""
    ids = np.random.default_rng(5).integers(5, 90, 256).tolist()
    settings = {"ctx_size": 256, "kept_sequences": 0, "parallel": 1, "cache_type": "f16/ring3.5"}
    parts = assemble(settle(tiny_path, None, settings), None, ops=NumpyOps(1))
    try:
        found = costs(parts.model, whole_store(parts.model, settings), [ids])
    finally:
        parts.close()
    assert found.shape == (1, len(parts.model.config.layers), 2)
    assert found[..., 0].max() < 1e-6
    assert found[..., 1].min() > 1e-5


def test_the_command(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("the rain in the north and the other inn on the hill\n" * 60, encoding="utf-8")
    flags = ["--text", str(text), "--weights", str(tiny_path), "--window", "256", "--output", str(output)]
    assert allocation.main([*flags, "--windows", "2", "--bits", "6"]) == 0
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["bits_per_value"] <= 6
    assert f"--cache-type-k {found['cache_type_k']}" in capsys.readouterr().out
    assert allocation.main([*flags, "--windows", "99", "--bits", "6"]) == 2
    assert "is too short for 99 windows of 256" in capsys.readouterr().err
    assert allocation.main([*flags, "--bits", "1"]) == 2
    assert "the bits of ring3" in capsys.readouterr().err
