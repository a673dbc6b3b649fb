"""Regular expressions that split text into words, within which BPE merges; one set per family of vocabularies."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

# Published with the models, in their tokenizer.json. They differ in how many digits make a word: up to three, or one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
_QWEN2 = _WORDS.replace("DIGITS", r"\p{N}")
# Marks belong to the letters before them.
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

# Mistral's, as published: a new word begins where a capital follows a small letter. llama.cpp considers the case of
# ASCII letters only.
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]*[{_SMALL}]+|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]+[{_SMALL}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# gpt-oss's, as published: Mistral's, with contractions at the end of a word, and up to three digits in one.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]*[{_SMALL}]+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]+[{_SMALL}]*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Kimi's, as published: gpt-oss's, in which Chinese is apart from other letters, and no slash ends a word.
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = r"\p{Han}+|" + _GPT4O.replace(_CAPITALS, _CAPITALS + _NOT_HAN).replace(_SMALL, _SMALL + _NOT_HAN).replace(
    "/]", "]"
)

# DeepSeek's first models: letters with case, in the ranges of their tokenizer.json, and Chinese, Japanese and Korean.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"

# DeepSeek V3's, which Hunyuan has: after digits, Chinese and Japanese, a mark goes with the ASCII letters behind it.
_KANJI_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# GGUF's name of a pre-tokenizer (`tokenizer.ggml.pre`) of a supported architecture → its expressions. Each splits the
# pieces of the previous one into its matches and the text between them.
_EXPRESSIONS: dict[str, tuple[str, ...]] = {
    # llama.cpp's choice if a file does not say; no model is known to be trained with it.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral", "smaug-bpe", "dbrx"),
            *("lfm2", "glm4", "chatglm-bpe"),
        ),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), (_QWEN2,)),
    **dict.fromkeys(("gpt-2", "a.x-4.0", "gigachat", "mellum", "modern-bert", "olmo", "phi-2", "trillion"), (_GPT2,)),
    **dict.fromkeys(("smollm", "codeshell", "minerva-7b", "refact", "starcoder", "command-r"), (r"\p{N}", _GPT2)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "kimi-k2": (_KIMI,),
    "deepseek-llm": (r"[\r\n]", rf"\s?[{_CASED}]+", _MARKS, r"\s+$", _EAST_ASIAN, r"\p{N}+"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", _KANJI_AND_KANA, _DEEPSEEK3)),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
}
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral", "lfm2", "tekken"}

PRE_TOKENIZERS = sorted(_EXPRESSIONS)


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """The pre-tokenizer that GGUF calls `name`, with the byte alphabet as its last step; None if it is not known."""
    return by_expressions(*_EXPRESSIONS[name]) if name in _EXPRESSIONS else None


def by_expressions(*expressions: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that cuts by these expressions. Raises ValueError for one that is none."""
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def takes_known_words_whole(name: str) -> bool:
    """Whether a word of the vocabulary is one token even if the merges would not produce it."""
    return name in _WHOLE_WORDS
