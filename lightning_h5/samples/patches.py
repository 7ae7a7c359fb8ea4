"""Patches: samples that are parts of volumes, cut out of the cells of arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

import numpy as np

from ..errors import H5ValueError
from ..options import PatchOptions
from ..order import BlockTable, uniform
from ..types import IntArray, cached_property
from .assemblers import Assembler, PatchAssembler
from .indexer import PartsOfSegments, Units
from .patch_grids import CellAxis, CellGrid, CellPieces, PatchRows
from .sample_rows import FieldRows, Places
from .segments import BoolArray

__all__ = ["Patches", "Volume"]

PLACE = 32  # purpose of the random stream of the first patch axis; the next axes have the numbers that follow
NUMBER = 32  # bits of a patch's number in its volume, below the volume's

BLOCK_BYTES = 32 << 20
"""Cells of a block take so much, at most: of large blocks few cells are decoded twice, of small ones many are mixed."""

PATCHES_OF_BLOCK = 4  # a block of large patches has the cells of so many of them
MAX_BLOCKS = 16  # along an axis, that are tried, besides blocks of one cell


@dataclass(frozen=True, eq=False)
class Volume:
    """The patches of a volume, and of all others with the same shape and the same cells.

    Patches are numbered by blocks, which are boxes of cells, and in a block by where they start.

    Attributes:
        lengths: length of the axes that are cut.
        grids: cells of each field; None for a field that has one value for each segment.
        row_bytes: bytes of a cell of each field.
        options: how patches are cut.
    """

    lengths: tuple[int, ...]
    grids: tuple[CellGrid | None, ...]
    row_bytes: tuple[int, ...]
    options: PatchOptions

    @cached_property
    def starts(self) -> tuple[IntArray, ...]:
        """Where patches of the grid start, along each axis that is cut."""
        axes = zip(self.lengths, self.options.sizes, self.options.strides, strict=True)
        return tuple(self._starts(*axis).astype(np.int64) for axis in axes)

    def _starts(self, n: int, size: int, stride: int) -> IntArray:
        """Return where patches of the grid start along an axis with ``n`` indices."""
        if self.options.border == "pad":
            return np.arange(0, min(max(n - size, 0) + stride, n), stride)
        starts = np.arange(0, n - size + 1, stride)
        if self.options.border == "shift" and len(starts) and starts[-1] < n - size:
            return np.append(starts, n - size)
        return starts

    @cached_property
    def n_patches(self) -> int:
        """Number of patches."""
        n = math.prod(map(len, self.starts))
        return n if self.options.random is None else self.options.random * bool(n)

    @cached_property
    def bounds(self) -> tuple[IntArray, ...]:
        """Along each axis, the number of grid positions before each block, and their total number."""
        if self.options.random is not None or not self.n_patches:
            return tuple(np.array([0, len(starts)]) for starts in self.starts)
        return tuple(self._bounds(cut, n) for cut, n in enumerate(self._blocks[0]))

    @property
    def block_bytes(self) -> int:
        """Bytes of the cells of a block, or of random patches, at most."""
        return self._blocks[1] if self.n_patches else 0

    def _bounds(self, cut: int, n_cells: int) -> IntArray:
        """Return the bounds along an axis (see ``bounds``) of blocks that have so many cells along it."""
        edges = self._cut_axes[cut].starts[:-1:n_cells]
        return np.append(np.searchsorted(self.starts[cut], edges), len(self.starts[cut]))

    @cached_property
    def _cut_grids(self) -> list[tuple[int, CellGrid]]:
        """The grids of fields that are cut, each after the bytes of all cells that a volume has of it."""
        grids = []
        for grid, row_bytes in zip(self.grids, self.row_bytes, strict=True):
            if grid is not None and grid.cut_axes:
                n_cells = math.prod(len(np.unique(axis.cells)) for axis in grid.axes if axis.is_in_patch)
                grids.append((row_bytes * n_cells, grid))
        return grids

    @property
    def _cut_axes(self) -> list[CellAxis]:
        """The axes that are cut, of the field that takes most bytes."""
        return sorted(self._cut_grids, key=itemgetter(0))[-1][1].cut_axes

    @cached_property
    def _blocks(self) -> tuple[tuple[int, ...], int]:
        """Cells of a block along each axis, and the bytes of all cells that its patches have.

        Patches at the end of a block also have cells of the next ones, which are then decoded for each. Of the blocks
        that are small enough, all of the volume is taken, or else those of which the fewest cells are decoded so.
        """
        axes, sizes = self._cut_axes, self.options.sizes
        n_cells = [len(axis.cells) for axis in axes]
        cell_bytes = sum(n_bytes for n_bytes, _ in self._cut_grids) / math.prod(n_cells)
        longest = [int(np.diff(axis.starts).max()) for axis in axes]
        spans = [min(n, (size - 2) // step + 2) for n, size, step in zip(n_cells, sizes, longest, strict=True)]
        patch_bytes = math.prod(spans) * cell_bytes
        if self.options.random is not None:
            return tuple(n_cells), math.ceil(min(math.prod(n_cells) * cell_bytes, self.options.random * patch_bytes))
        limit = max(BLOCK_BYTES, PATCHES_OF_BLOCK * patch_bytes)
        costs = [self._costs(cut, axis) for cut, axis in enumerate(axes)]
        candidates = []
        for block in product(*costs):
            most_cells, all_cells = zip(*(of_axis[n] for of_axis, n in zip(costs, block, strict=True)), strict=True)
            n_bytes = math.ceil(math.prod(most_cells) * cell_bytes)
            is_large, is_part = n_bytes > limit, block != tuple(n_cells)
            candidates.append((is_large, is_part, 0 if is_large else math.prod(all_cells), n_bytes, block))
        *_, n_bytes, block = min(candidates)
        return block, n_bytes

    def _costs(self, cut: int, axis: CellAxis) -> dict[int, tuple[int, int]]:
        """Return the cells along an axis that patches of a block have, for blocks of several lengths.

        Returns:
            For each number of cells of a block the most cells that patches of a block have, and the sum over all.
        """
        n_cells, size = len(axis.cells), self.options.sizes[cut]
        costs = {}
        for n in {1, *(-(-n_cells // n_blocks) for n_blocks in range(1, MAX_BLOCKS))}:
            bounds = np.unique(self._bounds(cut, n))
            low, last = self.starts[cut][bounds[:-1]], self.starts[cut][bounds[1:] - 1]
            first, after = axis.runs(low, np.minimum(last + size, axis.length))
            costs[n] = int((after - first).max()), int((after - first).sum())
        return costs

    @cached_property
    def block_sizes(self) -> IntArray:
        """Patches of each block."""
        if self.options.random is not None:
            return np.array([self.n_patches])
        sizes = np.ones(1, dtype=np.int64)
        for bounds in self.bounds:
            sizes = np.multiply.outer(sizes, np.diff(bounds)).reshape(-1)
        return sizes

    def of_fields(self, fields: Sequence[int]) -> Volume:
        """Return the volume with some fields, and the patches and blocks of all."""
        grids, row_bytes = tuple(self.grids[at] for at in fields), tuple(self.row_bytes[at] for at in fields)
        volume = replace(self, grids=grids, row_bytes=row_bytes)
        volume.__dict__.update(bounds=self.bounds, _blocks=self._blocks if self.n_patches else None)
        return volume

    def places(self, numbers: IntArray) -> IntArray:
        """Return where patches of the grid start, shape ``(n, n_axes)``."""
        sizes, rest, in_block = [len(starts) for starts in self.starts], numbers, np.ones_like(numbers)
        firsts, counts = [], []
        for axis, bounds in enumerate(self.bounds):
            n_alike = in_block * math.prod(sizes[axis + 1 :])  # patches with the same start along this axis
            block = np.searchsorted(bounds, rest // n_alike, side="right") - 1
            firsts.append(bounds[block])
            counts.append(bounds[block + 1] - bounds[block])
            rest, in_block = rest - firsts[-1] * n_alike, in_block * counts[-1]
        places = []
        for starts, first, n in zip(reversed(self.starts), reversed(firsts), reversed(counts), strict=True):
            rest, at = np.divmod(rest, n)
            places.append(starts[first + at])
        return np.stack(places[::-1], axis=1)

    def drawn(self, segments: IntArray, numbers: IntArray, seed: int, epoch: int) -> IntArray:
        """Return where random patches start, of segments with these numbers among all of the files."""
        places, patches = [], (segments << NUMBER) + numbers
        for axis, (n, size) in enumerate(zip(self.lengths, self.options.sizes, strict=True)):
            offsets = uniform(seed, epoch, PLACE + axis, patches) * max(1, n - size + 1)
            places.append(np.minimum(offsets.astype(np.int64), max(0, n - size)))
        return np.stack(places, axis=1)

    def digest(self) -> bytes:
        """Return bytes that identify these patches among others of the same arrays."""
        options = self.options
        settings = (self.lengths, options.sizes, options.strides, options.border, options.random)
        return repr(settings).encode() + b"".join(b"-" if grid is None else grid.digest() for grid in self.grids)


@dataclass(frozen=True, eq=False)
class Patches(PartsOfSegments):
    """Samples that are patches of volumes; each segment is one.

    Attributes:
        segments: the segments; the rows of their fields are cells.
        volumes: the kinds of volumes.
        kinds: the kind of each segment.
        lines: number of each segment along the axis of segments; 0 if there is none.
        seed: of random patches.
    """

    volumes: tuple[Volume, ...]
    kinds: IntArray
    lines: IntArray
    seed: int = 0

    noun = "patches"
    segment_noun = "volume"
    is_known_by_row = False
    passes_whole = True

    @property
    def options(self) -> PatchOptions:
        """How patches are cut."""
        return self.volumes[0].options

    def counts(self) -> IntArray:
        """See ``PartsOfSegments.counts``."""
        return np.array([volume.n_patches for volume in self.volumes], dtype=np.int64)[self.kinds]

    @property
    def shortage(self) -> str:
        """See ``PartsOfSegments.shortage``."""
        return f"are smaller than a patch {self.options.sizes}"

    def cuts(self, field: int) -> bool:
        """See ``Indexer.cuts``."""
        return self.volumes[0].grids[field] is not None

    def shape_read(self, field: int, row_shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``Indexer.shape_read``."""
        grid = self.volumes[0].grids[field]
        return row_shape if grid is None else grid.shape_of(self.options.sizes)

    def assembler(self, field: int, *, is_ragged: bool, place: int) -> Assembler:
        """See ``Indexer.assembler``."""
        return PatchAssembler() if self.cuts(field) else Assembler()

    def among(self, segments: IntArray) -> Patches:
        """See ``Indexer.among``."""
        return replace(
            self, segments=self.segments.among(segments), kinds=self.kinds[segments], lines=self.lines[segments]
        )

    def in_parts(self, low: IntArray, high: IntArray) -> Patches:
        """See ``Indexer.in_parts``."""
        raise H5ValueError("split.by='time' was given with patch, and volumes have no steps. Pass 'segment'.")

    def keeping(self, is_kept: BoolArray) -> Patches:
        """See ``Indexer.keeping``."""
        raise H5ValueError(
            "label was given with patch, and volumes have no steps. Pass where with a value that a volume has once."
        )

    def of_fields(self, fields: Sequence[int]) -> Patches:
        """See ``Indexer.of_fields``."""
        segments = self.segments.of_fields(fields)
        volumes = tuple(volume.of_fields(fields) for volume in self.volumes)
        return replace(self, segments=segments, volumes=volumes)

    def places(self, samples: IntArray, epoch: int | None = None) -> Places:
        """See ``Indexer.places``; steps are where patches start along each axis that is cut."""
        segments = np.searchsorted(self.ends, samples, side="right")
        numbers = samples - self.before(segments)
        steps = np.empty((len(samples), len(self.options.sizes)), dtype=np.int64)
        for kind, positions in self._by_kind(segments):
            volume = self.volumes[kind]
            if volume.options.random is None:
                steps[positions] = volume.places(numbers[positions])
            else:
                in_files = self.segments.numbers_of(segments[positions])
                steps[positions] = volume.drawn(in_files, numbers[positions], self.seed, 0 if epoch is None else epoch)
        return Places(segments, steps)

    def _by_kind(self, segments: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Yield each kind of volume among segments, and the positions of its segments."""
        if len(self.volumes) == 1:
            yield 0, np.arange(len(segments))
            return
        kinds = self.kinds[segments]
        order = np.argsort(kinds, kind="stable")
        for positions in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1):
            if len(positions):
                yield int(kinds[positions[0]]), positions

    def rows(self, places: Places) -> tuple[FieldRows, ...]:
        """See ``Indexer.rows``: cells of the kinds of volumes, one after the other."""
        n_fields, segments = len(self.segments.kinds), places.segments
        pieces: list[list[CellPieces]] = [[] for _ in range(n_fields)]
        cells: list[list[IntArray]] = [[np.empty(0, dtype=np.int64)] for _ in range(n_fields)]
        firsts, lines = self.segments.steps[0].firsts_of(segments), self.lines[segments]
        for kind, positions in self._by_kind(segments):
            for field, grid in enumerate(self.volumes[kind].grids):
                if grid is not None:
                    of_kind = grid.pieces(places.steps[positions], self.options.sizes, lines[positions], positions)
                    pieces[field].append(of_kind)
                    cells[field].append(of_kind.cells + firsts[of_kind.samples])
        values, is_padded = FieldRows(self.segments.numbers_of(segments)), self.options.border == "pad"
        rows = []
        for field, grid in enumerate(self.volumes[0].grids):
            if grid is None:
                rows.append(values)
            else:
                shape = (len(segments), *grid.shape_of(self.options.sizes))
                rows.append(FieldRows(np.concatenate(cells[field]), patches=PatchRows(pieces[field], shape, is_padded)))
        return tuple(rows)

    def rows_of_any_epoch(self, samples: IntArray) -> Iterator[IntArray]:
        """See ``Indexer.rows_of_any_epoch``."""
        fields = [field for field, kind in enumerate(self.segments.kinds) if kind is not None]
        if self.options.random is None:
            rows = self.rows(self.places(samples))
            yield from (rows[field].rows for field in fields)
            return
        segments = np.unique(np.searchsorted(self.ends, samples, side="right"))
        yield from (np.flatnonzero(self._n_reads(field, segments)) for field in fields)

    def rows_held(self, samples: range | IntArray, n_rows: int) -> Sequence[range | IntArray]:
        """See ``Indexer.rows_held``. Each field has its own cells."""
        fields = [self.of_fields([field]) for field in range(len(self.segments.kinds))]
        return [super(Patches, field).rows_held(samples, n_rows)[0] for field in fields]

    def _n_reads(self, field: int, segments: IntArray) -> IntArray:
        """Return how often an epoch reads each row of a field; of random patches whether it can."""
        firsts = self.segments.steps[0].firsts_of(segments)
        lengths = self.segments.steps[0].lengths_of(segments)
        n_reads = np.zeros(int((firsts + lengths).max(initial=0)), dtype=np.int64)
        order = np.argsort(firsts, kind="stable")
        for positions in np.split(order, np.flatnonzero(np.diff(firsts[order])) + 1):
            if not len(positions):
                continue
            first, volume = firsts[positions[0]], self.volumes[self.kinds[segments[positions[0]]]]
            if (grid := volume.grids[field]) is None:
                continue
            starts, sizes = volume.starts, self.options.sizes
            if self.options.random is not None:  # as one patch of all of the volume
                starts, sizes = tuple(np.zeros(min(1, len(axis)), np.int64) for axis in starts), volume.lengths
            reads = grid.n_reads(starts, sizes, self.lines[segments[positions]])
            n_reads[first : first + len(reads)] += reads
        return n_reads

    def block_bytes(self, units: Units, row_bytes: IntArray) -> int:
        """See ``Indexer.block_bytes``; counts whole cells."""
        return max(1, *(volume.block_bytes for volume in self.volumes))

    def blocks(self, units: Units, samples: IntArray | None) -> BlockTable:
        """See ``Indexer.blocks``: patches that share cells."""
        block_sizes = [volume.block_sizes for volume in self.volumes]
        sizes = np.concatenate([np.empty(0, np.int64), *(block_sizes[kind] for kind in self.kinds.tolist())])
        if samples is None:
            return BlockTable.of_sizes(sizes)
        return BlockTable.of_runs(np.searchsorted(np.cumsum(sizes), samples, side="right"))

    def is_cheap(self, *, by_rows: bool, by_steps: bool, n_parts: int) -> bool:
        """See ``Indexer.is_cheap``: patches share cells."""
        return False

    def n_before(self, rows: IntArray) -> IntArray:
        """See ``Indexer.n_before``: of whole segments."""
        return self.before(np.searchsorted(self.segments.steps[0].firsts_of(), rows))

    def n_reads_before(self, rows: IntArray, field: int) -> IntArray | None:
        """See ``Indexer.n_reads_before``."""
        if self.options.random is not None:
            return None
        reads = np.concatenate([[0], np.cumsum(self._n_reads(field, np.arange(len(self.segments))))])
        return reads[np.minimum(rows, len(reads) - 1)]

    def mean_bytes(self, sizes: Sequence[int]) -> int:
        """See ``Indexer.mean_bytes``."""
        return sum(sizes)

    def digest(self) -> bytes:
        """See ``Indexer.digest``."""
        seed, volumes = self.options.random and self.seed, b"".join(volume.digest() for volume in self.volumes)
        return repr(seed).encode() + volumes + self.kinds.tobytes() + self.lines.tobytes() + self.segments.digest()
