"""Loads the tensors of files as the weights of the forward pass, reading each once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from polarlm.engine.backends.ops import Array, ExpertCache, Ops
from polarlm.engine.config import format_bytes
from polarlm.engine.model import vision_encoders
from polarlm.engine.model.adapters import Loaded, deltas
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.layers.encoder import EncoderInputs, PairHead
from polarlm.engine.model.layers.kinds import FFNS, MIXERS, HeadWeights, LayerWeights, MtpWeights
from polarlm.engine.model.layers.layer_embedding import LayerEmbeddingWeights, TokenInputs
from polarlm.engine.model.vision_encoders import ImageReader
from polarlm.engine.weight_formats import Deltas, ExpertLinear, Linear, Matrix, WeightFormat, find, get
from polarlm.model_loaders.config import Experts, ModelConfig
from polarlm.model_loaders.families import tensors
from polarlm.model_loaders.files.ggml_types import size_of
from polarlm.model_loaders.files.tensor_table import OF_EXPERTS, Slots
from polarlm.model_loaders.files.weights import WeightSource
from polarlm.model_loaders.vision_encoders import VisionEncoder
from polarlm.model_loaders.vision_encoders import tensors as vision_tensors

_SLAB_VALUES = 1 << 18  # converted at a time: they stay in the CPU's cache
T = TypeVar("T")


@dataclass(frozen=True)
class FileMatrix:
    """A `StoredMatrix` in a file. format: the file's, whose bytes are not changed, or another one, to which values are
    rounded. progress: called with the bytes of the file that were read since its last call. begin: called before
    reading."""

    source: WeightSource
    name: str
    format: WeightFormat
    progress: Callable[[int], None] = lambda nbytes: None
    begin: Callable[[], None] = lambda: None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.source.shape(self.name)
        return rows, columns

    def expect(self) -> None:
        self.source.expect(self.name)

    def dequantize(self, out: np.ndarray) -> None:
        for rows, raw in self.slabs(self.format.size(_SLAB_VALUES)):
            self.format.dequantize(raw, out[rows])

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        self.begin()
        count, columns = self.shape
        step = max(1, nbytes // self.format.size(columns))
        is_raw = find(self.source.stored_dtype(self.name)) is self.format
        converted = None if is_raw else np.empty((min(step, count), self.format.size(columns)), np.uint8)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            if converted is None:
                yield rows, self.source.read_raw(self.name, rows)
            else:
                raw = converted[: rows.stop - first]
                self._convert(rows, raw)
                yield rows, raw
            self.progress(size_of(self.source.stored_dtype(self.name), (rows.stop - first) * columns))

    def _convert(self, rows: slice, raw: np.ndarray) -> None:
        assert self.format.quantize is not None
        columns = self.shape[1]
        step = max(1, _SLAB_VALUES // max(1, columns))
        for first in range(rows.start, rows.stop, step):
            part = slice(first, min(first + step, rows.stop))
            values = np.empty((part.stop - first, columns), np.float32)
            self.source.read_into(self.name, values, part)
            raw[first - rows.start : part.stop - rows.start] = self.format.quantize(values)


def format_for(ops: Ops, stored: str, columns: int, wanted: WeightFormat | None) -> WeightFormat:
    """Return the format in which `ops` gets a matrix with rows of `columns` values that the file stores as `stored`.

    wanted: the format to convert it to; None: the file's. Blocks that the backend does not keep become q8_0 if it keeps
    that; their rows are whole blocks of it, too. Else types without a weight format become float32.
    """
    if wanted is not None:
        return nearest(wanted, stored, columns)
    file_format, q8_0 = find(stored), get("q8_0")
    if file_format is not None and (file_format.values == 1 or ops.stored_format(file_format) is file_format):
        return file_format
    return q8_0 if ops.stored_format(q8_0) is q8_0 else file_format or get("f32")


def nearest(wanted: WeightFormat, stored: str, columns: int) -> WeightFormat:
    """Return `wanted` if rows are whole blocks of it, else the file's own format; f16 if that is float32 or unknown."""
    if fits(columns, wanted):
        return wanted
    file_format = find(stored)
    return get("f16") if file_format is None or file_format.name == "f32" else file_format


def fits(columns: int, format: WeightFormat) -> bool:
    """Whether rows of `columns` values are whole blocks."""
    return columns % format.values == 0


