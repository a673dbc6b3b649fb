"""Memory that this process can still allocate: what the machine has available, within the limits of its cgroups."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available() -> int:
    """Bytes that can be allocated without swapping; file caches count as free."""
    import psutil

    limit = cgroup_room()
    free = int(psutil.virtual_memory().available)
    return free if limit is None else min(free, limit)


def most() -> int:
    """Bytes that can be allocated at all: on Linux `available` and free swap; other systems extend swap as needed."""
    import psutil

    if sys.platform != "linux":
        return max(available(), int(psutil.virtual_memory().total))
    with warnings.catch_warnings():  # psutil warns where a container hides swap statistics
        warnings.simplefilter("ignore")
        return available() + int(psutil.swap_memory().free)


def cgroup_room(root: Path = Path("/")) -> int | None:
    """Bytes until the tightest memory limit of this process's cgroups; None without a limit.

    root: where `proc` and `sys` are.
    """
    rooms = [
        room
        for version, folder in _groups(root)
        if (room := _room_v2(folder) if version == 2 else _room_v1(folder)) is not None
    ]
    return max(0, min(rooms)) if rooms else None


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of each cgroup that limits this process: its own and its ancestors.

    In a container the path may be the host's, of which only a part is mounted: folders may not exist, and callers skip
    these.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            version, tops = 2, [mounted, mounted / "unified"]
        elif "memory" in controllers.split(","):
            version, tops = 1, [mounted / "memory"]
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        for top in tops:
            for part in (below, *below.parents):
                yield version, top / part


def _room_v2(folder: Path) -> int | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None]
    used = _number(folder / "memory.current")
    if not limits or used is None:
        return None
    return min(limits) - used + _statistic(folder, "inactive_file") + _statistic(folder, "active_file")


def _room_v1(folder: Path) -> int | None:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _statistic(folder, "total_inactive_file") + _statistic(folder, "total_active_file")


def _number(file: Path) -> int | None:
    """The number in a file; None if the file does not exist or contains "max"."""
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
