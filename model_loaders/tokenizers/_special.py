"""Finds the ids that begin a sequence and that end a generation in the files next to a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polarlm.model_loaders.tokenizers import known_names
from polarlm.model_loaders.tokenizers._base import SPACE, Edges, Pair, SpecialIds


@dataclass(frozen=True)
class FolderSettings:
    """The JSON files next to a vocabulary; {} for one that is absent."""

    folder: Path
    config: Mapping[str, object]
    generation: Mapping[str, object]
    tokenizer: Mapping[str, object]  # tokenizer_config.json

    def _entries(self) -> list[tuple[int, Mapping[str, object]]]:
        """The ids and the entries of added tokens in tokenizer_config.json."""
        added = self.tokenizer.get("added_tokens_decoder")
        entries = added.items() if isinstance(added, Mapping) else ()
        return [(int(i), entry) for i, entry in entries if str(i).isdecimal() and isinstance(entry, Mapping)]

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """String → (id, whether it is a control token)."""
        return {str(one.get("content", "")): (token_id, bool(one.get("special"))) for token_id, one in self._entries()}

    def edges(self) -> dict[str, Edges]:
        """What added tokens do at their edges."""
        return {
            str(one.get("content")): Edges(
                before=SPACE if one.get("lstrip") is True else "",
                after=SPACE if one.get("rstrip") is True else "",
                are_of_word=one.get("single_word") is True,
            )
            for _, one in self._entries()
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
    bos_name = token_string(settings.tokenizer.get("bos_token"))
    bos = lookup(bos_name) if bos_name else None
    for candidate in (default_bos, settings.config.get("bos_token_id")):
        bos = candidate if bos is None and isinstance(candidate, int) else bos
    family = str(settings.config.get("model_type"))
    wants = known_names.begins_with_bos(family, control, settings.tokenizer.get("add_bos_token"), adds_bos)
    ends = {control[name] for name in known_names.ends(control)}
    for source in (settings.config, settings.generation):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        ends |= {one for one in ids if isinstance(one, int) and not isinstance(one, bool) and one >= 0}
    bos_name = token_string(settings.tokenizer.get("eos_token"))
    end = lookup(bos_name) if bos_name else None
    return SpecialIds(bos if wants else None, frozenset(ends if end is None else ends | {end}), closing_id, pair)


def token_string(value: object) -> str | None:
    """The string of a token that is written as a string, or as an object with a `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
