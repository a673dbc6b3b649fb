"""Several GPUs in one process: each has some layers of a model, and the result is that of one GPU, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.backends.cuda.cards import CardsOps
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda.several_cards import Card
from tests.cuda.test_model_emulated import model_of, talk

CODES, FULL = ("ring4", "ring3.5"), ("f16", "f16")


def cards(*counts: int, rooms: tuple[int, ...] = ()) -> CardsOps:
    rooms = rooms or tuple((3 - number) << 28 for number in range(len(counts)))
    return CardsOps([CudaOps(Card(number, room)) for number, room in enumerate(rooms)]).split(counts)


@pytest.mark.parametrize(
    ("fixture", "types", "counts"),
    [
        ("llama_gqa_llama3_tied", FULL, (1, 1)),
        ("qwen2_mixed_windows", CODES, (1, 2)),
        ("qwen2_mixed_windows", CODES, (2, 1)),
        ("qwen2_mixed_windows", ("f16", "f16"), (1, 1, 1)),
        ("qwen3_moe_normed", FULL, (1, 1)),
        ("gpt_oss_mxfp4", FULL, (1, 1)),
    ],
)
def test_logits_are_those_of_one_card(fixture: str, types: tuple[str, str], counts: tuple[int, ...]) -> None:
    wanted = talk(model_of(CudaOps(Card(0)), fixture, types))
    for one, found in zip(wanted, talk(model_of(cards(*counts), fixture, types)), strict=True):
        np.testing.assert_array_equal(found, one)
