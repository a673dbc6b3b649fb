"""The ops of layers whose state is not K/V: short convolutions and gated delta rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights
from polarlm.engine.backends.native.kernels.conv import ConvArguments, short_conv
from polarlm.engine.backends.native.kernels.delta import gated_delta
from polarlm.engine.backends.native.kernels.delta_unit import Delta, DeltaArguments, supports
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.numpy import gated_delta as plain


class ConvOps:
    """The op `short_conv`."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

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


class DeltaOps:
    """The ops `gated_delta` and `advance_delta`. NumPy computes heads that a thread's scratch has no room for."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._plain = launch.unrecorded(plain.gated_delta)

    def gated_delta(
        self,
        projected: np.ndarray,
        w: DeltaWeights,
        slots: DeltaSlots,
        spans: np.ndarray,
        ends: DeltaEnds | None = None,
    ) -> np.ndarray:
        spec = _spec(slots, tiled=w.tiled, is_prompt=ends is not None)
        if not supports(spec):
            return self._plain(projected, w, slots, spans, ends)
        y = self._launch.empty((len(projected), spec.value_heads * spec.value_dim))
        kept: dict[str, Any] = {"kept": None, "end_matrices": None, "end_inputs": None, "blocks": 0}
        if ends is not None:
            blocks = (int(spans[0, 2]) + int(spans[0, 3])) // spec.block
            rows = np.full(blocks, -1, np.int32)
            for row, number in enumerate(ends.numbers):
                if 0 <= number < blocks:
                    rows[number] = row
            kept = {"kept": rows, "end_matrices": ends.matrices, "end_inputs": ends.inputs, "blocks": blocks}
        arguments = DeltaArguments(
            projected=projected,
            out=y,
            conv=w.conv,
            decay=w.decay,
            dt_bias=w.dt_bias,
            norm=w.norm,
            **slots._asdict(),
            spans=spans,
            **kept,
            eps=w.eps,
        )
        self._launch(gated_delta(spec), len(spans) * spec.key_heads, arguments, grain=1)
        return y

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        spec = _spec(layers[0], tiled=tiled, is_prompt=True)
        if not supports(spec):
            plain.advance_delta(layers, slots, tiled=tiled)
            return
        spans = np.array([DeltaSpan(slot, 0, 0, spec.block) for slot in slots], np.int32)
        weights = dict.fromkeys(("projected", "out", "conv", "decay", "dt_bias", "norm"))
        kept = dict.fromkeys(("kept", "end_matrices", "end_inputs"))
        for layer in layers:
            arguments = DeltaArguments(**weights, **layer._asdict(), spans=spans, **kept, eps=0.0, blocks=0)
            self._launch(gated_delta(spec), len(spans) * spec.key_heads, arguments, grain=1)


def _spec(slots: DeltaSlots, *, tiled: bool, is_prompt: bool) -> Delta:
    _, key_heads, key_dim, block = slots.keys.shape
    _, heads, _, value_dim = slots.updates.shape
    width = slots.inputs.shape[1] - block + 1
    return Delta(key_heads, heads // key_heads, key_dim, value_dim, block, width, tiled, is_prompt)
