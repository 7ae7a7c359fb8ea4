"""``repack``: a copy of a file with other chunks, another compression, or its rows in random order."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import listing
from ..sizes import bytes_text
from ..tools.compression import COMPRESSIONS
from ..tools.repack import RepackReport, StoredAs, repack_file
from .terminal import faint, table, write, write_json

SUMMARY = "Copies an HDF5 file, its arrays in chunks for training, so that a random row costs little more than itself."
EXAMPLES = """\
  lightning-h5 repack data.h5 small.h5 --rows-per-chunk 32 --compression zstd --verify
  lightning-h5 repack data.h5 fast.h5 --compression none
  lightning-h5 repack sorted.h5 shuffled.h5 --shuffle-rows 0
"""
NO_GAIN = 0.95  # of the bytes without compression


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``repack``."""
    add = parser.add_argument
    add("source", metavar="IN", help="the file to copy; it is only read")
    add("target", metavar="OUT", help="the copy; never replaces a file")
    add(
        "--rows-per-chunk",
        type=_rows,
        metavar="N",
        help="rows of a chunk, or 'auto': as many as make 256 to 512 KiB (default: auto, if there are chunks). Labels "
        "and other columns of a file with larger rows stay as they are, unless --keys names them",
    )
    known = f"one of {', '.join(COMPRESSIONS)} (default: keep)"
    add("--compression", choices=COMPRESSIONS, metavar="NAME", help=known)
    add("--level", type=int, metavar="L", help="how hard: gzip 1-9 (4), zstd 1-22 (3), blosc 0-9 (5)")
    add("--shuffle-filter", action="store_true", help="shuffle bytes before compressing")
    add("--checksum", action="store_true", help="store a checksum with each chunk")
    add("--shuffle-rows", type=int, metavar="SEED", help="permute the rows, all arrays alike")
    add("--shuffle-keys", nargs="+", metavar="K", help="arrays to permute, if not all have equally many rows")
    add("--keys", nargs="+", metavar="K", help="arrays that get other chunks or filters (default: all)")
    add("--verify", action="store_true", help="read the copy back and compare all of it")
    add(
        "--trusted",
        action="store_true",
        help="take arrays above 4 GiB of which next to nothing is stored, and chunks above 1 GiB, decoded",
    )


def _rows(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows; pass 1 or more, or 'auto'")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Copy, and write what became of each array."""
    arguments = {name: value for name, value in vars(options).items() if name != "json"}
    with _ended_by_signal():
        report = repack_file(**arguments, shows_progress=True)
    if options.json:
        write_json(report)
    else:
        write("\n".join(_text(report)))
    return 0


def _text(report: RepackReport) -> Iterator[str]:
    rows = [["array", "chunks", "filters", "stored", "a row costs"]]
    for array in report.arrays:
        name = array.name + (" (rows shuffled)" if array.is_shuffled else "")
        rows.append([name, *_cells(array.before)])
        rows.append(["", *_cells(array.after)] if array.is_rewritten else ["", "as before", "", "", ""])
    yield table(rows)
    yield from (faint(f"{array.name} {array.note}.") for array in report.arrays if array.note)
    rewritten = [array for array in report.arrays if array.is_rewritten]
    compressed = [array for array in rewritten if set(array.after.filters) - {"shuffle", "fletcher32"}]
    if idle := [array.name for array in compressed if array.after.n_bytes > NO_GAIN * array.n_bytes]:
        yield f"Compressed, {listing(idle, 3)} takes as much room as without: --compression none reads faster."
    speed = sum(array.n_bytes for array in rewritten) / 2**20 / max(1e-9, report.seconds)
    verified = "" if report.verify_seconds is None else f"; verified in {report.verify_seconds:.1f} s"
    yield (
        f"{bytes_text(report.n_bytes_before)} became {bytes_text(report.n_bytes_after)} "
        f"({report.n_bytes_after / report.n_bytes_before:.2f} times) in {report.seconds:.1f} s, {speed:,.0f} MiB/s "
        f"decoded{verified}."
    )


def _cells(stored: StoredAs) -> list[str]:
    chunks = "none" if stored.chunks is None else " x ".join(map(str, stored.chunks))
    return [chunks, "+".join(stored.filters) or "none", bytes_text(stored.n_bytes), bytes_text(stored.row_cost)]


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Make SIGTERM and SIGHUP exceptions, so that nothing is left of an unfinished copy."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # what a shell shows for a process that a signal ended

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # what is ignored stays so, as under nohup
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
