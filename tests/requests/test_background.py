"""Requests in the background give way to others, and their answers stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.outputs import Chunk
from tests.encoders import make_folder
from tests.tiny import assert_idle

PROMPT = [5 + number * 7 % 90 for number in range(40)]
OTHER = [9 + number * 11 % 80 for number in range(200)]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    """Computes one request at a time."""
    settings = {"device": "cpu", "block_size": 16, "cache_type": "f16", "calibration": False}
    with Engine.load(tiny_path, parallel=1, **settings) as engine:
        yield engine
        assert_idle(engine)


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def is_done(chunks: list[Chunk]) -> bool:
    return bool(chunks) and chunks[-1].finish_reason is not None


@pytest.mark.parametrize("units", [1, 2, 9])
def test_one_that_arrives_is_computed_at_once(engine: Engine, units: int) -> None:
    """It interrupts an answer of the background, which continues from where it was: after its prompt or later."""
    expected = [engine.generate(one, PARAMS).text for one in (PROMPT, OTHER)]
    behind: list[Chunk] = []
    ahead: list[Chunk] = []
    engine.submit(PROMPT, PARAMS, into=behind, in_background=True)
    for _ in range(units):
        engine.work()
    engine.submit(OTHER, PARAMS, into=ahead)
    before = 0
    while not is_done(ahead):
        engine.work()
        before = before or len(behind)
    assert not is_done(behind)
    assert len(behind) <= units + 1  # the step that had begun, and no other
    while not is_done(behind):
        engine.work()
    assert [text(behind), text(ahead)] == expected


def test_an_encoder_takes_texts_of_the_background_last(tmp_path: Path) -> None:
    make_folder(tmp_path / "encoder", "bert_f32")
    with Engine.load(tmp_path / "encoder", device="cpu") as engine:
        long = engine.tokenize("the rain falls on a ship " * 4)
        job = long * (engine.context // len(long)), SamplingParams(max_tokens=0), PromptOptions(pooling="mean")
        texts: list[list[Chunk]] = [[] for _ in range(1 + 3000 // len(job[0]))]  # more than are computed together
        for text_chunks in texts:
            engine.submit(*job, into=text_chunks, in_background=True)
        ahead: list[Chunk] = []
        engine.submit(*job, into=ahead)
        engine.work()
        assert is_done(ahead)
        assert not all(map(is_done, texts))
        while engine.work():
            pass
        assert all(map(is_done, texts))


def test_one_that_finds_no_blocks_gets_those_of_the_background(tiny_path: Path) -> None:
    """There is a place beside it, and room for one of the two in the store."""
    settings = {"device": "cpu", "block_size": 16, "cache_type": "f16", "calibration": False}
    with Engine.load(tiny_path, parallel=2, kept_sequences=0, **settings) as engine:
        prompts = [[5 + number * step % 90 for number in range(200)] for step in (7, 11)]
        expected = [engine.generate(one, PARAMS).text for one in prompts]
        behind: list[Chunk] = []
        ahead: list[Chunk] = []
        engine.submit(prompts[0], PARAMS, into=behind, in_background=True)
        while not behind:
            engine.work()
        engine.submit(prompts[1], PARAMS, into=ahead)
        while not is_done(ahead):
            engine.work()
        assert not is_done(behind)
        while not is_done(behind):
            engine.work()
        assert [text(behind), text(ahead)] == expected
        assert_idle(engine)
