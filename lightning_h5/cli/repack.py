"""``repack``: a copy of a file with other chunks, another compression, or its rows in random order."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import listing
from ..tools.compression import COMPRESSIONS
from ..tools.repack import RepackedArray, RepackReport, StoredAs, repack_file
from .terminal import bytes_text, faint, table, write, write_json

__all__ = ["EXAMPLES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "Copies an HDF5 file, its arrays laid out for training, so that a random row costs little more than itself."

EXAMPLES = """\
  lightning-h5 repack data.h5 small.h5 --rows-per-chunk 32 --compression zstd --verify
  lightning-h5 repack data.h5 fast.h5 --compression none
  lightning-h5 repack sorted.h5 shuffled.h5 --shuffle-rows 0
"""
NO_GAIN = 0.95  # of the bytes without compression
ENDS = (signal.SIGTERM, signal.SIGHUP)  # asked to end, or the terminal was closed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``repack``."""
    parser.add_argument("source", metavar="IN", help="the file to copy; it is only read")
    parser.add_argument("target", metavar="OUT", help="the copy; never replaces a file")
    parser.add_argument(
        "--rows-per-chunk",
        type=_rows,
        metavar="N",
        help="rows of a chunk, or 'auto': as many as make 256 to 512 KiB (default: auto, if there are chunks). Labels "
        "and other columns of a file with larger rows stay as they are, unless --keys names them; so do arrays of "
        "which N rows take less than 4 KiB and a row less than 1/16 of the largest",
    )
    parser.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        metavar="NAME",
        help=f"one of {', '.join(COMPRESSIONS)} (default: keep)",
    )
    parser.add_argument("--level", type=int, metavar="L", help="how hard: gzip 1-9 (4), zstd 1-22 (3), blosc 0-9 (5)")
    parser.add_argument("--shuffle-filter", action="store_true", help="shuffle bytes before compressing")
    parser.add_argument("--checksum", action="store_true", help="store a checksum with each chunk")
    parser.add_argument("--shuffle-rows", type=int, metavar="SEED", help="permute the rows, all arrays alike")
    parser.add_argument(
        "--shuffle-keys", nargs="+", metavar="K", help="arrays that are permuted, where not all have equally many rows"
    )
    parser.add_argument("--keys", nargs="+", metavar="K", help="arrays that are laid out anew (default: all)")
    parser.add_argument("--verify", action="store_true", help="read the copy back and compare all of it")
    parser.add_argument(
        "--allow-sparse", action="store_true", help="take arrays above 4 GiB of which next to nothing is stored"
    )
    parser.add_argument("--allow-large-chunks", action="store_true", help="take chunks above 1 GiB, decoded")


def _rows(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows; pass 1 or more, or 'auto'")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Copies, and says what it bought."""
    with _ended_by_signal():
        report = repack_file(
            options.source,
            options.target,
            rows_per_chunk=options.rows_per_chunk,
            compression=options.compression,
            level=options.level,
            shuffle_filter=options.shuffle_filter,
            checksum=options.checksum,
            shuffle_rows=options.shuffle_rows,
            shuffle_keys=options.shuffle_keys,
            keys=options.keys,
            verify=options.verify,
            allow_sparse=options.allow_sparse,
            allow_large_chunks=options.allow_large_chunks,
            shows_progress=True,
        )
    if options.json:
        write_json(report)
    else:
        _show(report)
    return 0


def _show(report: RepackReport) -> None:
    rows = [["array", "chunks", "filters", "stored", "a row costs"]]
    for array in report.arrays:
        name = array.name + (" (rows shuffled)" if array.is_shuffled else "")
        rows.append([name, *_cells(array.before)])
        rows.append(["", *_cells(array.after)] if array.is_rewritten else ["", "as before", "", "", ""])
    write(table(rows))
    for array in report.arrays:
        if array.note:
            write(faint(f"{array.name} {array.note}."))
    idle = [array.name for array in report.arrays if _is_idle(array)]
    if idle:
        write(f"Compressed, {listing(idle, 3)} takes as much room as without: --compression none reads faster.")
    checked = "" if report.verify_seconds is None else f"; verified in {report.verify_seconds:.1f} s"
    write(
        f"{bytes_text(report.n_bytes_before)} became {bytes_text(report.n_bytes_after)} ({report.ratio:.2f} times) in "
        f"{report.seconds:.1f} s, {report.mib_per_second:,.0f} MiB/s decoded{checked}."
    )


def _is_idle(array: RepackedArray) -> bool:
    """Whether an array was compressed, and is no smaller for it."""
    compressors = set(array.after.filters) - {"shuffle", "fletcher32"}
    return array.is_rewritten and bool(compressors) and array.after.n_bytes > NO_GAIN * array.n_bytes


def _cells(stored: StoredAs) -> list[str]:
    chunks = "none" if stored.chunks is None else " x ".join(map(str, stored.chunks))
    return [chunks, "+".join(stored.filters) or "none", bytes_text(stored.n_bytes), bytes_text(stored.row_cost)]


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP exceptions, so that nothing is left of an unfinished copy."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # what a shell shows for a process that a signal ended

    # What is ignored stays so: nohup ignores SIGHUP.
    found = {number: signal.getsignal(number) for number in ENDS}
    before = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
