"""auto:BITS: bits go where errors cost most, what is chosen is what lies in memory, and it is measured once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import model_loaders
from polarlm.bench.quality.divergence import compare
from polarlm.engine import Engine, EngineConfig, EngineError, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.engine.loading import assembly, calibration
from polarlm.engine.loading.auto import choosing, sensitivity
from polarlm.engine.loading.auto.allocation import allocate, types
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.fit import fit_device
from polarlm.engine.state.cache_types import by_layer, layer_codecs
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.cuda.emulated import open_device
from tests.server.http_server import serving
from tests.tiny import load_tiny, make_model

N = 16
BITS = 5.0  # of the tiny model's heads of 8 channels in blocks of 16, trellis3 takes 4 bits and ring5 6, and means 0.6
BACKENDS: dict[str, Callable[[], Ops]] = {
    "numpy": lambda: NumpyOps(1),
    "native": lambda: select("cpu", 1)[0],
    "cuda": lambda: CudaOps(open_device()),
}


@pytest.fixture(autouse=True)
def _nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, tuple[float, float]]]:
    """A list that gets what each measurement finds."""
    found: list[dict[int, tuple[float, float]]] = []

    def measure(*args: Any) -> dict[int, tuple[float, float]]:
        found.append(sensitivity.measure(*args))
        return found[-1]

    monkeypatch.setattr(choosing, "measure", measure)
    return found


def load(path: Path, bits: float = BITS, ops: Ops | None = None, **settings: Any) -> Engine:
    return load_tiny(path, ops=ops or NumpyOps(1), cache_type=f"auto:{bits:g}", block_size=N, ctx_size=128, **settings)


@pytest.mark.parametrize("budget", [3.0, 3.2, 3.5, 4.0, 5.0])
def test_no_other_choice_under_the_budget_costs_less(rng: np.random.Generator, budget: float) -> None:
    """Unless its bits are left over, since they are too few for the next step."""
    cost, bits = np.exp(rng.standard_normal(5)), np.tile([3.0, 3.5, 4.0, 5.0], (5, 1))
    chosen = allocate(cost, np.ones(5), bits, budget)
    taken = bits[0][chosen].mean()
    assert budget - 1 / 5 <= taken <= budget + 1e-6

    def total(steps: tuple[int, ...]) -> float:
        return float(cost @ 4.0 ** -bits[0][list(steps)])

    rivals = [one for one in itertools.product(range(4), repeat=5) if bits[0][list(one)].mean() <= taken]
    assert total(tuple(chosen)) == pytest.approx(min(map(total, rivals)))


def test_of_equal_layers_the_first_ones_get_more() -> None:
    chosen = allocate(np.ones(4), np.ones(4), np.tile([3.0, 3.5], (4, 1)), 3.25)
    assert chosen.tolist() == [1, 1, 0, 0]


def test_a_side_with_more_values_takes_more_of_the_budget() -> None:
    chosen = allocate(np.array([1.0, 1.0]), np.array([3.0, 1.0]), np.tile([3.0, 4.0], (2, 1)), 3.5)
    assert chosen.tolist() == [0, 1]


@pytest.mark.parametrize("names", [["ring3"], ["ring3", "ring4", "ring4", "ring3"], ["ring5", None, "ring4"]])
def test_the_setting_gives_each_layer_its_type(names: list[str | None]) -> None:
    config = EngineConfig(cache_type=f"{by_layer(names)}/{by_layer(names[::-1])}")
    found = layer_codecs(config, [64] * len(names))
    for (k, v), wanted_k, wanted_v in zip(found, names, names[::-1], strict=True):
        assert wanted_k in (None, k.name)
        assert wanted_v in (None, v.name)


def test_the_cost_is_the_divergence(rng: np.random.Generator) -> None:
    """To first order: against the sum over all tokens in float64."""
    exact = 3 * rng.standard_normal((50, 200)).astype(np.float32)
    near = exact + 0.01 * rng.standard_normal(exact.shape).astype(np.float32)
    assert sensitivity.divergence(exact, near) == pytest.approx(compare(exact, near).kl.mean(), rel=0.01)
    assert sensitivity.divergence(exact, exact + 1) == pytest.approx(0, abs=1e-9)  # the distributions are equal


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_what_is_chosen_lies_in_memory(
    tiny_path: Path, backend: str, measured: list[dict[int, tuple[float, float]]]
) -> None:
    _lies_in_memory(tiny_path, BACKENDS[backend], measured)


@pytest.mark.slow
def test_what_is_chosen_lies_in_the_memory_of_a_gpu(
    tiny_path: Path, measured: list[dict[int, tuple[float, float]]]
) -> None:
    _lies_in_memory(tiny_path, BACKENDS["cuda"], measured)


def _lies_in_memory(
    tiny_path: Path, backend: Callable[[], Ops], measured: list[dict[int, tuple[float, float]]]
) -> None:
    with load(tiny_path, ops=backend()) as engine:
        assert len(measured) == 1
        attentions = engine.model.config.kv_attentions
        named = types(BITS, attentions, len(attentions), N, measured[0])
        shape, store = engine.cache_shape, engine._store
        wanted = layer_codecs(EngineConfig(cache_type=named, block_size=N), [8] * len(attentions))
        for layer, pair in enumerate(wanted):
            format = store.cache(layer).format
            assert (
                (format.codec_k, format.codec_v) == pair == (shape.layers[layer].codec_k, shape.layers[layer].codec_v)
            )
        assert len({codec.name for pair in wanted for codec in pair}) > 1
        assert BITS - 0.5 <= engine.cache_stats().bits_per_value <= BITS
        own = engine.score([*range(5, 85)]).logprobs
    with load_tiny(tiny_path, ops=backend(), cache_type=named, block_size=N, ctx_size=128) as engine:
        assert np.array_equal(engine.score([*range(5, 85)]).logprobs, own)


def test_it_is_measured_once(tiny_path: Path, measured: list[Any]) -> None:
    said: list[str] = []
    settings = {"cache_type": "auto:5", "block_size": N, "ctx_size": 128}
    for _ in range(2):
        with Engine.load(tiny_path, device="cpu", verbose=said.append, **settings) as engine:
            chosen = [(one.codec_k.name, one.codec_v.name) for one in engine.cache_shape.kv_layers.values()]
    assert len(measured) == 1
    with load(tiny_path, bits=6) as other:  # other bits follow from the same measurement
        assert chosen != [(one.codec_k.name, one.codec_v.name) for one in other.cache_shape.kv_layers.values()]
    assert len(measured) == 1
    assert sum("what errors of each layer" in one for one in said) == 1
    line = engine._fit_line
    assert "as auto:5 (keys trellis" in line
    assert f"({engine.cache_shape.bits_per_value:.2f} bits/value)" in line


def test_weights_that_are_loaded_are_measured(tiny_path: Path, measured: list[Any]) -> None:
    """Another cache for them has types of its own."""
    plain = {"cache_type": "f16", "block_size": N, "ctx_size": 128}
    with closing(assembly.assemble(settle(tiny_path, None, plain), None, ops=NumpyOps(1))) as parts:
        other = assembly.with_cache(parts, settle(tiny_path, None, {**plain, "cache_type": "auto:5"}))
        assert len(measured) == 1
        assert other.model.weights is parts.model.weights
        with load(tiny_path) as engine:
            assert engine.cache_shape.layers == other.plan.shape.layers
    assert len(measured) == 1


def test_a_server_says_what_is_in_memory(tiny_path: Path) -> None:
    with load(tiny_path) as engine, serving(engine) as server:
        stats = server.http.get("/stats").json()
        build = server.http.get("/metrics").text
    pairs = [(one.codec_k.name, one.codec_v.name) for one in engine.cache_shape.kv_layers.values()]
    keys, values = by_layer([k for k, _ in pairs]), by_layer([v for _, v in pairs])
    assert (stats["cache_type_k"], stats["cache_type_v"]) == (keys, values)
    assert f'cache_type_k="{keys}",cache_type_v="{values}"' in build
    assert stats["cache_types"].startswith("auto:5 (keys trellis")
    for name, count in Counter(k for k, _ in pairs).items():
        assert f"{name} ×{count}" in stats["cache_types"].partition(";")[0]


def test_other_weights_are_measured_anew(tmp_path: Path, tiny_path: Path, measured: list[Any]) -> None:
    load(tiny_path).close()
    other = tmp_path / "other"
    other.mkdir()
    load(make_model(other, "llama_mha")).close()
    assert len(measured) == 2


@pytest.mark.parametrize("fixture", ["qwen2_mixed_windows", "gemma4_shared_kv", "lfm2_tied", "qwen3_5_tied"])
def test_models_of_all_kinds_of_layers(tmp_path: Path, fixture: str) -> None:
    with load(make_model(tmp_path, fixture), bits=4.6) as engine:
        assert engine.cache_shape.bits_per_value <= 4.6
        assert len(engine.score([*range(5, 85)]).logprobs) == 79


def test_a_layer_whose_attention_has_no_output_costs_nothing(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the layers alone cost what they do in the whole model."""
    settings = {"cache_type": "f16", "block_size": N, "ctx_size": 256, "kept_sequences": 0}
    with closing(assembly.assemble(settle(tiny_path, None, settings), None, ops=NumpyOps(1))) as parts:
        ops, config, weights = parts.model.ops, parts.model.config, parts.model.weights
        ids = np.random.default_rng(5).integers(5, 90, 128).tolist()
        fitted = calibration.calibrate(ops, config, weights, ids, N)
        cut = sensitivity.measure(ops, config, weights, ids, N, fitted)
        assert sum(map(sum, cut.values())) == pytest.approx(2)  # shares, of both scorings
        assert min(map(min, cut.values())) > 0.01
        with monkeypatch.context() as patch:
            patch.setattr(sensitivity._Sides, "can_be_cut", False)
            whole = sensitivity.measure(ops, config, weights, ids, N, fitted)
        assert [*cut.values()] == [pytest.approx(one, rel=1e-3) for one in whole.values()]
        out = weights.layers[0].mixer.out
        out.parts[0].data[...] = 0
        found = sensitivity.measure(ops, config, weights, ids, N, fitted)
        assert found[0] == (0, 0)
        assert sum(found[1]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cache_type": "auto:"}, "give the bits per value, as in auto:3.5"),
        ({"cache_type": "auto:many"}, "give the bits per value, as in auto:3.5"),
        ({"cache_type": "auto:5", "cache_type_v": "ring3"}, "leave cache_type_v out"),
        ({"cache_type": "auto:5", "calibration": False}, "which calibration=False leaves out"),
        ({"cache_type": "auto:5", "key_conditioning": False}, "which key_conditioning=False leaves out"),
        ({"cache_type": "auto:2"}, "trellis3 to ring5 take 4."),
        ({"cache_type": "auto:9"}, "trellis3 to ring5 take 4."),
        ({"cache_type": "auto:5", "block_size": 128}, "measuring takes 3 blocks of 128 tokens"),
        ({"cache_type": "auto:5/ring3"}, "give the bits per value"),
        ({"cache_type_k": "auto:5"}, "there is no such type"),
    ],
)
def test_what_cannot_be_chosen_is_refused(tiny_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        Engine.load(tiny_path, device="cpu", **settings)


def test_sizes_are_known_before_it_is_measured(tiny_path: Path) -> None:
    ops = NumpyOps(1)
    config = settle(tiny_path, None, {"block_size": N})
    model, source, _ = model_loaders.load_weights(str(tiny_path))
    with closing(source):
        fit = fit_device(config, "cpu", ops, model, source, ("auto:5",)).weights[0].cache("auto:5")
    with load(tiny_path, ops=NumpyOps(1)) as engine:
        # A step of half a bit of a side, of the four that this model has.
        assert fit.bits_per_value == pytest.approx(engine.cache_shape.bits_per_value, abs=0.25)
    assert not fit.problem
    assert fit.bits_per_value <= 5


def test_a_session_says_which_layers_differ(tiny_path: Path, tmp_path: Path) -> None:
    """Files that were made with another assignment are refused, also if it has the same types."""
    saved = tmp_path / "saved"
    with load_tiny(tiny_path, cache_type="ring3,ring4@1/ring3", block_size=N) as engine:
        engine.generate([*range(5, 85)], SamplingParams(max_tokens=2))
        engine.save_session(saved)
    with (
        load_tiny(tiny_path, cache_type="ring4,ring3@1/ring3", block_size=N) as engine,
        pytest.raises(EngineError) as raised,
    ):
        engine.load_session(saved)
    assert "types ring3,ring4@1/ring3 (keys/values), and this engine has ring3,ring4@0/ring3" in str(raised.value)
