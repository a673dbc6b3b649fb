"""What is done to a submission before it is queued."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest

from polarlm.engine import Engine, SamplingParams, preparation
from polarlm.engine.requests.request import Submission


def test_every_function_that_prepares_has_its_place() -> None:
    names = [one.name for one in pkgutil.iter_modules(preparation.__path__)]
    modules = [importlib.import_module(f"{preparation.__name__}.{name}") for name in names]
    functions = [one for module in modules for one in vars(module).values() if callable(one)]
    returned = {one: getattr(one, "__annotations__", {}).get("return", "") for one in functions}
    found = {one for one, what in returned.items() if what.startswith("Preparation")}
    assert found == {*preparation.ORDER}


def test_what_a_feature_makes_of_a_submission_is_what_is_queued(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def shorten(submission: Submission) -> Submission:
        return replace(submission, params=replace(submission.params, max_tokens=2), warnings=("it is cut",))

    monkeypatch.setattr(tiny, "_preparations", [*tiny._preparations, shorten])
    tray: list[Any] = []
    ticket = tiny.submit([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True), into=tray)
    while tiny.work():
        pass
    assert ticket.warnings == tray[-1].warnings == ("it is cut",)
    assert tray[-1].usage.completion_tokens == 2
