"""What modules that analyse renderings of a chat template need of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from polarlm.model_loaders.errors import LoadError


class Renders(Protocol):
    """A chat template: see `model_loaders.chat.templates`."""

    def render_each(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], **variables: object
    ) -> list[str | LoadError]: ...
