"""Files that go with a message: text, code and PDF, counted in tokens, and removed again."""

from __future__ import annotations

import base64

import pytest

from tests.server.page.browser import ENTER, Browser
from tests.server.page.visitor import asked, done, press_button, says, send, send_and_wait, shown, titles
from tests.server.pdfs import made_pdf


def attach(page: Browser, **files: bytes) -> None:
    """Chooses files; the first _ of a name is the dot."""
    script = """
        const chosen = new DataTransfer();
        for (const [name, data] of arguments[0]) {
          chosen.items.add(new File([Uint8Array.from(atob(data), (sign) => sign.charCodeAt())], name));
        }
        attachments.files = chosen.files;
        attachments.dispatchEvent(new Event("change"));
    """
    page.run(script, [[name.replace("_", ".", 1), base64.b64encode(data).decode()] for name, data in files.items()])
    page.until(lambda: page.run("return attached.every(({text}) => text !== null)"))


def chips(page: Browser) -> list[str]:
    return page.run("return [...document.querySelectorAll('#attached li')].map((item) => item.innerText)")


@pytest.mark.slow
def test_text_and_pdf_go_with_a_message(page: Browser) -> None:
    says(page, ["one"], ["two"])
    attach(page, notes_md=b"a\r\n```\nb\n```\n", paper_pdf=made_pdf("Hello, PDF"))
    names = page.run("return attached.map(({name, tokens}) => [name, tokens])")
    assert [name for name, _ in names] == ["notes.md", "paper.pdf"]
    assert all(tokens > 3 for _, tokens in names)
    send_and_wait(page, "What is it?")
    content = "notes.md:\n````\na\n```\nb\n```\n````\n\npaper.pdf:\n```\nHello, PDF\n```\n\nWhat is it?"
    assert asked(page)["messages"] == [{"role": "user", "content": content}]
    assert chips(page) == []
    page.reload()
    page.until(lambda: shown(page) == ["What is it?", "one"])
    page.click(".file summary")
    page.until(lambda: page.text(".file pre") == "a\n```\nb\n```\n")
    page.type("#search", "hello, pdf")
    assert titles(page) == ["What is it?"]


@pytest.mark.slow
def test_a_file_is_removed_before_and_after_sending(page: Browser) -> None:
    says(page, ["one"], ["two"])
    attach(page, a_txt=b"first", b_txt=b"second")
    page.click("#attached li:first-child button")
    assert [text.split("\n")[0] for text in chips(page)] == ["b.txt"]
    page.type("#message", ENTER)  # a file is a message, too
    page.until(lambda: done(page) and len(shown(page)) == 2)
    assert titles(page) == ["b.txt"]
    press_button(page, "Edit", 0)
    assert page.run("return document.querySelector('.files button').ariaLabel") == "Remove b.txt"
    page.click(".files button")
    page.type(".edit textarea", "words" + ENTER)
    page.until(lambda: done(page) and shown(page) == ["words", "two"])
    assert asked(page)["messages"] == [{"role": "user", "content": "words"}]


@pytest.mark.slow
def test_what_is_no_text_or_too_long_is_said(page: Browser) -> None:
    attach(page, bad_pdf=b"%PDF-1.7", x_bin=b"\0\xff", empty_txt=b" \n", large_txt=b"a " * (1 << 20))
    page.until(lambda: page.run("return attached.length") == 0)
    said = page.text("#attached-says")
    for sentence in (
        "bad.pdf: This PDF is damaged.",
        "x.bin: This file is neither text (UTF-8) nor a PDF.",
        "empty.txt: This file is empty.",
        "large.txt: The request is larger than 1048576 bytes.",
    ):
        assert sentence in said
    attach(page, long_txt=b"word " * 200)
    assert "and the context has 256." in page.text("#attached-says")
    send(page, "x")  # the server refuses it with a sentence, and the file is not lost
    page.until(lambda: done(page) and "exceeds the available context" in page.text(".notice"))
    assert page.run("return rows[0].message.files.length") == 1


@pytest.mark.slow
def test_a_file_is_text_not_html(page: Browser) -> None:
    says(page, ["one"])
    page.run("attach([new File(['<b>bold</b><script>1</script>'], '<i>name.html')])")
    page.until(lambda: page.run("return attached[0]?.text"))
    send_and_wait(page, "x")
    page.click(".file summary")
    page.until(lambda: page.text(".file pre") == "<b>bold</b><script>1</script>")
    assert page.run("return document.querySelectorAll('.file :is(b, i, script)').length") == 0
