"""Packed weights in files of the user's cache folder (`tile_cache`), which are mapped into memory.

A file has a checked object, whose header lists the bytes of every matrix, then the tiles of all matrices in the order
of loading, each aligned to 64 bytes, and an object with a checksum of each megabyte of tiles. A start checks a few
megabytes, drawn by chance; all are checked once an output is not finite.

A file's name is a digest of what the tiles depend on: the weights' files, the type that they are converted to, and the
code that packs them; not the level of CPU features. Beyond the user's limit, the least recently used files are removed
that no process has mapped.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from polarlm.engine.backends.ops import KeptTiles, Ops
from polarlm.engine.config import EngineConfig, format_bytes, parse_size
from polarlm.engine.loading.kept_arrays import digest_key
from polarlm.engine.storage import files, objects
from polarlm.engine.storage.objects import DamagedObject, Object
from polarlm.engine.storage.tiers.names import digest
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.weights import WeightSource
from polarlm.model_loaders.user_dirs import cache_folder, source_digest

_NAME = re.compile("[0-9a-f]{32}")
_SUMS = b"polarlm tilesums"  # the name of the object at its end
_PIECE = 1 << 20  # bytes of tiles that have a checksum
_CHECKED_PIECES = 16  # pieces that are checked at each start
_ALIGNMENT = 64  # bytes
_PACKAGE = Path(__file__).resolve().parents[2]
# The code that decides what the tiles are, and in which order matrices are loaded.
_SOURCES = tuple(
    _PACKAGE / name for name in ("engine/backends/native", "engine/model", "engine/weight_formats", "model_loaders")
)

PackTiles = Callable[[], Iterator[np.ndarray]]  # as in `KeptTiles.take`


class _TileList:
    """The matrices that a model loads, in order; nothing is packed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # bytes of each
        self.packs: list[PackTiles] = []

    def take(self, nbytes: int, pack: PackTiles) -> np.ndarray:
        self.sizes.append(nbytes)
        self.packs.append(pack)
        return np.broadcast_to(np.uint8(0), nbytes)


