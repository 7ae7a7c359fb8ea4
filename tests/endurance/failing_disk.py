"""A program whose disk fails (see ``failing_reads.c``): what each way of reading says, and whether it goes on after."""

import json
import os
import sys
from pathlib import Path

from limited import assert_whole, loader_of

from lightning_h5 import H5Error, check_files, compute_stats, repack_file
from lightning_h5.hdf5 import process_pool
from lightning_h5.samples import row_table

N_ROWS = 1000  # 4 MiB: more than any cache here
MARKER = Path(os.environ["FAILING_READS"])


def failure(function):
    """What a function raises while reads fail."""
    MARKER.touch()
    try:
        function()
    except Exception as error:
        return type(error).__name__, isinstance(error, H5Error), str(error)
    finally:
        MARKER.unlink()
    return "nothing was raised", False, ""


def try_loader(path, kind, held_bytes, **options):
    """The error at the first batch, and then a whole epoch of the same loader."""
    row_table.HELD_BYTES = held_bytes
    loader = loader_of(kind, path, batch_size=32, **options)
    told = failure(lambda: list(loader))
    assert_whole(loader, N_ROWS)
    loader.close()
    process_pool().close()
    return told


def try_midway(path):
    """The error of a file that is open, and read in pieces, when its disk fails; and then a whole epoch."""
    row_table.HELD_BYTES = -1
    loader = loader_of("lazy", path, batch_size=8, prefetch_factor=1, cache_bytes=200 << 10, shuffle="chunks")
    batches = iter(loader)
    next(batches)
    told = failure(lambda: list(batches))
    assert_whole(loader, N_ROWS)
    loader.close()
    process_pool().close()
    return told


def try_tool(function):
    """The error of a tool, which then succeeds."""
    told = failure(function)
    function()
    process_pool().close()
    return told


def problem_of(path):
    """``check_files`` gives problems and raises nothing."""
    MARKER.touch()
    report = check_files(path)
    MARKER.unlink()
    assert check_files(path).errors == ()
    return "errors", bool(report.errors), f"{path}: {[problem.text for problem in report.errors]}"


def main(folder, out):
    told = {}
    for path in sorted(map(str, Path(folder).glob("*.h5"))):
        name = Path(path).stem
        for kind in ("lazy", "combined"):
            for held_bytes, num_workers in ((-1, 0), (-1, 1), (1 << 20, 0)):
                case = f"{name}, {kind}, {num_workers} workers, {'held' if held_bytes > 0 else 'read'}"
                told[case] = try_loader(path, kind, held_bytes, num_workers=num_workers)
        told[f"{name}, midway"] = try_midway(path)
        told[f"{name}, loading"] = try_tool(lambda path=path: loader_of("rank cached", path, batch_size=8))
        told[f"{name}, looking"] = try_tool(lambda path=path: loader_of("lazy", path, batch_size=8))
        told[f"{name}, statistics"] = try_tool(lambda path=path: compute_stats(path, "x"))
        told[f"{name}, repack"] = try_tool(lambda path=path: repack_file(path, f"{path}.copy"))
        told[f"{name}, check"] = problem_of(path)
    Path(out).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
