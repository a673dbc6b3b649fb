"""Settings on the page: they stay, empty ones show what is in force, and invalid ones lose no message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from polarlm import pack
from polarlm.engine import EngineConfig
from tests.server.page.visitor import Page
from tests.server.process import Process

pytestmark = pytest.mark.slow


def test_settings_are_there_after_a_reload_and_part_of_the_request(page: Page) -> None:
    chosen = {"system": "be brief", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    chosen |= {"repeat_penalty": 1.1, "max_tokens": 99, "seed": 5}
    page.choose(**chosen)
    page.reload()
    fields = {name: page.run("return document.getElementById(arguments[0]).value", name) for name in chosen}
    assert fields == {name: str(value) for name, value in chosen.items()}
    page.talk("one")
    asked = page.request_body() | {"system": page.contents()[0]}
    assert {name: asked[name] for name in chosen} == chosen
    page.click("#fields button[type=reset]")
    page.until(lambda: page.run("return localStorage.getItem('polarlm.settings')") == "{}")


def test_a_conversation_begins_with_a_pack(
    visit: Callable[[Process], Page], tiny_path: Path, tmp_path: Path, page: Page
) -> None:
    assert page.run("return document.getElementById('pack-row').hidden")  # a server without packs
    messages, file = [{"role": "system", "content": "The harbour has a captain."}], tmp_path / "harbour.pack"
    config = EngineConfig(weights=str(tiny_path), device="cpu", calibration=False)
    pack.write_pack(config, messages, [], file)
    with Process(tiny_path, tmp_path, "--pack", str(file), troubled=True) as process:
        page = visit(process)
        page.until(lambda: not page.run("return document.getElementById('pack-row').hidden"))
        assert page.run("return packs.options[0].value") == "harbour"
        page.choose(pack="harbour", temperature=0, max_tokens=4)
        page.talk("Who is it?")
        assert page.request_body()["pack"] == "harbour"
        page.reload()
        assert page.run("return document.getElementById('pack').value") == "harbour"
        page.open("about:blank")


LIMITED = """
from dataclasses import replace
from polarlm.engine import Engine
load = Engine.load
def limited(*arguments, **more):
    engine = load(*arguments, **more)
    engine.model = replace(engine.model, generation=replace(engine.model.generation, max_tokens=5))
    return engine
Engine.load = staticmethod(limited)
"""


def test_a_limit_of_the_models_is_shown_and_told(
    visit: Callable[[Process], Page], tiny_path: Path, tmp_path: Path
) -> None:
    with Process(tiny_path, tmp_path, troubled=True, prelude=LIMITED) as process:
        assert process.errors.read_text().count("Answers of this model end after 5 tokens, unless a request or") == 1
        page = visit(process)
        page.until(lambda: page.run("return max_tokens.placeholder") == "5")
        page.choose(temperature=0)
        page.send_and_wait("the rain ran")
        assert "5 tokens" in page.figures()
        assert "as long as the settings allow" in page.figures()
        page.open("about:blank")


def test_empty_fields_show_what_is_in_force(page: Page, server: Process) -> None:
    params = json.loads(server.get("/props"))["default_generation_settings"]["params"]
    for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "dry_multiplier"):
        assert float(page.run("return document.getElementById(arguments[0]).placeholder", name)) == params[name]
    placeholders = page.run("return [max_tokens, seed, cache_salt].map(({placeholder}) => placeholder)")
    assert placeholders == ["No limit", "Random", "None"]
    page.choose(dry_multiplier=0.5)
    page.talk("one")
    assert page.request_body()["dry_multiplier"] == 0.5
    assert "temperature" not in page.request_body()


def test_a_model_without_a_chat_template_says_so(page: Page) -> None:
    sentence = "This model has no chat template: it continues text, and was probably not made for chats."
    for is_default, shown in ((False, ""), (True, sentence)):
        props = {"default_generation_settings": {"params": {}}, "chat_template_is_default": is_default}
        page.run("showProps(arguments[0])", props)
        assert page.text("#untaught") == shown
    assert page.shown("#untaught")


def test_an_invalid_setting_keeps_the_message(page: Page) -> None:
    page.choose(top_p=1.5)
    page.send("the rain")
    assert page.run("return [rows.length, message.value, document.activeElement.id]") == [0, "the rain", "top_p"]


def test_what_beginners_do_not_need_is_folded_until_it_is_used(page: Page) -> None:
    def shown_fields() -> list[bool]:
        return [page.shown(each) for each in ("#temperature", "#max_tokens", "#context", "#top_p", "#seed", "#bits")]

    assert shown_fields() == [True, True, True, False, False, False]
    page.click("#engine summary")
    page.choose(top_p=0.5)
    page.reload()
    page.until(lambda: shown_fields() == [True] * 6)  # the engine stays open, and a setting shows its fold
    page.click("#sampling summary")
    page.run("top_p.value = 1.5")
    page.send("the rain")
    assert page.focused() == "top_p"
