"""Prompts for models that fill in the middle of a text, by special tokens whose names differ from family to family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from polarlm.model_loaders.tokenizers import Tokenizer
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.reading.values import BadRequest

_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<PRE>", "<SUF>", "<MID>"),  # Code Llama
)
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")

Mixed = list[int | str]


@dataclass(frozen=True)
class Infill:
    """The tokens of a vocabulary that precede the beginning, the end and the middle of a text, and related tokens."""

    bos: int | None
    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    ends: tuple[int, ...]  # tokens that a model generates after a complete middle

    def prompt(self, prefix: str, suffix: str, start: str = "", files: Iterable[tuple[str, str]] = ()) -> Mixed:
        """The prompt for the text between `prefix` and `suffix`, which begins with `start`. files: names and texts of
        other files."""
        parts: Mixed = [] if self.bos is None else [self.bos]
        files = list(files)
        if self.repository is not None and self.file is not None and files:
            parts += [self.repository, "myproject\n"]
            for other, text in files:
                parts += [self.file, f"{other}\n{text}\n"]
            parts += [self.file, "filename\n"]
        else:
            parts += [text for _, text in files]
        parts += [self.prefix, prefix, self.suffix, suffix, self.middle, start]
        return [part for part in parts if part != ""]


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """The tokens of a vocabulary for filling in the middle; None if the model was not trained for it."""

    def token(name: str) -> int | None:
        ids = tokenizer.tokenize(name, control=True)
        if len(ids) != 1:
            return None
        text = tokenizer.token_bytes(ids[0]).decode("utf-8", "replace") or tokenizer.token_name(ids[0])
        return ids[0] if text.strip(" ▁") == name else None

    def first(names: tuple[str, ...]) -> int | None:
        return next((token_id for name in names if (token_id := token(name)) is not None), None)

    for names in _NAMES:
        prefix, suffix, middle = map(token, names)
        if prefix is not None and suffix is not None and middle is not None:
            repository, file = first(_REPOSITORY), first(_FILE)
            ends = tuple(end for end in (repository, file, first(_PADDING)) if end is not None)
            return Infill(tokenizer.bos_id, prefix, suffix, middle, repository, file, ends)
    return None


def with_infill_prompts(
    field: str, request: ParsedRequest, tokenizer: Tokenizer, texts: Iterable[tuple[Any, ...]]
) -> ParsedRequest:
    """`request` with a prompt for each of `texts`, the arguments of `Infill.prompt`; control tokens' names in them stay
    text. Raises BadRequest, which names `field`, for a model without the tokens."""
    if (infill := infill_of(tokenizer)) is None:
        sentence = "this model has no tokens for filling in the middle of a text; send the text before it as a prompt"
        raise BadRequest(field, f"{field}: {sentence}")
    ends = () if request.params.ignore_eos else infill.ends
    params = replace(request.params, stop_token_ids=(*request.params.stop_token_ids, *ends))
    options = replace(request.options, parse_special=False)
    first, *more = (infill.prompt(*one) for one in texts)
    return replace(request, prompt=first, more_prompts=tuple(more), params=params, options=options)
