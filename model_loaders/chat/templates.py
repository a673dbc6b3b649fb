"""Chat templates, which turn a conversation into the text that a model was trained on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.channels import Channels, find_channels
from polarlm.model_loaders.chat.find_calls import find_call_format
from polarlm.model_loaders.chat.reasoning import (
    QUESTION,
    QUESTION_WITH_CALL,
    Place,
    Tags,
    find_ending,
    find_tags,
    knows_effort,
    place_of_answer,
)
from polarlm.model_loaders.chat.template_polyfills import MOST_SHAPES, adapt_conversation
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import describe, read_json, usable
from polarlm.model_loaders.files.gguf_file import GgufFile, Strings
from polarlm.model_loaders.files.repository import TEMPLATE, TOOL_TEMPLATE, companion_in, repository_of
from polarlm.model_loaders.forks import cached_property
from polarlm.model_loaders.limited_process import LimitedProcess, ProcessFailed
from polarlm.model_loaders.recent import Recent
from polarlm.model_loaders.tokenizers._special import token_string

_LOG = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("template_worker.py")
_MOST_VARIABLES = 64  # choices of variables for which the place of an answer is kept

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


class ChatTemplate:
    """A Jinja template that turns messages into the text a model was trained on."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "", is_default: bool = False) -> None:
        source = source.removeprefix("\ufeff")  # a byte order mark would stand in every prompt
        self.source = source
        self.is_default = is_default
        # The plain default has no token that ends an answer: a base model would write the user's next message as well.
        self.stops: tuple[str, ...] = ("\nUser:",) if source == _PLAIN else ()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._process = LimitedProcess(_WORKER, source)
        self._places: Recent[str, Place] = Recent(_MOST_VARIABLES)
        self.changes: Recent[str, tuple[int, bool]] = Recent(MOST_SHAPES)  # see `adapt_conversation`

    def with_text(self, old: str, new: str) -> ChatTemplate:
        """The template with `new` instead of the text `old`."""
        return ChatTemplate(self.source.replace(old, new), is_default=self.is_default, **self._tokens)

    def with_file(self, file: Path) -> ChatTemplate:
        """The template in a file, with the tokens of this one. Raises LoadError."""
        return ChatTemplate(_text(file, "give a Jinja template"), is_default=False, **self._tokens)

    def missing_note(self, model: str) -> str | None:
        """A sentence for users of `model` if it has no template of its own, on how messages are written; else None."""
        if not self.is_default:
            return None
        how = 'as lines of "User:" and "Assistant:"' if self.source == _PLAIN else "in ChatML, whose tokens it has"
        return (
            f"note: {model} has no chat template: it may have been made to continue text, not to answer. Messages are "
            f"written {how}. For answers, take a model with Instruct or Chat in its name; polarlm chat -no-cnv and "
            "/v1/completions continue text"
        )

    @cached_property
    def calls(self) -> CallFormat:
        """How the model writes tool calls. Raises LoadError."""
        return find_call_format(self.render_each)

    @cached_property
    def channels(self) -> Channels | None:
        """How the model writes an answer of several messages; None if an answer is one. Raises LoadError."""
        return find_channels(self.render_each)

    @cached_property
    def tags(self) -> Tags | None:
        """The tags around the model's reasoning; None if the template knows of none. Raises LoadError."""
        if self.channels is not None:
            return Tags(self.channels.header(self.channels.reasoning), self.channels.end)
        return find_tags(self.render_each)

    @cached_property
    def reasoning_ending(self) -> str:
        """The text that ends reasoning in tags, with the white space around the closing tag. Raises LoadError."""
        assert self.tags is not None
        return find_ending(self.render_each, self.tags)

    @cached_property
    def has_effort(self) -> bool:
        """Whether the template tells the model how much to reason (`reasoning_effort`). Raises LoadError."""
        return knows_effort(self.render_each)

    def place_of_answer(self, variables: Mapping[str, object], *, after_result: bool = False) -> Place:
        """Where an answer begins if the template gets these variables. Raises LoadError.

        "before" its reasoning; "inside", if the prompt ends with the opening tag; "after", if it has no reasoning.
        after_result: whether the last message is the result of a call, not a question.
        """
        if self.tags is None:
            return "after"
        key = json.dumps([variables, after_result], sort_keys=True)
        if (place := self._places.get(key)) is None:
            messages = (
                adapt_conversation(self, QUESTION_WITH_CALL, (), variables).messages if after_result else QUESTION
            )
            place = place_of_answer(self.render_each, self.tags, variables, messages)
            self._places.put(key, place)
        return place

    def render_each(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], **variables: object
    ) -> list[str | LoadError]:
        """Each conversation as text with the prompt for an answer, or the error of a template that refuses it.

        The template's process is asked once. `variables` are passed to the template ("add_generation_prompt",
        "enable_thinking", ...). Templates get reasoning by both of the names that they have for it, and texts as lists
        of parts if they take no others. Raises LoadError if the renderings together need too much time or memory.
        """
        in_parts = self._takes_parts_alone
        return self._render(
            [[_template_message(one, in_parts) for one in messages] for messages in conversations], variables
        )

    @cached_property
    def _takes_parts_alone(self) -> bool:
        """Whether the template leaves out or refuses a text that is not in a list of parts."""
        question = QUESTION[0]
        text, parts = self._render([[question], [_template_message(question, in_parts=True)]], {})
        as_text, as_parts = (
            isinstance(describe, str) and question["content"] in describe for describe in (text, parts)
        )
        return as_parts and not as_text

    def _render(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], variables: Mapping[str, object]
    ) -> list[str | LoadError]:
        constants = {**self._tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            answers = self._process.ask([{**constants, **variables, "messages": one} for one in conversations])
        except ProcessFailed as error:
            raise _template_error(str(error)) from error
        return [_template_error(answer["error"]) if "error" in answer else answer["text"] for answer in answers]


def _template_error(reason: str) -> LoadError:
    return LoadError(f"The model's chat template failed: {reason.rstrip('.')}.")


def _template_message(message: Mapping[str, Any], in_parts: bool) -> dict[str, Any]:
    """A message as the template gets it. in_parts: with its text in a list of parts."""
    fields, content = dict(message), message.get("content")
    if message.get("reasoning_content") is not None:
        fields["thinking"] = message["reasoning_content"]
    if in_parts and isinstance(content, str):
        fields["content"] = [{"type": "text", "text": content}]
    return fields


def for_folder(folder: Path, tokenizer_config: Mapping[str, object]) -> ChatTemplate:
    """The template of a folder: of chat_template.jinja, tokenizer_config.json or chat_template.json, else a default.

    Where there is one for tools, that is taken for requests with tools. Raises LoadError if a file exists but cannot be
    read.
    """
    file = companion_in(folder, TEMPLATE)
    if file.is_file():
        tool_file = companion_in(folder, TOOL_TEMPLATE)
        source: str | None = _join(_text(file), _text(tool_file) if tool_file.is_file() else None)
    else:
        file = companion_in(folder, "tokenizer_config.json")
        source = _named_template(file, tokenizer_config.get("chat_template"))
    if source is None:
        file = companion_in(folder, "chat_template.json")
        source = _named_template(file, (usable(lambda: read_json(file, required=False)) or {}).get("chat_template"))
    vocabulary = companion_in(folder, "tokenizer.json")
    spellings = json.dumps(tokenizer_config) + (_text(vocabulary) if not source and vocabulary.is_file() else "")
    return _template(
        source,
        bos_token=token_string(tokenizer_config.get("bos_token")) or "",
        eos_token=token_string(tokenizer_config.get("eos_token")) or "",
        speaks_chatml="<|im_start|>" in spellings,
    )


def for_gguf(gguf: GgufFile) -> ChatTemplate:
    """The template inside a GGUF file, else one of its repository, else a default."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, (list, Strings)) else ()

    def spelling(name: str) -> str:
        token_id = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return str(tokens[token_id]) if isinstance(token_id, int) and 0 <= token_id < len(tokens) else ""

    names = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    values = {name: gguf.metadata[key] for name, key in names.items() if key in gguf.metadata}
    source = _named_template(gguf.path, values if len(values) > 1 else next(iter(values.values()), None))
    if source is None and (file := companion_in(repository_of(gguf.path), TEMPLATE)).is_file():
        source = _text(file)
    return _template(
        source,
        bos_token=spelling("bos"),
        eos_token=spelling("eos"),
        speaks_chatml=not source and "<|im_start|>" in tokens,
    )


def _template(source: str | None, *, bos_token: str, eos_token: str, speaks_chatml: bool) -> ChatTemplate:
    text = source or (_CHATML if speaks_chatml else _PLAIN)
    return ChatTemplate(text, bos_token=bos_token, eos_token=eos_token, is_default=not source)


def _named_template(file: Path, value: object) -> str | None:
    """The template for chats and for tools in `value`, which is text, or named templates; None, with a warning, if it
    is neither."""
    source = value
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, Mapping)]
        source = {str(entry.get("name")): entry.get("template") for entry in entries}
    tool_use = None
    if isinstance(source, Mapping):
        source, tool_use = source.get("default", next(iter(source.values()), None)), source.get("tool_use")
    if source is None or isinstance(source, str):
        return _join(source, tool_use)
    _LOG.warning("%s: chat_template is %s, which is no text; it is left out", file, describe(value))
    return None


def _join(source: str | None, tool_use: object) -> str | None:
    """A template that is `tool_use` for requests with tools."""
    if source is None or not isinstance(tool_use, str) or tool_use == source:
        return source
    for_tools, for_others = (one.removeprefix("\ufeff").removesuffix("\n") for one in (tool_use, source))
    return f"{{% if tools %}}{for_tools}{{% else %}}{for_others}{{% endif %}}"


def _text(file: Path, advice: str = "download it again") -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file} cannot be read ({error}): {advice}.") from error
