"""Sessions on disk: a sequence's ids and all that the store holds of it, codes as they are, in one sealed file.

A session goes on in an engine with the same model and the same cache, wherever that runs. What can go wrong is an
EngineError with a sentence for the user. Its code is "session" for what is wrong with a file, "storage" for what is
wrong with the place for one, and "out_of_memory".
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from engine import checked_file
from engine.backends import transfer
from engine.checked_file import DamagedFile
from engine.errors import EngineError
from engine.kv.blocks import OutOfBlocks
from engine.kv.plan import CacheShape
from engine.kv.prefix import PrefixCache
from engine.kv.snapshot import Snapshot, export, restore
from engine.kv.store import KVStore, SequenceKV
from engine.model.forward import Transformer
from engine.model.weights import fingerprint
from engine.requests.answers import KEY_BYTES, Known

_FORMAT = "polarlm session"
_SETTINGS = ("ctx_size", "kv_memory", "cache_type_k", "cache_type_v", "key_conditioning", "calibration")
_VERSION = "1"  # of the file, and of what every codec's codes mean

# What a session and the engine have to agree about, in the order in which a difference is told, and what is said then.
_DIFFERENCES = {
    "model": "was saved with the model {there}, and this is {here}, or the same one with weights in another precision: "
    "load it where it was saved",
    "block_size": "was saved with blocks of {there} tokens, and this engine's have {here}: set block_size to {there}",
    "cache_types": "was saved with the cache types {there} (keys/values), and this engine has {here}: "
    "choose them with cache_type_k and cache_type_v",
    "conditioning": "has keys and values that were conditioned in another way: give key_conditioning=False and "
    "calibration=False as when it was saved; if they are, the model has been calibrated anew since, or another version "
    "of this program saved it",
}

Place = str | PathLike[str]
Progress = Callable[[int, int], None]  # bytes done, bytes there are


@dataclass(frozen=True)
class Session:
    """What a session's file says beside the K/V: the ids that these are of, and what was noted about them."""

    token_ids: tuple[int, ...]
    note: Any = None  # anything that JSON can say
    answers: Known = ()  # of its conversation


def settings(model: Transformer, name: str) -> dict[str, str]:
    """What decides which codes stand for given token ids, as texts, and the model's name.

    A session and the engine that goes on from it have to agree about all of it.
    """
    shape = model.store.shape
    means = {"mean_bits": " ".join(str(layer.mean_bits) for layer in shape.layers)}
    scales = [
        (f"{layer}.{side}", array)
        for layer, of in enumerate(model.store.conditioning)
        if of.scale is not None
        for side, array in zip(of.scale._fields, of.scale, strict=True)
    ]
    return {
        "name": name,
        "model": fingerprint(model.ops, model.config, model.weights),
        "block_size": str(shape.block_size),
        "cache_types": " ".join(f"{layer.codec_k.name}/{layer.codec_v.name}" for layer in shape.layers),
        "conditioning": checked_file.seal(means, scales),
    }


def check_types(shape: CacheShape) -> None:
    """Raises EngineError for a cache type whose codes mean nothing outside of this process."""
    for codec in (codec for layer in shape.layers for codec in (layer.codec_k, layer.codec_v)):
        if codec.per_layer:
            raise _error(
                f"Cache type {codec.name} learns anew in every process what its codes mean, so that no session can be "
                "saved or loaded with it: choose another cache type"
            )


def write(path: Place, own: Mapping[str, str], session: Session, saved: Snapshot, progress: Progress | None) -> None:
    """Write a session in place of what is at `path`; after an EngineError, that is unchanged.

    own: `settings`. session: about the tokens in `saved`.
    """
    if saved.length == 0:
        raise _error("There is nothing to save: the KV store holds no such sequence")
    header = {
        **own,
        "format": _FORMAT,
        "version": _VERSION,
        "stored_as": saved.stored_as,
        "dropped": " ".join(map(str, saved.dropped)),
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in saved.arrays.items()}
    arrays["token_ids"] = np.asarray(session.token_ids, np.int32)
    arrays["note"] = np.frombuffer(_as_json(session.note), np.uint8)
    arrays["answers"] = np.frombuffer(json.dumps(session.answers).encode(), np.uint8)
    with _sentences(
        f"The session cannot be saved as {path}",
        "choose another place, or make room; a file that was there before is unchanged",
    ):
        file = Path(os.path.realpath(path))  # of a link, what it leads to is replaced
        with suppress(FileNotFoundError):
            _must_be_file(file, path)
        total = sum(array.nbytes for array in arrays.values())
        checked_file.write(file, header, arrays, _counting(progress, total))


def read(
    path: Place,
    own: Mapping[str, str],
    shape: CacheShape,
    vocabulary: range,
    context: int,
    progress: Progress | None,
) -> tuple[Session, Snapshot]:
    """What `write` left at `path`, looked at from all sides: for this engine, and no longer than its `context`.

    Nothing of the engine's state is looked at, so others may have it meanwhile.
    """
    with _sentences(f"The session {path} cannot be read", "give a file that was saved as one"):
        _must_be_file(Path(path), path)
        if checked_file.read_header(Path(path)).get("format") != _FORMAT:
            raise _error(f"{path} is no session: give a file that was saved as one")
        size = os.path.getsize(path)
        count = _counting(progress, size)
        header, arrays = checked_file.read(Path(path), count)
        count(size)  # what stands before the arrays, too
    try:
        _must_fit(path, header, own)
        session, saved = _parsed(header, arrays, vocabulary)
        _must_be_finite(shape, saved)
    except MemoryError:
        raise _no_memory(f"There is not enough memory to load {path}: free some") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise _error(_damaged(path)) from None
    if saved.length > context:
        raise _error(
            f"The session {path} has {saved.length} tokens, and this engine's context {context}: "
            "raise ctx_size or kv_memory"
        )
    return session, saved


