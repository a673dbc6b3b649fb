"""Recorded steps: a step's kernels are recorded once and replayed with new inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.native.attention_ops.step_table import StepTable
from polarlm.engine.backends.native.launch import CannotRecord, Launcher, Recording
from polarlm.engine.backends.ops import Result

_MOST = 32  # recordings to keep; each owns the memory of a step
_MANY_ROWS = 64  # of which recordings would have much memory, if some sequences have several: few are run again


class Graphs:
    """The recorded steps of an engine: key, function and input shapes → recording; least recently used go first."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._recordings: OrderedDict[Hashable, tuple[list[Any], Recording] | None] = OrderedDict()

    def run(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[Any]) -> Result:
        """See `Ops.run_graph`."""
        if len(inputs[0]) > _MANY_ROWS and any(isinstance(x, StepTable) and x.most_rows > 1 for x in inputs):
            with self._launch.graph():
                return work(*inputs)
        whole = (key, work, *map(_shape, inputs))
        if whole not in self._recordings or self._is_outdated(self._recordings[whole]):
            self._recordings[whole] = self._record(work, inputs)
            if len(self._recordings) > _MOST:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(whole)
        recorded = self._recordings[whole]
        if recorded is None:
            with self._launch.graph():
                return work(*inputs)
        fixed, recording = recorded
        for fixed_input, new_input in zip(fixed, inputs, strict=True):
            if isinstance(fixed_input, StepTable):
                fixed_input.copy_from(new_input)
            elif isinstance(fixed_input, np.ndarray):
                fixed_input[...] = new_input
        self._launch.replay(recording)
        return recording.result

    def _is_outdated(self, recorded: tuple[list[Any], Recording] | None) -> bool:
        """Whether kernels are compiled now that were not when it was recorded."""
        return recorded is not None and bool(recorded[1].wanted) and self._launch.has_loaded(recorded[1].wanted)

    def forget(self) -> None:
        """See `Ops.forget`."""
        self._recordings.clear()

    def _record(self, work: Callable[..., Result], inputs: Sequence[Any]) -> tuple[list[Any], Recording] | None:
        """Copies of the inputs in fixed memory, and the launches of `work` on them; None if it cannot be recorded."""
        fixed = [x.copy() if isinstance(x, np.ndarray) else x for x in inputs]
        try:
            with self._launch.graph(), self._launch.record() as recording:
                recording.result = work(*fixed)
        except CannotRecord:
            return None
        return fixed, recording


def _shape(x: Any) -> Hashable:
    if isinstance(x, np.ndarray):
        return x.shape, x.dtype
    return x.key if isinstance(x, StepTable) else None
