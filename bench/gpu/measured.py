"""Results of `python -m polarlm.bench.gpu`, for comparison with predictions for the same GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.bench import report
from polarlm.bench.command import CacheType
from polarlm.bench.gpu.cache import ALLOWED_ERROR
from polarlm.bench.gpu.cost import NARROW, Prediction
from polarlm.bench.gpu.model import default_type
from polarlm.bench.gpu.shapes import shape_of
from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS
from polarlm.engine.cli.commands import note
from polarlm.model_loaders.config import ModelConfig

_KINDS = ("steps", "attention", "matrices", "prefill")  # kinds of rows
_ATTENTION_SHAPE = ("heads", "kv_heads", "head_dim")
_MATRICES = ("qkv", "out", "gate_up", "down", "head")


@dataclass(frozen=True)
class Run:
    """A file of results. shape: of the model, from `shape_of`; rows: kind → rows, as in `bench.gpu.tables`."""

    file: str
    gpu: str
    date: str
    shape: Mapping[str, int]
    rows: Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Predicted:
    """A predicted time in seconds, and which rows measure it.

    A row of `kind` measures it if its model has this shape and each column in `equal` has one of the given values; the
    measured time is in `column`. kernels: that take the time; none for a whole step or prompt.
    """

    what: str
    seconds: float
    kind: str
    column: str
    shape: Mapping[str, int]
    equal: Mapping[str, Sequence[Any]]
    kernels: tuple[str, ...] = ()

    def measured(self, run: Run) -> float | None:
        """The time in the results; None if it was not measured."""
        if not self.shape.items() <= run.shape.items():
            return None
        rows = (row for row in run.rows[self.kind] if all(row.get(name) in of for name, of in self.equal.items()))
        return next((row.get(self.column) for row in rows), None)


@dataclass(frozen=True)
class Pair:
    """A predicted and a measured time, in seconds. file: the name of the file with the measurement. kernels: that take
    the time; none for a whole step or prompt."""

    what: str
    predicted: float
    measured: float
    file: str
    kernels: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def runs_of(gpu: str, folders: Iterable[Path]) -> list[Run]:
    """The results in *.json files of `folders` whose GPU has the word `gpu` in its name, newest first.

    Times of attention with a wrong result are left out.
    """
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    runs = [run for file in files if (run := _read(file)) and gpu in report.slug(run.gpu).split("-")]
    return sorted(runs, key=lambda run: run.date, reverse=True)


def _read(file: Path) -> Run | None:
    """The results of a file; None if it has no results of a GPU, or, with a note, if it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        note(f"warning: {file} is left out, since it cannot be read: {error}")
        return None
    try:
        if found["benchmark"] != "gpu":
            return None
        rows = {kind: [row for row in found[kind] if row.get("error", 0) <= ALLOWED_ERROR] for kind in _KINDS}
        return Run(file.name, found["machine"]["gpu"]["name"], found["date"], found["model"], rows)
    except (KeyError, TypeError, AttributeError):  # from another program, or older than the field "model"
        return None


def pairs(runs: Sequence[Run], predicted: Iterable[Predicted]) -> list[Pair]:
    """The predicted times that have been measured, each with its newest measurement."""
    found: list[Pair] = []
    for time in predicted:
        measured = ((time.measured(run), run.file) for run in runs)
        found += [Pair(time.what, time.seconds, seconds, file, time.kernels) for seconds, file in measured if seconds][
            :1
        ]
    return found


def furthest_off(of: Iterable[Pair], count: int) -> list[Pair]:
    """Of the times of single products and attentions, the `count` whose measured time is most different from the
    predicted one, as a ratio in either direction; the most different first."""
    single = [pair for pair in of if pair.kernels]
    return sorted(single, key=lambda pair: -abs(math.log(pair.ratio)))[:count]


def times_of_prompt(
    config: ModelConfig,
    weights: str,
    cache_type: CacheType,
    tokens: int,
    parts: Sequence[Prediction],
) -> Iterator[Predicted]:
    """Yields the predicted times of a prompt that `bench.gpu` measures, if the cache type is the default."""
    if (cache_type.key, cache_type.value, cache_type.key_conditioning) == (*default_type(), True):
        shape = shape_of(config)
        equal: dict[str, Sequence[Any]] = {"tokens": [tokens], "weights": [weights]}
        seconds = sum(part.seconds for part in parts)
        yield Predicted(f"prompt of {tokens:,}, {weights}, with encoding", seconds, "prefill", "seconds", shape, equal)
        for attention in (part for part in parts if part.part == "attention"):
            what = f"attention of a layer, prompt of {tokens:,}"
            seconds, kernels = attention.seconds / attention.repeats, tuple(dict.fromkeys(attention.kernels))
            yield Predicted(what, seconds, "prefill", "attention_seconds", shape, equal, kernels)


def times_of_step(
    config: ModelConfig,
    weights: str,
    cache_type: CacheType,
    context: int,
    batch: int,
    parts: Sequence[Prediction],
    overlapped: float | None = None,
) -> Iterator[Predicted]:
    """Yields the predicted times of a step that `bench.gpu` measures. Its steps have the default cache type, and its
    time of a product is the mean of all layers, and of x in float32, also where a step has it rounded. overlapped:
    seconds of the step with overlapped launches, if any."""
    name, shape = f"{context:,} × {batch}", shape_of(config)
    place: dict[str, Sequence[Any]] = {"context": [context], "batch": [batch]}
    if (cache_type.key, cache_type.value, cache_type.key_conditioning) == (*default_type(), True):
        equal = {**place, "shortest": [context], "weights": [weights], "overlapped": [False, None]}
        seconds = sum(part.seconds for part in parts)
        yield Predicted(f"step, {weights}, {name}, without the host", seconds, "steps", "device", shape, equal)
        yield Predicted(
            f"step, {weights}, {name}, with the host and encoding", seconds, "steps", "seconds", shape, equal
        )
        yield Predicted(f"step, {weights}, {name}, begun ahead, with encoding", seconds, "steps", "ahead", shape, equal)
        if overlapped is not None:
            equal = {**equal, "overlapped": [True]}
            yield Predicted(
                f"step, {weights}, {name}, overlapped, without the host", overlapped, "steps", "device", shape, equal
            )
    labels = [cache_type.label, *([cache_type.pair] if cache_type.key_conditioning else [])]
    heads = {field: shape[field] for field in _ATTENTION_SHAPE}
    for part in parts:
        if part.part == "attention":
            equal, seconds = {**place, "cache_type": labels}, part.seconds / part.repeats
            yield Predicted(
                f"attention of a layer, {name}", seconds, "attention", "seconds", heads, equal, part.kernels
            )
    for matrix in _MATRICES:
        same = [part for part in parts if part.part.split(" ")[0] == matrix]
        if same:
            seconds = sum(part.seconds for part in same) / sum(part.repeats for part in same)
            if batch > GEMV_ROWS and not any("narrow" in part.kernels for part in same):
                seconds += NARROW
            equal = {"name": [matrix], "rows": [batch], "weights": [weights]}
            kernels = tuple(dict.fromkeys(kernel for part in same for kernel in part.kernels))
            what = f"{matrix}, {weights}, batch {batch}"
            yield Predicted(what, seconds, "matrices", "seconds", shape, equal, kernels)
