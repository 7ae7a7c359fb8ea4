"""What is asked of a copy, checked before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import H5ValueError
from ...files import CAUTIOUS, Trust
from .compression import check_compression

__all__ = ["RepackOptions"]


@dataclass(frozen=True, kw_only=True)
class RepackOptions:
    """What is asked; see ``repack_file``.

    Attributes:
        is_chunked: chunks are asked for, of so many rows or as many as suit.
        is_verified: the copy will be compared with the source.
        trust: which sizes are taken.

    Raises:
        H5ValueError: it makes no sense, or a compression is not installed.
    """

    rows_per_chunk: int | None = None
    is_chunked: bool = False
    compression: str = "keep"
    level: int | None = None
    shuffle_filter: bool = False
    checksum: bool = False
    shuffle_rows: int | None = None
    shuffle_keys: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    is_verified: bool = False
    trust: Trust = CAUTIOUS

    def __post_init__(self) -> None:
        if self.rows_per_chunk is not None and self.rows_per_chunk < 1:
            raise H5ValueError(
                f"rows_per_chunk={self.rows_per_chunk} was asked, and a chunk has at least one row. Pass 1 or more, or "
                "'auto'."
            )
        if self.shuffle_keys is not None and self.shuffle_rows is None:
            raise H5ValueError("shuffle_keys was given without shuffle_rows. Pass a seed as shuffle_rows, too.")
        check_compression(self.compression, self.level, self.shuffle_filter)
