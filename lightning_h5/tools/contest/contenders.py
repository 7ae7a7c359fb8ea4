"""Who takes part in a benchmark of a file: the plain recipe, and the data modules with the settings that matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...datasets import H5LazyDataset
from ...datasets.table import FileTable, held_fields
from ...errors import H5ValueError
from ...files import OpenOptions, expand_paths, guess_keys
from ...readers import is_pooled
from ...sizes import bytes_text
from ...types import Keys, Paths

__all__ = ["SHUFFLE_BYTES", "BenchRows", "Contender", "LeftOut", "contenders_for", "find_rows"]

SHUFFLE_BYTES = 512 << 20
"""What the data modules mix at a time unless told otherwise."""

MOST_OF_ROOM = 2
"""One in so many of the bytes that are free may hold rows: the model wants some, and so do its batches."""

AHEAD_BYTES = 64 << 20
"""Bytes of decoded rows that have a place besides ``shuffle_bytes``, at least."""

AHEAD = 8
"""Batches that a thread copies ahead of rows in memory, where they would be copied on all cores when asked for."""


@dataclass(frozen=True, kw_only=True)
class BenchRows:
    """The rows that are read.

    Attributes:
        table: the files and their arrays.
        x_key: the input.
        y_key: the target, if any.
        batch_size: rows of a batch.
        row_bytes: bytes of a row, decoded.
        decoded_bytes: bytes of all rows, decoded, but for arrays that are held whole anyway.
        is_decoded: whether some array has to be decoded, and is not held whole.
        is_mapped: whether ``mmap`` changes how some array is read.
    """

    table: FileTable = field(repr=False)
    x_key: Keys
    y_key: Keys | None
    batch_size: int
    row_bytes: int
    decoded_bytes: int
    is_decoded: bool
    is_mapped: bool

    @property
    def n_rows(self) -> int:
        """Rows of all files."""
        return self.table.n_rows

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows, decoded."""
        return self.n_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to read the rows.

    Attributes:
        way: the plain recipe, or the data module that reads on demand, or the one that holds rows in memory.
        num_workers: worker processes.
        mmap: whether contiguous arrays are mapped into memory.
        shuffle_bytes: decoded bytes that are mixed at a time.
        prefetch_factor: batches that are read ahead; None is the data module's own.
    """

    way: Literal["plain", "lazy", "cached"]
    num_workers: int = 0
    mmap: bool = False
    shuffle_bytes: int = SHUFFLE_BYTES
    prefetch_factor: int | None = None

    @property
    def datamodule(self) -> str | None:
        """The data module's name; None for the plain recipe."""
        return {"plain": None, "lazy": "LazyH5DataModule", "cached": "RankCachedH5DataModule"}[self.way]

    @property
    def settings(self) -> dict[str, Any]:
        """Its arguments, as far as they are not the defaults."""
        settings: dict[str, Any] = {}
        if self.mmap:
            settings["mmap"] = True
        if self.shuffle_bytes != SHUFFLE_BYTES:
            settings["shuffle_bytes"] = f"{-(-self.shuffle_bytes >> 20)} MiB"
        if self.num_workers:
            settings["num_workers"] = self.num_workers
        if self.prefetch_factor is not None:
            settings["prefetch_factor"] = self.prefetch_factor
        return settings

    @property
    def name(self) -> str:
        """For people: the data module and its settings."""
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        return ", ".join([self.datamodule or "plain recipe", *settings])

    @property
    def rank(self) -> tuple[int, int, int, bool]:
        """How much there is to understand and to look after, the least first."""
        extras = (self.mmap, self.shuffle_bytes != SHUFFLE_BYTES, self.way == "cached")
        last = max([at for at, extra in enumerate(extras, start=1) if extra], default=0)
        return self.num_workers, last, sum(extras), self.prefetch_factor is not None

    def keeps_rows(self, rows: BenchRows) -> bool:
        """Whether all rows are in memory, decoded, from the second epoch on, which was not so before."""
        if self.way == "cached":
            return True
        needed = rows.decoded_bytes * max(1, self.num_workers)
        return self.way == "lazy" and rows.is_decoded and needed <= self.shuffle_bytes + AHEAD_BYTES

    def is_at_hand(self, rows: BenchRows) -> bool:
        """Whether batches are copies out of this process's memory from the second epoch on."""
        return not self.num_workers and (self.keeps_rows(rows) or (self.way == "lazy" and not rows.decoded_bytes))

    def memory(self, rows: BenchRows) -> int:
        """Bytes of rows that are about to be in memory, roughly."""
        consumers = max(1, self.num_workers)
        if self.way == "cached":
            return rows.n_bytes
        held = (rows.n_bytes - rows.decoded_bytes) * consumers
        if self.way == "plain" or not rows.is_decoded:
            return held
        return held + min(rows.decoded_bytes * consumers, self.shuffle_bytes + AHEAD_BYTES)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A contender that was not measured.

    Attributes:
        name: for people.
        why: the reason, a sentence.
    """

    name: str
    why: str


def find_rows(path: Paths, x_key: Keys | None, y_key: Keys | None, batch_size: int) -> BenchRows:
    """Looks at the files and checks that they can be trained from. Reads metadata alone.

    Args:
        path: one file, a glob, a directory, or a list of these.
        x_key: the input; None takes what the first file leaves no doubt about.
        y_key: the target, or None.
        batch_size: rows of a batch.

    Raises:
        H5Error: a file or an array is not as it should be, or there are fewer rows than a batch.
    """
    if x_key is None and y_key is not None:
        raise H5ValueError(f"y_key={y_key!r} was given without x_key. Pass both.")
    paths = expand_paths(path)
    if x_key is None:
        x_key, y_key = guess_keys(paths[0])
    dataset = H5LazyDataset(paths, x_key, y_key)
    try:
        if len(dataset) < batch_size:
            raise H5ValueError(
                f"batch_size={batch_size} was asked for, and there are {len(dataset)} rows. "
                + (f"Pass a batch_size of at most {len(dataset)}." if len(dataset) else "Pass files that have some.")
            )
        table = dataset.table
        loose = [
            layout
            for layouts, is_held in zip(zip(*table.layouts, strict=True), held_fields(table), strict=True)
            if not is_held
            for layout in layouts
        ]
        return BenchRows(
            table=table,
            x_key=x_key,
            y_key=y_key,
            batch_size=batch_size,
            row_bytes=dataset.row_bytes,
            decoded_bytes=dataset.decoded_bytes,
            is_decoded=any(is_pooled(layout, OpenOptions()) for layout in loose),
            is_mapped=any(layout.offset is not None and layout.is_placed for layout in loose),
        )
    finally:
        dataset.close()


def contenders_for(
    rows: BenchRows, *, num_workers: Sequence[int], free: int | None, plain: bool
) -> tuple[list[Contender], list[LeftOut]]:
    """Who is measured for these rows, and who cannot be.

    Args:
        rows: what is read.
        num_workers: worker processes to try.
        free: bytes of memory that are free here; None where the system does not say.
        plain: whether the plain recipe takes part.
    """
    found = [Contender(way="plain", num_workers=n) for n in num_workers] if plain else []
    found += [Contender(way="lazy", num_workers=n) for n in num_workers]
    if rows.is_mapped:
        found += [Contender(way="lazy", num_workers=n, mmap=True) for n in num_workers]
    large = [Contender(way="lazy", num_workers=n, shuffle_bytes=_whole_mib(rows, n)) for n in num_workers]
    large = [each for each in large if rows.is_decoded and each.shuffle_bytes > SHUFFLE_BYTES]
    # In memory that is copied by this process already; a worker would only carry it over.
    large.append(Contender(way="cached"))
    left_out = []
    for each in large:
        if free is None:
            why = "the system does not say how much memory is free"
        elif each.memory(rows) > free // MOST_OF_ROOM:
            why = f"it holds {_size(each.memory(rows))} of rows, and half of the free memory is {_size(free // 2)}"
        else:
            found.append(each)
            continue
        left_out.append(LeftOut(name=each.name, why=why))
    found += [replace(each, prefetch_factor=AHEAD) for each in found if each.is_at_hand(rows)]
    return found, left_out


def _whole_mib(rows: BenchRows, num_workers: int) -> int:
    """``shuffle_bytes`` that hold all decoded rows; each worker holds its own."""
    return -(-rows.decoded_bytes * max(1, num_workers) >> 20) << 20


def _size(n_bytes: int) -> str:
    return bytes_text(n_bytes, least="MiB", most="GiB")
