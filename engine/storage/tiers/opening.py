"""Opens the tiers that an engine's settings name."""

from __future__ import annotations

import re
from pathlib import Path

from polarlm.engine.config import EngineConfig, format_bytes, parse_size
from polarlm.engine.errors import EngineError
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.storage.tiers.object_store import SCHEMES, ObjectStoreTier, without_secrets
from polarlm.engine.storage.tiers.tier_store import FolderTier, MemoryTier, TierStore
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.user_dirs import cache_folder

_TIERS = "cache_ram", "cache_disk", "kv_store"
_BLOCKS = "blocks"  # the folder in the user's cache folder


def check_settings(config: EngineConfig) -> None:
    """Check everything that needs neither model nor disk. Raises EngineError."""
    if config.cache_disk_folder is not None and config.cache_disk is None:
        raise EngineError(
            f"cache_disk_folder={config.cache_disk_folder}: say how large it may get with cache_disk, as in 20G",
            settings=("cache_disk_folder", "cache_disk"),
        )
    tiers = [name for name in _TIERS if getattr(config, name) is not None]
    if tiers and config.kept_sequences == 0:
        raise EngineError(
            f"{tiers[0]} keeps what the prefix cache finds, and kept_sequences=0 turns that off: leave one of them out",
            settings=(tiers[0],),
        )


def open_tiers(config: EngineConfig, shape: CacheShape, device: str) -> list[TierStore]:
    """Open the tiers for blocks of this shape, the fastest first. Raises EngineError."""
    tiers: list[TierStore] = []
    if config.cache_ram is not None:
        if device == "cpu":
            raise EngineError(
                f"cache_ram={config.cache_ram}: the model runs on the CPU, so the KV store is in this memory already; "
                "give it more with kv_memory, or keep conversations on the disk with cache_disk",
                settings=("cache_ram", "kv_memory", "cache_disk"),
            )
        tiers.append(MemoryTier(parse_size(config.cache_ram, "cache_ram")))
    if config.cache_disk is not None:
        size = parse_size(config.cache_disk, "cache_disk")
        least = shape.bytes_per_token * shape.block_size
        if size < least:
            raise EngineError(
                f"cache_disk={config.cache_disk}: a block of this model takes {format_bytes(least)}; give "
                "room for many, such as 20G",
                settings=("cache_disk",),
            )
        tiers.append(_folder(config, size))
    if config.kv_store is not None:
        tiers.append(_shared(config.kv_store))
    return tiers


def _shared(where: str) -> TierStore:
    """Return the tier in an object store, or in a folder that processes share. Raises EngineError."""
    scheme = re.match(r"(\w[\w+.-]+)://", where)  # at least two letters: one is a drive of Windows
    reason, advice = "", "give a folder, or a URL such as s3://bucket/prefix, webdav://host/folder or redis://host:6379"
    try:
        if scheme is None or scheme[1] == "file":
            return FolderTier(Path(where.removeprefix("file://")).expanduser(), None, "remote")
        if scheme[1] in SCHEMES:
            advice = "look at its address, options and credentials, or leave kv_store out"
            return ObjectStoreTier(where)
        reason = f"{scheme[1]}:// is not one of {', '.join(SCHEMES)}"
        if scheme[1] in ("http", "https"):
            advice = f"a server of WebDAV is webdav{scheme[1][4:]}://"
    except ImportError:
        reason, advice = "the library opendal is not here", "pip install 'polarlm[store]' installs it"
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    shown = where if scheme is None else without_secrets(where)
    raise EngineError(f"kv_store={shown}: {reason.rstrip('.')}; {advice}", "storage", ("kv_store",))


def digest_folder() -> Path | None:
    """Return the folder that keeps digests of weights; None if there is none."""
    try:
        return cache_folder()
    except LoadError:
        return None


def disk_folder(config: EngineConfig) -> Path:
    """Return the folder of cache_disk. Raises EngineError."""
    try:
        folder = config.cache_disk_folder
        return cache_folder() / _BLOCKS if folder is None else Path(folder).expanduser()
    except (LoadError, RuntimeError) as error:
        raise EngineError(f"{error} Or give cache_disk_folder.", "storage", ("cache_disk_folder",)) from None


def _folder(config: EngineConfig, size: int) -> FolderTier:
    path = disk_folder(config)
    try:
        return FolderTier(path, size)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise EngineError(
            f"Blocks cannot be kept in {path}: {reason}; choose another folder with cache_disk_folder, or leave "
            "cache_disk out",
            "storage",
            ("cache_disk_folder", "cache_disk"),
        ) from None
