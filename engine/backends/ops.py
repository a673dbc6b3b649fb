"""The op set: the only seam between the engine and a device.

Letters: T rows (tokens of one or more sequences), B sequences, E hidden size, F feed-forward size, H query heads,
K KV heads, D head dim, N block size, V vocabulary size. `Array` is the backend's array type, float32. It and the types
`PreparedTransform`, `Cache`, `Buffer`, `Spans` (`backends.kv`) and `SamplerInputs` are opaque to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from polarlm.engine.backends.delta import RecurrentOps
from polarlm.engine.backends.kv import Array, CacheFormat, HeadRule, HeadTransform, KVOps, Norm, PreparedTransform, Rope
from polarlm.engine.outputs import Threads
from polarlm.engine.sampling.sample import Fetch, Sampled, SamplerInput
from polarlm.engine.weight_formats import ExpertLinear, Linear, Matrix, RereadMatrix, StoredMatrix, WeightFormat
from polarlm.model_loaders.config import Experts, ModelConfig

STEP_ROWS = 16  # most rows of one sequence in a step, but of those whose next token is known, all of one block

SamplerInputs = Any  # a list of `SamplerInput`
Result = TypeVar("Result")


class Routing(NamedTuple):
    """The experts of each row, best first: ids (T, k) int32, and their weights (T, k) float32, on the device.

    A row's adapter is an expert as well, with k = 1; the weight of a row without one is 0.
    """

    ids: Array
    weights: Array

    def part(self, rows: slice | np.ndarray) -> Routing:
        """The routing of some rows."""
        return Routing(self.ids[rows], self.weights[rows])


class Fusion(NamedTuple):
    """What an op computes with a product, made once for a layer.

    norm: weight (in,) and eps of an RMS norm of the inputs: x / rms(x) * weight. activation (a name of
    `model_loaders.config.Activation`): the product is [gate | up], and the result activation(gate) * up, half as wide;
    without a gate (`is_gated`) the product is up, and the result activation(up). consumer: the one `linear` that reads
    the result; with an activation, it may be returned in that op's input dtype.
    """

    norm: Norm = None
    activation: str | None = None
    consumer: Linear | None = None


PLAIN = Fusion()  # the product alone


class ExpertNetwork(NamedTuple):
    """The network of each expert, down(activation(gate) * up); without an activation, down(up).

    gate_up: [gate | up] (2F, in), or up (F, in) if it has no gate. down (out, F). fusion: of the first product,
    whose consumer is `down`.
    """

    gate_up: ExpertLinear
    down: ExpertLinear
    fusion: Fusion = PLAIN


class PeerArray(NamedTuple):
    """An array of another device's ops, instead of a host array."""

    array: Array
    ops: Ops


@dataclass(frozen=True)
class Load:
    """The largest work that ops will get: a prompt of `tokens` tokens, a step of `rows` sequences.

    format: the format of the layer with the widest K/V.
    """

    model: ModelConfig
    format: CacheFormat
    tokens: int
    rows: int


class WarmUp(NamedTuple):
    """Ops that compute nothing and whose `load` reads nothing: the kernels that they need compile in the background."""

    ops: Ops
    wait: Callable[[Callable[[int, int], None]], None]  # calls progress(done, all); raises KernelError
    # Ascending row counts with special kernels, which serve up to as many rows. No first request waits for them: they
    # are warmed up after the model is loaded.
    rows: Sequence[int]
    short: Sequence[int] = ()  # row counts of short prompts with special kernels, which a first request waits for


@dataclass
class ExpertCache:
    """Experts that are read from the file when they are chosen, and stay in memory until others need their room.

    experts: how many of each layer are in memory at a time. hits, misses: how often the weights of a chosen expert
    (gate_up and down apart) were in memory, and were read. bytes: what was read takes in memory.
    """

    experts: int
    hits: int = 0
    misses: int = 0
    bytes: int = 0


class Expansion(NamedTuple):
    """What makes keys and values of all heads of a latent vector: keys (H · own channels, L), values (H · value
    channels, L)."""

    keys: Linear
    values: Linear


class LatentOps(Protocol):
    """The ops that only latent attention needs. Rows (T·H, n) are those of T tokens, of each its heads. L: channels of
    a latent vector; R: those that RoPE rotates, both even."""

    def multiply_heads(self, x: Array, w: ExpertLinear) -> Array:
        """The product of each row x (T·H, in) with the matrix of its head → (T·H, out). w has a matrix of each head. x
        may be a slice of columns of a wider array."""

    def join_latents(self, absorbed: Array, rotated: Array, kv: Array) -> Array:
        """absorbed (T·H, L) and rotated (T·H, R), the two parts of queries, and kv (T, L + R), a latent vector and the
        rotated channels of a key → (T, H + 1, L + R): queries and the key.

        RoPE turns channel j with channel j + (L + R)/2: each half of a head has half of the rotated channels, then half
        of the others. rotated may be a slice of columns of a wider array.
        """

    def take_latents(self, x: Array, latent: int) -> Array:
        """The L channels that are not rotated of heads x (T, H, L + R), in order → (T·H, L)."""

    @property
    def expansion_ops(self) -> ExpansionOps | None:
        """The ops of prompts that attend to keys and values of each head; None where they attend to latent vectors."""


