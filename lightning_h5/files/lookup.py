"""Arrays as datasets take them: found through the door, looked at, and vouched for as far as that is asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import H5FileError, H5ValueError
from .digests import ArrayDigests, digests_path, read_digests, with_digests
from .door import find_array
from .integrity import INTEGRITY
from .layout import ArrayLayout, layout_of
from .trust import Trust

__all__ = ["file_with_digests", "look_up"]


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
            f"{INTEGRITY[layout.integrity]}. {_raised_to(trust.min_integrity)}"
        )
    return layout


def _raised_to(level: int) -> str:
    """How an array gets a level."""
    by_digests = "write digests by `lightning-h5 check --write-digests` and pass verify='digest', which is level 4."
    if level == len(INTEGRITY) - 1:
        return by_digests.replace("write", "Write", 1)
    return f"Make a copy by `lightning-h5 repack --compression gzip --checksum`, which has level 3; or {by_digests}"


def file_with_digests(path: str) -> str | None:
    """The name that digests lie beside: the file as it was named, or else what that is a link to; None for neither."""
    for name in (path, os.path.realpath(path)):
        if os.path.lexists(digests_path(name)):
            return name
    return None


def _digests(path: str) -> Mapping[str, ArrayDigests]:
    """The digests beside a file: those of the file before last are kept, as its arrays are looked up one by one."""
    name = file_with_digests(path)
    try:
        found = os.stat(digests_path(name or path))
    except OSError:
        target = os.path.realpath(path)
        if name is not None or target == path:
            return read_digests(name or path)  # which says what is wrong
        raise H5FileError(
            f"verify='digest' was asked, and {path!r}, which leads to {target!r}, has no digests: there is neither "
            f"{digests_path(path)!r} nor {digests_path(target)!r}. Write them while the file is known to be whole: "
            "`lightning-h5 check --write-digests`."
        ) from None
    return _kept(name or path, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=2)
def _kept(path: str, *looks: int) -> Mapping[str, ArrayDigests]:
    return read_digests(path)
