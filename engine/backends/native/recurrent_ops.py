"""The ops of layers whose state is not K/V: short convolutions, gated delta rules and Mamba 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaWeights, Mamba2Weights
from polarlm.engine.backends.native.kernels.recurrent import mamba2
from polarlm.engine.backends.native.kernels.recurrent.common import AdvanceArguments, RecurrentArguments, advance
from polarlm.engine.backends.native.kernels.recurrent.gated_delta import Delta, gated_delta, supports
from polarlm.engine.backends.native.kernels.recurrent.mamba2 import Mamba2
from polarlm.engine.backends.native.kernels.recurrent.short_conv import ConvArguments, short_conv
from polarlm.engine.backends.native.kernels.rows import NormArguments, norm_rows
from polarlm.engine.backends.native.launch import KernelOps


class RecurrentOps(KernelOps):
    """See `engine.backends.delta.RecurrentOps`. NumPy computes heads for which a thread's scratch has no room."""

    def short_conv(
        self, inputs: np.ndarray, conv: np.ndarray, bias: np.ndarray | None, slots: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        y = self._launch.empty((len(inputs), inputs.shape[1] // 3))
        arguments = ConvArguments(
            inputs=inputs,
            conv=conv,
            bias=bias,
            slots=slots,
            rows=rows,
            y=y,
            channels=y.shape[1],
            slot_rows=slots.shape[1],
        )
        self._launch(short_conv(len(conv), has_bias=bias is not None), len(inputs), arguments)
        return y

    def gated_delta(
        self,
        projected: np.ndarray,
        w: DeltaWeights,
        slots: DeltaSlots,
        spans: np.ndarray,
        ends: DeltaEnds | None = None,
    ) -> np.ndarray:
        spec = Delta(*_sizes(slots), w.tiled, ends is not None)
        if not supports(spec):
            return self._launch.run_numpy(super().gated_delta, projected, w, slots, spans, ends)
        return self._add_delta_rows(spec, (projected, w, slots, spans, ends), {})

    def channel_delta(
        self,
        projected: np.ndarray,
        decays: np.ndarray,
        gates: np.ndarray,
        w: DeltaWeights,
        slots: DeltaSlots,
        spans: np.ndarray,
        ends: DeltaEnds | None = None,
    ) -> np.ndarray:
        spec = Delta(*_sizes(slots), w.tiled, ends is not None, by_channel=True)
        if not supports(spec):
            return self._launch.run_numpy(super().channel_delta, projected, decays, gates, w, slots, spans, ends)
        arguments = {"row_bytes": projected.strides[0], "decay_inputs": decays, "gates": gates}
        return self._add_delta_rows(spec, (projected, w, slots, spans, ends), arguments)

    def _add_delta_rows(self, spec: Delta, inputs: tuple[Any, ...], more: Mapping[str, Any]) -> np.ndarray:
        """inputs: of `gated_delta`. more: arguments of the kernel besides others."""
        projected, w, slots, spans, ends = inputs
        y = self._launch.empty((len(projected), spec.value_heads * spec.value_dim))
        arguments = RecurrentArguments(
            projected=projected,
            out=y,
            conv=w.conv,
            decay=w.decay,
            dt_bias=w.dt_bias,
            norm=w.norm,
            **slots._asdict(),
            spans=spans,
            **_end_arguments(ends, spans, spec.block),
            eps=w.eps,
            **more,
        )
        self._launch(gated_delta(spec), len(spans) * spec.key_heads, arguments, grain=1)
        return y

    def mamba2(
        self,
        projected: np.ndarray,
        w: Mamba2Weights,
        slots: DeltaSlots,
        spans: np.ndarray,
        ends: DeltaEnds | None = None,
    ) -> np.ndarray:
        spec = Mamba2(*_sizes(slots), w.bias is not None, ends is not None)
        if not mamba2.supports(spec):
            return self._launch.run_numpy(super().mamba2, projected, w, slots, spans, ends)
        launch, rows = self._launch, len(projected)
        y, kept = launch.empty((rows, spec.inner)), _end_arguments(ends, spans, spec.block)
        blocks = 0 if ends is None else kept["blocks"] + 1
        arguments = RecurrentArguments(
            projected=projected,
            convolved=launch.empty((rows, spec.channels)),
            block_keys=launch.empty((blocks, spec.groups, spec.size, spec.block)),
            scores=launch.empty((rows, spec.groups, spec.block)),
            out=y,
            conv=w.conv,
            bias=w.bias,
            decay=w.decay,
            dt_bias=w.dt_bias,
            skip=w.skip,
            **slots._asdict(),
            spans=spans,
            **kept,
        )
        launch(mamba2.convolve(spec), len(spans) * -(-spec.channels // mamba2.PART), arguments)
        launch(mamba2.multiply_keys(spec), len(spans) * spec.groups, arguments, grain=1)
        launch(mamba2.add_rows(spec), len(spans) * spec.heads, arguments)
        columns = spec.inner // spec.groups
        norm = NormArguments(y, w.norm, y, columns, 4 * columns, 4 * columns, w.eps, weights=spec.groups)
        launch(norm_rows(adds=False), rows * spec.groups, norm)
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


def _end_arguments(ends: DeltaEnds | None, spans: np.ndarray, block: int) -> dict[str, Any]:
    """The arguments of a kernel that say which ends of blocks are kept, of a prompt's only span."""
    if ends is None:
        return {"end_rows": None, "end_matrices": None, "end_inputs": None, "blocks": 0}
    blocks = (int(spans[0, 2]) + int(spans[0, 3])) // block
    rows = np.full(blocks, -1, np.int32)
    for row, number in enumerate(ends.numbers):
        if 0 <= number < blocks:
            rows[number] = row
    return {"end_rows": rows, "end_matrices": ends.matrices, "end_inputs": ends.inputs, "blocks": blocks}