class ExpansionOps(Protocol):
    """The ops of prompts that attend to keys and values of each head, which are made of latent vectors."""

    def expands(self, cache: Any, spans: Any) -> bool:
        """Whether the rows of a prompt attend by `attend_by_heads`: of a long one, without earlier turns."""

    def join_queries(self, own: Array, rotated: Array, rope: tuple[Array, ...], columns: int) -> Array:
        """Both parts of queries, own (T·H, n) and rotated (T·H, R), with RoPE by cos and sin of a wider head → (T, H,
        columns). Each half of a head has half of the rotated channels, zeros, then half of the others."""

    def attend_by_heads(self, q: Array, cache: Any, spans: Any, rule: Any, expansion: Expansion) -> Array:
        """Attention of q (T, H, C), from `join_queries`, to the keys and values that `expansion` makes of the latent
        vectors in the buffer → (T·H, value channels). spans, rule: as for `attention`."""


class Texts(NamedTuple):
    """Texts whose tokens see each other.

    lengths: the numbers of their rows, in order. window: rows attend to those at most window // 2 away; None: to all.
    """

    lengths: Sequence[int]
    window: int | None = None


class EncoderOps(Protocol):
    """The ops that only encoders need, in which every token of a text sees all others of it."""

    def layer_norm(self, x: Array, norm: tuple[Array, Array, float]) -> None:
        """(x − mean) / √(variance + eps) · weight + bias of each row of x (T, n), in place.

        norm: weight and bias (n,), and eps.
        """

    def clip(self, x: Array, least: float, most: float) -> None:
        """Values of x (T, n) below `least` become it, and those above `most`, in place."""

    def self_attention(self, qkv: Array, rope: Rope | None, rule: HeadRule, texts: Texts, scale: float) -> Array:
        """`transform_heads` of qkv (T, H + 2K, D), then attention of each text to its own rows → (T, H, D).

        rope: None if heads have neither RoPE nor norms, and the transform changes nothing: they are taken as they are.
        texts: T rows in all. Nothing is kept. scale: multiplies scores.
        """


