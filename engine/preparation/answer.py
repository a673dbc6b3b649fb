"""What an answer may be, and where it ends: a constraint, stop strings, a budget of its reasoning; and its drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from polarlm.engine.core import EngineCore
from polarlm.engine.parsing.answer_parser import AnswerParser
from polarlm.engine.parsing.tool_answer import parser_of
from polarlm.engine.requests.prompts import as_engine_error, is_chat, place_of_answer
from polarlm.engine.requests.request import Preparation, Submission
from polarlm.engine.sampling.detokenizer import AnswerStops
from polarlm.engine.sampling.grammars import Grammars
from polarlm.engine.sampling.reasoning_budget import ReasoningBudget, ReasoningEdges, budget_of


def constrain(engine: EngineCore) -> Preparation:
    """A schema, a grammar or a regular expression becomes a constraint. It begins behind the tag that closes the
    reasoning which the prompt opens, if it does, and that tag is part of the answer's text."""
    model = engine.model
    grammars = engine.grammars = Grammars(model.tokenizer, model.vocabulary.stop)
    engine._closing.callback(grammars.close)

    def prepare(submission: Submission) -> Submission:
        prompt, params, tag, warnings = submission.prompt, submission.params, "", list(submission.warnings)
        place = place_of_answer(prompt, model, submission.options) if params.is_constrained and is_chat(prompt) else ""
        if place == "inside":
            assert model.template.tags is not None
            tag = model.template.tags.close
            tag_ids = [token for name, token in model.tokenizer.control_tokens().items() if name == tag]
            params = replace(params, shown_tokens=(*params.shown_tokens, *tag_ids))
        constraint = grammars.constraint(params, submission.constraint, submission.gone, tag, warnings.append)
        return replace(submission, params=params, constraint=constraint, warnings=tuple(warnings))

    return prepare


def stop(engine: EngineCore) -> Preparation:
    """The answer ends at stop strings, which are looked for in the text of an answer to messages alone."""
    template, control = engine.model.template, engine.model.tokenizer.control_tokens()

    def prepare(submission: Submission) -> Submission:
        prompt, params = submission.prompt, submission.params
        stops = (*params.stop, *template.stops) if is_chat(prompt) else params.stop
        if not stops:
            return submission
        if params.stop_anywhere or not is_chat(prompt):
            return replace(submission, stops=AnswerStops(stops, AnswerParser(), {}))
        parser, tokens = parser_of(prompt, submission.options, engine.model)
        hidden = {token: name for name, token in control.items() if token in {*tokens}.difference(params.shown_tokens)}
        return replace(submission, stops=AnswerStops(stops, parser, hidden))

    return prepare


def limit_reasoning(engine: EngineCore) -> Preparation:
    """Reasoning ends within its budget. A warning says if the model has none to limit."""
    model = engine.model

    @as_engine_error()
    def prepare(submission: Submission) -> Submission:
        prompt, params, options = submission.prompt, submission.params, submission.options
        effort = options.template_variables.get("reasoning_effort")
        if not is_chat(prompt) or (params.reasoning_budget < 0 and effort is None):
            return submission
        budget, edges = budget_of(model, params.reasoning_budget, effort), None
        place = "after" if budget < 0 else place_of_answer(prompt, model, options)
        if place != "after":
            edges = ReasoningEdges.from_template(model, calls_tools=bool(options.tools))
        elif params.reasoning_budget > 0 and model.template.tags is None:
            sentence = "the budget of reasoning is ignored: this model's template knows no reasoning"
            return replace(submission, warnings=(*submission.warnings, sentence))
        if edges is None:
            return submission
        constraint = ReasoningBudget(budget, edges, model, submission.constraint, is_open=place == "inside")
        return replace(submission, constraint=constraint)

    return prepare


def draft(engine: EngineCore) -> Preparation:
    """A request has what makes its drafts."""
    drafting = engine._drafting
    return lambda one: replace(one, drafting=partial(drafting.drafts, one.ids, one.params))
