"""The threads that read prompts, in a pool for each kind of prompt: a short prompt waits for no long one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

from polarlm.engine.requests.prompts import Prompt, is_chat

_THREADS = 4  # of a pool: more would take the event loop's time
_LONG = 1 << 18  # characters; a prompt that has more takes seconds
_MESSAGE = 128  # characters that take as long as a message


class Readers:
    """Pools of threads. Chats, which wait for a template, and long prompts have pools of their own, and so have prompts
    that are only counted: they delay no answer."""

    def __init__(self, size: int) -> None:
        """size: requests that may wait for constraints to be compiled and images to be decoded, each in a thread."""
        kinds = product(("answers", "counts"), ("texts", "chats", "long"))
        self._pools = {kind: ThreadPoolExecutor(_THREADS, thread_name_prefix="-".join(kind)) for kind in kinds}
        self.waiting_pool = ThreadPoolExecutor(size, thread_name_prefix="waiting")

    def pool_for(self, prompt: Prompt, use: str = "answers") -> ThreadPoolExecutor:
        """The pool that a prompt is read in. use: "answers" or "counts"."""
        if has_images(prompt):
            return self.waiting_pool
        return self._pools[use, "long" if _size(prompt) > _LONG else "chats" if is_chat(prompt) else "texts"]

    def stop(self) -> None:
        """Take no more prompts; return at once."""
        for pool in (*self._pools.values(), self.waiting_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def has_images(prompt: Prompt) -> bool:
    return is_chat(prompt) and any(isinstance(message.get("content"), list) for message in prompt)


def _size(prompt: Prompt) -> int:
    """How long it takes to read a prompt, in characters."""
    if not is_chat(prompt):
        return len(prompt)
    return sum(_MESSAGE + len(str(message.get("content") or "")) for message in prompt)
