"""Arrays as datasets take them: found through the door, looked at, and vouched for as far as that is asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import H5ValueError
from .digests import ArrayDigests, digests_path, read_digests, with_digests
from .door import find_array
from .integrity import INTEGRITY
from .layout import ArrayLayout, layout_of
from .trust import Trust

__all__ = ["look_up"]


def look_up(file: Any, path: str, key: str, trust: Trust) -> ArrayLayout:
    """An array of an open file. Reads metadata only.

    Args:
        file: the open file.
        path: its path.
        key: the array.
        trust: what of the file is believed.

    Raises:
        H5KeyError: there is no such array.
        H5ValueError: it is refused (see ``find_array``), has no digests where they are asked for, or damage to it would
            show less surely than is asked.
        H5CorruptError: it is another array than its digests were made of, or its index cannot be right.
        H5FileError: one of its filters is not installed, or the file has no digests where they are asked for.
    """
    layout = layout_of(find_array(file, key, trust), path, key)
    if trust.verify == "digest":
        layout = with_digests(layout, _digests(path))
    if layout.integrity < trust.min_integrity:
        raise H5ValueError(
            f"min_integrity={trust.min_integrity} was asked, and {key!r} in {path!r} has level {layout.integrity}: "
            f"{INTEGRITY[layout.integrity]}. Make a copy by `lightning-h5 repack --compression gzip --checksum`, which "
            "has level 3; or write digests by `lightning-h5 check --write-digests` and pass verify='digest', which is "
            "level 4."
        )
    return layout


def _digests(path: str) -> Mapping[str, ArrayDigests]:
    """The digests beside a file: those of the file before last are kept, as its arrays are looked up one by one."""
    try:
        found = os.stat(digests_path(path))
    except OSError:
        return read_digests(path)  # which says what is wrong
    return _kept(path, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2)
def _kept(path: str, *looks: int) -> Mapping[str, ArrayDigests]:
    return read_digests(path)
