"""The page by keyboard, to a screen reader, and on screens of all kinds; where the focus is after a change."""

from __future__ import annotations

import pytest

from tests.server.page.browser import ENTER, ESCAPE, NO_MODIFIER, SHIFT, TAB
from tests.server.page.visitor import LONG, Page, call, usage

pytestmark = pytest.mark.slow

UP = "\ue013"
BELOW = "return log.scrollHeight - log.scrollTop - log.clientHeight"


def test_everything_can_be_reached_by_keyboard(page: Page) -> None:
    page.run("sampling.open = true")
    numbers = page.run("return NUMBERS")
    assert len(numbers) == 9
    chats, settings = ["new", "search", "import", "log", "SUMMARY", "system", "SUMMARY"], ["cache_salt", "loop_check"]
    sampling = [*numbers[:2], "SUMMARY", *numbers[2:]]
    order = [*chats, *sampling, *settings, "auto_compact", "SUMMARY", "reset", "attach", "message", "send"]
    page.run("document.getElementById('new').focus()")
    reached = []
    for number in range(len(order)):
        reached.append(page.run("const at = document.activeElement; return at.id || at.type || at.tagName"))
        # Browsers draw the focus once a key has moved it.
        assert number == 0 or page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.press(TAB)
    assert reached == order


def test_shift_enter_begins_a_line(page: Page) -> None:
    page.says(["one"])
    page.send(f"one{SHIFT}{ENTER}{NO_MODIFIER}two")
    page.until(lambda: page.text(".question") == "one\ntwo")


def test_a_narrow_screen_has_all_of_it(page: Page) -> None:
    page.size(360, 640)
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


def test_the_view_follows_the_answer_unless_the_user_has_scrolled_up(page: Page) -> None:
    page.size(360, 400)
    page.run("temperature.value = 0")  # it is out of sight
    page.send(LONG)
    page.run("rows[0].body.append('\\nmore'.repeat(30)); follow()")
    page.until(lambda: len(page.text_of()) > 5)
    assert page.run(BELOW) < 2
    page.run("log.scrollTop = 0")
    length = len(page.text_of())
    page.until(lambda: len(page.text_of()) > length + 20)
    assert page.run("return log.scrollTop") == 0
    page.run("log.scrollTop = log.scrollHeight")
    page.until(lambda: len(page.text_of()) > length + 60)
    assert page.run(BELOW) < 2


def test_one_press_of_up_leaves_the_end_of_an_answer_that_comes(page: Page) -> None:
    page.says([*["line\n\n"] * 60, *[piece for _ in range(40) for piece in ("more\n\n", {"wait": 20})]])
    page.send("go on")
    page.until(lambda: page.text_of().count("more") > 3)
    page.run("log.focus()")
    page.press(UP)
    page.until(page.done)
    assert page.run(BELOW) > 200
    page.run("log.scrollTop = log.scrollHeight")
    page.send_and_wait("again")
    assert page.run(BELOW) < 2


EVERYTHING = '''# Title

Words, `code`, **bold**, $x$, a note[^1] and a [link](https://b.example).

$$ a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p + q + r + s + t + u + v + w + x + y + z $$

> quoted

- item
- [x] done

| a | b |
|---|---|
| 1 | 2 |

```python
@property
def x(a: int) -> str:
    """Said."""
    return f"{a + 1}" or None  # why
```

```diff
- <b id="c">
+ more
```

```html
<b id="c">&amp;</b>
```

[^1]: noted
'''


def talk(page: Page) -> None:
    """A conversation with something of everything that the page can show."""
    refused = {"status": 400, "error": {"message": "tools: there are no such tools", "param": "tools"}}
    page.says([{"reasoning_content": "hm"}, EVERYTHING, *call(0, "look", '{"a": 1}')], ["done"], [refused])
    page.send_and_wait("look")
    page.run("document.querySelector('.results textarea').value = 'seen'")
    page.press_button("Send results")
    page.until(lambda: len(page.roles()) == 4 and page.done())
    page.press_button("Regenerate")
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

# Texts, borders of fields and scroll bars whose contrast is below what WCAG asks for at level AA.
PALE = """
    const pale = [], isText = (node) => node.nodeType === 3 && node.data.trim();
    const check = (element, colour, behindIt, least) => {
        const ratio = contrast(rgba(colour), behindIt);
        if (ratio < least) pale.push(`${element.localName}.${element.className} ${element.id} ${ratio.toFixed(2)}`);
    };
    let seen = 0;
    for (const element of document.body.querySelectorAll("*")) {
        const style = getComputedStyle(element), isField = element.matches("input, textarea, select");
        if (!element.checkVisibility() || style.clipPath !== "none") continue;
        if (element.closest("button:disabled, script, style")) continue;
        if (!isField && ![...element.childNodes].some(isText)) continue;
        seen += 1;
        check(element, style.color, behind(element), parseFloat(style.fontSize) >= 24 ? 3 : 4.5);
        if (!isField || element.type === "checkbox") continue;
        check(element, style.borderTopColor, behind(element.parentElement), 3);
    }
    for (const box of document.querySelectorAll(".log, .side, .answer pre, .chats ul")) {
        check(box, getComputedStyle(box).scrollbarColor.match(/^(rgb.*?[)])/)[1], behind(box), 3);
    }
    return [seen, pale];
"""


