"""K/V that was computed before: sessions, packs, which requests begin with by a name, and what tiers have.

A pack is a session whose note has the messages that it holds, and the digests of the texts in them. A request's
messages follow those of its pack. K/V are read into the store when a request needs them and they are not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.params import PromptOptions
from polarlm.engine.preparation.adapters import AdapterLoading
from polarlm.engine.quantization.conditioning import Scale
from polarlm.engine.requests.answers import Answers
from polarlm.engine.requests.prompts import Prompt, checked_ids, prompt_ids
from polarlm.engine.requests.request import Preparation, Submission
from polarlm.engine.state.prefix import common_prefix
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.storage import identity, objects, sessions
from polarlm.engine.storage.files import file_state, sha256
from polarlm.engine.storage.objects import DamagedObject
from polarlm.engine.storage.sessions import KnownAnswers, Progress, Session, SessionPath
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


def begin_with_pack(engine: Sessions) -> Preparation:
    """The prompt follows the pack that its request names."""
    engine.packs = open_packs(engine.config, engine._identity, engine.model.vocabulary, engine.context)
    return lambda submission: replace(submission, prompt=engine.begin_with_pack(submission.prompt, submission.options))


def load_pack(engine: Sessions) -> Preparation | None:
    """The K/V of the pack are in the store. A warning says if a prompt lacks more than two blocks of its tokens."""

    def prepare(submission: Submission) -> Submission:
        options = submission.options
        if not options.pack:
            return submission
        pack = engine.load_pack(options.pack) if options.cache_prompt else engine.packs[options.pack]
        missing = len(pack.token_ids) - common_prefix(pack.token_ids, submission.ids)
        if missing <= 2 * engine.cache_shape.block_size:
            return submission
        sentence = (
            f"{missing:,} tokens of the pack {pack.name} are computed again: the model's chat template writes this "
            "request's messages or tools before them."
        )
        return replace(submission, warnings=(*submission.warnings, sentence))

    return prepare if engine.packs else None


def find_blocks(engine: Sessions) -> Preparation | None:
    """What tiers have of a prompt, and the store lacks, is read. Raises EngineError if the engine has been closed."""
    tiers = engine._tiers
    if tiers is None:
        return None

    def prepare(submission: Submission) -> Submission:
        engine._check_open()
        if not submission.options.cache_prompt or submission.is_whole:
            return submission
        return replace(submission, hit=tiers.find(submission.ids[:-1], submission.salt))

    return prepare


class Sessions(AdapterLoading):
    packs: dict[str, Pack]  # by their names
    _answers: Answers

    def save_session(
        self,
        path: SessionPath,
        *,
        prompt: Prompt | None = None,
        options: PromptOptions | None = None,
        note: Any = None,
        progress: Progress | None = None,
    ) -> int:
        """Save the K/V of the newest sequence, or of the longest stored prefix of `prompt`, and return its token count.

        prompt, options: as for `stream`; with messages, the ids of known answers are saved too. note: any JSON value.
        progress: called with the bytes written and the bytes in all. Raises EngineError: "storage" if the file cannot
        be written, "session" for anything else.
        """
        options = options or PromptOptions()
        salt = self.adapters.salt(options)
        ids_to_save: Sequence[int] | None = None
        answers: KnownAnswers = ()
        if prompt is not None:
            prompt = self.begin_with_pack(prompt, options)
            conversation = self._answers.conversation(prompt, options.cache_salt)
            read, answers = conversation.read, self._answers.known_answers(conversation.keys)
            unchecked = prompt_ids(conversation.prompt, self.model, options, context=self.context, cut=read.cut)
            ids_to_save = checked_ids(unchecked, self.model, self.context, room=0, rows=read.ids)
        with self._exclusive():
            newest = self._runner.newest
            ids, salt = (newest.ids, newest.salt) if ids_to_save is None else (ids_to_save, salt)
            contents = sessions.take_snapshot(self._store, self._prefixes, ids, salt)
        session = Session(tuple(ids[: contents.length]), note, answers, salt)
        sessions.write(path, self._identity, session, contents, identity.scale_arrays(self._store), progress)
        return contents.length

    def load_session(self, path: SessionPath, *, cache_salt: str = "", progress: Progress | None = None) -> Session:
        """Load a saved session into the prefix cache, so that prompts that begin with its ids reuse its K/V.

        cache_salt: the salt that it was saved with, which prompts need to reuse it. progress: called with the bytes
        read and the bytes in all. Raises EngineError: "storage" if the file cannot be read, else "session".
        """
        if self.config.kept_sequences == 0:
            raise EngineError("This engine keeps no sequences (kept_sequences is 0), so none can be loaded", "session")
        allowed = self.model.vocabulary, self.context, cache_salt, self.adapters.knows
        session, contents = sessions.read(path, self._identity, self.cache_shape, *allowed, progress)
        with self._exclusive():
            kv = sessions.restore_snapshot(self._store, contents, path)
            self._runner.release(session.token_ids, self._prefixes.set_salt(kv, session.salt), session.salt)
        self._answers.restore(session.answers)
        return session

    def begin_with_pack(self, prompt: Prompt, options: PromptOptions | None) -> Prompt:
        """Return the prompt after the pack that options name; the prompt itself if they name none."""
        if options is None or not options.pack:
            return prompt
        return cast(Prompt, choose(self.packs, options.pack, options).begin(prompt))

    def load_pack(self, name: str) -> Pack:
        """Read the K/V of a pack into the store, unless they are there, and return it. Raises EngineError."""
        pack = choose(self.packs, name, PromptOptions())
        with self._exclusive():
            kv = self._prefixes.match_prefix(pack.token_ids, "")
            length = kv.length
            self._prefixes.release(kv, pack.token_ids[:length])
        if length < len(pack.token_ids):  # also where its last block alone is gone: codes would be read in its place
            check_unchanged(pack)
            self.load_session(pack.path)
        return pack
