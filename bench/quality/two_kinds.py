"""What cache types with two kinds of blocks cost, and two presets: `by-age`, and `auto` without room.

    python -m polarlm.bench.quality.two_kinds --text text.txt

Each text is read in full precision and with each type, as steps read it: complete blocks as codes, the first and the
current block in full precision; and with the current block as codes, too. KL is that of the next token's distributions
from those of an f16 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.quality.divergence import Divergence, compare, joined
from polarlm.bench.quality.scores import SCORINGS
from polarlm.engine import Engine
from polarlm.engine.codecs import FULL
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.score import states
from polarlm.engine.state.cache_types import BY_AGE, BY_ROOM

CASES = {"compact": "compact", BY_AGE: BY_AGE, "auto, without room": BY_ROOM, "balanced": "balanced"}


def logits(
    model: Transformer, ids: Sequence[int], *, every_token_coded: bool = False, is_full: bool = False
) -> Iterator[np.ndarray]:
    """Yield the logits (rows, V) of `ids`, a block at a time. is_full: whether all but the newest blocks are coded
    again at once, as if there were no room."""
    kv = model.store.new_sequence()
    try:
        for _, hidden in states(model, kv, ids, every_token_coded=every_token_coded):
            yield model.logits(hidden)
            while is_full and model.store.finer is not None and model.store.finer.blocks.settled:
                model.store.finer.code_again()
    finally:
        model.store.release(kv)


def divergence(
    reference: Engine, engine: Engine, ids: Sequence[int], *, every_token_coded: bool, is_full: bool
) -> Divergence:
    """Return the divergence of an engine's distributions from the reference's, over all tokens of `ids`."""
    own = logits(engine._model, ids, every_token_coded=every_token_coded, is_full=is_full)
    return joined([compare(*both) for both in zip(logits(reference._model, ids), own, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m polarlm.bench.quality.two_kinds",
        description="Measure the cache types by-age and auto, the latter without room, next to compact and balanced.",
    )
    parser.add_argument("-m", "--model", help="the demonstration model if not given")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=4, help="windows of the text, from its beginning")
    arguments = parser.parse_args()
    rows = []
    with Engine.load(arguments.model, cache_type=FULL, device="cpu") as reference:
        # With room for four windows, or the whole context: no block is coded again for want of room.
        context = min(4 * arguments.window, reference.context)
        ids = reference.tokenize(arguments.text.read_text(encoding="utf-8"))
        cuts = [ids[i * arguments.window : (i + 1) * arguments.window] for i in range(arguments.windows)]
        bar = tqdm(total=len(CASES) * len(SCORINGS) * len(cuts), desc="Scoring", unit="window", disable=None)
        for name, cache_type in CASES.items():
            with Engine.load(arguments.model, cache_type=cache_type, ctx_size=context, device="cpu") as engine:
                cells = []
                for coded in SCORINGS.values():
                    found = []
                    for cut in cuts:
                        is_full = cache_type == BY_ROOM
                        found.append(divergence(reference, engine, cut, every_token_coded=coded, is_full=is_full))
                        bar.update()
                    kl = np.array([one.kl.mean() for one in found])
                    error = f" ± {kl.std(ddof=1) / len(kl) ** 0.5:.4f}" if len(kl) > 1 else ""
                    cells.append(f"{kl.mean():.4f}{error}")
                shape = engine.cache_shape
                bits = "—" if cache_type == BY_ROOM else f"{shape.bits_of_text(arguments.window):.3f}"
                rows.append([name, bits, *cells, f"{joined(found).same_top1.mean():.1%}"])
        bar.close()
    print(report.table(["cache type", "bits/value", *(f"KL, {name}" for name in SCORINGS), "same top-1, coded"], rows))


if __name__ == "__main__":
    main()
