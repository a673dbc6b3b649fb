"""A model small enough for every test to run: the weights of a fixture and a vocabulary of bytes, 96 tokens in all."""

from __future__ import annotations

import shutil
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.ops import Ops
from polarlm.engine.loading import assembly
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.encoding import FULL_ENCODING, Encoding
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.weights import FileMatrix
from polarlm.engine.requests.request import Request
from polarlm.engine.sampling.sample import Fetch
from tests.conftest import FIXTURES
from tests.state import fed

VOCABULARY = 96
CONTROL = ("<|pad|>", "<s>", "<|im_end|>", "<|endoftext|>", "<|im_start|>")  # ids 0 to 4; 2 and 3 end a generation
EOS = (2, 3)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CONTEXT = 256
# How the fixture `tiny` is loaded. Compiled kernels read blocks of 16 tokens; of 8, NumPy takes five times as long.
PLAIN: dict[str, Any] = {
    "device": "cpu",
    "block_size": 16,
    "cache_type": "polarquant",
    "calibration": False,
    "encoding": Encoding(small_means=False),
}
_MERGES = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ou")
CHARACTERS = string.ascii_letters + string.digits + " \n.,!?':-" + "é€😀"


def tokenizer_json() -> str:
    """A byte-level vocabulary with the bytes of CHARACTERS only."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelt = dict.fromkeys(spell.pre_tokenize_str(CHARACTERS)[0][0])
    pieces = [*CONTROL, *spelt, *_MERGES]
    pieces += [f"<unused{i}>" for i in range(VOCABULARY - len(pieces))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in _MERGES]))
    library.pre_tokenizer = spell
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(CONTROL))
    return library.to_str()


def make_model(folder: Path, fixture: str = "llama_gqa_linear") -> Path:
    """Fill `folder` with a model that has the weights of `fixture`, the control tokens of ChatML, and no BOS."""
    for file in (FIXTURES / fixture).glob("*[!z]"):  # without the reference's logits
        shutil.copy(file, folder)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return folder


def load_tiny(path: Path, encoding: Encoding = FULL_ENCODING, ops: Ops | None = None, **settings: Any) -> Engine:
    """`Engine.load`, with parts of the encoder turned off, or with a backend of the caller's choice."""
    parts = assembly.assemble(settle(path, None, settings), None, ops)
    if encoding != FULL_ENCODING:
        other = assembly.replace_cache(parts, parts.config, encoding=encoding)
        parts = replace(
            other, adapters=parts.adapters, tiers=parts.tiers, draft=parts.draft, warm_up_timer=parts.warm_up_timer
        )
    return Engine(parts)


def ids(seed: int, count: int) -> list[int]:
    """Ids of a prompt."""
    return np.random.default_rng(seed).integers(5, VOCABULARY, count).tolist()


def held(engine: Engine) -> list[tuple[int, int]]:
    """(quantized blocks, full-precision slots) in use, per group of layers."""
    return fed.held(engine._store)


def forget(engine: Engine) -> None:
    """Overwrite all blocks that no request holds, so that the prefix cache finds none of them."""
    with engine._exclusive():
        fed.overwrite(engine._store)


def runs_nothing(engine: Engine) -> bool:
    status = engine.status()
    return status.running + status.waiting == 0


@contextmanager
def blocks_left(engine: Engine, count: int, group: int = 0) -> Iterator[None]:
    """Leave `count` quantized blocks of a group free, as if other requests held the rest."""
    allocator = engine._store.groups[group].quantized
    taken = allocator.allocate(allocator.free - count)
    try:
        yield
    finally:
        for block in taken:
            allocator.release(block)


def refused(call: Callable[[], object], *words: str, code: str = "invalid_request") -> EngineError:
    """The error of a call, whose sentence has these words."""
    with pytest.raises(EngineError) as raised:
        call()
    assert raised.value.code == code
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "\n" not in str(raised.value)
    return raised.value


def preempt(engine: Engine) -> Request:
    """Preempt the only request; it goes to the end of the queue."""
    (request,) = engine._runner.requests.values()
    engine._runner._save(request)
    engine._runner._release(request)
    engine._scheduler.remove(request.sequence)
    engine._scheduler.submit(request.sequence)
    return request


def preemptions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets the result of every later call of `Scheduler.preempt`."""
    seen: list[Any] = []
    choose = engine._scheduler.preempt
    monkeypatch.setattr(engine._scheduler, "preempt", lambda: seen.append(choose()) or seen[-1])
    return seen


def rows_of_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that gets the rows of each sequence of every later step."""
    seen: list[list[int]] = []
    step = engine._model.step

    def noted(batch: StepBatch, ahead: bool = False) -> Fetch:
        seen.append([span.count for span in batch.spans])
        return step(batch, ahead)

    monkeypatch.setattr(engine._model, "step", noted)
    return seen


def matrices_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the name of every matrix that is read later."""
    seen: list[str] = []
    slabs = FileMatrix.slabs
    monkeypatch.setattr(FileMatrix, "slabs", lambda matrix, nbytes: seen.append(matrix.name) or slabs(matrix, nbytes))
    return seen


def assert_idle(engine: Engine) -> None:
    """Assert that no request runs or waits, and that every block is free."""
    if engine._tiers is not None:  # whose thread takes the lock to copy blocks
        assert engine._tiers._writer.flush(60)
    with engine._lock._changed:  # a server's thread may still end its last unit
        assert engine._lock._changed.wait_for(lambda: not engine._lock.is_wanted, 60)
    assert not engine._runner.requests
    assert engine._scheduler.schedule() is None
    assert not any(map(any, held(engine)))


def by_count(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every unit count as one second, so that prefill and steps alternate in the same order each time."""
    record_time = engine._scheduler.record_time
    monkeypatch.setattr(engine._scheduler, "record_time", lambda unit, seconds: record_time(unit, 1))
