"""What a model writes does not stop the page: what is drawn is bounded, the time is linear, and no text is lost; of a
conversation of a thousand long answers, only what is near the view is built."""

from __future__ import annotations

import pytest

from tests.server.page.visitor import Page

pytestmark = pytest.mark.slow

LENGTH = 100_000  # characters of an answer
EXPANDING = "x" * 1000

# Draws a text as an answer that comes in twenty pieces, with the layout after each: the milliseconds, the elements, and
# the text that is shown.
DRAW = """
    const [text] = arguments, host = make("div", "answer text");
    $("turns").append(host);
    const begun = performance.now(), markdown = new Markdown(host), piece = Math.ceil(text.length / 20);
    for (let at = 0; at < text.length; at += piece) {
        markdown.write(text.slice(at, at + piece));
        markdown.flush();
        host.offsetHeight;
    }
    markdown.end();
    host.offsetHeight;
    const taken = performance.now() - begun, elements = host.getElementsByTagName("*").length;
    for (const drawn of host.querySelectorAll(".maths > :not(.source), button:not(.note)")) drawn.remove();
    const shown = host.textContent;
    host.remove();
    return [taken, elements, shown];
"""

UNITS = {
    "words": "word ",
    "one word": "x",
    "lines": "a\n",
    "paragraphs": "a\n\n",
    "backticks": "`",
    "code spans": "`` ` ",
    "emphasis": "*",
    "open emphasis": "**a ",
    "struck": "~~a ",
    "nested emphasis": "**__~~*_a_*~~__** ",
    "escapes": "\\",
    "open formulas": "\\(a ",
    "open lines": "\n\\[a",
    "prices": "$a ",
    "formulas": "$x$ ",
    "links": "[a](https://b.example) ",
    "open links": "[a](",
    "addresses": "http://.",
    "footnotes": "[^1]",
    "marks on a letter": "\u0301",
    "colours of emoji": "\U0001f3fb",
    "items": "- 1\n",
    "nested items": "".join(f"{' ' * 2 * level}- a\n" for level in range(14)),
    "quotes": "> 1\n",
    "deep quotes": ">",
    "deep items": "- ",
    "deep brackets": "[",
    "deep images": "![",
    "headings": "# 1\n",
    "rows": "|a|b|\n|-|-|\n" + "|1|2|\n" * (LENGTH // 6),
    "columns": "|a" * 160 + "|\n" + "|-" * 160 + "|\n" + "|\n" * (LENGTH // 2),
    "a cell": "|a|b|\n|-|-|\n|" + "a " * (LENGTH // 2),
    "code": "```java\n" + "aaaa $a\n" * (LENGTH // 8),
    "code of one word": "```java\n" + "a" * LENGTH,
    "blocks of code": "```markdown\n" + "[a](" * 100 + "\n```\n",
    "nested code": "```js\n" + "`${" * (LENGTH // 3),
}


@pytest.mark.parametrize("kind", UNITS)
def test_the_time_is_linear_in_the_length(drawing: Page, kind: str) -> None:
    unit = UNITS[kind]
    text = (unit * (LENGTH // len(unit) + 1))[:LENGTH]
    drawing.run(DRAW, text[: LENGTH // 16])  # so that the browser has compiled it
    short, _, _ = drawing.run(DRAW, text[: LENGTH // 16])
    long, elements, _ = drawing.run(DRAW, text)
    assert long < 64 * max(short, 20)  # 16 times as long a text: 256 times the time, if the time were quadratic
    assert elements < LENGTH


@pytest.mark.parametrize("mark", ["> ", "- ", "1. ", "[", "![", "**a *b "])
def test_what_is_too_deep_for_a_layout_is_text(drawing: Page, mark: str) -> None:
    host = "const host = make('div'), markdown = new Markdown(host); markdown.write(arguments[0]); markdown.end();"
    script = f"{host} return [host.textContent, depthOf(host)];"
    text, depth = drawing.run(script, mark * 10_000 + "end" + " c** d*" * 500)
    assert "end" in text
    assert depth < 60


MANY_LETTERS = [  # a few characters draw each of the letters again
    rf"\def\a{{{EXPANDING}}}" + r"\a" * 400,
    rf"\gdef\a{{{EXPANDING}}}" + r"\a" * 400,
    rf"\edef\a{{{EXPANDING}}}" + r"\a" * 400,
    rf"\newcommand\a{{{EXPANDING}}}" + r"\a" * 400,
    rf"\renewcommand\dots{{{EXPANDING}}}" + r"\dots" * 400,
    rf"\providecommand\a{{{EXPANDING}}}" + r"\a" * 400,
    rf"\bra@ket{{}}{{{EXPANDING}}}{{}}{{}}{{{'|' * 400}}}",
    r"\let\a\dots" + r"\a" * 400,
]
MANY_ELEMENTS = [
    r"\begin{matrix}" + "a&" * 2000 + r"\end{matrix}",
    r"\begin{align}" + r"a&=b&c&=d\\" * 400 + r"\end{align}",
    r"\sqrt{a}" * 600,
    r"x^{" * 80 + "}" * 80,
    r"\begin{gathered}" + r"\rule{20em}{20em}\\" * 50 + r"\end{gathered}",
    "a" * 6000,
]


@pytest.mark.parametrize("formula", MANY_LETTERS + MANY_ELEMENTS, ids=lambda formula: formula[:24])
def test_a_formula_that_draws_too_much_is_shown_as_it_was_written(drawing: Page, formula: str) -> None:
    for source in (f"$${formula}$$", f"\\({formula}\\)" if len(formula) < 2000 else f"\\[{formula}\\]"):
        taken, elements, shown = drawing.run(DRAW, source)
        assert shown == source
        assert elements < 10
        assert taken < 5000  # KaTeX alone takes a minute for the first


def test_the_formulas_of_an_answer_draw_so_many_elements_in_all(drawing: Page) -> None:
    text = "".join(f"$a_{{{place}}}^b$\n\n" for place in range(LENGTH // 14))
    _, elements, shown = drawing.run(DRAW, text)
    assert 30_000 < elements < 60_000
    assert shown.count("$a_") == LENGTH // 14
    assert drawing.run("return formula('$x$', {elements: 9}) !== null")  # the next answer has room of its own


def test_colours_that_take_too_long_are_left_out_and_no_text_with_them(drawing: Page) -> None:
    """Also deeper than the stack."""
    for code in ("`${" * 16_000, "[a](" * 12_000 + "\n", "a" * 49_000):
        source = f"```{'markdown' if '[' in code else 'js'}\n{code}\n```"
        _, elements, shown = drawing.run(DRAW, source)
        assert shown.removeprefix("js").removeprefix("markdown") == code.removesuffix("\n") + "\n" * code.endswith("\n")
        assert elements < LENGTH


def test_a_comment_of_many_lines_is_coloured_to_its_end(drawing: Page) -> None:
    code = "let a = 1;\n/*\n" + "comment\n" * 400 + "*/\nlet b = 2;\n"
    script = """
        const host = make("div"), markdown = new Markdown(host);
        markdown.write(arguments[0]);
        markdown.end();
        const of = (name) => [...host.querySelectorAll(`.hljs-${name}`)].map(({textContent}) => textContent);
        return [of("comment").join(""), of("keyword")];
    """
    comment, keywords = drawing.run(script, f"```js\n{code}```")
    assert comment == code[code.index("/*") : code.index("*/") + 2]
    assert keywords == ["let", "let"]


def test_code_has_colours_while_it_comes_and_what_is_selected_stays(drawing: Page) -> None:
    script = """
        const host = make("div"), markdown = new Markdown(host), seen = [];
        document.body.append(host);
        for (const line of ["```python\\n", "def a():\\n", "    return 1\\n", "x = ", "2\\n", "```\\n"]) {
            markdown.write(line);
            markdown.flush();
            if (seen.length === 3) getSelection().selectAllChildren(host.querySelector("code span"));
            seen.push(host.querySelectorAll("code span").length);
        }
        const selected = getSelection().toString();
        host.remove();
        return [seen, selected];
    """
    seen, selected = drawing.run(script)
    assert seen[1] == 0  # a line is coloured once another one follows
    assert 0 < seen[2] < seen[3] < seen[-1]
    assert selected == "def"


def test_the_arguments_of_a_call_are_indented_unless_most_of_it_were_spaces(drawing: Page) -> None:
    deep = "[" * 5000 + "]" * 5000
    wide = "[" * 100 + "1," * 50_000 + "1" + "]" * 100
    assert drawing.run("return arguments[0].map((json) => indentedJson(json) === json)", [deep, wide]) == [True, True]
    assert drawing.run('return indentedJson(\'{"a": [1, {"b": 2}]}\')').count("\n") == 7


def test_an_answer_is_drawn_the_same_however_it_comes(drawing: Page) -> None:
    """Random mixtures of all marks, at once and in pieces of a few characters."""
    script = r"""
        const pieces = ["a", "b ", "word ", "*", "**", "_", "__", "~~", "`", "``", "```", "$", "$$", "\\", "\\(", "\\)",
            "\\[", "\\]", "[", "](", "[a](https://b.c)", "![", "![a](https://b.c)", ")", "https://a.b/c", "http://",
            "(", ".", "\n", "\n", "\n\n", "- ", "1. ", "> ", "# ", "|", "|a|b|\n|-|-|\n", "| x |", "\n$$\n", "\n\\[",
            "12", "👩‍👩‍👧", "[^1]", " ", "\t", "\\*", "\\|", "```js\nlet x = 1;\n", "\n```\n", "א", "\r\n", "[ ] "];
        const form = (node) => node.nodeType === 3 ? node.data.replace(/[ \t]+/g, " ")
            : `<${node.localName}${node.href ?? ""}>${[...node.childNodes].map(form).join("")}</>`;
        const drawn = (texts) => {
            const host = make("div"), markdown = new Markdown(host);
            for (const text of texts) { markdown.write(text); markdown.flush(); }
            markdown.end();
            for (const part of host.querySelectorAll(".part")) part.replaceWith(...part.childNodes);
            host.normalize();
            return form(host);
        };
        let seed = 1;
        const random = (below) => {
            seed = (seed * 1103515245 + 12345) % 2 ** 31;
            return Math.floor(seed / 65536) % below;
        };
        for (let round = 0; round < 80; round += 1) {
            let text = "";
            for (let count = 3 + random(40); count; count -= 1) text += pieces[random(pieces.length)];
            if (round % 20 === 0) text = text.repeat(60);
            const size = round % 20 ? 1 : 1 + random(40);
            const cut = [];
            for (let at = 0; at < text.length; at += size) cut.push(text.slice(at, at + size));
            if (drawn([text]) !== drawn(cut)) return text;
        }
        return null;
    """
    assert drawing.run(script) is None


# -- a thousand long answers -------------------------------------------------------------------------------------------

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
