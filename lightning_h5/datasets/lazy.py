"""``H5LazyDataset``: reads rows from files on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy.typing as npt

from ..catalog import Catalog
from ..hdf5 import OpenOptions, with_constants
from ..options import BadRowOptions, FileOptions, PatchOptions, SegmentOptions, TableOptions, WindowOptions
from ..options.keywords import checks_keywords
from ..samples import MakesIndexer, SampleKind, SampleOptions, SegmentChoice, Select, chunk_cache
from ..sizes import parse_bytes
from ..types import DTypeLike, Keys, PathLike, Paths
from .collate import Collate
from .fields import Decode, Fields
from .file_dataset import CACHE_BYTES, FileDataset
from .file_samples import FileSamples, open_samples
from .normalize import Normalize
from .sample_layout import Transform

__all__ = ["H5LazyDataset", "LazyFileDataset"]


@checks_keywords
class H5LazyDataset(FileDataset):
    """Rows of HDF5 files, read on demand.

    Works with the standard ``DataLoader(dataset, batch_size=..., shuffle=True)``, which reads a whole batch at once,
    and in worker processes under fork, forkserver and spawn: each process opens the files on first use. Use
    ``LazyH5DataModule`` with a Lightning Trainer: it shards by rank and resumes exactly.

    Args:
        path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of files, globs and
            directories. The rows of all files are concatenated, sorted by name for a glob or a directory.
        x_key: the input array, such as ``"train/images"``. A list of names returns a tuple, a mapping from names
            in the sample to names in the file returns a dict. A name may end in a member of a table
            (``"obs/label"``). In a mapping, a list of arrays of one shape is stacked to one field, on a new last axis;
            ``{"stack": [...], "axis": 0}`` puts the new axis elsewhere in a row.
        y_key: the target, in the same forms. None returns only inputs.
        x_dtype: dtype of the input: a name, a NumPy or a torch dtype, or a mapping from a field's name to a dtype.
            None keeps the stored dtype. Text is not converted. Packed integers (``scale_factor``, ``_FillValue`` and
            the like) raise an error unless you name their stored dtype, such as "int16".
        y_dtype: dtype of the target, in the same forms.
        transform: runs on each sample's input, a tensor of the row's shape (a tuple or dict if ``x_key`` is). If it
            has a parameter ``rng`` (NumPy) or ``generator`` (torch), it is called with a random generator. Under the
            loader of a data module, the generator depends only on (seed, epoch, row); otherwise it draws differently
            each time. The input and the target of a row draw the same numbers.
        target_transform: runs on each sample's target; a tensor without axes for one-dimensional arrays.
        rdcc_nbytes: bytes of HDF5's chunk cache for each array. None derives it from the chunks, within
            ``files.cache_bytes`` for the process. This cache is used only for arrays that the HDF5 library has to read.
        rdcc_nslots: number of slots of that cache. None derives it from the size.
        rdcc_w0: preemption policy of that cache, from 0 to 1: how readily it drops chunks that were read completely.
            None is HDF5's default, 0.75.
        swmr: open a file that has a live writer in single-writer/multiple-reader mode.
        indices: rows to keep, in this order (shape ``(n,)``), or a mask over all rows. None keeps all.
        batch_transform: runs once on each batch that ``read_batch`` collates.
        normalize: mean and standard deviation of fields, of all their values or of each channel: a JSON file, or a
            mapping ``{"x": {"mean": 0.5, "std": 0.2}}``. These fields become ``(x - mean) / std``, in float32 if they
            are stored as integers. Statistics of other fields, shapes or numbers of channels raise an error.
        with_index: add each row's index in this dataset: last in a tuple, ``"index"`` in a dict.
        sample: kind of sample: "row" (one step), "window" or "segment" (all steps of a segment). None infers it from
            ``window`` and ``segments``; ``patch`` requires None. "row" also accepts files that look like one image or
            volume each, for which None raises an error.
        segments: how steps are grouped into segments: a pattern of groups such as ``"data/*"``, or ``SegmentOptions``
            (``groups``, ``key``, ``sort_key``, ``lengths``, ``offsets``, ``ends``, ``spans``, ``join``, ``axis``,
            ``step_axis``, ``steps_per``, ``constants``, ``missing``, ``max_length``, ``bucket``, ``keep_together``).
            None makes each file one segment.
        window: how windows are cut from segments: a length, ``[start, stop]`` relative to each step, a mapping from
            fields to lists of this form, or ``WindowOptions`` (``length``, ``steps``, ``stride``, ``pad``, ``mask``,
            ``random``).
        patch: how patches are cut from volumes (each segment is a volume): ``PatchOptions`` (``shape``, ``stride``,
            ``random``, ``border``), or a mapping of its fields.
        table: a CSV, TSV or Parquet file with a line for each sample. Its columns become fields ``table/<column>``. A
            path, or ``TableOptions`` (``path``, ``on``, ``missing``), or a mapping of its fields.
        decode: decoders of fields, by name or pattern: "image" (JPEG and PNG to ``uint8`` of the shape ``(C, H, W)``),
            "category" (text to class numbers, the same in all files and splits), "cf" (scale, offset and fill value, to
            floats with NaN; the default for netCDF files), "real" (complex numbers, or compounds of real and imag, to
            pairs of floats on a new last axis), "bits:527" (unpack this number of bits of each row, to ``uint8``),
            "dense" or "csr" (rows of a sparse matrix), or a function. The function receives the stored row: ``bytes``
            for byte lists and opaque values, else an array.
        select: the part of a field to read, by its axes as stored: ``{"fields": {1: [0, 3], 2: {"stop": 720}}}``.
        collate_fn: how ``read_batch`` batches samples of several shapes: "pad", "pack", "list", or "stack" (None).
        seed: seed of random windows and patches.
        choice: selects segments, as data modules split and filter them; None keeps all.
        on_bad_row: "raise", or "skip" to leave out samples with rows that cannot be decoded, and samples for which a
            transform raises: such batches are smaller, and an empty batch raises an error. ``BadRowOptions`` sets the
            ``limit`` of different samples in each process; one more raises an error. Each sample is logged.
        files: how files are opened, and which are accepted: ``FileOptions``, or a mapping of its fields (``mmap``,
            ``cache_bytes``, ``swmr``, ``allow_external``, ``trusted``, ``min_integrity``, ``verify``, ``catalog_dir``).
        catalog: contents of the files, if already known; None opens them.

    Raises:
        H5FileError: a file is missing, damaged, or needs a filter that is not installed.
        H5KeyError: an array is not in the file.
        H5ValueError: the arrays do not belong together, or cannot become tensors.

    Cost:
        Construction opens each file once and reads only metadata, about 2 microseconds per chunk. Reading a row of a
        compressed array decodes its whole chunk, unless the chunk is in memory: read rows that share chunks together,
        or use the data module, which orders rows by chunks. Chunks are decoded on all cores.

    Example:
        >>> dataset = H5LazyDataset("digits.h5", "train/images", "train/labels", x_dtype="float32")
        >>> image, label = dataset[0]
        >>> images, labels = dataset.read_batch([3, 1, 2])
    """

    takes_packed = False  # whether packed integers are accepted as stored, even without a dtype

    def __init__(
        self,
        path: Paths,
        x_key: Keys,
        y_key: Keys | None = None,
        x_dtype: DTypeLike = None,
        y_dtype: DTypeLike = None,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        rdcc_nbytes: int | str | None = None,
        rdcc_nslots: int | None = None,
        rdcc_w0: float | None = None,
        swmr: bool = False,
        *,
        indices: Sequence[int] | npt.NDArray[Any] | None = None,
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
        on_bad_row: BadRowOptions | Literal["raise", "skip"] | Mapping[str, Any] = "raise",
        files: FileOptions | Mapping[str, Any] | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        samples = SampleOptions.parse(sample, segments, window, select, seed, patch, makes_batches=False)
        fields = Fields.of(
            with_constants(x_key, y_key, samples.segments.constants),
            y_key,
            x_dtype=x_dtype,
            y_dtype=y_dtype,
            transform=transform,
            target_transform=target_transform,
            with_index=with_index,
            as_one=samples.has_mask,
            decode=decode,
        )
        opened, bad_rows = FileOptions.parse(files, "files"), BadRowOptions.of(on_bad_row)
        opened = replace(opened, swmr=True) if swmr else opened
        catalog = catalog or Catalog(staging=opened.staged)
        catalog.joins.use(table)
        opened_samples = open_samples(
            path,
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
        )
        self._use(opened_samples, rdcc_nbytes=rdcc_nbytes, rdcc_nslots=rdcc_nslots, rdcc_w0=rdcc_w0)
        self.skip_bad_rows(bad_rows)

    @classmethod
    def of(cls, samples: FileSamples) -> Self:
        """Return a dataset of samples that a data module has opened already."""
        dataset = cls.__new__(cls)
        dataset._use(samples)
        return dataset

    def _use(
        self,
        samples: FileSamples,
        *,
        rdcc_nbytes: int | str | None = None,
        rdcc_nslots: int | None = None,
        rdcc_w0: float | None = None,
    ) -> None:
        files = samples.files
        self.asked_cache_bytes = files.cache_size
        budget = CACHE_BYTES if files.cache_size is None else files.cache_size
        of_hdf5 = None if rdcc_nbytes is None else parse_bytes(rdcc_nbytes, "rdcc_nbytes")
        super().__init__(
            samples.table,
            samples.fields,
            batch_transform=samples.batch_transform,
            indices=samples.indices,
            options=OpenOptions(
                rdcc_nbytes=chunk_cache(samples.table, budget, files) if of_hdf5 is None else of_hdf5,
                rdcc_nslots=rdcc_nslots,
                rdcc_w0=rdcc_w0,
                files=files,
            ),
            mmap=files.mmap,
            cache_bytes=budget,
        )


class LazyFileDataset(H5LazyDataset):
    """Rows as stored, including packed integers, for code that decodes them or does not use their values."""

    takes_packed = True
