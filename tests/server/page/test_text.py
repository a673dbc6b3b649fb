"""What a model writes, on the page: Markdown becomes elements as it streams in, and nothing becomes HTML."""

from __future__ import annotations

import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tests.server.page.visitor import Page
from tests.server.process import Process

pytestmark = pytest.mark.slow

# Writes a text at once and in small steps, a short one character by character; both elements, in a form that is easy
# to read. 《source》 is a formula.
SHOW = """
    const [whole, grown] = [make("div"), make("div")], text = arguments[0];
    const once = new Markdown(whole), slowly = new Markdown(grown);
    once.write(text);
    once.end();
    const step = 1 + Math.floor(text.length / 500);
    for (let at = 0; at < text.length; at += step) { slowly.write(text.slice(at, at + step)); slowly.flush(); }
    slowly.end();
    const each = (child) => child.nodeType === 3 ? child.data : form(child);
    const inside = (node) => [...node.childNodes].map(each).join("");
    const form = (element) => {
        if (element.matches("figure.code")) {
            const language = element.querySelector(".language").textContent;
            return `{${language}: ${element.querySelector("code").textContent}}`;
        }
        if (element.matches(".maths:has(.katex-html)")) return `《${inside(element.firstChild)}》`;
        if (element.matches("input")) return element.checked ? "☑" : "☐";
        if (element.matches("button.note, .part")) return inside(element);
        const name = element.localName, more = element.href ?? (element.start > 1 ? element.start : "");
        return `<${name}${more ? ` ${more}` : ""}>${inside(element)}</${name}>`;
    };
    return [whole, grown].map(inside);
"""


def shown(page: Page, text: str) -> str:
    whole, grown = page.run(SHOW, text)
    assert whole == grown
    return whole


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# Title\ntext\n### Less", "<h3>Title</h3><p>text</p><h5>Less</h5>"),
        ("before\n```python\nx = 1\n\ny = 2\n```\nafter", "<p>before</p>{python: x = 1\n\ny = 2}<p>after</p>"),
        ("```\nstill being written", "{Code: still being written}"),
        ("```", "{Code: }"),
        (
            "- a\n- b\n  - c\n- d",
            "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
        ),
        ("3. c\n4. d\n\nout", "<ol 3><li><p>c</p></li><li><p>d</p></li></ol><p>out</p>"),
        ("1. a\n   ```sh\n   ls\n   ```\n2. b", "<ol><li><p>a</p>{sh: ls}</li><li><p>b</p></li></ol>"),
        ("-5 degrees\n1.5 m", "<p>-5 degrees\n1.5 m</p>"),
        ("> one\n> two\n>\n> three\n\nout", "<blockquote><p>one\ntwo</p><p>three</p></blockquote><p>out</p>"),
        (
            "| a | b |\n|---|--:|\n| 1 | `x\\|y` |\n| 2 |\n\nout",
            "<div><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>x|y</code></td></tr>"
            "<tr><td>2</td><td></td></tr></table></div><p>out</p>",
        ),
        ("a | b\nno table", "<p>a | b\nno table</p>"),
        (
            "- [x] done\n- [ ] open\n- [?] text\n- [",
            "<ul><li><p>☑done</p></li><li><p>☐open</p></li><li><p>[?] text</p></li><li><p>[</p></li></ul>",
        ),
        (
            "a[^1] b[^x]\n\n[^1]: one\n[^2]: two\n\n[^",
            "<p>a<sup>1</sup> b[^x]</p><p><sup>1</sup>one</p><p><sup>2</sup>two</p><p>[^</p>",
        ),
        (
            "so\n$$\na\n+ b\n- c\n$$\n- item",
            "<p>so</p><p>《$$\na\n+ b\n- c\n$$》</p><ul><li><p>item</p></li></ul>",
        ),
        (
            "- \\[ a\n  = b \\]\n- **c**",
            "<ul><li><p>《\\[ a\n= b \\]》</p></li><li><p><strong>c</strong></p></li></ul>",
        ),
        ("> $$\n> > 1\n> $$\n\nout", "<blockquote><p>《$$\n> 1\n$$》</p></blockquote><p>out</p>"),
        ("$$\nnever\n# closed\n\n# Title", "<p>$$\nnever\n# closed</p><h3>Title</h3>"),
        (
            "- Cheap, $$\n- Good, $$\n- Best, $$$",
            "<ul>" + "".join(f"<li><p>{price}</p></li>" for price in ("Cheap, $$", "Good, $$", "Best, $$$")) + "</ul>",
        ),
        ("$$a$$\n$$b$$\nx " + "c " * 1500 + "$d$", "<p>《$$a$$》《$$b$$》x " + "c " * 1500 + "《$d$》</p>"),
        (
            "a ![b](https://b.example) ![](https://c.example)!",
            "<p>a <a https://b.example/>b</a> <a https://c.example/>https://c.example</a>!</p>",
        ),
        ("> \t*a*\r\n> b", "<blockquote><p><em>a</em>\nb</p></blockquote>"),
        ("**a b c** d **e**\n" * 300 + "!", "<p>" + "<strong>a b c</strong> d <strong>e</strong>\n" * 300 + "!</p>"),
    ],
)
def test_the_structure_of_markdown(drawing: Page, text: str, html: str) -> None:
    """At once and character by character."""
    assert shown(drawing, text).replace("</hr>", "") == html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("2 * 3 * 4, 2*3*4 and ** nothing", "2 * 3 * 4, 2*3*4 and ** nothing"),
        ("[a](https://b.example/c_(d))", "<a https://b.example/c_(d)>a</a>"),
        ("see https://b.example/c.", "see <a https://b.example/c>https://b.example/c</a>."),
        (
            "[a](javascript:alert(1)) [b](/stats) [c](data:text/html,x)",
            "[a](javascript:alert(1)) [b](/stats) [c](data:text/html,x)",
        ),
        (
            r"$x^2$, \(y\), **\[z\]** and \text{$}: $\text{\$}$",
            r"《$x^2$》, 《\(y\)》, <strong>《\[z\]》</strong> and \text{$}: 《$\text{\$}$》",
        ),
        ("$5 and $10, $ 5$ or $x $, US$5-$6, \\$7, US$8$", "$5 and $10, $ 5$ or $x $, US$5-$6, $7, US$8$"),
        (r"\) and \[1, \( are not closed", r"\) and \[1, \( are not closed"),
        (r"`$x$` ``\(y\)``", r"<code>$x$</code> <code>\(y\)</code>"),
        (r"$\frac{1}{$ \($\) $\nothing$", r"$\frac{1}{$ \($\) 《$\nothing$》"),
        ("$a_1 * b_1$ _and_ $c * d$", "《$a_1 * b_1$》 <em>and</em> 《$c * d$》"),
        ("$" + "{" * 900 + "x" + "}" * 900 + "$ deep", "$" + "{" * 900 + "x" + "}" * 900 + "$ deep"),
        ("[a](https://b.example\x00c)", "[a](<a https://b.example/>https://b.example</a>␀c)"),
    ],
)
def test_the_words_of_markdown(drawing: Page, text: str, html: str) -> None:
    assert shown(drawing, text) == f"<p>{html}</p>"


