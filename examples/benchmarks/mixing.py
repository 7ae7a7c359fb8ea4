"""How well ``shuffle="chunks"`` mixes a file that is sorted by label, for several budgets, as a table.

    python examples/benchmarks/mixing.py [--rows 20000] [--rows-per-chunk 32] [--row-bytes 12288]

Reads no file: the order is a function of the number of rows and the seed. What counts is the entropy of the labels in
a batch, beside that of a full shuffle.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_h5.loading.choose_order import blocks_mixed
from lightning_h5.order import BlockTable, OrderParameters, order_rows

BATCH_SIZE = 64
N_LABELS = 10
SEEDS = 3
MIB = 2**20
BUDGETS = (4, 16, 64, 128, 512)
CONSUMERS = (1, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A file.

    Attributes:
        n_rows: its rows, sorted by label.
        per_chunk: rows of a chunk.
        n_bytes: bytes of a row, decoded.
    """

    n_rows: int
    per_chunk: int
    n_bytes: int

    def blocks(self) -> BlockTable:
        """The block table."""
        whole, rest = divmod(self.n_rows, self.per_chunk)
        return BlockTable.of_sizes([self.per_chunk] * whole + [rest])

    def labels(self) -> npt.NDArray[np.int64]:
        """Each row's label."""
        return np.arange(self.n_rows) * N_LABELS // self.n_rows


def entropies(rows: Rows, parameters: OrderParameters) -> npt.NDArray[np.float64]:
    """Entropy of the labels in each batch of some epochs."""
    labels, found = rows.labels(), []
    for seed in range(SEEDS):
        order = order_rows(rows.blocks(), OrderParameters(**{**vars(parameters), "seed": seed}), 0)
        batches = labels[order(0, rows.n_rows)][: rows.n_rows // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)
        shares = np.stack([(batches == label).mean(axis=1) for label in range(N_LABELS)], axis=1)
        found.append(-(shares * np.log(np.where(shares, shares, 1))).sum(axis=1))
    return np.concatenate(found)


def cells(values: npt.NDArray[np.float64]) -> str:
    """Mean and worst percentile."""
    return f"{values.mean():.2f} ({np.percentile(values, 1):.2f})"


def lines(rows: Rows) -> Iterator[tuple[str, ...]]:
    """The table: a line for each budget, then the full shuffle."""
    for budget in BUDGETS:
        line = [f"{budget} MiB"]
        for streams in CONSUMERS:
            window = blocks_mixed(budget * MIB, rows.per_chunk * rows.n_bytes, streams)
            parameters = OrderParameters(mode="chunks", batch_size=BATCH_SIZE, streams=streams, window=window)
            line.append(f"{window}: {cells(entropies(rows, parameters))}")
        yield tuple(line)
    full = cells(entropies(rows, OrderParameters(mode="global", batch_size=BATCH_SIZE)))
    yield ("full shuffle", *[full] * len(CONSUMERS))


def table(rows: Rows) -> str:
    """The table in Markdown."""
    header = ("`shuffle.buffer`", *(f"{n} consumer{'s' * (n > 1)} a rank" for n in CONSUMERS))
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines(rows))
    return f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n{body}\n"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Label entropy of batches with shuffle='chunks'.")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the file (default: %(default)s)")
    parser.add_argument("--rows-per-chunk", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--row-bytes", type=int, default=12_288, help="decoded bytes of a row (default: %(default)s)")
    options = parser.parse_args()
    print(table(Rows(n_rows=options.rows, per_chunk=options.rows_per_chunk, n_bytes=options.row_bytes)), end="")


if __name__ == "__main__":
    main()
