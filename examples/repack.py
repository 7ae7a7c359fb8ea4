"""The cost of chunks in a compressed file, and the gain of repacking.

    python examples/repack.py [FOLDER]

Without ``chunks``, h5py guesses a chunk shape that divides rows: an image is then spread over dozens of chunks, and
each chunk has parts of hundreds of images. ``repack_file`` writes a copy with a few whole rows per chunk. This example
compares the rows of both files, and times reading with little memory, as for a file that is much larger than memory.
``python -m lightning_h5 repack`` does the same from the command line.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import h5py
import numpy as np

from lightning_h5 import LazyH5DataModule, repack_file

DATA = Path(__file__).parent / "data"
N_ROWS, ROW = 2000, (3, 64, 64)


def write_images(path: Path) -> None:
    """Write 25 MB of noise, which compresses to half, with h5py's default chunks."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 16, (N_ROWS, *ROW), dtype="u1")
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, compression="gzip")


def by_loader(path: Path) -> float:
    """Return the rows per second of a shuffled epoch that mixes 4 MiB of decoded rows at a time; the best of three.

    Each chunk is decoded once. The larger the chunks, the fewer are mixed: the data module logs their number.
    """
    seconds = []
    for epoch in range(3):
        datamodule = LazyH5DataModule(
            path, x_key="images", batch_size=50, shuffle={"buffer": "4 MiB"}, files={"cache_bytes": "8 MiB"}, seed=epoch
        )
        datamodule.setup("fit")
        began = perf_counter()
        for _ in datamodule.train_dataloader():
            pass
        seconds.append(perf_counter() - began)
    return N_ROWS / min(seconds)


def by_h5py(path: Path, n_rows: int = 40) -> float:
    """Return the rows per second of plain h5py for random rows."""
    rows = np.random.default_rng(1).permutation(N_ROWS)[:n_rows]
    with h5py.File(path) as file:
        began = perf_counter()
        for row in rows:
            file["images"][row]
        return n_rows / (perf_counter() - began)


def main(folder: Path = DATA) -> None:
    """Repack, compare the rows, and time both files."""
    guessed, repacked = folder / "guessed.h5", folder / "repacked.h5"
    write_images(guessed)
    repacked.unlink(missing_ok=True)
    report = repack_file(guessed, repacked, rows_per_chunk=8, compression="gzip")
    (images,) = report.arrays
    for name, stored in (("guessed", images.before), ("repacked", images.after)):
        print(
            f"{name:<9}: {stored.n_bytes / 1e6:.1f} MB in chunks of {stored.chunks}; "
            f"reading a row decodes {stored.row_cost / 1e3:,.0f} KB"
        )
    with h5py.File(guessed) as before, h5py.File(repacked) as after:
        print(f"rows are equal: {np.array_equal(before['images'][:], after['images'][:])}")
    ways = {"h5py, random rows": by_h5py, "lightning_h5, a shuffled epoch": by_loader}
    timed = {name: [rows_per_second(path) for path in (guessed, repacked)] for name, rows_per_second in ways.items()}
    print(f"{'rows per second':<32}{'guessed':>9}{'repacked':>9}{'times':>7}")
    for name, (before, after) in timed.items():
        print(f"{name:<32}{before:>9,.0f}{after:>9,.0f}{after / before:>7.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
