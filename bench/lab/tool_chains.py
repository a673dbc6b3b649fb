"""Chains of tool calls over a long history: tasks made by a seed, each scored by the calls that it ends with.

A conversation begins with the orders of a shop, which a tool has listed, and the days of a log, whose sentences say
nothing about orders and fill the history. A chain asks for one thing after another about two of the orders by their
customers' names; what a task needs stands in the listing, or in the result of an earlier call of the chain. Calls are
constrained to the functions and their schemas, so that what is scored are the names and values that a model finds
again. A name stands before what is asked for with it: a small model finds little in the other direction.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.loading.calibration import TEXT_FILE
from polarlm.server.answers.call_grammar import Grammar, functions_of

Call = tuple[str, Mapping[str, Any]]
"""The name of a function and its arguments."""
Task = tuple[str, Call]
"""What the user says, and the call that it asks for."""

_ORDERS, _DAYS_OF_LOG = 16, 5
_MOST_ANSWER = 120  # tokens of a call
_SENTENCE_END = re.compile(r"(?<=[.?!]) ")
_SYSTEM = "You work at the desk of a shop. Do what the user asks with one call of a function."
_FIRST_NAMES = (
    *("Mila", "Jonas", "Aiko", "Pedro", "Lena", "Omar", "Ines", "Tomas", "Freya", "Bilal", "Clara", "Henrik"),
    *("Noor", "Pavel", "Greta", "Samir", "Alma", "Viktor", "Yuki", "Matteo", "Sanna", "Idris", "Rosa", "Emil"),
)
_LAST_NAMES = (
    *("Okafor", "Lindgren", "Moreau", "Tanaka", "Silva", "Novak", "Brandt", "Rossi", "Haddad", "Kowalski", "Berg"),
    *("Costa", "Dahl", "Farkas", "Greco", "Hoxha", "Ivanov", "Jansen", "Kaya", "Laine", "Marin", "Nagy", "Ortega"),
)
_CITIES = ("Oslo", "Lyon", "Porto", "Graz", "Turin", "Ghent", "Malaga", "Tartu", "Split", "Cork")
_ITEMS = ("lamp", "kettle", "tent", "clock", "desk", "mirror", "bicycle", "camera", "radio", "chair")
_CARRIERS, _AGENTS, _DAYS = ("post", "rail", "courier"), ("Nora", "Ravi", "Elif"), ("Monday", "Tuesday", "Friday")


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: value if isinstance(value, dict) else {"type": value} for key, value in properties.items()},
        "required": [*properties],
        "additionalProperties": False,
    }
    description = name.replace("_", " ").capitalize() + "."
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool("list_orders", page="integer"),
    _tool("read_log", day="integer"),
    _tool("cancel_order", order_id="string"),
    _tool("refund_order", order_id="string", amount="number", reason="string"),
    _tool("ship_order", order_id="string", carrier={"enum": [*_CARRIERS]}, city="string"),
    _tool("change_address", order_id="string", city="string", street="string", number="integer"),
    _tool("apply_discount", order_id="string", percent="integer"),
    _tool("set_priority", order_id="string", priority={"enum": ["low", "normal", "high"]}),
    _tool("assign_agent", order_id="string", agent={"enum": [*_AGENTS]}),
    _tool("attach_receipt", order_id="string", receipt="string"),
    _tool("send_message", order_id="string", text="string"),
    _tool("schedule_call", order_id="string", day={"enum": [*_DAYS]}, hour="integer", minutes="integer"),
)


@dataclass(frozen=True)
class Order:
    customer: str
    order_id: str
    city: str
    item: str
    total: float


def orders(chance: random.Random) -> list[Order]:
    """The orders of the shop, no two of which share a name or a number."""
    names = zip(chance.sample(_FIRST_NAMES, _ORDERS), chance.sample(_LAST_NAMES, _ORDERS), strict=True)
    numbers = chance.sample(range(1000, 10000), _ORDERS)
    return [
        Order(
            " ".join(name),
            str(number),
            chance.choice(_CITIES),
            chance.choice(_ITEMS),
            chance.randrange(100, 90000) / 100,
        )
        for name, number in zip(names, numbers, strict=True)
    ]


def history(listed: Sequence[Order], sentences: int) -> list[dict[str, Any]]:
    """The messages with which every chain begins: the user asks for the orders and the log, and the model reads them.
    sentences: of a day of the log."""
    chance, known = random.Random(2), _SENTENCE_END.split(" ".join(TEXT_FILE.read_text(encoding="utf-8").split()))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": "Show me the log of the week and the orders."},
    ]
    rows = "\n".join(json.dumps(vars(order)) for order in listed)
    for day in range(1, _DAYS_OF_LOG + 1):
        if day == 2:
            messages += exchange(("list_orders", {"page": 1}), "L00000001", rows)
        text = " ".join(chance.choices(known, k=sentences))
        messages += exchange(("read_log", {"day": day}), f"D{day:08}", text)
    return [*messages, {"role": "assistant", "content": "These are the log and the orders."}]


def exchange(call: Call, id: str, result: str) -> list[dict[str, Any]]:
    """A call and its result."""
    name, arguments = call
    function = {"name": name, "arguments": json.dumps(arguments)}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": id, "name": name, "content": result},
    ]


def receipt(number: int) -> str:
    """What the result of a chain's first call has, and a later task may ask for."""
    return f"R-{number * 7919 % 90000 + 10000}"


