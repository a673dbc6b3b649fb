"""What a request may ask for, as frozen dataclasses: how tokens are chosen, and how its prompt is read.

SamplingParams is the table of sampling options: flags, server, page, lm-eval and the defaults read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from polarlm.engine import limits
from polarlm.engine.config import Settings, setting
from polarlm.engine.limits import Numbers, Valid

_TEXTS = "a tuple of non-empty strings"
_LOGPROBS = (
    Numbers(0, limits.MOST_LOGPROBS, whole=True, optional=True),
    f"None, or a whole number from 0 to {limits.MOST_LOGPROBS}",
)
_PENALTY = Numbers(-1e3, 1e3), "a number from -1000 to 1000"
_SHARE = Numbers(0, 1), "a number from 0 to 1"
_WHOLE = Numbers(0, whole=True), "a whole number from 0 up"


def option(
    default: Any,
    valid: Valid,
    *flags: str,
    json: tuple[str, ...] | None = None,
    page: str | None = None,
    **metadata: Any,
) -> Any:
    """A field of SamplingParams, with its valid values and the names that it has elsewhere.

    json: the fields of a request's JSON, the last one counts, if they are not the option's name; () if the
    server reads the option in a way of its own. page: its label on the chat page. flags, metadata: as in `setting`.
    """
    return setting(default, *flags, valid=valid, json=json, page=page, **metadata)


@dataclass(frozen=True)
class SamplingParams(Settings):
    """How the next token is chosen, and when generation ends. None means the model's default, else the one in brackets.

    Raises EngineError, naming the field, for a value of a wrong type or out of range.
    """

    max_tokens: int | None = option(
        None,
        (Numbers(-1, whole=True, optional=True), "a whole number; -1 is no limit"),
        "-n",
        "--predict",
        json=("n_predict", "max_tokens", "max_completion_tokens"),
        metavar="N",
        help="most tokens to generate; -1 continues to the end of the context [the model's, else -1]",
        elsewhere=("num_predict", "max_gen_len"),
    )
    temperature: float | None = option(
        None,
        (Numbers(0, 1e4, optional=True), "a number from 0 (greedy) up"),
        "--temp",
        page="Temperature",
        metavar="T",
        help="0 is greedy [the model's, else 0.8]",
        elsewhere=("do_sample",),
    )
    top_k: int | None = option(
        None,
        (Numbers(0, whole=True, optional=True), "a whole number; 0 keeps all"),
        "--top-k",
        page="Top k",
        metavar="K",
        help="keep the K best tokens; 0 keeps all [the model's, else 40]",
    )
    top_p: float | None = option(
        None,
        (Numbers(1e-9, 1, optional=True), "a number above 0 and at most 1"),
        "--top-p",
        page="Top p",
        metavar="P",
        help="keep the best tokens that together have probability P [the model's, else 0.95]",
    )
    min_p: float | None = option(
        None,
        (Numbers(0, 1, optional=True), "a number from 0 to 1"),
        "--min-p",
        page="Min p",
        metavar="P",
        help="drop tokens less likely than P times the best [the model's, else 0.05]",
    )
    top_n_sigma: float = option(
        -1.0,
        (Numbers(-1e3, 1e3), "a number from -1000 to 1000; 0 and less are off"),
        "--top-nsigma",
        "--top-n-sigma",
        json=("nsigma", "top_n_sigma"),
        metavar="N",
        help="drop tokens more than N standard deviations of the logits below the best; 0 and less are off",
    )
    xtc_probability: float = option(
        0.0,
        _SHARE,
        "--xtc-probability",
        metavar="P",
        help="XTC: how often all tokens that reach the threshold are dropped, but for the least likely; 0 is off",
    )
    xtc_threshold: float = option(
        0.1, _SHARE, "--xtc-threshold", metavar="P", help="least probability of tokens for XTC; above 0.5 is off"
    )
    repeat_penalty: float | None = option(
        None,
        (Numbers(1e-3, 1e3, optional=True), "a positive number; 1 is off"),
        "--repeat-penalty",
        json=("repetition_penalty", "repeat_penalty"),
        page="Repeat penalty",
        metavar="X",
        help="divide the logits of the last 64 tokens; 1 is off [the model's, else 1]",
    )
    presence_penalty: float = option(
        0.0, _PENALTY, "--presence-penalty", metavar="X", help="subtract X from tokens among the last 64"
    )
    frequency_penalty: float = option(
        0.0,
        _PENALTY,
        "--frequency-penalty",
        metavar="X",
        help="subtract X for each time a token is among the last 64",
    )
    repeat_last_n: int = option(
        64,
        (Numbers(0, limits.PENALTY_WINDOW, whole=True), f"a whole number from 0 to {limits.PENALTY_WINDOW}"),
        help="last tokens that these three penalties look at, 64 at most",
    )
    dry_multiplier: float | None = option(
        None,
        (Numbers(0, 1e3, optional=True), "a number from 0 (off) to 1000"),
        "--dry-multiplier",
        page="Repeats (DRY)",
        metavar="X",
        help="DRY: subtract X · base^n from a token that would continue a repetition n tokens longer than allowed; "
        "0 is off [the model's, else 0]",
    )
    dry_base: float = option(
        1.75, (Numbers(1, 1e3), "a number from 1 to 1000"), "--dry-base", metavar="B", help="the base of DRY"
    )
    dry_allowed_length: int = option(
        2,
        _WHOLE,
        "--dry-allowed-length",
        metavar="N",
        help="tokens that may be repeated before DRY looks at what follows",
    )
    dry_penalty_last_n: int | None = option(
        None,
        (
            Numbers(-2, whole=True, optional=True),
            "a whole number; 0 is off, -1 the whole context, -2 the answer alone",
        ),
        "--dry-penalty-last-n",
        metavar="N",
        help="last tokens that DRY looks at; 0 is off, -1 all of the context, -2 the answer alone "
        "[the model's, else -1]",
    )
    dry_sequence_breakers: tuple[str, ...] | None = option(
        None,
        (lambda value: value is None or limits.is_stop_list(value), _TEXTS),
        "--dry-sequence-breaker",
        metavar="TEXT",
        text=True,
        help="text across which DRY sees no repetitions; may be repeated "
        "[the model's, else line end, colon, quotation mark, asterisk]",
    )
    logit_bias: dict[int, float] = option(
        dict,
        (limits.is_bias, "a number for each token id, or -inf, which bans the token"),
        "--logit-bias",
        json=(),
        metavar="ID(+|-)BIAS",
        help="add BIAS to a token's logit, as in 42+1.5 or 42-inf; may be repeated",
    )
    seed: int = option(
        -1,
        (Numbers(-1, whole=True), "a whole number from 0 up; -1 takes a different one each time"),
        "-s",
        "--seed",
        metavar="N",
        help="-1 takes a different seed each time",
        elsewhere=("random_seed",),
    )
    stop: tuple[str, ...] = option(
        (),
        (limits.is_stop_list, _TEXTS),
        "-r",
        "--reverse-prompt",
        metavar="TEXT",
        text=True,
        help="end the answer where TEXT appears; may be repeated",
        elsewhere=("stop_sequences", "stop_strings"),
    )
    stop_anywhere: bool = option(
        False, (limits.is_flag, "True or False"), help="look for stop texts in reasoning and calls, too, and in tags"
    )
    ignore_eos: bool = option(
        False, (limits.is_flag, "True or False"), "--ignore-eos", help="continue after an end-of-sequence token"
    )
    logprobs: int | None = option(
        None,
        _LOGPROBS,
        json=(),
        help="return the log-probability of each generated token, and of this many most likely tokens (0 to 20)",
    )
    prompt_logprobs: int | None = option(
        None,
        _LOGPROBS,
        json=(),
        help="return the log-probability of each token of the prompt after the first, and of this many most likely "
        "tokens (0 to 20); the whole prompt is computed for it",
    )
    stop_token_ids: tuple[int, ...] = option(
        (), (limits.is_id_list, "a tuple of token ids"), help="end the answer at these tokens, as at EOS tokens"
    )
    min_tokens: int = option(
        0, _WHOLE, help="fewest tokens to generate before EOS, one of stop_token_ids or a stop text may end the answer"
    )
    schema: dict[str, Any] | str | None = option(
        None,
        (lambda value: value is None or isinstance(value, (dict, str)), "a JSON schema: a dict, or its text"),
        json=(),
        help="the answer is JSON of this schema, a dict or its text; {} allows any JSON; needs the extra json",
        elsewhere=("guided_json", "response_format"),
    )
    grammar: str | None = option(
        None,
        (lambda value: value is None or isinstance(value, str), "the text of a grammar"),
        json=(),
        help="the answer matches this grammar: llguidance's Lark, or llama.cpp's GBNF; needs the extra json",
    )
    regex: str | None = option(
        None,
        (lambda value: value is None or isinstance(value, str), "a regular expression"),
        json=(),
        help="the whole answer matches this regular expression; needs the extra json",
        elsewhere=("guided_regex",),
    )
    shown_tokens: tuple[int, ...] = option(
        (), (limits.is_id_list, "a tuple of token ids"), json=(), help="control tokens whose names are part of the text"
    )
    reasoning_budget: int = option(
        -1,
        (Numbers(-1, whole=True), "a whole number from 0 up; -1 is no limit"),
        "--reasoning-budget",
        json=("thinking_token_budget", "reasoning_budget_tokens"),
        page="Reasoning tokens",
        metavar="N",
        help="most tokens of reasoning, after which the answer begins; 0 ends it at once, -1 is no limit",
        elsewhere=("thinking_budget", "budget_tokens"),
    )
    spec_type: str | None = option(
        None,
        (
            lambda value: value is None or value in limits.DRAFT_NAMES,
            f"None, or one of {', '.join(limits.DRAFTS)}",
        ),
        json=("speculative.type",),
        help=f"{', '.join(limits.DRAFTS)}: in place of the engine's",
    )
    draft_max: int | None = option(
        None,
        (
            Numbers(0, limits.MOST_DRAFTED, whole=True, optional=True),
            f"None, or a whole number from 0 to {limits.MOST_DRAFTED}",
        ),
        json=("speculative.n_max",),
        help="most tokens of a draft, in place of the engine's; 0 drafts none",
    )

    def __post_init__(self) -> None:
        limits.check(SAMPLING, vars(self))
        limits.check_one_constraint(vars(self))

    @property
    def is_constrained(self) -> bool:
        """Whether a schema, a grammar or a regular expression constrains the answer."""
        return any(getattr(self, name) is not None for name in limits.CONSTRAINTS)


OPTIONS = {option.name: option.metadata for option in fields(SamplingParams)}  # field → what `option` says of it
SAMPLING: limits.Limits = {name: option["valid"] for name, option in OPTIONS.items()}


@dataclass(frozen=True)
class PromptOptions(Settings):
    """How a prompt is tokenized, which cached tokens it may reuse, and what else is returned.

    Raises EngineError, naming the field, for a value of a wrong type.
    """

    parse_special: bool = False  # names of control tokens in a text become those tokens; in messages they never do
    cache_prompt: bool = True  # False: compute the whole prompt, without the prefix cache
    lora: str = ""  # the name of an adapter; empty for none
    lora_scale: float = 1.0  # multiplies what it adds
    cache_salt: str = ""  # requests reuse each other's K/V only if they have the same salt
    keep_seconds: int = 0  # a disk tier removes what this request read as if it had been used so much later
    priority: int = 0  # requests of the least are served first, and then in order of arrival
    replayable: bool = False  # refuse the request unless the engine has `replayable`
    pack: str = ""  # the name of a pack, whose messages or tokens precede the prompt; empty for none
    continue_final_message: bool = False  # the model continues the last message, which is the assistant's
    tools: tuple[Mapping[str, Any], ...] = ()  # the functions that the model may call, in OpenAI's form
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # more variables of the chat template
    # Return the prompt's embedding: the "mean" of all tokens' final hidden states, which the model's head reads, or the
    # state of the "last" token or of the first ("cls"), scaled to length 1. A token's state depends on the token and
    # those before it, in an encoder on all. The whole prompt is computed, and the prefix cache keeps none of it. A text
    # gets the token that its tokenizer closes such texts with, if there is one.
    pooling: str | None = None
    # Further options of embeddings:
    prompt_name: str | None = None  # the prompt of the model's files that goes before the text
    dimensions: int | None = None  # keep the first ones, scaled to length 1 again; None keeps all
    truncate: bool = False  # cut a prompt that is longer than the context, in place of an error

    def __post_init__(self) -> None:
        limits.check(limits.OPTIONS, vars(self))
