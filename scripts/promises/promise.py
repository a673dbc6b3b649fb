"""A promise, and how it is kept: it is *held*, *different*, or *refused* by a field's name or an error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """A behaviour that llama-server's documentation describes, in our words."""

    says: str
    standing: str  # "held", "different" or "refused"
    why: str = ""  # of what is different or refused
    tests: tuple[str, ...] = ()  # name of a file in a folder of tests/server, "::", name
    fields: tuple[str, ...] = ()  # of requests: those that `server.reading.fields` refuses


def held(says: str, *tests: str) -> Promise:
    return Promise(says, "held", "", tests)


def different(says: str, why: str, *tests: str) -> Promise:
    return Promise(says, "different", why, tests)


def refused(says: str, *fields: str) -> Promise:
    return Promise(says, "refused", f"a 400 names the field: {', '.join(f'`{one}`' for one in fields)}", (), fields)


def error(says: str, why: str, *tests: str) -> Promise:
    return Promise(says, "refused", why, tests)
