"""The page by keyboard, to a screen reader, and on screens of all kinds."""

from __future__ import annotations

import pytest

from tests.server.page.browser import CONTROL, ENTER, ESCAPE, NO_MODIFIER, SHIFT, TAB, Browser
from tests.server.page.visitor import (
    LONG,
    choose,
    done,
    press_button,
    roles,
    says,
    send,
    send_and_wait,
    size,
    text_of,
)


@pytest.mark.slow
def test_shift_enter_begins_a_line(page: Browser) -> None:
    choose(page, max_tokens=1)
    send(page, f"one{SHIFT}{ENTER}{NO_MODIFIER}two")
    page.until(lambda: page.text(".question"))
    assert page.text(".question") == "one\ntwo"


@pytest.mark.slow
def test_everything_can_be_reached_by_keyboard(page: Browser) -> None:
    numbers = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty", "dry_multiplier", "max_tokens", "seed"]
    chats = ["new", "search", "import"]
    order = [
        *chats,
        "log",
        "system",
        "SUMMARY",
        *numbers,
        "cache_salt",
        "loop_check",
        "auto_compact",
        "SUMMARY",
        "reset",
        "attach",
        "message",
        "send",
    ]
    page.run("document.getElementById('new').focus()")
    reached = []
    for _ in order:
        reached.append(
            page.run(
                "return document.activeElement.id || document.activeElement.type || document.activeElement.tagName"
            )
        )
        page.press(TAB)
    assert reached == order


@pytest.mark.slow
def test_a_narrow_screen_has_all_of_it(page: Browser) -> None:
    size(page, 360, 640)
    assert page.run("return document.documentElement.scrollWidth") == 360
    for seen in ("#message", "#send", "#open-meters", "#open-settings", "#open-chats", "#new"):
        assert page.shown(seen)
    for covered in ("#temperature", "#blocks", "#memory"):
        assert not page.shown(covered)
    page.click("#open-meters")
    assert page.shown("#blocks")
    assert page.shown("#memory")
    assert page.run("return document.getElementById('open-meters').ariaExpanded") == "true"
    page.click("#open-meters")
    assert not page.shown("#memory")
    page.run("document.getElementById('open-settings').focus()")
    page.press(ENTER)
    assert page.shown("#temperature")
    assert page.run("return [document.activeElement.id, log.inert, composer.inert]") == ["system", True, True]
    assert page.run("return document.documentElement.scrollWidth") == 360
    page.press(ESCAPE)
    assert not page.shown("#temperature")
    assert page.run("return [document.activeElement.id, log.inert, composer.inert]") == ["open-settings", False, False]


@pytest.mark.slow
def test_the_view_follows_the_answer_unless_the_user_has_scrolled_up(page: Browser) -> None:
    size(page, 360, 400)
    below = "return log.scrollHeight - log.scrollTop - log.clientHeight"
    page.run("temperature.value = 0")  # it is out of sight
    send(page, LONG)
    page.run("rows[0].body.append('\\nmore'.repeat(30)); follow()")
    page.until(lambda: len(text_of(page)) > 5)
    assert page.run(below) < 2
    page.run("log.scrollTop = 0")
    length = len(text_of(page))
    page.until(lambda: len(text_of(page)) > length + 20)
    assert page.run("return log.scrollTop") == 0
    page.run("log.scrollTop = log.scrollHeight")
    page.until(lambda: len(text_of(page)) > length + 60)
    assert page.run(below) < 2


EVERYTHING = """# Title

Words, `code`, **bold** and a [link](https://b.example).

> quoted

- item

| a | b |
|---|---|
| 1 | 2 |

```python
x = 1
```
"""


def talk(page: Browser) -> None:
    """A conversation with something of everything that the page can show."""
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"a": 1}'}}
    refused = {"status": 400, "error": {"message": "tools: there are no such tools", "param": "tools"}}
    says(page, [{"reasoning_content": "hm"}, EVERYTHING, {"tool_calls": [call]}], ["done"], [refused])
    send_and_wait(page, "look")
    page.run(
        "document.querySelector('.results textarea').value = 'seen'; document.querySelector('.results .main').click()"
    )
    page.until(lambda: len(roles(page)) == 4 and done(page))
    press_button(page, "Regenerate")
    page.until(lambda: page.text(".message .notice"))
    page.run("for (const fold of document.querySelectorAll('details')) fold.open = true")


