"""The op set: the only seam between the engine and a device.

Letters: T rows (tokens of one or more sequences), B sequences, E hidden size, F feed-forward size, H query heads,
K KV heads, D head dim, N block size, V vocabulary size. `Array` is the backend's own array type, float32;
`PreparedSpace`, `Cache`, `Buffer`, `Spans` and `Draws` are whatever a backend makes of a `HeadTransform`, of the K/V
of a layer, of where to find them, and of how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from engine.codecs import Codec
from engine.outputs import Threads
from engine.quantization.metric import Metric
from engine.sampling.sample import Draw, Sampled
from engine.weight_formats import Linear, Matrix, StoredMatrix, WeightFormat
from model_loaders.config import ModelConfig

STEP_ROWS = 16  # that one sequence may have in a step

Array = Any
PreparedSpace = Any
Cache = Any
Buffer = Any
Spans = Any
Draws = Any
Result = TypeVar("Result")


@dataclass(frozen=True)
class CacheFormat:
    """How one layer stores its K/V, smoothed and rotated, and how they get there.

    metric_k, metric_v: what an error costs, for encoding well; None takes the nearest code.
    mean_bits: of the block means that are taken out of keys, per channel: 8 or 16; 0 does not centre them.
    """

    codec_k: Codec
    codec_v: Codec
    metric_k: Metric | None
    metric_v: Metric | None
    mean_bits: int
    block_size: int
    kv_heads: int
    head_dim: int


class Place(NamedTuple):
    """N tokens in full precision: a block of a buffer, counted from its start, or a full-precision slot of the
    layer."""

    buffer: Buffer | None
    block: int


@dataclass(frozen=True)
class HeadTransform:
    """How the heads of one layer become what its cache holds, and how the result of attention comes back; on the host.

    kv_heads: K. scale (H + 2K, D): what queries and keys, after RoPE, and values are multiplied with. key_rotation,
    value_rotation (D, D): of queries and keys, and of values, as x @ rotation. scale_back (H,): what the result of each
    head of attention is multiplied with; then it takes the inverse of value_rotation. None leaves a factor out.
    """

    kv_heads: int
    scale: np.ndarray | None = None
    key_rotation: np.ndarray | None = None
    value_rotation: np.ndarray | None = None
    scale_back: np.ndarray | None = None


@dataclass(frozen=True)
class CacheSpan:
    """Where the K/V of one sequence's new tokens go, and what they see, in every layer with the same window.

    Positions count tokens. The sequence is [sink | quantized blocks | current]: `current` holds the current block's
    earlier tokens and all the new ones in full precision, one block behind the other in a prompt's buffer, or each in
    a full-precision slot.
    """

    rows: slice  # rows of q, k, v that belong to this sequence, in order of position
    position: int  # of the first of these rows
    current: Place  # where `current` begins: a buffer's block 0, or the full-precision slot of a step's current block
    current_start: int  # position of its first token
    sink: int | None  # full-precision slot of the first block, if that is complete and kept
    table: Sequence[int]  # ids of the quantized blocks
    table_start: int  # position of the first token of table[0]
    following: Sequence[int] = ()  # full-precision slots of further blocks that rows of a step go to, behind `current`


@dataclass(frozen=True)
class Load:
    """The most that ops will be asked for. tokens: of a prompt; rows: sequences of a step; form: of any layer."""

    model: ModelConfig
    format: CacheFormat
    tokens: int
    rows: int


class Ops(Protocol):
    """What a backend can do. Every op is a function of its arguments; none keeps state between calls.

    What is made once comes from `weight`, `prepare`, `cache` and `spans`, and is an argument of the ops that need it.
    Beside that, an object with ops knows its machine: the memory of a device and what was compiled and recorded there,
    the cores of a CPU and how fast steps were on them.
    """

    name: str

    forkable: bool
    """Whether what is on the device can be used in a child that was forked."""

    stored_as: str
    """What `read_blocks` gives: `FIELDS` or `RECORDS` of `engine.backends.transfer`."""

    prefill_rows: int
    """Rows of a prompt that go through a layer at once: enough for the matrix products, few enough for the memory."""

    def split_rows(self, rows: slice) -> list[slice]:
        """`rows` cut into consecutive parts that `parallel_map` may work on at the same time."""

    def parallel_map(self, work: Callable[[int], Result], count: int) -> list[Result]:
        """[work(0), …, work(count − 1)], possibly at the same time."""

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[Any]) -> Result:
        """work(*inputs), each an array of the host (or of `spans` or `pack_draws`) that `work` finds on the device.

        With a `key` and shapes of inputs that it has seen before, a backend may launch again what it recorded then
        instead of calling `work`: everything that differs from call to call is in the inputs, the first of which has a
        row for each token. Products in `work` are asked for with `recorded`. The result is good until the next call.
        """

    def threads(self) -> Threads | None:
        """How many threads of the CPU the last step took; None where steps run elsewhere."""

    def wait(self) -> None:
        """Return when the device has done all that it was given."""

    def matrix_bytes(self, format: WeightFormat, count: int) -> int:
        """Bytes that `count` values of a matrix take on the device which a file has in that format."""

    def room_beside(self, weights: int) -> int:
        """Bytes that the KV store, and the work beside it, may take if so many bytes of weights are to be loaded.

        Raises EngineError where it is certain that the weights alone do not fit.
        """

    def work_bytes(self, load: Load) -> int:
        """How many of these a prompt and the steps between its parts take, beside the KV store."""

    def set_aside(self, load: Load) -> None:
        """Take the memory of steps now, before anything else does. Raises MemoryError."""

    def weight_type(self, stored: str) -> str:
        """What weights become that a file has as `stored`, for people."""

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        """Matrices over the same inputs, at least one, on the device; consecutive ones may come as one.

        Raises EngineError for one that the device cannot read, MemoryError where they do not fit.
        """

    def rows(self, matrix: Matrix | Linear, rows: slice = slice(None)) -> Any:
        """Rows of a matrix, or of all parts of a `Linear` under each other, as NumPy float32: (rows, in)."""

    def to_device(self, x: Any) -> Array:
        """A host array on the device: whole numbers as int32, others as float32."""

    def to_host(self, x: Array) -> Any:
        """A device array as NumPy float32."""

    def embed(self, table: Matrix, ids: Array, scale: float = 1.0) -> Array:
        """Rows `ids` (T,) int32 of table (V, E), times `scale` → (T, E)."""

    def rms_norm(self, x: Array, norm: tuple[Array, float], residual: Array | None = None) -> None:
        """x / rms(x) * weight of each row of x (T, n), in place; with a residual (T, n), added to that instead.

        norm: weight (n,) and eps. Rows of x may be parts of longer ones.
        """

    def linear(
        self,
        x: Array,
        w: Linear,
        *,
        norm: tuple[Array, float] | None = None,
        residual: Array | None = None,
        activation: str | None = None,
        recorded: bool = False,
    ) -> Array:
        """x (T, in) @ w (out, in)ᵀ + its bias → (T, out).

        norm: weight (in,) and eps of an RMS norm before: x / rms(x) * weight. residual (T, out): what the result is
        added to, in place. activation, without a residual: the result is [gate | up], and activation(gate) * up
        (T, out / 2) is returned; its names are those of `model_loaders.config.Activation`. recorded: for work that
        `run_graph` may record, which takes our own kernels for any number of rows.
        """

    def prepare(self, spaces: Sequence[HeadTransform]) -> list[PreparedSpace]:
        """The spaces of a model's layers on the device. What several of them share is there once."""

    def transform_heads(
        self,
        qkv: Array,
        rope: tuple[Array, Array],
        space: PreparedSpace,
        norms: tuple[Array, Array, float] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Heads qkv (T, H + 2K, D), which may be overwritten → q (T, H, D), k, v (T, K, D) as the store takes them.

        norms: weights (D,) for queries and for keys, and eps, of an RMS norm of each vector. turns: cos, sin (T, D/2)
        of RoPE; channel j turns with channel j + D/2. What comes then is `space`'s.
        """

    def pack_draws(self, draws: Sequence[Draw]) -> Draws:
        """How the next token of each row is drawn, in the form that `sample` takes. One vocabulary for all rows."""

    def sample(self, logits: Array, draws: Draws) -> Array:
        """Choose a token for each row of logits (B, V). The result stays on the device; `fetch_tokens` takes it."""

    def fetch_tokens(self, chosen: Array, logits: Array, draws: Sequence[Draw]) -> list[Sampled]:
        """What `sample` chose, on the host: ids, with log-probabilities for rows that ask, or why there is none.

        Rows whose draws ask for no log-probabilities cost nothing more for those that do.
        """

    # -- the KV store --------------------------------------------------------------------------------------------

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        """Bytes of a quantized block, and of a full-precision slot, all KV heads. ValueError for a codec that it
        cannot serve."""

    def cache(self, format: CacheFormat, quantized: int, full: int, beside: Sequence[Cache] = ()) -> Cache:
        """Room for the K/V of one layer: so many quantized blocks and full-precision slots.

        beside: caches of other layers, with which this one may share the tables of its codecs.
        """

    def buffer(self, format: CacheFormat, rows: int) -> Buffer:
        """Room for `rows` tokens' K/V of one layer in full precision."""

    def spans(self, spans: Sequence[CacheSpan], block_size: int) -> Spans:
        """What the ops below need to know of `spans`, in blocks of so many tokens. Several must be those of a step.

        Their rows follow each other.
        """

    def append_kv(self, cache: Cache, spans: Spans, k: Array, v: Array) -> None:
        """Write rows of k, v (T, K, D), conditioned, into each span's `current` at their positions."""

    def place_kv(
        self,
        qkv: Array,
        rope: tuple[Array, Array],
        space: PreparedSpace,
        cache: Cache,
        spans: Spans,
        norms: tuple[Array, Array, float] | None = None,
    ) -> Array:
        """`transform_heads`, then `append_kv` of keys and values → the queries (T, H, D)."""

    def attention(
        self,
        q: Array,
        cache: Cache,
        spans: Spans,
        scale: float,
        window: int | None,
        space: PreparedSpace | None = None,
    ) -> Array:
        """Causal attention of conditioned q (T, H, D), contiguous, over each span's whole sequence → (T, H, D).

        Query head h reads KV head h // (H // K). With a window, position p sees positions > p − window only.
        space: takes the result back from where its values are stored; None leaves it there.
        """

    def encode_blocks(self, caches: Sequence[Cache], blocks: Sequence[int], sources: Sequence[Place]) -> None:
        """Encode the N tokens at each of `sources` into the quantized blocks with the ids `blocks`, in parallel_map of
        `caches`.

        All sources are full-precision slots, or they follow each other in the buffer of one cache. Keys are centred
        first.
        """

    def copy_full(self, cache: Cache, target: Place, source: Place, tokens: int) -> None:
        """Copy the first `tokens` ≤ N tokens of one place to another."""

    def round_trip(self, cache: Cache, place: Place, tokens: int) -> None:
        """Replace the first `tokens` ≤ N tokens of a place by what they read back as from one encoded block.

        A part of a block is filled up with its mean before it is encoded.
        """

    # -- from the KV store to the host, and back -----------------------------------------------------------------

    def read_blocks(self, cache: Cache, blocks: Sequence[int]) -> dict[str, Any]:
        """A copy of the quantized blocks with these ids, at least one, as NumPy arrays: see
        `engine.backends.transfer`."""

    def write_blocks(self, cache: Cache, blocks: Sequence[int], arrays: Mapping[str, Any]) -> None:
        """What `read_blocks` of any backend gave for as many blocks becomes those with these ids, at least one.

        Raises ValueError where the arrays are no such blocks.
        """

    def read_full(self, cache: Cache, slot: int, tokens: int) -> tuple[Any, Any]:
        """A copy of the first `tokens` ≤ N tokens of a full-precision slot, k and v (K, tokens, D), as precise as it
        is."""

    def write_full(self, cache: Cache, slot: int, k: Any, v: Any) -> None:
        """k, v (K, tokens ≤ N, D), float16 or float32, become the first tokens of a full-precision slot.

        Raises ValueError where they are no such arrays.
        """
