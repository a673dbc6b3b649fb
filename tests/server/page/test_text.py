"""What a model writes, on the page: Markdown becomes elements as it streams in, and nothing becomes HTML."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.page.browser import Browser
from tests.server.page.visitor import choose, done, says, send, send_and_wait, text_of
from tests.server.process import Process

HOSTILE = """<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script> **<b>bold</b>** `<i>code</i>`

```html
</code></pre><svg onload="window.harmed = 1">
```
[a link](javascript:window.harmed=1) &lt;escaped&gt;"""

# Writes a text at once and character by character; both elements, in a form that is easy to read.
SHOW = """
    const [whole, grown] = [make("div"), make("div")], text = arguments[0];
    const once = new Markdown(whole), slowly = new Markdown(grown);
    once.write(text);
    once.end();
    for (const character of text) { slowly.write(character); slowly.flush(); }
    slowly.end();
    const each = (child) => child.nodeType === 3 ? child.data : form(child);
    const inside = (node) => [...node.childNodes].map(each).join("");
    const form = (element) => {
        if (element.matches("figure.code")) {
            const language = element.querySelector(".language").textContent;
            return `{${language}: ${element.querySelector("code").textContent}}`;
        }
        const name = element.localName, more = element.href ?? (element.start > 1 ? element.start : "");
        return `<${name}${more ? ` ${more}` : ""}>${inside(element)}</${name}>`;
    };
    return [whole, grown].map(inside);
