"""Opens the tiers that an engine's settings name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from polarlm.engine.config import EngineConfig, format_bytes, parse_size
from polarlm.engine.errors import EngineError
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.storage.payloads import Payloads
from polarlm.engine.storage.tiers.patience import Patience
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess
from polarlm.engine.storage.tiers.tier_store import FolderTier, MemoryTier, TierStore
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.user_dirs import cache_folder

if TYPE_CHECKING:
    from polarlm.engine.storage.tiers.remote_prefill import RemotePrefill

KEY_VARIABLE = "POLARLM_CACHE_KEY"
_TIERS = "cache_ram", "cache_disk", "cache_remote"
_BLOCKS = "blocks"  # the folder in the user's cache folder


def check_settings(config: EngineConfig) -> None:
    """Check everything that needs neither model nor disk. Raises EngineError."""
    if config.cache_disk_folder is not None and config.cache_disk is None:
        raise EngineError(
            f"cache_disk_folder={config.cache_disk_folder}: say how large it may get with cache_disk, as in 20G",
            settings=("cache_disk_folder", "cache_disk"),
        )
    tiers = [name for name in (*_TIERS, "prefill_at") if getattr(config, name) is not None]
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
    if config.cache_remote is not None:
        tiers.append(_remote(config.cache_remote, Payloads(shape).most_object_bytes))
    return tiers


def _remote(where: str, limit: int) -> TierStore:
    """Return the tier at a URL, or in a folder that machines share. limit: bytes of the largest object."""
    scheme = re.match(r"(\w[\w+.-]+)://", where)  # at least two letters: one is a drive of Windows
    reason = ""
    if scheme is not None and scheme[1] not in ("http", "https", "file"):
        reason = f"{scheme[1]}:// is not supported"
    elif re.match("https?:", where):
        try:
            from polarlm.engine.storage.tiers.remote import RemoteTier  # http.client takes time to import

            return RemoteTier(where, limit, os.environ.get(KEY_VARIABLE) or None)
        except ValueError as error:
            reason = str(error)
    else:
        try:
            return FolderTier(Path(where.removeprefix("file://")).expanduser(), None, "remote")
        except (OSError, RuntimeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    raise EngineError(
        f"cache_remote={where}: {reason}; give http://HOST:PORT of a server with --share-blocks, or a folder",
        "storage",
        ("cache_remote",),
    )


def open_remote_prefill(
    config: EngineConfig, access: StoreAccess, settings: Mapping[str, str], patience: Patience
) -> RemotePrefill | None:
    """Return the server that computes prompts; None if there is none. Raises EngineError."""
    if config.prefill_at is None:
        return None
    try:
        from polarlm.engine.storage.tiers.remote_prefill import RemotePrefill  # http.client takes time to import

        return RemotePrefill(config.prefill_at, access, settings, patience, os.environ.get(KEY_VARIABLE) or None)
    except ValueError as error:
        raise EngineError(
            f"prefill_at={config.prefill_at}: {error}; give http://HOST:PORT of a server with this model",
            settings=("prefill_at",),
        ) from None


def digest_folder() -> Path | None:
    """Return the folder that keeps digests of weights; None if there is none."""
    try:
        return cache_folder()
    except LoadError:
        return None


def _folder(config: EngineConfig, size: int) -> FolderTier:
    try:
        folder = config.cache_disk_folder
        path = cache_folder() / _BLOCKS if folder is None else Path(folder).expanduser()
    except (LoadError, RuntimeError) as error:
        raise EngineError(f"{error} Or give cache_disk_folder.", "storage", ("cache_disk_folder",)) from None
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
