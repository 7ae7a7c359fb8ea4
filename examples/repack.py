"""What the chunks of a compressed file cost, and what it gains to write it once more.

    python examples/repack.py [FOLDER]

Where ``chunks`` is not given, h5py guesses, and its guess cuts rows into pieces: one image then lies in dozens of
chunks, each of which holds pieces of hundreds of images. ``repack_file`` writes a copy whose chunks hold a few whole
rows. The rows are the same; this compares them, and times reading with little memory, as of a file that is much larger
than memory. ``python -m lightning_h5 repack`` does the same from the command line.
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
    """Writes 25 MB of noise, which compresses to half, in the chunks that h5py guesses."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 16, (N_ROWS, *ROW), dtype="u1")
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, compression="gzip")


def by_loader(path: Path) -> float:
    """Rows a second of a shuffled epoch that mixes 4 MiB of decoded rows at a time; the best of three.

    Each chunk is decoded once. The larger the chunks, the fewer of them are mixed: the data module says how many.
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
    """Rows a second of h5py alone, rows from anywhere in the file."""
    rows = np.random.default_rng(1).permutation(N_ROWS)[:n_rows]
    with h5py.File(path) as file:
        began = perf_counter()
        for row in rows:
            file["images"][row]
        return n_rows / (perf_counter() - began)


def main(folder: Path = DATA) -> None:
    """Repacks, compares the rows, and times both files."""
    guessed, repacked = folder / "guessed.h5", folder / "repacked.h5"
    write_images(guessed)
    repacked.unlink(missing_ok=True)
    report = repack_file(guessed, repacked, rows_per_chunk=8, compression="gzip")
    (images,) = report.arrays
    for name, stored in (("guessed", images.before), ("repacked", images.after)):
        print(
            f"{name:<9}: {stored.n_bytes / 1e6:.1f} MB in chunks of {stored.chunks}; "
            f"for a row {stored.row_cost / 1e3:,.0f} KB are decoded"
        )
    with h5py.File(guessed) as before, h5py.File(repacked) as after:
        print(f"rows are equal: {np.array_equal(before['images'][:], after['images'][:])}")
    ways = {"h5py, random rows": by_h5py, "lightning_h5, a shuffled epoch": by_loader}
    timed = {name: [rows_per_second(path) for path in (guessed, repacked)] for name, rows_per_second in ways.items()}
    print(f"{'rows a second':<32}{'guessed':>9}{'repacked':>9}{'times':>7}")
    for name, (before, after) in timed.items():
        print(f"{name:<32}{before:>9,.0f}{after:>9,.0f}{after / before:>7.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
