"""How fast is a file repacked, beside decoding and encoding the same bytes alone, and in how much memory?

    python examples/benchmarks/repack.py [--gib 2] [--level 4] [--rows-per-chunk 40] [--rounds 3] [--json FILE]

Writes pictures as gzip, 32 rows a chunk. The limit is a bare loop over the same chunks: libdeflate decodes each and
encodes it again at the same level, on all cores, in memory that is used again, no file written. Repacking finds the
chunks, reads, lays rows out in chunks of another size, writes, syncs. Both take turns. The copy is compared with the
original, array by array.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import deflate
import h5py
import numpy as np

from lightning_h5.readers import usable_cores
from lightning_h5.tools.repack import repack_file

ROW = (3, 64, 64)
ROWS_PER_CHUNK = 32
LEAST = 0.5
MAX_MIB = 512


def write_pictures(path: Path, n_bytes: int, level: int) -> None:
    """Smooth pictures with noise, which gzip makes about 1.5 times smaller; a GiB takes half a minute."""
    rng = np.random.default_rng(0)
    n_rows = n_bytes // int(np.prod(ROW)) // ROWS_PER_CHUNK * ROWS_PER_CHUNK
    y, x = np.mgrid[:64, :64] / 64

    def chunk(number: int) -> bytes:
        draw = np.random.default_rng(number)
        waves, phases = draw.random((2, ROWS_PER_CHUNK, 3, 1, 1))
        picture = 128 + 90 * np.sin(6 * (waves * x + phases * y + phases))
        noisy = picture + noise[draw.integers(len(noise), size=ROWS_PER_CHUNK)]
        return bytes(deflate.zlib_compress(noisy.astype("u1").tobytes(), level))

    noise = rng.normal(0, 1, (500, *ROW))
    with h5py.File(path, "w") as file, ThreadPoolExecutor(usable_cores()) as pool:
        options = {"chunks": (ROWS_PER_CHUNK, *ROW), "compression": "gzip", "compression_opts": level}
        array = file.create_dataset("images", (n_rows, *ROW), "u1", **options)
        for at, content in enumerate(pool.map(chunk, range(n_rows // ROWS_PER_CHUNK))):
            array.id.write_direct_chunk((at * ROWS_PER_CHUNK, 0, 0, 0), content)
        file["labels"] = np.arange(n_rows)


def bare_loop(path: Path, level: int) -> float:
    """Seconds to decode all chunks and encode them again, on all cores, nothing written."""
    with h5py.File(path) as file:
        found: list[tuple[int, int]] = []
        file["images"].id.chunk_iter(lambda info: found.append((info.byte_offset, info.size)))
    n_bytes = ROWS_PER_CHUNK * int(np.prod(ROW))
    fd = os.open(path, os.O_RDONLY)

    def work(part: list[tuple[int, int]]) -> int:
        done = 0
        for offset, size in part:
            done += len(deflate.zlib_compress(deflate.zlib_decompress(os.pread(fd, size, offset), n_bytes), level))
        return done

    n_threads = usable_cores()
    began = perf_counter()
    with ThreadPoolExecutor(n_threads) as pool:
        sum(pool.map(work, (found[at::n_threads] for at in range(n_threads))))
    os.close(fd)
    return perf_counter() - began


@contextmanager
def peak_memory(seen: list[float]) -> Iterator[None]:
    """Notes the most memory of this process's own, in MiB; pages of files that the system keeps are not its own."""
    over = threading.Event()

    def watch() -> None:
        most = 0
        while not over.wait(0.02):
            if found := re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text()):
                most = max(most, int(found[1]))
        seen.append(most / 1024)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def compare(one: Path, other: Path, step: int = 2048) -> bool:
    """Whether all arrays of two files are the same, as the HDF5 library reads them."""
    with h5py.File(one) as a, h5py.File(other) as b:
        return list(a) == list(b) and all(
            len(a[name]) == len(b[name]) and np.array_equal(a[name][at : at + step], b[name][at : at + step])
            for name in a
            for at in range(0, len(a[name]), step)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2, help="decoded size of the pictures (2)")
    parser.add_argument("--level", type=int, default=4, help="of gzip (4)")
    parser.add_argument("--rows-per-chunk", type=int, default=40, help="rows of a chunk of the copy (40)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    memory: list[float] = []
    bare, repacked = [], []
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.h5", Path(folder) / "copy.h5"
        write_pictures(source, int(options.gib * 2**30), options.level)
        for _ in range(options.rounds):
            bare.append(bare_loop(source, options.level))
            target.unlink(missing_ok=True)
            with peak_memory(memory):
                began = perf_counter()
                report = repack_file(
                    source, target, rows_per_chunk=options.rows_per_chunk, compression="gzip", level=options.level
                )
                repacked.append(perf_counter() - began)
        is_equal = compare(source, target)
        n_mib = sum(array.n_bytes for array in report.arrays if array.is_rewritten) / 2**20
    result = {
        "cores": usable_cores(),
        "decoded_mib": n_mib,
        "bare_loop_mib_per_second": n_mib / statistics.median(bare),
        "repack_mib_per_second": n_mib / statistics.median(repacked),
        "ratio": statistics.median(bare) / statistics.median(repacked),
        "peak_mib": max(memory),
        "is_equal": is_equal,
    }
    print(f"{n_mib:,.0f} MiB of pictures, gzip {options.level}, {usable_cores()} cores, medians of {options.rounds}")
    print(f"bare loop, decode and encode   {result['bare_loop_mib_per_second']:>8,.0f} MiB/s")
    print(f"repack_file                    {result['repack_mib_per_second']:>8,.0f} MiB/s")
    print(f"repack_file / bare loop        {result['ratio']:>8.2f}   (wanted: {LEAST} or more)")
    print(f"most memory of its own         {result['peak_mib']:>8,.0f} MiB (wanted: {MAX_MIB} or less)")
    print(f"copy and original are equal: {is_equal}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if not is_equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
