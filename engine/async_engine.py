"""`AsyncEngine`, the engine for asyncio. Its requests and the requests of threads share one queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, cast, overload

from polarlm.engine.config import EngineConfig
from polarlm.engine.engine import Engine, Options, Params
from polarlm.engine.errors import EngineError
from polarlm.engine.outputs import Chunk, Completion, Embedding, Score
from polarlm.engine.params import SamplingParams
from polarlm.engine.parsing.tool_answer import Folding
from polarlm.engine.requests.mailbox import Mailbox
from polarlm.engine.requests.prompts import Batch, Messages, Prompt, as_messages, is_batch, naming, one_prompt
from polarlm.engine.sampling.constraints import Constraint
from polarlm.engine.vectors import embedding

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from polarlm.engine.keywords import EngineKeywords, GenerateKeywords, SamplingKeywords

_PAUSE = 0.01  # seconds between two warm-ups, in which a request may come


class EngineThread:
    """A thread that runs an engine's units of work, and sleeps while there is none. After loading it warms them up."""

    def __init__(self, engine: Engine, on_failure: Callable[[Exception], None]) -> None:
        """on_failure: called in the thread with errors of the engine itself; an error in a step ends only its
        requests."""
        self._engine, self._on_failure = engine, on_failure
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for work: a request was queued or cancelled."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread after its unit of work, and wait for it."""
        self._is_stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._is_stopping:  # read after `clear`, so that a call of `stop` is not missed
                return
            busy = warms_up = False
            try:
                busy = self._engine.work()
                warms_up = not busy and self._engine.warm_up()
            except Exception as error:
                self._on_failure(error)
            if not busy:
                self._wake.wait(_PAUSE if warms_up else None)


class AsyncEngine:
    """`Engine` for coroutines of any event loop; a thread of its own runs the computation.

    Cancelling the task that waits for an answer cancels its request. `engine` may be used by threads at the same time.
    """

    def __init__(self, engine: Engine) -> None:
        """engine: `close` closes it as well. Raises EngineError if it is not an Engine."""
        if not isinstance(engine, Engine):
            raise EngineError(f"AsyncEngine takes an Engine, not {engine!r}; await AsyncEngine.load(…) loads a model")
        self.engine = engine
        self._mailboxes: set[Mailbox] = set()
        self._lock = threading.Lock()  # guards `_mailboxes` and `_thread`: there may be several event loops
        self._thread: EngineThread | None = None
        self._is_closed = False

    @classmethod
    async def load(
        cls,
        path: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        verbose: Callable[[str], None] | None = None,
        **settings: Unpack[EngineKeywords],
    ) -> AsyncEngine:
        """Call `Engine.load` in a thread, which also calls `verbose`. Raises the same EngineErrors."""
        load = partial(Engine.load, path, config=config, verbose=verbose, **settings)
        return cls(await asyncio.to_thread(load))

    async def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        options: Options = None,
        *,
        progress: bool = False,
        constraint: Constraint | None = None,
        **settings: Unpack[SamplingKeywords],
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the continuation of `prompt` in chunks; see `Engine.stream` for arguments and errors.

        Closing the generator cancels the request: read it inside `contextlib.aclosing` where a loop may be left early.
        """
        mailbox = Mailbox(asyncio.get_running_loop())
        submit = partial(
            self._submit,
            mailbox,
            one_prompt(prompt),
            params,
            options,
            progress=progress,
            constraint=constraint,
            **settings,
        )
        with self._lock:
            self._mailboxes.add(mailbox)
        try:
            await asyncio.to_thread(submit)
            finished = False
            while not finished:
                chunk: Chunk = await mailbox.next()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            self._leave(mailbox)

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a text is one prompt, and mypy sees its letters
        self, prompt: Batch, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> list[Completion]: ...

    @overload
    async def generate(
        self, prompt: Prompt, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> Completion: ...

    async def generate(
        self,
        prompt: Prompt | Batch,
        params: Params = None,
        options: Options = None,
        **settings: Unpack[GenerateKeywords],
    ) -> Completion | list[Completion]:
        """The whole answer, or several; see `Engine.generate`. An error in one prompt cancels the other requests."""
        if not is_batch(prompt):
            folding = await asyncio.to_thread(Folding, self.engine, cast(Prompt, prompt), params, options, settings)
            chunks = await self._chunks(cast(Prompt, prompt), folding.params, options, **folding.settings)
            return await asyncio.to_thread(folding.fold, chunks)

        async def answer(index: int, one: Any) -> Completion:
            with naming(index, len(prompt)):
                return await self.generate(one, params, options, **settings)

        tasks = [asyncio.ensure_future(answer(index, one)) for index, one in enumerate(prompt)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def chat(
        self, messages: Messages, params: Params = None, options: Options = None, **settings: Unpack[GenerateKeywords]
    ) -> Completion:
        """The answer to a conversation; see `Engine.chat`."""
        return await self.generate(as_messages(messages), params, options, **settings)

    async def embed(self, prompt: Prompt, pooling: str | None = None, options: Options = None) -> Embedding:
        """The embedding of `prompt`; see `Engine.embed`. Texts that wait together are computed together."""
        options = self.engine.embedding_options(pooling, options)
        return embedding(await self._chunks(prompt, SamplingParams(max_tokens=0), options))

    async def score(self, ids: Sequence[int], every_token_coded: bool = False, *, logits: bool = False) -> Score:
        """Log-probabilities of `ids`; see `Engine.score`. Cancelling the task does not end the computation."""
        return await asyncio.to_thread(self.engine.score, ids, every_token_coded, logits=logits)

    async def close(self) -> None:
        """Fail unfinished requests with an EngineError ("closed") and free the engine. Closing twice is fine."""
        with self._lock:
            self._is_closed, thread, self._thread = True, self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.stop)
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # -- requests ----------------------------------------------------------------------------------------------

    async def _chunks(self, prompt: Prompt, params: Params, options: Options, **settings: Any) -> list[Chunk]:
        async with aclosing(self.stream(prompt, params, options, **settings)) as chunks:
            return [chunk async for chunk in chunks]

    def _submit(self, mailbox: Mailbox, *arguments: Any, **settings: Any) -> None:
        """Tokenize and queue a request; see `Engine.submit` for the arguments. Runs in a thread; the engine accepts the
        request between two units of work."""
        ticket = self.engine.submit(*arguments, into=mailbox, gone=lambda: mailbox.closed, **settings)
        with self._lock:
            if not self._is_closed:  # otherwise the engine ends the request as it closes
                self._thread = self._thread or EngineThread(self.engine, self._fail_all)
                self._thread.wake()
        mailbox.keep(ticket)

    def _leave(self, mailbox: Mailbox) -> None:
        mailbox.close()
        with self._lock:
            self._mailboxes.discard(mailbox)
            if self._thread is not None:
                self._thread.wake()  # so that the engine drops the request

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            mailboxes = list(self._mailboxes)
        for mailbox in mailboxes:
            mailbox.append(error)
