"""Launches of kernels: run immediately, recorded into a command buffer, or noted by a warm-up, which compiles their
kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Result
from polarlm.engine.errors import KernelError
from polarlm.engine.jit.compile.library import library
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Kernel, Level
from polarlm.engine.jit.lang.records import Record
from polarlm.engine.jit.run.buffers import Arena, BufferPool, Lease, is_leased, unowned_view
from polarlm.engine.jit.run.workers import MOST_ENTRIES, CommandBuffer, Launch, workers

Units = int | Callable[[], int]
LaunchSpec = tuple[Kernel[Any], Units, Any, int]  # a kernel, its units, its arguments and the grain
_ENGINE = Path(__file__).resolve().parents[2]
# The folders whose code decides what these kernels do; their language, `jit/`, is always hashed.
_SOURCES = tuple(
    _ENGINE / name for name in ("backends", "codecs", "quantization", "records", "sampling", "weight_formats")
)
_MOST_REPEATABLE = 1024  # launches to repeat: of each matrix of a large model
_CHUNKS = 8  # chunks of a launch's units per thread: small enough that no thread waits long for another


class CannotRecord(Exception):
    """A step needs an op that is not a kernel, so it must run op by op."""


class PackedLaunch(NamedTuple):
    """A launch. arguments: as the kernel reads them, int64; their words are writable between runs. The rest is as in
    `Launcher.__call__`."""

    kernel: Kernel
    arguments: np.ndarray
    units: Units
    grain: int
    overlaps: bool


@dataclass
class PreparedLaunches:
    """Launches that can be run repeatedly with little Python in between.

    arrays: what the arguments point to, referenced here to keep it alive. Once they have run: commands, and of the
    launches whose number of units varies between runs the entries in it.
    """

    launches: list[PackedLaunch]
    arrays: list[np.ndarray]
    commands: CommandBuffer | None = None
    varying_units: Sequence[tuple[int, Callable[[], int]]] = ()


class HostCall(NamedTuple):
    """A recorded call of Python code, between launches. The memory of the arrays belongs to the recording."""

    function: Callable[..., None]
    arrays: tuple[np.ndarray, ...]


class Recording:
    """A step, which can be replayed. parts: its launches, and the calls between them. result: what the recorded
    function returned. wanted: kernels that were not compiled yet, in whose place it has others."""

    def __init__(self) -> None:
        self.wanted: list[Kernel] = []
        self.parts: list[PreparedLaunches | HostCall] = []
        self.buffers = BufferPool()
        self.result: Any = None

    def add(self, launch: PackedLaunch, arrays: Iterable[np.ndarray]) -> None:
        """Add a launch. arrays: those of its arguments whose memory the recording does not own."""
        if not self.parts or not isinstance(last := self.parts[-1], PreparedLaunches):
            self.parts.append(last := PreparedLaunches([], []))
        last.launches.append(launch)
        last.arrays += arrays


class Launcher:
    """Runs kernels on up to `threads` workers of this process."""

    computes = True  # whether kernels run, and weights are read

    def __init__(self, threads: int, level: Level | None = None) -> None:
        """level: what kernels are compiled for; None for the highest that this machine can run."""
        self.threads = threads
        self.input_bits = "16"  # of products with codes; see `kernels.linear.activations.inputs_for`
        self.level = level or best()
        self.library = library(self.level, _SOURCES)
        self.arena = Arena()  # memory of weights
        self._workers = workers()
        self.in_graph = False  # whether the work of `Ops.run_graph` is called, which is recorded if it can be
        self._recording: Recording | None = None
        self._buffers = BufferPool()
        self._repeatable: dict[Hashable, Any] = {}  # the latest ones last
        self._is_streaming, self._entries = False, 0  # entries: launches of the stream that may not be completed
        self._held: list[Any] = []  # what these read and write
        self._kept: list[tuple[Hashable, Any]] = []  # to be repeated once they are completed

    def take(self, key: Hashable) -> Any | None:
        """What `keep` has kept for a key, which nobody else takes meanwhile; None in a graph."""
        return self._repeatable.pop(key, None) if self.runs_directly else None

    def keep(self, key: Hashable, launches: Any) -> None:
        """Keep launches that can be repeated. key: all that they depend on, but for what is replaced in them."""
        if self._is_streaming:
            self._kept.append((key, launches))
        elif self.runs_directly:
            self._repeatable[key] = launches
            if len(self._repeatable) > _MOST_REPEATABLE:
                self._repeatable.pop(next(iter(self._repeatable)), None)

    @property
    def attends_in_bfloat(self) -> bool:
        """Whether prompts attend by matrices of bfloat16: where the level has any, unless inputs have 16 exact bits."""
        return self.input_bits != "16" and self.level.matrices is not None

    @property
    def runs_directly(self) -> bool:
        """Whether launches run, outside of graphs."""
        return self.computes and not self.in_graph

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """An uninitialized array for the result of an op.

        In a recording its memory belongs to the recording, and is reused by launches after its last use.
        """
        buffers = self._buffers if self._recording is None else self._recording.buffers
        return buffers.empty(shape, dtype)

    def __call__(self, kernel: Kernel[Record], units: Units, arguments: Record, grain: int = 0) -> None:
        """Run the kernel on its units, or record it.

        units: their number, or a function of it if it varies between replays. grain: units that a thread takes at a
        time; 0 cuts them into a few chunks for each thread.
        """
        launch = self._pack_launch(kernel, units, arguments, grain)
        if self._recording is None:
            self.run(PreparedLaunches([launch], []))
            self.hold(*arguments)
        else:
            self._recording.add(launch, (x for x in arguments if isinstance(x, np.ndarray) and not is_leased(x)))

    def launch_all(self, launches: Sequence[LaunchSpec]) -> PreparedLaunches | None:
        """As calls with each of the launches, which take less Python so; return them if they have run."""
        if self._recording is not None:
            for launch in launches:
                self(*launch)
            return None
        self.run(prepared := PreparedLaunches([self._pack_launch(*launch) for launch in launches], []))
        self.hold(*chain.from_iterable(arguments for _, _, arguments, *_ in launches))
        return prepared if self.runs_directly else None

    def _pack_launch(
        self, kernel: Kernel[Any], units: Units, arguments: Any, grain: int, overlaps: bool = False
    ) -> PackedLaunch:
        count = units if isinstance(units, int) else units()
        return PackedLaunch(kernel, kernel.pack(arguments), units, grain or self.grain(count), overlaps)

    def grain(self, units: int) -> int:
        """Units that a thread takes at a time, unless a launch says otherwise."""
        return max(1, units // (_CHUNKS * self.threads))

    def launch_together(self, launches: Sequence[tuple[Kernel[Any], int, tuple[Any, ...]]]) -> None:
        """Run launches at the same time: of each the kernel, its number of units, and its arguments. Waits for them."""
        grain = self.grain(sum(units for _, units, _ in launches))
        self.run(PreparedLaunches([self._pack_launch(*launch, grain, True) for launch in launches], []))
        self.finish()

    def run(self, prepared: PreparedLaunches) -> None:
        """Run the launches, at the same time or in order. In a stream they may be completed later."""
        if prepared.commands is None:
            if self._entries and not self.has_loaded([launch.kernel for launch in prepared.launches]):
                self.finish()  # threads would wait busily while kernels are compiled
            address = self.library.address
            calls: list[Launch] = []
            varying_units: list[tuple[int, Callable[[], int]]] = []
            for kernel, arguments, units, grain, overlaps in prepared.launches:
                if not isinstance(units, int):
                    varying_units.append((len(calls), units))
                    units = 0
                elif not units:
                    continue
                calls.append(Launch(address(kernel), arguments, units, grain, int(overlaps)))
            prepared.varying_units, prepared.commands = varying_units, CommandBuffer(calls)
        commands = prepared.commands
        for entry, units in prepared.varying_units:
            commands.units[entry] = units()
        if self._is_streaming:
            self._add_to_stream(prepared, commands)
        elif len(commands.units):
            self._workers.run(commands, self.threads)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A context in which launches are not waited for: other threads run them while Python prepares the next ones.
        What reads or writes their memory without a kernel calls `finish` before."""
        if self._is_streaming:
            yield
            return
        self._is_streaming = self.threads > 1 and self._recording is None and self.runs_directly
        try:
            yield
        finally:
            self.finish()
            self._is_streaming = False
            kept, self._kept = self._kept, []
            for key, launches in kept:
                self.keep(key, launches)

    def hold(self, *arguments: Any) -> None:
        """Keep arrays that launches of the stream use until they are completed. Memory of the pool needs no keeping:
        only later launches use it again."""
        if self._is_streaming:
            self._held += [x for x in arguments if type(x) is np.ndarray and type(x.base) is not Lease]

    def _add_to_stream(self, prepared: PreparedLaunches, commands: CommandBuffer) -> None:
        count = len(commands.units)
        if self._entries + count > MOST_ENTRIES:
            self.finish()
        is_first, self._entries = not self._entries, self._entries + count
        self._held.append(prepared)
        if is_first and count:
            self._workers.begin(commands, self.threads, id(self))
        elif count:
            self._workers.add(commands, id(self))

    def finish(self) -> None:
        """Take part in what is left of the stream, until all of it is completed."""
        if self._entries:
            self._workers.finish(id(self))
            self._entries = 0
        self._held.clear()

    def call(self, function: Callable[..., None], *arrays: np.ndarray) -> None:
        """Call function(*arrays), which may launch kernels itself, or record the call.

        It reads what the launches before it wrote. arrays: its arguments that come from `empty`.
        """
        if self._recording is None:
            self._interrupt(function, *arrays)
        else:
            self._recording.parts.append(HostCall(function, tuple(map(unowned_view, arrays))))

    def can_run(self, kernels: Sequence[Kernel]) -> bool:
        """Whether all kernels compile. Waits until they have, or until one fails."""
        if self.has_loaded(kernels):
            return True
        try:
            self.library.wait(kernels)
        except KernelError:
            return False
        return True

    def has_loaded(self, kernels: Sequence[Kernel]) -> bool:
        return all(map(self.library.has, kernels))

    def expect(self, kernels: Sequence[Kernel]) -> None:
        """Let these kernels be compiled before others, while others compute in their place."""
        self.library.expect(kernels, first=True)
        if self._recording is not None:
            self._recording.wanted += kernels

    def run_numpy(self, op: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """op(*args, **kwargs). Raises CannotRecord inside a recording, since it is not a kernel."""
        if self._recording is not None:
            raise CannotRecord
        return self._interrupt(op, *args, **kwargs)

    def _interrupt(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """function(*args, **kwargs), between the launches of a stream: those of its own are waited for, since it may
        write what they use."""
        self.finish()
        is_streaming, self._is_streaming = self._is_streaming, False
        try:
            return function(*args, **kwargs)
        finally:
            self._is_streaming = is_streaming

    @contextmanager
    def graph(self) -> Iterator[None]:
        """A context for the work of `Ops.run_graph`, and of `Ops.as_step`."""
        self.in_graph = True
        try:
            yield
        finally:
            self.in_graph = False

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """A context in which launches are recorded instead of run."""
        self._recording = recording = Recording()
        try:
            yield recording
        finally:
            self._recording = None

    def replay(self, recording: Recording) -> None:
        """Run the recorded launches. The pool's memory is given back first, if no prompt uses any of it."""
        self._buffers.give_back()
        for part in recording.parts:
            if isinstance(part, PreparedLaunches):
                self.run(part)
            else:
                part.function(*part.arrays)


class KernelOps(NumpyOps):
    """Ops with compiled kernels. What a subclass does not override, NumPy computes."""

    def __init__(self, launch: Launcher) -> None:
        super().__init__()
        self._launch = launch


class WarmUpLauncher(Launcher):
    """Asks the library for kernels in the order of their launches instead of running them. Results are zeros.

    Ops without kernels do not run either, and no weights are read.
    """

    computes = False

    def __init__(self, launch: Launcher) -> None:
        super().__init__(launch.threads, launch.level)
        self.library, self.input_bits = launch.library, launch.input_bits
        self._kernels: dict[Kernel, None] = {}

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return np.zeros(shape, dtype)

    def run(self, prepared: PreparedLaunches) -> None:
        for kernel, *_ in prepared.launches:
            self._kernels[kernel] = None
            self.library.expect([kernel])

    def has_loaded(self, kernels: Sequence[Kernel]) -> bool:
        """True: loading waits for these kernels, even where an op could do without them."""
        return True

    def run_numpy(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Zeros like the first argument if that is an array, else None; `op` is not called."""
        return super().run_numpy(lambda: np.zeros_like(args[0]) if isinstance(args[0], np.ndarray) else None)

    def replay(self, recording: Recording) -> None:
        for part in recording.parts:
            if isinstance(part, PreparedLaunches):  # experts that are read when they are chosen are none of a warm-up's
                self.run(part)

    def wait(self, progress: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Wait until all noted kernels are compiled; see `Library.wait`."""
        self.library.wait(self._kernels, progress)