def test_every_text_every_field_and_every_scroll_bar_has_enough_contrast(page: Page) -> None:
    talk(page)
    page.click("[data-does=rename]")
    page.until(lambda: page.run("return document.activeElement.closest('#list') !== null"))
    for scheme in ("light", "dark"):
        page.prefers(prefers_color_scheme=scheme)
        bright = page.run("return Number(getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]) > 128")
        assert bright == (scheme == "light")
        seen, pale = page.run(COLOURS + PALE)
        assert seen > 60
        assert pale == [], scheme


def test_the_head_of_a_phone_has_room_for_the_models_name(page: Page) -> None:
    page.size(390, 844)
    page.run("document.getElementById('model').textContent = 'SmolLM2-135M-Instruct'")
    cut = "return [...document.querySelectorAll('h1, #model')].filter((e) => e.scrollWidth > e.clientWidth).length"
    assert page.run(cut) == 0
    names = {node["name"]["value"] for node in page.tree() if node["role"]["value"] == "button"}
    assert {"Chats", "Settings", "New chat"} <= names  # though they are signs


def test_what_is_hidden_below_older_messages_leaves_no_gap_and_nothing_hanging(page: Page) -> None:
    page.says(["one", usage(37, 4)])
    page.send_and_wait("first")
    page.send_and_wait("second")
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
    for (const element of document.querySelectorAll(".log, pre, .table, .maths.display")) {
        const scrolls = element.checkVisibility() && element.scrollWidth > element.clientWidth;
        if (scrolls && element.tabIndex < 0) wrong.push("cannot be scrolled by keys");
    }
    for (const { localName } of document.querySelectorAll("dl > *, dl > div > *")) {
        if (!["div", "dt", "dd"].includes(localName)) wrong.push(`${localName} in a list of terms`);
    }
    const headings = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map(({localName}) => localName);
    if (headings.filter((name) => name === "h1").length !== 1) wrong.push("not one h1");
    if (document.querySelectorAll("main").length !== 1) wrong.push("not one main");
    if (!document.documentElement.lang || !document.title) wrong.push("no language or title");
    return wrong;
"""


def test_every_control_has_a_name_and_a_place_in_the_structure(page: Page) -> None:
    talk(page)
    interactive = {"button", "textbox", "spinbutton", "checkbox", "combobox", "link", "DisclosureTriangle", "searchbox"}
    named = interactive | {"article", "region", "navigation", "main", "image", "progressbar", "log"}
    for width, height in ((1280, 800), (390, 844)):
        page.size(width, height)
        roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in page.tree()]
        assert [role for role, name in roles if role in named and not name.strip()] == []
        assert {"main", "region", "article", "button"} <= {role for role, _ in roles}
        assert page.run(WRONG) == []


def test_nothing_is_wider_than_the_screen(page: Page) -> None:
    """640 by 400 is 1280 by 800 at 200 %."""
    talk(page)
    script = """
        const wide = [...document.querySelectorAll("body *")].filter((element) => {
            const box = element.getBoundingClientRect();
            if (element.closest("pre, .table, .maths") || !element.checkVisibility() || box.width <= 1) return false;
            return box.right > innerWidth + 1 || box.left < -1;
        });
        return [document.documentElement.scrollWidth, wide.map((element) => element.outerHTML.slice(0, 80))];
    """
    for width, height in ((1280, 800), (640, 400), (320, 568)):
        page.size(width, height)
        assert page.run(script) == [width, []]
        assert page.run("return message.getBoundingClientRect().bottom <= innerHeight")
        assert page.run("return log.clientHeight") >= height * 0.25


def test_nothing_moves_for_users_who_prefer_reduced_motion(page: Page) -> None:
    page.says([{"wait": 60000}])
    page.send("wait")
    name = "return getComputedStyle(document.querySelector('.answer'), '::before').animationName"
    page.until(lambda: page.run(name) == "breathe")
    page.prefers(prefers_reduced_motion="reduce")
    assert page.run(name) == "none"


# -- the focus ---------------------------------------------------------------------------------------------------------

SLOW = ["half", {"held": True}, " an answer"]


def two_chats(page: Page) -> None:
    page.talk("one")
    page.click("#new")
    page.send_and_wait("second")


@pytest.mark.parametrize("where", ["message", "system"])
def test_a_click_elsewhere_ends_renaming_and_the_focus_goes_there(page: Page, where: str) -> None:
    two_chats(page)
    page.rename("renamed")
    page.click(f"#{where}")
    assert page.focused() == where
    assert page.text("[aria-current]") == "renamed"


def test_a_click_on_another_conversation_opens_it_while_one_is_renamed(page: Page) -> None:
    two_chats(page)
    page.rename("renamed")
    place = page.run(
        """const {x, y} = document.querySelector('li:last-child .chat').getBoundingClientRect();
        return {x: x + 9, y: y + 9};"""
    )
    button = {"button": "left", "clickCount": 1}
    page.protocol("Input.dispatchMouseEvent", type="mousePressed", **place, **button)
    page.until(lambda: "renamed" in [chat["title"] for chat in page.kept()])  # a finger stays down longer than that
    page.protocol("Input.dispatchMouseEvent", type="mouseReleased", **place, **button)
    page.until(lambda: page.text("[aria-current]") == "first")
    assert page.titles() == ["renamed", "first"]


@pytest.mark.parametrize("which", ["second", "first", "Copy message"])
def test_the_focus_stays_on_a_button_when_an_answer_ends(page: Page, which: str) -> None:
    """In the list of conversations, and below a message."""
    two_chats(page)
    page.begin(SLOW)
    page.run(
        """const buttons = [...document.querySelectorAll(".chat, .user:nth-last-child(2) .foot button")];
        buttons.find((made) => nameOf(made) === arguments[0]).focus();""",
        which,
    )
    page.go_on()
    assert page.focused() == which


def test_an_answer_that_is_edited_cannot_be_saved_while_another_one_comes(page: Page) -> None:
    """It would take the place of all that follows it, the other answer too."""
    page.says(["one"], SLOW)
    page.send_and_wait("first")
    page.press_button("Edit")
    page.type(".edit textarea", "!")
    page.send("second")
    page.until(lambda: page.text_of() == "half")
    page.run("document.querySelector('.edit .row button:nth-child(2)').click()")
    page.go_on()
    assert page.text_of() == "half an answer"
    assert page.run("return document.querySelector('.edit textarea').value") == "one!"


# -- what a screen reader is given to say ------------------------------------------------------------------------------

LISTEN = """
    window.heard = [];
    const watch = (element) => new MutationObserver(() => window.heard.push(element.textContent))
        .observe(element, {childList: true, characterData: true, subtree: true});
    for (const element of document.querySelectorAll("[role=status], [aria-live=polite]")) watch(element);
