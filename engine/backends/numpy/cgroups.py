"""The cgroups that limit this process, on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yields version and folder of each cgroup whose controller limits this process: its own and its ancestors.

    root: the folder with `proc` and `sys`. controller: "memory" or "cpu".

    In a container the path may be the host's, and only a part is mounted: folders may be missing, and callers skip
    these.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            version, tops = 2, [mounted, mounted / "unified"]
        elif controller in controllers.split(","):
            version, tops = 1, [mounted / controller, mounted / controllers]
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        for top in tops:
            for part in (below, *below.parents):
                yield version, top / part


def read_number(file: Path) -> int | None:
    """The number in a file; None if the file is missing or has no number, such as "max"."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