def result_of(number: int, step: int) -> str:
    """The text of the result of a call."""
    return json.dumps({"ok": True} | ({} if step else {"receipt": receipt(number)}))


def chain(number: int, listed: Sequence[Order]) -> list[Task]:
    """The tasks of the chain with this number: two to four, about two of the orders."""
    chance = random.Random(number)
    one, other = chance.sample(listed, 2)
    who, other_one = f"the order of {one.customer}", f"the order of {other.customer}"
    agent, carrier, day = chance.choice(_AGENTS), chance.choice(_CARRIERS), chance.choice(_DAYS)
    hour, minutes, percent = chance.randrange(8, 18), chance.choice((15, 30, 45)), chance.choice((5, 10, 20))
    first: list[Task] = [
        (
            f"Refund {who}: its whole total, and give late as the reason.",
            ("refund_order", {"order_id": one.order_id, "amount": one.total, "reason": "late"}),
        ),
        (
            f"Ship {who} by {carrier} to the city that it has.",
            ("ship_order", {"order_id": one.order_id, "carrier": carrier, "city": one.city}),
        ),
        (f"Assign {agent} to {who}.", ("assign_agent", {"order_id": one.order_id, "agent": agent})),
    ]
    then: list[Task] = [
        (
            f"Schedule a call about {other_one} on {day} at {hour}, for {minutes} minutes.",
            ("schedule_call", {"order_id": other.order_id, "day": day, "hour": hour, "minutes": minutes}),
        ),
        (
            f"Apply a discount of {percent} percent to {other_one}.",
            ("apply_discount", {"order_id": other.order_id, "percent": percent}),
        ),
        (
            f"Send a message about {other_one}: Thank you.",
            ("send_message", {"order_id": other.order_id, "text": "Thank you."}),
        ),
    ]
    last = (
        f"Attach the receipt that you have got to {other_one}.",
        ("attach_receipt", {"order_id": other.order_id, "receipt": receipt(number)}),
    )
    tasks = [chance.choice(first), *chance.sample(then, chance.randrange(1, 3))]
    return [*tasks, last] if chance.random() < 0.5 else tasks


def solves(engine: Engine, earlier: Sequence[Mapping[str, Any]], number: int, tasks: Sequence[Task]) -> bool:
    """Whether a model makes the calls that the tasks of a chain ask for, and no others. A chain goes on after a wrong
    call, with a result as after a right one. earlier: the messages before it."""
    options, grammar = PromptOptions(tools=TOOLS), call_grammar(engine)
    messages, made = [*earlier], list[Call]()
    for step, (text, _) in enumerate(tasks):
        messages.append({"role": "user", "content": text})
        params = SamplingParams(temperature=0, max_tokens=_MOST_ANSWER, grammar=grammar)
        completion = engine.chat(messages, params, options)
        if completion.finish_reason != "tool_calls":
            return False
        function = completion.tool_calls[0]["function"]
        made.append((function["name"], json.loads(function["arguments"])))
        messages += exchange(made[-1], f"C{number:06}{step:02}", result_of(number, step))
    return all(_is_same(call, asked) for call, (_, asked) in zip(made, tasks, strict=True))


def call_grammar(engine: Engine) -> str:
    """The grammar of an answer that is one call."""
    template, control = engine.model.template, engine.model.tokenizer.control_tokens()
    return Grammar(template.calls, functions_of(TOOLS), control, calls="must", several=False).text()


def _is_same(call: Call, asked: Call) -> bool:
    """Whether two calls do the same: texts are compared without case and white space at their ends."""

    def same(one: Any) -> Any:
        return one.strip().rstrip(".").lower() if isinstance(one, str) else one

    (name, arguments), (expected_name, expected) = call, asked
    return name == expected_name and {key: same(value) for key, value in arguments.items()} == {
        key: same(value) for key, value in expected.items()
    }


def beginning(engine: Engine, listed: Sequence[Order], tokens: int) -> list[dict[str, Any]]:
    """The longest history of up to `tokens`, or the shortest that there is."""
    options, more = PromptOptions(tools=TOOLS), 1

    def fits(sentences: int) -> bool:
        return len(engine.prompt_ids(history(listed, sentences), options)) <= tokens

    while fits(more):
        more *= 2
    sentences = more = more // 2
    while more := more // 2:
        sentences += more * fits(sentences + more)
    return history(listed, sentences)
