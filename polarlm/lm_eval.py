"""`python -m polarlm.lm_eval --model polarlm --model_args weights=PATH,cache_type=TYPE --tasks …`: tasks of lm-eval.

lm-eval 0.4 (EleutherAI) knows models by names in its registry, and asks no other package for more. So this module is
its command line with one more name in the registry, and importing it is enough for `lm_eval.simple_evaluate`.

Answers are scored and generated as the engine serves them: the context is a prompt, computed once for all requests that
begin with it, and what follows reads its codes in steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tqdm import tqdm

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.cli.commands import note
from polarlm.engine.outputs import Completion, fold
from polarlm.engine.sampling.constraints import WORD, mask_words
from polarlm.engine.sampling.sample import FALLBACKS

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("lm-eval is not installed: pip install 'polarlm[eval]' adds it") from error

_ANSWER = 256  # tokens of an answer, unless the task says otherwise
_TEACHER = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)

Pair = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as texts, and as ids."""


class _ForcedAnswer:
    """A constraint that allows one answer: these ids."""

    def __init__(self, ids: Sequence[int], vocabulary: int) -> None:
        self._ids, self._words, self._count = ids, mask_words(vocabulary), 0

    def allowed(self) -> np.ndarray:
        mask, token = np.zeros(self._words, np.uint32), self._ids[self._count]
        mask[token // WORD] = 1 << token % WORD
        return mask

    def accept(self, token: int) -> None:
        self._count += 1

    @property
    def finished(self) -> bool:
        return self._count == len(self._ids)


@register_model("polarlm")
class PolarLM(TemplateLM):
    """An engine as a model of lm-eval. `prompt_tokens` and `cached_tokens` are sums over all requests so far, as in
    `Usage`."""

    def __init__(
        self,
        weights: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """weights: as for `Engine.load`. settings: fields of EngineConfig. Raises EngineError.

        lm-eval gives the others to every model. The sizes of batches are ignored: `parallel` says how many requests run
        together. device is "cuda:0" by default, also without a GPU: all but "cpu" takes a GPU if it can use one.
        """
        super().__init__()
        device = "cpu" if device == "cpu" else "auto"
        self.engine = Engine.load(weights, verbose=note, device=device, **settings)
        self.prompt_tokens = self.cached_tokens = 0

    # -- what lm-eval asks about a model -----------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return min(self.engine.model.tokenizer.eos_ids, default=0)

    @property
    def prefix_token_id(self) -> int:
        bos = self.engine.model.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.engine.model.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """The ids of a text, with BOS if the model has one and `add_special_tokens` is not False. Names of control
        tokens in it are these tokens, as in a text that a chat template has written."""
        ids = self.engine.tokenize(string, control=True)
        bos = self.engine.model.tokenizer.bos_id
        return ids if bos is None or add_special_tokens is False or ids[:1] == [bos] else [bos, *ids]

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.engine.model.template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to the answer, or up to the end of the answer that its last message begins."""
        answer_start = "" if add_generation_prompt else chat_history[-1]["content"]
        history = chat_history if add_generation_prompt else chat_history[:-1]
        (text,) = self.engine.model.template.render_each([history])
        if isinstance(text, Exception):
            raise text
        return text + answer_start

    # -- requests ----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation after its context, whether greedy sampling would give it) of each."""

        def score(pair: Pair) -> tuple[float, bool]:
            _, context, continuation = pair
            prompt = self._end_of(context, len(continuation))
            constraint = _ForcedAnswer(continuation, len(self.engine.model.vocabulary))
            options = SamplingParams(**{**vars(_TEACHER), "max_tokens": len(continuation)})
            answer = self._count_tokens(fold(self.engine.stream(prompt, options, constraint=constraint)))
            if answer.token_ids != tuple(continuation):
                raise EngineError("The KV store has no room for a request: raise ctx_size, or lower parallel")
            greedy = all(token.top[0][0] == token.id for token in answer.logprobs)
            return sum(token.logprob for token in answer.logprobs), greedy

        results = self._in_parallel(score, requests, [context for _, context, _ in requests], disable_tqdm)
        for (texts, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows of the whole context whose tokens are predicted once each."""
        results = []
        for request in tqdm(requests, desc="Scoring", disable=disable_tqdm):
            (text,) = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.engine.context - 1, context_len=1)
            total = 0.0
            for context, following in map(make_disjoint_window, windows):
                logprobs = self.engine.score([*context, *following]).logprobs
                total += float(np.sum(logprobs[len(context) - 1 :], dtype=np.float64))
            results.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context: greedy, unless the task samples, up to one of its stop strings."""

        def answer(request: Instance) -> str:
            context, options = request.args
            options_read = normalize_gen_kwargs(options, _ANSWER)
            max_tokens = min(options_read["max_gen_toks"], self.engine.context - 1)
            sampling = {name: options_read[name] for name in FALLBACKS if name in options_read}
            stop = tuple(text for text in options_read["until"] if text)
            params = SamplingParams(**{"temperature": 0.0, **sampling}, max_tokens=max_tokens, stop=stop)
            prompt = self._end_of(self.tok_encode(context), max_tokens)
            return self._count_tokens(self.engine.generate(prompt, params)).text

        results = self._in_parallel(answer, requests, [request.args[0] for request in requests], disable_tqdm)
        for request, text in zip(requests, results, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return results

    def _end_of(self, context: list[int], count: int) -> list[int]:
        """The last ids of a context that leave room for so many more. Raises EngineError if there is none for one."""
        room = self.engine.context - count
        if room < 1:
            raise EngineError(
                f"A continuation of {count} tokens does not fit into the context of {self.engine.context}: raise "
                "ctx_size"
            )
        return context[-room:] or [self.prefix_token_id]

    def _count_tokens(self, answer: Completion) -> Completion:
        self.prompt_tokens += answer.usage.prompt_tokens
        self.cached_tokens += answer.usage.cached_tokens
        return answer

    def _in_parallel(
        self, work: Callable[[Any], Any], requests: Sequence[Any], contexts: Sequence[Any], disable_tqdm: bool
    ) -> list[Any]:
        """work(request) of each request, as many at a time as the engine runs, in the order of their contexts, so that
        the prefix cache finds what these have in common."""
        order = sorted(range(len(requests)), key=lambda number: contexts[number])
        results: list[Any] = [None] * len(requests)
        with ThreadPoolExecutor(self.engine.config.parallel) as threads:
            finished = threads.map(lambda number: work(requests[number]), order)
            for number, result in zip(order, tqdm(finished, total=len(order), disable=disable_tqdm), strict=True):
                results[number] = result
        return results


def main() -> int:
    """Runs lm-eval's command line. Returns the exit code: 2, with a sentence, for a model that cannot be had."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