"""


def heard(page: Page) -> list[str]:
    """The texts that a screen reader was given after LISTEN had run."""
    return [text for text in page.run("return window.heard") if text]


def test_a_screen_reader_is_given_the_answer_once_and_no_tokens(page: Page) -> None:
    page.run(LISTEN)
    page.says(["one ", "two ", "three ", *["more "] * 200])
    page.send_and_wait("count")
    assert sum(text.startswith("one two three") for text in heard(page)) == 1
    assert len(heard(page)) < 8
    assert page.count(".turns [aria-live]") == 0


def test_blocks_are_spoken_apart_and_buttons_are_no_part_of_an_answer(page: Page) -> None:
    page.talk("# Title\none\n\n- two $x$\n- three\n\n| a | b |\n|---|---|\n| 4 | 5 |\n\n```python\nx = 1\n```\n")
    assert page.text("#said").split("\n") == ["Title", "one", "two $x$", "three", "a", "b", "4", "5", "x = 1"]


def test_what_was_said_is_not_found_on_the_page_a_second_time(page: Page) -> None:
    """By somebody who reads on, searches, or copies all of it."""
    page.run(
        """
        const real = window.setTimeout;
        window.setTimeout = (does, after) => real(does, after > 5000 ? 0 : after);
        """
    )
    page.run(LISTEN)
    page.talk("one")
    page.until(lambda: "one" in heard(page))
    page.until(lambda: page.text("#said") == "")


def test_how_far_the_prompt_is_can_be_seen_and_is_not_spoken_each_time(page: Page) -> None:
    progress = [
        {"event": {"choices": [], "prompt_progress": {"total": 640, "cache": 0, "processed": 64 * part}}}
        for part in range(10)
    ]
    page.run(LISTEN)
    page.says([*progress, {"held": True}, "one", {"wait": 300}])
    page.send("count")
    page.until(lambda: page.text("#progress") == "576 of 640 tokens")
    assert page.request_body()["return_progress"] is True
    page.go_on()
    assert page.text("#progress") == ""
    assert sorted(heard(page)) == ["Answered.", "Answering …", "Reading the prompt …", "one"]


def test_an_error_is_an_alert_when_it_happens_and_not_when_it_is_read_again(page: Page) -> None:
    page.says([{"status": 400, "error": {"message": "no"}}])
    page.send_and_wait("count")
    assert page.text(".message [role=alert]") == "no."
    page.reload()
    page.until(lambda: page.text(".message .notice") == "no.")
    assert not page.shown("[role=alert]")


def test_a_warning_that_nothing_is_kept_has_a_place_before_it_comes(page: Page) -> None:
    """Text in an element that was not there before is not spoken by all screen readers."""
    statuses = """
        const shown = [...document.querySelectorAll("[role=status]")].filter((made) => made.checkVisibility());
        return shown.map(({id}) => id);
    """
    assert {"unkept", "none", "said", "status", "shelf-says"} <= set(page.run(statuses))
    assert page.run("return unkept.getBoundingClientRect().height") == 0
