"""Sentences on how files are read, for the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import listing
from ..hdf5 import ArrayLayout, ChangeGuard
from ..options import StagingOptions
from ..readers import fallback_reason
from ..sizes import bytes_text
from ..staging import ensure_folder, why_not_staged

__all__ = ["staging_report"]

SMALL_CHUNK, MANY_CHUNKS = 64 << 10, 1000
"""Of an object, a request for fewer bytes than these takes as long as for these; noted from so many chunks on."""


def staging_report(
    staging: StagingOptions, guards: Iterable[ChangeGuard], layouts: Iterable[ArrayLayout]
) -> Iterator[str]:
    """Yield sentences on what is staged.

    Args:
        staging: where mirrors are kept.
        guards: of the files.
        layouts: arrays of the files, at least one of each kind.
    """
    files = {guard.path: guard for guard in guards}
    staged = [path for path, guard in files.items() if guard.staging is not None]
    if staged:
        folder = ensure_folder(staging)
        which = f"{len(staged)} of {len(files)} files are" if len(files) > 1 else f"{staged[0]!r} is"
        yield f"staging: {which} read through {folder.path!r}, which may take {bytes_text(folder.limit)}"
    if staging.storage_options is not None and not any(guard.is_remote for guard in files.values()):
        yield "staging: storage_options have no effect, since all files are on file systems"
    reasons: dict[str, list[str]] = {}
    for path, guard in files.items():
        if guard.staging is None:
            why = why_not_staged(staging, guard.device, guard.n_bytes, grows=guard.grows)
            reasons.setdefault(why or "it was set up without", []).append(path)
    for why, paths in reasons.items():
        yield f"staging: {listing(paths, most=3)} {'is' if len(paths) == 1 else 'are'} not staged: {why}"
    for each in layouts:
        table = each.table
        if not each.guard.is_remote or table is None or len(table.sizes) < MANY_CHUNKS:
            continue
        if (size := int(table.sizes.clip(min=0).mean())) < SMALL_CHUNK:
            yield (
                f"staging: the chunks of {each.key!r} have {bytes_text(size)} on average, and the first epoch takes a "
                "request for each, or for those that lie together. Larger ones need fewer: `lightning-h5 repack "
                "--rows-per-chunk auto --for-object-store`"
            )
    on_disk = [each for each in layouts if each.guard.staging is not None and not each.guard.is_remote]
    by_library = {each.key for each in on_disk if fallback_reason(each) is not None}
    if by_library:
        yield f"staging: not of {listing(sorted(by_library))}, which only the HDF5 library can read"
