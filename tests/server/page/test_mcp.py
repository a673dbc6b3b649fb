"""Tools of MCP servers on the page: real servers, and answers that call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.call_templates import HERMES
from tests.server.lines import eventually
from tests.server.mcp.faults import mcp_file, over_http
from tests.server.page.browser import ENTER, ESCAPE, TAB
from tests.server.page.visitor import Page, Piece, call
from tests.server.process import Process
from tests.tool_model import tool_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mcp") is None, reason="the extra mcp is not installed"),
]

ADD = call(0, "tools_add", '{"a": 2,', '"b": 3}')


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("mcp")
    with over_http() as web, Process(tiny_path, folder, "--mcp-config", str(mcp_file(folder, web))) as process:
        yield process


@pytest.fixture
def page(page: Page) -> Page:
    page.until(lambda: page.shown("#mcp"))
    page.run("document.getElementById('mcp').open = true")
    return page


def switch_on(page: Page, place: int = 0) -> None:
    """Checks a server's box, and returns once it is ready or has failed."""
    page.click(f"#server-{place}")
    page.until(lambda: page.run(f"return ['ready', 'failed'].includes(mcpServers[{place}].state) && !connections.size"))


def begin(page: Page, *answers: list[Piece]) -> None:
    """Switches the first server on, and sends a message that has these answers."""
    page.says(*answers)
    switch_on(page)
    page.send("go")


def asks(page: Page) -> str:
    """The question about a call; empty where there is none."""
    return page.text(".confirm .asks")


def results(page: Page, which: int = -1) -> list[str]:
    return [each["content"] for each in page.request_body(which)["messages"] if each["role"] == "tool"]


def test_servers_are_off_and_a_switched_on_one_has_its_tools(page: Page) -> None:
    page.talk("Hello.")
    assert "tools" not in page.request_body()
    switch_on(page)
    switch_on(page, 1)
    assert page.text("#servers summary") == "12 of 12 tools"
    page.click("#servers summary")
    page.click("#server-0-0")
    page.until(lambda: page.text("#servers summary") == "11 of 12 tools")
    page.send_and_wait("again")
    names = [tool["function"]["name"] for tool in page.request_body()["tools"]]
    assert ("tools_add" in names, "tools_fail" in names, "web_add" in names) == (False, True, True)
    page.reload()
    page.until(lambda: page.run("return document.getElementById('server-0')?.checked"))
    assert page.text("#servers summary") == "11 of 12 tools"
    page.click("#new")
    assert page.count("#servers input:checked") == 0


def test_a_call_is_shown_and_runs_once_it_is_confirmed_by_the_keyboard_alone(page: Page) -> None:
    begin(page, ["I add.", *ADD], ["It is ", "5."])
    page.until(lambda: asks(page) == "Run add of tools?")
    page.until(lambda: page.focused() == "Run add of tools?")
    page.press(ENTER)  # a key that was meant for something else decides nothing
    page.press(" ")
    assert page.text("#status") == "It waits for your decision."
    page.press(TAB)
    assert page.focused() == "Arguments"
    assert page.text(".confirm pre") == '{\n  "a": 2,\n  "b": 3\n}'
    page.press(TAB)
    assert page.focused() == "Run once"
    page.press(ENTER)
    page.until(lambda: page.text_of() == "It is 5." and page.done())
    assert page.roles() == ["user", "assistant", "tool", "assistant"]
    assert results(page) == ["5"]
    assert page.text(".tool summary") == "Result of tools_add"
    assert page.focused() == "message"


def test_a_refusal_and_errors_are_told_to_the_model(page: Page) -> None:
    broken = call(0, "tools_add", "{not json")
    begin(page, ADD, call(1, "tools_fail", "{}"), broken, call(3, "tools_crash", "{}"), ["Sorry."])
    page.press_button("Refuse")
    page.until(lambda: asks(page) == "Run fail of tools?")
    assert results(page) == ["The user refused this call."]
    page.press_button("Run once")
    page.until(lambda: asks(page) == "Run crash of tools?")  # what is no JSON needs no question
    assert results(page)[1] == "Error executing tool fail"
    assert results(page)[2].startswith("The arguments are not JSON: ")
    page.press_button("Run once")
    page.until(lambda: page.text_of() == "Sorry." and page.done())
    assert "out of luck" in results(page)[3]
    assert page.count(".tool .failed") == 4
    assert page.text(".tool .failed summary") == "Error of tools_add"


def test_what_is_allowed_in_a_conversation_is_asked_again_after_many_calls_and_in_others(page: Page) -> None:
    begin(page, ADD)
    page.press_button("Always in this conversation")
    page.until(lambda: "20 calls have run without a question." in page.text(".confirm"))
    assert results(page) == ["5"] * 21
    page.press_button("Refuse")
    page.until(lambda: "20 calls have run" in page.text(".confirm"))
    page.click("#new")
    switch_on(page)
    page.send("again")
    page.until(lambda: asks(page) != "")
    assert page.run("return rows.length") == 2