class TensorReader:
    """Loads named tensors to the device. weight_type: the format to convert matrices to; None: the file's."""

    def __init__(
        self,
        ops: Ops,
        source: WeightSource,
        progress: Callable[[int], None] | None,
        weight_type: WeightFormat | None = None,
        cache: ExpertCache | None = None,
    ):
        self._ops, self._source, self._progress = ops, source, progress or (lambda nbytes: None)
        self._weight_type, self._cache = weight_type, cache
        self.bytes = 0

    def vector(self, names: Sequence[str], scale: float = 1.0) -> Array:
        """Load tensors (n_i,), concatenated, as float32, times `scale`."""
        sizes = [self._source.shape(name)[0] for name in names]
        whole, end = np.empty(sum(sizes), np.float32), 0
        for name, size in zip(names, sizes, strict=True):
            self._source.read_into(name, whole[end : end + size])
            end += size
            self._progress(size_of(self._source.stored_dtype(name), size))
        whole *= np.float32(scale)
        self.bytes += whole.nbytes
        return self._ops.to_device(whole)

    def matrices(self, names: Sequence[str]) -> tuple[Matrix, ...]:
        """Load tensors (rows_i, columns) as the parts of one matrix."""
        matrices = self._ops.load(self._matrices(names))
        self._count(matrices)
        return matrices

    def _matrices(self, names: Sequence[str]) -> list[FileMatrix]:
        """While the first is packed, the system reads the others ahead."""
        waiting = [*names]

        def begin() -> None:
            while waiting:
                self._source.expect(waiting.pop(0))

        formats = (_format(self._ops, self._source, name, self._weight_type) for name in names)
        return [
            FileMatrix(self._source, name, format, self._progress, begin)
            for name, format in zip(names, formats, strict=True)
        ]

    def linear(self, weights: Sequence[str], biases: Sequence[str] = ()) -> Linear:
        """Load a projection whose output is the concatenation of the outputs of `weights`, with `biases`."""
        return Linear(self.matrices(weights), self.vector(biases) if biases else None)

    def experts(self, count: int, weights: Sequence[str], biases: Sequence[str]) -> ExpertLinear:
        """Load a projection of `count` experts. weights, biases: the first expert's, then the next one's."""
        each, matrices = len(weights) // count, self._matrices(weights)
        stored = [matrices[first : first + each] for first in range(0, len(weights), each)]
        if self._cache is None:
            parts = self._ops.load_experts(stored)
            self._count(parts)
        else:
            assert self._ops.cache_experts is not None
            later = [[FileMatrix(one.source, one.name, one.format) for one in expert] for expert in stored]
            parts = self._ops.cache_experts(later, self._cache)
            self._count(parts, self._cache.experts / count)
            for name in weights:
                self._progress(_file_bytes(self._source, name))
        return ExpertLinear(count, parts, self.vector(biases).reshape(count, -1) if biases else None)

    @property
    def expands_latents(self) -> bool:
        latent_ops = self._ops.latent_ops
        return latent_ops is not None and latent_ops.expansion_ops is not None

    def heads(self, weights: Sequence[str]) -> ExpertLinear:
        """Load a matrix of each head."""
        parts = self._ops.load_experts([[one] for one in self._matrices(weights)])
        self._count(parts)
        return ExpertLinear(len(weights), parts)

    def _count(self, matrices: Sequence[Matrix], share: float = 1.0) -> None:
        """share: the part of the matrices that is in memory at a time."""
        counts = ((matrix.format, round(share * math.prod(matrix.shape))) for matrix in matrices)
        self.bytes += sum(self._ops.matrix_bytes(format, count) for format, count in counts)


