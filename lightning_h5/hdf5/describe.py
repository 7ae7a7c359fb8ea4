"""Arrays as datasets take them: found through the door, looked at, and vouched for as far as that is asked."""

from __future__ import annotations

from typing import Any

from ..errors import H5ValueError
from ..options import FileOptions
from .checks import INTEGRITY
from .digests import read_digests, with_digests
from .layout import ArrayLayout, layout_of
from .open import find_array

__all__ = ["describe_array", "vouched_for"]


def describe_array(file: Any, path: str, key: str, trust: FileOptions) -> ArrayLayout:
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
    return vouched_for(layout_of(find_array(file, key, trust), path, key), trust)


def vouched_for(layout: ArrayLayout, trust: FileOptions) -> ArrayLayout:
    """An array with its digests, if these are asked for.

    Args:
        layout: the array.
        trust: what of the file is believed.

    Raises:
        H5Error: see ``describe_array``.
    """
    path, key = layout.path, layout.key
    if trust.verify == "digest":
        layout = with_digests(layout, read_digests(path))
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
