"""`polarlm pack`: computes a context once, for requests that begin with it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm.engine.cli.commands import note, with_flags
from polarlm.engine.cli.flags import FlagError, read_text
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import EngineConfig, format_bytes, hub_setting, model_setting, setting
from polarlm.engine.errors import EngineError
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import first_model

if TYPE_CHECKING:
    from polarlm.engine import Engine
    from polarlm.engine.storage.packs import PackedText

_ROOM = 8  # tokens of a context beyond the pack's


@dataclass(frozen=True)
class PackConfig:
    texts: tuple[str, ...] = setting(
        MISSING,
        "TEXT",
        help="text files (UTF-8), folders of them, or a conversation: a .json file with a list of messages",
    )
    output: str | None = setting(None, "-o", "--output", metavar="FILE", help="where the pack is written; required")
    system_prompt: str | None = setting(
        None, "-sys", "--system-prompt", metavar="TEXT", text=True, help="the system prompt, ahead of the texts"
    )
    weights: str | None = model_setting(is_word=False)
    hf_repo: str | None = hub_setting()
    cache_type: str = setting(
        EngineConfig.cache_type, "--cache-type", metavar="TYPE", help="how keys and values are stored"
    )
    like: str | None = setting(
        None, "--like", metavar="PACK", help="another pack, whose scales this one gets, so that an engine takes both"
    )
    device: str = setting("auto", "--device", metavar="DEVICE", help="where it is computed: cpu, cuda or cuda:N")
    threads: int = setting(0, "-t", "--threads", metavar="N", help="CPU threads")


GROUPS: Mapping[str, type] = {"Pack": PackConfig}


@with_flags(
    GROUPS, "polarlm pack", "Compute a context once, and keep it in a file that --pack gives to chats and servers."
)
def main(options: PackConfig) -> None:
    if options.output is None:
        raise FlagError("-o: say where the pack is written, such as -o manual.pack")
    messages, texts = read_messages(options.texts, options.system_prompt)
    names = "weights", "hf_repo", "cache_type", "device", "threads"
    packs = {} if options.like is None else {"like": options.like}
    config = settle(None, None, {name: getattr(options, name) for name in names} | {"packs": packs})
    config = replace(config, weights=config.weights or first_model.remembered_name())
    print(write_pack(config, messages, texts, Path(options.output).expanduser()))


def read_messages(paths: Sequence[str], system_prompt: str | None) -> tuple[list[dict[str, Any]], list[PackedText]]:
    """Return the messages of a pack of these files, and the texts in them. Raises FlagError."""
    from polarlm.engine.storage.packs import PackedText

    files = [file for path in paths for file in _files(Path(path).expanduser())]
    contents = {file: read_text(str(file), file) for file in files}
    texts = [PackedText.from_text(file.name, content) for file, content in contents.items()]
    conversations = [file for file in files if file.suffix == ".json"]
    if conversations and len(files) > 1:
        raise FlagError(f"{conversations[0]}: a conversation is packed alone")
    if conversations:
        messages = _conversation(conversations[0], contents[conversations[0]])
        return [*([_system(system_prompt)] if system_prompt else []), *messages], texts
    named = [f"{file.name}:\n\n{content.strip()}" for file, content in contents.items() if content.strip()]
    content = "\n\n".join([*([system_prompt.strip()] if system_prompt else []), *named])
    if not named:
        raise FlagError("TEXT: there is nothing to pack: all of these files are empty")
    return [_system(content)], texts


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    if not files:
        raise FlagError(f"{path}: there is no file in this folder")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _conversation(file: Path, content: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(content)
        if isinstance(messages, dict):
            messages = messages["messages"]
        if messages and all(isinstance(message.get("role"), str) for message in messages):
            return [dict(message) for message in messages]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        pass
    raise FlagError(f'{file}: a conversation is a list of messages such as {{"role": "user", "content": "Hello"}}')


def _shared_ids(engine: Engine, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ids that conversations begin with which begin with these messages, whatever follows."""
    from polarlm.engine.state.prefix import common_prefix

    role = "assistant" if messages[-1]["role"] == "user" else "user"
    one, other = (engine.prompt_ids([*messages, {"role": role, "content": text}], None, note) for text in ("A", "7"))
    return one[: common_prefix(one, other)]


def write_pack(
    config: EngineConfig, messages: Sequence[Mapping[str, Any]], texts: Sequence[PackedText], path: Path
) -> str:
    """Compute and write a pack; what to print. Raises EngineError or LoadError."""
    from polarlm.engine import Engine, SamplingParams
    from polarlm.engine.storage.packs import note_of
    from polarlm.model_loaders import load

    begin = time.monotonic()
    with closing(load(config.weights, verbose=note)) as model:
        most = model.config.max_context
    with Engine.load(config=replace(config, ctx_size=most, parallel=1), verbose=note) as engine:
        ids = _shared_ids(engine, messages)
        if len(ids) + _ROOM > engine.context:
            raise EngineError(
                f"The texts have {len(ids):,} tokens, and the context of {engine.model.name} {engine.context:,}: leave "
                "some of them out",
                "context_length_exceeded",
            )
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        with counting(f"Packing {len(ids):,} tokens", total=len(ids)) as say:
            done = 0
            for chunk in engine.stream(ids, params, progress=True):
                if chunk.prompt_tokens:
                    say("", chunk.prefilled - done)
                    done = chunk.prefilled
        count = engine.save_session(path, prompt=ids, note=note_of(messages, texts))
    path.chmod(0o644)  # others load it, too
    return f"{path}: {count:,} tokens, {format_bytes(path.stat().st_size)}, in {time.monotonic() - begin:.0f} s."