def load_weights(
    ops: Ops,
    config: ModelConfig,
    source: WeightSource,
    progress: Callable[[int], None] | None = None,
    weight_type: WeightFormat | None = None,
    numbers: Sequence[int] | None = None,
    cache: ExpertCache | None = None,
    on_host: int = 0,
    adapters: Loaded = (),
) -> ModelWeights:
    """Load all weights to the device. Matrices are converted to `weight_type`; None keeps the file's format.

    progress: called with the bytes of the file that are done since its last call. numbers: the layers to load; None:
    all. cache: see `Ops.cache_experts`. on_host: the experts of this many layers, the first ones,
    stay on `Ops.host`. adapters: the adapters that requests choose from.
    """
    readers: dict[Ops, TensorReader] = {}  # one for each GPU

    def reader(layer: int) -> TensorReader:
        layer_ops = ops.layer_ops(layer)
        if layer_ops not in readers:
            readers[layer_ops] = TensorReader(layer_ops, source, progress, weight_type, cache)
        return readers[layer_ops]

    read, last = reader(0), len(config.layers) - 1
    host_reader = None if ops.host is None else TensorReader(ops.host, source, progress, weight_type)
    table = tensors(config)
    top = {slot: [spec.name for spec in specs] for slot, specs in table.top.items()}
    (embedding,) = read.matrices(top["embedding"])
    layers = list[LayerWeights]()
    head_kind = HeadWeights if config.eagle3 or config.assistant else MtpWeights
    for number in range(len(config.layers)) if numbers is None else numbers:
        layer = config.layers[number]
        reader_of_layer = reader(number)
        expert_reader = host_reader if host_reader is not None and number < on_host else reader_of_layer
        count = layer.ffn.count if isinstance(layer.ffn, Experts) else 0
        layer_reader = LayerReader(reader_of_layer, expert_reader, table.layers[number], count)
        layers.append(
            LayerWeights(
                layer_reader.weights(MIXERS[type(layer.mixer)].Weights),
                None if layer.ffn is None else layer_reader.weights(FFNS[type(layer.ffn)].Weights),
                layer_reader.vector("layer_scale"),
                layer_reader.weights(LayerEmbeddingWeights) if "layer_gate" in layer_reader.slots else None,
                layer_reader.weights(head_kind) if number == config.depth else None,
            )
        )
    last_reader = reader(last)
    norm = last_reader.vector(top["norm"], config.logit_scale) if "norm" in top else None
    head = Linear((embedding,))
    if "head" in top or last_reader is not read:  # a GPU that lacks the embedding has a copy of it
        head = last_reader.linear(top.get("head", top["embedding"]))
    top_reader = LayerReader(read, read, table.top, 0)
    inputs = top_reader.weights(TokenInputs) if "layer_embedding" in top else None
    encoder_inputs = top_reader.weights(EncoderInputs) if "embedding_norm" in top else None
    dense = [last_reader.linear(top[f"dense_{i}"], top.get(f"dense_{i}_bias", ())) for i in range(len(config.dense))]
    pair_head = top_reader.weights(PairHead) if config.scores_pairs else None
    nbytes = sum(one.bytes for one in readers.values())
    weights = ModelWeights(embedding, layers, norm, head, nbytes, inputs, cache, encoder_inputs, dense, pair_head)
    weights = with_adapters(ops, config, weights, adapters, numbers) if adapters else weights
    ops.wait()  # on a GPU, an overlapped launch may read weights before their upload has finished
    return weights


def with_adapters(
    ops: Ops, config: ModelConfig, weights: ModelWeights, adapters: Loaded, numbers: Sequence[int] | None = None
) -> ModelWeights:
    """Return the same weights with what these adapters add to products, and nothing else. numbers: as in
    `load_weights`."""
    table, nbytes = tensors(config).layers, weights.bytes

    def change(layer_ops: Ops, part: Any, slots: Slots) -> Any:
        nonlocal nbytes
        changed = {}
        for one in fields(part) if part is not None else ():
            linear, slot = getattr(part, one.name), one.metadata["slot"]
            if isinstance(linear, Linear) or slot in OF_EXPERTS:
                names, rows = [spec.name for spec in slots[slot]], [spec.shape[0] for spec in slots[slot]]
                added = deltas(layer_ops, adapters, names, rows, linear.count if slot in OF_EXPERTS else None)
                changed[one.name] = replace(linear, deltas=added)
                nbytes += _bytes_of(layer_ops, added) - _bytes_of(layer_ops, linear.deltas)
        return replace(part, **changed) if changed else part

    layers = []
    for number, layer in zip(range(len(config.layers)) if numbers is None else numbers, weights.layers, strict=True):
        parts = {name: getattr(layer, name) for name in ("mixer", "ffn", "embedding")}
        changed = {name: change(ops.layer_ops(number), part, table[number]) for name, part in parts.items()}
        layers.append(replace(layer, **changed))
    return replace(weights, layers=layers, bytes=nbytes)


