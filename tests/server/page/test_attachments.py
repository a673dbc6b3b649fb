"""Files that go with a message: text, code, PDF and images, counted in tokens, and removed again."""

from __future__ import annotations

import base64
import json

import pytest

from tests.server.page.browser import ENTER
from tests.server.page.visitor import Page
from tests.server.pdfs import made_pdf

pytestmark = pytest.mark.slow


def attach(page: Page, wait: bool = True, **files: bytes) -> None:
    """Chooses files; the first _ of a name is the dot. wait: until they are read."""
    script = """
        const chosen = new DataTransfer();
        for (const [name, data] of arguments[0]) {
          const type = name.endsWith(".png") ? "image/png" : "";
          chosen.items.add(new File([Uint8Array.from(atob(data), (sign) => sign.charCodeAt())], name, {type}));
        }
        attachments.files = chosen.files;
        attachments.dispatchEvent(new Event("change"));
    """
    page.run(script, [[name.replace("_", ".", 1), base64.b64encode(data).decode()] for name, data in files.items()])
    page.until(lambda: not wait or page.run("return attachedFiles.every(({text}) => text !== null)"))


def chips(page: Page) -> list[str]:
    return page.run("return [...document.querySelectorAll('#attached li')].map((item) => item.innerText)")


def test_text_and_pdf_go_with_a_message(page: Page) -> None:
    page.says(["one"], ["two"])
    attach(page, notes_md=b"a\r\n```\nb\n```\n", paper_pdf=made_pdf("Hello, PDF"))
    names = page.run("return attachedFiles.map(({name, tokens}) => [name, tokens])")
    assert [name for name, _ in names] == ["notes.md", "paper.pdf"]
    assert all(tokens > 3 for _, tokens in names)
    page.send_and_wait("What is it?")
    content = "notes.md:\n````\na\n```\nb\n```\n````\n\npaper.pdf:\n```\nHello, PDF\n```\n\nWhat is it?"
    assert page.request_body()["messages"] == [{"role": "user", "content": content}]
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
    assert page.request_body()["messages"] == [{"role": "user", "content": "words"}]


def test_what_is_no_text_or_too_long_is_said(page: Page) -> None:
    attach(page, bad_pdf=b"%PDF-1.7", x_bin=b"\0\xff", empty_txt=b" \n", large_txt=b"a " * (1 << 20))
    page.until(lambda: page.run("return attachedFiles.length") == 0)
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


SEES = """
    const real = window.fetch, [most] = arguments;
    window.fetch = async (path, options) => {
      const counts = path.endsWith("input_tokens") && options.body.includes("image_url");
      if (counts && options.body.length > most) return new Response("", {status: 413});
      if (counts) return Response.json({input_tokens: 300});
      const response = await real(path, options);
      if (!path.startsWith("props")) return response;
      const props = await response.json();
      return Response.json({...props, modalities: {vision: true}});
    };
    shownModel = ""; // the page asks for the model's properties again
    return look();
"""


def test_an_image_goes_with_a_message_and_stays_with_the_conversation(page: Page) -> None:
    """The model is said to read images, and its server counts their tokens."""
    picture = page.screenshot()
    address = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    page.run(SEES, 10_000_000)
    assert page.run("return document.getElementById('attach').title").startswith("Attach images, text")
    page.says(["A page."], ["Again."], ["And again."])
    attach(page, page_png=picture, notes_md=b"a")
    assert page.run("return document.querySelector('#attached img').naturalWidth") == 1280
    page.send_and_wait("What is it?")
    image, text = page.contents()[0]
    assert image == {"type": "image_url", "image_url": {"url": address}}
    assert text == {"type": "text", "text": "notes.md:\n```\na\n```\n\nWhat is it?"}
    page.press_button("Regenerate")
    page.until(lambda: page.done() and page.text_of() == "Again.")
    assert page.contents()[0] == [image, text]
    exported = page.export()
    page.press_button("Edit", 0)
    page.until(lambda: page.count(".edit .files img") == 1)
    page.press_button("Send", 0)
    page.until(lambda: page.done() and page.text_of() == "And again.")
    assert page.contents()[0][0] == image
    page.press_button("Branch", 0)
    page.until(lambda: len(page.titles()) == 2)
    page.reload()
    page.until(lambda: page.run("return document.querySelector('.question img')?.naturalWidth") == 1280)
    exported["conversations"][0]["id"] = "0" * 16
    page.import_text(json.dumps(exported))
    page.until(lambda: sorted(json.dumps(chat).count(address) for chat in page.kept()) == [1, 1, 2])


def test_an_image_that_is_too_large_is_scaled_and_a_model_without_images_gets_none(page: Page) -> None:
    picture = page.screenshot()
    attach(page, page_png=picture)
    assert page.text("#attached-says") == "page.png: This model reads text alone, no images."
    page.says(["one"])
    page.send_and_wait("words")
    page.reload()
    page.until(lambda: page.text(".user > .hint") == "page.png was left out.")
    page.press_button("Edit", 0)
    page.type(".edit textarea", "!" + ENTER)
    page.until(lambda: page.texts()[:1] == ["words!"] and page.done())
    assert page.text(".user > .hint") == "page.png was left out."
    page.run(SEES, len(picture))
    attach(page, page_png=picture)
    image = page.run("return attachedFiles[0].image")
    assert image.startswith("data:image/jpeg;base64,")
    assert len(image) < len(picture)


SLOW_COUNT = """
    const real = window.fetch;
    window.fetch = async (path, options) => {
      if (path.startsWith("stats") && window.state) return Response.json({model: "coder", state: window.state});
      while (/input_tokens|documents/.test(path) && !window.counted) await new Promise((done) => setTimeout(done, 20));
      return real(path, options);
    };
"""


def test_a_message_goes_as_soon_as_its_files_are_counted(page: Page) -> None:
    page.says(["one"])
    page.run(SLOW_COUNT)
    attach(page, wait=False, a_txt=b"first")
    page.type("#message", "words" + ENTER)
    page.until(lambda: page.text("#status") == "The message goes once its files are read …")
    page.run("window.state = 'loading'; look()")
    page.until(lambda: page.text("#status") == "Loading coder …")
    assert page.texts() == []
    page.run("window.state = ''; window.counted = true; look()")
    page.until(lambda: page.done() and page.texts() == ["words", "one"])
    assert page.contents() == ["a.txt:\n```\nfirst\n```\n\nwords"]
    assert page.text("#status") == "Answered."


def test_a_message_that_is_still_written_or_has_lost_its_file_does_not_go_by_itself(page: Page) -> None:
    page.says(["one"])
    page.run(SLOW_COUNT)
    attach(page, wait=False, a_txt=b"first")
    page.type("#message", "wor" + ENTER)
    page.type("#message", "ds")
    assert page.text("#status") == ""
    page.run("window.counted = true")
    page.until(lambda: page.run("return attachedFiles[0].text") == "first")
    page.run("window.counted = false")
    attach(page, wait=False, b_pdf=b"%PDF-1.7")
    page.type("#message", ENTER)
    page.until(lambda: page.text("#status").startswith("The message goes"))
    page.run("window.counted = true")
    page.until(lambda: page.text("#attached-says").startswith("b.pdf: "))
    assert page.text("#status") == ""
    assert page.texts() == []
