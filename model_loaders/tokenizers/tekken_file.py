"""Mistral's `tekken.json`: the bytes of tokens by rank, after special tokens, and an expression that cuts a text."""

from __future__ import annotations

import base64
from pathlib import Path

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import read_json
from polarlm.model_loaders.tokenizers import patterns
from polarlm.model_loaders.tokenizers._special import FolderSettings, for_folder
from polarlm.model_loaders.tokenizers.hf_json import LibraryTokenizer
from polarlm.model_loaders.tokenizers.tiktoken_file import bpe_of_ranks

# The special tokens of files that do not list them; further ones are numbered.
_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def load(file: Path, settings: FolderSettings) -> LibraryTokenizer:
    """Reads Mistral's vocabulary. Raises LoadError if the file is damaged."""
    stored = read_json(file)
    try:
        sizes = stored["config"]
        count, size = sizes["default_num_special_tokens"], sizes["default_vocab_size"]
        listed = stored.get("special_tokens") or [{"rank": i, "token_str": name} for i, name in enumerate(_SPECIAL)]
        names = {entry["rank"]: entry["token_str"] for entry in listed if entry["rank"] < count}
        control = {names.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(count)}
        entries = stored["vocab"][: size - count]
        ranks = {base64.b64decode(entry["token_bytes"], validate=True): entry["rank"] for entry in entries}
        if sorted(ranks.values()) != list(range(size - count)):
            raise ValueError("its ranks are not those of its size")
        library = bpe_of_ranks(ranks, count, patterns.by_expressions(sizes["pattern"]))
    except Exception as error:  # the library has no other for a wrong expression
        raise LoadError(f"{file} is a damaged vocabulary ({error}): download it again.") from error
    special = for_folder(settings, control, control.get, adds_bos=True, default_bos=control.get("<s>"))
    return LibraryTokenizer(library, control, special, byte_level=True, vocab_size=size)
