"""A conversation of a thousand long answers: only what is near the view is built."""

from __future__ import annotations

import pytest

from tests.server.page.visitor import Page

pytestmark = pytest.mark.slow

MANY = 1000
ANSWER = "\n\n".join(
    ["## Head", "Some **bold** words, and `code`. " * 20, "- a\n- b", "```python\nx = 1\n```", "| a |\n|---|\n| 1 |"]
)


@pytest.fixture
def long(page: Page) -> Page:
    """The page in a new chat; the list has one conversation of MANY questions and answers."""
    page.run(
        """
        const [many, text] = arguments, chat = newConversation({});
        for (let place = 0, last = null; place < many; place += 1) {
          const asked = addMessage(chat, last, {role: "user", text: `question ${place}`});
          last = addMessage(chat, asked, {
            role: "assistant", text: `answer ${place}\\n\\n${text}`, reasoning: "", calls: [], ending: "stop",
            error: "", usage: {prompt: 9, completion: 9, cached: 0, places: {}}, rate: 9, thought: null,
          });
        }
        chats.set(chat.id, chat);
        drawList();
        return keepConversation(chat, true);
        """,
        MANY,
        ANSWER,
    )
    return page


def built(page: Page) -> list[int]:
    """The places of the messages whose elements are there."""
    return page.run("return rows.flatMap((row, place) => (row.foot ? [place] : []))")


def opened(page: Page) -> float:
    """The milliseconds from a new chat until the conversation of the list is painted."""
    page.click("#new")
    return page.run(
        """
        const begun = performance.now();
        document.querySelector("button.chat").click();
        return new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now() - begun))));
        """
    )


def test_a_thousand_long_answers_open_at_their_end_and_few_of_them_are_built(long: Page) -> None:
    assert min(opened(long) for _ in range(3)) < 1000
    assert len(long.texts()) == 2 * MANY
    assert built(long)[-1] == 2 * MANY - 1
    assert len(built(long)) < 20
    assert long.run("return log.scrollHeight - log.scrollTop - log.clientHeight") < 2
    assert long.run("return rows.at(-1).element.querySelectorAll('h4, strong, ul, pre, table').length") > 20


def test_what_comes_into_view_is_built_and_what_is_read_stays_where_it_is(long: Page) -> None:
    long.click("button.chat")
    long.run("log.scrollTop = log.scrollHeight / 2")
    seen = "return rows.findIndex(({element}) => element.getBoundingClientRect().bottom > 200)"
    long.until(lambda: long.run(seen) in built(long))
    moved = long.run(
        """
        const moved = [], frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        return (async () => {
          for (let step = 0; step < 40; step += 1) {
            const {element} = rows.find((row) => row.element.getBoundingClientRect().bottom > 200);
            const before = element.getBoundingClientRect().top;
            log.scrollTop -= 150;
            await frame();
            moved.push(Math.round(element.getBoundingClientRect().top - before));
          }
          return moved;
        })();
        """
    )
    assert set(moved) <= {149, 150, 151}  # a scroll bar rounds


def test_a_long_conversation_goes_on_and_what_is_not_built_is_there_as_text(long: Page) -> None:
    long.click("button.chat")
    assert 1 not in built(long)
    assert long.run("return rows[1].element.innerHTML").startswith("answer 0\n\n## Head")
    long.says(["more"])
    long.send_and_wait("on")
    assert long.text_of() == "more"
    long.run("log.scrollTop = 0")
    long.until(lambda: 0 in built(long))
    long.press_button("Edit", 0)
    long.until(lambda: long.shown(".edit textarea"))
