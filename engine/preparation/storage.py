"""K/V that was computed before: sessions, packs, and what tiers have.

A request's messages follow those of its pack. K/V are read into the store when a request needs them and they are not
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from polarlm.engine.errors import EngineError
from polarlm.engine.params import PromptOptions
from polarlm.engine.preparation.adapters import AdapterLoading
from polarlm.engine.requests.answers import Answers
from polarlm.engine.requests.prompts import Prompt, checked_ids, prompt_ids
from polarlm.engine.requests.request import Preparation, Submission
from polarlm.engine.state.prefix import common_prefix
from polarlm.engine.storage import identity, packs, sessions
from polarlm.engine.storage.packs import Pack
from polarlm.engine.storage.sessions import KnownAnswers, Progress, Session, SessionPath


def begin_with_pack(engine: Sessions) -> Preparation:
    """The prompt follows the pack that its request names."""
    engine.packs = packs.open_packs(engine.config, engine._identity, engine.model.vocabulary, engine.context)
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
        hit, holes = tiers.find(submission.ids[:-1], submission.salt), submission.holes
        if hit is None and holes is not None:  # what was kept before the prompt was edited
            hit = tiers.find(holes.whole, holes.salt)
        return replace(submission, hit=hit)

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
        return cast(Prompt, packs.choose(self.packs, options.pack, options).begin(prompt))

    def load_pack(self, name: str) -> Pack:
        """Read the K/V of a pack into the store, unless they are there, and return it. Raises EngineError."""
        pack = packs.choose(self.packs, name, PromptOptions())
        with self._exclusive():
            kv = self._prefixes.match_prefix(pack.token_ids, "")
            length = kv.length
            self._prefixes.release(kv, pack.token_ids[:length])
        if length < len(pack.token_ids):  # also where its last block alone is gone: codes would be read in its place
            packs.check_unchanged(pack)
            self.load_session(pack.path)
        return pack
