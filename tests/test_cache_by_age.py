"""Presets: the newest blocks of a sequence have more bits than older ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.outputs import Completion
from polarlm.engine.sampling.sample import log_softmax
from polarlm.engine.state.cache_types import PRESETS, PRESETS_BY_NAME
from polarlm.engine.state.requantize import blocks as requantize_blocks
from polarlm.engine.state.requantize.blocks import MixedPrecisionBlocks, Requantizer
from tests.conftest import TRAINED_HYBRID
from tests.model.test_vision_encoders import finished
from tests.pairs import mostly_slow
from tests.state.test_mixed_precision import ALL_NEWEST, COMPACT, Unchecked, make_store
from tests.tiny import assert_idle, make_model

N = 16
MODELS = ["llama_gqa_linear", "gemma4_shared_kv", "qwen3_next_shared_keys"]  # also with windows, or recurrent layers
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2)
OLDER, NEWEST = "/".join(dict.fromkeys(PRESETS_BY_NAME["by-age"].low_precision)), PRESETS_BY_NAME["by-age"].newest


def load(path: Path, cache_type: str, **settings: Any) -> Engine:
    common = {"device": "cpu", "block_size": N, "ctx_size": 256, "threads": 1}
    return Engine.load(path, cache_type=cache_type, **{**common, **settings})


def prompt(number: int, tokens: int = 120) -> list[int]:
    return np.random.default_rng(number).integers(5, 90, tokens).tolist()


def types(engine: Engine) -> tuple[int, int]:
    found = engine.status().types
    assert found is not None
    return found["linear8"], found[OLDER]


def known(engine: Engine) -> int:
    """The blocks that are held or kept, of layers that keep a whole text."""
    blocks = engine._store.mixed_precision.quantized
    return blocks.size - blocks.free + blocks.kept


def continued(engine: Engine, number: int, answer: Completion, more: int = 20) -> Completion:
    """The answer to a longer prompt, which begins with a prompt and its `answer`."""
    return engine.generate([*prompt(number), *answer.token_ids, *prompt(100 + number, more)], GREEDY)


@pytest.fixture(params=[pytest.param(MODELS[0], marks=pytest.mark.slow), *MODELS[1:]])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (folder := tmp_path / request.param).mkdir()
    return make_model(folder, request.param)


def test_drafts_are_verified_over_blocks_of_both_kinds(tiny_path: Path) -> None:
    """Rows together have other last bits."""
    with load(tiny_path, "by-age") as plain, load(tiny_path, "by-age", spec_type="ngram-simple") as drafted:
        ids = prompt(0, 6 * N)
        for _ in range(2):
            own, expected = (engine.generate(ids, GREEDY) for engine in (drafted, plain))
            assert own.token_ids == expected.token_ids
            assert own.usage.cached_tokens == expected.usage.cached_tokens
            ids = [*ids, *own.token_ids, *prompt(1, 20)]
        assert min(types(drafted)) > 0


def test_older_blocks_are_requantized_in_every_phase(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt, of steps, of several requests at a time, and of a conversation that goes on; between units, so that
    no unit has to make room for itself."""
    in_units: list[MixedPrecisionBlocks] = []
    monkeypatch.setattr(MixedPrecisionBlocks, "requantize", in_units.append)
    with load(path, "by-age", parallel=3) as engine:
        trays: list[list[Any]] = [[] for _ in range(6)]
        for number, tray in enumerate(trays):
            engine.submit(prompt(number), replace(GREEDY, ignore_eos=True), into=tray)
        while engine.work():
            assert sum(types(engine)) == known(engine)
        assert {tray[-1].finish_reason for tray in trays} == {"length"}
        answer = engine.generate(prompt(7), GREEDY)
        tokens = continued(engine, 7, answer).usage
        assert tokens.cached_tokens > len(prompt(7))
        assert 0 < types(engine)[0] <= NEWEST * 8  # in eight sequences
        assert types(engine)[1] > 0
        assert not in_units
        assert_idle(engine)


def test_a_prompt_goes_on_where_its_blocks_have_moved(tiny_path: Path) -> None:
    """Between two layers of a prompt, blocks that it reads are moved, to make room for others."""
    with load(tiny_path, "by-age", parallel=1, kept_sequences=1) as engine:
        ids, store, new = [prompt(number, 7 * N) for number in range(3)], engine._store, prompt(3, 8)
        for own in ids:
            engine.generate(own, SamplingParams(max_tokens=1, temperature=0.0))
        kv = engine._prefixes.match_prefix(ids[-1])
        assert kv.length == 7 * N
        found, blocks, mixed = [], kv.tables[0].quantized, store.mixed_precision
        while mixed.blocks.begin_next() in blocks:
            mixed.requantize()
        for is_disturbed in (False, True):
            span = store.open(kv, len(new))
            units = engine._model.forward_chunks([span], new, outputs=1, by_layer=True)
            next(units)
            before = [mixed.blocks.placement[block] for block in blocks]
            while is_disturbed and [mixed.blocks.placement[block] for block in blocks] == before:
                assert mixed.blocks.begin_next() not in (None, *blocks)  # but blocks of other prompts
                mixed.requantize()
            found.append(engine._model.logits(finished(units)[0]))
            store.abort(span)
        np.testing.assert_array_equal(*found)


