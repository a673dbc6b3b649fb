"""`python -m polarlm.bench.speed.embeddings`: tokens per second of the texts of an embedding model, beside llama.cpp.

Ids in, vectors out. Both engines take turns, round after round, and the best round of each counts. llama.cpp computes
several texts in a batch; its batches have 512 tokens by default, and the best of four sizes is named as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench import report
from polarlm.bench.command import at_least
from polarlm.bench.report import Output, table
from polarlm.bench.speed.child import Child, Failed
from polarlm.engine import Engine, EngineError
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import setting

_PEER = "polarlm.bench.speed.llama_embedder"
_DEFAULT_BATCH = 512  # of llama.cpp
_BATCHES = 128, 256, _DEFAULT_BATCH, 1024
_LENGTHS = {"32 tokens": (32, 32), "8 to 128 tokens": (8, 128)}
_FIRST_ID = 1000  # in BERT's vocabulary, control tokens and unused ones come before it


@dataclass(frozen=True)
class Options:
    """The flags."""

    weights: str = setting("", "--weights", "-m", metavar="PATH,…", help=".gguf files of encoders")
    peer: str = setting(sys.executable, "--peer", metavar="PATH", help="a Python that has llama-cpp-python")
    threads: int = setting(1, "--threads", metavar="N", help="CPU threads of both engines")
    tokens: int = setting(8192, "--tokens", metavar="N", help="of all texts of a round")
    rounds: int = setting(3, "--rounds", metavar="N", help="of which the best one counts")


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes JSON, prints the table."""
    options, destination = parse(
        argv,
        {"Embeddings": Options, "Output": Output},
        prog="python -m polarlm.bench.speed.embeddings",
        description="Tokens a second of the texts of an embedding model, beside llama.cpp.",
        checks=dict.fromkeys(("threads", "tokens", "rounds"), at_least(1)),
    )
    paths = [Path(part.strip()) for part in options.weights.split(",") if part.strip()]
    if not paths:
        raise EngineError("--weights names no .gguf file of an encoder")
    output = destination.path("embeddings", " ".join(path.stem for path in paths))
    rows: list[dict[str, Any]] = []
    about: dict[str, str] = {}
    for path in paths:
        about, own = _measured(path, options)
        rows += own
    result = {"options": asdict(options), "peer": about, "rows": rows}
    report.write(output, "speed.embeddings", argv, result)
    note(f"Written to {output}")
    print(format_result(result))


def _measured(path: Path, options: Options) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What llama.cpp says about itself, and the rows of a model. Raises EngineError."""
    try:
        with ExitStack() as stack:
            engine = stack.enter_context(Engine.load(str(path), threads=options.threads))
            if not engine.model.config.is_encoder:
                raise EngineError(f"{path} is no encoder, such as BERT")
            peers = {size: stack.enter_context(closing(Child(_PEER, options.peer))) for size in _BATCHES}
            for size, peer in peers.items():
                peer.call("start", str(path), options.threads, size)
            rows = [_row(name, engine, peers, options) for name in _LENGTHS]
            return peers[_DEFAULT_BATCH].call("about"), rows
    except Failed as reason:
        raise EngineError(f"llama-cpp-python of --peer {options.peer}: {reason}") from None


def _row(name: str, engine: Engine, peers: Mapping[int, Child], options: Options) -> dict[str, Any]:
    """The tokens per second of texts of some lengths: all rounds of each engine, the first of which is not among them.

    cosine: between the vectors of both engines, of the first text.
    """
    texts = _texts(*_LENGTHS[name], options.tokens, len(engine.model.vocabulary))
    count = sum(map(len, texts))
    for peer in peers.values():
        peer.call("take", texts)
    ours: list[float] = []
    theirs: dict[int, list[float]] = {size: [] for size in peers}
    cosine = 1.0
    for number in range(-1, options.rounds):
        began = time.perf_counter()
        vector = engine.embed_each(texts)[0].vector
        seconds = time.perf_counter() - began
        found = {size: peer.call("vectors") for size, peer in peers.items()}
        cosine = min(float(vector @ np.asarray(one["first"])) for one in found.values())
        if number >= 0:
            ours.append(count / seconds)
            for size, one in found.items():
                theirs[size].append(count / one["seconds"])
    dtype, best = engine.model.dtype, max(max(rates) for rates in theirs.values())
    note(f"{dtype}, texts of {name}: {max(ours):,.0f} tokens/s, llama.cpp {best:,.0f}")
    return {"weights": dtype, "texts": name, "tokens": count, "ours": ours, "theirs": theirs, "cosine": cosine}


def _texts(shortest: int, longest: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random ids: texts of random lengths, of about `tokens` tokens together."""
    rng = np.random.default_rng(0)
    count = max(1, round(2 * tokens / (shortest + longest)))
    lengths = rng.integers(shortest, longest, count, endpoint=True)
    return [rng.integers(min(_FIRST_ID, vocabulary - 1), vocabulary, length).tolist() for length in lengths]


def format_result(result: Mapping[str, Any]) -> str:
    """The table of a result."""
    rows = []
    for row in result["rows"]:
        ours = max(row["ours"])
        theirs = {int(size): max(rates) for size, rates in row["theirs"].items()}
        best = max(theirs, key=theirs.__getitem__)
        rows.append(
            [
                *(row["weights"], row["texts"], f"{ours:,.0f}", f"{theirs[_DEFAULT_BATCH]:,.0f}"),
                *(f"{theirs[best]:,.0f} ({best})", f"{ours / theirs[best]:.1f}"),
            ]
        )
    headings = ["Weights", "Texts of", "polarlm", f"llama.cpp, {_DEFAULT_BATCH}", "llama.cpp, best", "polarlm / best"]
    return table(headings, rows)


if __name__ == "__main__":
    sys.exit(main())
