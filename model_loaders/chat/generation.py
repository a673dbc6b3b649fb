"""How a model's files want it sampled: generation_config.json, or keys of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.fields import Fields, describe, usable
from polarlm.model_loaders.files.gguf_file import GgufFile

_LOG = logging.getLogger(__name__)
# Field of SamplingParams → its key in generation_config.json, its key in a GGUF file, least and largest value.
_NUMBERS = {
    "temperature": ("temperature", "general.sampling.temp", 0, 1e4),
    "top_p": ("top_p", "general.sampling.top_p", 1e-9, 1),
    "min_p": ("min_p", "general.sampling.min_p", 0, 1),
    "repeat_penalty": ("repetition_penalty", "general.sampling.penalty_repeat", 1e-3, 1e3),
}
_GGUF = {  # key of generation_config.json → key of a GGUF file
    **{key: theirs for key, theirs, *_ in _NUMBERS.values()},
    "top_k": "general.sampling.top_k",
    "suppress_tokens": "tokenizer.ggml.suppress_tokens",
}


def defaults_of_folder(folder: Path, vocab_size: int) -> GenerationDefaults:
    """What `generation_config.json` says; nothing without it. Values that cannot be used are left out with a warning.

    vocab_size: ids from it on are no tokens. Raises LoadError if the file holds no JSON object.
    """
    return _defaults(Fields.read(folder / "generation_config.json", required=False), vocab_size)


def defaults_of_gguf(gguf: GgufFile, vocab_size: int) -> GenerationDefaults:
    """What the keys for it in a GGUF file say, likewise."""
    values = {ours: gguf.metadata.get(theirs) for ours, theirs in _GGUF.items()}
    others = [key for key in gguf.metadata if key.startswith("general.sampling.") and key not in _GGUF.values()]
    if others:
        _LOG.warning(
            "%s: %s: these are no defaults here: ask for them in flags or requests", gguf.path, ", ".join(others)
        )
    return _defaults(Fields(values, gguf.path, _GGUF), vocab_size)


def _defaults(fields: Fields, vocab_size: int) -> GenerationDefaults:
    def is_token(value: object) -> bool:
        return type(value) is int and 0 <= value < vocab_size

    def is_sequence(value: object) -> bool:
        return isinstance(value, list) and bool(value) and all(map(is_token, value))

    def items(key: str, is_usable: Callable[[object], bool]) -> list[Any]:
        value = fields.value(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if odd := [one for one in values if not is_usable(one)]:
            part = f"of it {describe(odd[0] if len(odd) == 1 else odd)} " if isinstance(value, list) else ""
            problem = f"and {part}is left out: the model's tokens are 0 to {vocab_size - 1}"
            _LOG.warning("%s", fields.refuse(key, problem))
        return [one for one in values if is_usable(one)]

    sampling: dict[str, Any] = {}
    for name, (key, _, low, high) in _NUMBERS.items():
        if fields.has(key):
            sampling[name] = usable(partial(fields.number, key, minimum=low, maximum=high))
    if fields.has("top_k"):
        top_k = usable(lambda: fields.integer("top_k", minimum=-1))
        sampling["top_k"] = None if top_k is None else max(0, top_k)
    sampling = {name: value for name, value in sampling.items() if value is not None}
    sequences = items("bad_words_ids", is_sequence)
    ends = [[end] for end in items("eos_token_id", is_token)]  # a text may end all the same, as in transformers
    words = [sequence[0] for sequence in sequences if len(sequence) == 1 and sequence not in ends]
    return GenerationDefaults(
        sampling,
        # In many files `do_sample: false` is a leftover: it means greedy only if there is no temperature.
        greedy=usable(lambda: fields.flag("do_sample", True)) is False and "temperature" not in sampling,
        banned=(*items("suppress_tokens", is_token), *words),
        banned_first=tuple(items("begin_suppress_tokens", is_token)),
        banned_sequences=tuple(tuple(sequence) for sequence in sequences if len(sequence) > 1),
    )
