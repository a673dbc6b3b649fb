"""Packs: contexts that are computed once, and that requests begin with by a name.

A pack is a session whose note has the messages that it holds, and the digests of the texts in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.quantization.conditioning import Scale
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.storage import identity, objects, sessions
from polarlm.engine.storage.files import file_state, sha256
from polarlm.engine.storage.objects import DamagedObject
from polarlm.model_loaders import hub
from polarlm.model_loaders.fields import Fields

_KEY = "pack"  # of the note


@dataclass(frozen=True)
class PackedText:
    """name: the file's. sha256: of its text in UTF-8."""

    name: str
    sha256: str

    @classmethod
    def from_text(cls, name: str, text: str) -> PackedText:
        return cls(name, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True)
class Pack:
    name: str
    path: Path
    token_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    texts: Sequence[PackedText]
    state: Sequence[int]  # of the file, when it was opened

    def begin(self, prompt: Any) -> Any:
        """Return a prompt that follows this pack. A system message follows the pack's in one message: templates take
        no two of them."""
        if isinstance(prompt, str):
            return [*self.token_ids, prompt]
        messages = list(self.messages)
        if not len(prompt):
            return messages
        if not isinstance(prompt[0], Mapping):
            return [*self.token_ids, *prompt]
        last, (first, *rest) = messages[-1], prompt
        if first.get("role") != "system" or last.get("role") != "system" or not isinstance(first.get("content"), str):
            return [*messages, first, *rest]
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{first['content']}"}, *rest]


def note_of(messages: Sequence[Mapping[str, Any]], texts: Sequence[PackedText]) -> dict[str, Any]:
    """Return the note of the session that is the pack of these messages."""
    return {_KEY: {"messages": list(messages), "texts": [[one.name, one.sha256] for one in texts]}}


def local_packs(config: EngineConfig, say: Callable[[str], None]) -> dict[str, str]:
    """Return the paths of packs by their names; those of the hub are downloaded if need be. Raises LoadError."""
    return {
        name: str(hub.fetch_supplement(hub.parse(where), "pack", say)) if where.startswith(hub.PREFIX) else where
        for name, where in config.packs.items()
    }


def read_scales(config: EngineConfig, model: str, shape: CacheShape) -> dict[int, Scale] | None:
    """Return the scales of the first pack's codes by the numbers of the layers with K/V. Machines that calibrate by
    themselves differ in the last bits of their scales, and codes mean something else with others. model: the
    fingerprint of the engine's. None if there is no pack, or none of this engine: `open_packs` says what is wrong."""
    where = next(iter(config.packs.values()), None)
    if where is None:
        return None
    scales: dict[int, Scale] = {}
    try:
        with Path(where).expanduser().open("rb") as file:
            first = objects.read(file, sessions.NAME)
        if first.header["model"] != model or first.header["block_size"] != str(shape.block_size):
            return None
        arrays = objects.split_arrays(first)
        for layer, one in shape.kv_layers.items():
            names = identity.name_scale(layer, one.mean_bits > 0)
            keys, values = (arrays[name] for name in names)
            if keys.shape != (one.kv_heads, one.head_dim) or values.shape != (one.kv_heads,):
                return None
            if not ((keys > 0).all() and (values > 0).all()):
                return None
            scales[layer] = Scale(keys, values)
    except (OSError, DamagedObject, KeyError, TypeError, ValueError):
        return None
    return scales


def open_packs(config: EngineConfig, settings: Mapping[str, str], vocabulary: range, context: int) -> dict[str, Pack]:
    """Return the packs of an engine by their names. settings: the engine's `identity.settings`. Raises EngineError for
    a file that is no pack or not allowed, or that is of another model or other settings, or longer than the context."""
    packs, allowed = {}, _allowed_digests(config.allowed_packs)
    for name, where in config.packs.items():
        path = Path(where).expanduser()
        state = file_state(path) if path.is_file() else ()
        if allowed is not None and path.is_file() and (digest := sha256(path)) not in allowed:
            raise _error(f"pack={name}: {path} has the SHA-256 {digest}, which is not in {config.allowed_packs}")
        session = sessions.read_header(path, settings, vocabulary)
        try:
            content = session.note[_KEY]
            Fields(content, path).warn_of_unread(("messages", "texts"))
            messages = [dict(message) for message in content["messages"]]
            texts = [PackedText(str(text), str(digest)) for text, digest in content["texts"]]
            if not messages or not all(isinstance(message.get("role"), str) for message in messages):
                raise ValueError("no messages")
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _error(f"pack={name}: {path} is a session and no pack: polarlm pack writes one") from None
        if len(session.token_ids) >= context:
            raise _error(
                f"pack={name}: {path} has {len(session.token_ids):,} tokens, and the context of this engine "
                f"{context:,}: raise ctx_size"
            )
        packs[name] = Pack(name, path, session.token_ids, messages, texts, state)
        check_unchanged(packs[name])
    return packs


def _allowed_digests(file: str | None) -> set[str] | None:
    """Return the digests in a file, whose lines begin with one as those of sha256sum do; None without a file."""
    if file is None:
        return None
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EngineError(f"allowed_packs={file}: it cannot be read: {reason}", settings=("allowed_packs",)) from None
    return {line.split()[0].lower() for line in lines if line.strip()}


def check_unchanged(pack: Pack) -> None:
    """Raises EngineError if the file is not the one that was opened: its texts and its digest would be others."""
    try:
        is_same = file_state(pack.path) == pack.state
    except OSError as error:
        raise _error(f"pack={pack.name}: {pack.path} cannot be read any more: {error.strerror}") from None
    if not is_same:
        raise _error(f"pack={pack.name}: {pack.path} has changed since it was opened: load the model again")


def choose(packs: Mapping[str, Pack], name: str, options: Any) -> Pack:
    """Return the pack of this name. Raises EngineError if there is none, or if its blocks cannot be what options ask
    for."""
    if (pack := packs.get(name)) is None:
        there = ", ".join(packs) or "none: give some with --pack FILE"
        raise EngineError(f"pack is {name!r}, but there is no pack of this name; there are {there}")
    for field in ("cache_salt", "lora"):
        if getattr(options, field):
            raise EngineError(f"pack={name}: a pack is computed without {field}: leave one of the two out")
    if options.pooling is not None:
        raise EngineError(f"pack={name}: a vector is of a text alone: leave pack out")
    return pack


def _error(sentence: str) -> EngineError:
    return EngineError(sentence, "session", ("packs",))
