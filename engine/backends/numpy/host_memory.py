"""The memory that this process can still allocate: the machine's available memory, within the limits of cgroups."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from polarlm.engine.backends.numpy.cgroups import groups, read_number
from polarlm.engine.errors import EngineError

_GIB = 1 << 30


def available() -> int:
    """Bytes that can be allocated without swapping; file caches count as free."""
    import psutil

    limit = cgroup_room()
    free = int(psutil.virtual_memory().available)
    return free if limit is None else min(free, limit)


def most() -> int:
    """The most bytes that can be allocated: on Linux `available` and free swap; other systems extend swap on demand."""
    import psutil

    if sys.platform != "linux":
        return max(available(), int(psutil.virtual_memory().total))
    with warnings.catch_warnings():  # psutil warns where a container hides swap statistics
        warnings.simplefilter("ignore")
        return available() + int(psutil.swap_memory().free)


def room_beside(weights: int, held_as: str = "") -> int:
    """Bytes for the KV store and activations once `weights` bytes are loaded: half of the remaining memory.

    held_as: for the message, the type of the weights in memory if it is not their file's. Raises EngineError if the
    weights alone do not fit.
    """
    if weights > (limit := most()):
        raise EngineError(
            f"The model's weights take {weights / _GIB:.1f} GiB{held_as}, and {limit / _GIB:.1f} GiB of memory can be "
            "had here: choose a smaller model, end other programs, or raise the limit of this container",
            "out_of_memory",
            lacking=weights - limit,
        )
    return max(0, available() - weights) // 2


def cgroup_room(root: Path = Path("/")) -> int | None:
    """Bytes up to the tightest memory limit of this process's cgroups; None without a limit.

    root: the folder with `proc` and `sys`.
    """
    rooms = [
        room
        for version, folder in groups(root, "memory")
        if (room := _room_v2(folder) if version == 2 else _room_v1(folder)) is not None
    ]
    return max(0, min(rooms)) if rooms else None


def _room_v2(folder: Path) -> int | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := read_number(folder / name)) is not None]
    used = read_number(folder / "memory.current")
    if not limits or used is None:
        return None
    return min(limits) - used + _statistic(folder, "inactive_file") + _statistic(folder, "active_file")


def _room_v1(folder: Path) -> int | None:
    limit, used = read_number(folder / "memory.limit_in_bytes"), read_number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _statistic(folder, "total_inactive_file") + _statistic(folder, "total_active_file")


def _statistic(folder: Path, name: str) -> int:
    """The value of a line of memory.stat; 0 if there is none."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0
