"""How long work would take on more cores than there are.

Launches run in order, each on all cores, and Python adds them while others run. A simulation puts together the time of
each launch, and that of Python before it, measured while each runs alone and at once. It leaves out what cores share,
memory above all, so it says what Python costs, and not how fast a machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

CORES = 2, 16, 64
Work = Callable[[], object]


class Addition(NamedTuple):
    """Launches that Python adds. seconds: of Python before. launches: of each the units, and the seconds on one core.
    waits: until all have run."""

    seconds: float
    launches: Sequence[tuple[int, float]]
    waits: bool


def single_launches(commands: Any) -> Iterator[tuple[Any, Any]]:
    """Each launch of a command buffer, and a buffer that has it alone."""
    from polarlm.engine.jit.run.workers import CommandBuffer, Launch

    for launch in map(Launch._make, commands._table.reshape(-1, len(Launch._fields)).tolist()):
        yield launch, CommandBuffer([launch])


def additions_of(work: Work, threads: int) -> list[Addition]:
    """What `work` adds, on so many threads; the last one is what follows, and has no launches."""
    from polarlm.engine.jit.run.workers import workers  # needs llvmlite

    run = workers().run
    additions, last = list[Addition](), time.perf_counter()

    def add(commands: Any = None, *_: object, waits: bool = False) -> None:
        nonlocal last
        seconds, launches = time.perf_counter() - last, list[tuple[int, float]]()
        for launch, one in [] if commands is None else single_launches(commands):
            begin = time.perf_counter()
            run(one, threads)
            launches.append((launch.units, threads * (time.perf_counter() - begin)))
        additions.append(Addition(seconds, launches, waits))
        last = time.perf_counter()

    replacements = {"begin": add, "add": add, "run": partial(add, waits=True), "finish": lambda _: add(waits=True)}
    with ExitStack() as stack:
        for name, by in replacements.items():
            stack.enter_context(patch.object(workers(), name, by))
        work()
    add()
    return additions


def elapsed(additions: Iterable[Addition], cores: int) -> tuple[float, float]:
    """Return the seconds of all on so many cores, and those of them in which Python works and no launch runs.

    A launch takes as long as the core with the most units.
    """
    python = busy_until = alone = 0.0
    for addition in additions:
        python += addition.seconds
        for units, seconds in addition.launches:
            alone += max(0.0, python - busy_until)
            busy_until = max(python, busy_until) + seconds * -(-units // cores) / max(1, units)
        if addition.waits:
            python = max(python, busy_until)
    return max(python, busy_until), alone + max(0.0, python - busy_until)
