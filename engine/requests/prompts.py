"""Turns a prompt, which is text, messages or ids, into checked token ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard, cast

import numpy as np

from polarlm import model_loaders
from polarlm.engine.errors import EngineError, counted, shown
from polarlm.engine.limits import RANK, check_roles
from polarlm.engine.params import PromptOptions
from polarlm.model_loaders.chat.prompt import chat_ids
from polarlm.model_loaders.chat.reasoning import Place
from polarlm.model_loaders.chat.template_polyfills import adapt_conversation
from polarlm.model_loaders.limited_process import NobodyWaits, wanted_until
from polarlm.model_loaders.tokenizers import Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Sequence[int | str]
Messages = str | Sequence[Mapping[str, Any]]  # a text: of a user's only message
Batch = list[str] | tuple[str, ...] | Sequence[Sequence[Mapping[str, Any]]] | Sequence[Sequence[int]]

_MOST_CHARACTERS = 16  # per token of the context; of a longer text, the beginning is tokenized first


@contextmanager
def as_engine_error() -> Iterator[None]:
    """Raise EngineError for what is wrong with a template or a tokenizer."""
    try:
        yield
    except ValueError as error:
        raise EngineError(str(error)) from None


@contextmanager
def read_until(gone: Callable[[], bool] | None) -> Iterator[None]:
    """Raise EngineError ("cancelled") once `gone` returns True while the process of a template or of images is at work
    or awaited. None: nobody says so here."""
    try:
        with nullcontext() if gone is None else wanted_until(gone):
            yield
    except NobodyWaits:
        raise EngineError("The request was cancelled before its prompt was read", "cancelled") from None


@as_engine_error()
def prompt_ids(
    prompt: Prompt,
    model: model_loaders.Model,
    options: PromptOptions = PromptOptions(),  # noqa: B008 - frozen
    *,
    context: int | None = None,
    warn: Callable[[str], None] | None = None,
    cut: Callable[[str], Sequence[str | Sequence[int]]] | None = None,
) -> list[int]:
    """Return the token ids of a prompt: text, with BOS if the model has one; messages; or ids, which are not checked.
    A text whose vector is asked for gets the token that closes such texts, if there is one.

    In a sequence of ids and texts, a text at the beginning gets BOS, and the others are tokenized as continuations. A
    message with "token_ids" becomes these ids. warn, cut: see `chat_ids`. Raises EngineError for anything that is not a
    prompt, and, before tokenizing, for text that cannot fit into `context`.
    """
    tokenizer = model.tokenizer
    check = partial(_check_fits, model, None if options.truncate else context)
    if isinstance(prompt, str):
        prompt = _embedding_prefix(model, options) + prompt
        check(prompt)
        ids = tokenizer.tokenize(prompt, control=options.parse_special)
        if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids = [tokenizer.bos_id, *ids]
        closing = tokenizer.closing_id if options.pooling is not None else None
        if context is not None and options.truncate:
            ids = first_ids(ids, context - (closing is not None), warn)
        return ids if closing is None else [*ids, closing]
    if is_chat(prompt):
        check_roles(prompt)
        messages, beginning = _split(prompt) if options.continue_final_message else (prompt, None)
        tools, variables = options.tools, options.template_variables
        ids = chat_ids(messages, model.template, tokenizer, check, warn, tools=tools, variables=variables, cut=cut)
        return ids if beginning is None else ids + _begun_ids(beginning, model, check)
    if not isinstance(prompt, (Sequence, np.ndarray)) or isinstance(prompt, bytes):
        raise EngineError(f"A prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    if not any(isinstance(part, str) for part in prompt):
        return list(cast(Sequence[int], prompt))
    check("".join(part for part in prompt if isinstance(part, str)))
    ids = []
    for position, part in enumerate(cast(Sequence[int | str], prompt)):
        if not isinstance(part, str):
            ids.append(part)
        elif position == 0:
            ids += prompt_ids(part, model, options)
        else:
            ids += tokenizer.tokenize(part, control=options.parse_special, continued=True)
    return ids


def _embedding_prefix(model: model_loaders.Model, options: PromptOptions) -> str:
    """Return the prefix for a text to embed. Raises EngineError for an unknown prompt name."""
    prompts, name = model.prompts, options.prompt_name
    if options.pooling is None or options.pooling == RANK:
        return ""
    name = prompts.default if name is None else name
    if name is None:
        return ""
    if name not in prompts.texts:
        there = f"it has {', '.join(map(shown, prompts.texts))}" if prompts.texts else "it has none"
        raise EngineError(f"{model.name} has no prompt {shown(name)} for texts: {there}")
    return prompts.texts[name]


@as_engine_error()
def pair_ids(
    query: str,
    document: str,
    model: model_loaders.Model,
    context: int,
    *,
    truncate: bool = False,
    most: int | None = None,
    warn: Callable[[str], None] | None = None,
) -> list[int]:
    """Return the ids of a pair of texts as the model's tokenizer joins them; with `truncate`, a document that is too
    long is cut. most: tokens of the document. warn: see `within`. Raises EngineError as `prompt_ids`."""
    tokenizer, pair = model.tokenizer, model.tokenizer.pair
    if pair is None:
        raise EngineError(f"{model.name} cannot rank documents: its tokenizer does not say how two texts are joined")
    _check_fits(model, context, query)
    _check_fits(model, None if truncate else context, document)
    ends = [[one] if one is not None else [] for one in (tokenizer.bos_id, tokenizer.closing_id)]
    before, ids = [*ends[0], *tokenizer.tokenize(query), *pair.between], tokenizer.tokenize(document)
    room = max(0, context - len(before) - len(ends[1])) if truncate else len(ids)
    return [*before, *first_ids(ids, room if most is None else min(room, most), warn), *ends[1]]


def first_ids(ids: Sequence[int], most: int, warn: Callable[[str], None] | None) -> list[int]:
    """Return the first `most` of a text's ids. warn: called with a sentence if there are more."""
    if len(ids) > most and warn is not None:
        warn(f"only the first {counted(most, 'token')} are read")
    return list(ids[:most])


