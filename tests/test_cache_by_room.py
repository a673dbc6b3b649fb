"""`--cache-type auto`: with room, answers equal the answers of the high-precision type; else blocks are requantized."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.outputs import Completion
from polarlm.engine.state.cache_types import TWO_KINDS, by_layer
from polarlm.engine.state.requantize import blocks as high_precision_blocks
from polarlm.engine.state.requantize.blocks import MixedPrecisionBlocks, Requantizer
from tests.patience import SECONDS
from tests.state.test_mixed_precision import BY_ROOM, COMPACT, Unchecked, make_store
from tests.tiny import assert_idle, by_count, make_model

N, COARSER = 16, "/".join(TWO_KINDS["auto"].low_precision)
MODELS = ["llama_gqa_linear", "gemma4_shared_kv", "qwen3_next_shared_keys"]  # also with windows, or recurrent layers
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2)


def load(path: Path, cache_type: str, **settings: Any) -> Engine:
    common = {"device": "cpu", "block_size": N, "ctx_size": 256, "threads": 1}
    return Engine.load(path, cache_type=cache_type, **{**common, **settings})


def load_finest(path: Path, cache_type: str, **settings: Any) -> Engine:
    """The engine whose blocks have the most bits that they have with this type of two kinds."""
    with load(path, cache_type) as engine:
        layers = engine.cache_shape.high_precision_shape.kv_layers
    sides = ([getattr(layers.get(n), side, None) for n in range(max(layers) + 1)] for side in ("codec_k", "codec_v"))
    k, v = (by_layer([codec and codec.name for codec in side]) for side in sides)
    return load(path, "f16", cache_type_k=k, cache_type_v=v, **settings)


def prompt(number: int, tokens: int = 120) -> list[int]:
    return np.random.default_rng(number).integers(5, 90, tokens).tolist()


def types(engine: Engine) -> tuple[int, int]:
    found = engine.status().types
    return found["linear8"], found[COARSER]


def known(engine: Engine) -> int:
    """The blocks that are held or kept, of layers that keep a whole text."""
    blocks = engine._store.mixed_precision.quantized
    return blocks.size - blocks.free + blocks.kept


def continued(engine: Engine, number: int, answer: Completion, more: int = 20) -> Completion:
    """The answer to a longer prompt, which begins with a prompt and its `answer`."""
    return engine.generate([*prompt(number), *answer.token_ids, *prompt(100 + number, more)], GREEDY)


@pytest.fixture(params=MODELS)
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    (folder := tmp_path / request.param).mkdir()
    return make_model(folder, request.param)


@pytest.mark.parametrize(("model", "spec_type"), [*((model, "none") for model in MODELS), (MODELS[0], "ngram-simple")])
def test_answers_with_room_are_those_of_the_high_precision_type(tmp_path: Path, model: str, spec_type: str) -> None:
    path = make_model(tmp_path, model)
    with (
        load(path, "auto", ctx_size=512, spec_type=spec_type) as by_room,
        load_finest(path, "auto", ctx_size=512) as high_precision,
    ):
        ids = prompt(0, 90)
        for turn in range(2):
            own, expected = (engine.generate(ids, GREEDY) for engine in (by_room, high_precision))
            assert own.token_ids == expected.token_ids
            assert own.usage.cached_tokens == expected.usage.cached_tokens
            assert spec_type != "none" or own.logprobs == expected.logprobs  # rows together have other last bits
            ids = [*ids, *own.token_ids, *prompt(turn + 1, 20)]
        assert types(by_room) == (known(by_room), 0)


def test_as_the_store_fills_blocks_are_coded_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few layers between two units: no unit of a request has to make room for itself."""
    in_units: list[MixedPrecisionBlocks] = []
    monkeypatch.setattr(MixedPrecisionBlocks, "requantize", in_units.append)
    ticks = itertools.count()  # a unit takes a second, and a layer a quarter of it
    monkeypatch.setattr(high_precision_blocks, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 4))
    with load(path, "auto", parallel=3) as by_room:
        by_count(by_room, monkeypatch)
        seen, trays = set(), [[] for _ in range(12)]
        for number, tray in enumerate(trays):
            by_room.submit(prompt(number), GREEDY, into=tray)
        while by_room.work():
            assert sum(types(by_room)) == known(by_room) <= by_room._store.mixed_precision.quantized.size
            seen.add(tuple(count > 0 for count in types(by_room)))
        assert {(True, False), (True, True)} <= seen
        assert not in_units
        assert {tray[-1].finish_reason for tray in trays} <= {"length", "stop"}
        assert types(by_room)[1] > 0
        # The newest conversation continues from what is kept, whatever its type.
        ids = [*prompt(11), *(token for chunk in trays[11] for token in chunk.token_ids)]
        assert by_room.generate(ids, GREEDY).usage.cached_tokens > len(ids) - N
        assert_idle(by_room)


def logits(engine: Engine, units: Generator[int, None, Any]) -> np.ndarray:
    while True:
        try:
            next(units)
        except StopIteration as end:
            return engine._model.logits(end.value)


