"""What a random row costs in each layout that compressed.py measures: a drawing and a table for the documentation.

    python examples/benchmarks/layouts.py docs/_parts

writes ``chunk_cost.html`` (computed from the chunks alone) and ``layouts.md`` (computed, beside what was measured:
``layouts.json`` in the same folder, which `compressed.py` writes).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN, OURS = "plain h5py", "lightning_h5"
OTHER_BUDGETS = ("512 MiB", "mmap", "chunks")  # our contenders with their own settings
WIDTH, LEFT, RIGHT, LINE, TOP = 752, 232, 96, 26, 40


@dataclass(frozen=True)
class Layout:
    """How rows are stored.

    Attributes:
        name: for people.
        row_shape: of a row.
        row_bytes: of a row, decoded.
        chunks: shape of a chunk, None for a contiguous array.
    """

    name: str
    row_shape: tuple[int, ...]
    row_bytes: int
    chunks: tuple[int, ...] | None

    @property
    def chunks_of_a_row(self) -> int:
        """Chunks that have a part of a row."""
        if self.chunks is None:
            return 0
        return math.prod(-(-size // chunk) for size, chunk in zip(self.row_shape, self.chunks[1:], strict=True))

    @property
    def bytes_alone(self) -> int:
        """Bytes that are decoded for a row which comes alone."""
        if self.chunks is None:
            return self.row_bytes
        item_bytes = self.row_bytes // math.prod(self.row_shape)
        return self.chunks_of_a_row * math.prod(self.chunks) * item_bytes


PICTURES = (3, 64, 64)
DRAWN = (
    Layout("contiguous", PICTURES, 12288, None),
    Layout("1 row a chunk", PICTURES, 12288, (1, *PICTURES)),
    Layout("32 rows a chunk", PICTURES, 12288, (32, *PICTURES)),
    Layout("256 rows a chunk", PICTURES, 12288, (256, *PICTURES)),
    Layout("h5py's guess, (1250, 1, 8, 8)", PICTURES, 12288, (1250, 1, 8, 8)),
)


def drawing() -> str:
    """Bars, on a logarithmic scale, in the theme's colours (see docs/_static/drawing.css)."""
    most = max(layout.bytes_alone for layout in DRAWN)
    least = DRAWN[0].row_bytes / 4
    room = WIDTH - LEFT - RIGHT
    height = TOP + LINE * len(DRAWN) + 8
    told = "; ".join(f"{layout.name} {size_text(layout.bytes_alone)}" for layout in DRAWN)
    lines = [
        '<div class="way">',
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="cost-title">',
        f'<title id="cost-title">Bytes for one random row of 12 KiB, for several shapes of chunks: {told}.</title>',
        text("note", "start", 4, 20, "pictures of 12 KiB, 20,000 rows"),
        text("note", "start", LEFT, 20, "bytes for a row that comes alone (logarithmic); outlined: its own"),
    ]
    for at, layout in enumerate(DRAWN):
        y, alone, own = (
            TOP + LINE * at,
            *(room * math.log(n / least) / math.log(most / least) for n in (layout.bytes_alone, layout.row_bytes)),
        )
        lines += [
            text("note", "end", LEFT - 8, y + 15, layout.name),
            f'<rect class="box" x="{LEFT}" y="{y + 2}" width="{alone:.0f}" height="17" rx="2"/>',
            f'<rect class="box plan" x="{LEFT}" y="{y + 2}" width="{own:.0f}" height="17" rx="2"/>',
            text("name", "start", LEFT + alone + 8, y + 15, size_text(layout.bytes_alone)),
        ]
    return "\n".join([*lines, "</svg>", "</div>", ""])


def text(kind: str, anchor: str, x: float, y: float, words: str) -> str:
    """A piece of text; ``kind`` is a class of the style sheet."""
    return f'<text class="{kind}" style="text-anchor:{anchor}" x="{x:.0f}" y="{y}">{words}</text>'


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """All cases: what a row costs alone, and what was measured."""
    head = (
        "array",
        "MiB in the file",
        "bytes for a row alone",
        "plain h5py, rows/s",
        "lightning_h5, rows/s",
        "times",
    )
    lines = ["| " + " | ".join(head) + " |", "|---|---:|---:|---:|---:|---:|"]
    for result in results:
        shape, row_bytes = (PICTURES, 12288) if result["rows_are"] == "images" else ((4, 1024), 16384)
        chunks = None if result["chunks"] is None else tuple(result["chunks"])
        layout = Layout(result["title"], shape, row_bytes, chunks)
        plain, ours = rates(result, PLAIN, max), rates(result, OURS, min)
        cells = (
            f"{result['rows_are']}, {result['title']}",
            f"{result['stored_bytes'] / 2**20:,.0f}",
            size_text(layout.bytes_alone),
            f"{plain:,.0f}",
            f"{ours:,.0f}",
            f"{ours / plain:,.0f}" if ours >= 10 * plain else f"{ours / plain:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def rates(result: Mapping[str, Any], team: str, choose: Any) -> float:
    """Rows a second of a team: the best of plain h5py, the slowest of ours."""
    found = [
        statistics.median(each["rows_per_second"])
        for each in result["contenders"]
        if each["name"].startswith(team) and not any(other in each["name"] for other in OTHER_BUDGETS)
    ]
    return float(choose(found))


def size_text(n_bytes: float) -> str:
    """Bytes as people read them."""
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes / 2**10:.0f} KiB"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "chunk_cost.html").write_text(drawing())
    (folder / "layouts.md").write_text(table(json.loads((folder / "layouts.json").read_text())["results"]))