def _bytes_of(ops: Ops, added: Deltas | None) -> int:
    parts = () if added is None else (*added.a.parts, *added.b.parts)
    return sum(ops.matrix_bytes(part.format, math.prod(part.shape)) for part in parts)


def layer_formats(
    ops: Ops, config: ModelConfig, source: WeightSource, weight_type: WeightFormat | None = None
) -> list[dict[str, list[WeightFormat]]]:
    """Return slot → the formats of its matrices on the device, for every layer and the `weight_type` of
    `load_weights`."""
    return [
        {
            slot: [_format(ops, source, spec.name, weight_type) for spec in specs if len(source.shape(spec.name)) > 1]
            for slot, specs in slots.items()
        }
        for slots in tensors(config).layers
    ]


def file_bytes(source: WeightSource) -> int:
    """Return the bytes of all tensors in their files."""
    return sum(_file_bytes(source, name) for name in source.names())


def _file_bytes(source: WeightSource, name: str) -> int:
    return size_of(source.stored_dtype(name), math.prod(source.shape(name)))


def expert_bytes(
    ops: Ops, config: ModelConfig, source: WeightSource, weight_type: WeightFormat | None = None
) -> list[int]:
    """Return the bytes of each layer's matrices of experts on a device, for the `weight_type` of `load_weights`."""
    return [
        sum(_bytes(ops, source, spec.name, weight_type) for slot in OF_EXPERTS for spec in slots.get(slot, ()))
        for slots in tensors(config).layers
    ]


def weight_bytes(ops: Ops, source: WeightSource, weight_type: WeightFormat | None = None) -> int:
    """Return the bytes of all tensors on the device, for the `weight_type` of `load_weights`."""
    return sum(_bytes(ops, source, name, weight_type) for name in source.names())


def _bytes(ops: Ops, source: WeightSource, name: str, weight_type: WeightFormat | None) -> int:
    shape = source.shape(name)
    count = math.prod(shape)
    return ops.matrix_bytes(_format(ops, source, name, weight_type), count) if len(shape) > 1 else 4 * count


def bytes_of_layers(
    ops: Ops, config: ModelConfig, source: WeightSource, weight_type: WeightFormat | None = None
) -> tuple[int, list[int], int]:
    """Return the bytes of `weight_bytes` by place: tensors before the first layer, each layer, and the head, a copy of
    the embedding if it is tied."""

    def size(slots: Iterable[Sequence[Any]]) -> int:
        return sum(_bytes(ops, source, spec.name, weight_type) for specs in slots for spec in specs)

    table = tensors(config)
    before = size(specs for slot, specs in table.top.items() if slot != "head")
    return before, [size(of.values()) for of in table.layers], size([table.top.get("head", table.top["embedding"])])


@dataclass(frozen=True)
class FormatGroup:
    """Matrices that the device keeps in the same format. stored: their types in the file, the one with the most bytes
    first; how: "as stored", "kept as q8_0", "converted to q4_0" or both of the latter; bytes: on the device."""

    stored: tuple[str, ...]
    how: str
    bytes: int

    def __str__(self) -> str:
        return f"{', '.join(self.stored)} {self.how}"


def format_groups(ops: Ops, source: WeightSource, weight_type: WeightFormat | None = None) -> tuple[FormatGroup, ...]:
    """Return how the device keeps all matrices, for the `weight_type` of `load_weights`, the most bytes first."""
    sizes: dict[str, Counter[str]] = {}  # how → type in the file → bytes
    for name in sorted(source.names()):
        shape, stored = source.shape(name), source.stored_dtype(name)
        if len(shape) > 1:
            format = _format(ops, source, name, weight_type)
            how, device = "as stored", ops.stored_format(format)
            if device is not find(stored):
                how = f"kept as {device.name}"
                if format is weight_type and format is not find(stored):
                    how = f"converted to {format.name}" + (f" and {how}" if device is not format else "")
            sizes.setdefault(how, Counter())[stored] += ops.matrix_bytes(format, math.prod(shape))
    names = {how: tuple(name for name, _ in types.most_common()) for how, types in sizes.items()}
    groups = [FormatGroup(names[how], how, types.total()) for how, types in sizes.items()]
    return tuple(sorted(groups, key=lambda group: -group.bytes))


