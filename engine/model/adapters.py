"""The adapters (LoRA) of a model: which one a request asks for, and the matrices of all that change a product."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from polarlm import model_loaders
from polarlm.engine.backends.ops import Ops, Routing
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError, shown
from polarlm.engine.params import PromptOptions
from polarlm.engine.state.prefix import join_salt
from polarlm.engine.state.store import RowAdapter, Span
from polarlm.engine.weight_formats import Deltas, ExpertLinear, WeightFormat, get
from polarlm.model_loaders import hub
from polarlm.model_loaders.adapters import Adapter, Factors, read_adapter
from polarlm.model_loaders.config import MOST_EXPERTS, Experts, ModelConfig
from polarlm.model_loaders.families import tensors
from polarlm.model_loaders.files.tensor_table import OF_EXPERTS

_ADAPTER_NAME = re.compile(r"\w[\w.-]{0,99}")
_SCALE = re.compile(r"(?P<path>.+):(?P<scale>-?(\d+\.?\d*|\.\d+))")
_RANKS = 8  # ranks are filled up to a multiple of this, for a GPU's rows of weights


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter of an engine: `scale` multiplies what it adds."""

    adapter: Adapter
    scale: float

    def key(self, scale: float = 1.0) -> str:
        """What tells K/V of the adapter, `scale` times as strong, from all others."""
        return f"{self.adapter.digest} {self.scale * scale!r}"


Loaded = Sequence[LoadedAdapter | None]
"""The adapters that a model computes with, by their numbers, which never change: None is where one was."""


@dataclass(frozen=True)
class Adapters:
    """The adapters that requests choose among, by their names. all: also has those that requests chose before they were
    unloaded. unloaded: names that requests could give."""

    by_name: Mapping[str, LoadedAdapter] = field(default_factory=dict)
    all: Loaded = ()
    unloaded: frozenset[str] = frozenset()

    def add(self, name: str, one: LoadedAdapter) -> Adapters:
        """Return these and another one. Raises EngineError if the name is taken."""
        if name in self.by_name:
            raise EngineError(f"The adapter {name} is loaded already: unload it, or give this one another name")
        number = self.all.index(None) if None in self.all else len(self.all)
        everyone = (*self.all[:number], one, *self.all[number + 1 :])
        return Adapters({**self.by_name, name: one}, everyone, self.unloaded - {name})

    def unload(self, name: str) -> Adapters:
        """Return these, of which requests cannot choose this one any more. Raises EngineError if there is none."""
        self._check(name)
        by_name = {other: one for other, one in self.by_name.items() if other != name}
        return replace(self, by_name=by_name, unloaded=self.unloaded | {name})

    def drop_unused(self, used: Collection[int]) -> Adapters:
        """Return these without those that are unloaded. used: numbers that requests have."""
        chosen = [*self.by_name.values()]
        everyone = [one if one in chosen or number in used else None for number, one in enumerate(self.all)]
        while everyone and everyone[-1] is None:
            everyone.pop()
        return replace(self, all=tuple(everyone))

    @property
    def numbers(self) -> dict[int, str]:
        """Their numbers and names."""
        return {self.all.index(one): name for name, one in self.by_name.items()}

    @property
    def scales(self) -> dict[str, float]:
        """Their names and scales."""
        return {name: one.scale for name, one in self.by_name.items()}

    def salt(self, options: PromptOptions) -> str:
        """Return the salt of a request with these options. Raises EngineError for an unknown adapter."""
        return join_salt(options.cache_salt, self.choose(options.lora, options.lora_scale)[1])

    def choose(self, name: str, scale: float) -> tuple[RowAdapter | None, str]:
        """Return the adapter that a request names, times a factor, and what tells its K/V from others, as
        `join_salt` takes it; (None, "") for no name. Raises EngineError for an unknown one."""
        if name:
            self._check(name)
        if not name or scale == 0:
            return None, ""
        adapter = self.by_name[name]
        return RowAdapter(self.all.index(adapter), adapter.scale * scale), adapter.key(scale)

    def _check(self, name: str) -> None:
        if name not in self.by_name:
            there = ", ".join(self.by_name) or "none: give some with --lora NAME=PATH"
            sentence = f"lora is {name!r}, but there is no adapter of this name; there are {there}"
            raise EngineError(sentence, "model_not_found") if name in self.unloaded else EngineError(sentence)

    def knows(self, adapter: str) -> bool:
        """Whether an adapter in a salt is one of these."""
        return adapter.partition(" ")[0] in {one.adapter.digest for one in self.by_name.values()}


