"""A conversation: its messages, the turns that add to them, and the numbers of a turn."""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from polarlm.engine.chat.console import Console, ctrl_c_pressed
from polarlm.engine.chat.kept_talks import KeptTalks
from polarlm.engine.chat.line_editor import PROMPT
from polarlm.engine.engine import Engine
from polarlm.engine.errors import EngineError, counted
from polarlm.engine.outputs import Usage
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.sampling.channel_reader import ChannelReader, Inline
from polarlm.engine.sampling.repeats import Repeats
from polarlm.engine.sampling.sample import resolve
from polarlm.engine.storage.sessions import Progress
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.user_dirs import last_used, state_folder

_MIB = 1 << 20
_LOOP_TOKENS, _LOOP_ROUNDS = 300, 3  # an answer is stopped if at least so many tokens repeat at least so many times
_OF_PROMPT = "{n:.0f}/{total} tokens, "  # on the bar of a prompt
_PLACE = re.compile(r"^messages\[0\]\.content\[0\]: ")  # in an error about an image
_RETRY_TEMPERATURE = 0.6  # temperature of a regenerated answer of a greedy model: 7 of the demonstration's 8 differed
_BRIEF = 200  # characters of the last messages that `/load` shows


@dataclass(frozen=True)
class Turn:
    """The answer to one prompt. finish_reason is "cancelled" after Ctrl-C, and "loop" for an answer that was stopped
    because it repeated itself; usage is None then."""

    text: str  # as it was shown
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage | None
    seconds: float = 0.0  # from the first token to the last
    message: Mapping[str, Any] = field(default_factory=dict)  # the answer as later prompts get it


