"""Contexts with holes: removed rows are no longer seen, and the others stay where and as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polarlm.bench.lab.holes import Context
from polarlm.bench.shapes import llama
from scripts.make_random_model import write
from tests.bare import bare_model, read_model
from tests.random_model import tokenizer_file

IDS = np.random.default_rng(0).integers(4, 262, 90).tolist()
HOLES = [range(5, 9), range(30, 50)]  # in the first block of 16, and more than a block
END = 70  # what is read behind it comes after the holes


def contexts(folder: Path, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """The states behind `END` of a context with holes, and of one that has never had the removed tokens."""
    path = folder / f"{layers}.gguf"
    write(path, "tiny", llama(layers, 256, 512, 4, 2, 64, 262, 512, 10_000.0), "q8_0", tokenizer_file(folder))
    model = bare_model(*read_model(path))
    context, sparse = Context(model), Context(model)
    context.read(IDS[:END])
    untouched = context.copy()
    context.remove(HOLES)
    for part in (range(5), range(9, 30), range(50, END)):
        sparse.end = part.start
        sparse.read([IDS[at] for at in part])
    states = context.read(IDS[END:])
    whole = Context(model)
    assert np.allclose(untouched.read(IDS[END:]), whole.read(IDS)[END:], atol=1e-2)
    return states, sparse.read(IDS[END:])


def test_removed_rows_are_not_seen_and_the_others_keep_their_positions(tmp_path: Path) -> None:
    """Keys and values of a single layer depend on nothing but a token and its position."""
    assert np.allclose(*contexts(tmp_path, 1), atol=1e-5)


def test_what_was_read_behind_removed_rows_has_seen_them(tmp_path: Path) -> None:
    holes, sparse = contexts(tmp_path, 2)
    assert np.abs(holes - sparse).max() > 0.2