# The contrast of two colours, as WCAG has it, and the colour behind an element.
COLOURS = """
    const rgba = (colour) => {
        const canvas = window.probe ??= new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [[.2126, r], [.7152, g], [.0722, b]].reduce((sum, [weight, part]) =>
        sum + weight * (part / 255 <= .04045 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4), 0);
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = rgba(getComputedStyle(at).backgroundColor);
            if (colour[3] === 255) return colour;
        }
    };
    const contrast = (a, b) => {
        const [bright, dark] = [light(a), light(b)].sort((p, q) => q - p);
        return (bright + .05) / (dark + .05);
    };
"""

# Elements with text of their own whose contrast is below what WCAG asks for at level AA.
PALE = """
    const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const pale = [];
    let seen = 0;
    for (const element of document.body.querySelectorAll("*")) {
        const style = getComputedStyle(element);
        if (!element.checkVisibility() || style.clipPath !== "none") continue;
        if (element.closest("button:disabled, script, style")) continue;
        if (!own(element) && !element.matches("input, textarea, select")) continue;
        seen += 1;
        const found = contrast(rgba(style.color), behind(element));
        const large = parseFloat(style.fontSize) >= 24;
        if (found < (large ? 3 : 4.5)) pale.push(`${element.localName}.${element.className} ${found.toFixed(2)}`);
    }
    return [seen, pale];
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(page: Browser, scheme: str) -> None:
    page.protocol("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    talk(page)
    bright = page.run("return Number(getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]) > 128")
    assert bright == (scheme == "light")
    seen, pale = page.run(COLOURS + PALE)
    assert seen > 60
    assert pale == []
    page.run("document.documentElement.style.setProperty('--soft', '#888')")
    assert page.run(COLOURS + PALE)[1] != []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_field_and_every_scroll_bar_can_be_seen(page: Browser, scheme: str) -> None:
    page.protocol("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    talk(page)
    page.click("[data-does=rename]")
    page.until(lambda: page.run("return document.activeElement.closest('#list') !== null"))
    script = """
        const faint = [];
        for (const field of document.querySelectorAll("input:not([type=checkbox]), textarea, select")) {
            if (!field.checkVisibility()) continue;
            const found = contrast(rgba(getComputedStyle(field).borderTopColor), behind(field.parentElement));
            if (found < 3) faint.push(`${field.id || field.parentElement.className} ${found.toFixed(2)}`);
        }
        for (const box of document.querySelectorAll(".log, .side, .answer pre, .chats ul")) {
            const bar = getComputedStyle(box).scrollbarColor.match(/^(rgb.*?[)])/)[1];
            const found = contrast(rgba(bar), behind(box));
            if (found < 3) faint.push(`scroll bar of ${box.id || box.localName} ${found.toFixed(2)}`);
        }
        return faint;
    """
    assert page.run(COLOURS + script) == []


def test_the_head_of_a_phone_has_room_for_the_models_name(page: Browser) -> None:
    size(page, 390, 844)
    cut = "return [...document.querySelectorAll('h1, #model')].filter((e) => e.scrollWidth > e.clientWidth).length"
    page.run("document.getElementById('model').textContent = 'SmolLM2-135M-Instruct'")
    assert page.run(cut) == 0
    name = "return document.getElementById(arguments[0]).innerText"
    for control in ("open-chats", "open-settings", "new"):
        assert page.run("return document.getElementById(arguments[0]).offsetWidth", control) < 48
    nodes = page.protocol("Accessibility.getFullAXTree")["nodes"]
    named = {node.get("name", {}).get("value") for node in nodes if node.get("role", {}).get("value") == "button"}
    assert {"Chats", "Settings", "New chat"} <= named, page.run(name, "new")


@pytest.mark.slow
def test_what_is_hidden_below_older_messages_leaves_no_gap_and_nothing_hanging(page: Browser) -> None:
    usage = {"prompt_tokens": 37, "completion_tokens": 4, "total_tokens": 41}
    says(page, ["one", {"event": {"choices": [], "usage": usage}}])
    send_and_wait(page, "first")
    send_and_wait(page, "second")
    edges = "return [rows[1].body.getBoundingClientRect().top, rows[0].body.getBoundingClientRect().bottom]"
    top, bottom = page.run(edges)
    assert 0 < top - bottom <= 24
    seen = """return [...rows.at(arguments[0]).foot.querySelectorAll("button, .figures")]
        .filter((part) => part.checkVisibility({opacityProperty: true})).map((part) => part.textContent)"""
    assert page.run(seen, 1) == []
    assert page.run(seen, 3)[:3] == ["Regenerate", "Edit", "Copy"]
    page.run("rows[1].foot.querySelector('button').focus()")
    assert page.run(seen, 1)[:3] == ["Regenerate", "Edit", "Copy"]


# What is wrong with the controls: names, labels, and roles that need others.
WRONG = """
    const wrong = [];
    for (const attribute of ["aria-describedby", "aria-labelledby", "aria-controls", "for"]) {
        for (const element of document.querySelectorAll(`[${attribute}]`)) {
            for (const name of element.getAttribute(attribute).split(" ")) {
                if (!document.getElementById(name)) wrong.push(`no element ${name}`);
            }
        }
    }
    const ids = [...document.querySelectorAll("[id]")].map(({id}) => id);
    if (new Set(ids).size !== ids.length) wrong.push("an id is there twice");
    for (const element of document.querySelectorAll(".log, pre, .table")) {
        const scrolls = element.checkVisibility() && element.scrollWidth > element.clientWidth;
        if (scrolls && element.tabIndex < 0) wrong.push("cannot be scrolled by keys");
    }
    const headings = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map(({localName}) => localName);
    if (headings.filter((name) => name === "h1").length !== 1) wrong.push("not one h1");
    if (document.querySelectorAll("main").length !== 1) wrong.push("not one main");
    if (!document.documentElement.lang || !document.title) wrong.push("no language or title");
    return wrong;
