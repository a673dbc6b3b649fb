"""Adapters (LoRA): a request chooses one, and they come and go while the engine runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from os import PathLike, fspath

from polarlm.engine.core import EngineCore
from polarlm.engine.errors import EngineError
from polarlm.engine.model.adapters import Adapters, Loaded, check_adapters, delta_bytes, load_adapter
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.weights import with_adapters
from polarlm.engine.requests.request import Preparation, Request
from polarlm.engine.state.prefix import salt_adapter


def choose(engine: AdapterLoading) -> Preparation:
    """A request's adapter keeps its K/V apart."""
    engine.adapters = engine._parts.adapters
    return lambda submission: replace(submission, salt=engine.adapters.salt(submission.options))


class AdapterLoading(EngineCore):
    adapters: Adapters  # which requests choose among

    def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load an adapter, which requests name in `PromptOptions.lora` from now on; `adapters` has them all.

        path: a folder of peft, a GGUF file or "hf:USER/REPO", with ":SCALE" behind it if you like. Requests that run
        wait while it is copied to the device. Raises EngineError: "model_unavailable" for one that cannot be read or is
        another model's, "out_of_memory", "invalid_request" for a wrong name or one that is taken.
        """
        check_adapters({name: fspath(path)})
        self._check_open()
        adapter = load_adapter(name, fspath(path), self.model.config, self.model.weights)
        with self._exclusive():
            self._set_adapters(self.adapters.add(name, adapter))

    def unload_adapter(self, name: str) -> None:
        """Let requests no longer choose this adapter. Those that have chosen it end as they would, and then its memory
        is freed. Raises EngineError if there is none of this name."""
        with self._exclusive():
            self.adapters = self.adapters.unload(name)
            self._drop_unused_adapters()

    def _set_adapters(self, adapters: Adapters) -> None:
        if adapters.all != self.adapters.all:
            self._runner.replace_weights(self._weights_with(adapters.all))
        self.adapters = adapters

    def _weights_with(self, adapters: Loaded) -> ModelWeights:
        """The model's weights with these adapters, by their numbers. Raises EngineError ("out_of_memory")."""
        model = self._model
        try:
            if delta_bytes(model.ops, model.config, adapters) > model.ops.free_memory():
                raise MemoryError
            weights = with_adapters(model.ops, model.config, model.weights, adapters)
            model.ops.wait()
            return weights
        except MemoryError:
            sentence = "There is no room for another adapter beside the model: unload one, or make the KV store smaller"
            raise EngineError(sentence, "out_of_memory") from None

    def _drop_unused_adapters(self) -> None:
        if not self.adapters.unloaded:
            return
        used = {one.adapter.number for one in self._runner.requests.values() if one.adapter is not None}
        with suppress(EngineError):  # without memory for the others' matrices it is tried again
            self._set_adapters(self.adapters.drop_unused(used))

    def _enter(self) -> None:
        super()._enter()
        self._drop_unused_adapters()

    def _submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if its adapter has been unloaded since the request was made."""
        name = request.options.lora
        request.adapter, key = self.adapters.choose(name, request.options.lora_scale)
        if key != salt_adapter(request.salt):
            raise EngineError(f"Another adapter was loaded as {name} while the prompt was read: send it again")
        self._runner.submit(request)
