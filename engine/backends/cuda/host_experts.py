"""Experts whose weights stay in the computer's memory: the kernels of its CPU multiply them."""

from __future__ import annotations

from typing import Any

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device
from polarlm.engine.backends.ops import Ops
from polarlm.engine.weight_formats import ExpertLinear


class HostExperts:
    """The op `experts` on rows that are copied to the host, and back."""

    def __init__(self, device: Device, host: Ops):
        self._device, self._host = device, host

    def experts(
        self,
        x: Array,
        routing: Any,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: str,
        norm: tuple[Array, float] | None,
        residual: Array | None,
    ) -> Array:
        """See `Ops.experts`. routing: ids and weights on the device."""
        y = self._device.empty((len(x), down.shape[0]), np.float32) if residual is None else residual
        copied = {"x": x, "ids": routing.ids, "weights": routing.weights}
        if norm is not None:
            copied["norm"] = norm[0]
        if residual is not None and residual is not x:
            copied["residual"] = residual
        names, adds, eps, kind = tuple(copied), residual is not None, norm and norm[1], type(routing)

        def compute(*arrays: np.ndarray) -> np.ndarray:
            given = dict(zip(names, arrays, strict=True))
            rows = given["x"]
            before = given.get("residual", rows)
            result = np.empty((len(rows), down.shape[0]), np.float32)
            own = None if eps is None else (given["norm"], eps)
            for first in range(0, len(rows), self._host.prefill_rows):
                part = slice(first, first + self._host.prefill_rows)
                chosen = kind(given["ids"][part], given["weights"][part])
                into = before[part].copy() if adds else None
                result[part] = self._host.experts(
                    rows[part], chosen, gate_up, down, activation, norm=own, residual=into
                )
            return result

        self._device.call_host(compute, y, list(copied.values()))
        return y