def read_adapters(
    config: EngineConfig,
    model: ModelConfig,
    weights: model_loaders.WeightSource,
    say: Callable[[str], None] = lambda sentence: None,
) -> Adapters:
    """Return the adapters that `config` names, for a model and its weights. Raises EngineError."""
    adapters = Adapters()
    for name, text in config.lora.items():
        adapters = adapters.add(name, load_adapter(name, text, model, weights, say))
    return adapters


def load_adapter(
    name: str,
    text: str,
    model: ModelConfig,
    weights: model_loaders.WeightSource,
    say: Callable[[str], None] = lambda sentence: None,
) -> LoadedAdapter:
    """Return the adapter at PATH[:SCALE], for a model and its weights. Raises EngineError."""
    if model.is_encoder:
        raise EngineError("This is an embedding model, which takes no adapters", settings=("lora",))
    is_gguf = any(file.suffix == ".gguf" for file in weights.files())
    path, scale = parse_adapter(text)
    try:
        is_on_hub = path.startswith(hub.PREFIX)
        where = hub.fetch_supplement(hub.parse(path), "adapter", say) if is_on_hub else Path(path).expanduser()
        if not where.exists():
            sentence = f"lora={name}: {where} does not exist; give a folder of peft, or a GGUF file"
            raise EngineError(sentence, "model_unavailable", ("lora",))
        adapter = read_adapter(where, model, is_gguf=is_gguf)
    except model_loaders.LoadError as error:
        raise EngineError(str(error), "model_unavailable", ("lora",)) from error
    rank = max(change.rank for change in adapter.changes.values())
    say(f"Adapter {name}: rank {rank}, {len(adapter.changes)} matrices" + (f", scale {scale:g}" * (scale != 1)))
    return LoadedAdapter(adapter, scale)


def parse_adapter(text: str) -> tuple[str, float]:
    """Return the path and the scale in PATH[:SCALE]. A path that exists is one as a whole."""
    match = _SCALE.fullmatch(text)
    if match is None or Path(text).expanduser().exists():
        return text, 1.0
    return match["path"], float(match["scale"])


def check_adapters(lora: Mapping[str, str]) -> None:
    """Raises EngineError for a name that no request could give."""
    for name, path in lora.items():
        if not isinstance(name, str) or not _ADAPTER_NAME.fullmatch(name):
            raise EngineError(
                f"lora={shown(name)}: give the adapter a name of letters, digits, dots and dashes, 100 at most, as in "
                "NAME=PATH",
                settings=("lora",),
            )
        if not isinstance(path, str) or not path:
            raise EngineError(f"lora={name}: give the path of a folder of peft, or of a GGUF file", settings=("lora",))
        if parse_adapter(path)[1] == 0:
            raise EngineError(f"lora={name}: a scale of 0 leaves nothing of the adapter", settings=("lora",))


def row_adapters(spans: Sequence[Span]) -> Routing | None:
    """Return the number of each row's adapter, and its scale, on the host; None if no row has one. A row without an
    adapter has another row's number, so that no further matrices are read, and the scale 0."""
    if {span.sequence.adapter for span in spans} == {None}:
        return None
    other = next(adapter.number for span in spans if (adapter := span.sequence.adapter) is not None)
    of_spans = [span.sequence.adapter or (other, 0.0) for span in spans]
    counts = [span.count for span in spans]
    numbers, scales = (np.repeat(column, counts)[:, None] for column in zip(*of_spans, strict=True))
    return Routing(numbers.astype(np.int32), scales.astype(np.float32))


