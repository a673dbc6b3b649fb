"""The embeddable engine: load a model, stream text. `generate`, `chat` and the terminal fold `Engine.stream`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, cast, overload

from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading import assembly, checks
from polarlm.engine.outputs import Chunk, Completion
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.parsing.tool_answer import Folding
from polarlm.engine.preparation import ORDER
from polarlm.engine.requests.prompts import Batch, Messages, Prompt, as_messages, is_batch, one_prompt, read_until
from polarlm.engine.requests.request import Outbox, Request, Submission, Ticket
from polarlm.engine.sampling.constraints import Constraint
from polarlm.engine.vectors import Vectors, compute_each

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from polarlm.engine.keywords import EngineKeywords, GenerateKeywords, SamplingKeywords

Chunks = Generator[Chunk, None, None]
Params = SamplingParams | None  # None: the defaults
Options = PromptOptions | None


class Engine(Vectors):
    """A loaded model with its KV store. May be shared by threads; requests are served by priority, then by arrival."""

    def __init__(
        self,
        model: str | PathLike[str] | assembly.Parts | None = None,
        *,
        config: EngineConfig | None = None,
        verbose: Callable[[str], None] | None = None,
        **settings: Unpack[EngineKeywords],
    ) -> None:
        """As `load`, or from the parts of an engine."""
        if not isinstance(model, assembly.Parts):
            model = assembly.assemble(checks.settle(model, config, settings), verbose)
        super().__init__(model)
        self._preparations = [one for function in ORDER if (one := function(self)) is not None]

    @classmethod
    def load(
        cls,
        path: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        verbose: Callable[[str], None] | None = None,
        **settings: Unpack[EngineKeywords],
    ) -> Engine:
        """Load a folder of safetensors, a .gguf file, "hf:user/repo" of the hub, or, for None, a demonstration.

        `settings` are fields of EngineConfig and override `config`; `verbose` is called with sentences about progress.
        Raises EngineError with a sentence for the user: "model_unavailable" for a model that is missing or cannot be
        used, "device_unavailable", "out_of_memory", "invalid_request" for a setting.
        """
        return cls(path, config=config, verbose=verbose, **settings)

    def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        options: Options = None,
        *,
        progress: bool = False,
        constraint: Constraint | None = None,
        **settings: Unpack[SamplingKeywords],
    ) -> Chunks:
        """Yield the continuation of `prompt` in chunks; the last chunk has a finish_reason and the usage.

        prompt: text for raw completion, messages for the chat template, or token ids, which are used unchanged.
        options: how the prompt is tokenized, and which cached tokens it may reuse. progress: also yield chunks without
        text that report how much of the prompt is computed. constraint: restricts the tokens of this request in a way
        that `params` cannot; never share one between requests. settings: fields of SamplingParams, which override
        `params`. Closing the iterator cancels the request. Raises EngineError for a prompt that cannot be served
        ("context_length_exceeded", "invalid_request").
        """
        outbox: deque[Chunk | Exception] = deque()
        more = {"outbox": outbox, "wants_progress": progress, "constraint": constraint}
        return self._drain(self._request(one_prompt(prompt), params, options, settings, **more), outbox)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is one prompt, and mypy sees its letters
        self, prompt: Batch, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompt: Prompt, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> Completion: ...

    def generate(
        self,
        prompt: Prompt | Batch,
        params: Params = None,
        options: Options = None,
        **settings: Unpack[GenerateKeywords],
    ) -> Completion | list[Completion]:
        """The whole answer: `stream`, folded. Of several prompts, a list of texts, of lists of messages or of lists of
        ids, the answers in their order. These are computed together; an error in one prompt, which the message names,
        is raised before any is computed."""
        if not is_batch(prompt):
            one = cast(Prompt, prompt)
            folding = Folding(self, one, params, options, settings)
            return folding.fold(list(self.stream(one, folding.params, options, **folding.settings)))
        prompts = cast(Sequence[Prompt], prompt)
        each = [Folding(self, one, params, options, settings) for one in prompts]
        jobs = [(one, folding.params, options) for one, folding in zip(prompts, each, strict=True)]
        answers = compute_each(self, jobs, **each[0].settings) if each else []
        return [folding.fold(chunks) for folding, chunks in zip(each, answers, strict=True)]

    def chat(
        self, messages: Messages, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> Completion:
        """The answer to a conversation: messages with "role" and "content", or the text of a user's only message.

        An assistant message may carry the "token_ids" that it was generated as, so that the prefix cache finds them;
        recent answers do not need them. With `options.tools` the answer is parsed: see `Completion`.
        """
        return cast(Completion, self.generate(as_messages(messages), params, options, **settings))

    def submit(
        self,
        prompt: Prompt,
        params: Params = None,
        options: Options = None,
        *,
        into: Outbox,
        progress: bool = False,
        constraint: Constraint | None = None,
        gone: Callable[[], bool] | None = None,
        in_background: bool = False,
        **settings: Unpack[SamplingKeywords],
    ) -> Ticket:
        """Queue a request. Threads that call `work` append its chunks to `into`, or an exception if it fails.

        gone: returns True once nobody waits for the request. in_background: whether it gives way to all requests that
        are not. Raises EngineError as `stream` does, and "busy".
        """
        more = {"outbox": into, "wants_progress": progress, "constraint": constraint, "in_background": in_background}
        with read_until(gone):
            request = self._request(prompt, params, options, settings, gone=gone, **more)
        with self._exclusive():
            self._submit(request)
        cancel, cached = lambda: self._cancel(request.sequence), lambda: request.cached or 0
        return Ticket(len(request.ids), cancel, cached, request.conversation, request.warnings, request.ids)

    def _request(
        self, prompt: Prompt, params: Params, options: Options, settings: Mapping[str, Any], **more: Any
    ) -> Request:
        """A request that is not queued yet; see `submit` for the arguments. more: fields of `Submission`."""
        self._check_open()
        params, options = params or SamplingParams(), options or PromptOptions()
        if not (isinstance(params, SamplingParams) and isinstance(options, PromptOptions)):
            raise EngineError(f"params are SamplingParams and options PromptOptions, not {params!r} and {options!r}")
        submission = Submission(prompt=prompt, params=replace(params, **settings), options=options, **more)
        for preparation in self._preparations:
            submission = preparation(submission)
        return Request.create(submission, self.model, self.context)

    def _drain(self, request: Request, outbox: deque[Chunk | Exception]) -> Chunks:
        """Submit `request`, then yield its chunks. Until the next one exists, this thread runs units of work."""
        try:
            with self._exclusive():
                self._submit(request)
            finished = False
            while not finished:
                with self._lock.hold_unless(outbox) as lock_held:
                    if lock_held:
                        self._enter()
                        self._runner.run_unit()
                while outbox:
                    chunk = outbox.popleft()
                    if isinstance(chunk, Exception):
                        raise chunk
                    finished = chunk.finish_reason is not None
                    yield chunk
        finally:
            self._cancel(request.sequence)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
