"""The picture of a load: latencies, and the server's output in each second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.plot_style import NO_PICTURES, STYLE, can_draw, panels, save

_CURVES = {
    "first_token_seconds": ("first token", "#c2410c"),
    "between_tokens_seconds": ("between two tokens", "#1d4ed8"),
    "request_seconds": ("whole answer", "#4b5563"),
}


def draw(result: Mapping[str, Any], output: Path) -> str:
    """Draw next to the JSON file `output`; returns a sentence about it. Raises EngineError."""
    if not can_draw():
        return NO_PICTURES
    from matplotlib import rc_context
    from matplotlib.ticker import StrMethodFormatter

    file = output.with_suffix(".png")
    with rc_context(STYLE):
        figure, ((waits, rates),) = panels(2, 1, (5.4, 4.2))
        percent = np.arange(101)
        for name, (label, colour) in _CURVES.items():
            if curve := result["latencies"][name]["percentiles"]:
                waits.plot(np.asarray(curve) * 1e3, percent, color=colour, lw=1.6, label=label)
        waits.set_xscale("log")
        waits.set_ylim(0, 100)
        waits.set_xlabel("milliseconds")
        waits.set_ylabel("percent that waited no longer")
        waits.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        rates.stairs(result["tokens_each_second"], fill=True, color="#fdba74")
        rates.axhline(result["tokens_per_second"], color="#c2410c", lw=1.2, ls="--", label="mean of all seconds")
        rates.set_ylim(0)
        rates.set_xlabel("seconds")
        rates.set_ylabel("tokens/s of all clients")
        lines, labels = waits.get_legend_handles_labels()
        mean, mean_label = rates.get_legend_handles_labels()
        figure.legend(lines + mean, labels + mean_label, loc="outside lower center", ncols=4)
        load = result["load"]
        figure.suptitle(
            f"{result['model']}: {load['clients']} clients, {load['rate']:g} requests/s (Poisson)", fontweight="bold"
        )
        save(figure, file)
    return f"Picture: {file.name}"
