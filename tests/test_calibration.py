"""Running a model for its statistics, and keeping them for the next time."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import model_loaders
from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading import calibration
from polarlm.engine.loading.calibration import LayerStatistics, calibrate, load_or_calibrate, text_ids
from polarlm.engine.model.fingerprint import fingerprint
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.layers.latent_attention import LatentAttentionWeights
from polarlm.engine.model.weights import load_weights
from polarlm.engine.quantization.statistics import smoothing
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.tokenizers import Tokenizer
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.bare import bare_model, feed, read_model
from tests.conftest import FIXTURES
from tests.model_loaders import vocabularies
from tests.pairs import mostly_slow
from tests.quantization.test_statistics import N, assert_close, reference

# Two windows; soft caps; sink scores; K/V that layers share; layers without K/V; latent attention.
SOME = [
    "qwen2_mixed_windows",
    "gemma2_capped_tied",
    "gpt_oss_mxfp4",
    "gemma4_shared_kv",
    "qwen3_next_shared_keys",
    "glm4_moe_lite",
    "kimi_linear_nope",
]


def read(name: str) -> tuple[ModelConfig, ModelWeights, list[int]]:
    """The model of a fixture, and ids that are not a number of whole blocks."""
    return *read_model(FIXTURES / name), np.load(FIXTURES / name / "reference.npz")["ids"].tolist()[:45]


def captured(config: ModelConfig, weights: ModelWeights, ids: list[int]) -> list[tuple]:
    """q (T, H, D), k (K, T, D), scale, window, soft cap and sink scores of each layer, from one call of attention."""
    model = bare_model(config, weights, block_size=len(ids) + 3)
    attention, calls = model.ops.attention, []

    def attend_and_capture(q, cache, spans, rule, *back):
        keys = cache.full(spans[0].current)[0][:, : len(ids)].copy()
        calls.append((q.copy(), keys, *rule[:4]))  # scale, window, softcap and sinks
        return attention(q, cache, spans, rule, *back)

    model.ops.attention = attend_and_capture
    feed(model, model.store.new_sequence(), ids)
    return calls


def output_of(layer: Any) -> np.ndarray:
    """The matrix (E, H·D) from results of a layer's attention to what it adds to the residual."""
    out, w = NumpyOps().rows(layer.mixer.out), layer.mixer
    if not isinstance(w, LatentAttentionWeights):
        return out
    rest = np.zeros((len(out), (w.kv_down.shape[0] - w.values.shape[1]) // 2), np.float32)  # of rotated channels
    values = np.split(NumpyOps().rows(w.values.parts[0]), w.values.count)
    parts = zip(np.split(out, w.values.count, axis=1), values, strict=True)
    halves = [half for of_head, value in parts for half in np.split(of_head @ value, 2, axis=1)]
    return np.concatenate([part for half in halves for part in (rest, half)], axis=1)


@mostly_slow("name", sorted(path.name for path in FIXTURES.iterdir()), SOME)
def test_statistics_are_those_of_the_models_queries_and_keys(name: str) -> None:
    config, weights, ids = read(name)
    statistics = calibrate(NumpyOps(), config, weights, ids, N)
    attentions = config.kv_attentions
    assert statistics.keys() == attentions.keys()
    outputs = [output_of(layer) if number in attentions else None for number, layer in enumerate(weights.layers)]
    calls = dict(zip(config.attentions, captured(config, weights, ids), strict=True))
    for number, attention in attentions.items():
        (q, k, *rule), one, output = calls[number], statistics[number], outputs[number]
        assert one.query_second.shape == (attention.kv_heads, attention.head_dim, attention.head_dim)
        # The forward pass of other parts has other last bits, which grow from layer to layer.
        assert_close(one, reference(q, k, output, *rule), rtol=1e-3)


@pytest.mark.parametrize(("name", "chunk"), [("qwen2_mixed_windows", 7), ("gemma4_shared_kv", 16)])
def test_chunks_do_not_change_statistics(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights, ids = read(name)
    whole = calibrate(NumpyOps(), config, weights, ids, N)
    monkeypatch.setattr(NumpyOps, "prefill_rows", chunk)
    for one, expected in zip(calibrate(NumpyOps(), config, weights, ids, N).values(), whole.values(), strict=True):
        assert_close(one, expected, rtol=1e-3)


def test_bars_show_the_bytes_of_the_file_and_the_share_of_the_fit(
    tiny_path: Path, cache: Path, bars: list[Any]
) -> None:
    with Engine.load(tiny_path, device="cpu", block_size=N, verbose=print) as engine:
        source = engine._parts.source.weights
    loading, fitting = bars[0], next(bar for bar in bars if bar.desc.startswith("Fitting the KV cache"))
    assert loading.n == loading.total == sum(2 * math.prod(source.shape(name)) for name in source.names())
    assert fitting.n == fitting.total > 0


# -- the text --------------------------------------------------------------------------------------------------------


@mostly_slow("name", vocabularies.REAL, ["qwen2-gguf", "llama2-json"])  # each takes half a second to read
def test_the_text_is_long_enough_for_every_tokenizer(name: str) -> None:
    tokenizer = vocabularies.real(name)
    ids = text_ids(tokenizer, calibration.TOKENS)
    assert len(ids) == calibration.TOKENS
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    assert ids[: len(start)] == start
    assert not set(ids[len(start) :]) & set(tokenizer.control_tokens().values())


def test_pieces_without_a_row_in_the_embedding_are_left_out(tmp_path: Path, tiny_path: Path) -> None:
    folder = shutil.copytree(tiny_path, tmp_path / "model")
    description = json.loads((folder / "tokenizer.json").read_text())
    for number, pair in enumerate(["to", "of", "al", "or", "is", "it", "ar", "es", "st", "ed", "ly"]):
        description["model"]["vocab"][pair] = 3_000_000 + number
        description["model"]["merges"].append([*pair])
    (folder / "tokenizer.json").write_text(json.dumps(description))
    said: list[str] = []
    with Engine.load(folder, device="cpu", block_size=N, verbose=said.append) as engine:
        assert max(text_ids(engine.model.tokenizer, 4096)) < engine.model.config.vocab_size
        assert engine.generate("it is", SamplingParams(max_tokens=2)).usage.prompt_tokens == 1  # the space
    (warning,) = (line for line in said if "no rows" in line)
    assert "for 2,999,915 of its tokenizer's ids (96, 97, 98, …)" in warning
    assert "is it this model's tokenizer?" in warning


# -- the file of statistics ------------------------------------------------------------------------------------------


@dataclass
class Setting:
    """Everything that the statistics depend on, for a small model."""

    config: ModelConfig
    weights: ModelWeights
    tokenizer: Tokenizer
    block_size: int = N

    def load(self, say: Callable[[str], None] = lambda sentence: None) -> list[LayerStatistics]:
        ids = text_ids(self.tokenizer, min(calibration.TOKENS, self.config.max_context))
        return load_or_calibrate(NumpyOps(), self.config, self.weights, ids, self.block_size, say)


@pytest.fixture
def setting(tiny_path: Path) -> Setting:
    source = model_loaders.load(tiny_path)
    weights = load_weights(NumpyOps(), source.config, source.weights)
    source.weights.close()
    return Setting(replace(source.config, max_context=40), weights, source.tokenizer)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of tokens of every calibration run."""
    counts: list[int] = []

    def count_and_calibrate(ops, config, weights, ids, *rest):
        counts.append(len(ids))
        return calibrate(ops, config, weights, ids, *rest)

    monkeypatch.setattr(calibration, "calibrate", count_and_calibrate)
    return counts


def assert_same(a: dict[int, LayerStatistics], b: dict[int, LayerStatistics]) -> None:
    for one, other in zip(a.values(), b.values(), strict=True):
        for name, values in vars(one).items():
            np.testing.assert_array_equal(getattr(other, name), values, strict=True)


def test_a_damaged_file_is_measured_again_and_replaced(setting: Setting, cache: Path, runs: list[int]) -> None:
    first = setting.load()
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert_same(setting.load(), first)
    assert_same(setting.load(), first)
    assert len(runs) == 2


def first_weight_bent(weights: ModelWeights) -> ModelWeights:
    (matrix,) = weights.layers[1].mixer.qkv.parts
    bent = matrix.data.copy()
    bent[0, 0] += 1
    qkv = Linear((replace(matrix, data=bent),))
    first, second = weights.layers
    return replace(weights, layers=[first, replace(second, mixer=replace(second.mixer, qkv=qkv))])


CHANGES: dict[str, Callable[[Setting], Setting]] = {
    "block size": lambda s: replace(s, block_size=4),
    "weights": lambda s: replace(s, weights=first_weight_bent(s.weights)),
    "config": lambda s: replace(s, config=replace(s.config, norm_eps=1e-3)),
    "tokens": lambda s: replace(s, config=replace(s.config, max_context=39)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_statistics_of_other_settings_are_not_used(setting: Setting, cache: Path, runs: list[int], change: str) -> None:
    """Each of both is measured once, and read from its own file when it is asked for again."""
    other, said = CHANGES[change](setting), list[str]()
    first, second = setting.load(said.append), other.load(said.append)
    assert_same(setting.load(said.append), first)
    assert_same(other.load(said.append), second)
    assert runs[0] == 40  # as many tokens as the context holds
    assert len(runs) == len(said) == len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("llama_mha", "811a0495fcc2721a475bb2da"),
        ("qwen3_qk_norm_tied", "2babb640bb51df191389d4be"),
    ],
)
def test_fingerprints_are_those_of_earlier_versions(name: str, digest: str) -> None:
    """Files of statistics and of sessions depend on the model's fingerprint."""
    config, weights = read_model(FIXTURES / name)
    assert fingerprint(NumpyOps(), config, weights).startswith(digest)


def test_a_context_of_less_than_two_blocks_gives_a_warning_and_neutral_statistics(
    setting: Setting, cache: Path, runs: list[int]
) -> None:
    said: list[str] = []
    short = replace(setting, config=replace(setting.config, max_context=2 * N - 1))
    statistics = short.load(said.append)
    assert len(statistics) == len(setting.config.layers)
    for one in statistics.values():
        np.testing.assert_array_equal(smoothing(one), np.ones_like(one.key_variance))
    assert len(said) == 1
    assert f"two blocks of {N}" in said[0]
    assert not runs
    assert not cache.exists()
