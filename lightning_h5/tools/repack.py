"""A copy of a file with other chunks, another compression, or its rows in random order; all else stays."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

from tqdm import tqdm

from ..errors import H5DataChangedError, H5Error, H5FileError, H5ValueError
from ..files import ChangeGuard, Trust, create_h5, open_h5, process_pool
from ..readers import usable_cores
from ..sampling.permutation import permutation
from ..types import PathLike
from .copying.buckets import bytes_beside
from .copying.compare import Comparison
from .copying.compression import FLETCHER32, SHUFFLE
from .copying.format import allow_newer_objects
from .copying.options import RepackOptions
from .copying.plan import ArrayPlan, plan_arrays
from .copying.references import References
from .copying.report import RepackedArray, RepackReport, StoredAs, repacked_arrays
from .copying.row_copy import Order, RowCopy
from .copying.tree_copy import TreeCopy
from .copying.walk import all_arrays
from .progress import progress_bar
from .safe_output import check_room, new_file, refuse_existing

__all__ = ["RepackReport", "RepackedArray", "StoredAs", "repack_file"]

REPACK = 15  # purpose of the random stream


def repack_file(
    source: PathLike,
    target: PathLike,
    *,
    rows_per_chunk: int | Literal["auto"] | None = None,
    compression: str | None = None,
    level: int | None = None,
    shuffle_filter: bool = False,
    checksum: bool = False,
    shuffle_rows: int | None = None,
    shuffle_keys: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    verify: bool = False,
    allow_sparse: bool = False,
    allow_large_chunks: bool = False,
    shows_progress: bool = False,
) -> RepackReport:
    """Copies a file, its arrays laid out anew: for training, a random row should cost little more than itself.

    All else is as it was: attributes, groups, links of all kinds, dimension scales, references (to the copies), fill
    values, limits of growth, named types, the user block. Virtual arrays stay virtual, unless rows are shuffled: then
    they become ordinary ones. What lies in other files (external links and storage, virtual arrays over them) stays a
    link, under the same name; no other file is ever opened. Virtual arrays that are made of themselves stay as they
    are, too. Chunks that were never written stay so, except among shuffled rows.

    The copy has another name until it is complete and, where asked, verified. It never replaces a file. After an error,
    Ctrl-C or a full disk nothing is left of it.

    Decodes and encodes in threads, on all cores; filters that the HDF5 library alone knows (Blosc2, szip ...) take one
    core. Holds less than 512 MiB, of any file, unless one stored chunk or one row of text takes more. Rows that
    share chunks and take more than 64 MiB together are put together in a temporary file in the target's folder.

    Args:
        source: the file to copy. It must not be written to meanwhile.
        target: the copy, which must not exist.
        rows_per_chunk: rows of a chunk, which holds them whole; "auto" takes a power of two that makes 256 to 512 KiB
            of them, decoded, or a single row. Rows above 32 MiB are cut. None is "auto" where there are chunks at all:
            arrays without stay without, where nothing that is asked needs chunks.
        compression: ``gzip``, ``lzf``, ``none``, or with the extra ``filters`` ``zstd``, ``lz4``, ``blosc``,
            ``blosc-zstd``, ``blosc2``, ``bitshuffle``. None, or ``keep``, leaves each array the filters that it has.
        level: how hard to compress: gzip 1 to 9 (default 4), zstd 1 to 22 (3), Blosc 0 to 9 (5).
        shuffle_filter: shuffle bytes before compressing, which helps with numbers of several bytes.
        checksum: store a checksum with each chunk, which is verified whenever the chunk is read.
        shuffle_rows: a seed: rows are permuted, all arrays alike. Row ``i`` goes where
            ``permutation(n_rows, seed, 0, 15)`` of ``lightning_h5.sampling.permutation`` says, which never changes.
            Decoded rows above 32 MiB pass through a temporary file of their size in the target's folder. Text and
            references are written row by row, about 20 microseconds each.
        shuffle_keys: the arrays that belong together. Needed where not all arrays of the file have equally many rows.
        keys: arrays that are laid out anew; None are all. Others are copied as they are stored, unless they are
            shuffled.
        verify: read the copy back with the HDF5 library and compare all of it with the source, before it gets its name.
            Of virtual arrays that stay so, what they are made of is compared, and not their values.
        allow_sparse: take arrays that declare more than 4 GiB and more than 1,000 times what is stored. Refused
            otherwise where their rows are written anew or verified: a few bytes of a file could ask for years.
        allow_large_chunks: take chunks of more than 1 GiB, decoded, which are held whole. Refused otherwise, likewise.
        shows_progress: show a bar on the standard error, if that is a terminal.

    Returns:
        What was done, array by array.

    Raises:
        H5FileError: the source cannot be read, or the target not be written: it exists, there is no room, no folder, no
            permission.
        H5KeyError: there is no array of a name.
        H5ValueError: an argument makes no sense for this file, a compression is not installed, an array claims far more
            than is stored, or groups lie in each other more than 1,000 deep.
        H5CorruptError: the source is damaged, or the copy differs from it.
        H5DataChangedError: the source was written to meanwhile.
    """
    options = RepackOptions(
        rows_per_chunk=None if rows_per_chunk == "auto" else rows_per_chunk,
        is_chunked=rows_per_chunk is not None,
        compression=compression or "keep",
        level=level,
        shuffle_filter=shuffle_filter,
        checksum=checksum,
        shuffle_rows=shuffle_rows,
        shuffle_keys=None if shuffle_keys is None else tuple(shuffle_keys),
        keys=None if keys is None else tuple(keys),
        is_verified=verify,
        trust=Trust(sparse=allow_sparse, large_chunks=allow_large_chunks),
    )
    paths = os.fspath(source), os.fspath(target)
    _refuse_same(*paths)
    try:
        return _repack(*paths, options, shows_progress)
    finally:
        process_pool().close(paths[0])


def _repack(source: str, target: str, options: RepackOptions, shows_progress: bool) -> RepackReport:
    began, checked = time.monotonic(), None
    with open_h5(source) as file, _faults_told(source, target):
        guard = ChangeGuard.of(source)
        plans = plan_arrays(file, options)
        refuse_existing(target)
        check_room(target, _bytes_needed(file, plans, guard.n_bytes))
        order = _order(file, plans, options)
        with new_file(target) as partial:
            with (
                ThreadPoolExecutor(usable_cores(), "lightning_h5-repack") as pool,
                _bar(plans, options.is_verified, shows_progress) as bar,
            ):
                tree = _write(file, partial, plans, order, pool, bar, checked=options.checksum)
                written = time.monotonic()
                if options.is_verified:
                    _verify(file, partial, tree, order, pool, bar)
                    checked = time.monotonic() - written
            _check_unchanged(guard)
            with open_h5(partial) as copy:
                arrays = tuple(repacked_arrays(file, copy, tree))
            n_after = os.path.getsize(partial)
    n_decoded = sum(array.n_bytes for array in arrays if array.is_rewritten)
    return RepackReport(
        source=source,
        target=target,
        arrays=arrays,
        n_bytes_before=guard.n_bytes,
        n_bytes_after=n_after,
        ratio=n_after / guard.n_bytes,
        n_bytes_decoded=n_decoded,
        seconds=written - began,
        mib_per_second=n_decoded / 2**20 / max(1e-9, written - began),
        verify_seconds=checked,
    )


def _write(
    file: Any,
    partial: str,
    plans: Mapping[int, ArrayPlan],
    order: Order | None,
    pool: ThreadPoolExecutor,
    bar: Any,
    *,
    checked: bool,
) -> TreeCopy:
    with create_h5(partial, like=file, checked=checked) as copy:
        tree = TreeCopy(file, copy, plans)
        allow_newer_objects(file, copy)
        tree.copy_structure()
        rows = RowCopy(
            path=file.filename,
            order=order,
            references=tree.references,
            pool=pool,
            folder=os.path.dirname(os.path.abspath(partial)),
            done=bar.update,
        )
        for plan, original, copied in tree.arrays():
            rows.copy(plan, original, copied)
        tree.copy_attributes()
        tree.finish()
    _copy_user_block(file, partial)
    return tree


def _verify(file: Any, partial: str, tree: TreeCopy, order: Order | None, pool: ThreadPoolExecutor, bar: Any) -> None:
    with open_h5(partial) as copy:
        Comparison(
            source=file,
            copy=copy,
            tree=tree,
            references=References(file, copy, tree.places, tree.moved),
            order=order,
            pool=pool,
            folder=os.path.dirname(os.path.abspath(partial)),
            done=bar.update,
        ).check()


@contextmanager
def _faults_told(source: str, target: str) -> Iterator[None]:
    """Says in a line what the HDF5 library or the system could not do."""
    try:
        yield
    except H5Error:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, MemoryError) as error:
        said = re.search(r"errno = (\d+)", str(error))  # HDF5 says it in words
        number = int(said[1]) if said else getattr(error, "errno", None)
        if isinstance(error, MemoryError) or "memory allocation failed" in str(error):
            number = errno.ENOMEM
        raise H5FileError(
            f"{source!r} could not be copied to {target!r}: {os.strerror(number) if number else error}. Nothing is "
            f"left of the copy; {_cure(number, error)}"
        ) from error


def _cure(number: int | None, error: Exception) -> str:
    """What to do about what could not be done."""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room on the disk, or name a target on another one."
    if number == errno.ENOMEM:
        return (
            "a chunk, or a row of text, is held whole: see the sizes in `lightning-h5 inspect`, and repack where there "
            "is more memory. A few bytes of a file that is made to do harm can ask for all there is."
        )
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise `ulimit -n`, or close other files."
    if isinstance(error, UnicodeError):
        return (
            "a name in it (of a member of a table, say) is not UTF-8, and is not copied. Write that array again with "
            "other names, in the program that made it."
        )
    return "look for damage with `lightning-h5 check`, and at the disk and the permissions of both folders."


def _copy_user_block(file: Any, partial: str) -> None:
    if n_bytes := file.userblock_size:
        with open(file.filename, "rb") as source, open(partial, "r+b") as target:
            target.write(source.read(n_bytes))


def _refuse_same(source: str, target: str) -> None:
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise H5FileError(f"{target!r} is the file that is to be repacked. Name another file; rename it afterwards.")


def _check_unchanged(guard: ChangeGuard) -> None:
    try:
        is_same = ChangeGuard.of(guard.path) == guard
    except OSError:
        is_same = False
    if not is_same:
        raise H5DataChangedError(
            f"{guard.path!r} was written to, replaced or deleted while it was copied; the copy is discarded. Leave the "
            "file alone, and repack it again."
        )


def _bytes_needed(file: Any, plans: Mapping[int, ArrayPlan], n_stored: int) -> int:
    """About what the copy takes: as the source, more for what is no longer compressed; and files that go again."""
    more, beside = 0, 0
    for address, _, array in all_arrays(file):
        if (plan := plans[address]).is_unread:
            continue
        stored = array.get_storage_size()
        if plan.way in ("rows", "boxes") and not {step.id for step in plan.steps} - {SHUFFLE, FLETCHER32} and stored:
            more += max(0, plan.n_bytes - stored)
        if plan.is_shuffled and plan.way == "rows":
            beside = max(beside, bytes_beside(array.shape[0], plan.row_bytes))
    return n_stored + more + beside


def _order(file: Any, plans: Mapping[int, ArrayPlan], options: RepackOptions) -> Order | None:
    counts = {array.shape[0] for address, _, array in all_arrays(file) if plans[address].is_shuffled}
    if options.shuffle_rows is None or not counts:
        return None
    if len(counts) > 1:
        raise H5ValueError(f"rows of arrays with {sorted(counts)} rows cannot be shuffled together. Name shuffle_keys.")
    return permutation(counts.pop(), options.shuffle_rows, 0, REPACK)


def _bar(plans: Mapping[int, ArrayPlan], verify: bool, shows_progress: bool) -> tqdm[Any]:
    total = sum(plan.n_bytes for plan in plans.values() if plan.way != "as it is")
    if verify:
        total += sum(plan.n_bytes for plan in plans.values() if not plan.is_unread)
    return progress_bar(total, "repacking", shows_progress=shows_progress, delay=0.5)