def describe_formats(groups: Sequence[FormatGroup]) -> str:
    """Return a description of weights for users: "Q4_K, Q6_K weights as stored", or if they are kept in several ways,
    "weights of IQ2_XXS kept as q8_0 (947 MiB), of Q5_K, Q4_K as stored (50 MiB)"."""
    if len(groups) == 1:
        return f"{', '.join(groups[0].stored)} weights {groups[0].how}"
    return "weights of " + ", of ".join(f"{one} ({format_bytes(one.bytes)})" for one in groups)


def left_out(ops: Ops, source: WeightSource, weight_type: WeightFormat) -> str:
    """Return a warning about matrices that are not converted to `weight_type`, because their rows are not whole blocks
    of it; empty if there are none."""
    shapes = {name: source.shape(name) for name in sorted(source.names())}
    names = [name for name, shape in shapes.items() if len(shape) > 1 and not fits(shape[1], weight_type)]
    if not names:
        return ""
    others = f" (and {len(names) - 1} other matrices)" if len(names) > 1 else ""
    format_name = _format(ops, source, names[0], weight_type).name
    return (
        f"warning: {names[0]}{others} is loaded as {format_name}, not as {weight_type.name}: its rows of "
        f"{shapes[names[0]][1]} values are not whole blocks of {weight_type.values}"
    )


def _format(ops: Ops, source: WeightSource, name: str, weight_type: WeightFormat | None) -> WeightFormat:
    return format_for(ops, source.stored_dtype(name), source.shape(name)[1], weight_type)


@dataclass(frozen=True)
class LayerReader:
    """Reads the slots of one layer. expert_reader: reads the matrices and biases of `count` experts."""

    read: TensorReader
    expert_reader: TensorReader
    slots: Slots
    count: int

    def weights(self, kind: type[T]) -> T:
        """Return `kind`, a dataclass, each of whose fields names its slot; see `engine.model.layers.slot`."""
        slots = ((part.name, part.metadata) for part in fields(kind))  # type: ignore[arg-type]
        return kind(**{name: getattr(self, slot["read"])(slot["slot"]) for name, slot in slots})

    def vector(self, slot: str) -> Array | None:
        return self.read.vector(self._names(slot)) if slot in self.slots else None

    def linear(self, slot: str) -> Linear | None:
        return self.read.linear(self._names(slot), self._names(f"{slot}_bias")) if slot in self.slots else None

    def linears(self, slot: str) -> tuple[Linear, ...]:
        """A projection of each tensor."""
        return tuple(self.read.linear([name]) for name in self._names(slot))

    def matrix(self, slot: str) -> Matrix | None:
        return self.read.matrices(self._names(slot))[0] if slot in self.slots else None

    def experts(self, slot: str) -> ExpertLinear:
        experts = self.expert_reader.experts(self.count, self._names(slot), self._names(f"{slot}_bias"))
        return replace(experts, on_host=self.expert_reader is not self.read)

    def heads(self, slot: str) -> ExpertLinear:
        """The matrix of each head."""
        return self.read.heads(self._names(slot))

    def rows_of_heads(self, slot: str) -> Linear | None:
        """The matrices of all heads as one; None if the ops attend without it."""
        return self.linear(slot) if self.read.expands_latents else None

    def _names(self, slot: str) -> list[str]:
        return [spec.name for spec in self.slots.get(slot, ())]


def load_vision_encoder(
    ops: Ops, vision_encoder: VisionEncoder, source: WeightSource, progress: Callable[[int], None] | None = None
) -> ImageReader:
    """Load a vision encoder to the device. progress: called with the bytes of the file that are done since its last
    call."""
    module, table, ops = (
        import_module(f"{vision_encoders.__name__}.{vision_encoder.kind}"),
        vision_tensors(vision_encoder),
        ops.layer_ops(0),
    )
    read = TensorReader(ops, source, progress)
    top, *layers = (LayerReader(read, read, slots, 0) for slots in (table.top, *table.layers))
    weights, weights_of_layers = top.weights(module.Weights), [layer.weights(module.LayerWeights) for layer in layers]
    ops.wait()
    reader: ImageReader = module.Reader(ops, vision_encoder, weights, weights_of_layers, read.bytes)
    return reader
