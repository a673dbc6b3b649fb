"""What an engine with `replayable` makes of its requests, and what stands for all that its answers depend on."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace

from polarlm.engine.errors import EngineError
from polarlm.engine.model.adapters import Adapters
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.requests.request import Request
from polarlm.engine.version import release


def fingerprint(settings: Mapping[str, str], types: str, input_bits: str) -> str:
    """Return what answers depend on beside their request: the version, the model, the cache types, the bits of inputs,
    the tokens of a block, and the encoding, with colons between them. settings: of `storage.identity`."""
    model, encoding = settings["model"][:16], settings["conditioning"][:16]
    return ":".join((release(), model, types, input_bits, settings["block_size"], encoding))


def with_seed(params: SamplingParams, options: PromptOptions, *, is_replayable: bool) -> SamplingParams:
    """Return parameters with a seed, which is 0 if they have none and answers can be replayed. Raises EngineError if
    the request wants that where they cannot."""
    if options.replayable and not is_replayable:
        raise EngineError(
            "Answers cannot be replayed here: load the engine with replayable=True", settings=("replayable",)
        )
    return replace(params, seed=0) if is_replayable and params.seed < 0 else params


def prepare(request: Request, adapters: Adapters, fingerprint: str) -> None:
    """Let a request be replayable. Raises EngineError if its adapter is not there."""
    options = request.options
    _, adapter = adapters.choose(options.lora, options.lora_scale)
    request.fingerprint = f"{fingerprint}:{adapter}" if adapter else fingerprint
    if request.needs_whole_prompt:  # it is no rows of steps, so that no other request may find it
        request.salt = adapters.salt(replace(options, cache_salt=secrets.token_hex()))
