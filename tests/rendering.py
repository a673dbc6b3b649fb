"""Chat templates of published models, and the text that one makes of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.model_loaders.errors import LoadError

TEMPLATES = Path(__file__).parent / "fixtures" / "templates"


def published(name: str) -> ChatTemplate:
    """The template of a model, which has the control tokens <s> and </s>."""
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), bos_token="<s>", eos_token="</s>")


def rendered(template: ChatTemplate, messages: Sequence[Mapping[str, str]], **variables: object) -> str:
    """Raises the error of a template that refuses the conversation."""
    (text,) = template.render_each([messages], **variables)
    if isinstance(text, LoadError):
        raise text
    return text
