"""The flags of the speed measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polarlm.bench.command import TYPES_HELP
from polarlm.bench.result import Output
from polarlm.bench.speed import peers
from polarlm.engine.config import AUTO, hub_setting, model_setting, setting

PROGRAM = ("polarlm", "speed")
RATES = "rates"  # a part of the comparison


@dataclass(frozen=True)
class Options:
    """The flags of the measurement."""

    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()
    only: str | None = setting(
        None,
        "--only",
        choices=(RATES,),
        help="measure prompts and generation, and neither several sequences nor memory",
    )
    types: str = setting(
        "balanced,quality,compact,f16",
        "--types",
        metavar="TYPES",
        help=f"{TYPES_HELP}; the first decides the threads, and runs several sequences",
    )
    input_bits: str = setting(
        AUTO, "--input-bits", metavar="BITS,…", help="as in the chat: one or several, with a column of ours for each"
    )
    replayable: bool = setting(
        False, "--replayable", help="measure each of our types as with --replayable of a server, too"
    )
    session: int | None = setting(
        None, "--session", metavar="N", help="measure an agent's session of N turns over the chat API, and nothing else"
    )
    peer: str | None = setting(
        None,
        "--peer",
        metavar="NAME[=PATH],…",
        help=f"engines to compare with: {', '.join(peers.every())}. PATH is a Python that has it; in a session a "
        f"server's program with its flags, such as llama-server (default: {peers.DEFAULT}, none in a session)",
    )
    peer_types: str | None = setting(
        None, "--peer-types", metavar="TYPES", help="caches of the peers, or none; else all that each has"
    )
    device: str = setting(
        "auto", "--device", choices=("auto", "cpu", "cuda"), help="where the model runs; auto takes a GPU if it can"
    )
    threads: str = setting(
        "1,2", "--threads", "-t", metavar="N,N", help="numbers of CPU threads; the best one counts for generation"
    )
    prompt: str = setting("256,2048", "--prompt", metavar="N,N", help="tokens of the prompts")
    depth: str = setting("2048,4096,8192", "--depth", metavar="N,N", help="tokens of context to generate after")
    repeat: int = setting(
        3, "--repeat", metavar="N", help="runs of each kind; their median counts, a peer's if two of them agree"
    )
    minutes: float | None = setting(
        None, "--minutes", metavar="M", help="leave out what would take longer, from the first lengths to the last"
    )


GROUPS: Mapping[str, type] = {"Speed": Options, "Output": Output}
