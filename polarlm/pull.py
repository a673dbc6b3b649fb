"""`polarlm pull MODEL`: downloads a model from the Hugging Face hub ahead of its first use.

Standard output gets the model's path. Exit codes: 0; 2 for a bad flag or a model that cannot be fetched; 130 after
Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from polarlm.engine.backends.select import select
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.placement.wanted import fits_beside
from polarlm.engine.state.plan import format_bytes
from polarlm.model_loaders import hub
from polarlm.model_loaders.files.gguf_file import part_paths


@dataclass(frozen=True)
class PullConfig:
    name: str = setting(
        MISSING,
        "MODEL",
        help=(
            "user/repo of the Hugging Face hub, user/repo:Q4_K_M for one of its GGUF files, user/repo@v1 for a revision"
        ),
    )
    device: str = setting(
        "auto",
        "--device",
        choices=("auto", "cpu", "cuda"),
        help="whose memory a GGUF file has to fit in, if none is named; auto takes a GPU if it can use one",
    )
    ctx_size: int = setting(
        0, "-c", "--ctx-size", metavar="N", help="tokens of context that have to fit; 0 takes the model's, up to 16,384"
    )


GROUPS: Mapping[str, type] = {"Model": PullConfig}


@command
def main(argv: Sequence[str]) -> None:
    (asked,) = parse(
        argv, GROUPS, prog="polarlm pull", description="Download a model from the Hugging Face hub.", checks={}
    )
    name = hub.parse(asked.name)
    config = settle(None, EngineConfig(device=asked.device, ctx_size=asked.ctx_size), {})
    ops, _ = select(config.device, config.threads)
    path = hub.fetch(name, fits_beside(config, ops), note)
    if path.is_file() and name.quantization is None:
        name = replace(name, quantization=hub.quantization_of(path.name))
    note(f"{name} takes {format_bytes(_size(path))} on the disk. To talk to it: polarlm chat -hf {name}")
    print(path)


def _size(path: Path) -> int:
    """Bytes of the model's files; a folder of safetensors may also contain GGUF files, which do not count."""
    files = part_paths(path) if path.is_file() else [file for file in path.iterdir() if file.suffix != ".gguf"]
    return sum(file.stat().st_size for file in files)
