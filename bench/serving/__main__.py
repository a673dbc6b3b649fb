"""`python -m polarlm.bench.serving`: a server, measured by its clients over HTTP.

`--only load` (the default): speed, latencies and cached tokens of requests that arrive as a Poisson process. `--only
agents` and `--only pressure`: time to the first token when conversations continue. `--only edits`: tokens that agents
have read again. Client and server run on the same
machine unless --url says otherwise, and then share its cores. `--peer` sends the same requests to another engine's
server.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from polarlm.bench.command import at_least, model_named, weight_files
from polarlm.bench.result import Output, Writer, digest_of_model
from polarlm.bench.serving.options import EDITS, LOAD, ConversationOptions, LoadOptions, Options
from polarlm.bench.serving.tables import report_of
from polarlm.bench.speed.options import file_names
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command
from polarlm.engine.cli.flags import FlagError, parse


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes JSON, prints the table."""
    options, load, talk, destination = parse(
        argv,
        {"Server": Options, "Load": LoadOptions, "Conversations": ConversationOptions, "Output": Output},
        prog="python -m polarlm.bench.serving",
        description="Throughput and waiting times of a server, and first tokens of conversations that come back.",
        checks={
            **dict.fromkeys(("clients", "requests", "prompt_tokens", "max_tokens"), at_least(1)),
            **dict.fromkeys(("agents", "opening", "turn", "rounds"), at_least(1)),
            **dict.fromkeys(("threads", "shared_prefix", "seed"), at_least(0)),
            **dict.fromkeys(("rate", "seconds"), lambda value: None if value > 0 else "must be more than 0"),
        },
    )
    if importlib.util.find_spec("httpx") is None:
        raise EngineError("httpx, which sends the requests, is not installed: pip install 'polarlm[bench]' adds it")
    model = model_named(options.weights, options.hf_repo)
    for flag, value in (("--url", options.url), ("--peer", options.peer)):
        if value is not None and options.only != LOAD:
            raise FlagError(f"{flag} and --only {options.only}, which starts its own servers: leave one of them out")
    if options.url is not None and model is not None:
        raise FlagError("--url and --weights or -hf both say which server it is; leave one of them out")
    from polarlm.bench.serving import conversations, edits  # these need httpx
    from polarlm.bench.serving.load import run

    if options.only == LOAD:
        run(options, load, model, destination, argv)
        return
    writer = Writer(destination.path(options.only, subject := file_names(model)), "serving", argv)
    digest = digest_of_model(weight_files(model))
    measure = edits.measure if options.only == EDITS else conversations.measure
    result = measure(options, talk, model)
    result.about |= {"model": subject, **digest}
    writer.write(result, complete=True)
    report_of(result).show(writer.path)


if __name__ == "__main__":
    sys.exit(main())