def test_a_formula_is_rendered_once_and_its_source_is_what_selecting_copies(page: Page) -> None:
    page.run(
        "window.times = 0; const render = katex.render; katex.render = (...all) => { times += 1; render(...all); }"
    )
    source = "So\n\n$$\nx\n$$\n\n| \\(y\\) | **and $z$"
    page.says([*source])
    page.send_and_wait("first")
    script = """
        getSelection().selectAllChildren(document.querySelector(".answer"));
        const data = new DataTransfer(), event = new ClipboardEvent("copy", {clipboardData: data, bubbles: true});
        document.querySelector(".answer").dispatchEvent(event);
        return [times, data.getData("text/plain")];
    """
    assert page.run(script) == [3, source]
    assert page.copied(lambda: page.press_button("Copy answer")) == source


def test_below_a_path_and_without_any_other_server_formulas_have_their_fonts(window: Page, server: Process) -> None:
    """The browser of the tests finds no server but this machine's."""

    class Below(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            below = self.path.startswith("/chat/")
            with urllib.request.urlopen(server.url + (self.path[5:] if below else "/health")) as answer:
                self.send_response(200 if below else 404)
                for name in ("Content-Type", "Content-Security-Policy"):
                    self.send_header(name, answer.headers[name] or "")
                self.end_headers()
                self.wfile.write(answer.read())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Below) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        window.open(f"http://127.0.0.1:{proxy.server_port}/chat/")
        window.until(lambda: "bits/value" in window.text("#bits"))
        window.talk("$x + 1$")
        loaded = (
            "return [...document.fonts].filter((font) => font.status === 'loaded').map((font) => font.family).sort()"
        )
        window.until(lambda: window.run(loaded) == ["KaTeX_Main", "KaTeX_Math"])
        window.open("about:blank")
        proxy.shutdown()


def test_a_link_leaves_no_way_back_to_the_page(drawing: Page) -> None:
    script = "const {target, rel, title} = link('https://b.example'); return [target, rel, title];"
    assert drawing.run(script) == ["_blank", "noopener noreferrer", "https://b.example/"]


def test_what_the_user_writes_is_drawn_as_answers_are_and_copied_as_it_was_written(page: Page) -> None:
    written = "What does **this** do?\n\n```python\nif x:\n    y()\n```"
    page.says(["one"])
    page.run("message.value = arguments[0]", written)
    page.send_and_wait("")
    assert page.text(".question strong") == "this"
    assert page.text(".question .language") == "python"
    assert page.text(".question pre") == "if x:\n    y()"
    assert page.copied(lambda: page.press_button("Copy message", 0)) == written


