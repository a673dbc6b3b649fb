"""Errors of the hub as sentences that say what to do."""

from __future__ import annotations

import errno
import os
import re

from polarlm.model_loaders.hub.choice import HubName
from polarlm.model_loaders.hub.client import Client

RESUMES = "The next attempt continues from what has been downloaded."
_TOKENS = "https://huggingface.co/settings/tokens"
_LOG_IN = f"run `hf auth login`, or set HF_TOKEN, with a token of {_TOKENS}"


def cannot_be_reached(client: Client, error: Exception) -> bool:
    """Whether the hub gave no usable answer, so that the cache is the only source."""
    status = client.status(error)
    if status is not None:
        return status >= 500 or status == 429
    return isinstance(error, (client.http_error, ConnectionError, TimeoutError))


def sentence(client: Client, name: HubName, error: Exception) -> str:
    """`error` as a sentence for the user."""
    hub, page, status = client.errors, f"{client.endpoint}/{name.repo}", client.status(error)
    message = _header(error, "X-Error-Message")
    # The name may be meant as a path.
    nor_here = "" if os.path.exists(name.repo) else ", nor is there such a folder here"
    if isinstance(error, hub.OfflineModeIsEnabled):
        return f"{name} is not in the cache {client.cache}, and HF_HUB_OFFLINE is set: unset it to download the model."
    if isinstance(error, hub.GatedRepoError):
        first = f"{name.repo} is open only to users who accept its conditions: accept them at {page}"
        if client.has_token:
            return f"{first}, with the account that your token belongs to; some owners then have to agree."
        return f"{first}, then {_LOG_IN}."
    if status == 401 and client.has_token:
        return f"The hub does not accept your token: make a new one at {_TOKENS}, and {_LOG_IN.partition(', with')[0]}."
    if isinstance(error, hub.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision or 'main'!r}: choose one of those at {page}/tree/main."
    if isinstance(error, hub.DisabledRepoError):
        return f"The hub has disabled {name.repo}: choose another model."
    if isinstance(error, hub.RepositoryNotFoundError):
        private = "it may be private for another account than yours" if client.has_token else f"if private, {_LOG_IN}"
        return f"There is no model {name.repo} on the hub ({page}){nor_here}: check the name; {private}."
    if status == 403:
        return f"The hub refuses access to {name.repo} ({message or 'forbidden'}): look at {page}, or {_LOG_IN}."
    if status == 429:
        seconds = _seconds(error)
        when = f"in {seconds} seconds" if seconds else "in some minutes"
        advice = "" if client.has_token else f"; with a token the limit is higher ({_LOG_IN})"
        return f"The hub answers that there were too many requests (429): try again {when}{advice}."
    if status is not None:
        return f"The hub answers with an error ({status}) about {name.repo}: try again later, or look at {page}."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk with {client.cache} is full: free some space, or set HF_HOME to a folder on another disk. The "
            "part that has been downloaded stays."
        )
    if cannot_be_reached(client, error):
        reason = str(error).strip().rstrip(".") or type(error).__name__
        has_begun = client.has_begun(name.repo)
        return (
            f"The hub at {client.endpoint} cannot be reached ({reason}), and {name} is not in the cache"
            f"{' as a whole' if has_begun else ''}{nor_here}: check the network connection and the proxy."
            f"{f' {RESUMES}' if has_begun else ''}"
        )
    if isinstance(error, OSError):
        return f"{name} cannot be stored in {client.cache} ({error.strerror or error}): set HF_HOME to another folder."
    return f"{name} cannot be fetched ({type(error).__name__}: {error}): look at {page}."


def _header(error: Exception, key: str) -> str | None:
    value = getattr(getattr(error, "response", None), "headers", {}).get(key)
    return None if value is None else str(value)


def _seconds(error: Exception) -> int | None:
    """Seconds until the hub answers again; None if it does not say."""
    retry_after = _header(error, "Retry-After") or ""
    if retry_after.isdecimal():
        return int(retry_after)
    reset = re.search(r"\bt\s*=\s*(\d+)", _header(error, "RateLimit") or "")
    return int(reset[1]) if reset else None
