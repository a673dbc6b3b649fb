"""Names of models on the hub: `hf:user/repo`, with a revision and a quantization if wanted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from polarlm.model_loaders.errors import LoadError

PREFIX = "hf:"
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^\s:@]+))?(:(?P<quantization>\w[\w.-]*))?", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """A model on the hub. Without a revision, the newest is meant; without a quantization, one is chosen."""

    repo: str  # "user/repo"
    revision: str | None = None  # a branch, a tag or a commit
    quantization: str | None = None  # a GGUF file's quantization, or its name

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.quantization}" if self.quantization else "")

    @property
    def short(self) -> str:
        """The repository's name without its owner."""
        return self.repo.partition("/")[2]


def parse(text: str) -> HubName:
    """The model that `[hf:]user/repo[@revision][:quantization]` names. Raises LoadError.

    >>> parse("hf:user/repo@v1:Q4_K_M")
    HubName(repo='user/repo', revision='v1', quantization='Q4_K_M')
    """
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if match is None:
        raise LoadError(
            f"{text!r} does not name a model on the hub: write user/repo, user/repo:Q4_K_M for one of its GGUF files, "
            "or user/repo@main for one of its revisions."
        )
    return HubName(**match.groupdict())
