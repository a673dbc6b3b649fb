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
from tests.server.page.browser import ENTER, ESCAPE, TAB, Browser
from tests.server.page.test_tools import call
from tests.server.page.visitor import asked, done, press_button, roles, says, send, size, text_of
from tests.server.process import Process
from tests.tool_model import tool_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mcp") is None, reason="the extra mcp is not installed"),
]

ADD = call(0, "tools_add", '{"a": 2,', '"b": 3}')


@pytest.fixture(scope="module")
def keeper(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with MCP servers."""
    folder = tmp_path_factory.mktemp("mcp")
    with over_http() as web, Process(tiny_path, folder, "--mcp-config", str(mcp_file(folder, web))) as process:
        yield process


@pytest.fixture
def page(visit: Callable[[Process], Browser], keeper: Process) -> Iterator[Browser]:
    page = visit(keeper)
    page.until(lambda: page.shown("#mcp"))
    page.run("document.getElementById('mcp').open = true")
    yield page
    page.open("about:blank")
    eventually(keeper.is_idle)


def switch_on(page: Browser, place: int = 0) -> None:
    """Checks a server's box, and returns once it is ready or has failed."""
    page.click(f"#server-{place}")
    page.until(lambda: page.run(f"return ['ready', 'failed'].includes(mcpServers[{place}].state) && !connecting.size"))


def asks(page: Browser) -> str:
    """The question about a call; empty where there is none."""
    return page.text(".confirm .asks")


def press(page: Browser, name: str) -> None:
    """A button of the question, once it is there."""
    script = """const all = [...document.querySelectorAll(".confirm button")];
        const found = all.find((made) => made.textContent === arguments[0]);
        found?.click();
        return found !== undefined;"""
    page.until(lambda: page.run(script, name))


def results(page: Browser, which: int = -1) -> list[str]:
    """What a request has as results of tools."""
    return [each["content"] for each in asked(page, which)["messages"] if each["role"] == "tool"]


def test_servers_are_off_and_a_switched_on_one_has_its_tools(page: Browser) -> None:
    says(page, ["Hello."])
    send(page, "hi")
    page.until(lambda: text_of(page) == "Hello." and done(page))
    assert "tools" not in asked(page)
    switch_on(page)
    switch_on(page, 1)
    assert page.text("#servers summary") == "13 of 13 tools"
    page.click("#servers summary")
    page.click("#server-0-0")
    page.until(lambda: page.text("#servers summary") == "12 of 13 tools")
    send(page, "again")
    page.until(lambda: page.run("return asked.length") == 2)
    names = [tool["function"]["name"] for tool in asked(page)["tools"]]
    assert ("tools_add" in names, "tools_fail" in names, "web_add" in names) == (False, True, True)
    page.until(lambda: done(page))
    page.reload()
    page.until(lambda: page.run("return document.getElementById('server-0')?.checked"))
    assert page.text("#servers summary") == "12 of 13 tools"
    page.click("#new")
    assert page.run("return [...servers.querySelectorAll('input:checked')].length") == 0


def test_a_call_is_shown_and_runs_once_it_is_confirmed_by_the_keyboard_alone(page: Browser) -> None:
    says(page, ["I add.", *ADD], ["It is ", "5."])
    switch_on(page)
    send(page, "2 + 3?")
    page.until(lambda: asks(page) == "Run add of tools?")
    page.until(lambda: page.run("return document.activeElement.getAttribute('aria-label')") == "Run add of tools?")
    page.press(ENTER)  # a key that was meant for something else decides nothing
    page.press(" ")
    assert page.text("#status") == "It waits for your decision."
    page.press(TAB)
    assert page.run("return document.activeElement.getAttribute('aria-label')") == "Arguments"
    assert page.run("return document.activeElement.textContent") == '{\n  "a": 2,\n  "b": 3\n}'
    page.press(TAB)
    assert page.run("return document.activeElement.textContent") == "Run once"
    page.press(ENTER)
    page.until(lambda: text_of(page) == "It is 5." and done(page))
    assert roles(page) == ["user", "assistant", "tool", "assistant"]
    assert results(page) == ["5"]
    assert page.text(".tool summary") == "Result of tools_add"
    assert page.run("return document.activeElement.id") == "message"


def test_a_refusal_and_errors_are_told_to_the_model(page: Browser) -> None:
    broken = call(0, "tools_add", "{not json")
    says(page, ADD, call(1, "tools_fail", "{}"), broken, call(3, "tools_crash", "{}"), ["Sorry."])
    switch_on(page)
    send(page, "go")
    press(page, "Refuse")
    page.until(lambda: asks(page) == "Run fail of tools?")
    assert results(page) == ["The user refused this call."]
    press(page, "Run once")
    page.until(lambda: asks(page) == "Run crash of tools?")  # what is no JSON needs no question
    assert results(page)[1] == "Error executing tool fail"
    assert results(page)[2].startswith("The arguments are not JSON: ")
    press(page, "Run once")
    page.until(lambda: text_of(page) == "Sorry." and done(page))
    assert "out of luck" in results(page)[3]
    assert page.run("return document.querySelectorAll('.tool .failed').length") == 4
    assert page.text(".tool .failed summary") == "Error of tools_add"


def test_what_is_allowed_in_a_conversation_is_asked_again_after_many_calls_and_in_others(page: Browser) -> None:
    says(page, ADD)
    switch_on(page)
    send(page, "for ever")
    press(page, "Always in this conversation")
    page.until(lambda: "20 calls have run without a question." in page.text(".confirm"))
    assert results(page) == ["5"] * 21
    press(page, "Refuse")
    page.until(lambda: "20 calls have run" in page.text(".confirm"))
    page.click("#new")
    switch_on(page)
    send(page, "again")
    page.until(lambda: asks(page) != "")
    assert page.run("return rows.length") == 2


def test_nothing_runs_because_a_page_is_opened(page: Browser) -> None:
    """A permission is for what this tab has just received: a file or another browser may bring calls, too."""
    says(page, ADD, ["Five."])
    switch_on(page)
    send(page, "go")
    press(page, "Always in this conversation")
    page.until(lambda: text_of(page) == "Five." and done(page))
    page.run(
        """const call = {id: "b", name: "tools_add", arguments: '{"a": 1, "b": 1}', server: "tools", tool: "add"};
        addMessage(current, rows.at(-1).message, {role: "assistant", ...EMPTY, ending: "tool_calls", calls: [call]});
        return keepConversation(current).then(() => true);"""
    )
    page.reload()
    page.until(lambda: asks(page) == "Run add of tools?")
    assert (roles(page)[-1], page.run("return live")) == ("assistant", None)
    says(page, ["Two."])
    press(page, "Run once")
    page.until(lambda: text_of(page) == "Two." and done(page))


def test_the_question_comes_back_after_a_reload(page: Browser) -> None:
    says(page, [*ADD, *call(1, "tools_add", '{"a": 1, "b": 1}')])
    switch_on(page)
    send(page, "go")
    press(page, "Run once")
    page.until(lambda: asks(page) == "Run add of tools? (call 2 of 2)")
    page.reload()
    page.until(lambda: asks(page) == "Run add of tools? (call 2 of 2)")
    says(page, ["Done."])
    press(page, "Run once")
    page.until(lambda: text_of(page) == "Done." and done(page))
    assert results(page) == ["5", "2"]


def test_stop_ends_a_call_and_asks_again(page: Browser, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    says(page, call(0, "tools_hang", f'{{"begun": "{begun}", "ended": "{ended}"}}'), ["Well."])
    switch_on(page)
    send(page, "go")
    press(page, "Run once")
    eventually(begun.exists)
    page.until(lambda: page.text("#status") == "hang of tools is running …")
    page.press(ESCAPE)
    page.until(lambda: "It was started before" in page.text(".confirm"))
    eventually(ended.exists)
    assert page.text("#status") == "Stopped."
    page.type("#message", "never mind" + ENTER)
    page.until(lambda: text_of(page) == "Well." and done(page))
    assert results(page) == ["The user did not run this call."]


def test_leaving_a_conversation_ends_its_call(page: Browser, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    says(page, call(0, "tools_hang", f'{{"begun": "{begun}", "ended": "{ended}"}}'))
    switch_on(page)
    send(page, "go")
    press(page, "Run once")
    eventually(begun.exists)
    page.click("#new")
    eventually(ended.exists)
    page.click("button.chat")
    page.until(lambda: "It was started before" in page.text(".confirm"))


def test_another_tab_shows_what_became_of_a_call(page: Browser, keeper: Process) -> None:
    says(page, ADD, ["Five."])
    switch_on(page)
    send(page, "go")
    page.until(lambda: asks(page) == "Run add of tools?")
    with page.second() as other:
        other.open(f"{keeper.url}/{page.run('return location.hash')}")
        other.until(lambda: asks(other) == "Run add of tools?")
        press(page, "Always in this conversation")
        other.until(lambda: text_of(other) == "Five." and asks(other) == "")
        assert other.text(".tool summary") == "Result of tools_add"
        assert other.run("return allowed().size") == 0  # which holds for one tab


def test_a_server_that_fails_is_said_and_the_answer_goes_on_without_it(page: Browser) -> None:
    switch_on(page, 2)
    assert "absent is not available. There is no program" in page.text("#unconnected")
    says(page, ["Hello."])
    send(page, "hi")
    page.until(lambda: text_of(page) == "Hello." and done(page))
    assert "tools" not in asked(page)


def test_results_can_be_edited_and_exported_and_compacted(page: Browser) -> None:
    says(page, ADD, ["Five."], ["Six."])
    switch_on(page)
    send(page, "go")
    press(page, "Run once")
    page.until(lambda: text_of(page) == "Five." and done(page))
    press_button(page, "Edit", 2)
    page.type(".tool .results textarea", "1")
    page.click(".tool .results .main")
    page.until(lambda: text_of(page) == "Six." and done(page))
    assert results(page) == ["51"]
    read: dict[str, Any] = page.run("return readConversation(JSON.parse(JSON.stringify(current))).messages")
    calls = [made for message in read.values() for made in message.get("calls", [])]
    assert calls == [
        {"id": "call-0", "name": "tools_add", "arguments": '{"a": 2,"b": 3}', "server": "tools", "tool": "add"}
    ]


def test_a_model_calls_a_tool_and_gets_its_result(visit: Callable[[Process], Browser], tmp_path: Path) -> None:
    """By a real server, whose model knows nothing and has to call."""
    model = tool_model(tmp_path, HERMES)
    with Process(model, tmp_path, "--mcp-config", str(mcp_file(tmp_path))) as process:
        page = visit(process)
        page.until(lambda: page.shown("#mcp"))
        page.run("mcp.open = more.open = true; tool_choice.value = 'required'; max_tokens.value = 200; remember()")
        switch_on(page)
        page.run("mcpOn.tools = mcpServers[0].tools.map(({name}) => name).filter((name) => name !== 'pid'); remember()")
        send(page, "Which process are you?")
        page.until(lambda: asks(page) == "Run pid of tools?")
        press(page, "Run once")
        page.until(lambda: page.run("return rows.length") == 4 and done(page))
        result = page.run("return rows[2].message.results[0]")
        assert result["name"] == "tools_pid"
        assert int(result["text"]) > 0
        page.until(lambda: asks(page) == "Run pid of tools?")  # the model has read it, and has to call again
        page.open("about:blank")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_question_fits_the_screen(page: Browser, width: int) -> None:
    says(page, call(0, "tools_add", '{"a": "%s"}' % ("long" * 400)))
    switch_on(page)
    size(page, width, 800)
    send(page, "go")
    page.until(lambda: asks(page) != "")
    box = page.run(
        "const b = document.querySelector('.confirm').getBoundingClientRect(); return [b.left, b.right, b.bottom]"
    )
    assert box[0] >= 0
    assert box[1] <= width
    assert page.run("return document.documentElement.scrollWidth") <= width
