"""An engine without a model for the chat's tests; run as a script, it is the chat over that engine.

It answers by what the last message says: "error…" raises, "slow" is an answer and "long" a prompt of half a
minute, "stuck" a step of ten, "loop" is answered by the same four words 1,000 times, "crash" fails unexpectedly,
anything else comes back as "you said: …", a word per chunk.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from polarlm.engine.chat.terminal import main
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.model.adapters import Adapters
from polarlm.engine.outputs import CacheStats, Chunk, Status, Threads, Usage
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.sampling.sample import resolve
from polarlm.engine.storage.sessions import Session
from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.model_loaders.config import GenerationDefaults


@dataclass
class FakeEngine:
    config: EngineConfig = field(default_factory=EngineConfig)
    prompts: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    options: list[PromptOptions] = field(default_factory=list)
    cancelled: int = 0
    closed: bool = False
    reads_images: bool = True
    adapters: Adapters = field(default_factory=Adapters)
    packs: dict[str, Any] = field(default_factory=dict)
    model: Any = field(
        default_factory=lambda: SimpleNamespace(
            name="fake",
            template=ChatTemplate("{{ messages }}"),
            config=SimpleNamespace(is_encoder=False),
            generation=GenerationDefaults({"top_k": 20}),
        )
    )

    def load(self, path: str | None = None, *, config: EngineConfig, verbose: Any = None) -> FakeEngine:
        self.config = config
        verbose(f"Reading the weights of {config.weights or 'fake'}")
        return self

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def start_line(self) -> str:
        return "fake · context 128 tokens"

    def fit_line(self) -> str:
        return "fake: a context of 128 tokens fits"

    def status(self) -> Status:
        threads = Threads(1, "a step took 20.0 ms with 1, 80.0 ms with 2", ("merge_8", "product_f16_1"))
        return Status(
            running=0, waiting=0, prefilling=0, blocks=2, blocks_used=0, blocks_kept=0, blocks_free=2, threads=threads
        )

    def cache_stats(self) -> CacheStats:
        return CacheStats(12, 3 << 20, 4.25, 12 << 20, 128, context_bytes=30 << 20, context_f16_bytes=120 << 20)

    def stream(
        self, prompt: Any, params: SamplingParams, options: PromptOptions, *, progress: bool = False
    ) -> Iterator[Chunk]:
        self.prompts.append(prompt)
        self.options.append(options)
        self.params.append(params)
        said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        said = said if isinstance(said, str) else said[-1]["text"]
        if said.startswith("error"):
            raise EngineError("the prompt has 200 tokens and the context 128; shorten it", "context_length_exceeded")
        if said == "stuck":
            yield Chunk("stuck ", (100,))
            time.sleep(600)
        if said == "crash":
            raise ZeroDivisionError("division by zero")
        units = 3000 if said == "long" else 2
        for unit in range(units if progress else 0):
            if said == "long":
                time.sleep(0.01)
            yield Chunk("", (), prefilled=unit + 1, prompt_tokens=units)
        words = ("slow " * 3000).split(" ") if said == "slow" else f"you said: {said}".split(" ")
        if said == "loop":
            words = ["so", *["round", "and", "round", "again"] * 1000]
        try:
            for number, word in enumerate(words):
                if said == "slow":
                    time.sleep(0.01)
                if number == resolve(params, self.model.generation).max_tokens:
                    yield self._last("length", number)
                    return
                token = 100 + number if said != "loop" else len(word)
                yield Chunk(word if number == 0 else f" {word}", (token,))
            yield self._last("stop", len(words))
        except GeneratorExit:
            self.cancelled += 1
            raise

    def prompt_ids(self, prompt: Any) -> list[int]:
        if not prompt[0]["content"][0]["image_url"]["url"].startswith("data:;base64,QQ"):
            raise EngineError("messages[0].content[0]: this is no image of a kind that is read (A)")
        return [1]

    def save_session(self, path: Path, *, note: Any = None, progress: Any = None) -> int:
        self._transfer(path, progress)
        try:
            path.write_text(json.dumps(note))
        except OSError as error:
            raise EngineError(f"The session cannot be saved as {path}: {error.strerror}", "session") from None
        return 12

    def load_session(self, path: Path, *, progress: Any = None) -> Session:
        self._transfer(path, progress)
        if not path.exists():
            raise EngineError(f"The session {path} cannot be read: No such file", "session")
        return Session(tuple(range(12)), json.loads(path.read_text()))

    def _transfer(self, path: Path, progress: Any) -> None:
        """Half a minute for a file whose name has "slow" in it."""
        pieces = 3000 if "slow" in path.name else 2
        for piece in range(pieces):
            if pieces > 2:
                time.sleep(0.01)
            progress(piece + 1, pieces)

    def _last(self, reason: str, completion: int) -> Chunk:
        return Chunk("", (), reason, Usage(30, 20, completion, prefill_seconds=0.5, generation_seconds=2.0))


if __name__ == "__main__":
    sys.exit(main(load=FakeEngine().load))
