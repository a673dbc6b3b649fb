"""How a model's files want it sampled: generation_config.json, or keys of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.fields import Fields, read_json, usable

if TYPE_CHECKING:
    from polarlm.model_loaders.files.gguf_file import GgufFile

_LOG = logging.getLogger(__name__)
_GGUF = {  # our key → the key in a GGUF file
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
    "suppress_tokens": "tokenizer.ggml.suppress_tokens",
}


def of_folder(folder: Path, vocab_size: int) -> GenerationDefaults:
    """What `generation_config.json` says; nothing without it. Values that cannot be used are left out with a warning.

    vocab_size: ids from it on are no tokens. Raises LoadError if the file holds no JSON object.
    """
    path = folder / "generation_config.json"
    return _defaults(Fields(read_json(path, required=False), path), vocab_size)


def of_gguf(gguf: GgufFile, vocab_size: int) -> GenerationDefaults:
    """What the keys for it in a GGUF file say, likewise."""
    values = {ours: gguf.metadata.get(theirs) for ours, theirs in _GGUF.items()}
    return _defaults(Fields(values, gguf.path, _GGUF), vocab_size)


def _defaults(fields: Fields, vocab_size: int) -> GenerationDefaults:
    def number(key: str, minimum: float, maximum: float) -> float | None:
        return usable(lambda: fields.number(key, minimum=minimum, maximum=maximum)) if fields.has(key) else None

    def is_token(value: object) -> bool:
        return type(value) is int and 0 <= value < vocab_size

    def is_sequence(value: object) -> bool:
        return isinstance(value, list) and bool(value) and all(map(is_token, value))

    def items(key: str, is_usable: Callable[[object], bool]) -> list[Any]:
        value = fields.value(key)
        given = [] if value is None else value if isinstance(value, list) else [value]
        odd = repr([one for one in given if not is_usable(one)])
        if odd != "[]":
            problem = f"and of it {odd[:60]} is left out: the model's tokens are 0 to {vocab_size - 1}"
            _LOG.warning("%s", fields.refuse(key, problem))
        return [one for one in given if is_usable(one)]

    temperature, sequences = number("temperature", 0, 1e4), items("bad_words_ids", is_sequence)
    top_k = usable(lambda: fields.integer("top_k", minimum=-1)) if fields.has("top_k") else None
    ends = [[end] for end in items("eos_token_id", is_token)]  # a text may end all the same, as in transformers
    words = [one[0] for one in sequences if len(one) == 1 and one not in ends]
    return GenerationDefaults(
        temperature=temperature,
        top_k=None if top_k is None else max(0, top_k),
        top_p=number("top_p", 1e-9, 1),
        min_p=number("min_p", 0, 1),
        repeat_penalty=number("repetition_penalty", 1e-3, 1e3),
        # In many files `do_sample: false` is a leftover: it means greedy only if there is no temperature.
        greedy=usable(lambda: fields.flag("do_sample", True)) is False and temperature is None,
        banned=(*items("suppress_tokens", is_token), *words),
        banned_first=tuple(items("begin_suppress_tokens", is_token)),
        banned_sequences=tuple(tuple(one) for one in sequences if len(one) > 1),
    )