def second_of(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the place from which on the tokens of a pair have the second type; the end if none has it."""
    pair, count = tokenizer.pair, len(ids)
    if pair is None or not pair.second_type or pair.between[-1] not in ids:
        return count
    return ids.index(pair.between[-1]) + 1


def _split(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the messages before the last one, and the last one, which begins the answer. Raises EngineError."""
    *before, last = messages
    content = last.get("content") if isinstance(last, Mapping) and last.get("role") == "assistant" else None
    if not before or not isinstance(content, str):
        raise EngineError(
            "Only a last message of the assistant can be continued: it needs text, and a message before it"
        )
    return before, last


def _begun_ids(message: Mapping[str, Any], model: model_loaders.Model, check: Callable[[str], None]) -> list[int]:
    """Return the ids of the beginning of an answer: the ids it was generated as, or its text tokenized as an answer's,
    with the leading space that some tokenizers add, behind the header of a message if answers have headers."""
    tokenizer, channels = model.tokenizer, model.template.channels
    ids = list(message.get("token_ids") or ())
    if ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    if ids:  # an answer that ended at once has no header
        return ids
    check(message["content"])
    if channels is not None:
        header = tokenizer.tokenize(channels.header(channels.final), control=True, continued=True)
        return header + tokenizer.tokenize(message["content"], continued=True)
    return tokenizer.tokenize(message["content"]) if message["content"] else []


def chat_text(prompt: Prompt, model: model_loaders.Model, options: PromptOptions) -> str:
    """Return messages as the model's template renders them, with the generation prompt. Raises EngineError."""
    assert is_chat(prompt)
    messages, beginning = _split(prompt) if options.continue_final_message else (prompt, {"content": ""})
    adapted = adapt_conversation(model.template, messages, options.tools, options.template_variables)
    (text,) = model.template.render_each([adapted.messages], **adapted.variables)
    if not isinstance(text, str):
        raise EngineError(str(text))
    channels = model.template.channels if options.continue_final_message else None
    header = "" if channels is None else channels.header(channels.final)
    return text + header + str(beginning["content"])


@as_engine_error()
def place_of_answer(prompt: Sequence[Mapping[str, Any]], model: model_loaders.Model, options: PromptOptions) -> Place:
    """Return where the answer to messages begins: before, inside or after its reasoning. Raises EngineError."""
    last = prompt[-1] if isinstance(prompt[-1], Mapping) else {}
    tags, after_result = model.template.tags, last.get("role") == "tool"
    place = model.template.place_of_answer(options.template_variables, after_result=after_result)
    if tags is None or not options.continue_final_message:
        return place
    beginning = str(last.get("content"))
    opened = place == "inside" or tags.open in beginning
    return "inside" if opened and tags.close not in beginning else "after"


def _check_fits(model: model_loaders.Model, context: int | None, text: str) -> None:
    """Raises EngineError for a long text whose beginning alone has twice as many tokens as `context`: how it ends may
    change its last words, but not as much. So the time for a text that is too long depends on the context alone."""
    if context is None:
        return
    size = _MOST_CHARACTERS * context
    while size < len(text):
        least = len(model.tokenizer.tokenize(text[:size], control=True))
        if least > 2 * context:
            problem = f"The prompt, of {least} tokens or more, exceeds the available context size of {context} tokens"
            raise _too_long(problem, least, model, context)
        size *= 4


def _too_long(problem: str, tokens: int, model: model_loaders.Model, context: int) -> EngineError:
    is_largest = context >= model.config.max_context
    advice = "; the model was not trained on more" if is_largest else ", or raise ctx_size or kv_memory"
    return EngineError(
        f"{problem}: shorten it{advice}",
        "context_length_exceeded",
        () if is_largest else ("ctx_size", "kv_memory"),
        n_prompt_tokens=tokens,
        n_ctx=context,
    )


def yes_and_no(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the tokens of the answers yes and no. Raises EngineError if they are no tokens of their own."""
    yes, no = (tokenizer.tokenize(answer, continued=True) for answer in ("yes", "no"))
    if len(yes) != 1 or len(no) != 1:
        raise EngineError("This model cannot rank documents: its vocabulary has no tokens for yes and no")
    return yes[0], no[0]


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_batch(prompt: Prompt | Batch) -> TypeGuard[Batch]:
    """Whether these are several prompts, or none: texts alone, or lists alone."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        return False
    return all(isinstance(one, (str, list, tuple)) for one in prompt)


def one_prompt(prompt: Prompt, of_several: str = "generate") -> Prompt:
    """Return `prompt`. Raises EngineError for several. of_several: the method that takes them."""
    if is_batch(prompt) and len(prompt) > 0:
        raise EngineError(f"This is a list of {counted(len(prompt), 'prompt')}, which {of_several} takes; give one")
    return prompt


def as_messages(messages: Messages) -> Sequence[Mapping[str, Any]]:
    """Return a conversation's messages: a text is the user's only message. Raises EngineError for anything else."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not is_chat(messages):
        raise EngineError(f"chat takes a text or a list of messages, not {shown(messages)}")
    return messages


@contextmanager
def naming(index: int, count: int, field: str = "prompts") -> Iterator[None]:
    """Say in an EngineError which one of `count` prompts in `field` it is about, unless there is one alone."""
    try:
        yield
    except EngineError as error:
        error.args = (f"{field}[{index}]: {error}" if count > 1 else str(error),)
        raise


def checked_ids(
    ids: Sequence[int], model: model_loaders.Model, context: int, room: int, rows: Collection[int] = ()
) -> list[int]:
    """Return `ids` as ints. Raises EngineError if there are none, if one is unknown, or if fewer than `room` tokens of
    the context are left for the answer. rows: ids of images' rows."""
    vocabulary = model.vocabulary
    if len(ids) == 0:
        raise EngineError("The prompt is empty: give at least one token")
    for i in ids:
        if not isinstance(i, (int, np.integer)) or isinstance(i, bool) or not (i in vocabulary or i in rows):
            raise EngineError(f"The prompt holds {shown(i)}, which is not a token id below {vocabulary.stop}")
    if len(ids) > context - room:
        size = f"the available context size of {counted(context, 'token')}"
        problem = f"The prompt of {counted(len(ids), 'token')} exceeds {size}"
        problem += f", of which the answer takes at least {room}" if room else ""
        raise _too_long(problem, len(ids), model, context)
    return [int(i) for i in ids]
