"""Files that go with a message: text, code and PDF, counted in tokens, and removed again."""

from __future__ import annotations

import base64

import pytest

from tests.server.page.browser import ENTER
from tests.server.page.visitor import Page
from tests.server.pdfs import made_pdf

pytestmark = pytest.mark.slow


def attach(page: Page, **files: bytes) -> None:
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


def chips(page: Page) -> list[str]:
    return page.run("return [...document.querySelectorAll('#attached li')].map((item) => item.innerText)")


def test_text_and_pdf_go_with_a_message(page: Page) -> None:
    page.says(["one"], ["two"])
    attach(page, notes_md=b"a\r\n```\nb\n```\n", paper_pdf=made_pdf("Hello, PDF"))
    names = page.run("return attached.map(({name, tokens}) => [name, tokens])")
    assert [name for name, _ in names] == ["notes.md", "paper.pdf"]
    assert all(tokens > 3 for _, tokens in names)
    page.send_and_wait("What is it?")
    content = "notes.md:\n````\na\n```\nb\n```\n````\n\npaper.pdf:\n```\nHello, PDF\n```\n\nWhat is it?"
    assert page.asked()["messages"] == [{"role": "user", "content": content}]
    assert chips(page) == []
    page.reload()
    page.until(lambda: page.texts() == ["What is it?", "one"])
    page.click(".file summary")
    page.until(lambda: page.text(".file pre") == "a\n```\nb\n```\n")
    page.type("#search", "hello, pdf")
    assert page.titles() == ["What is it?"]


def test_a_file_is_removed_before_and_after_sending(page: Page) -> None:
    page.says(["one"], ["two"])
    attach(page, a_txt=b"first", b_txt=b"second")
    page.click("#attached li:first-child button")
    assert [text.split("\n")[0] for text in chips(page)] == ["b.txt"]
    page.type("#message", ENTER)  # a file is a message, too
    page.until(lambda: page.done() and len(page.texts()) == 2)
    assert page.titles() == ["b.txt"]
    page.press_button("Edit", 0)
    assert page.run("return document.querySelector('.files button').ariaLabel") == "Remove b.txt"
    page.click(".files button")
    page.type(".edit textarea", "words" + ENTER)
    page.until(lambda: page.done() and page.texts() == ["words", "two"])
    assert page.asked()["messages"] == [{"role": "user", "content": "words"}]


def test_what_is_no_text_or_too_long_is_said(page: Page) -> None:
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
    page.send("x")  # the server refuses it with a sentence, and the file is not lost
    page.until(lambda: page.done() and "exceeds the available context" in page.text(".notice"))
    assert page.run("return rows[0].message.files.length") == 1
