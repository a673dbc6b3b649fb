"""Presets: the newest blocks of a sequence have more bits than older ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError
from polarlm.engine.sampling.sample import log_softmax
from polarlm.engine.state.cache_types import PRESETS, TWO_KINDS
from tests.conftest import TRAINED_HYBRID
from tests.test_cache_by_room import GREEDY, MODELS, N, continued, known, load, load_finest, prompt
from tests.tiny import assert_idle, make_model

OLDER, NEWEST = "/".join(dict.fromkeys(TWO_KINDS["by-age"].low_precision)), TWO_KINDS["by-age"].newest


def types(engine: Engine) -> tuple[int, int]:
    found = engine.status().types
    assert found is not None
    return found["linear8"], found[OLDER]


@pytest.fixture(params=MODELS)
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (folder := tmp_path / request.param).mkdir()
    return make_model(folder, request.param)


def test_texts_of_the_newest_blocks_alone_have_the_answers_of_their_type(path: Path) -> None:
    with load(path, "by-age") as by_age, load_finest(path, "by-age") as high_precision_shape:
        ids = prompt(0, 2 * N)
        for _ in range(2):  # 32 + 20 tokens, and 20 more: the sink, three blocks and the current one
            own, expected = (
                engine.generate(ids, replace(GREEDY, max_tokens=20)) for engine in (by_age, high_precision_shape)
            )
            assert (own.token_ids, own.logprobs) == (expected.token_ids, expected.logprobs)
            ids = [*ids, *own.token_ids]
        assert types(by_age)[1] == 0


def test_older_blocks_are_coded_again_in_every_phase(path: Path) -> None:
    """Of a prompt, of steps, of several requests at a time, and of a conversation that goes on."""
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
        assert_idle(engine)


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
    with load(path, "auto") as engine, pytest.raises(EngineError, match=r"with the cache types .*by-age"):
        engine.load_session(tmp_path / "session")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_nearer_to_full_precision_than_blocks_alike_with_more_bits(preset: str) -> None:
    """A trained model, every token coded, as long a text as its context."""
    text = (TRAINED_HYBRID / "held_out.txt").read_text(encoding="utf-8")
    kl, alike = {}, "/".join(PRESETS[preset].alike)
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
