"""The ops of layers whose state is not K/V: short convolutions, gated delta rules and Mamba 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.delta import DeltaSlots, DeltaWeights, Mamba2Weights, SlotRows
from polarlm.engine.backends.native.kernels.recurrent import mamba2
from polarlm.engine.backends.native.kernels.recurrent.common import AdvanceArguments, RecurrentArguments, advance
from polarlm.engine.backends.native.kernels.recurrent.gated_delta import DeltaSpec, gated_delta, supports
from polarlm.engine.backends.native.kernels.recurrent.mamba2 import Mamba2Spec
from polarlm.engine.backends.native.kernels.recurrent.short_conv import ConvArguments, short_conv
from polarlm.engine.backends.native.kernels.rows import NormArguments, norm_rows
from polarlm.engine.backends.native.launch import KernelOps


class RecurrentOps(KernelOps):
    """See `engine.backends.delta.RecurrentOps`. NumPy computes heads for which a thread's scratch has no room."""

    def assign(self, target: np.ndarray, x: np.ndarray | float) -> None:
        self._launch.run_numpy(super().assign, target, x)

    def short_conv(self, inputs: np.ndarray, conv: np.ndarray, bias: np.ndarray | None, rows: SlotRows) -> np.ndarray:
        y = self._launch.empty((len(inputs), inputs.shape[1] // 3))
        arguments = ConvArguments(
            inputs=inputs,
            conv=conv,
            bias=bias,
            slots=rows.slots,
            rows=rows.spans,
            y=y,
            channels=y.shape[1],
            slot_rows=rows.slots.shape[1],
        )
        self._launch(short_conv(len(conv), has_bias=bias is not None), len(inputs), arguments)
        return y

    def gated_delta(self, projected: np.ndarray, w: DeltaWeights, rows: SlotRows) -> np.ndarray:
        spec = DeltaSpec(*_sizes(rows.slots), w.tiled, rows.ends is not None)
        if not supports(spec):
            return self._launch.run_numpy(super().gated_delta, projected, w, rows)
        return self._add_delta_rows(spec, projected, w, rows)

    def channel_delta(
        self, projected: np.ndarray, decays: np.ndarray, gates: np.ndarray, w: DeltaWeights, rows: SlotRows
    ) -> np.ndarray:
        spec = DeltaSpec(*_sizes(rows.slots), w.tiled, rows.ends is not None, by_channel=True)
        if not supports(spec):
            return self._launch.run_numpy(super().channel_delta, projected, decays, gates, w, rows)
        more = {"row_bytes": projected.strides[0], "decay_inputs": decays, "gates": gates}
        return self._add_delta_rows(spec, projected, w, rows, **more)

    def _add_delta_rows(
        self, spec: DeltaSpec, projected: np.ndarray, w: DeltaWeights, rows: SlotRows, **more: Any
    ) -> np.ndarray:
        """more: arguments of the kernel besides others."""
        y = self._launch.empty((len(projected), spec.value_heads * spec.value_dim))
        arguments = RecurrentArguments(
            projected=projected,
            out=y,
            conv=w.conv,
            decay=w.decay,
            dt_bias=w.dt_bias,
            norm=w.norm,
            **_row_arguments(rows, spec.block),
            eps=w.eps,
            **more,
        )
        self._launch(gated_delta(spec), len(rows.spans) * spec.key_heads, arguments, grain=1)
        return y

    def mamba2(self, projected: np.ndarray, w: Mamba2Weights, rows: SlotRows) -> np.ndarray:
        spec = Mamba2Spec(*_sizes(rows.slots), w.bias is not None, rows.ends is not None)
        if not mamba2.supports(spec):
            return self._launch.run_numpy(super().mamba2, projected, w, rows)
        launch, count, spans = self._launch, len(projected), len(rows.spans)
        y, more = launch.empty((count, spec.inner)), _row_arguments(rows, spec.block)
        blocks = 0 if rows.ends is None else more["blocks"] + 1
        arguments = RecurrentArguments(
            projected=projected,
            convolved=launch.empty((count, spec.channels)),
            block_keys=launch.empty((blocks, spec.groups, spec.size, spec.block)),
            scores=launch.empty((count, spec.groups, spec.block)),
            out=y,
            conv=w.conv,
            bias=w.bias,
            decay=w.decay,
            dt_bias=w.dt_bias,
            skip=w.skip,
            **more,
        )
        launch(mamba2.convolve(spec), spans * -(-spec.channels // mamba2.PART), arguments)
        launch(mamba2.multiply_keys(spec), spans * spec.groups, arguments, grain=1)
        launch(mamba2.add_rows(spec), spans * spec.heads, arguments)
        columns = spec.inner // spec.groups
        norm = NormArguments(y, w.norm, y, columns, 4 * columns, 4 * columns, w.eps, weights=spec.groups)
        launch(norm_rows(adds=False), count * spec.groups, norm)
        return y

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        sizes, numbers = _sizes(layers[0]), np.array(slots, np.int32)
        key_heads, shared, *_ = sizes
        for layer in layers:
            arguments = AdvanceArguments(**layer._asdict(), slots=numbers, channels=layer.inputs.shape[2])
            kernel = advance(*sizes, tiled=tiled, by_channel=layer.decays.ndim > 3)
            self._launch(kernel, len(slots) * key_heads * shared, arguments)


def _sizes(slots: DeltaSlots) -> tuple[int, int, int, int, int, int]:
    """Key heads, value heads of each, key dim, value dim, tokens of a block, width of the convolution."""
    _, key_heads, key_dim, block = slots.keys.shape
    _, heads, _, value_dim = slots.updates.shape
    return key_heads, heads // key_heads, key_dim, value_dim, block, slots.inputs.shape[1] - block + 1


def _row_arguments(rows: SlotRows, block: int) -> dict[str, Any]:
    """The arguments of a kernel that say where rows are added, and which ends of blocks are kept, of a prompt's only
    span."""
    slots, spans, ends = rows
    common = {**slots._asdict(), "spans": spans}
    if ends is None:
        return {**common, "end_rows": None, "end_matrices": None, "end_inputs": None, "blocks": 0}
    blocks = (int(spans[0, 2]) + int(spans[0, 3])) // block
    end_rows = np.full(blocks, -1, np.int32)
    for row, number in enumerate(ends.numbers):
        if 0 <= number < blocks:
            end_rows[number] = row
    return {**common, "end_rows": end_rows, "end_matrices": ends.matrices, "end_inputs": ends.inputs, "blocks": blocks}
