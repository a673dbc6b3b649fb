"""A server of several models: the page chooses one for each conversation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.models.running import KEY, Front, front, two_models
from tests.server.page.browser import ENTER
from tests.server.page.visitor import Page

pytestmark = pytest.mark.slow


@pytest.fixture
def several(tmp_path_factory: pytest.TempPathFactory, window: Page) -> Iterator[tuple[Page, Front]]:
    """The page of a server of the models `big` and `small`, neither of them loaded."""
    with front(two_models(tmp_path_factory.mktemp("models"))) as server:
        window.size(1280, 800)
        window.open(server.url)
        window.until(lambda: window.shown("#door"))
        window.type("#key", KEY + ENTER)
        window.until(lambda: window.shown("#choice") and window.run("return choice.value") != "")  # it asks twice
        yield window, server
        window.open("about:blank")


def take(page: Page, name: str) -> None:
    page.run(
        "choice.focus(); choice.value = arguments[0]; choice.dispatchEvent(new Event('change', {bubbles: true}))", name
    )


def test_a_model_is_chosen_and_loaded_by_the_first_message(several: tuple[Page, Front]) -> None:
    page, server = several
    options = page.run("return [...choice.options].map(({text}) => text)")
    assert (options, page.run("return choice.value")) == (["big", "small"], "big")
    assert page.run("return choice.labels[0].textContent") == "Model"
    page.until(lambda: page.text("#types") == "The model is not in memory. A message loads it.")
    take(page, "small")
    page.choose(max_tokens=4)
    page.run(
        """
        window.told = new Set();
        new MutationObserver(() => told.add($("status").textContent)).observe($("status"), {childList: true});
        """
    )
    page.send("first")
    page.until(lambda: page.done() and page.figures().startswith("small · "))
    told = page.run("return [...told]")
    assert {"Loading the model …", "The model is loading …"} & {*told}, told
    page.until(lambda: "bits/value" in page.text("#bits"))
    assert (server.state("big"), server.state("small")) == ("unloaded", "loaded")
    page.click("#new")
    assert page.run("return choice.value") == "small"  # as the last conversation
    take(page, "big")
    page.send("second")
    page.until(lambda: page.done() and page.figures().startswith("big · "))
    page.reload()
    page.until(lambda: page.titles() == ["second", "first"])
    page.until(lambda: page.run("return choice.value") == "big")
    page.click("li:last-child .chat")
    assert page.run("return choice.value") == "small"


def test_a_model_that_is_gone_is_named_and_refused_in_a_sentence(several: tuple[Page, Front]) -> None:
    page, _ = several
    page.run("chosenModel = 'gone'; showChoice(); remember()")
    assert page.run("return choice.selectedOptions[0].text") == "gone (not here)"
    page.send("first")
    page.until(lambda: page.done() and "big" in page.text(".notice"))
    assert "gone" in page.text(".notice")
