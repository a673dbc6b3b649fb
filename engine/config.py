"""Settings as frozen dataclasses. Command-line flags, `--help` and docs/flags.md are generated from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

from polarlm.engine import limits

DEFAULT_CACHE_TYPE = "balanced"
AS_STORED = "as-stored"


def setting(default: Any = MISSING, *flags: str, help: str, **more: Any) -> Any:
    """A dataclass field with the names of its flag and the help for it.

    more: the other metadata that `engine.cli.flags` reads. A field without flags is not on the command line.
    """
    metadata = {"flags": flags, "help": help, **more}
    if default is dict:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """How a model is loaded and how much memory its KV store may take."""

    weights: str | None = setting(
        None,
        "--weights",
        "-m",
        "--model",
        metavar="PATH",
        help="folder of safetensors or a .gguf file; without it, the demonstration model (SmolLM2-135M-Instruct)",
    )
    hf_repo: str | None = setting(
        None,
        "-hf",
        "--hf-repo",
        metavar="USER/REPO[:QUANT]",
        help="model of the Hugging Face hub, downloaded once; of its GGUF files the named one, or the best that fits",
    )
    model_draft: str | None = setting(
        None,
        "-md",
        "--model-draft",
        metavar="PATH",
        help="a smaller model of the same vocabulary, which drafts tokens; its KV store is f16",
    )
    lora: dict[str, str] = setting(
        dict,
        "--lora",
        metavar="[NAME=]PATH[:SCALE]",
        help="an adapter that requests name: a folder of peft, a GGUF file, or hf:USER/REPO; may be repeated",
    )
    lora_merge: bool = setting(False, "--lora-merge", help="add the adapters to the weights, for all requests")
    weight_type: str = setting(
        AS_STORED,
        "--weight-type",
        metavar="TYPE",
        help="convert matrices while they are loaded, to f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or mxfp4",
    )
    device: str = setting(
        "auto",
        "--device",
        choices=("auto", "cpu", "cuda"),
        help="where the model runs; auto takes a GPU if it can use one",
    )
    ctx_size: int = setting(
        0, "-c", "--ctx-size", metavar="N", help="tokens of context; 0 takes the model's own, as far as memory allows"
    )
    cache_type: str = setting(
        DEFAULT_CACHE_TYPE,
        "--cache-type",
        metavar="TYPE",
        help="quality, balanced or compact, one type such as ring4, two as KEYS/VALUES, or auto:3.5: types by layer, "
        "measured at the first start; q8_0, q4_0, kivi4, trellis* and polarquant-online are for measuring (CPU)",
    )
    cache_type_k: str | None = setting(
        None,
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help="type of keys, in place of --cache-type; ring4@0-1,ring3.5 gives layers 0 and 1 another type",
    )
    cache_type_v: str | None = setting(
        None, "-ctv", "--cache-type-v", metavar="TYPE", help="type of values, in place of --cache-type"
    )
    kv_memory: str | None = setting(
        None,
        "--kv-memory",
        metavar="SIZE",
        help="memory for the KV store, such as 512M or 2G, for requests that run and conversations that come back; "
        "without it, as much as one context needs",
    )
    state_type: str = setting(
        "8bit",
        "--state-type",
        choices=("8bit", "5bit", "f32"),
        help="how snapshots of recurrent layers are kept, from which a conversation continues: in 8 or 5 bits, or "
        "exactly",
    )
    state_cache: str | None = setting(
        None,
        "--state-cache",
        metavar="SIZE",
        help="memory for snapshots of recurrent layers, such as 500M; without it, two for each sequence",
    )
    key_conditioning: bool = setting(
        True,
        "--no-key-conditioning",
        help="quantize keys without subtracting the mean of each block, and without calibration",
    )
    calibration: bool = setting(
        True,
        "--no-calibration",
        help="do not calibrate on a short text; round keys and values to the nearest codes",
    )
    threads: int = setting(
        0,
        "-t",
        "--threads",
        metavar="N",
        help="CPU threads; 0 follows OMP_NUM_THREADS, or else uses one for each core that the process may use",
    )
    mmap: bool = setting(True, "--no-mmap", help="read the weights file into memory instead of mapping it")
    tile_cache: str | None = setting(
        None,
        "--tile-cache",
        metavar="SIZE",
        help="on a CPU, keep packed weights in files of the cache folder, of this total size, such as 20G, and map "
        "them: later starts pack nothing, processes share their memory, and weights may exceed it",
    )
    expert_cache: str | None = setting(
        None,
        "--expert-cache",
        metavar="SIZE",
        help="on a CPU, keep this much of a mixture's experts in memory, such as 6G, and read the others from the file "
        "as they are chosen; without it, all, or if they do not fit, as many as memory leaves room for",
    )
    cpu_moe: str | None = setting(
        None,
        "--cpu-moe",
        metavar="N|auto",
        help="with a GPU, keep the experts of the first N layers in the computer's memory, where its CPU multiplies "
        "them; auto: of as many layers as do not fit on the GPU",
    )
    block_size: int = setting(64, help="tokens in a block of the KV store; a multiple of 4")
    parallel: int = setting(8, "-np", "--parallel", metavar="N", help="requests that are computed at the same time")
    prefill_share: float = setting(
        0.5,
        "--prefill-share",
        metavar="SHARE",
        help="share of the time for prefill while answers are generated, between 0 and 1",
    )
    spec_type: str = setting(
        "none",
        "--spec-type",
        choices=limits.DRAFTS,
        help="draft tokens and verify several in one step: ngram-simple drafts what followed the last occurrence of "
        "the newest tokens; draft-simple asks the draft model, and needs no other flag",
    )
    draft_max: int = setting(limits.MOST_DRAFTED, "--draft-max", metavar="N", help="most tokens of a draft, 0 to 15")
    draft_min: int = setting(0, "--draft-min", metavar="N", help="fewest tokens of a draft; shorter ones are dropped")
    spec_ngram_size_n: int = setting(
        4, "--spec-ngram-size-n", metavar="N", help="newest tokens that ngram-simple looks for"
    )
    kept_sequences: int = setting(
        4,
        help="finished sequences that the store has full-precision blocks for, at least; 0 turns the prefix cache off",
    )
    cache_disk: str | None = setting(
        None,
        "--cache-disk",
        metavar="SIZE",
        help="keep conversations on the disk, in files of this total size, such as 20G, so that none is computed "
        "again after a restart; the files reveal what was said to anyone who can read them",
    )
    cache_disk_folder: str | None = setting(
        None,
        "--cache-disk-folder",
        metavar="FOLDER",
        help="where --cache-disk keeps them; without it, in the user's cache folder",
    )
    cache_remote: str | None = setting(
        None,
        "--cache-remote",
        metavar="URL",
        help="share conversations with other machines: a server with --share-blocks, another HTTP store, or a folder",
    )
    cache_ram: str | None = setting(
        None,
        "--cache-ram",
        metavar="SIZE",
        help="with a GPU, keep conversations in this much of the computer's memory, such as 16G",
    )

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted for requests that do not say otherwise."""
        return self.spec_type != limits.DRAFTS[0] or self.model_draft is not None


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
    draft_min: int | None = setting(None, help="fewest tokens of a draft, in place of the engine's")

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
    dimensions: int | None = None  # of an embedding: keep the first ones, scaled to length 1 again; None keeps all
    truncate: bool = False  # of an embedding: cut a prompt that is longer than the context, in place of an error

    def __post_init__(self) -> None:
        limits.check(limits.OPTIONS, vars(self))
