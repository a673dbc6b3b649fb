"""The flags of the speed measurement, one set for all of its sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polarlm.bench.command import TYPES_HELP, numbers
from polarlm.bench.result import Output
from polarlm.bench.speed import peers
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import AUTO, hub_setting, model_setting, setting
from polarlm.engine.limits import DRAFTS as KINDS

PROGRAM = ("polarlm", "speed")
RATES, STARTS = "rates", "starts"  # parts of the comparison with other engines
DRAFTS, EMBEDDINGS, EXPERTS = "drafts", "embeddings", "experts"  # sections that it does not have
PARTS = "parts"  # another one, which has a flag of its own
_TOKENS = {DRAFTS: 200, EMBEDDINGS: 8192, EXPERTS: 64}


def _describe(peer: peers.Peer) -> str:
    return f"{peer.name} ({f'PATH is its {peer.program}' if peer.program else 'PATH is a Python that has it'})"


@dataclass(frozen=True)
class Options:
    """The flags of the measurements."""

    weights: str | None = model_setting(f"; for {EMBEDDINGS}, .gguf files of encoders")
    hf_repo: str | None = hub_setting()
    only: str | None = setting(
        None,
        "--only",
        choices=(RATES, STARTS, DRAFTS, EMBEDDINGS, EXPERTS),
        help=f"measure nothing but this: {RATES} of prompts and generation, or {STARTS}, both beside other engines; "
        f"{DRAFTS}, of --spec-type; {EMBEDDINGS} beside llama.cpp; {EXPERTS} that are read from the file",
    )
    parts: bool = setting(
        False, "--parts", help="measure nothing but prompts, and what their time goes to, by kind of kernel"
    )
    types: str = setting(
        "balanced,quality,compact,f16",
        "--types",
        metavar="TYPES",
        help=f"{TYPES_HELP}; the first decides the threads, runs several sequences, and is that of --parts",
    )
    input_bits: str = setting(
        AUTO, "--input-bits", metavar="BITS,…", help="as in the chat: one or several, with a column of ours for each"
    )
    replayable: bool = setting(
        False,
        "--replayable",
        help="measure each of our types as with --replayable of a server, too; with --parts only so",
    )
    peer: str = setting(
        peers.DEFAULT,
        "--peer",
        metavar="NAME[=PATH],…",
        help=f"engines to compare with: {', '.join(_describe(peer) for peer in peers.every().values())}",
    )
    peer_types: str | None = setting(
        None, "--peer-types", metavar="TYPES", help="caches of the peers, or none; else all that each has"
    )
    device: str = setting(
        "auto", "--device", choices=("auto", "cpu", "cuda"), help="where the model runs; auto takes a GPU if it can"
    )
    threads: str | None = setting(
        None,
        "--threads",
        "-t",
        metavar="N,N",
        help="numbers of CPU threads; the best one counts for generation: 1,2 if not given. "
        f"{DRAFTS}, {EXPERTS} and --parts take one number, or all threads; {EMBEDDINGS} one number, or 1",
    )
    prompt: str = setting("256,2048", "--prompt", metavar="N,N", help="tokens of the prompts")
    depth: str = setting("2048,4096,8192", "--depth", metavar="N,N", help="tokens of context to generate after")
    repeat: int = setting(
        3, "--repeat", metavar="N", help="runs of each kind; their median counts, a peer's if two of them agree"
    )
    minutes: float | None = setting(
        None, "--minutes", metavar="M", help="leave out what would take longer, from the first lengths to the last"
    )
    tokens: int | None = setting(
        None,
        "--tokens",
        metavar="N",
        help=f"tokens of an answer ({DRAFTS}: at most {_TOKENS[DRAFTS]}, {EXPERTS}: {_TOKENS[EXPERTS]}), or of all "
        f"texts ({EMBEDDINGS}: {_TOKENS[EMBEDDINGS]})",
    )
    replay: bool = setting(
        False, "--replay", help=f"{DRAFTS} of random weights: right where drafts of a real answer would be"
    )
    spec_type: str = setting(
        "ngram-simple", "--spec-type", choices=KINDS[1:], help=f"what drafts for {DRAFTS}, as in the chat"
    )
    model_draft: str | None = setting(
        None, "--model-draft", "-md", "--spec-draft-model", metavar="PATH", help="its model or head, as in the chat"
    )
    expert_cache: str = setting(
        "",
        "--expert-cache",
        metavar="SIZE,…",
        help=f"sizes for {EXPERTS}; without it, what memory leaves. all: every expert in memory",
    )

    @property
    def section(self) -> str | None:
        """What alone is measured; None for all of the comparison. Raises FlagError."""
        if self.parts and self.only:
            raise FlagError(f"--parts and --only {self.only} both say what alone is measured; leave one of them out")
        return PARTS if self.parts else self.only

    def thread_count(self, default: int = 0) -> int:
        """The number of threads of a section that has one; 0 stands for all. Raises FlagError."""
        if self.threads is None:
            return default
        counts = numbers("--threads", self.threads)
        if len(counts) > 1:
            flag = "--parts" if self.parts else f"--only {self.only}"
            raise FlagError(f"--threads {self.threads}: {flag} takes one number")
        return counts[0]

    def token_count(self) -> int:
        """--tokens, or the default of its section."""
        return self.tokens or _TOKENS[self.only or DRAFTS]


GROUPS: Mapping[str, type] = {"Speed": Options, "Output": Output}


def file_names(weights: str | None) -> str:
    """The names of model files without their endings, for the name of a result; "demo" without a model."""
    if weights is None:
        return "demo"
    return " ".join(Path(part.strip()).name.removesuffix(".gguf") for part in weights.split(","))
