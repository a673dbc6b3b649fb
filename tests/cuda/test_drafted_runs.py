"""Drafted tokens on the emulator: the text of plain runs, in steps that wait and in steps that begin ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import Completion, Engine, SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.outputs import Chunk, fold
from polarlm.engine.requests.drafts import Batch, Drafts
from tests.cuda.emulated import open_device
from tests.requests.drafters import ANEW, Known, Unpaced, drafting, first_difference, margin
from tests.tiny import VOCABULARY, assert_idle, forget, load_tiny

TYPES = ["quality", "balanced", "compact", "polarquant", "polarpair-m4n4/ring4", "turbo3", "turbo4", "f16"]
PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
CLOSE = 0.02  # nats
PROMPTS = [np.random.default_rng(seed).integers(5, VOCABULARY, 3 + 7 * seed).tolist() for seed in range(3)]


class Sometimes(Unpaced):
    """Is ready for two of three tokens."""

    def is_ready(self, ids: Sequence[int]) -> bool:
        return len(ids) % 3 > 0

    def draft(self, ids: Sequence[int], room: int, batch: Batch) -> Sequence[int]:
        return super().draft(ids, room, batch) if len(ids) % 3 > 1 else ()


def answers(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    forget(engine)
    trays: list[list[Chunk | Exception]] = [[] for _ in prompts]
    for prompt, tray in zip(prompts, trays, strict=True):
        engine.submit(prompt, PARAMS, ANEW, into=tray)
    while engine.work():
        pass
    return [fold(tray) for tray in trays]


def engine_of(path: Path, type: str) -> Engine:
    settings: dict[str, Any] = {"block_size": 16, "ctx_size": 256, "parallel": 4, "calibration": False}
    return load_tiny(path, ops=CudaOps(open_device(checked=False)), cache_type=type, **settings)


@pytest.mark.parametrize(("type", "kind"), [("balanced", Sometimes), *((type, Unpaced) for type in TYPES)])
def test_greedy_text_is_that_of_plain_runs(tiny_path: Path, type: str, kind: Callable[..., Unpaced]) -> None:
    """Up to a step whose best tokens are as good as equally likely: kernels for more rows add up in another order."""
    with engine_of(tiny_path, type) as engine:
        compare(engine, kind)
        assert_idle(engine)


def compare(engine: Engine, kind: Callable[..., Unpaced]) -> None:
    begun: list[int] = []
    ahead = engine._model.step_ahead
    engine._model.step_ahead = lambda *given: begun.append(1) or ahead(*given)  # type: ignore[method-assign]
    drafting(engine, lambda ids: None)
    wanted = answers(engine, PROMPTS)
    assert len(begun) > 9
    known = {tuple(prompt): one.token_ids for prompt, one in zip(PROMPTS, wanted, strict=True)}
    made: list[Unpaced] = []

    def make(ids: Sequence[int]) -> Drafts | None:
        if len(ids) == len(PROMPTS[2]):
            return None
        rng = np.random.default_rng(len(ids))
        made.append(kind(Known([*ids, *known[tuple(ids)]], 0.9, VOCABULARY, 1), lambda: int(rng.integers(1, 8))))
        return made[-1]

    drafting(engine, make)
    begun.clear()
    found = answers(engine, PROMPTS)
    assert begun or kind is Unpaced
    assert sum(drafts.accepted for drafts in made) > (8 if kind is Unpaced else 3)
    for prompt, one, other in zip(PROMPTS, found, wanted, strict=True):
        place = first_difference(one.token_ids, other.token_ids)
        assert place is None or margin(engine, prompt, PARAMS, place) < CLOSE
