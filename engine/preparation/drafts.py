"""A request's drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from polarlm.engine.core import EngineCore
from polarlm.engine.requests.request import Preparation


def draft(engine: EngineCore) -> Preparation:
    """A request has what makes its drafts, unless its tokens cannot be sampled ahead."""
    drafting = engine._drafting
    return lambda one: replace(one, drafting=partial(drafting.drafts, one.ids, one.params))
