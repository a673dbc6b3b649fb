"""How text is cut into words before BPE merges inside each of them: one kind per family of byte-level vocabularies."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

# Published with the models, in their tokenizer.json. They differ in how many digits make a word: up to three, or one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
QWEN2 = _WORDS.replace("DIGITS", r"\p{N}")

# GGUF's names of pre-tokenizers (`tokenizer.ggml.pre`) that cut alike.
_CUT_BY_PATTERN = {
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
_CUT_AS_GPT2 = {"gpt-2", "default"}
_CUT_AS_GPT2_WITH_SINGLE_DIGITS = {"smollm"}

KNOWN = sorted({*_CUT_BY_PATTERN, *_CUT_AS_GPT2, *_CUT_AS_GPT2_WITH_SINGLE_DIGITS})


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """The word cutter that GGUF calls `name`, ending in the byte alphabet; None if it is not known."""
    if name in _CUT_BY_PATTERN:
        split = pre_tokenizers.Split(Regex(_CUT_BY_PATTERN[name]), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _CUT_AS_GPT2_WITH_SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2 if name in _CUT_AS_GPT2 else None


def takes_known_words_whole(name: str) -> bool:
    """Whether a word that is in the vocabulary is one token even where the merges would not lead to it."""
    return _CUT_BY_PATTERN.get(name) == LLAMA3
