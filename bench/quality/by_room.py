"""What `--cache-type auto` costs: with room for all blocks and with all coded again, compared with its two types.

    python -m polarlm.bench.quality.by_room --text text.txt

Each text is read as in steps: complete blocks as codes, the first and the current block in full precision. KL is that
of the next token's distributions from those of an f16 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from polarlm.bench.quality.divergence import Divergence, compare, joined
from polarlm.engine import Engine
from polarlm.engine.codecs import FULL
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.score import states
from polarlm.engine.state.cache_types import BY_ROOM, COARSER, FINER


def logits(model: Transformer, ids: Sequence[int], *, is_full: bool = False) -> Iterator[np.ndarray]:
    """Yield the logits (rows, V) of `ids`, a block at a time. is_full: whether each block is coded again at once."""
    kv = model.store.new_sequence()
    try:
        for _, hidden in states(model, kv, ids):
            yield model.logits(hidden)
            while is_full and model.store.finer is not None and model.store.finer.code_again():
                pass
    finally:
        model.store.release(kv)


def divergence(reference: Engine, engine: Engine, windows: Sequence[Sequence[int]], *, is_full: bool) -> Divergence:
    """Return the divergence of an engine's distributions from the reference's, over all tokens of `windows`."""
    pairs = (
        zip(logits(reference._model, ids), logits(engine._model, ids, is_full=is_full), strict=True) for ids in windows
    )
    return joined([compare(exact, own) for window in pairs for exact, own in window])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m polarlm.bench.quality.by_room",
        description="Measure the cache type auto with room and without.",
    )
    parser.add_argument("-m", "--model", help="the demonstration model if not given")
    parser.add_argument("--text", type=Path, required=True, action="append", help="may be repeated")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=3, help="windows of each text, from its beginning")
    arguments = parser.parse_args()
    cases = {FINER: (FINER, False), "auto, with room": (BY_ROOM, False)}
    cases |= {"auto, every block coded again": (BY_ROOM, True), COARSER: (COARSER, False)}

    def load(cache_type: str) -> Engine:
        # With room for four windows, so that no block is coded again for want of it.
        return Engine.load(arguments.model, cache_type=cache_type, ctx_size=4 * arguments.window, device="cpu")

    with load(FULL) as reference:
        for path in arguments.text:
            ids = reference.tokenize(path.read_text(encoding="utf-8"))
            cuts = [ids[i * arguments.window : (i + 1) * arguments.window] for i in range(arguments.windows)]
            print(f"{path.name}: {len(cuts)} windows of {arguments.window} tokens")
            for name, (cache_type, is_full) in cases.items():
                with load(cache_type) as engine:
                    found = divergence(reference, engine, cuts, is_full=is_full)
                kl = [part.mean() for part in np.split(found.kl, len(cuts))]
                error = np.std(kl, ddof=1) / len(kl) ** 0.5 if len(kl) > 1 else 0.0
                print(f"{name:30} KL {found.kl.mean():.5f} ± {error:.5f}, same top-1 {found.same_top1.mean():.1%}")


if __name__ == "__main__":
    main()