def test_a_message_of_twenty_lines_is_folded_until_all_of_it_is_asked_for(page: Page) -> None:
    page.says(["one"])
    page.run("auto_compact.checked = false")
    heights = "return [...document.querySelectorAll('.question')].map((made) => made.clientHeight)"
    for lines in (19, 20, 400):
        page.run("message.value = arguments[0]", "a line\n" * (lines - 1) + "the last")
        page.send_and_wait("")
    short, *folded = page.run(heights)
    assert max(folded) < short
    page.press_button("Show all 400 lines", 4)
    assert page.run(heights)[2] > 10 * short
    page.press_button("Show less", 4)
    assert page.run(heights) == [short, *folded]
    assert page.run("return rows[4].element.getBoundingClientRect().top") >= 0


def test_what_cannot_be_seen_or_reorders_text_is_shown_as_signs(drawing: Page) -> None:
    assert shown(drawing, "a\x00b\x1b[31mc\x7f") == "<p>a␀b␛[31mc␡</p>"
    assert shown(drawing, "`a\u202eb`\n```\n\u2066x\n```") == "<p><code>a⟨U+202E⟩b</code></p>{Code: ⟨U+2066⟩x}"


def test_text_has_the_direction_of_its_first_letter(drawing: Page) -> None:
    script = r"""
        const target = make("div"), markdown = new Markdown(target);
        for (const piece of ["12 \u05d0b\n\n- 1", "2\n- ab\n\n> \u0627"]) { markdown.write(piece); markdown.flush(); }
        return [...target.querySelectorAll("p, li, blockquote")].map(({localName, dir}) => `${localName} ${dir}`);
    """
    assert drawing.run(script) == ["p rtl", "li ", "p ", "li ltr", "p ltr", "blockquote rtl", "p rtl"]


def test_a_line_without_end_does_not_widen_the_page(page: Page) -> None:
    page.says(["x" * 20000, "\n\n```\n", "y" * 20000, "\n```\n\n", "|a" * 300, "|\n", "|-" * 300, "|\n"])
    page.send_and_wait("long")
    assert page.text_of().startswith("xxx")
    assert page.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.run("return log.scrollWidth - log.clientWidth") <= 0


@pytest.mark.parametrize("unit", ["word ", "**bold** ", "- item\n", "|a", "[a](", "xxxx", "**a ", "$$\n"])
def test_a_long_answer_costs_as_much_at_its_end_as_in_its_middle(drawing: Page, unit: str) -> None:
    """Drawn with every token, as no browser would: the characters that are read for each stay few as the text grows."""
    script = """
        const [unit, tokens] = arguments, target = make("div"), markdown = new Markdown(target);
        let read = 0;
        for (const rules of [parser.block, parser.inline]) {
            rules.parse = (...all) => { read += all[0].length; Object.getPrototypeOf(rules).parse.apply(rules, all); };
        }
        for (let token = 0; token < tokens; token += 1) {
            if (token === Math.floor(tokens / 2)) read = 0;
            markdown.write(unit);
            markdown.flush();
        }
        for (const rules of [parser.block, parser.inline]) delete rules.parse;
        return [2 * read / tokens, target.textContent.length];
    """
    read, shown_length = drawing.run(script, unit, 12_000 // len(unit))
    assert shown_length > 4000
    assert read < 5000


def test_a_long_cell_is_shown_to_its_end(drawing: Page) -> None:
    long = "word " * 1500
    assert f"<td>{long}end</td>" in shown(drawing, f"| a | b |\n|---|---|\n| {long}end | c |\n")


def test_code_is_copied_as_it_was_written(page: Page) -> None:
    """Also where the browser has no clipboard for the page."""
    written = "if x < 1:\n\ty = '\u202e'"
    page.talk(f"```python\n{written}\n```")
    assert page.text(".code .language") == "python"
    assert page.text(".hljs-keyword") == "if"
    assert page.copied(lambda: page.click(".code button")) == written
    page.until(lambda: page.text(".code button") == "Copied")
    script = """
        navigator.clipboard.writeText = () => Promise.reject(new DOMException("no", "NotAllowedError"));
        window.copied = null;
        document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
    """
    page.run(script)
    page.click(".code button")
    page.until(lambda: page.run("return window.copied") == written)
    assert page.focused() == "Copy code"


def test_the_policy_stops_what_is_injected(page: Page) -> None:
    """Trusted types: what would write HTML, a script or a handler raises an error. What gets past them does nothing."""
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
        const stopped = [...violated].sort();
        const raises = (action) => { try { action(); return false; } catch { return true; } };
        const raised = [
            raises(() => { make("p").innerHTML = "<b>"; }),
            raises(() => { make("script").textContent = "1"; }),
            raises(() => { make("p").setAttribute("onclick", "1"); }),
            raises(() => { setTimeout("1"); }),
        ];
        return [raised, fetched, window.harmed ?? null, stopped];
    """
    raised, fetched, harmed, violated = page.run(f"return (async () => {{ {script} }})()")
    assert raised == [True] * 4
    assert (fetched, harmed) == ("TypeError", None)
    stopped = ["connect-src", "frame-src", "img-src", "script-src-attr", "script-src-elem", "style-src-attr"]
    assert violated == stopped
