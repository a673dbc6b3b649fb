"""What a request may ask for, as frozen dataclasses: how tokens are chosen, and how its prompt is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polarlm.engine import limits
from polarlm.engine.config import setting


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when generation ends. None means the model's default, else the one in brackets.

    Raises EngineError, naming the field, for a value of a wrong type or out of range.
    """

    max_tokens: int = setting(
        -1, "-n", "--predict", metavar="N", help="most tokens to generate; -1 continues to the end of the context"
    )
    temperature: float | None = setting(None, "--temp", metavar="T", help="0 is greedy [the model's, else 0.8]")
    top_k: int | None = setting(
        None, "--top-k", metavar="K", help="keep the K best tokens; 0 keeps all [the model's, else 40]"
    )
    top_p: float | None = setting(
        None,
        "--top-p",
        metavar="P",
        help="keep the best tokens that together have probability P [the model's, else 0.95]",
    )
    min_p: float | None = setting(
        None, "--min-p", metavar="P", help="drop tokens less likely than P times the best [the model's, else 0.05]"
    )
    repeat_penalty: float | None = setting(
        None,
        "--repeat-penalty",
        metavar="X",
        help="divide the logits of the last 64 tokens; 1 is off [the model's, else 1]",
    )
    presence_penalty: float = setting(
        0.0, "--presence-penalty", metavar="X", help="subtract X from tokens among the last 64"
    )
    frequency_penalty: float = setting(
        0.0, "--frequency-penalty", metavar="X", help="subtract X for each time a token is among the last 64"
    )
    repeat_last_n: int = setting(64, help="last tokens that these three penalties look at, 64 at most")
    dry_multiplier: float | None = setting(
        None,
        "--dry-multiplier",
        metavar="X",
        help="DRY: subtract X · base^n from a token that would continue a repetition n tokens longer than allowed; "
        "0 is off [the model's, else 0]",
    )
    dry_base: float = setting(1.75, "--dry-base", metavar="B", help="the base of DRY")
    dry_allowed_length: int = setting(
        2, "--dry-allowed-length", metavar="N", help="tokens that may be repeated before DRY looks at what follows"
    )
    dry_penalty_last_n: int | None = setting(
        None,
        "--dry-penalty-last-n",
        metavar="N",
        help="last tokens that DRY looks at; 0 is off, -1 all of the context, -2 the answer alone "
        "[the model's, else -1]",
    )
    dry_sequence_breakers: tuple[str, ...] | None = setting(
        None,
        "--dry-sequence-breaker",
        metavar="TEXT",
        text=True,
        help="text across which DRY sees no repetitions; may be repeated "
        "[the model's, else line end, colon, quotation mark, asterisk]",
    )
    logit_bias: dict[int, float] = setting(
        dict,
        "--logit-bias",
        metavar="ID(+|-)BIAS",
        help="add BIAS to a token's logit, as in 42+1.5 or 42-inf; may be repeated",
    )
    seed: int = setting(-1, "-s", "--seed", metavar="N", help="-1 takes a different seed each time")
    stop: tuple[str, ...] = setting(
        (),
        "-r",
        "--reverse-prompt",
        metavar="TEXT",
        text=True,
        help="end the answer where TEXT appears; may be repeated",
    )
    ignore_eos: bool = setting(False, "--ignore-eos", help="continue after an end-of-sequence token")
    logprobs: int | None = setting(
        None, help="return the log-probability of each generated token, and of this many most likely tokens (0 to 20)"
    )
    prompt_logprobs: int | None = setting(
        None,
        help="return the log-probability of each token of the prompt after the first, and of this many most likely "
        "tokens (0 to 20); the whole prompt is computed for it",
    )
    stop_token_ids: tuple[int, ...] = setting((), help="end the answer at these tokens, as at EOS tokens")
    min_tokens: int = setting(0, help="fewest tokens to generate before EOS or one of stop_token_ids may be drawn")
    schema: dict[str, Any] | str | None = setting(
        None, help="the answer is JSON of this schema, a dict or its text; {} allows any JSON; needs the extra json"
    )
    grammar: str | None = setting(
        None, help="the answer matches this grammar: llguidance's Lark, or llama.cpp's GBNF; needs the extra json"
    )
    regex: str | None = setting(None, help="the whole answer matches this regular expression; needs the extra json")
    shown_tokens: tuple[int, ...] = setting((), help="control tokens whose names are part of the text")
    spec_type: str | None = setting(None, help=f"{', '.join(limits.DRAFTS)}: in place of the engine's")
    draft_max: int | None = setting(None, help="most tokens of a draft, in place of the engine's; 0 drafts none")

    def __post_init__(self) -> None:
        limits.check(limits.SAMPLING, vars(self))
        limits.check_one(limits.CONSTRAINTS, vars(self))

    @property
    def is_constrained(self) -> bool:
        """Whether a schema, a grammar or a regular expression constrains the answer."""
        return any(getattr(self, name) is not None for name in limits.CONSTRAINTS)


@dataclass(frozen=True)
class PromptOptions:
    """How a prompt is tokenized, which cached tokens it may reuse, and what else is returned.

    Raises EngineError, naming the field, for a value of a wrong type.
    """

    parse_special: bool = False  # names of control tokens in a text become those tokens; in messages they never do
    cache_prompt: bool = True  # False: compute the whole prompt, without the prefix cache
    lora: str = ""  # the name of an adapter; empty for none
    lora_scale: float = 1.0  # multiplies what it adds
    cache_salt: str = ""  # requests reuse each other's K/V only if they have the same salt
    continue_final_message: bool = False  # the model continues the last message, which is the assistant's
    tools: tuple[Mapping[str, Any], ...] = ()  # the functions that the model may call, in OpenAI's form
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # more variables of the chat template
    # Return the prompt's embedding: the "mean" of all tokens' final hidden states, which the model's head reads, or the
    # state of the "last" token or of the first ("cls"), scaled to length 1. A token's state depends on the token and
    # those before it, in an encoder on all. The whole prompt is computed, and the prefix cache keeps none of it. A text
    # gets the token that its tokenizer closes such texts with, if there is one.
    pooling: str | None = None
    prompt_name: str | None = None  # of an embedding: the prompt of the model's files that goes before the text
    dimensions: int | None = None  # of an embedding: keep the first ones, scaled to length 1 again; None keeps all
    truncate: bool = False  # of an embedding: cut a prompt that is longer than the context, in place of an error

    def __post_init__(self) -> None:
        limits.check(limits.OPTIONS, vars(self))