def take_out(store: KVStore, prefixes: PrefixCache, ids: Sequence[int], salt: str) -> Snapshot:
    """A copy of all that the store holds of the first of `ids`."""
    kv = prefixes.match_prefix(ids, salt)
    try:
        return export(store, kv)
    except MemoryError:
        raise _no_memory(f"There is not enough memory to save {kv.length} tokens: free some") from None
    finally:
        prefixes.release(kv, ids)


def put_back(store: KVStore, saved: Snapshot, path: Place) -> SequenceKV:
    """The sequence in the store."""
    try:
        return restore(store, saved)
    except OutOfBlocks:
        raise _no_memory(
            f"There is no room for the {saved.length} tokens of {path}: other requests hold it; load it later"
        ) from None
    except MemoryError:
        raise _no_memory(f"There is not enough memory to load {path}: free some") from None
    except ValueError:
        raise _error(_damaged(path)) from None


def _must_be_finite(shape: CacheShape, saved: Snapshot) -> None:
    """Raises ValueError for numbers that would spoil the answers of all who come to share them."""
    arrays = dict(saved.arrays)
    for layer in range(len(shape.layers)):
        keys, values = (f"{layer}.coded.{name}" for name in ("keys", "values"))
        if keys in arrays and values in arrays:  # records, whose numbers stand in between bytes
            records = {"keys": arrays.pop(keys), "values": arrays.pop(values)}
            fields = transfer.as_fields(shape.format(layer), len(records["keys"]), records)
            arrays |= {f"{layer}.coded.{name}": array for name, array in fields.items()}
    if not all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f"):
        raise ValueError("not all numbers are finite")


def _parsed(header: Mapping[str, str], arrays: dict[str, np.ndarray], vocabulary: range) -> tuple[Session, Snapshot]:
    """Raises KeyError, TypeError, ValueError or RecursionError for a file that `write` has not written."""
    ids, note, answers = (arrays.pop(name) for name in ("token_ids", "note", "answers"))
    if ids.ndim != 1 or ids.dtype != np.int32:
        raise ValueError("no token ids")
    if len(ids) and not (vocabulary.start <= ids.min() and ids.max() < vocabulary.stop):
        raise ValueError("ids that are no tokens")
    dropped = tuple(map(int, header["dropped"].split()))
    session = Session(
        tuple(ids.tolist()), json.loads(note.tobytes()), tuple(map(_answer, json.loads(answers.tobytes())))
    )
    return session, Snapshot(len(ids), dropped, header["stored_as"], arrays)


def _answer(value: Any) -> tuple[str, tuple[int, ...]]:
    """One of `Known`. Raises ValueError for what is none."""
    key, ids = value
    if not isinstance(key, str) or len(bytes.fromhex(key)) != KEY_BYTES or not isinstance(ids, list):
        raise ValueError("no answer")
    if not all(type(i) is int for i in ids):
        raise ValueError("no token ids")
    return key, tuple(ids)


def _must_fit(path: Place, header: Mapping[str, str], own: Mapping[str, str]) -> None:
    if (header["version"], header["stored_as"] in (transfer.FIELDS, transfer.RECORDS)) != (_VERSION, True):
        raise _error(
            f"The session {path} is of another version of this program (format {header['version']}, codes as "
            f"{header['stored_as']}): load it with that one"
        )
    for key, sentence in _DIFFERENCES.items():
        if header[key] != own[key]:
            told = "name" if key == "model" else key
            there, here = (", ".join(dict.fromkeys(of[told].split(" "))) for of in (header, own))
            raise _error(f"The session {path} {sentence.format(there=there, here=here)}")


def _must_be_file(file: Path, path: Place) -> None:
    """Raises OSError where there is nothing, EngineError for a folder, a pipe or a device."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise EngineError(f"{path} is a folder, or no plain file: give the name of a file", "storage")


def _as_json(note: Any) -> bytes:
    try:
        return json.dumps(note).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"The note of a session must be something that JSON can say: {error}") from None


def _counting(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(min(done, total), total)

    return count


@contextmanager
def _sentences(what: str, advice: str) -> Iterator[None]:
    """What can go wrong with a file, as an EngineError: what could not be done, why, and what may help."""
    try:
        yield
    except DamagedFile:
        raise _error(f"{what}: it is damaged, or no session; {advice}") from None
    except MemoryError:
        raise _no_memory(f"{what}: there is not enough memory; free some") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a zero in it
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise EngineError(f"{what}: {reason}; {advice}", "storage") from None


def _damaged(path: Place) -> str:
    return f"The session {path} is damaged: load another copy of it"


def _error(sentence: str) -> EngineError:
    return EngineError(sentence, "session", _SETTINGS)


def _no_memory(sentence: str) -> EngineError:
    return EngineError(sentence, "out_of_memory")
