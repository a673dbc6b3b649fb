"""The text that a chat template makes of one conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.model_loaders.errors import LoadError


def rendered(template: ChatTemplate, messages: Sequence[Mapping[str, str]], **variables: object) -> str:
    """Raises the error of a template that refuses the conversation."""
    (text,) = template.render_each([messages], **variables)
    if isinstance(text, LoadError):
        raise text
    return text
