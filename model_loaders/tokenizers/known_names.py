"""What is known of vocabularies by name, where their files say nothing, or the wrong thing.

The facts are llama.cpp's (src/llama-vocab.cpp), which mends the same files, except where the published tokenizers say
otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from polarlm.model_loaders.tokenizers._base import SPACE, Edges

# Ends of a text, a turn or a call. A model ends its answers with them, even if its configuration does not say so.
ENDS = frozenset((
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<end_of_turn>", "<|end|>"),  # Gemma's, Phi's
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),  # gpt-oss's, Solar's
    *("<turn|>", "<|tool_response>"),  # Gemma 4's
    *("<｜end▁of▁sentence｜>", "<end_of_utterance>"),  # DeepSeek's, SmolVLM's
))  # fmt: skip
# They end answers only as added tokens: merges of other vocabularies make words of such names, as Qwen's do of </s>.
_ADDED_ENDS = frozenset(("</s>", "<eos>", "<EOT>", "▁<EOT>", "[EOT]", "[EOS]", "[e~["))
# What a model of code writes after a complete text: padding, another repository, another file. They stay words.
CODE_ENDS = frozenset((
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>", "<REPO>"),
    "<|file_sep|>",
))  # fmt: skip
_HTML_TAGS = frozenset(("<s>", "</s>"))
KNOWN_TOKENS = ENDS | _ADDED_ENDS | CODE_ENDS | _HTML_TAGS | {"<|channel|>"}
"""Every name whose presence matters here."""

_TURNS_OF_PHI = frozenset(("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"))


def ends(names: Collection[str]) -> frozenset[str]:
    """The tokens of a vocabulary that end an answer.

    Where answers are messages in channels, <|end|> ends a message, and more of the answer follows.
    """
    end_tokens = (ENDS | _ADDED_ENDS).intersection(names) - words(names)
    in_channels = ("<|return|>" in end_tokens and "<|channel|>" in names) or {"<|calls|>", "<|flush|>"} <= end_tokens
    return end_tokens - {"<|end|>"} if in_channels else end_tokens


def words(names: Collection[str]) -> frozenset[str]:
    """The tokens that are words here and control tokens elsewhere: Gemma's vocabularies have tags of HTML."""
    return _HTML_TAGS if "<end_of_turn>" in names or "<turn|>" in names else frozenset()


def begins_with_bos(family: str, names: Collection[str], flag: object, default: bool) -> bool:
    """Whether sequences begin with BOS. flag: what the file says, if it is a truth value; default: if it says nothing.

    Gemma 4's files say that they do not, and its base models write nothing of use without it.
    """
    if family.startswith("gemma4") or "<turn|>" in names:
        return True
    return flag if isinstance(flag, bool) else default


def class_adds_bos(name: str, bos: str | None) -> bool:
    """Whether a tokenizer begins sequences with BOS though tokenizer.json does not. name: transformers' class.

    Llama 2's class adds it in code; Llama 3's first files had no post-processor to say so.
    """
    return name.startswith("LlamaTokenizer") or bos == "<|begin_of_text|>"


def white_space(family: str, model: str, kind: str, control: Collection[str]) -> dict[str, Edges]:
    """The control tokens of a GGUF file that remove white space around them; its vocabulary has no flag for it.

    family: the architecture. model: the name of the model. kind: the kind of vocabulary (`tokenizer.ggml.model`).
    """
    if kind == "t5" and "<mask>" in control:  # XLM-R's
        return {"<mask>": Edges(before=SPACE)}
    if family != "phi3" and "phi3" not in re.sub("[-_. ]", "", model.lower()):
        return {}
    if kind != "llama":  # Phi-4's: of the many others, none
        return {name: Edges(after=SPACE) for name in _TURNS_OF_PHI.intersection(control)}
    return {name: Edges(after=SPACE) for name in control if name not in ("<unk>", "<s>", "<|endoftext|>")}
