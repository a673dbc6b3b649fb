"""The op set: the only seam between the engine and a device.

Letters: T rows (tokens of one or more sequences), E hidden size, F feed-forward size, H query heads, K KV heads,
D head dim, N block size, V vocabulary size. `Array` is the backend's own array type; float32 in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engine.codecs import Codec
from engine.encoding.metric import Metric

Array = Any
Result = TypeVar("Result")


@dataclass
class LayerCache:
    """The stored K/V of one layer, balanced and rotated, and how they get there.

    metric_k, metric_v: what an error costs, for encoding well; None takes the nearest code.
    k, v: field name → (K, coded blocks, *field shape), in the codec's dtypes.
    mean: the fields of the block means of keys (K, coded blocks, …); empty when keys are not centred.
    exact_k, exact_v: (exact slots, K, N, D) full precision: sinks and tails.
    """

    codec_k: Codec
    codec_v: Codec
    metric_k: Metric | None
    metric_v: Metric | None
    mean_bits: int
    k: Mapping[str, Array]
    v: Mapping[str, Array]
    mean: Mapping[str, Array]
    exact_k: Array
    exact_v: Array


@dataclass
class CacheSpan:
    """Where the K/V of one sequence's new tokens go in one layer, and what they see. Positions count tokens.

    The sequence is [sink | coded blocks | now]: `now` holds the current block's earlier tokens and all the new ones
    in full precision.
    """

    rows: slice  # rows of q, k, v that belong to this sequence, in order of position
    position: int  # of the first of these rows
    now_start: int  # position of now_k[:, 0]
    now_k: Array  # (K, S, D); rows up to the newest position are filled
    now_v: Array
    sink: int | None  # exact slot of the first block, if that is complete and kept
    table: Sequence[int]  # ids of the coded blocks
    table_start: int  # position of the first token of table[0]
    now_as_codes: bool = False  # attend to `now` as it reads after encoding (see `Engine.score`)


class Ops(Protocol):
    """What a backend can do. Every op is a function of its arguments; none keeps state between calls."""

    name: str

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for the KV store; pages that are never written cost nothing where the device allows that."""

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Scratch memory in the compute dtype."""

    def parts(self, rows: slice) -> list[slice]:
        """`rows` cut into consecutive parts that `each` may work on at the same time."""

    def each(self, work: Callable[[int], Result], count: int) -> list[Result]:
        """[work(0), …, work(count − 1)], possibly at the same time."""

    def to_device(self, x: Any) -> Array:
        """A host array on the device, in the compute dtype."""

    def to_host(self, x: Array) -> Any:
        """A device array as NumPy float32."""

    def embed(self, table: Array, ids: Sequence[int]) -> Array:
        """Rows `ids` (T,) of table (V, E) → (T, E)."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x (..., n) / rms(x) * weight (n,)."""

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """x (T, in), weight (out, in), bias (out,) → (T, out)."""

    def rope(self, x: Array, cos: Array, sin: Array) -> None:
        """Turn channel j of x (T, heads, D) with channel j + D/2, in place; cos, sin (T, D/2)."""

    def rotate(self, x: Array, rotation: Array | None, scale: Array | None = None) -> Array:
        """(x * scale) @ rotation for x (T, heads, D), scale (heads, D), rotation (D, D); None leaves a factor out."""

    def silu_mul(self, gate_up: Array) -> Array:
        """gate_up (T, 2F) = [gate | up] → silu(gate) * up (T, F)."""

    def append_kv(self, spans: Sequence[CacheSpan], k: Array, v: Array) -> None:
        """Write rows of k, v (T, K, D), rotated, into each span's `now` at their positions."""

    def attention(
        self, q: Array, cache: LayerCache, spans: Sequence[CacheSpan], scale: float, window: int | None
    ) -> Array:
        """Causal attention of q (T, H, D), rotated, over each span's whole sequence → (T, H, D), rotated as values.

        Query head h reads KV head h // (H // K). With a window, position p sees positions > p − window only.
        """

    def encode_blocks(self, cache: LayerCache, blocks: Sequence[int], k: Array, v: Array) -> None:
        """Encode k, v (K, len(blocks), N, D), rotated, into the coded blocks with these ids; keys are centred first."""

    def copy_exact(self, cache: LayerCache, slot: int, k: Array, v: Array) -> None:
        """Write k, v (K, S ≤ N, D) into the first S rows of an exact slot."""