class MachineOps(Protocol):
    """What a backend knows of its machine: memory, compiled kernels, recorded graphs, and matrices that it loads."""

    name: str
    backend: str  # "numpy", "native" or "cuda"
    forkable: bool  # whether arrays on the device stay usable in a forked child process
    stored_as: str  # what `read_blocks` returns: `FIELDS`, `TILES` or `RECORDS` of `engine.backends.transfer`
    # Chunk size of prefill: enough rows for the matrix products, few enough for the memory of activations.
    prefill_rows: int
    batches_take_steps: bool  # whether batches of prompts have a step of the running requests, too, and are recorded
    # Rows of batches with prompts, and of steps, that are recorded before requests come; none where that takes no time.
    warm_up_rows: tuple[Sequence[int], Sequence[int]]

    @property
    def unit_layers(self) -> int:
        """Layers of `prefill_rows` rows that are computed before other work may run."""

    @property
    def batch_rows(self) -> int:
        """Most rows of prompts that are computed together; 0 where prompts are computed one by one."""

    @property
    def host(self) -> Ops | None:
        """The ops of a GPU's host, for experts in the computer's memory; None if it has none, and on a CPU."""

    @property
    def latent_ops(self) -> LatentOps | None:
        """The ops of latent attention; None if the backend has none."""

    @property
    def encoder_ops(self) -> EncoderOps | None:
        """The ops that only encoders need; None if the backend has none."""

    def layer_ops(self, layer: int) -> Ops:
        """The ops of the device that has this layer; these ops themselves on a single device."""

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[Any]) -> Result:
        """work(*inputs), after the inputs (host arrays, `Spans` or `SamplerInputs`) have been copied to the device.

        For a `key` and input shapes that it has seen before, a backend may replay the graph that it recorded instead
        of calling `work`, so everything that varies between calls must be in the inputs. The first input has a row for
        each token, and so has the result, an array or a tuple of arrays, valid until the next call. Where each sequence
        has one row, a backend may call `work` with empty rows added; the result is returned without them.
        """

    def as_step(self) -> AbstractContextManager[None]:
        """A context in which products are computed as those of a step are in `run_graph`, not as a prompt's: each of
        their rows may be a prompt's only one."""

    @property
    def stream(self) -> Callable[[], AbstractContextManager[None]] | None:
        """stream() is a context for ops on rows of a prompt, none of whose results Python reads: others compute them
        while it prepares the next op. Inside another one it does nothing. None where nothing is waited for anyway, or
        nobody else computes."""

    def run_between_graphs(self, work: Callable[..., None], arrays: Sequence[Array], *, is_last: bool = False) -> None:
        """Call work(*arrays), also whenever `run_graph` runs again what is being recorded: at this place, with views of
        the arrays, which are contiguous. is_last: nothing is recorded after it."""

    def forget(self) -> None:
        """Drop what `run_graph` has recorded, which keeps the memory of its work's models and stores."""

    def threads(self) -> Threads | None:
        """The number of CPU threads, and why; None if steps do not run on the CPU."""

    def wait(self) -> None:
        """Block until the device has finished all work."""

    def check(self) -> None:
        """Called after an error, outside of `run_graph`. Raises DeviceLost if the device works no more."""

    def matrix_bytes(self, format: WeightFormat, count: int) -> int:
        """Device bytes of `count` values of a matrix that the file stores in `format`."""

    def free_memory(self) -> int:
        """Free bytes of the device's memory."""

    def memory_left(self, weights: int) -> int:
        """Bytes that remain for the KV store and for activations once `weights` bytes of weights are loaded.

        Raises EngineError if the weights alone do not fit; its number "lacking" says how many bytes are missing.
        """

    def work_bytes(self, load: Load) -> int:
        """Bytes of `memory_left` that activations of a prompt, and of the steps between its chunks, need."""

    def reserve_workspace(self, load: Load) -> None:
        """Allocate the memory of steps now, before other allocations can take it. Raises MemoryError."""

    def stored_format(self, format: WeightFormat) -> WeightFormat:
        """The format in which the device keeps matrices that come to it in `format`."""

    @property
    def input_bits(self) -> str:
        """What inputs of products with quantized weights have: 8, 16 or bf16; 16 where they are float32."""

    def set_input_bits(self, bits: str) -> str:
        """Let these inputs have what `EngineConfig.input_bits` says; return why it has no effect, or nothing."""

    @property
    def is_replayable(self) -> bool:
        """Whether rows of steps are the same to the bit beside any others, and at other levels of CPUs."""

    @property
    def inputs(self) -> str:
        """What inputs of these products have, for users; empty if they are floats."""

    def warm_up(self) -> WarmUp | None:
        """Ops for a warm-up, and a function that waits for the kernels they need; None if nothing is compiled."""

    def load(self, matrices: Sequence[StoredMatrix]) -> tuple[Matrix, ...]:
        """One or more matrices with the same inputs, on the device; consecutive ones may be joined into one.

        Raises EngineError for a matrix that the device cannot read, MemoryError if they do not fit.
        """

    def load_experts(self, matrices: Sequence[Sequence[StoredMatrix]]) -> tuple[Matrix, ...]:
        """The parts of an `ExpertLinear`. matrices: those to stack, for each expert; otherwise as `load`.

        CUDA: the same matrix of all experts has one format on the device, and rows of whole tiles of 16 if that is
        packed; EngineError if not.
        """

    @property
    def cache_experts(self) -> Callable[[Sequence[Sequence[RereadMatrix]], ExpertCache], tuple[Matrix, ...]] | None:
        """cache_experts(matrices, cache) → as `load_experts`, but an expert is read when it is chosen, and whenever it
        is not in memory any more: `matrices` must stay readable. None if the backend needs all experts in memory."""

    def rows(self, matrix: Matrix | Linear, rows: slice = slice(None)) -> np.ndarray:
        """Rows of a matrix, or of the stacked parts of a `Linear`: NumPy float32 (rows, in)."""

    def to_device(self, x: ArrayLike | PeerArray) -> Array:
        """A copy of a host array on the device, or of another device's: integers as int32, floats as float32."""

    def to_host(self, x: Array) -> np.ndarray:
        """A copy of a device array as NumPy float32."""


