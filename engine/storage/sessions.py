"""Sessions: files with the token ids of a sequence and its K/V.

A file is a list of objects: the first one, "session", has the ids, what determines the codes, the divisors of keys and
values, and the number of the first block; the blocks follow, as in `engine.storage.payloads`. A block's name is derived
from the file and the block's position, so that no block is taken for another.

A session can be loaded by any engine with the same model and the same cache types, on any backend. Errors are
EngineErrors with a sentence for the user and the code "session" (the file is wrong), "storage" (it cannot be read or
written) or "out_of_memory".
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from polarlm.engine.errors import EngineError, counted
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.image_positions import IMAGE_IDS
from polarlm.engine.state.prefix import PrefixCache, join_salt, salt_adapter
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore, SequenceKV
from polarlm.engine.storage import files, identity, objects
from polarlm.engine.storage.copies import Snapshot, export, restore
from polarlm.engine.storage.objects import DamagedObject, Object
from polarlm.engine.storage.payloads import Payloads
from polarlm.model_loaders.fields import Fields

_LOG = logging.getLogger(__name__)
NAME = b"polarlm session\0"  # the name of the first object
_SETTINGS = ("ctx_size", "kv_memory", "cache_type_k", "cache_type_v", "key_conditioning", "calibration")
_KEYS = "kind", "version", "salt", "adapter", "ids", "first", "note", "answers", "arrays"  # of headers, beside settings
_VERSION = "3"  # the version of the file and of the meaning of all codes

KEY_BYTES = 32  # size of the digest of a conversation

SessionPath = str | PathLike[str]
KnownAnswers = Sequence[
    tuple[str, Sequence[int]]
]  # (hex digest of a conversation that ends with an answer, the answer's ids)
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Session:
    """A session without its K/V: the token ids, and a note of the caller."""

    token_ids: tuple[int, ...]
    note: Any = None  # any JSON value
    answers: KnownAnswers = ()  # the known answers of its conversation
    salt: str = ""  # of the K/V; see `engine.state.prefix`


def write(
    path: SessionPath,
    settings: Mapping[str, str],
    session: Session,
    snapshot: Snapshot,
    scales: Mapping[str, np.ndarray],
    progress: Progress | None,
) -> None:
    """Write a session to `path`. It replaces an earlier session or an empty file there, but no other file; after an
    EngineError the earlier file is unchanged. settings: this engine's `identity.settings`. session: for
    `snapshot`. scales: this engine's `identity.scale_arrays`, with which others can read the file."""
    if snapshot.length == 0:
        raise _error("There is nothing to save: the KV store does not hold this sequence")
    header = {
        "kind": "session",
        "version": _VERSION,
        **settings,
        **({"salt": _salt_hash(session.salt, session.token_ids)} if session.salt else {}),
        **({"adapter": adapter} if (adapter := salt_adapter(session.salt)) else {}),
        "ids": session.token_ids,
        "first": min(snapshot.blocks, default=snapshot.length),
        "note": session.note,
        "answers": session.answers,
    }
    try:
        head = b"".join(objects.join_arrays(header, scales).pack(NAME))
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"The note of a session must be a JSON value: {error}") from None
    with _errors_as_sentences(
        f"The session cannot be saved as {path}",
        "choose another place, or make room; a file that was there before is unchanged",
    ):
        file = Path(os.path.realpath(path))  # replace the target of a link, not the link
        with suppress(FileNotFoundError):
            _check_file(file, path)
            if file.stat().st_size and not is_session(file):
                raise EngineError(
                    f"{path} exists and is not a session, so it is not replaced: choose another name", "storage"
                )
        name = _names(header)
        blocks = ((name(number), block) for number, each in sorted(snapshot.blocks.items()) for block in each)
        parts = (part for block_name, block in blocks for part in block.pack(block_name))
        total = len(head) + snapshot.bytes
        files.write(file, chain([head], parts), _count_progress(progress, total))


def is_session(path: SessionPath) -> bool:
    """Whether `path` is a file that begins as a session does. False for some damaged sessions."""
    with suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return objects.read_name(file.read(objects.NAME_END)) == NAME
    return False


