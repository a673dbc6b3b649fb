"""Attention errors of each layer, which do not depend on other layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from polarlm.bench.quality.attention_error import Recorder, Recording, Replay
from polarlm.bench.quality.reference import Change, Reference

from polarlm.engine import Engine
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading import assembly
from polarlm.engine.model.forward import Transformer
from tests.tiny import make_model
from tests.weights import linear

IDS = [1, *np.random.default_rng(0).integers(5, 96, 199).tolist()]
POLAR = {"cache_type_k": "polarquant", "cache_type_v": "polarquant"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Reference(str(make_model(tmp_path_factory.mktemp("model"))), len(IDS)) as reference:
        yield reference


@pytest.fixture(scope="module")
def recording(reference: Reference) -> Recording:
    return reference.record(IDS)


def errors(reference: Reference, recording: Recording, *changes: Change, **settings: object) -> list[float]:
    replay = Replay()
    with reference.open(replay.install, *changes, ctx_size=len(IDS), block_size=16, **settings) as engine:
        return replay.errors(engine, IDS, recording, every_token_coded=True)


def test_every_engine_of_a_measurement_computes_in_float32(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the machine's own backend rounds activations."""

    def rounds(device: str, threads: int) -> None:
        pytest.fail("the machine's backend is used")

    monkeypatch.setattr(assembly, "select", rounds)
    with Reference(str(reference.model.path), len(IDS)) as again:
        np.testing.assert_array_equal(again.score(IDS).logits, reference.score(IDS).logits)
        again.open(cache_type="polarquant", ctx_size=len(IDS)).close()
        again.open_exact(weight_type="f16").close()


def test_a_recording_has_every_row_of_every_layer(reference: Reference, recording: Recording) -> None:
    config = reference.model.config
    for of_layers, width in (
        (recording.inputs, (config.hidden_size,)),
        (recording.outputs, (config.attention.heads * config.attention.head_dim,)),
        (recording.keys, (config.attention.kv_heads, config.attention.head_dim)),
    ):
        assert [x.shape for x in of_layers] == [(len(IDS), *width)] * len(config.layers)


def test_the_error_of_half_precision_is_its_rounding(reference: Reference, recording: Recording) -> None:
    """Relative errors of keys and values are at most 2⁻¹¹; scores of a few units enlarge that a few times."""
    found = errors(reference, recording, cache_type_k="f16", cache_type_v="f16")
    assert all(0 <= error < 20 * 2.0**-11 for error in found)


def test_the_error_of_the_first_layer_is_that_of_quantization(reference: Reference, recording: Recording) -> None:
    """No layer precedes it, so it needs no replay."""

    class CodedRecorder(Recorder):
        def run(self, engine: Engine, ids: Sequence[int], every_token_coded: bool = False) -> None:
            super().run(engine, ids, every_token_coded=True)

    recorder = CodedRecorder()
    with reference.open(recorder.install, ctx_size=len(IDS), block_size=16, **POLAR) as engine:
        coded = recorder.record(engine, IDS).outputs[0]
    whole = recording.outputs[0]
    expected = np.linalg.norm(coded - whole) / np.linalg.norm(whole)
    assert expected > 0.01
    assert errors(reference, recording, **POLAR)[0] == pytest.approx(expected, rel=1e-4)


def test_errors_do_not_depend_on_earlier_layers(reference: Reference, recording: Recording) -> None:
    def ruin_what_the_first_layer_adds(model: Transformer) -> None:
        first, *others = model.weights.layers
        ruined = replace(first.ffn, down=linear(-3 * model.ops.rows(first.ffn.down)))
        model.weights = replace(model.weights, layers=[replace(first, ffn=ruined), *others])

    whole = errors(reference, recording, **POLAR)
    assert errors(reference, recording, ruin_what_the_first_layer_adds, **POLAR) == pytest.approx(whole, rel=1e-3)


def test_scores_are_unchanged_between_replays(reference: Reference, recording: Recording) -> None:
    replay = Replay()
    with (
        reference.open(replay.install, ctx_size=len(IDS), **POLAR) as engine,
        reference.open(ctx_size=200, **POLAR) as other,
    ):
        replay.errors(engine, IDS, recording)
        np.testing.assert_allclose(engine.score(IDS).logprobs, other.score(IDS).logprobs, rtol=1e-5, atol=1e-5)


# -- the key bias --------------------------------------------------------------------------------------------------


def test_a_key_bias_is_refused_for_normalized_keys(tmp_path: Path) -> None:
    with (
        Reference(str(make_model(tmp_path, "qwen3_qk_norm_tied")), len(IDS)) as reference,
        pytest.raises(FlagError, match="norm"),
    ):
        reference.bias_keys(10, IDS)


def test_a_key_bias_is_constant_on_the_slowest_pairs(tmp_path: Path) -> None:
    with Reference(str(make_model(tmp_path, "llama_wide_heads_biases")), len(IDS)) as reference:
        before = reference.record(IDS)
        reference.bias_keys(10, IDS)
        after = reference.record(IDS)
        rms = np.sqrt(np.square(before.keys[0]).mean())
        added = after.keys[0] - before.keys[0]
        # RoPE turns the two channels of a pair, (j, j + D/2), and leaves their norm alone.
        norms = np.linalg.norm(added.reshape(*added.shape[:2], 2, -1), axis=2)
        assert norms.shape[-1] > 4
        np.testing.assert_allclose(norms[..., -4:], np.sqrt(2) * 10 * rms, rtol=1e-3)
        np.testing.assert_allclose(norms[..., :-4], 0, atol=1e-3 * rms)
        with reference.open(ctx_size=len(IDS), cache_type_k="f16", cache_type_v="f16") as engine:
            np.testing.assert_allclose(engine.score(IDS).logprobs, reference.score(IDS).logprobs, atol=0.05)