def test_a_prompt_waits_for_room_and_no_step_for_longer_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, missing = [0.0], 40 * N
    monkeypatch.setattr(requantize_blocks.time, "perf_counter", lambda: clock[0])
    fed = Unchecked(make_store(NumpyOps(1), 1600, COMPACT, ALL_NEWEST))
    blocks = fed.store.mixed_precision
    while not blocks.lacks_room(missing):
        fed.feed(N)
    missing += 20 * N
    requantize_layer = blocks.requantize_layer

    def slow() -> bool:
        clock[0] += 1.0
        return requantize_layer()

    monkeypatch.setattr(blocks, "requantize_layer", slow)
    requantizer = Requantizer(blocks)
    assert requantizer.run(3.5) == 0  # no prompt waits
    for step, layers in ((3.5, 3), (0.2, 1), (3.0, 3)):
        assert requantizer.must_wait(missing)
        before = clock[0]
        assert requantizer.run(step) == layers
        assert clock[0] - before <= max(step, 1.0)
        fed.feed(2 * N)
    assert requantizer.must_wait(missing)
    assert requantizer.run(None) == 1  # no step waits, but a client may cancel
    while requantizer.must_wait(missing):
        assert requantizer.run(1000.0)
    assert not blocks.lacks_room(missing)


def test_blocks_of_a_model_of_windows_alone_are_of_one_kind(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mistral_window_sharded")
    with load(path, "quality") as engine, load(path, "ring5/ring4") as uniform:
        own, expected = (one.generate(prompt(0), GREEDY) for one in (engine, uniform))
        assert own.token_ids == expected.token_ids
        assert engine.status().types is None
        assert "as quality: ring5/ring4 (" in engine.fit_line()


def test_a_session_and_a_disk_keep_each_block_as_it_is(path: Path, tmp_path: Path) -> None:
    folder: dict[str, Any] = {"cache_disk": "100M", "cache_disk_folder": str(tmp_path / "blocks")}
    with load(path, "by-age", **folder) as engine:
        answer = engine.generate(prompt(0), GREEDY)
        engine.save_session(tmp_path / "session")
        before = types(engine)
    found = []
    for from_session, settings in ((True, {}), (False, folder)):
        with load(path, "by-age", **settings) as engine:
            if from_session:
                engine.load_session(tmp_path / "session")
                assert types(engine) == before
            found.append(continued(engine, 0, answer))
    assert (found[0].token_ids, found[0].logprobs) == (found[1].token_ids, found[1].logprobs)
    assert found[1].usage.cached_from == {"disk": found[0].usage.cached_tokens}
    with load(path, "compact") as engine, pytest.raises(EngineError, match=r"with the cache types .*by-age"):
        engine.load_session(tmp_path / "session")


@mostly_slow("preset", PRESETS, ["balanced"])
def test_a_preset_is_nearer_to_full_precision_than_blocks_alike_with_more_bits(preset: str) -> None:
    """A trained model, every token coded, as long a text as its context."""
    text = (TRAINED_HYBRID / "held_out.txt").read_text(encoding="utf-8")
    kl, alike = {}, "/".join(PRESETS[preset].uniform)
    for cache_type in ("f16", preset, alike):
        with Engine.load(TRAINED_HYBRID, device="cpu", cache_type=cache_type, threads=1) as engine:
            ids = engine.tokenize(text)[: engine.context]
            own = log_softmax(engine.score(ids, every_token_coded=cache_type != "f16", logits=True).logits)
            exact = kl.setdefault("f16", own)
            if cache_type != "f16":
                kl[cache_type] = np.sum(np.exp(exact) * (exact - own), axis=1).mean()
    assert kl[preset] < 0.7 * kl[alike]


def test_the_bits_of_a_text_are_those_of_its_blocks(tiny_path: Path) -> None:
    shapes = {}
    for cache_type in ("by-age", "linear8", OLDER):
        with load(tiny_path, cache_type) as engine:
            shapes[cache_type] = engine.cache_shape
    own, newest, older = shapes["by-age"], *(shapes[name].bits_per_value for name in ("linear8", OLDER))
    assert own.bits_of_text(5 * N) == newest  # without the first block
    assert own.bits_of_text(32 * N) == pytest.approx(((NEWEST + 1) * newest + (30 - NEWEST) * older) / 31)
    assert shapes[OLDER].bits_of_text(32 * N) == older
    assert own.sequence_bytes(33 * N) == shapes[OLDER].sequence_bytes(33 * N) + NEWEST * (
        own.high_precision_shape.quantized_bytes(range(len(own.layers))) - own.quantized_bytes(range(len(own.layers)))
    )