class ChatSession:
    """The messages of a conversation, and its last turn. A turn that fails, or is stopped before its first token,
    leaves the messages as they were: a prompt would otherwise hold two messages of the user in a row."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        console: Console,
        system: str | None = None,
        *,
        loop_check: bool = True,
        kept_talks: KeptTalks | None = None,
    ) -> None:
        """kept_talks: keeps the messages after each answer."""
        self.engine, self.params = engine, params
        self._console = console
        self._loop_check = loop_check
        self._kept_talks = kept_talks
        self._retries = 0  # answers that were regenerated
        self.last: Turn | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Starts a new conversation with `text` as the system prompt; None for no system prompt."""
        self.system = text
        if self._kept_talks is not None:
            self._kept_talks.begin()
        self._empty()

    def clear(self) -> None:
        """Forgets the conversation."""
        if self._kept_talks is not None:
            self._kept_talks.forget()
        self._empty()

    def _empty(self) -> None:
        self.images: list[dict[str, Any]] = []  # of the next message
        self.messages: list[Mapping[str, Any]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        for name in [*self.engine.packs][:1]:
            self.messages = self.engine.load_pack(name).begin(self.messages)

    def attach(self, path: str) -> str:
        """Reads the image in a file, whose path may be in quotes, and adds it to the next message; returns a sentence.
        Raises EngineError."""
        if not self.engine.reads_images:
            raise EngineError(f"{self.engine.model.name} takes text alone: load a model that reads images")
        try:
            path = re.sub(r"""^(['"])(.*)\1$""", r"\2", path.replace("\\ ", " "))
            data = Path(path).expanduser().read_bytes()
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        # As text, so that the conversation can be saved, and without the file, which may change.
        address = f"data:;base64,{base64.b64encode(data).decode()}"
        image = {"type": "image_url", "image_url": {"url": address}}
        try:
            self.engine.prompt_ids([{"role": "user", "content": [image]}])
        except EngineError as error:
            error.args = (f"{path}: {_PLACE.sub('', str(error))}",)
            raise
        self.images.append(image)
        return f"{counted(len(self.images), 'image')} will go with the next message."

    def send(self, text: str) -> Turn:
        images, self.images = self.images, []
        content = [*images, {"type": "text", "text": text}] if images else text
        return self._answer([*self.messages, {"role": "user", "content": content}])

    def regenerate(self) -> Turn | None:
        """Answers the last message once more, with another answer unless the temperature was set to 0; None if there is
        no answer yet. Raises EngineError."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return None
        params = self.params
        self._retries += 1
        if params.seed >= 0:
            params = replace(params, seed=(params.seed + self._retries) % (1 << 63))
        if resolve(params, self.engine.model.generation).temperature == 0:
            if params.temperature is None:
                params = replace(params, temperature=_RETRY_TEMPERATURE)
            else:
                self._console.note("temp is 0, and so the answer is the same; with /set temp 0.7 it differs.")
        return self._answer(self.messages[:-1], params)

    def save(self, path: str) -> str:
        """Writes the conversation and its cache to a file; returns a sentence. An empty path is the default one. Raises
        EngineError, or KeyboardInterrupt after Ctrl-C; the file is unchanged then."""
        if not any(message["role"] == "assistant" for message in self.messages):
            raise EngineError("There is no answer yet, and so nothing to save", "session")
        file = _session_file(path)
        with self._transfer("saving") as progress:
            count = self.engine.save_session(file, note={"messages": self.messages}, progress=progress)
        return f"The conversation is saved in {file}: {counted(count, 'token')}."

    def load(self, path: str) -> str:
        """Replaces this conversation with a saved one; returns a sentence and the saved one's last messages. An empty
        path is the default one, or another conversation that was kept later. Raises EngineError, or KeyboardInterrupt
        after Ctrl-C; the conversation is unchanged then."""
        file = _session_file(path)
        if not path and self._kept_talks is not None:
            save_time = last_used(file.stat()) if file.exists() else None
            if (messages := _messages(self._kept_talks.last(start_time=save_time or 0))) is not None:
                other = "" if save_time is None else f" /load {file} continues the one that /save has written."
                return self._continue(messages, f"The last conversation continues.{other}")
        with self._transfer("loading") as progress:
            session = self.engine.load_session(file, progress=progress)
        messages = _messages(session.note)
        if messages is None:
            raise EngineError(f"{file} holds no conversation: give a file that /save has written", "session")
        size = counted(len(session.token_ids), "token")
        return self._continue(messages, f"The conversation saved in {file} continues: {size}.")

    def _continue(self, messages: list[Mapping[str, Any]], sentence: str) -> str:
        """Takes these messages in place of this conversation's; returns the sentence, and the last messages in
        brief."""
        self.messages, self.last = messages, None
        self.system = messages[0]["content"] if messages[0]["role"] == "system" else None
        if self._kept_talks is not None:
            self._kept_talks.begin()
        question, answer = (shorten(_text(message) or "", _BRIEF, placeholder=" …") for message in messages[-2:])
        return f"{sentence}\n{PROMPT}{question}\n{answer}"

    @contextmanager
    def _transfer(self, what: str) -> Iterator[Progress]:
        """Yields a function that shows progress, and raises KeyboardInterrupt after Ctrl-C."""
        with ctrl_c_pressed() as is_pressed:

            def progress(bytes_done: int, total: int) -> None:
                self._console.progress(what, bytes_done, total)
                if is_pressed():
                    raise KeyboardInterrupt

            try:
                yield progress
            finally:
                self._console.end_progress()

    def complete(self, prompt: str) -> Turn:
        return self._stream(prompt, self.params)

    def _answer(self, messages: list[Mapping[str, Any]], params: SamplingParams | None = None) -> Turn:
        turn = self._stream(messages, params or self.params)
        if turn.token_ids or turn.finish_reason != "cancelled":
            self.messages = [*messages, turn.message]
            self._keep()
        return turn

    @property
    def is_kept(self) -> bool:
        """Whether `/load` finds this conversation in a later chat."""
        return self._kept_talks is not None and self._kept_talks.has_own

    def _keep(self) -> None:
        if self._kept_talks is None:
            return
        try:
            self._kept_talks.keep(self.messages)
        except OSError as error:
            self._console.note(f"This conversation is not kept for later ({error.strerror}): /save PATH saves it.")
            self._kept_talks = None

    def _stream(self, prompt: str | list[Mapping[str, Any]], params: SamplingParams) -> Turn:
        """Writes the answer as it is generated; Ctrl-C ends it after the token, or the prompt's chunk, in progress, and
        a second Ctrl-C at once. With the loop check, an answer that repeats itself over and over ends as well."""
        ids: list[int] = []
        repeats = Repeats()
        reason, usage = None, None
        times: list[float] = []
        # A raw prompt may contain a template's control tokens. Of several adapters and packs, the first counts.
        adapter, pack = (next(iter(names), "") for names in (self.engine.adapters.by_name, self.engine.packs))
        as_written = PromptOptions(parse_special=True, lora=adapter, pack=pack if isinstance(prompt, str) else "")
        try:
            with ctrl_c_pressed() as is_pressed:  # before the template is read, which takes seconds the first time
                answer_text = _AnswerText(self.engine, prompt)
                params = replace(params, shown_tokens=answer_text.tokens)
                stream = self.engine.stream(prompt, params, as_written, progress=True)
                with suppress(KeyboardInterrupt), closing(stream) as chunks:  # Ctrl-C again, within a step
                    for chunk in chunks:
                        if chunk.prompt_tokens:
                            self._console.progress(
                                "reading the prompt", chunk.prefilled, chunk.prompt_tokens, _OF_PROMPT
                            )
                        else:
                            self._console.write(answer_text.push(chunk.text, last=chunk.finish_reason is not None))
                        ids.extend(chunk.token_ids)
                        if chunk.token_ids:
                            times = [*times[:1], time.monotonic()]
                        reason, usage = chunk.finish_reason, chunk.usage
                        if is_pressed():
                            break
                        if self._loop_check and reason is None:
                            repeats.extend(chunk.token_ids)
                            if repeats.circle(_LOOP_TOKENS, _LOOP_ROUNDS):
                                reason = "loop"
                                break
        except EngineError:
            if is_pressed():  # Ctrl-C has ended a process, too, which had just been started to read the template
                raise KeyboardInterrupt from None
            raise
        finally:
            self._console.end_progress()
            self._console.end_answer()
        seconds = times[-1] - times[0] if times else 0.0
        message = answer_text.message(tuple(ids))
        self.last = Turn(answer_text.text, tuple(ids), reason or "cancelled", usage, seconds, message)
        return self.last


class _AnswerText:
    """The text of an answer as it is shown, with the control tokens around its reasoning."""

    def __init__(self, engine: Engine, prompt: str | list[Mapping[str, Any]]) -> None:
        template = engine.model.template
        try:
            channels = None if isinstance(prompt, str) else template.channels
            tags = None if isinstance(prompt, str) or channels is not None else template.tags
        except LoadError as error:
            raise EngineError(str(error)) from None
        control_texts = channels.tokens if channels is not None else (tags.open, tags.close) if tags is not None else ()
        control = engine.model.tokenizer.control_tokens() if control_texts else {}
        self.tokens = tuple(token for name, token in control.items() if any(name in text for text in control_texts))
        self._tags = tags if self.tokens else None  # which the template does not find in messages, where they are text
        self._reader = None if channels is None else ChannelReader(channels)
        self._inline = None if channels is None else Inline(channels)
        self.text = ""  # so far
        self._final = ""  # for answers in channels: the text without reasoning so far

    def push(self, text: str, *, last: bool) -> str:
        """What `text` adds to the text that is shown; `last`: whether the answer ends."""
        if self._reader is not None and self._inline is not None:
            parts = self._reader.push(text) + (self._reader.finish() if last else [])
            self._final += "".join(part.text for part in parts if part.kind == "text")
            text = "".join(map(self._inline.text, parts))
        self.text += text
        return text

    def message(self, ids: tuple[int, ...]) -> dict[str, Any]:
        """The answer as later prompts get it, with its ids, so that the next prompt starts with exactly the tokens that
        are in the cache. An answer in channels has none: the template leaves all its messages but the last one out."""
        if self._reader is not None:
            return {"role": "assistant", "content": self._final}
        answer = {"role": "assistant", "content": self.text, "token_ids": ids}
        reasoning_text, close_tag, final = (
            self.text.partition(self._tags.close) if self._tags is not None else ("", "", "")
        )
        if self._tags is None or not close_tag or not reasoning_text.lstrip().startswith(self._tags.open):
            return answer
        reasoning = reasoning_text.lstrip().removeprefix(self._tags.open).strip()
        return answer | {"content": final.strip(), "reasoning_content": reasoning, "reasoned": True}


def _session_file(path: str) -> Path:
    """The file at `path`; the default one if that is empty. Raises EngineError if there is no home folder for it."""
    if path:
        return Path(os.path.expanduser(path))
    folder = state_folder()
    if folder is None:
        raise EngineError("There is no home folder for a file without a name: give a path", "storage")
    with suppress(OSError):  # opening the file fails too, with a better sentence
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / "chat.session"


def _text(message: Mapping[str, Any]) -> str | None:
    """The text of a message, without its images; None if there is none."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[-1].get("text") if content and isinstance(content[-1], dict) else None
    return content if isinstance(content, str) else None


def _messages(note: Any) -> list[Mapping[str, Any]] | None:
    """The messages in a note that `ChatSession.save` wrote, which end with an answer; None for any other note."""
    messages = note.get("messages") if isinstance(note, dict) else None
    if not isinstance(messages, list) or len(messages) < 2 or not all(isinstance(m, dict) for m in messages):
        return None
    if not all(isinstance(message.get("role"), str) and _text(message) is not None for message in messages):
        return None
    return messages if messages[-1]["role"] == "assistant" else None


def why_it_ended(turn: Turn, params: SamplingParams, defaults: GenerationDefaults) -> str | None:
    """A sentence for an answer that the model did not end, else None."""
    if turn.finish_reason == "cancelled":
        return "The answer was stopped." if turn.token_ids else "Stopped before the first token."
    if turn.finish_reason == "loop":
        return (
            f"The answer was stopped: its last {_LOOP_TOKENS} tokens are the same ones over and over. "
            "--no-loop-check lets such an answer continue."
        )
    if turn.finish_reason != "length":
        return None
    if 0 <= (most := resolve(params, defaults).max_tokens) <= len(turn.token_ids):
        model_limit = "answers of this model have; /set predict N, or -n/--predict N, allows more"
        whose = model_limit if params.max_tokens is None else "-n/--predict allows"
        return f"The answer ends here: it has the {counted(most, 'token')} that {whose}."
    return "The answer ends here: the context is full; /clear starts anew, and -c/--ctx-size sets its size."


def numbers(turn: Turn, engine: Engine) -> str:
    """Two lines: the speed of a turn; the context, the cache of its sequence, and the cache of a full context."""
    rate = f"{(len(turn.token_ids) - 1) / turn.seconds:.1f} tokens/s, " if turn.seconds else ""
    speed = f"answer: {counted(len(turn.token_ids), 'token')}, {rate}stopped"
    if (usage := turn.usage) is not None:
        speed = (
            f"prompt: {counted(usage.prompt_tokens, 'token')}, {usage.cached_tokens} of them cached{_places(usage)}, "
            f"{usage.prompt_rate:.1f} tokens/s | "
            f"answer: {counted(usage.completion_tokens, 'token')}, {usage.generation_rate:.1f} tokens/s"
        )
        if usage.drafted_tokens:
            speed += f", {usage.accepted_tokens} of {usage.drafted_tokens} drafted ones right"
    cache = engine.cache_stats()
    now = (
        _compared_with_f16(cache.bytes, cache.f16_bytes)
        or f"{cache.bytes / _MIB:.1f} MiB, all in full precision so far"
    )
    whole = _compared_with_f16(cache.context_bytes, cache.context_f16_bytes)
    full = f" | with {cache.context:,} tokens: {whole}, {cache.bits_per_value:.2f} bits per value" if whole else ""
    return f"{speed}\ncontext: {cache.tokens:,} of {cache.context:,} tokens | cache: {now}{full}"


def _compared_with_f16(size: int, f16: int) -> str:
    """Bytes of a sequence, and how much smaller they are than in half precision; empty if they are not, since the first
    block and the newest ones are in full precision."""
    if f16 <= 1.05 * size:
        return ""
    return f"{size / _MIB:.1f} MiB, {f16 / size:.1f}× smaller than f16 ({f16 / _MIB:.1f} MiB)"


def _places(usage: Usage) -> str:
    places = [f"{tokens} from {place}" for place, tokens in usage.from_tiers.items()]
    return f" ({', '.join(places)})" if places else ""


def kernels(engine: Engine) -> str | None:
    """The compiled kernels of the process, a line for each kind; None if there are none."""
    threads = engine.status().threads
    kinds: dict[str, list[str]] = {}
    for name in () if threads is None else threads.kernels:
        kind, _, rest = name.partition("_")
        kinds.setdefault(kind, []).append(rest)
    lines = [" ".join([f"  {kind}", ", ".join(filter(None, rest))]).rstrip() for kind, rest in kinds.items()]
    return "\n".join(["Compiled kernels:", *lines]) if lines else None


def cpu(engine: Engine) -> str | None:
    """The number of CPU threads of a step, and the reason for it; None on a GPU."""
    threads = engine.status().threads
    return None if threads is None else f"CPU threads of a step: {threads.number} ({threads.why})"
