"""Tokens that end an answer, and how early they may."""

from __future__ import annotations

from typing import Any

import pytest

from polarlm.engine import Engine, SamplingParams
from tests.tiny import EOS, VOCABULARY

PROMPT = [9, 20, 33, 47, 5, 61, 72, 8, 90, 11, 12, 13]


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **more})


def eager(**more: Any) -> SamplingParams:
    """Parameters with which an answer ends as soon as it may."""
    return greedy(ignore_eos=False, logit_bias={EOS[0]: 1e5}, **more)


def test_an_answer_ends_before_a_stop_token(tiny: Engine) -> None:
    plain = tiny.generate(PROMPT, greedy()).token_ids
    stop = plain[9]
    answer = tiny.generate(PROMPT, greedy(stop_token_ids=(VOCABULARY - 1, stop)))
    assert (answer.token_ids, answer.finish_reason) == (plain[: plain.index(stop)], "stop")


@pytest.mark.parametrize("least", [0, 1, 5])
def test_no_answer_ends_before_min_tokens(tiny: Engine, least: int) -> None:
    assert tiny.generate(PROMPT, eager()).token_ids == ()
    answer = tiny.generate(PROMPT, eager(min_tokens=least, max_tokens=9))
    assert (len(answer.token_ids), answer.finish_reason) == (least, "stop")
    assert set(EOS).isdisjoint(answer.token_ids)


def test_eos_may_come_before_min_tokens_with_ignore_eos(tiny: Engine) -> None:
    """With ignore_eos the model's EOS tokens are tokens like others."""
    answer = tiny.generate(PROMPT, greedy(logit_bias={EOS[0]: 1e5}, min_tokens=3, max_tokens=4))
    assert answer.token_ids == (EOS[0],) * 4