"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_every_control_has_a_name_whatever_is_shown(page: Browser, width: int, height: int) -> None:
    talk(page)
    size(page, width, height)
    interactive = {"button", "textbox", "searchbox", "spinbutton", "checkbox", "combobox", "link", "DisclosureTriangle"}
    named = interactive | {"article", "region", "navigation", "main", "form", "image", "progressbar", "log", "group"}
    nodes = [node for node in page.protocol("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
    assert [pair for pair in found if pair[0] in interactive and not pair[1].strip()] == []
    assert [pair for pair in found if pair[0] in named - {"group", "form"} and not pair[1].strip()] == []
    assert {"main", "navigation", "region", "article", "button"} - {"navigation"} <= {role for role, _ in found}
    assert page.run(WRONG) == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (640, 400), (390, 844), (320, 568)])
def test_nothing_is_wider_than_the_screen(page: Browser, width: int, height: int) -> None:
    """640 by 400 is 1280 by 800 at 200 %."""
    talk(page)
    size(page, width, height)
    script = """
        const wide = [...document.querySelectorAll("body *")].filter((element) => {
            const box = element.getBoundingClientRect();
            if (element.closest("pre, .table") || !element.checkVisibility() || box.width <= 1) return false;
            return box.right > innerWidth + 1 || box.left < -1;
        });
        return [document.documentElement.scrollWidth, wide.map((element) => element.outerHTML.slice(0, 80))];
    """
    assert page.run(script) == [width, []]
    assert page.run("return message.getBoundingClientRect().bottom <= innerHeight")
    assert page.run("return log.clientHeight") >= height * 0.25


def test_motion_is_left_out_for_those_who_ask_for_that(page: Browser) -> None:
    says(page, [{"wait": 60000}])
    send(page, "wait")
    name = "return getComputedStyle(document.querySelector('.answer'), '::before').animationName"
    page.until(lambda: page.run(name) == "breathe")
    page.protocol("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert page.run(name) == "none"


def test_the_focus_stays_where_somebody_writes(page: Browser) -> None:
    says(page, ["one"])
    send_and_wait(page, "first")
    assert page.run("return document.activeElement.id") == "message"
    press_button(page, "Regenerate")
    page.until(lambda: done(page) and page.text(".arrows span") == "2/2")
    assert page.run("return document.activeElement.id") == "message"
    page.run("document.getElementById('send').focus()")
    page.press(TAB)
    page.press(TAB)
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_control_and_enter_sends_too(page: Browser) -> None:
    says(page, ["one"])
    page.type("#message", f"hello{CONTROL}{ENTER}{NO_MODIFIER}")
    page.until(lambda: done(page) and text_of(page) == "one")
