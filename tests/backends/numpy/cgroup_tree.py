"""A root folder with the files of cgroups."""

from __future__ import annotations

from pathlib import Path


def tree(root: Path, groups: str, files: dict[str, object]) -> Path:
    """`root` with a /proc/self/cgroup, and files below /sys/fs/cgroup."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups, encoding="utf-8")
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n", encoding="utf-8")
    return root