def deltas(
    ops: Ops, adapters: Loaded, names: Sequence[str], rows: Sequence[int], experts: int | None = None
) -> Deltas | None:
    """Load what adapters add to the product of a `Linear`, or of an `ExpertLinear` of so many `experts`, with the
    tensors `names` of `rows` rows; None if none changes it. An adapter's rank is the sum of the ranks of its changes of
    these tensors, or of an expert's. Raises EngineError for what the device does not compute."""
    names_of_each = _split_by_expert(names, experts or 1)
    rank = max(_rank(adapters, one) for one in names_of_each)
    if not rank:
        return None
    if experts is not None and ops.backend == "cuda":
        raise EngineError("This adapter is of experts, which is computed on a CPU alone: run the model with device=cpu")
    if experts is not None and len(adapters) * experts > MOST_EXPERTS:
        raise EngineError(f"{MOST_EXPERTS // experts} adapters of {experts} experts are the most: unload one")
    all_changes = [_changes(one) for one in adapters]
    columns = next(len(change.a[0]) for changes in all_changes for name in names if (change := changes.get(name)))
    pairs = [*itertools.product(all_changes, names_of_each)]
    a = np.zeros((len(pairs), rank, columns), np.float32)
    b = np.zeros((len(pairs), sum(rows) // (experts or 1), rank), np.float32)
    for number, (changes, names_of_one) in enumerate(pairs):
        first, begin = 0, 0
        for name, count in zip(names_of_one, rows, strict=False):
            if (change := changes.get(name)) is not None:
                a[number, begin : begin + change.rank] = change.a
                b[number, first : first + count, begin : begin + change.rank] = change.b
                begin += change.rank
            first += count
    format = _format(adapters)
    parts = (ops.load_experts([[_Values(one, format)] for one in each]) for each in (a, b))
    return Deltas(*(ExpertLinear(len(pairs), part) for part in parts))


def delta_bytes(ops: Ops, config: ModelConfig, adapters: Loaded) -> int:
    """Return the bytes of what adapters add to all layers on the device, and of results of the rows of a chunk."""
    if not any(adapters):
        return 0
    sizes = list[tuple[int, int, int]]()  # of a product: its rank, inputs and outputs of a row, experts
    for layer, slots in zip(config.layers, tensors(config).layers, strict=True):
        for slot, specs in slots.items():
            experts = layer.ffn.count if slot in OF_EXPERTS and isinstance(layer.ffn, Experts) else 1
            rank = max(_rank(adapters, one) for one in _split_by_expert([spec.name for spec in specs], experts))
            if rank and all(len(spec.shape) == 2 for spec in specs):
                rows = sum(spec.shape[0] for spec in specs) // experts
                sizes.append((rank, specs[0].shape[1] + rows, experts))
    matrices = ops.matrix_bytes(_format(adapters), sum(math.prod(size) for size in sizes))
    return len(adapters) * matrices + 4 * ops.prefill_rows * max(rank + width for rank, width, _ in sizes)


def _split_by_expert(names: Sequence[str], experts: int) -> list[Sequence[str]]:
    """The names of the first expert's tensors, then the next one's."""
    each = len(names) // experts
    return [names[first : first + each] for first in range(0, len(names), each)]


def _changes(one: LoadedAdapter | None) -> Mapping[str, Factors]:
    return {} if one is None else one.adapter.changes


def _rank(adapters: Loaded, names: Sequence[str]) -> int:
    """0 if no adapter changes these tensors."""
    changes = map(_changes, adapters)
    most = max((sum(change[name].rank for name in names if name in change) for change in changes), default=0)
    return -(-most // _RANKS) * _RANKS


def _format(adapters: Loaded) -> WeightFormat:
    """16 bits if all files have the same ones."""
    kinds = {one.adapter.dtype for one in adapters if one is not None}
    return get(kinds.pop().lower() if len(kinds) == 1 else "f32")


@dataclass(frozen=True)
class _Values:
    """A `StoredMatrix` in memory. values (out, in) float32: they are rounded to the format."""

    values: np.ndarray
    format: WeightFormat

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def dequantize(self, out: np.ndarray) -> None:
        for rows, raw in self.slabs(1 << 20):
            self.format.dequantize(raw, out[rows])

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        assert self.format.quantize is not None
        count, columns = self.values.shape
        step = max(1, nbytes // self.format.size(columns))
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            yield rows, self.format.quantize(np.ascontiguousarray(self.values[rows]))
