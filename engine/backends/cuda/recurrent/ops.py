"""The ops of layers whose state is not K/V: short convolutions and gated delta rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polarlm.engine.backends.cuda.device import Addresses, Array, Device, row_stride
from polarlm.engine.backends.cuda.launch import WARP, LaunchConfig, Launcher, threads_for
from polarlm.engine.backends.cuda.recurrent.sizes import PROMPT_ROWS, DeltaSizes, scratch, state_codes
from polarlm.engine.backends.delta import (
    DeltaEnds,
    DeltaSlots,
    DeltaSpan,
    DeltaWeights,
    FetchStates,
    Mamba2Weights,
)
from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.errors import KernelError
from polarlm.engine.quantization.snapshot_codes import EIGHT_BITS, SnapshotCodes, narrowed
from polarlm.model_loaders.config import GatedDelta, Recurrent


class RecurrentOps:
    """The ops `short_conv`, `gated_delta` and `advance_delta`."""

    def __init__(self, device: Device, launch: Launcher):
        self._device, self._launch = device, launch

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        if not isinstance(mixer, GatedDelta):
            raise ValueError("This model has layers of Mamba 2, for which a GPU has no kernels yet: choose device=cpu")
        DeltaSizes(mixer.key_dim, mixer.value_dim, block_size, mixer.width).check()

    def short_conv(self, inputs: Array, conv: Array, bias: Array | None, slots: Array, rows: Array) -> Array:
        (width, n), y = conv.shape, self._device.empty((len(inputs), conv.shape[1]), np.float32)
        config = LaunchConfig({"WIDTH": width}, threads_for(n))
        args = y, inputs, conv, bias, slots, rows, n, slots.shape[1]
        self._launch("short_conv", (-(-n // config.threads), len(inputs)), config, *args)
        return y

    def gated_delta(
        self, projected: Array, w: DeltaWeights, slots: DeltaSlots, spans: Array, ends: DeltaEnds | None = None
    ) -> Array:
        heads, dim = slots.updates.shape[1], slots.updates.shape[3]
        y = self._device.empty((len(projected), heads * dim), np.float32)
        if ends is None:
            self._step(y, projected, w, slots, spans)
        else:
            for span in map(DeltaSpan._make, spans.tolist()):
                self._prompt(y, projected, w, slots, span, ends)
        return y

    def mamba2(
        self, projected: Array, w: Mamba2Weights, slots: DeltaSlots, spans: Array, ends: DeltaEnds | None = None
    ) -> Array:
        raise KernelError("There is no kernel of Mamba 2 for a GPU")

    def _step(self, y: Array, projected: Array, w: DeltaWeights, slots: DeltaSlots, spans: Array) -> None:
        count, key_heads, heads = len(spans), slots.keys.shape[1], slots.updates.shape[1]
        config = DeltaSizes.of(slots).step(1 if count == len(projected) else STEP_ROWS)
        state = slots.keys, slots.updates, slots.decays, slots.inputs, slots.matrices
        weights, numbers = (w.conv, w.decay, w.dt_bias, w.norm), (key_heads, int(w.tiled), float(w.eps))
        args = y, *state, projected, *weights, spans, row_stride(projected), *numbers
        self._launch("gated_delta", (heads, count), config, *args)

    def _prompt(
        self, y: Array, projected: Array, w: DeltaWeights, slots: DeltaSlots, span: DeltaSpan, ends: DeltaEnds
    ) -> None:
        """Add the rows of a span, PROMPT_ROWS at most at a time, which end with a block."""
        block, slot = slots.keys.shape[3], DeltaSlots(*(array[span.slot] for array in slots))
        first, last, place, number = span.first, span.first + span.rows, span.place, 0
        while first < last:
            end = min(last, first + PROMPT_ROWS // block * block - place)
            blocks = -(-(place + end - first) // block)
            kept = np.full(blocks, -1, np.int32)
            for row, wanted in enumerate(ends.numbers):
                if number <= wanted < number + blocks:
                    kept[wanted - number] = row
            self._add_rows(y[first:end], projected[first:end], w, slot, place, kept, ends)
            number, place, first = number + blocks, (place + end - first) % block, end

    def _add_rows(
        self,
        y: Array,
        projected: Array,
        w: DeltaWeights,
        slot: DeltaSlots,
        place: int,
        kept: np.ndarray,
        ends: DeltaEnds,
    ) -> None:
        """Add rows to one slot. kept: see `delta_scan.cu`."""
        (key_heads, _, _), (heads, _, dim), rows = slot.keys.shape, slot.updates.shape, len(projected)
        sizes, pitch, channels = DeltaSizes.of(slot), row_stride(projected), slot.inputs.shape[1]
        arrays = [self._device.empty(shape, np.float32) for shape in scratch(sizes, key_heads, heads, len(kept))]
        known = slot.keys, slot.updates, slot.decays
        weights = w.conv, w.decay, w.dt_bias
        numbers = key_heads, heads, int(w.tiled), rows, place
        args = *arrays, projected, *known, slot.inputs, *weights, pitch, *numbers
        self._launch("delta_blocks", (len(kept), key_heads), sizes.blocks(), *args)

        scan, wanted = sizes.scan(heads, self._device.processors), self._device.from_host(kept)
        slices = -(-dim // int(scan.defines["SLICE"]))
        queries, _, *others = arrays
        written, read = (y, slot.matrices, *known, ends.matrices), (queries, *others, wanted)
        self._launch("delta_scan", (slices, heads), scan, *written, *read, key_heads, int(w.tiled), rows, place)

        finish = sizes.finish()
        of_results = y, projected, w.norm, pitch, key_heads, heads, rows, float(w.eps)
        blocks = -(-rows * heads * WARP // finish.threads)
        self._launch("delta_results", (blocks,), finish, *of_results)
        of_inputs = slot.inputs, ends.inputs, projected, wanted, pitch, channels, rows, place
        self._launch("delta_inputs", (-(-channels // finish.threads),), finish, *of_inputs, file="delta_results")

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        key_heads, heads = layers[0].keys.shape[1], layers[0].updates.shape[1]
        config, numbers = DeltaSizes.of(layers[0]).advance(), self._device.from_host(np.array(slots, np.int32))
        rows = [(one.matrices, one.inputs, one.keys, one.updates, one.decays) for one in layers]
        grid = heads, len(slots), len(layers)
        self._launch("advance_delta", grid, config, Addresses(rows, written=2), numbers, key_heads, int(tiled))

    def keep_states(self, ends: DeltaEnds, codes: SnapshotCodes) -> FetchStates:
        """Kernels make codes of eight bits; others are made on the host."""
        inputs = self._device.to_host_later(ends.inputs)[1]
        if codes == EIGHT_BITS:
            count, heads, key_dim, dim = ends.matrices.shape
            made = {
                "codes": self._device.empty(ends.matrices.shape, np.int8),
                "scales": self._device.empty((count, heads, dim), np.float32),
            }
            self._launch("state_codes", (count * heads,), state_codes(key_dim, dim), *made.values(), ends.matrices)
            fetch = {name: self._device.to_host_later(array)[1] for name, array in made.items()}
            return lambda: {**{name: wait() for name, wait in fetch.items()}, "inputs": inputs()}
        matrices = self._device.to_host_later(ends.matrices)[1]
        return lambda: {**codes.encode(matrices()), "inputs": narrowed(inputs(), codes.inputs)}

    def restore_states(self, kept: Mapping[str, np.ndarray], codes: SnapshotCodes) -> Array:
        if codes != EIGHT_BITS:
            return self._device.from_host(codes.decode(kept))
        fields = [self._device.from_host(kept[name]) for name in ("codes", "scales")]
        heads, key_dim, dim = kept["codes"].shape
        matrices, config = self._device.empty((heads, key_dim, dim), np.float32), state_codes(key_dim, dim)
        self._launch("state_matrices", (heads,), config, matrices, *fields, file="state_codes")
        return matrices