@dataclass
class MappedTiles:
    """The tiles of a file, in the order of `sizes`. memory: all of them, uint8. sums: CRC-32 of each piece."""

    file: Path
    memory: np.ndarray
    sizes: list[int]
    sums: np.ndarray
    _is_damaged: bool | None = field(default=None, init=False)
    _next: int = field(default=0, init=False)
    _end: int = field(default=0, init=False)

    def take(self, nbytes: int, pack: PackTiles) -> np.ndarray | None:
        if self.sizes[self._next : self._next + 1] != [nbytes]:
            self._next = len(self.sizes)  # the rest would be in another order, too
            return None
        first = self._end
        self._next += 1
        self._end += _align(nbytes)
        return self.memory[first : first + nbytes]

    def is_right(self, pieces: Iterable[int]) -> bool:
        starts = (piece * _PIECE for piece in pieces)
        return all(
            zlib.crc32(self.memory[start : start + _PIECE].data) == self.sums[start // _PIECE] for start in starts
        )

    def remove_if_damaged(self) -> str | None:
        """Check all tiles, once. If they are damaged, remove the file and return a clause that says so."""
        if self._is_damaged is None:
            self._is_damaged = not self.is_right(range(len(self.sums)))
            if self._is_damaged:
                with suppress(OSError):
                    self.file.unlink()
        if not self._is_damaged:
            return None
        return f"The packed weights in the file {self.file.name} are damaged, and it is removed"  # clients read it


@dataclass(frozen=True)
class TileCache:
    """The file of one model. limit: bytes of all files together; say: called with sentences for the user."""

    file: Path
    limit: int
    say: Callable[[str], None]

    @property
    def _name(self) -> bytes:
        """The name of the object at the start of the file."""
        return bytes.fromhex(self.file.name)

    def tiles(self, load: Callable[[KeptTiles], object]) -> MappedTiles | None:
        """Return the mapped tiles of the matrices that `load` loads, which are packed and written first if need be;
        None if they cannot be written. Raises LoadError."""
        if (mapped := self._open()) is None:
            tiles = _TileList()
            load(tiles)
            if self._write(tiles):
                mapped = self._open()
        return mapped

    def _open(self) -> MappedTiles | None:
        """Map the file; None if there is none, or if it is damaged."""
        with suppress(OSError, DamagedObject, LookupError, TypeError), self.file.open("rb") as opened:
            files.lock(opened, is_shared=True, waits=False)
            head = objects.read(opened, self._name)
            sizes, first = head.header["sizes"], opened.tell()
            end = first + sum(map(_align, sizes))
            opened.seek(end)
            sums = objects.read(opened, _SUMS).payload.view("<u4")
            size = opened.tell()
            if os.fstat(opened.fileno()).st_size != size:
                return None
            memory = np.frombuffer(mmap.mmap(opened.fileno(), end, access=mmap.ACCESS_READ), np.uint8)[first:]
            mapped = MappedTiles(self.file, memory, sizes, sums)
            if not mapped.is_right(random.sample(range(len(sums)), min(len(sums), _CHECKED_PIECES))):
                self.say(f"{self.file} is damaged: weights are packed again.")
                return None
            os.utime(self.file)  # marks it as recently used
            self._make_room(size)
            return mapped
        return None

    def _write(self, tiles: _TileList) -> bool:
        header, _ = Object({"kind": "tiles", "sizes": tiles.sizes}).pack(self._name)
        sums = _Sums(sum(map(_align, tiles.sizes)))
        folder, needed = self.file.parent, len(header) + sums.tile_bytes + sum(map(len, sums.pack()))
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.remove_unfinished(folder)
            if needed > self.limit or self._make_room(needed) > self.limit - needed:
                return self._refuse(f"they take {format_bytes(needed)}, more than tile_cache allows")
            if (free := shutil.disk_usage(folder).free) < needed:
                return self._refuse(f"they take {format_bytes(needed)}, and {format_bytes(free)} of the disk are free")
            files.write(self.file, _parts(header, tiles, sums))
            self._make_room(needed)  # other processes may have written files meanwhile
        except OSError as error:
            return self._refuse(error.strerror or str(error))
        return True

    def _make_room(self, size: int) -> int:
        return files.remove_oldest(self.file.parent, _NAME, self.limit - size, self.file)

    def _refuse(self, reason: str) -> bool:
        self.say(f"Packed weights are not kept in {self.file.parent} ({reason}): they are packed again at each start.")
        return False


def open_tile_cache(
    config: EngineConfig, ops: Ops, source: WeightSource, say: Callable[[str], None]
) -> TileCache | None:
    """Return the tile cache of a model, if there is to be one; say why there is none."""
    if config.tile_cache is None:
        return None
    if not ops.keeps_tiles:
        say(f"tile_cache has no effect with {ops.backend}: it keeps the weights of compiled kernels on a CPU.")
        return None
    try:
        folder = cache_folder()
        weights = digest(sorted(source.files()), folder)
    except (LoadError, OSError) as error:
        say(f"Packed weights are not kept. {error}")
        return None
    key = digest_key(source_digest(_SOURCES), weights, config.weight_type)
    return TileCache(folder / "tiles" / key, parse_size(config.tile_cache, "tile_cache"), say)


class _Sums:
    """The CRC-32 of each piece of the tiles that are added."""

    def __init__(self, tile_bytes: int) -> None:
        self.tile_bytes = tile_bytes
        self._sums = np.zeros(-(-tile_bytes // _PIECE), "<u4")
        self._bytes_added = 0

    def add(self, part: bytes | memoryview) -> bytes | memoryview:
        rest = memoryview(part)
        while rest:
            piece, inside = divmod(self._bytes_added, _PIECE)
            head, rest = rest[: _PIECE - inside], rest[_PIECE - inside :]
            self._sums[piece] = zlib.crc32(head, int(self._sums[piece]))
            self._bytes_added += len(head)
        return part

    def pack(self) -> tuple[bytes, memoryview]:
        return Object({"kind": "sums"}, self._sums.view(np.uint8)).pack(_SUMS)


def _parts(header: bytes, tiles: _TileList, sums: _Sums) -> Iterator[bytes | memoryview]:
    yield header
    for nbytes, pack in zip(tiles.sizes, tiles.packs, strict=True):
        for part in pack():
            yield sums.add(part.data)
        yield sums.add(bytes(_align(nbytes) - nbytes))
    yield from sums.pack()


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