def read_header(path: SessionPath, settings: Mapping[str, str], vocabulary: range) -> Session:
    """Return the session at `path` as its header says, after checking that it fits this engine. Raises EngineError."""
    with _errors_as_sentences(f"The session {path} cannot be read", "give a file that was saved as one"):
        _check_file(Path(path), path)
        with open(path, "rb") as file:
            return _parse(path, objects.read(file, NAME).header, settings, vocabulary)


def read(
    path: SessionPath,
    settings: Mapping[str, str],
    shape: CacheShape,
    vocabulary: range,
    context: int,
    cache_salt: str,
    knows: Callable[[str], bool],
    progress: Progress | None,
) -> tuple[Session, Snapshot]:
    """Read the session at `path`, and check that it is undamaged, fits this engine and its context, and has this salt.
    knows: whether the engine has the adapter in a salt. Reads no state of the engine, so its lock need not be held.
    Raises EngineError."""
    with _errors_as_sentences(f"The session {path} cannot be read", "give a file that was saved as one"):
        _check_file(Path(path), path)
        count = _count_progress(progress, os.path.getsize(path))
        with open(path, "rb") as file:
            header = objects.read(file, NAME, count).header
            session = _parse(path, header, settings, vocabulary)
            if (adapter := str(header.get("adapter", ""))) and not knows(adapter):
                raise _error(f"The session {path} was saved with an adapter that this engine lacks: load it with lora")
            session = replace(session, salt=join_salt(cache_salt, adapter))
            _check_salt(path, str(header.get("salt", "")), session.salt, session)
            if (length := len(session.token_ids)) > context:
                raise _error(
                    f"The session {path} has {counted(length, 'token')}, but this engine's context has {context}: "
                    "raise ctx_size or kv_memory"
                )
            blocks = dict(_blocks(path, file, header, Payloads(shape), count))
    return session, Snapshot(length, blocks)


def _blocks(
    path: SessionPath, file: BinaryIO, header: Mapping[str, Any], payloads: Payloads, progress: Callable[[int], None]
) -> Iterator[tuple[int, list[Object]]]:
    """Yield (number, its objects) for the rest of a file. Raises EngineError if a block is damaged or missing."""
    ids, n, name, number = header["ids"], payloads.shape.block_size, _names(header), header["first"]
    complete, is_old = len(ids) // n, False
    try:
        while number * n < len(ids):
            blocks, tokens = list[Object](), ids[number * n : (number + 1) * n]
            while not blocks or (len(blocks) == 1 and _is_next(file, name(number))):
                block = objects.read(file, name(number), progress)
                is_old |= block.is_finer
                blocks += payloads.widen(block, tokens) if block.is_finer else [block]
            for block in blocks:
                if not block.is_full and 0 < number < complete:
                    payloads.check_block(block)
                elif [*payloads.check_full(block)] != tokens:
                    raise DamagedObject("it has other tokens")
            yield number, blocks
            number += 1
        if file.read(1):
            raise DamagedObject("more follows than was saved")
    except DamagedObject as error:
        raise _error(
            f"The session {path} is damaged, or cannot be read by this installation: block {number}: {error}; load "
            "another copy of it"
        ) from None
    if is_old:
        _LOG.warning("%s is of an earlier version: its newest blocks, of 8 bits, are kept in full precision", path)


def _is_next(file: BinaryIO, name: bytes) -> bool:
    """Return whether the next object of a file has this name."""
    start = file.read(objects.NAME_END)
    file.seek(-len(start), os.SEEK_CUR)
    return len(start) == objects.NAME_END and objects.read_name(start) == name


def take_snapshot(store: KVStore, prefixes: PrefixCache, ids: Sequence[int], salt: str) -> Snapshot:
    """Return a snapshot of the longest stored prefix of `ids`. Raises EngineError if memory runs out."""
    kv = prefixes.match_prefix(ids, salt)
    try:
        return export(store, kv, ids)
    except MemoryError:
        raise _no_memory(f"There is not enough memory to save {counted(kv.length, 'token')}: free some") from None
    finally:
        prefixes.release(kv, ids)


