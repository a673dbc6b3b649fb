"""`replayable`: what makes a request's answer the same again, and what stands for all that it depends on."""

from __future__ import annotations

import secrets
from dataclasses import replace

from polarlm.engine.core import EngineCore
from polarlm.engine.errors import EngineError
from polarlm.engine.requests.request import Preparation, Submission
from polarlm.engine.state.cache_types import name_types
from polarlm.engine.state.prefix import join_salt, salt_adapter
from polarlm.engine.version import release


def repeat(engine: EngineCore) -> Preparation:
    """A request gets a seed, 0 if it has none, and the engine's fingerprint: the version, the model, the cache types,
    the bits of inputs, the tokens of a block, and the encoding, with colons between them."""
    if engine.config.replayable:
        settings, bits = engine._identity, engine._model.ops.input_bits
        model, encoding = settings["model"][:16], settings["conditioning"][:16]
        parts = release(), model, name_types(engine.config), bits, settings["block_size"], encoding
        engine.fingerprint = ":".join(parts)

    def prepare(submission: Submission) -> Submission:
        if not engine.fingerprint:
            if submission.options.replayable:
                sentence = "Answers cannot be replayed here: load the engine with replayable=True"
                raise EngineError(sentence, settings=("replayable",))
            return submission
        params, adapter = submission.params, salt_adapter(submission.salt)
        is_whole = submission.is_whole or bool(submission.images)  # steps have no rows of images
        return replace(
            submission,
            params=replace(params, seed=max(0, params.seed)),
            is_whole=is_whole,
            salt=join_salt(secrets.token_hex(), adapter) if is_whole else submission.salt,  # nobody else may find it
            fingerprint=f"{engine.fingerprint}:{adapter}" if adapter else engine.fingerprint,
        )

    return prepare
