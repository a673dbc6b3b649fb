"""The page's fast tests: an answer comes, is text and no HTML, and ends. The others are slow: each loads a page."""

from __future__ import annotations

from tests.server.page.browser import CONTROL, ENTER, NO_MODIFIER
from tests.server.page.visitor import Page

ROUND = ["So", *["round", " and", " round,", " again "] * 400]
HOSTILE = r"""<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script> **<b>bold</b>** `<i>code</i>`

```html
</code></pre><svg onload="window.harmed = 1">
```
[a link](javascript:window.harmed=1) &lt;escaped&gt; $\href{javascript:window.harmed=1}{x}$
\(\htmlClass{send}{y} \htmlId{send}{y} \htmlStyle{position: fixed}{y} \includegraphics{https://b.example/c}\)"""


def test_a_message_is_sent_and_answered_and_the_focus_stays_where_somebody_writes(page: Page) -> None:
    page.says(["one"])
    page.type("#message", f"hello{CONTROL}{ENTER}{NO_MODIFIER}")
    page.until(lambda: page.done() and page.text_of() == "one")
    assert page.focused() == "message"


def test_text_of_the_user_and_of_the_model_is_never_html(page: Page) -> None:
    page.says(list(HOSTILE))
    page.run("message.value = arguments[0]", HOSTILE)
    page.send_and_wait("")
    code = ["figure", "figcaption", "span", "button", "pre", "code", *["span"] * 8]
    for text in (".question .text", ".answer"):
        script = (
            "return [...document.querySelectorAll(`${arguments[0]} *`)].filter((element) => !element.closest('.maths'))"
        )
        assert page.run(f"{script}.map((element) => element.localName)", text) == ["p", "strong", "code", *code, "p"]
        assert page.count(f"{text} .katex-html") == 2
        assert page.count(f"{text} .katex :is(a, img, [id], [class~=send], [href], [src], [style*=position])") == 0
        for piece in ('<img src=x onerror="window.harmed = 1">', "<b>bold</b>", "</code></pre><svg", "&lt;escaped&gt;"):
            assert piece in page.text(text)
    assert page.run("return window.harmed ?? null") is None


def test_a_looping_answer_is_stopped(page: Page) -> None:
    page.says(ROUND)
    page.send_and_wait("the wheel")
    assert "it repeated itself over and over" in page.figures()
    assert page.text("#status") == "Stopped."
    assert page.run("return window.signal.aborted")
    assert "".join(ROUND).startswith(page.text_of())
    pieces = len(page.text_of()) / len("".join(ROUND)) * len(ROUND)
    assert 300 <= pieces < 300 + 65
    assert page.text(".message .notice") == ""
    assert page.text(".assistant .foot .act") == "Regenerate"
