"""The ops of layers whose state is not K/V, on a GPU: short convolutions, gated delta rules and Mamba 2; launch
configurations of their kernels, and the memory that they need.

Letters as in `engine.backends.delta`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from polarlm.engine.backends.cuda.device import Addresses, Array, row_stride
from polarlm.engine.backends.cuda.launch import WARP, DeviceOps, LaunchConfig, threads_for
from polarlm.engine.backends.cuda.launch_configs import SHARED_BYTES, row_threads, step_rows
from polarlm.engine.backends.delta import (
    DeltaEnds,
    DeltaSlots,
    DeltaSpan,
    DeltaWeights,
    FetchStates,
    Mamba2Weights,
    SlotRows,
)
from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.quantization.snapshot_codes import EIGHT_BITS, LARGEST, LEAST, SnapshotCodes
from polarlm.model_loaders.config import ChannelDelta, Mamba2, Recurrent

_FLOAT = 4
_STEP_THREADS = 512
_SCAN_THREADS = 256
_THREAD_ROWS = 8  # rows of a matrix that a thread of a step holds
_SLICES = (64, 32, 16)  # columns of a matrix of a block of delta_scan
_CHUNKS = (32, 16)  # terms of a product of delta_scan that are copied at a time
_SLOW_BYTES = 100 << 10  # shared memory of GPUs whose tensor cores add float32 at half their speed
_MEMBERS = 8  # heads of a block of mamba2_blocks
_CHANNELS = 128  # channels of queries and keys at a time
_STEP = 4  # between the ends of blocks whose states are kept: see `state.recurrent.delta.places_to_guess`
_LARGEST_BLOCK = 64  # tokens whose products the threads of a block can share out
PROMPT_ROWS = 1024  # a prompt's rows that are computed at a time: more need more memory

Sizes = TypeVar("Sizes", bound="DeltaSizes")


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes that the kernels of gated delta rules are compiled for."""

    name: ClassVar[str] = "gated delta rules"
    reads: ClassVar[bool] = True  # whether updates depend on what keys read

    key_dim: int
    value_dim: int
    block: int
    width: int

    @classmethod
    def from_slots(cls: type[Sizes], slots: DeltaSlots) -> Sizes:
        """The sizes of slots, or of one of them."""
        *_, key_dim, block = slots.keys.shape
        return cls(key_dim, slots.updates.shape[-1], block, slots.inputs.shape[-2] - block + 1)

    @property
    def defines(self) -> dict[str, int | float | str]:
        return {"KEY_DIM": self.key_dim, "VALUE_DIM": self.value_dim, "BLOCK": self.block, "WIDTH": self.width}

    def check(self) -> None:
        """Raises ValueError where there are no kernels for these sizes."""
        if self.key_dim % 8 or self.value_dim % 4:
            raise ValueError(
                f"On a GPU the keys of {self.name} have a multiple of 8 numbers and the values one of 4, "
                f"not {self.key_dim} and {self.value_dim}: choose device=cpu"
            )
        if self.block % 8 or self.block > _LARGEST_BLOCK or self.width > self.block:
            raise ValueError(
                f"On a GPU there are no kernels of {self.name} for blocks of {self.block} tokens: choose 64."
            )
        if self._shared > SHARED_BYTES or self.value_dim > 4 * _STEP_THREADS:
            raise ValueError(
                f"On a GPU heads of {self.name} of {self.key_dim} × {self.value_dim} numbers do not fit into shared "
                "memory: choose device=cpu"
            )

    @property
    def _shared(self) -> int:
        """Shared memory of the launch that takes most."""
        return max(self.blocks().shared, self.scan(1, 1, 0).shared, self.step(16).shared)

    def _matrix_threads(self) -> int:
        """Threads that share out a matrix; each has 4 columns and at most 8 rows, if there are enough."""
        columns = self.value_dim // 4
        return threads_for(max(columns * -(-self.key_dim // _THREAD_ROWS), self.block // 4), _STEP_THREADS)

    def step(self, most_rows: int) -> LaunchConfig:
        """The launch of delta_step for at most `most_rows` rows of a sequence."""
        rows, threads = step_rows(most_rows), self._matrix_threads()
        columns, tokens = self.value_dim // 4, self.block // 4
        groups, key_groups = (min(threads // width, self.key_dim) for width in (columns, tokens))
        products = 1 + self.reads  # a query's, and a key's
        sums = products * max(groups * self.value_dim, key_groups * self.block)
        row_floats = 2 * self.key_dim + 2 * self.value_dim + 1
        shared = _FLOAT * (sums + rows * row_floats + (products + 1) * self.block)
        own = {"READS": int(self.reads), "MOST_ROWS": rows, "THREADS": threads, "SHARED": shared}
        return LaunchConfig({**self.defines, **own}, threads, shared)

    def advance(self) -> LaunchConfig:
        threads, by_channel = self._matrix_threads(), int(isinstance(self, ChannelSizes))
        return LaunchConfig({**self.defines, "BY_CHANNEL": by_channel, "THREADS": threads}, threads)

    def blocks(self) -> LaunchConfig:
        threads = threads_for((self.block // 4) ** 2)
        rows = max(2 * (self.key_dim + 4), threads)
        shared = _FLOAT * self.block * (rows + self.block + 3)
        return LaunchConfig({**self.defines, "THREADS": threads, "SHARED": shared}, threads, shared)

    def scan(self, heads: int, processors: int, shared_memory: int) -> LaunchConfig:
        """The launch of delta_scan for `heads` value heads, with wide slices, which read less, if enough
        multiprocessors have one. shared_memory: bytes of a multiprocessor."""
        fitting = [columns for columns in _SLICES if self._scan_shared(columns, _CHUNKS[-1]) <= SHARED_BYTES]
        fitting = [columns for columns in fitting if columns < self.value_dim + 16] or [_SLICES[-1]]
        least = processors * (2 / 5 if shared_memory > _SLOW_BYTES else 7 / 8)
        columns = next((one for one in fitting if heads * -(-self.value_dim // one) >= least), fitting[-1])
        shared = {chunk: self._scan_shared(columns, chunk) for chunk in _CHUNKS}
        chunk = next((chunk for chunk in _CHUNKS if shared[chunk] <= SHARED_BYTES), _CHUNKS[-1])
        shares = {"SLICE": columns, "CHUNK": chunk, "READS": int(self.reads)}
        defines = {**self.defines, **shares, "THREADS": _SCAN_THREADS, "SHARED": shared[chunk]}
        return LaunchConfig(defines, _SCAN_THREADS, shared[chunk])

    def _scan_shared(self, columns: int, chunk: int) -> int:
        """Bytes of shared memory of delta_scan."""
        rows = self.block + max(self.reads * self.block, self.key_dim)
        terms = sum(-(-terms // 16) * 16 + 8 for terms in (self.key_dim, self.block))
        return _FLOAT * (2 * rows * chunk + columns * terms + _SCAN_THREADS // WARP)

    def finish(self) -> LaunchConfig:
        """The launches of delta_results and delta_inputs."""
        return LaunchConfig(self.defines, 256)

    def scratch(self, key_heads: int, heads: int, blocks: int) -> list[tuple[int, ...]]:
        """Return the shapes of what delta_blocks writes: queries, keys; faded, reads, news, weights, logs.
        mamba2_blocks writes neither keys nor reads, but after queries the largest of their magnitudes and of keys'."""
        a, d, n = self.key_dim, self.value_dim, self.block
        key_shapes = [(n, a), (a, n)] if self.reads else [(n, a), (2,)]
        head_shapes = [(a, n), *([(n, a)] if self.reads else []), (n, d), (n, n), (n,)]
        return [(blocks, key_heads, *shape) for shape in key_shapes] + [
            (blocks, heads, *shape) for shape in head_shapes
        ]


class Mamba2Sizes(DeltaSizes):
    name = "Mamba 2"
    reads = False

    def blocks(self) -> LaunchConfig:
        threads = threads_for((self.block // 4) ** 2)
        channels = min(self.key_dim, _CHANNELS)
        shared = _FLOAT * (self.block * (2 * (channels + 4) + 3 * _MEMBERS) + 2 * threads // WARP)
        shares = {"CHANNELS": channels, "MEMBERS": _MEMBERS, "THREADS": threads, "SHARED": shared}
        return LaunchConfig({**self.defines, **shares}, threads, shared)


class ChannelSizes(DeltaSizes):
    name = "delta rules whose channels decay by themselves"

    @property
    def _shared(self) -> int:
        return self.step(16).shared

    def step(self, most_rows: int, *, advances: bool = False) -> LaunchConfig:
        """The launch of channel_delta. advances: of a prompt."""
        rows, threads = step_rows(most_rows), self._matrix_threads()
        groups = min(threads // (self.value_dim // 4), self.key_dim)
        row_floats = 2 * self.key_dim + 2 * self.value_dim + 2
        shared = _FLOAT * (2 * groups * self.value_dim + rows * row_floats + STEP_ROWS * self.key_dim)
        own = {"MOST_ROWS": rows, "ADVANCES": int(advances), "THREADS": threads, "SHARED": shared}
        return LaunchConfig({**self.defines, **own}, threads, shared)

    def scratch(self, key_heads: int, heads: int, blocks: int) -> list[tuple[int, ...]]:
        """Nothing: one launch computes a prompt."""
        return []


def sizes_of(mixer: Recurrent, block: int) -> DeltaSizes:
    """The sizes of a layer, for blocks of `block` tokens."""
    kinds: dict[type, type[DeltaSizes]] = {Mamba2: Mamba2Sizes, ChannelDelta: ChannelSizes}
    kind = kinds.get(type(mixer), DeltaSizes)
    return kind(mixer.key_dim, mixer.value_dim, block, mixer.width)


def heads_width(mixer: Recurrent) -> int:
    """H·D."""
    return mixer.value_heads * mixer.value_dim


def projected_columns(mixer: Recurrent) -> int:
    """Columns of a projected row, at most: q, k, v, z, b, a; or z, x, B, C, dt; or q, k, v, b, two short vectors, and
    the decays and gates that are made of these."""
    if isinstance(mixer, ChannelDelta):
        return mixer.channels + heads_width(mixer) + mixer.value_heads * (1 + mixer.key_dim) + 2 * mixer.rank
    return mixer.channels + heads_width(mixer) + 2 * mixer.value_heads


def delta_prompt_bytes(mixers: Collection[Recurrent], chunk: int, tokens: int, block_size: int) -> tuple[int, int]:
    """Bytes of what the kernels of one scan of a prompt write for each other, and of the states computed at a time."""
    blocks = tokens // block_size
    ends = 2 + sum(_STEP**power < blocks for power in range(16)) if blocks else 0
    scratch, states = [0], 0
    for mixer in mixers:
        count = min(-(-chunk // block_size) + 1, PROMPT_ROWS // block_size)
        shapes = sizes_of(mixer, block_size).scratch(mixer.key_heads, mixer.value_heads, count)
        scratch.append(sum(map(math.prod, shapes)))
        matrices, before = mixer.value_heads * mixer.key_dim * mixer.value_dim, (mixer.width - 1) * mixer.channels
        decays = mixer.key_dim if isinstance(mixer, ChannelDelta) else 1
        token_floats = mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + decays) + mixer.channels
        states += (1 + ends) * (matrices + before) + block_size * token_floats
    return _FLOAT * max(scratch), _FLOAT * states


def state_codes(key_dim: int, value_dim: int) -> LaunchConfig:
    """The launches of state_codes and state_matrices."""
    defines = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "LARGEST": float(LARGEST), "LEAST": LEAST}
    return LaunchConfig(defines, threads_for(value_dim))


class _Scan(NamedTuple):
    """Rows of a prompt that are added to a slot at once, from a place in its block, and their results y. end_rows: see
    `delta_scan.cu`."""

    y: Array
    projected: Array
    slot: DeltaSlots
    ends: DeltaEnds
    place: int
    end_rows: np.ndarray


class RecurrentOps(DeviceOps):
    """The ops `short_conv`, `gated_delta`, `channel_delta`, `mamba2` and `advance_delta`, and those of states that are
    kept."""

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        sizes_of(mixer, block_size).check()

    def short_conv(self, inputs: Array, conv: Array, bias: Array | None, rows: SlotRows) -> Array:
        (width, n), y = conv.shape, self._device.empty((len(inputs), conv.shape[1]), np.float32)
        config = LaunchConfig({"WIDTH": width}, threads_for(n))
        args = y, inputs, conv, bias, rows.slots, rows.spans, n, rows.slots.shape[1]
        self._launch("short_conv", (-(-n // config.threads), len(inputs)), config, *args)
        return y

    def gated_delta(self, projected: Array, w: DeltaWeights, rows: SlotRows) -> Array:
        slots, spans, ends = rows
        key_heads, (_, heads, _, dim) = slots.keys.shape[1], slots.updates.shape
        y = self._device.empty((len(projected), heads * dim), np.float32)
        if ends is not None:
            for scan in _scans(y, projected, rows):
                self._add_delta_rows(scan, w)
            return y
        weights, numbers = (w.conv, None, w.decay, w.dt_bias, w.norm, None), (key_heads, int(w.tiled), float(w.eps))
        args = y, *_step_state(slots), projected, *weights, spans, row_stride(projected), *numbers
        self._launch("delta_step", (heads, len(spans)), DeltaSizes.from_slots(slots).step(_span_rows(spans, y)), *args)
        return y

    def channel_delta(self, projected: Array, decays: Array, gates: Array, w: DeltaWeights, rows: SlotRows) -> Array:
        slots, spans, ends = rows
        sizes, (_, heads, block, dim) = ChannelSizes.from_slots(slots), slots.updates.shape
        y = self._device.empty((len(projected), heads * dim), np.float32)
        state, inputs = _step_state(slots), (projected, decays, gates)
        numbers = *map(row_stride, inputs), float(w.eps)
        weights = w.conv, w.decay, w.dt_bias, w.norm
        if ends is None:
            config, nothing = sizes.step(_span_rows(spans, y)), (None, None, None)
            args = y, *state, *nothing, *inputs, *weights, spans, *numbers
            self._launch("channel_delta", (heads, len(spans)), config, *args)
            return y
        config = sizes.step(STEP_ROWS, advances=True)
        for span in spans:
            _, _, count, place = span.tolist()
            end_rows = _end_rows(ends, 0, (place + count) // block)
            kept, own = (self._device.from_host(one) for one in (end_rows, span[None]))
            args = y, *state, ends.matrices, ends.inputs, kept, *inputs, *weights, own, *numbers
            self._launch("channel_delta", (heads, 1), config, *args)
        return y

    def mamba2(self, projected: Array, w: Mamba2Weights, rows: SlotRows) -> Array:
        slots, spans, ends = rows
        count, groups, inner = len(projected), slots.keys.shape[1], len(w.norm)
        y = self._device.empty((count, inner), np.float32)
        pitch, size = row_stride(projected), inner // groups
        if ends is None:
            config = Mamba2Sizes.from_slots(slots).step(_span_rows(spans, y))
            weights = w.conv, w.bias, w.decay, w.dt_bias, None, w.skip
            args = y, *_step_state(slots), projected, *weights, spans, pitch, groups, 0, 0.0
            self._launch("delta_step", (len(w.skip), len(spans)), config, *args)
        else:
            for scan in _scans(y, projected, rows):
                self._add_mamba2_rows(scan, w)
        config = LaunchConfig({}, row_threads(count, size))
        self._launch("mamba2_results", (groups, count), config, y, projected, w.norm, pitch, size, float(w.eps))
        return y

    def _add_delta_rows(self, scan: _Scan, w: DeltaWeights) -> None:
        y, projected, slot, _, place, _ = scan
        sizes, pitch, rows = DeltaSizes.from_slots(slot), row_stride(projected), len(projected)
        key_heads, heads, arrays = len(slot.keys), len(slot.updates), self._scratch(sizes, scan)
        numbers = key_heads, heads, int(w.tiled), rows, place
        args = *arrays, projected, *_block_state(slot), slot.inputs, w.conv, w.decay, w.dt_bias, pitch, *numbers
        self._launch("delta_blocks", (len(scan.end_rows), key_heads), sizes.blocks(), *args)
        end_rows, (queries, _, *others) = self._device.from_host(scan.end_rows), arrays
        self._scan(sizes, scan, [queries, *others, None], end_rows, w.tiled)
        config = sizes.finish()
        grid = (-(-rows * heads * WARP // config.threads),)
        result_args = y, projected, w.norm, pitch, key_heads, heads, rows, float(w.eps)
        self._launch("delta_results", grid, config, *result_args)
        self._keep_inputs(sizes, scan, projected, end_rows)

    def _add_mamba2_rows(self, scan: _Scan, w: Mamba2Weights) -> None:
        y, projected, slot, _, place, _ = scan
        sizes, groups, heads = Mamba2Sizes.from_slots(slot), len(slot.keys), len(slot.updates)
        arrays, config = self._scratch(sizes, scan), sizes.blocks()
        weights = w.conv, w.bias, w.decay, w.dt_bias, w.skip
        numbers = row_stride(projected), groups, heads, len(projected), place
        args = y, *arrays, projected, *_block_state(slot), slot.inputs, *weights, *numbers
        grid = len(scan.end_rows), groups, -(-heads // groups // int(config.defines["MEMBERS"]))
        self._launch("mamba2_blocks", grid, config, *args)
        end_rows, (queries, largest, decayed_keys, *others) = self._device.from_host(scan.end_rows), arrays
        self._scan(sizes, scan, [queries, decayed_keys, None, *others, largest], end_rows, False)
        self._keep_inputs(sizes, scan, projected[:, y.shape[1] :], end_rows)

    def _scratch(self, sizes: DeltaSizes, scan: _Scan) -> list[Array]:
        shapes = sizes.scratch(len(scan.slot.keys), len(scan.slot.updates), len(scan.end_rows))
        return [self._device.empty(shape, np.float32) for shape in shapes]

    def _scan(
        self, sizes: DeltaSizes, scan: _Scan, arrays: Sequence[Array | None], end_rows: Array, tiled: bool
    ) -> None:
        """arrays: queries, faded, reads or None, news, weights, logs, largest or None: see `delta_scan.cu`."""
        slot, (heads, _, dim) = scan.slot, scan.slot.updates.shape
        config = sizes.scan(heads, self._device.processors, self._device.shared_memory)
        grid = -(-dim // int(config.defines["SLICE"])), heads
        written, numbers = (scan.y, slot.matrices, *_block_state(slot), scan.ends.matrices), (len(scan.y), scan.place)
        self._launch("delta_scan", grid, config, *written, *arrays, end_rows, len(slot.keys), int(tiled), *numbers)

    def _keep_inputs(self, sizes: DeltaSizes, scan: _Scan, conv_rows: Array, end_rows: Array) -> None:
        """conv_rows: rows that begin with what is convolved."""
        inputs, config = scan.slot.inputs, sizes.finish()
        numbers = row_stride(conv_rows), inputs.shape[1], len(conv_rows), scan.place
        args = inputs, scan.ends.inputs, conv_rows, end_rows, *numbers
        self._launch("delta_inputs", (-(-inputs.shape[1] // config.threads),), config, *args, file="delta_results")

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        key_heads, heads = layers[0].keys.shape[1], layers[0].updates.shape[1]
        kind = ChannelSizes if layers[0].decays.ndim == 4 else DeltaSizes
        config, numbers = kind.from_slots(layers[0]).advance(), self._device.from_host(np.array(slots, np.int32))
        rows = [(one.matrices, one.inputs, one.keys, one.updates, one.decays) for one in layers]
        grid = heads, len(slots), len(layers)
        self._launch("advance_delta", grid, config, Addresses(rows, written=2), numbers, key_heads, int(tiled))

    def assign(self, target: Array, x: Any) -> None:
        self._device.use()
        target[...] = x

    def keep_states(self, ends: DeltaEnds, codes: SnapshotCodes) -> FetchStates:
        """Kernels make codes of eight bits; others are made on the host."""
        inputs = self._device.to_host_later(ends.inputs)[1]
        if codes == EIGHT_BITS:
            count, heads, key_dim, dim = ends.matrices.shape
            codes_and_scales = {
                "codes": self._device.empty(ends.matrices.shape, np.int8),
                "scales": self._device.empty((count, heads, dim), np.float32),
            }
            self._launch(
                "state_codes", (count * heads,), state_codes(key_dim, dim), *codes_and_scales.values(), ends.matrices
            )
            fetch = {name: self._device.to_host_later(array)[1] for name, array in codes_and_scales.items()}
            return lambda: {**{name: wait() for name, wait in fetch.items()}, "inputs": inputs()}
        matrices = self._device.to_host_later(ends.matrices)[1]
        return lambda: {**codes.encode(matrices()), "inputs": inputs()}

    def restore_states(self, snapshot: Mapping[str, np.ndarray], codes: SnapshotCodes) -> Array:
        if codes != EIGHT_BITS:
            return self._device.from_host(codes.decode(snapshot))
        fields = [self._device.from_host(snapshot[name]) for name in ("codes", "scales")]
        heads, key_dim, dim = snapshot["codes"].shape
        matrices, config = self._device.empty((heads, key_dim, dim), np.float32), state_codes(key_dim, dim)
        self._launch("state_matrices", (heads,), config, matrices, *fields, file="state_codes")
        return matrices


def _scans(y: Array, projected: Array, rows: SlotRows) -> Iterator[_Scan]:
    """The rows of each span, PROMPT_ROWS at most at a time, which end with a block."""
    slots, spans, ends = rows
    assert ends is not None
    block = slots.keys.shape[3]
    for span in map(DeltaSpan._make, spans.tolist()):
        slot = DeltaSlots(*(array[span.slot] for array in slots))
        first, last, place, number = span.first, span.first + span.rows, span.place, 0
        while first < last:
            end = min(last, first + PROMPT_ROWS // block * block - place)
            blocks = -(-(place + end - first) // block)
            end_rows = _end_rows(ends, number, blocks)
            yield _Scan(y[first:end], projected[first:end], slot, ends, place, end_rows)
            number, place, first = number + blocks, (place + end - first) % block, end


def _end_rows(ends: DeltaEnds, first: int, blocks: int) -> np.ndarray:
    """For each of so many blocks from number `first` on, the row of `ends` that its state goes to, or −1."""
    end_rows = np.full(blocks, -1, np.int32)
    for row, number in enumerate(ends.numbers):
        if first <= number < first + blocks:
            end_rows[number - first] = row
    return end_rows


def _span_rows(spans: Array, y: Array) -> int:
    """Rows of a span of a step, at most."""
    return 1 if len(spans) == len(y) else STEP_ROWS


def _block_state(slot: DeltaSlots) -> tuple[Array, Array, Array]:
    """What a slot has of its block's tokens."""
    return slot.keys, slot.updates, slot.decays


def _step_state(slots: DeltaSlots) -> tuple[Array, ...]:
    return *_block_state(slots), slots.inputs, slots.matrices
