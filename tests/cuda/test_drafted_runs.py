"""Drafted tokens on the emulator: the text of plain runs, in steps that wait and in steps that begin ahead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import Completion, Engine, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.outputs import Chunk, fold
from polarlm.engine.requests.drafts import Batch, Drafts
from tests.cuda.emulated import open_device
from tests.requests.drafters import ANEW, Known, Unpaced, drafting, first_difference, margin, stored
from tests.tiny import VOCABULARY, assert_idle, forget, load_tiny

TYPES = ["quality", "balanced", "compact", "polarquant", "polarpair-m4n4/ring4", "turbo3", "turbo4", "f16"]
COUNT = 15  # prompts for each
PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
CLOSE = 0.02  # nats
FLIPPED = 1e-3  # of the codes, at most, where sums are added in another order


def prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCABULARY, rng.integers(1, 40)).tolist() for _ in range(COUNT)]


class Sometimes(Unpaced):
    """Is ready for two of three tokens."""

    def is_ready(self, ids: Sequence[int]) -> bool:
        return len(ids) % 3 > 0

    def draft(self, ids: Sequence[int], room: int, batch: Batch) -> Sequence[int]:
        return super().draft(ids, room, batch) if len(ids) % 3 > 1 else ()


def engine_of(path: Path, type: str) -> Engine:
    settings: dict[str, Any] = {"block_size": 16, "ctx_size": 256, "parallel": 4, "calibration": False}
    return load_tiny(path, ops=CudaOps(open_device(checked=False)), cache_type=type, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("type", "kind"), [("balanced", Sometimes), *((type, Unpaced) for type in TYPES)])
def test_text_and_codes_are_those_of_plain_runs(tiny_path: Path, type: str, kind: type[Unpaced]) -> None:
    """With half precision weights. A third of the prompts is not drafted. Together the types draft any number of tokens
    nearly anywhere in a block."""
    asked = prompts(TYPES.index(type))
    with engine_of(tiny_path, type) as engine:
        begun: list[int] = []
        ahead = engine._model.step_ahead
        engine._model.step_ahead = lambda *given: begun.append(1) or ahead(*given)  # type: ignore[method-assign]
        drafting(engine, lambda ids: None)
        wanted, wanted_codes = answers(engine, asked)
        assert len(begun) > 9
        known = {tuple(prompt): one.token_ids for prompt, one in zip(asked, wanted, strict=True)}
        made: list[Unpaced] = []

        def make(ids: Sequence[int]) -> Drafts | None:
            if len(ids) % 3 == 2:
                return None
            rng = np.random.default_rng(len(made))
            made.append(kind(Known([*ids, *known[tuple(ids)]], 0.9, VOCABULARY, 1), lambda: int(rng.integers(1, 8))))
            return made[-1]

        drafting(engine, make)
        begun.clear()
        found, found_codes = answers(engine, asked)
        assert begun or kind is Unpaced
        assert sum(drafts.accepted for drafts in made) > 3 * COUNT
        for prompt, one, other in zip(asked, found, wanted, strict=True):
            place = first_difference(one.token_ids, other.token_ids)
            assert place is None or margin(engine, prompt, PARAMS, place) < CLOSE
        assert_idle(engine)
    same = [one.token_ids == other.token_ids for one, other in zip(found, wanted, strict=True)]
    pairs = zip(found_codes, wanted_codes, same, strict=True)
    codes = [(a, b) for one, other, alike in pairs if alike for a, b in zip(one, other, strict=True)]
    total = sum(a.size for a, _ in codes)
    assert total > 100 * COUNT or type == "f16"  # which has no codes
    assert sum(np.count_nonzero(a != b) for a, b in codes) <= FLIPPED * total


def answers(engine: Engine, asked: Sequence[Sequence[int]]) -> tuple[list[Completion], list[list[np.ndarray]]]:
    """The answers, four at a time, and the codes of the complete blocks of each with its prompt."""
    forget(engine)
    found: list[Completion] = []
    codes = []
    for first in range(0, len(asked), 4):
        trays: list[list[Chunk | Exception]] = [[] for _ in asked[first : first + 4]]
        for prompt, tray in zip(asked[first : first + 4], trays, strict=True):
            engine.submit(prompt, PARAMS, ANEW, into=tray)
        while engine.work():
            pass
        for prompt, tray in zip(asked[first : first + 4], trays, strict=True):
            found.append(fold(tray))
            codes.append(stored(engine, [*prompt, *found[-1].token_ids[:-1]]))
    return found, codes
