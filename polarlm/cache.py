"""`polarlm cache`: what lies in this program's cache folder, and `--prune`, which removes kinds of it by name."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polarlm.engine.cli.commands import columns, note, with_flags
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import format_bytes, setting
from polarlm.model_loaders.user_dirs import cache_folder

_KINDS: Mapping[str, tuple[str, str]] = {
    "kernels": ("kernels", "compiled kernels; compiled again when they are needed"),
    "fits": ("[ce]*-" + "[0-9a-f]" * 32, "how KV caches are fitted to models; fitted again at the next start"),
    "digests": ("weights-*.json", "digests of weights; computed again at the next start"),
    "blocks": ("blocks", "KV blocks of --cache-disk; prompts that they hold are read again"),
}
"""Name → what of the cache folder it is, and what it is for."""


@dataclass(frozen=True)
class CacheConfig:
    prune: str | None = setting(
        None, "--prune", metavar="KIND[,KIND]", help=f"remove everything of these kinds: {', '.join(_KINDS)}"
    )


GROUPS: Mapping[str, type] = {"Cache": CacheConfig}


@with_flags(
    GROUPS, "polarlm cache", "Show what this program keeps in its cache folder. Models are shown by polarlm list."
)
def main(options: CacheConfig) -> None:
    folder = cache_folder()
    kinds = [] if options.prune is None else [kind.strip() for kind in options.prune.split(",")]
    for kind in kinds:
        if kind not in _KINDS:
            raise FlagError(f"--prune: there is no kind {kind!r}; there are {', '.join(_KINDS)}")
    for kind in kinds:
        note(f"{kind}: {format_bytes(_remove(folder, kind))} removed.")
    rows = []
    for kind, (_, meaning) in _KINDS.items():
        files = _files(folder, kind)
        rows.append([f"{kind}: {meaning}", f"{len(files):,}", format_bytes(sum(map(_size, files)))])
    print("\n".join([str(folder), *columns([["what", "files", "size"], *rows])]))


def _files(folder: Path, kind: str) -> list[Path]:
    tops = sorted(folder.glob(_KINDS[kind][0]))
    return [file for top in tops for file in ([top] if top.is_file() else top.rglob("*")) if file.is_file()]


def _size(file: Path) -> int:
    with suppress(OSError):  # another process has removed it
        return file.stat().st_size
    return 0


def _remove(folder: Path, kind: str) -> int:
    """Removes all of a kind, and returns its bytes. A process that uses a file keeps its content."""
    size = sum(map(_size, _files(folder, kind)))
    for top in folder.glob(_KINDS[kind][0]):
        if top.is_dir() and not top.is_symlink():
            shutil.rmtree(top, ignore_errors=True)
        else:
            with suppress(OSError):
                top.unlink()
    return size
