"""The memory that this process can still allocate: the machine's available memory, within the limits of cgroups."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from polarlm.engine.errors import EngineError

_GIB = 1 << 30
# Version of cgroups → the files with limits, the file with the bytes in use, and what memory.stat puts before names.
_FILES = {
    1: (["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"),
    2: (["memory.max", "memory.high"], "memory.current", ""),
}


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


def memory_left(weights: int, note: str = "") -> int:
    """Bytes for the KV store and activations once `weights` bytes are loaded: half of the remaining memory.

    note: for the message, the type of the weights in memory if it is not their file's. Raises EngineError if the
    weights alone do not fit.
    """
    if weights > (limit := most()):
        raise EngineError(
            f"The model's weights take {weights / _GIB:.1f} GiB{note}, and {limit / _GIB:.1f} GiB of memory can be "
            "had here: choose a smaller model, end other programs, or raise the limit of this container",
            "out_of_memory",
            lacking=weights - limit,
        )
    return max(0, available() - weights) // 2


def cgroup_room(root: Path = Path("/")) -> int | None:
    """Bytes up to the tightest memory limit of this process's cgroups; None without a limit.

    root: the folder with `proc` and `sys`.
    """
    rooms = []
    for version, folder in groups(root, "memory"):
        limit_names, used_name, prefix = _FILES[version]
        limits = [limit for name in limit_names if (limit := _number(folder / name)) is not None]
        used = _number(folder / used_name)
        if limits and used is not None:
            cached = sum(_statistic(folder, f"{prefix}{name}") for name in ("inactive_file", "active_file"))
            rooms.append(min(limits) - used + cached)
    return max(0, min(rooms)) if rooms else None


def groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yields version and folder of each cgroup whose controller limits this process, on Linux: its own and its
    ancestors.

    root: the folder with `proc` and `sys`. controller: "memory" or "cpu".

    In a container the path may be the host's, and only a part is mounted: folders may be missing, and callers skip
    these.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return
    cgroup_root = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            version, tops = 2, [cgroup_root, cgroup_root / "unified"]
        elif controller in controllers.split(","):
            version, tops = 1, [cgroup_root / controller, cgroup_root / controllers]
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        for top in tops:
            for part in (relative, *relative.parents):
                yield version, top / part


def _number(file: Path) -> int | None:
    """The number in a file; None if the file is missing or has no number, such as "max"."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistic(folder: Path, name: str) -> int:
    """The value of a line of memory.stat; 0 if there is none."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0