def test_a_prompt_goes_on_where_its_blocks_have_moved(tiny_path: Path) -> None:
    """Between two layers of a prompt, blocks that it reads are moved, to make room for others."""
    with load(tiny_path, "auto") as engine:
        ids, store, new = [prompt(number, 7 * N) for number in range(2)], engine._store, prompt(2, 8)
        for own in ids:
            engine.generate(own, SamplingParams(max_tokens=1, temperature=0.0))
        kv = engine._prefixes.match_prefix(ids[1])
        assert kv.length == 7 * N
        found, blocks, high_precision = [], kv.tables[0].quantized, store.mixed_precision
        for is_disturbed in (False, True):
            span = store.open(kv, len(new))
            units = engine._model.forward_units([span], new, outputs=1, by_layer=True)
            next(units)
            before = [high_precision.blocks.placement[block] for block in blocks]
            while is_disturbed and [high_precision.blocks.placement[block] for block in blocks] == before:
                assert high_precision.blocks.begin_next() not in blocks  # but blocks of the other prompt
                high_precision.requantize()
                high_precision.blocks.allocate(not high_precision.lacks_room(2))
            found.append(logits(engine, units))
            store.abort(span)
        np.testing.assert_array_equal(*found)


def test_blocks_are_coded_for_no_longer_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(high_precision_blocks.time, "perf_counter", lambda: clock[0])
    fed = Unchecked(make_store(NumpyOps(1), 1600, COMPACT, BY_ROOM))
    while not fed.store.mixed_precision.lacks_room():
        fed.feed(N)
    requantize_layer, blocks = fed.store.mixed_precision.requantize_layer, fed.store.mixed_precision

    def slow() -> bool:
        clock[0] += 1.0
        return requantize_layer()

    monkeypatch.setattr(blocks, "requantize_layer", slow)
    coding = Requantizer(blocks)
    for step, layers in ((3.5, 3), (0.2, 1), (3.0, 3)):
        assert coding.must_wait(40 * N)
        before = clock[0]
        assert coding.run(step) == layers
        assert clock[0] - before <= max(step, 1.0)
    assert coding.must_wait(40 * N)
    assert coding.run(None) == 1  # no step waits, but a client may cancel
    while coding.run(1000.0):
        assert blocks.lacks_room()
    assert not blocks.lacks_room()


def test_blocks_of_a_model_of_windows_alone_are_alike(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mistral_window_sharded")
    with load(path, "auto") as engine, load(path, "ring5/ring4") as alike:
        own, expected = (one.generate(prompt(0), GREEDY) for one in (engine, alike))
        assert own.token_ids == expected.token_ids
        assert engine.status().types is None
        assert "as auto: ring5/ring4 (" in engine.fit_line()


def test_a_session_has_blocks_of_both_types(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation is continued after it as before it, and its blocks can be requantized."""
    # How many layers are requantized between two steps, and so what a step reads, depends on the time that they take.
    monkeypatch.setattr(high_precision_blocks, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    with load(path, "auto") as engine:
        answer = engine.generate(prompt(0), GREEDY)
        while types(engine)[1] < 3:
            engine._store.mixed_precision.requantize()
        before = types(engine)
        engine.save_session(tmp_path / "session")
        expected = continued(engine, 0, answer)
        for number in range(1, 4):
            engine.generate(prompt(number), GREEDY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MixedPrecisionBlocks, "requantize", None)  # what lacks room waits for it
            engine.load_session(tmp_path / "session")
        assert continued(engine, 0, answer).usage.cached_tokens == expected.usage.cached_tokens
    with load(path, "auto") as engine:
        engine.load_session(tmp_path / "session")
        assert types(engine) == before
        found = continued(engine, 0, answer)
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        assert found.usage.cached_tokens == expected.usage.cached_tokens > len(prompt(0))
        while engine._store.mixed_precision.requantize():
            pass
        assert types(engine)[0] == 0
        assert_idle(engine)
    with load(path, "compact") as engine, pytest.raises(EngineError, match=r"with the cache types .*auto"):
        engine.load_session(tmp_path / "session")


def test_blocks_come_back_from_a_disk_as_there_is_room(path: Path, tmp_path: Path) -> None:
    """With room, as they were written: there they were high-precision."""
    folder: dict[str, Any] = {"ctx_size": 384, "cache_disk": "100M", "cache_disk_folder": str(tmp_path / "blocks")}
    with load_finest(path, "auto") as engine:
        expected = continued(engine, 0, engine.generate(prompt(0), GREEDY))
    with load(path, "auto", **folder) as engine:
        answers = []
        for number in range(3):  # the first one is written while there is room
            answers.append(engine.generate(prompt(number), GREEDY))
            assert engine._tiers._writer.flush(SECONDS)
        assert types(engine)[1] > 0
    with load(path, "auto", **folder) as engine:
        found = continued(engine, 0, answers[0])
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        assert found.usage.cached_from == {"disk": found.usage.cached_tokens}
        assert types(engine)[1] == 0
        for number in (1, 2):
            assert continued(engine, number, answers[number]).usage.cached_from["disk"] >= 7 * N
        assert types(engine)[1] > 0
        assert_idle(engine)