"""


@pytest.fixture
def drawing(window: Browser, visit: Callable[[Process], Browser], server: Process) -> Browser:
    """The page of the server as the test before has left it, for scripts that only draw into elements of their own."""
    is_there = window.run("return typeof Markdown") != "undefined"
    return window if is_there else visit(server)


def shown(page: Browser, text: str) -> str:
    whole, grown = page.run(SHOW, text)
    assert whole == grown
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("", ""),
        ("one\ntwo\n\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# Title\ntext\n### Less", "<h3>Title</h3><p>text</p><h5>Less</h5>"),
        ("#hashtag and 5 # 3", "<p>#hashtag and 5 # 3</p>"),
        ("before\n```python\nx = 1\n\ny = 2\n```\nafter", "<p>before</p>{python: x = 1\n\ny = 2}<p>after</p>"),
        ("```\nstill being written", "{Code: still being written}"),
        ("```", "{Code: }"),
        ("~~~~\n```\n~~~\n~~~~\nout", "{Code: ```\n~~~}<p>out</p>"),
        ("a ```one line``` fence", "<p>a ```one line``` fence</p>"),
        (
            "- a\n- b\n  - c\n- d",
            "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
        ),
        (
            "* a\n\t+ b\n\t\t- c\n* d\n\n\tmore",
            "<ul><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li></ul></li>"
            "<li><p>d</p><p>more</p></li></ul>",
        ),
        ("```\n\tone\n\n\t\ttwo\n```", "{Code: \tone\n\n\t\ttwo}"),
        ("3. c\n4. d\n\nout", "<ol 3><li><p>c</p></li><li><p>d</p></li></ol><p>out</p>"),
        ("1. a\n   ```sh\n   ls\n   ```\n2. b", "<ol><li><p>a</p>{sh: ls}</li><li><p>b</p></li></ol>"),
        ("1. a\n\n   more\n2. b", "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>"),
        ("* a\n* * *\nb", "<ul><li><p>a</p></li></ul><hr><p>b</p>"),
        ("-5 degrees\n1.5 m", "<p>-5 degrees\n1.5 m</p>"),
        ("> one\n> two\n>\n> three\n\nout", "<blockquote><p>one\ntwo</p><p>three</p></blockquote><p>out</p>"),
        (
            "| a | b |\n|---|--:|\n| 1 | `x\\|y` |\n| 2 |\n\nout",
            "<div><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>x|y</code></td></tr>"
            "<tr><td>2</td><td></td></tr></table></div><p>out</p>",
        ),
        ("a | b\nno table", "<p>a | b\nno table</p>"),
        ("**a b c** d **e** " * 300, "<p>" + "<strong>a b c</strong> d <strong>e</strong> " * 300 + "</p>"),
    ],
)
def test_the_structure_of_markdown(drawing: Browser, text: str, html: str) -> None:
    """At once and character by character."""
    assert shown(drawing, text).replace("</hr>", "") == html


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**bold** and *it* and ***", "<strong>bold</strong> and <em>it</em> and ***"),
        ("2 * 3 * 4, 2*3*4 and ** nothing", "2 * 3 * 4, 2*3*4 and ** nothing"),
        ("snake_case_name and _it_", "snake_case_name and <em>it</em>"),
        ("**a `b**` c**", "<strong>a `b</strong>` c**"),
        ("`**x**` and ``a`b``", "<code>**x**</code> and <code>a`b</code>"),
        ("~~gone~~ \\*not\\*", "<s>gone</s> *not*"),
        ("**not closed", "**not closed"),
        ("[a](https://b.example/c_(d))", "<a https://b.example/c_(d)>a</a>"),
        ("see https://b.example/c.", "see <a https://b.example/c>https://b.example/c</a>."),
        (
            "[a](javascript:alert(1)) [b](/stats) [c](data:text/html,x)",
            "[a](javascript:alert(1)) [b](/stats) [c](data:text/html,x)",
        ),
        ("[a](https://b.example\x00c)", "[a](<a https://b.example/>https://b.example</a>␀c)"),
    ],
)
def test_the_words_of_markdown(drawing: Browser, text: str, html: str) -> None:
    assert shown(drawing, text) == f"<p>{html}</p>"


def test_a_link_leaves_no_way_back_to_the_page(page: Browser) -> None:
    says(page, ["[a](https://b.example)"])
    send_and_wait(page, "a link")
    found = page.run("const a = document.querySelector('.answer a'); return [a.target, a.rel, a.title]")
    assert found == ["_blank", "noopener noreferrer", "https://b.example/"]


def test_text_of_the_model_is_never_html(page: Browser) -> None:
    says(page, list(HOSTILE))
    send_and_wait(page, "harm me")
    elements = page.run("return [...document.querySelectorAll('.answer *')].map((element) => element.localName)")
    code = ["figure", "figcaption", "span", "button", "pre", "code"]
    assert elements == ["p", "strong", "code", *code, "p"]
    for piece in ('<img src=x onerror="window.harmed = 1">', "<b>bold</b>", "</code></pre><svg", "&lt;escaped&gt;"):
        assert piece in page.text(".answer")
    assert page.run("return window.harmed ?? null") is None


@pytest.mark.slow
def test_text_of_the_user_is_never_html(page: Browser) -> None:
    choose(page, max_tokens=1)
    page.run("message.value = arguments[0]", HOSTILE)
    send(page, "")
    page.until(lambda: done(page) and page.text(".question"))
    elements = page.run("return [...document.querySelectorAll('.question *')].map((element) => element.localName)")
    assert elements == ["p", "strong", "code", "figure", "figcaption", "span", "button", "pre", "code", "p"]
    for piece in ('<img src=x onerror="window.harmed = 1">', "<b>bold</b>", "</code></pre><svg", "&lt;escaped&gt;"):
        assert piece in page.text(".question")
    assert page.run("return window.harmed ?? null") is None


@pytest.mark.slow
def test_what_the_user_writes_is_drawn_as_answers_are_and_copied_as_it_was_written(page: Browser) -> None:
    written = "What does **this** do?\n\n```python\nif x:\n    y()\n```"
    says(page, ["one"])
    page.run("message.value = arguments[0]", written)
    send_and_wait(page, "")
    assert page.text(".question strong") == "this"
    assert page.text(".question .language") == "python"
    assert page.text(".question pre") == "if x:\n    y()"
    page.run("window.copied = null; navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.run("rows[0].foot.querySelector('[aria-label=\"Copy message\"]').click()")
    page.until(lambda: page.run("return window.copied") == written)


@pytest.mark.slow
def test_names_that_a_model_makes_up_are_text_too(page: Browser) -> None:
    call = {"index": 0, "id": "<b>", "function": {"name": "<img src=x>", "arguments": '{"a": "<svg>"}'}}
    says(page, [{"reasoning_content": "<i>hm</i>"}, {"tool_calls": [call]}])
    send_and_wait(page, "call")
    assert page.run("return document.querySelectorAll('.turns :is(img, svg:not(.sign), i, b)').length") == 0
    assert page.text(".call summary") == "Called <img src=x>"
    assert page.text(".thoughts") == "<i>hm</i>"


@pytest.mark.slow
def test_what_cannot_be_seen_or_reorders_text_is_shown_as_signs(drawing: Browser) -> None:
    assert shown(drawing, "a\x00b\x1b[31mc\x7f") == "<p>a␀b␛[31mc␡</p>"
    assert shown(drawing, "`a\u202eb`\n```\n\u2066x\n```") == "<p><code>a⟨U+202E⟩b</code></p>{Code: ⟨U+2066⟩x}"
    assert drawing.run("const p = make('div'); new Markdown(p).write('ab\\n'); return p.firstChild.dir") == "auto"


@pytest.mark.slow
def test_a_line_without_end_does_not_widen_the_page(page: Browser) -> None:
    says(page, ["x" * 20000, "\n\n```\n", "y" * 20000, "\n```\n\n", "|a" * 300, "|\n", "|-" * 300, "|\n"])
    send_and_wait(page, "long")
    assert text_of(page).startswith("xxx")
    assert page.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.run("return log.scrollWidth - log.clientWidth") <= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [
        "word ",
        "**bold** ",
        "`code` ",
        "- item\n",
        "|a",
        "> ",
        "```\n",
        "* ",
        "[a](",
        "_a_ ",
        "x",
        "**a ",
        "# \n",
        "  - a\n",
    ],
)
def test_a_long_answer_costs_as_much_at_its_end_as_in_its_middle(drawing: Browser, unit: str) -> None:
    """Flushed with every token, as no browser would: the work of one flush has to stay small as the text grows."""
    script = """
        const [unit, tokens] = arguments, target = make("div"), markdown = new Markdown(target);
        let parsed = 0;
        const real = Words.prototype.flush;
        Words.prototype.flush = function () { parsed += this.text.length; return real.call(this); };
        const halves = [0, 0];
        for (let token = 0; token < tokens; token += 1) {
            const before = parsed;
            markdown.write(unit);
            markdown.flush();
            halves[Math.floor(token * 2 / tokens)] = Math.max(halves[Math.floor(token * 2 / tokens)], parsed - before);
        }
        Words.prototype.flush = real;
        return [...halves, target.textContent.length > 0];
    """
    middle, end, there = drawing.run(script, unit, 4000)
    assert there or unit in ("# \n", "* ")
    assert end <= max(middle, 4200)


@pytest.mark.slow
def test_four_thousand_tokens_are_drawn_in_few_milliseconds_each(page: Browser) -> None:
    """With a selection in what does not change, which stays."""
    text = "## Part\n\nSome words in **bold** and `code`, then a list:\n\n- one\n- two\n\n```python\nx = 1\n```\n\n"
    script = """
        const [tokens] = arguments, target = make("div", "answer"), markdown = new Markdown(target);
        document.querySelector("#turns").append(target);
        let first = null, longest = 0;
        for (const token of tokens) {
            markdown.write(token);
            const begun = performance.now();
            markdown.flush();
            target.getBoundingClientRect();
            longest = Math.max(longest, performance.now() - begun);
            if (!first && target.children.length > 3) {
                first = target.firstChild;
                getSelection().selectAllChildren(first);
            }
        }
        const found = [first === target.firstChild, String(getSelection()), longest];
        target.remove();
        return found;
    """
    tokens = [text[start : start + 4] for start in range(0, len(text), 4)] * (4000 * 4 // len(text))
    same, selected, longest = page.run(script, tokens)
    assert same
    assert selected == "Part"
    assert longest < 500


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["**a ", "~~a ", "__a "])
def test_a_long_line_that_is_kept_is_shown_at_once(page: Browser, unit: str) -> None:
    """What nobody closes is looked for up to the end of the line, again for each that is open."""
    script = """
        const [unit, short, long] = arguments;
        const taken = (units) => {
            const target = make("div"), markdown = new Markdown(target), begun = performance.now();
            markdown.write(unit.repeat(units));
            markdown.end();
            return [performance.now() - begun, target.textContent === unit.repeat(units)];
        };
        const least = (units) => Math.min(...[1, 2, 3].map(() => taken(units)[0]));
        return [least(short), least(long), taken(long)[1]];
    """
    short, long, whole = page.run(script, unit, 4_000, 64_000)
    assert whole
    assert long < 64 * short  # 16 times as long a line: 256 times the time, if the time were quadratic


@pytest.mark.slow
def test_a_long_cell_is_shown_to_its_end(drawing: Browser) -> None:
    long = "word " * 900
    assert f"<td>{long}end</td>" in shown(drawing, f"| a | b |\n|---|---|\n| {long}end | c |\n")


@pytest.mark.slow
def test_an_answer_of_four_thousand_tokens_comes_as_fast_at_its_end_as_at_its_beginning(page: Browser) -> None:
    """Through all of the page: the stream, the text, the meters, the picture, the view that follows."""
    says(page, ["word ", "and ", "**bold** ", "more\n\n"] * 1000)
    page.run(
        """
        window.times = [];
        const real = take;
        take = (...all) => { window.times.push(performance.now()); return real(...all); };
        loop_check.click();
        """
    )
    send_and_wait(page, "go on")
    times = page.run("return window.times")
    assert len(times) >= 4000
    quarters = [times[end - 1] - times[end - 1000] for end in (1000, 2000, 3000, 4000)]
    assert quarters[3] < 5 * max(quarters[0], 100), quarters
    assert page.run("return document.querySelectorAll('.answer p').length") == 1000


@pytest.mark.slow
def test_code_is_copied_as_it_was_written(page: Browser) -> None:
    says(page, ["```python\nif x < 1:\n\ty = '\u202e'\n```"])
    send_and_wait(page, "code")
    assert page.text(".code .language") == "python"
    page.run("window.copied = null; navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(".code button")
    page.until(lambda: page.text(".code button") == "Copied")
    assert page.run("return window.copied") == "if x < 1:\n\ty = '\u202e'"
    page.until(lambda: page.text(".code button") == "Copy")


@pytest.mark.slow
def test_code_is_copied_where_the_browser_has_no_clipboard_for_the_page(page: Browser) -> None:
    says(page, ["```\na\n```"])
    send_and_wait(page, "code")
    script = """
        navigator.clipboard.writeText = () => Promise.reject(new DOMException("no", "NotAllowedError"));
        window.copied = null;
        document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
    """
    page.run(script)
    page.click(".code button")
    page.until(lambda: page.run("return window.copied") == "a")
    assert page.run("return document.activeElement.textContent") in ("Copy", "Copied")


@pytest.mark.slow
def test_nothing_becomes_code_unless_a_program_asks_for_it(page: Browser) -> None:
    """Trusted types: what would write HTML, a script or a handler raises an error."""
    script = """
        const raises = (action) => { try { action(); return false; } catch { return true; } };
        return [
            raises(() => { make("p").innerHTML = "<b>"; }),
            raises(() => { make("script").textContent = "1"; }),
            raises(() => { make("p").setAttribute("onclick", "1"); }),
            raises(() => { setTimeout("1"); }),
        ];
    """
    assert page.run(script) == [True] * 4


@pytest.mark.slow
def test_the_policy_stops_what_is_injected(page: Browser) -> None:
    script = """
        const violated = new Set();
        document.addEventListener("securitypolicyviolation", (event) => violated.add(event.effectiveDirective));
        const add = (name, attributes) => {
            const element = document.createElement(name);
            for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
            document.body.append(element);
            return element;
        };
        const past = trustedTypes.createPolicy("past trusted types", { createScript: (text) => text });
        const harm = past.createScript("window.harmed = 1");
        const inline = document.createElement("script");
        inline.textContent = harm;
        document.body.append(inline);
        add("button", { onclick: harm }).click();
        add("p", { style: "position: fixed" });
        add("img", { src: "http://127.0.0.1:9/" });
        add("iframe", { src: "http://127.0.0.1:9/" });
        const fetched = await fetch("http://127.0.0.1:9/").catch((error) => error.name);
        await new Promise((resolve) => setTimeout(resolve, 50));
        return [fetched, window.harmed ?? null, [...violated].sort()];
    """
    fetched, harmed, violated = page.run(f"return (async () => {{ {script} }})()")
    assert (fetched, harmed) == ("TypeError", None)
    stopped = ["connect-src", "frame-src", "img-src", "script-src-attr", "script-src-elem", "style-src-attr"]
    assert violated == stopped