def test_nothing_runs_because_a_page_is_opened(page: Page) -> None:
    """A permission is for what this tab has just received: a file or another browser may bring calls, too."""
    begin(page, ADD, ["Five."])
    page.press_button("Always in this conversation")
    page.until(lambda: page.text_of() == "Five." and page.done())
    page.run(
        """const call = {id: "b", name: "tools_add", arguments: '{"a": 1, "b": 1}', server: "tools", tool: "add"};
        const answer = {role: "assistant", ...readAnswer({}), ending: "tool_calls", calls: [call]};
        addMessage(current, rows.at(-1).message, answer);
        return keepConversation(current).then(() => true);"""
    )
    page.reload()
    page.until(lambda: asks(page) == "Run add of tools?")
    assert (page.roles()[-1], page.run("return live")) == ("assistant", None)
    page.says(["Two."])
    page.press_button("Run once")
    page.until(lambda: page.text_of() == "Two." and page.done())


def test_the_question_comes_back_after_a_reload(page: Page) -> None:
    begin(page, [*ADD, *call(1, "tools_add", '{"a": 1, "b": 1}')])
    page.press_button("Run once")
    page.until(lambda: asks(page) == "Run add of tools? (call 2 of 2)")
    page.reload()
    page.until(lambda: asks(page) == "Run add of tools? (call 2 of 2)")
    page.says(["Done."])
    page.press_button("Run once")
    page.until(lambda: page.text_of() == "Done." and page.done())
    assert results(page) == ["5", "2"]


@pytest.mark.parametrize("how", ["stop", "leave"])
def test_a_call_ends_when_it_is_stopped_or_the_conversation_is_left(page: Page, tmp_path: Path, how: str) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    begin(page, call(0, "tools_hang", f'{{"begun": "{begun}", "ended": "{ended}"}}'), ["Well."])
    page.press_button("Run once")
    eventually(begun.exists)
    page.until(lambda: page.text("#status") == "hang of tools is running …")
    if how == "stop":
        page.press(ESCAPE)
    else:
        page.click("#new")
        page.click("button.chat")
    page.until(lambda: "It was started before" in page.text(".confirm"))
    eventually(ended.exists)
    page.send("never mind")
    page.until(lambda: page.text_of() == "Well." and page.done())
    assert results(page) == ["The user did not run this call."]


def test_another_tab_shows_what_became_of_a_call(page: Page, server: Process) -> None:
    begin(page, ADD, ["Five."])
    page.until(lambda: asks(page) == "Run add of tools?")
    with page.second() as other:
        other.open(f"{server.url}/{page.run('return location.hash')}")
        other.until(lambda: asks(other) == "Run add of tools?")
        page.press_button("Always in this conversation")
        other.until(lambda: other.text_of() == "Five." and asks(other) == "")
        assert other.text(".tool summary") == "Result of tools_add"
        assert other.run("return permissions().size") == 0  # which holds for one tab


def test_a_server_that_fails_is_said_and_the_answer_goes_on_without_it(page: Page) -> None:
    switch_on(page, 2)
    assert "absent is not available. There is no program" in page.text("#unconnected")
    shown = "return document.body.innerText.split('There is no program').length - 1"
    assert page.run(shown) == 1
    page.size(390, 844)
    page.run("mcp.open = true")
    page.click("#open-settings")  # which cover the composer
    assert page.shown("#servers .wrong")
    page.press(ESCAPE)
    page.talk("Hello.")
    assert "tools" not in page.request_body()


def test_a_call_is_exported_with_the_server_that_it_went_to(page: Page) -> None:
    begin(page, ADD, ["Five."])
    page.press_button("Run once")
    page.until(lambda: page.text_of() == "Five." and page.done())
    read: dict[str, Any] = page.run("return readConversation(JSON.parse(JSON.stringify(current))).messages")
    calls = [made for message in read.values() for made in message.get("calls", [])]
    assert calls == [
        {"id": "call-0", "name": "tools_add", "arguments": '{"a": 2,"b": 3}', "server": "tools", "tool": "add"}
    ]


def test_a_model_calls_a_tool_and_gets_its_result(visit: Callable[[Process], Page], tmp_path: Path) -> None:
    """By a real server, whose model knows nothing and has to call."""
    model = tool_model(tmp_path, HERMES)
    with Process(model, tmp_path, "--mcp-config", str(mcp_file(tmp_path))) as process:
        page = visit(process)
        page.until(lambda: page.shown("#mcp"))
        page.run("mcp.open = more.open = true; tool_choice.value = 'required'; max_tokens.value = 200; remember()")
        switch_on(page)
        page.run("mcpOn.tools = mcpServers[0].tools.map(({name}) => name).filter((name) => name !== 'pid'); remember()")
        page.send("Which process are you?")
        page.until(lambda: asks(page).startswith("Run pid of tools?"))
        calls: list[dict[str, Any]] = page.run("return rows[1].message.calls")  # random weights may call several times
        for _ in calls:
            page.press_button("Run once", 1)
        page.until(lambda: page.run("return rows.length") == 4 and page.done())
        result = page.run("return rows[2].message.results[0]")
        assert result["name"] == "tools_pid"
        assert int(result["text"]) > 0
        page.open("about:blank")


def test_the_question_fits_the_screen(page: Page) -> None:
    begin(page, call(0, "tools_add", '{"a": "%s"}' % ("long" * 400)))
    page.size(390, 800)
    page.until(lambda: asks(page) != "")
    box = "const b = document.querySelector('.confirm').getBoundingClientRect(); return [b.left >= 0, b.right <= 390]"
    assert page.run(box) == [True, True]
    assert page.run("return document.documentElement.scrollWidth") <= 390
