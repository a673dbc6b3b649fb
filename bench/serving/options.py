"""The flags of the server's measurement, one set for all of its sections."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.config import hub_setting, model_setting, setting
from polarlm.server.config import KEY_VARIABLE

LOAD, AGENTS, PRESSURE, EDITS = "load", "agents", "pressure", "edits"
FIRST_TOKEN, BETWEEN_TOKENS = "first token", "between two tokens"  # quantities, in seconds
XLLAMACPP = "xllamacpp"


@dataclass(frozen=True)
class Options:
    """The flags: what is measured, and which server."""

    only: str = setting(
        LOAD,
        "--only",
        choices=(LOAD, AGENTS, PRESSURE, EDITS),
        help=f"{LOAD}: speed and latencies under load; {AGENTS}: first tokens of conversations that come back, also "
        f"after a restart or elsewhere; {PRESSURE}: first tokens of more conversations than the KV store has room for; "
        f"{EDITS}: what agents have read again when they empty earlier results of tools",
    )
    url: str | None = setting(
        None,
        "--url",
        metavar="URL",
        help=f"a running server to load, with its key in {KEY_VARIABLE}; else one is started",
    )
    peer: str | None = setting(
        None,
        "--peer",
        metavar="NAME=PLACE",
        help=f"another engine's server for the same {LOAD} when ours has ended: {XLLAMACPP}=PYTHON starts llama.cpp's "
        "with a Python that has this package; NAME=URL is one that runs and takes ids at /v1/completions",
    )
    weights: str | None = model_setting(": of the server that is started")
    hf_repo: str | None = hub_setting()
    threads: int = setting(0, "--threads", metavar="N", help="CPU threads of that server; 0 follows OMP_NUM_THREADS")
    max_tokens: int | None = setting(
        None, "--max-tokens", metavar="N", help=f"tokens of an answer; 64 of a {LOAD}, else 32"
    )
    seed: int = setting(0, "--seed", metavar="N", help="of arrivals, prompts and what agents write")


@dataclass(frozen=True)
class LoadOptions:
    """The flags of a load."""

    clients: int = setting(8, "--clients", metavar="N", help="requests under way at a time, at most")
    rate: float = setting(0.7, "--rate", metavar="R", help="requests that arrive in a second, on average")
    seconds: float = setting(60.0, "--seconds", metavar="S", help="for which requests arrive")
    requests: int | None = setting(None, "--requests", metavar="N", help="requests at most")
    prompt_tokens: int = setting(128, "--prompt-tokens", metavar="N", help="tokens of a prompt after the shared ones")
    shared_prefix: int = setting(128, "--shared-prefix", metavar="N", help="tokens that all prompts begin with")
    warm_up: int = setting(0, "--warm-up", metavar="N", help="requests that are sent and answered before, all at once")


@dataclass(frozen=True)
class ConversationOptions:
    """The flags of conversations."""

    agents: int = setting(4, "--agents", metavar="N", help=f"conversations of {AGENTS} and {EDITS}")
    opening: int = setting(2000, "--opening", metavar="N", help="tokens that a conversation opens with, about")
    turn: int = setting(200, "--turn", metavar="N", help="tokens of each further turn, about")
    types: str = setting("f16,q8_0,balanced", "--types", metavar="TYPE,…", help=f"cache types of {PRESSURE}")
    kv_memory: str = setting("64M", "--kv-memory", metavar="SIZE", help=f"memory for keys and values of {PRESSURE}")
    times: str = setting(
        "2,4,8", "--times", metavar="N,…", help="conversations, as a multiple of those that fit in half precision"
    )
    rounds: int = setting(3, "--rounds", metavar="N", help=f"turns of each conversation of {PRESSURE}")
