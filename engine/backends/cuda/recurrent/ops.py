"""The ops of layers whose state is not K/V: short convolutions, gated delta rules and Mamba 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Addresses, Array, row_stride
from polarlm.engine.backends.cuda.launch import WARP, DeviceOps, LaunchConfig, threads_for
from polarlm.engine.backends.cuda.launch_configs import row_threads
from polarlm.engine.backends.cuda.recurrent.sizes import PROMPT_ROWS, DeltaSizes, Mamba2Sizes, sizes_of, state_codes
from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights, FetchStates, Mamba2Weights
from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.quantization.snapshot_codes import EIGHT_BITS, SnapshotCodes
from polarlm.model_loaders.config import Recurrent


class _Part(NamedTuple):
    """Rows of a prompt that are added to a slot at once, from a place in its block, and their results y. end_rows: see
    `delta_scan.cu`."""

    y: Array
    projected: Array
    slot: DeltaSlots
    ends: DeltaEnds
    place: int
    end_rows: np.ndarray


class RecurrentOps(DeviceOps):
    """The ops `short_conv`, `gated_delta`, `mamba2` and `advance_delta`, and the ops of states that are kept."""

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        sizes_of(mixer, block_size).check()

    def short_conv(self, inputs: Array, conv: Array, bias: Array | None, slots: Array, rows: Array) -> Array:
        (width, n), y = conv.shape, self._device.empty((len(inputs), conv.shape[1]), np.float32)
        config = LaunchConfig({"WIDTH": width}, threads_for(n))
        args = y, inputs, conv, bias, slots, rows, n, slots.shape[1]
        self._launch("short_conv", (-(-n // config.threads), len(inputs)), config, *args)
        return y

    def gated_delta(
        self, projected: Array, w: DeltaWeights, slots: DeltaSlots, spans: Array, ends: DeltaEnds | None = None
    ) -> Array:
        key_heads, (_, heads, _, dim) = slots.keys.shape[1], slots.updates.shape
        y = self._device.empty((len(projected), heads * dim), np.float32)
        if ends is not None:
            for part in _parts(y, projected, slots, spans, ends):
                self._add_delta_rows(part, w)
            return y
        weights, numbers = (w.conv, w.decay, w.dt_bias, w.norm), (key_heads, int(w.tiled), float(w.eps))
        args = y, *_step_state(slots), projected, *weights, spans, row_stride(projected), *numbers
        self._launch("gated_delta", (heads, len(spans)), DeltaSizes.from_slots(slots).step(_span_rows(spans, y)), *args)
        return y

    def mamba2(
        self, projected: Array, w: Mamba2Weights, slots: DeltaSlots, spans: Array, ends: DeltaEnds | None = None
    ) -> Array:
        rows, groups, inner = len(projected), slots.keys.shape[1], len(w.norm)
        y = self._device.empty((rows, inner), np.float32)
        pitch, size = row_stride(projected), inner // groups
        if ends is None:
            config, weights = (
                Mamba2Sizes.from_slots(slots).step(_span_rows(spans, y)),
                (w.conv, w.bias, w.decay, w.dt_bias),
            )
            args = y, *_step_state(slots), projected, *weights, w.skip, spans, pitch, groups
            self._launch("mamba2", (len(w.skip), len(spans)), config, *args)
        else:
            for part in _parts(y, projected, slots, spans, ends):
                self._add_mamba2_rows(part, w)
        config = LaunchConfig({}, row_threads(rows, size))
        self._launch("mamba2_results", (groups, rows), config, y, projected, w.norm, pitch, size, float(w.eps))
        return y

    def _add_delta_rows(self, part: _Part, w: DeltaWeights) -> None:
        y, projected, slot, _, place, _ = part
        sizes, pitch, rows = DeltaSizes.from_slots(slot), row_stride(projected), len(projected)
        key_heads, heads, arrays = len(slot.keys), len(slot.updates), self._scratch(sizes, part)
        numbers = key_heads, heads, int(w.tiled), rows, place
        args = *arrays, projected, *_block_state(slot), slot.inputs, w.conv, w.decay, w.dt_bias, pitch, *numbers
        self._launch("delta_blocks", (len(part.end_rows), key_heads), sizes.blocks(), *args)
        end_rows, (queries, _, *others) = self._device.from_host(part.end_rows), arrays
        self._scan(sizes, part, [queries, *others, None], end_rows, w.tiled)
        config = sizes.finish()
        grid = (-(-rows * heads * WARP // config.threads),)
        result_args = y, projected, w.norm, pitch, key_heads, heads, rows, float(w.eps)
        self._launch("delta_results", grid, config, *result_args)
        self._keep_inputs(sizes, part, projected, end_rows)

    def _add_mamba2_rows(self, part: _Part, w: Mamba2Weights) -> None:
        y, projected, slot, _, place, _ = part
        sizes, groups, heads = Mamba2Sizes.from_slots(slot), len(slot.keys), len(slot.updates)
        arrays, config = self._scratch(sizes, part), sizes.blocks()
        weights = w.conv, w.bias, w.decay, w.dt_bias, w.skip
        numbers = row_stride(projected), groups, heads, len(projected), place
        args = y, *arrays, projected, *_block_state(slot), slot.inputs, *weights, *numbers
        grid = len(part.end_rows), groups, -(-heads // groups // int(config.defines["MEMBERS"]))
        self._launch("mamba2_blocks", grid, config, *args)
        end_rows, (queries, largest, decayed_keys, *others) = self._device.from_host(part.end_rows), arrays
        self._scan(sizes, part, [queries, decayed_keys, None, *others, largest], end_rows, False)
        self._keep_inputs(sizes, part, projected[:, y.shape[1] :], end_rows)

    def _scratch(self, sizes: DeltaSizes, part: _Part) -> list[Array]:
        shapes = sizes.scratch(len(part.slot.keys), len(part.slot.updates), len(part.end_rows))
        return [self._device.empty(shape, np.float32) for shape in shapes]

    def _scan(
        self, sizes: DeltaSizes, part: _Part, arrays: Sequence[Array | None], end_rows: Array, tiled: bool
    ) -> None:
        """arrays: queries, faded, reads or None, news, weights, logs, largest or None: see `delta_scan.cu`."""
        slot, (heads, _, dim) = part.slot, part.slot.updates.shape
        config = sizes.scan(heads, self._device.processors, self._device.shared_memory)
        grid = -(-dim // int(config.defines["SLICE"])), heads
        written, numbers = (part.y, slot.matrices, *_block_state(slot), part.ends.matrices), (len(part.y), part.place)
        self._launch("delta_scan", grid, config, *written, *arrays, end_rows, len(slot.keys), int(tiled), *numbers)

    def _keep_inputs(self, sizes: DeltaSizes, part: _Part, conv_rows: Array, end_rows: Array) -> None:
        """conv_rows: rows that begin with what is convolved."""
        inputs, config = part.slot.inputs, sizes.finish()
        numbers = row_stride(conv_rows), inputs.shape[1], len(conv_rows), part.place
        args = inputs, part.ends.inputs, conv_rows, end_rows, *numbers
        self._launch("delta_inputs", (-(-inputs.shape[1] // config.threads),), config, *args, file="delta_results")

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        key_heads, heads = layers[0].keys.shape[1], layers[0].updates.shape[1]
        config, numbers = DeltaSizes.from_slots(layers[0]).advance(), self._device.from_host(np.array(slots, np.int32))
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


def _parts(y: Array, projected: Array, slots: DeltaSlots, spans: Array, ends: DeltaEnds) -> Iterator[_Part]:
    """The rows of each span, PROMPT_ROWS at most at a time, which end with a block."""
    block = slots.keys.shape[3]
    for span in map(DeltaSpan._make, spans.tolist()):
        slot = DeltaSlots(*(array[span.slot] for array in slots))
        first, last, place, number = span.first, span.first + span.rows, span.place, 0
        while first < last:
            end = min(last, first + PROMPT_ROWS // block * block - place)
            blocks = -(-(place + end - first) // block)
            end_rows = np.full(blocks, -1, np.int32)
            for row, block_number in enumerate(ends.numbers):
                if number <= block_number < number + blocks:
                    end_rows[block_number - number] = row
            yield _Part(y[first:end], projected[first:end], slot, ends, place, end_rows)
            number, place, first = number + blocks, (place + end - first) % block, end


def _span_rows(spans: Array, y: Array) -> int:
    """Rows of a span of a step, at most."""
    return 1 if len(spans) == len(y) else STEP_ROWS


def _block_state(slot: DeltaSlots) -> tuple[Array, Array, Array]:
    """What a slot has of its block's tokens."""
    return slot.keys, slot.updates, slot.decays


def _step_state(slots: DeltaSlots) -> tuple[Array, ...]:
    return *_block_state(slots), slots.inputs, slots.matrices
