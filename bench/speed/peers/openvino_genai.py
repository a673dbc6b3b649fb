"""OpenVINO GenAI for comparison. It reads .gguf files of some architectures and weight types into a graph of its own.

What its weights become, and how many bits its caches take, it does not say, so bytes that a step reads are not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarlm.bench.speed.child import serve
from polarlm.bench.speed.peers import NoPeer, library

NAME, LABEL = "openvino-genai", "OpenVINO"
CACHES = {"u8": None, "f16": None}  # u8 is its default
NOTES = (
    "OpenVINO converts weights and does not say what to, so bytes that its steps read, and of its cache, are not "
    "known. Its steps sample a token, as ours do, and its numbers come from its own clock",
)


class Pipeline:
    """A model that OpenVINO has converted, for one sequence. Every run computes its prompt."""

    def __init__(self, path: str, context: int, threads: int, cache: str) -> None:
        """Loads a .gguf file. context: not needed, since its cache grows. Raises NoPeer."""
        genai = self._genai = library("openvino_genai", NAME)
        self._tensors, self._numpy = library("openvino", NAME), library("numpy", NAME)
        settings = genai.SchedulerConfig()
        settings.enable_prefix_caching = False
        try:
            self._pipeline = genai.LLMPipeline(
                path, "CPU", INFERENCE_NUM_THREADS=threads, KV_CACHE_PRECISION=cache, scheduler_config=settings
            )
        except (RuntimeError, IndexError) as error:  # the latter for architectures that it does not know
            raise NoPeer(f"cannot load the model: {str(error).strip().splitlines()[-1]}") from None

    def about(self) -> dict[str, str]:
        """The package's version, and the kinds of numbers that it computes with here."""
        kinds = self._tensors.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return {"version": str(self._genai.get_version()), "built_with": " ".join(kinds)}

    def prompt_rate(self, ids: Sequence[int]) -> float:
        """Tokens per second of a prompt, up to its first token."""
        return 1e3 * len(ids) / float(self._metrics(ids, 1).get_ttft().mean)

    def generation_rate(self, ids: Sequence[int], following: Sequence[int]) -> float:
        """Steps per second after `ids` and one more token; which tokens follow is its own choice."""
        return 1e3 / float(self._metrics([*ids, following[0]], len(following)).get_tpot().mean)

    def _metrics(self, ids: Sequence[int], tokens: int) -> Any:
        """What the pipeline measures of a request for `tokens` tokens. Raises NoPeer."""
        settings = self._genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.do_sample = tokens, True, False
        prompt = self._numpy.array([ids], dtype="int64")
        tensors = [self._tensors.Tensor(array) for array in (prompt, self._numpy.ones_like(prompt))]
        metrics = self._pipeline.generate(self._genai.TokenizedInputs(*tensors), settings).perf_metrics
        if metrics.get_num_generated_tokens() != tokens:
            raise NoPeer(f"cannot generate {tokens} tokens after {len(ids)}")
        return metrics


if __name__ == "__main__":
    serve(Pipeline, [NoPeer])
