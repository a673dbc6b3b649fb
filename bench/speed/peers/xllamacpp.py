"""xllamacpp for comparison: llama.cpp's server inside a Python process, as its wheel has it.

It is asked by the function that the package has for that, and rates are those that the server measures; `bench.serving`
asks it over HTTP. Its steps sample the most likely token and turn it into text, as ours do; which tokens follow is its
own choice.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from polarlm.bench.speed.child import serve
from polarlm.bench.speed.peers import NoPeer, library

NAME, LABEL = "xllamacpp", "xllamacpp"
CACHES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
NOTES = ("xllamacpp runs llama.cpp's server, whose steps also sample a token and make text of it, as ours do",)
_GREEDY = {"temperature": 0, "top_k": 1, "ignore_eos": True}


class Server:
    """A model loaded by llama.cpp's server, with flash attention."""

    def __init__(self, path: str, context: int, threads: int, cache: str, sequences: int = 1) -> None:
        """Loads a .gguf file for `sequences` sequences of up to `context` tokens each. Raises NoPeer."""
        package = self._library = library("xllamacpp", NAME)
        params = package.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, sequences * context, sequences
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.flash_attn_type = package.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.cache_type_k = params.cache_type_v = getattr(package.ggml_type, f"GGML_TYPE_{cache.upper()}")
        params.n_gpu_layers, params.warmup = 0, False
        params.cache_ram_mib, params.n_ctx_checkpoints = 0, 0  # no copies of prompts besides the cache
        try:
            self._server = package.Server(params)
        except (RuntimeError, ValueError) as error:
            raise NoPeer(f"cannot load the model: {error}") from None

    def about(self) -> dict[str, str]:
        """The package's version, and the instruction sets that it runs with."""
        return {
            "version": importlib.metadata.version("xllamacpp"),
            "built_with": str(self._library.get_system_info()).strip(" |"),
        }

    def address(self) -> str:
        """The URL of its HTTP API on this machine."""
        return str(self._server.listening_address)

    def prompt_rate(self, ids: Sequence[int]) -> float:
        """Tokens per second of a prompt, up to its first token. The prompt stays in the cache."""
        return float(self._timings(ids, 1, cache_prompt=False)["prompt_per_second"])

    def generation_rate(self, ids: Sequence[int], following: Sequence[int]) -> float:
        """Steps per second after `ids` and one more token. The prefix of `ids` in the cache is not computed again."""
        timings = self._timings([*ids, following[0]], len(following), cache_prompt=True)
        return 1e3 * (timings["predicted_n"] - 1) / float(timings["predicted_ms"])  # the prompt gives the first token

    def _timings(self, ids: Sequence[int], tokens: int, cache_prompt: bool) -> Mapping[str, Any]:
        """What the server measures of a request for `tokens` tokens. Raises NoPeer."""
        answer = self._server.handle_completions(
            {"prompt": list(ids), "n_predict": tokens, "cache_prompt": cache_prompt, **_GREEDY}
        )
        timings: Mapping[str, Any] = answer.get("timings", {})
        if timings.get("predicted_n") != tokens:
            reason = answer.get("error", {}).get("message")
            raise NoPeer(reason or f"cannot generate {tokens} tokens after {len(ids)}")
        return timings


if __name__ == "__main__":
    serve(Server, [NoPeer])
