"""A chart of what `train_step.py --out rows.json` wrote: time and peak memory beside FSDP2's, by regime.

python examples/benchmarks/chart.py rows.json chart.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from world import ALONE

PANELS = (("ratio", "fb_ms", "forward + backward", "ms"), ("ratio_peak", "peak", "peak allocated memory", "GiB"))


def regime(row: dict[str, Any]) -> str:
    return f"{row['size']}, {row['tokens']}\nreduce {row['reduce']}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Grouped bars, a group a regime. Ratios to FSDP2 where it was measured, else milliseconds and GiB."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    regimes = list(dict.fromkeys(regime(row) for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    panels = [panel for panel in PANELS if any(row.get(panel[1]) for row in rows)]  # no memory on the CPU
    size = (max(9.0, 2.2 * len(regimes) + 5), 4.5 * len(panels))
    figure, grid = pyplot.subplots(len(panels), 1, figsize=size, layout="constrained", squeeze=False)
    axes = grid[:, 0]
    colors = matplotlib.colormaps["tab20"].resampled(20)
    for axis, (ratio, plain, title, unit) in zip(axes, panels, strict=True):
        relative = any(row.get(ratio) is not None for row in rows)
        width = 0.8 / max(len(names), 1)
        for number, name in enumerate(names):
            found = {regime(row): row.get(ratio if relative else plain) for row in rows if row["contender"] == name}
            heights = [found.get(each) or 0.0 for each in regimes]
            places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(regimes))]
            axis.bar(places, heights, width, label=name, color=colors(number % 20))
        if relative:
            axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(regimes)), regimes)
        axis.set_ylabel(f"{title}, " + ("times FSDP2's" if relative else unit))
    ranks = result["ranks"]
    axes[0].set_title(f"{result['machine']}" + (f"\n{ALONE}" if ranks == 1 else f"\n{ranks} ranks"))
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def try_to_draw(result: dict[str, Any], path: Path) -> str:
    """What became of it."""
    try:
        draw(result, path)
    except ModuleNotFoundError as error:
        return f"no chart: {error.name} is not installed; `python chart.py ROWS.json {path}` makes it elsewhere"
    return f"wrote {path}"


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(try_to_draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))


if __name__ == "__main__":
    main()
