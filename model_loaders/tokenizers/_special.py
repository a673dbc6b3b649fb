"""Finds the ids that begin a sequence and that end a generation in the files next to a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polarlm.model_loaders.tokenizers._base import SpecialIds
from polarlm.model_loaders.tokenizers._protocol import Pair

# Ends of a text or of a turn in common chat formats. If a vocabulary has one as a control token, the model ends its
# answers with it, even if its configuration does not say so.
WELL_KNOWN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"),
    *("<end_of_turn>", "<|end|>"),  # Gemma's, Phi's
    *("<|return|>", "<|call|>"),  # gpt-oss's
    *("<turn|>", "<|tool_response>"),  # Gemma 4's
)


@dataclass(frozen=True)
class FolderSettings:
    """The JSON files next to a vocabulary; {} for one that is absent."""

    folder: Path
    config: Mapping[str, object]
    generation: Mapping[str, object]
    tokenizer: Mapping[str, object]  # tokenizer_config.json

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """String → (id, whether it is a control token), from tokenizer_config.json."""
        added = self.tokenizer.get("added_tokens_decoder")
        if not isinstance(added, Mapping):
            return {}
        return {
            str(entry.get("content", "")): (int(token_id), bool(entry.get("special", False)))
            for token_id, entry in added.items()
            if str(token_id).isdigit() and isinstance(entry, Mapping)
        }


def for_folder(
    settings: FolderSettings,
    control: Mapping[str, int],
    lookup: Callable[[str], int | None],
    *,
    adds_bos: bool,
    default_bos: int | None = None,
    closing_id: int | None = None,
    pair: Pair | None = None,
) -> SpecialIds:
    """The special ids of a folder; tokenizer_config.json overrides the vocabulary's `adds_bos` and `default_bos`."""
    named = token_string(settings.tokenizer.get("bos_token"))
    bos = lookup(named) if named else None
    for candidate in (default_bos, settings.config.get("bos_token_id")):
        bos = candidate if bos is None and isinstance(candidate, int) else bos
    asked = settings.tokenizer.get("add_bos_token")
    wants = asked if isinstance(asked, bool) else adds_bos

    ends = well_known_ends(control)
    for source in (settings.config, settings.generation):
        ends |= ids_in(source.get("eos_token_id"))
    named = token_string(settings.tokenizer.get("eos_token"))
    end = lookup(named) if named else None
    return SpecialIds(bos if wants else None, frozenset(ends if end is None else ends | {end}), closing_id, pair)


def well_known_ends(control: Mapping[str, int]) -> set[int]:
    """The ids of the ends of a turn or a text that a vocabulary has as control tokens.

    Where answers are messages in channels, <|end|> is that of a message, and more of the answer follows.
    """
    ends = {control[string] for string in WELL_KNOWN_ENDS if string in control}
    return ends - {control["<|end|>"]} if {"<|end|>", "<|return|>", "<|channel|>"} <= control.keys() else ends


def ids_in(value: object) -> set[int]:
    """The ids in a setting that is one id, a list of ids or nothing."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0}


def token_string(value: object) -> str | None:
    """The string of a token that is written as a string, or as an object with a `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
