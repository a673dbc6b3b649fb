"""Types for each layer: sensitivities are those of an engine with such types, and bits go where they save most."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.bench.quality import layer_types
from polarlm.bench.quality.layer_types import bits_of, cache_type, chosen, errors, sensitivities
from polarlm.bench.quality.states import divergence, exact_states, served_states
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading.assembly import assemble, with_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.state import cache_types

IDS = np.random.default_rng(3).integers(5, 90, 256).tolist()
SETTINGS = {"ctx_size": len(IDS), "kept_sequences": 0, "parallel": 1}
TYPES = ["ring3", "ring3.5", "ring4", "ring5"]


def test_sensitivities_are_those_of_an_engine_that_has_one_such_layer(tiny_path: Path) -> None:
    """Every token coded. The engine has other layers in half precision, which costs a thousandth of what codes do."""
    parts = assemble(settle(tiny_path, None, {**SETTINGS, "cache_type": "ring3"}), None, ops=NumpyOps(1))
    try:
        found = sensitivities(parts, [IDS])
        assert list(found) == [(layer, side) for layer in parts.plan.shape.kv_layers for side in "kv"]
        for (layer, side), kl in found.items():
            one = {"cache_type_k": "f16", "cache_type_v": "f16", f"cache_type_{side}": f"f16,ring3@{layer}"}
            model = with_cache(parts, settle(None, None, {**SETTINGS, **one})).model
            exact, coded = exact_states(parts.model, IDS), served_states(model, IDS, every_token_coded=True)
            assert kl == pytest.approx(divergence(parts.model, exact, coded).kl.mean(), rel=0.05), (layer, side)
            assert kl > 1e-6
    finally:
        parts.close()


def test_more_bits_have_a_smaller_error() -> None:
    found = errors(TYPES, 64, 64)
    assert found[0] == 1
    # The mean squared errors of rings on vectors of 128 values are in the head of `engine.codecs.ring`.
    assert found == pytest.approx([1, 0.0151 / 0.0292, 0.0077 / 0.0292, 0.002 / 0.0292], rel=0.05)


def test_bits_go_where_they_save_most() -> None:
    sides = {(0, "k"): 100.0, (0, "v"): 1.0, (1, "k"): 1.0, (1, "v"): 10.0}
    found = chosen(sides, [1, 0.5, 0.25], [3, 3.5, 4], 3.375)
    assert found == {(0, "k"): 2, (0, "v"): 0, (1, "k"): 0, (1, "v"): 1}
    assert set(chosen(sides, [1, 0.5, 0.25], [3, 3.5, 4], 3).values()) == {0}
    assert set(chosen(sides, [1, 0.5, 0.25], [3, 3.5, 4], 9).values()) == {2}
    with pytest.raises(FlagError, match=r"the first type takes 3\.000 bits/value"):
        chosen(sides, [1, 0.5, 0.25], [3, 3.5, 4], 2.9)


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=12), st.floats(3, 5.2))
def test_the_budget_is_kept_and_nothing_fits_besides(costs: list[float], budget: float) -> None:
    bits = [3.0, 3.5, 4.0, 5.0]
    types = chosen({(i, "k"): cost for i, cost in enumerate(costs)}, [1, 0.5, 0.25, 0.1], bits, budget)
    spent = sum(bits[index] for index in types.values())
    assert spent <= budget * len(costs) + 1e-6
    assert all(index == 3 or spent + bits[index + 1] - bits[index] > budget * len(costs) for index in types.values())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9))
def test_the_setting_gives_every_layer_its_types(layers: list[tuple[int, int]]) -> None:
    text = cache_type(TYPES, {(i, side): both["kv".index(side)] for i, both in enumerate(layers) for side in "kv"})
    read = cache_types.layer_codecs(settle(None, None, {"cache_type": text}), [64] * len(layers))
    assert [(k.name, v.name) for k, v in read] == [(TYPES[k], TYPES[v]) for k, v in layers]


def test_the_command_prints_a_setting_within_the_budget(tiny_path: Path, tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the rain in the north and the other inn on the hill\n" * 40, encoding="utf-8")
    given = ["--weights", str(tiny_path), "--text", str(text), "--first-window", "0", "--window", "192"]
    assert layer_types.main([*given, "--bits", "4.2"]) == 0
    flag, setting = capsys.readouterr().out.splitlines()[-1].split()
    assert flag == "--cache-type"
    parts = assemble(settle(tiny_path, None, {**SETTINGS, "cache_type": setting}), None, ops=NumpyOps(1))
    shape = parts.plan.shape
    parts.close()
    step = max(np.diff(bits_of(TYPES, next(iter(shape.kv_layers.values())), shape.block_size))) / len(shape.kv_layers)
    assert 4.2 - step <= shape.bits_per_value <= 4.2 + 1e-9


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--text is missing"),
        (["--text", "none.txt"], "none.txt cannot be read"),
        (["--text", "short.txt"], "is too short for these windows"),
        (["--text", "text.txt", "--bits", "2"], "--bits: the first type takes"),
        (["--text", "text.txt", "--types", "ring3,int9"], "There is no cache type 'int9'"),
    ],
)
def test_wrong_input_is_answered_with_a_sentence(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, flags: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("abcde", encoding="utf-8")
    Path("text.txt").write_text("the rain in the north\n" * 60, encoding="utf-8")
    shape = ["--weights", str(tiny_path), "--first-window", "0", "--window", "192"]
    assert layer_types.main([*shape, *flags]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