def restore_snapshot(store: KVStore, snapshot: Snapshot, path: SessionPath) -> SequenceKV:
    """Restore a snapshot in the store and return the sequence. path: the one that errors name."""
    try:
        return restore(store, snapshot)
    except OutOfBlocks:
        raise _no_memory(
            f"There is no room for the K/V of {path}: other requests hold the blocks; load it later"
        ) from None
    except MemoryError:
        raise _no_memory(f"There is not enough memory to load {path}: free some") from None
    except ValueError:
        raise _error(_damaged_sentence(path)) from None


def _parse(path: SessionPath, header: Mapping[str, Any], settings: Mapping[str, str], vocabulary: range) -> Session:
    """Return the session that a header describes. Raises EngineError for one of another version or of an engine with
    other settings, and for a header that `write` has not written."""
    try:
        if header["version"] != _VERSION:
            raise _error(
                f"The session {path} is from another version of this program (format {header['version']}): load it "
                "with that one"
            )
        if (differs := identity.difference(header, settings)) is not None:
            raise _error(f"The session {path} {differs}")
        Fields(header, os.fspath(path)).warn_of_unread((*settings, *_KEYS))
        ids = tuple(header["ids"])
        if not all(type(i) is int and (i in vocabulary or IMAGE_IDS <= i < 2 * IMAGE_IDS) for i in ids):
            raise ValueError("unknown token ids")
        if type(header["first"]) is not int or header["first"] < 0:
            raise ValueError("no first block")
        return Session(ids, header["note"], tuple(map(_answer, header["answers"])))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _error(_damaged_sentence(path)) from None


def _names(header: Mapping[str, Any]) -> Callable[[int], bytes]:
    """Return a function from the number of a session's block to its name."""
    content = json.dumps([header["ids"], *(header[key] for key in identity.DETERMINE)]).encode()
    key = hashlib.sha256(content).digest()
    return lambda number: hashlib.blake2b(b"%d" % number, key=key, digest_size=objects.NAME_BYTES).digest()


def _answer(value: Any) -> tuple[str, tuple[int, ...]]:
    """Return an element of `KnownAnswers`. Raises TypeError or ValueError for anything else."""
    key, ids = value
    if not isinstance(key, str) or len(bytes.fromhex(key)) != KEY_BYTES or not isinstance(ids, list):
        raise ValueError("not an answer")
    if not all(type(i) is int for i in ids):
        raise ValueError("no token ids")
    return key, tuple(ids)


def _salt_hash(salt: str, ids: Sequence[int]) -> str:
    """Return the hash of a salt that a session contains, keyed with the token ids, so that sessions with the same salt
    cannot be recognized as such."""
    key = hashlib.sha256(np.asarray(ids, np.int64).astype(np.int32).tobytes()).digest()
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=key, person=b"polarlm session").hexdigest()


def _check_salt(path: SessionPath, there: str, salt: str, session: Session) -> None:
    """Raises EngineError unless a session was saved with this salt. there: the hash in its header; "" for no salt."""
    if not there and salt:
        raise _error(f"The session {path} was saved without a cache_salt: load it without one")
    if there and not (salt and hmac.compare_digest(there.encode(), _salt_hash(salt, session.token_ids).encode())):
        raise _error(f"The session {path} was saved with a cache_salt other than this one: load it with that one")


def _check_file(file: Path, path: SessionPath) -> None:
    """Raises OSError if there is no file, EngineError for a folder, a pipe or a device."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise EngineError(f"{path} is a folder, or not a regular file: give the name of a file", "storage")


def _count_progress(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that is called with a number of bytes done, and calls `progress` with the sum so far."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total)

    return count


@contextmanager
def _errors_as_sentences(what: str, advice: str) -> Iterator[None]:
    """Turn errors of reading and writing files into EngineErrors that say `what` failed, why, and `advice`."""
    try:
        yield
    except DamagedObject:
        raise _error(f"{what}: it is damaged, or not a session; {advice}") from None
    except MemoryError:
        raise _no_memory(f"{what}: there is not enough memory; free some") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise EngineError(f"{what}: {reason}; {advice}", "storage") from None


def _damaged_sentence(path: SessionPath) -> str:
    return f"The session {path} is damaged: load another copy of it"


def _error(sentence: str) -> EngineError:
    return EngineError(sentence, "session", _SETTINGS)


def _no_memory(sentence: str) -> EngineError:
    return EngineError(sentence, "out_of_memory")