class ComputeOps(Protocol):
    """Products, norms, activations, experts, heads and sampling: arrays of rows in, arrays of rows out."""

    def embed(self, table: Matrix, ids: Array, scale: float = 1.0) -> Array:
        """Rows `ids` (T,) int32 of table (V, E), times `scale` → (T, E)."""

    def rms_norm(self, x: Array, norm: tuple[Array, float], residual: Array | None = None) -> None:
        """x / rms(x) * weight of each row of x (T, n), in place; with a residual (T, n), added to the residual instead.

        norm: weight (n,) and eps. x may be a slice of columns of a wider array.
        """

    def centre(self, x: Array) -> None:
        """x − mean of each row of x (T, n), in place. An RMS norm of the result is a LayerNorm without a bias of x."""

    def softcap(self, x: Array, cap: float) -> None:
        """cap · tanh(x / cap) of x (T, n), in place; NaN for an infinity, which is an error that the cap would hide."""

    def activate(self, x: Array, up: Array, activation: str) -> None:
        """activation(x) * up of x and up (T, n), in place in x. Rows of up may be parts of longer ones."""

    def activate_halves(self, x: Array, activation: str) -> Array:
        """What `linear` does after its product: x (T, 2F) = [gate | up] → activation(gate) * up (T, F); without a gate
        activation(x), of its shape. x may be overwritten."""

    def scale(self, x: Array, factor: Array) -> None:
        """x (T, n) times the number in factor (1,), or the number of each row in factor (T, 1), in place; 0 times NaN
        is 0. x may be a slice of columns of a wider array."""

    def linear(self, x: Array, w: Linear, fusion: Fusion = PLAIN, residual: Array | None = None) -> Array:
        """x (T, in) @ w (out, in)ᵀ + its bias → (T, out), or half as wide, as `fusion` says.

        residual (T, out): the result is added to it in place, and it is returned; excludes an activation.
        CUDA: gemv up to 2 rows, above that cuBLASLt. For packed formats gemv_packed up to 2, gemm_wide up to 128, and
        for any number in `run_graph`; above that cuBLASLt after dequantize.
        """

    def route(self, logits: Array, rule: Experts, bias: Array | None = None, factors: Array | None = None) -> Routing:
        """The experts of each row of logits (T, count), of the router, and their weights, as `rule` says.

        bias (count,): see `Experts.choice_bias`. factors (count,): multiply the weights of each expert. Among equal
        scores the lowest expert is chosen. A row whose logits are not finite has NaN for weights.
        """

    def experts(
        self,
        x: Array,
        routing: Routing,
        network: ExpertNetwork,
        residual: Array | None = None,
        adapters: Routing | None = None,
    ) -> Array:
        """The weighted sum of the results of each row's experts, x (T, in) → (T, out).

        residual: as in `linear`. An expert whose weight is 0 adds nothing to a row, whatever it computes. adapters:
        those of the rows, which change the products of experts that have deltas; None if no row has one.
        CUDA: gemv or gemv_packed for each pair of a row and an expert, or, of more pairs than experts, group_pairs and
        gemm_wide for each group of pairs with an expert. add_experts adds the results.
        """

    def gate(self, x: Array, logits: Array) -> None:
        """x (T, n) times σ(logits), in place; logits (T, m), of which each serves n / m neighbours."""

    def empty(self, shape: tuple[int, ...]) -> Array:
        """An uninitialized array of float32."""

    def prepare(self, transforms: Sequence[HeadTransform]) -> list[PreparedTransform]:
        """The transforms of a model's layers on the device. A rotation array that several share is uploaded once."""

    def transform_heads(self, qkv: Array, rope: Rope, rule: HeadRule) -> tuple[Array, Array, Array]:
        """QK-norm, RoPE, scale and rotation: qkv (T, H + 2K, D), may be overwritten → q (T, H, D), k, v (T, K, D). Of
        (T, H + K, D) where values are keys.

        rope: cos, sin (T, D/2); channel j pairs with channel j + D/2.
        CUDA: transform_heads, and rotate_dense for rotations that are not signed Hadamard matrices.
        """

    def pack_sampler_inputs(self, sampler_inputs: Sequence[SamplerInput]) -> SamplerInputs:
        """`sampler_inputs` (one for each row) as the argument of `sample`. All rows have the same vocabulary."""

    def sample(self, logits: Array, sampler_inputs: SamplerInputs, newest: Array | None = None) -> Array:
        """Sample a token for each row of logits (B, V) → token ids on the device, for `fetch_tokens`.

        newest: ids (B,) int32 of the tokens that the rows were computed from, which stand for NEWEST in
        `SamplerInput.recent`. Only ops with `fetch_later` get inputs that have it.
        """

    def fetch_tokens(self, chosen: Array, logits: Array, sampler_inputs: Sequence[SamplerInput]) -> list[Sampled]:
        """The tokens that `sample` chose, on the host: ids, with log-probabilities if the row's input asks for them, or
        the error of a row without a token.

        Only rows that ask for log-probabilities pay for them. CUDA: logprobs, for those rows.
        """

    @property
    def fetch_later(self) -> Callable[[Array, Sequence[SamplerInput]], Fetch] | None:
        """fetch_later(chosen, sampler_inputs) starts to fetch the tokens that `sample` chose.

        Another `run_graph` may start before they have arrived, with their ids as its input. No input may ask for
        log-probabilities. None if fetching later has no use, since the host computes the step itself.
        """


class Ops(ComputeOps, KVOps, RecurrentOps, MachineOps, Protocol):
    """The ops of a backend, of four kinds. Every op is a function of its arguments; none keeps state between calls.

    "CUDA:" names the kernels of an op that has more than one.
    """
