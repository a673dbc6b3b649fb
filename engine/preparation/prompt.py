"""Prompts become token ids, with the images and the known answers of their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from polarlm.engine.errors import EngineError, no_answers
from polarlm.engine.limits import RANK
from polarlm.engine.params import PromptOptions
from polarlm.engine.preparation.storage import Sessions
from polarlm.engine.requests.answers import Answers
from polarlm.engine.requests.prompts import Prompt, checked_ids, first_ids, is_chat, prompt_ids
from polarlm.engine.requests.request import Preparation, Submission
from polarlm.engine.sampling.detokenizer import text_of
from polarlm.model_loaders import Model


def read(engine: Prompts) -> Preparation:
    """A prompt becomes ids, and the places of its images. Raises EngineError if it cannot be served."""
    config, model, context = engine.config, engine.model, engine.context
    is_kept = config.kept_sequences > 0 and not config.replayable
    answers = engine._answers = Answers(model, context, enabled=is_kept, tiers=engine._tiers)
    engine._closing.callback(answers.close)
    room = 0 if model.config.is_encoder else 1

    def prepare(submission: Submission) -> Submission:
        _check_vectors(submission, model)
        options, warnings = submission.options, list(submission.warnings)
        conversation = answers.conversation(submission.prompt, options.cache_salt, warnings.append)
        read = conversation.read
        is_whole = options.pooling is not None or submission.params.prompt_logprobs is not None
        if read.images and is_whole:
            raise EngineError("Images have neither vectors nor log-probabilities: leave them out")
        limit = context - room if options.truncate else context
        ids = prompt_ids(conversation.prompt, model, options, context=limit, warn=warnings.append, cut=read.cut)
        ids = first_ids(ids, limit, warnings.append) if options.truncate else ids
        ids = checked_ids(ids, model, context, room, read.ids)
        positions, images = read.place_images(ids, sections=model.config.has_sections)
        return replace(
            submission,
            ids=ids,
            is_whole=is_whole,
            conversation=conversation if is_chat(submission.prompt) and not options.continue_final_message else None,
            image_positions=positions,
            images=images,
            warnings=tuple(warnings),
        )

    return prepare


def _check_vectors(submission: Submission, model: Model) -> None:
    """Raises EngineError for options of an embedding that contradict each other, and for what the model cannot give."""
    options, config, is_ranked = submission.options, model.config, submission.options.pooling == RANK
    if options.pooling is not None and submission.params.prompt_logprobs is not None:
        raise EngineError("pooling and prompt_logprobs are both given: send one request for each")
    is_other = options.pooling is None or is_chat(submission.prompt) or is_ranked is not config.scores_pairs
    if config.is_encoder and is_other:
        raise no_answers(model.name, scores_pairs=config.scores_pairs)
    if options.pooling is not None and (options.dimensions or 0) > config.vector_size:
        raise EngineError(f"dimensions is {options.dimensions}, but vectors of {model.name} have {config.vector_size}")
    is_of_vectors = options.truncate or options.dimensions is not None or options.prompt_name is not None
    if options.pooling is None and is_of_vectors:
        raise EngineError("truncate, dimensions and prompt_name are for embeddings: leave them out, or give pooling")


class Prompts(Sessions):
    def tokenize(self, text: str, *, control: bool = False) -> list[int]:
        """The ids of `text`, without BOS; with `control`, names of control tokens in it become those tokens."""
        return self.model.tokenizer.tokenize(text, control=control)

    def prompt_ids(
        self, prompt: Prompt, options: PromptOptions | None = None, warn: Callable[[str], None] = lambda sentence: None
    ) -> list[int]:
        """The token ids of a prompt as `stream` tokenizes it, without a limit of length. warn: called with a sentence
        for each part of a message that is left out or changed. Raises EngineError."""
        options = options or PromptOptions()
        prompt = self.begin_with_pack(prompt, options)
        conversation = self._answers.conversation(prompt, options.cache_salt, warn)
        return prompt_ids(conversation.prompt, self.model, options, warn=warn, cut=conversation.read.cut)

    def detokenize(self, ids: Sequence[int], *, control: bool = False) -> str:
        """The text of `ids`, which start a sequence; `control` includes control tokens' names. Raises EngineError."""
        try:
            return text_of(self.model.tokenizer, ids, control=control)
        except ValueError as error:
            raise EngineError(str(error)) from None
