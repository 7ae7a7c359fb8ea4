"""``CombinedHDF5Dataset``: many files, filters over their columns, samples as dicts, and a cache with statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from ..catalog import SKIP_THEM, Catalog, FieldMap, bad_files, files_to_read
from ..distributed import exchange
from ..hdf5 import OpenOptions
from ..options import (
    BadRowOptions,
    FileOptions,
    PatchOptions,
    RowCacheOptions,
    SegmentOptions,
    TableOptions,
    WindowOptions,
)
from ..options.keywords import checks_keywords
from ..samples import (
    Filters,
    MakesIndexer,
    SampleKind,
    SampleOptions,
    SegmentChoice,
    Select,
    Where,
    chunk_cache,
    criteria_of,
)
from ..types import DTypeLike, IntArray, PathLike, Paths
from .collate import Collate
from .fields import Decode, checked_rows
from .file_dataset import CACHE_BYTES
from .file_samples import FileSamples, open_samples
from .named_fields import NamedFields
from .normalize import Normalize
from .sample_cache import CachingDataset
from .sample_layout import Transform

__all__ = ["CombinedHDF5Dataset"]

MAX_WORKERS = 64  # with separate counts
PATIENCE = 120.0  # seconds for the slowest rank to read the files' metadata


@checks_keywords
class CombinedHDF5Dataset(CachingDataset):
    """Rows of one or thousands of files of the same structure, filtered; a sample is a dict of fields.

    Numbers are tensors, flags (``cs_label``, ``bg_label``) are bool, text is str. Works with the standard
    ``DataLoader(dataset, batch_size=..., shuffle=True)`` and in worker processes under fork, forkserver and spawn.

    Args:
        paths: one file, a glob, a directory, or a list of files, globs and directories. Rows are concatenated in this
            order.
        load_fields: arrays to load, in the order of the sample; their names are the sample's keys. None loads all
            arrays that share axis 0. It raises an error if the arrays may be separate samples instead of fields of one
            row: arrays of one name in several groups, numbered arrays only, or one group of equal arrays.
        allowed_guids: keep rows with one of these values of ``guid``.
        cs_label: keep rows with the flag ``cs_label`` set (True), or not set (False).
        bg_label: the same for ``bg_label``.
        epoch_min: smallest value of ``epoch`` to keep.
        epoch_max: largest value of ``epoch`` to keep.
        label: keep rows with this class at any step of ``target``: class ids ``(N,)`` and ``(N, T)``, or one-hot
            ``(N, T, C)`` and ``(N, C, T)``, distinguished by shape and values. Steps that are padded with 0 count as
            class 0: pass ``valid_mask`` to search for class 0.
        cache_size: number of recently used rows that each process caches; 0 turns the cache off. ``RowCacheOptions``,
            or a mapping of its fields, limits the bytes as well.
        pin_memory: make ``create_optimized_dataloader`` put batches into page-locked memory if there is a GPU.
        dtype: dtype of floating fields with more than one axis, except for the target. Ids, labels, flags and columns
            keep the stored dtype, since 16 bits would change them. None keeps all stored dtypes. A mapping from fields
            to dtypes converts only the named fields; naming the stored dtype of packed integers accepts them as stored.
        where: conditions on any one-dimensional arrays, by name: a value, a list of values, a range
            ``{"min": 3, "max": 5}`` (bounds included, either may be left out), or a function from the column to a mask.
            Or one function from the columns of a file, by name, to a mask.
        field_map: mapping from field names to arrays with another name: ``{"guid": "meta/patient"}``. A list of
            arrays of one shape is stacked to one field. The entry of a target can also name its axes:
            ``{"target": {"key": "y", "layout": "NCT"}}``.
        valid_mask: array that is nonzero at steps that count for ``label``, with one value per step or per row.
        on_bad_file: "raise", or "skip" to leave out files that are missing or broken; each is logged.
        on_bad_row: "raise", or "skip" to leave out samples with rows that cannot be decoded, and samples for which a
            transform raises: such batches are smaller, and an empty batch raises an error. ``BadRowOptions`` sets the
            ``limit`` of different samples in each process; one more raises an error. Each sample is logged.
        indices: rows to choose from, counted over all files (shape ``(n,)``, or a mask). None is all rows.
        transform: runs on each sample, a dict (see ``H5LazyDataset``).
        batch_transform: runs once on each batch that ``read_batch`` collates.
        normalize: mean and standard deviation of fields, of all their values or of each channel: a JSON file, or a
            mapping ``{"x": {"mean": 0.5, "std": 0.2}}``. These fields become ``(x - mean) / std``, in float32 if they
            are stored as integers. Statistics of other fields, shapes or numbers of channels raise an error.
        with_index: add each row's index in this dataset, as ``"index"``.
        sample: kind of sample: "row", "window" or "segment" (see ``H5LazyDataset``, also for the next four arguments).
            With segments, names of fields and of columns in filters are relative to the groups of ``segments``. A
            filter on values of segments keeps or drops whole segments. A filter on values of steps drops steps: windows
            do not cross them, and a whole segment consists of the remaining steps. Only rows are cached.
        segments: how steps are grouped into segments.
        window: how windows are cut from segments.
        patch: how patches are cut from volumes.
        table: a CSV, TSV or Parquet file with a line for each sample. Its columns become fields ``table/<column>``. A
            path, or ``TableOptions`` (``path``, ``on``, ``missing``), or a mapping of its fields.
        decode: decoders of fields (see ``H5LazyDataset``).
        select: the part of a field to read.
        collate_fn: how ``read_batch`` batches samples of several shapes: "pad", "pack", "list", or "stack" (None).
        seed: seed of random windows and patches.
        choice: selects segments, as data modules split them; None keeps all.
        files: how files are opened, and which are accepted: ``FileOptions``, or a mapping of its fields (``mmap``,
            ``cache_bytes``, ``swmr``, ``allow_external``, ``trusted``, ``min_integrity``, ``verify``, ``catalog_dir``).
        catalog: contents of the files, if already known; None opens them.

    Raises:
        H5FileError: a file is missing, damaged, or needs a filter that is not installed.
        H5KeyError: an array is not in a file.
        H5ValueError: files differ in fields, dtypes or shapes; a filter is invalid, or no row passes.

    Cost:
        Construction opens each file once, and reads the whole columns of the filters, on all cores. ``label`` reads the
        target of rows that pass the other filters. A cached row costs a copy; other rows cost the same as with
        ``H5LazyDataset``.

    Example:
        >>> dataset = CombinedHDF5Dataset("recordings/*.h5", label=2, where={"site": ["A", "B"]})
        >>> dataset[0]["target"].shape
        torch.Size([300])
    """

    takes_packed = False  # whether packed integers are accepted as stored, even without a dtype

    def __init__(
        self,
        paths: Paths,
        load_fields: Sequence[str] | None = None,
        allowed_guids: Sequence[str] | None = None,
        cs_label: bool | None = None,
        bg_label: bool | None = None,
        epoch_min: float | None = None,
        epoch_max: float | None = None,
        label: int | None = None,
        cache_size: int | RowCacheOptions | Mapping[str, Any] = 1000,
        pin_memory: bool = True,
        dtype: DTypeLike = "float32",
        *,
        where: Where | None = None,
        field_map: FieldMap | None = None,
        valid_mask: str | None = None,
        on_bad_file: Literal["raise", "skip"] = "raise",
        on_bad_row: BadRowOptions | Literal["raise", "skip"] | Mapping[str, Any] = "raise",
        indices: Sequence[int] | npt.NDArray[Any] | None = None,
        transform: Transform | None = None,
        batch_transform: Transform | None = None,
        normalize: Normalize | None = None,
        with_index: bool = False,
        sample: SampleKind | MakesIndexer | None = None,
        segments: str | SegmentOptions | Mapping[str, Any] | None = None,
        window: int | Sequence[int] | WindowOptions | Mapping[str, Any] | None = None,
        patch: PatchOptions | Mapping[str, Any] | None = None,
        table: TableOptions | PathLike | Mapping[str, Any] | None = None,
        decode: Decode | None = None,
        select: Select | None = None,
        collate_fn: Collate | None = None,
        seed: int = 0,
        choice: SegmentChoice | None = None,
        files: FileOptions | Mapping[str, Any] | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        samples = SampleOptions.parse(sample, segments, window, select, seed, patch, makes_batches=False)
        row_cache = RowCacheOptions.parse(cache_size, "cache_size")
        named = NamedFields(load_fields, field_map, samples, dtype=dtype, decode=decode)
        filters = Filters(
            criteria=criteria_of(
                allowed_guids=allowed_guids,
                cs_label=cs_label,
                bg_label=bg_label,
                epoch_min=epoch_min,
                epoch_max=epoch_max,
                where=where,
            ),
            label=label,
            valid_mask=valid_mask,
            target_axes=named.target_axes,
            keys=named.keys,
            paths=named.of_other_files,
        )
        opened, bad = FileOptions.parse(files, "files"), bad_files(on_bad_file)
        bad_rows = BadRowOptions.of(on_bad_row)
        catalog = catalog or Catalog(staging=opened.staged)
        catalog.joins.use(table)
        readable, plain = files_to_read(catalog, paths, bad), OpenOptions(files=opened)
        fields = named.in_files(catalog, readable, plain, filters, bad, transform=transform, with_index=with_index)
        opened_samples = open_samples(
            readable,
            fields,
            samples,
            opened,
            catalog,
            takes_packed=self.takes_packed,
            normalize=normalize,
            collate=collate_fn,
            choice=choice,
            indices=indices,
            batch_transform=batch_transform,
            filters=filters,
            bad=bad,
            advice=SKIP_THEM,
            settle=named.settled,
        )
        if bad is not None:
            left_out = sorted(path.rsplit("/", 1)[-1] for path in bad)
            with exchange("leaving out bad files", PATIENCE) as ranks:
                n_read = len(opened_samples.table.paths)
                ranks.agree({"files that can be read": n_read, "files left out": left_out}, None)
        self._use(opened_samples, row_cache, pin_memory=pin_memory, dtype=named.dtype)
        self.skip_bad_rows(bad_rows)

    @classmethod
    def of(cls, samples: FileSamples, row_cache: RowCacheOptions) -> Self:
        """Return a dataset of samples that a data module has opened already.

        Args:
            samples: the samples.
            row_cache: the cache of recently used rows in each process.
        """
        dataset = cls.__new__(cls)
        dataset._use(samples, row_cache, pin_memory=True, dtype=None)
        return dataset

    def _use(
        self, samples: FileSamples, row_cache: RowCacheOptions, *, pin_memory: bool, dtype: torch.dtype | None
    ) -> None:
        opened = samples.files
        self.pin_memory, self.dtype = pin_memory, dtype
        self.asked_cache_bytes = opened.cache_size
        budget = CACHE_BYTES if opened.cache_size is None else opened.cache_size
        super().__init__(
            samples.table,
            samples.fields,
            batch_transform=samples.batch_transform,
            options=OpenOptions(rdcc_nbytes=chunk_cache(samples.table, budget, opened), files=opened),
            mmap=opened.mmap,
            cache_bytes=budget,
            cache_size=row_cache.size if samples.table.indexer.numbers_are_rows else 0,
            max_cache_bytes=row_cache.n_bytes,
        )
        self.counters.share(MAX_WORKERS)  # makes counts of a loader's workers visible in this process
        self.counters.add(**samples.counters.total())  # rows read by filters
        self.indices = checked_rows(samples.indices, len(self))

    @property
    def index(self) -> tuple[IntArray, IntArray]:
        """The file (a number in ``table.paths``) and the row in its array, for each sample of this dataset.

        The row of a window is its own step, the row of a segment its first step; a patch has its number instead.
        """
        return self.files_and_rows(np.arange(len(self)))

    def _build_index(self) -> list[tuple[str, int]]:
        """Return the file of each sample, and its row there; the dataset itself keeps no such list."""
        return self.places_of(np.arange(len(self)))

    def get_stats(self) -> dict[str, Any]:
        """Return sizes, settings and counts of this dataset, as plain values.

        Returns:
            ``total_samples``, ``num_files``; ``cache_size`` (rows cached now, in this process), ``cache_hits``,
            ``cache_misses``, ``hit_rate`` (0 to 1), ``access_count`` (requested rows); ``dtype``, ``pin_memory`` and
            ``bytes_read`` (from files). Counts include this process and its worker processes.
        """
        counted = self.counters.total()
        hits, misses = int(counted["cache_hits"]), int(counted["cache_misses"])
        return {
            "total_samples": len(self),
            "num_files": len(self.table.paths),
            "cache_size": len(self._cache),
            "cache_hits": hits,
            "cache_misses": misses,
            "hit_rate": hits / max(1, hits + misses),
            "access_count": hits + misses,
            "dtype": str(self.dtype),
            "pin_memory": self.pin_memory,
            "bytes_read": int(counted["bytes_read"]),
        }
