"""`polarlm speed --only embeddings`: tokens per second of the texts of an embedding model, beside llama.cpp.

Ids in, vectors out. Both engines take turns, round after round, and the best round of each counts. llama.cpp computes
several texts in a batch; its batches have 512 tokens by default, and the best of four sizes is named as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.report import digest_of_model, table
from polarlm.bench.speed import peers
from polarlm.bench.speed.child import Child, Failed
from polarlm.bench.speed.compare import peer_paths
from polarlm.bench.speed.options import Options
from polarlm.bench.speed.peers import llama_cpp_python
from polarlm.bench.speed.referee import in_turn
from polarlm.engine import Engine, EngineError
from polarlm.engine.cli.commands import note

_OURS = "ours"
_DEFAULT_BATCH = 512  # tokens; llama.cpp's default
_BATCHES = 128, 256, _DEFAULT_BATCH, 1024
_LENGTHS = {"32 tokens": (32, 32), "8 to 128 tokens": (8, 128)}
_FIRST_ID = 1000  # in BERT's vocabulary, control tokens and unused ones come before it


def measure(options: Options) -> dict[str, Any]:
    """What llama.cpp says about itself, and the rows of all models. Raises FlagError, EngineError or LoadError."""
    paths = [part.strip() for part in (options.weights or "").split(",") if part.strip()]
    if not paths:
        raise EngineError("--weights names no .gguf file of an encoder")
    python = peer_paths(options.peer).get(peers.DEFAULT)
    if python is None:
        raise EngineError(f"--peer {options.peer}: texts are compared with {peers.DEFAULT}")
    rows: list[dict[str, Any]] = []
    try:
        for path in paths:
            about, rows_of_model = _measured(path, python, options)
            rows += rows_of_model
    except Failed as reason:
        raise EngineError(f"{peers.DEFAULT} of --peer {python}: {reason}") from None
    return {"peer": about, "rows": rows, **digest_of_model(map(Path, paths))}


def _measured(path: str, python: str, options: Options) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """What llama.cpp says about itself, and the rows of a model. Raises Failed."""
    threads = options.thread_count(1)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.load(path, threads=threads))
        if not engine.model.config.is_encoder:
            raise EngineError(f"{path} is no encoder, such as BERT")
        children = {size: stack.enter_context(closing(Child(llama_cpp_python.__name__, python))) for size in _BATCHES}
        for size, child in children.items():
            child.call("start", path, size, threads, llama_cpp_python.EMBEDDINGS)
        rows = [_row(name, engine, children, options) for name in _LENGTHS]
        return children[_DEFAULT_BATCH].call("about"), rows


def _row(lengths: str, engine: Engine, children: Mapping[int, Child], options: Options) -> dict[str, Any]:
    """The tokens per second of texts of some lengths in all rounds of each engine.

    cosine: between the vectors of both engines, of the first text.
    """
    texts = _texts(*_LENGTHS[lengths], options.token_count(), len(engine.model.vocabulary))
    count = sum(map(len, texts))
    for child in children.values():
        child.call("take", texts)

    def ours() -> dict[str, Any]:
        began = time.perf_counter()
        vector = engine.embed_each(texts)[0].vector
        return {"seconds": time.perf_counter() - began, "first": vector}

    contestants: dict[str, Callable[[], dict[str, Any]]] = {_OURS: ours}
    contestants |= {str(size): partial(child.call, "vectors") for size, child in children.items()}
    rounds = in_turn(contestants, options.repeat)
    vector = rounds[_OURS][0]["first"]
    cosine = min(float(vector @ np.asarray(run["first"])) for runs in rounds.values() for run in runs)
    rates = {name: [count / run["seconds"] for run in runs] for name, runs in rounds.items()}
    own_rates, dtype = rates.pop(_OURS), engine.model.dtype
    best = max(max(runs) for runs in rates.values())
    note(f"{dtype}, texts of {lengths}: {max(own_rates):,.0f} tokens/s, llama.cpp {best:,.0f}")
    return {"weights": dtype, "texts": lengths, "tokens": count, "ours": own_rates, "theirs": rates, "cosine": cosine}


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
