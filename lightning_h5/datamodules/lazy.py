"""``LazyH5DataModule``: arguments and datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ..datasets import FileSamples, H5LazyDataset
from ..options import (
    BadRowOptions,
    DistributedOptions,
    FileOptions,
    MixtureOptions,
    PatchOptions,
    SegmentOptions,
    ShuffleOptions,
    SplitOptions,
    StagingOptions,
    TableOptions,
    WeightOptions,
    WindowOptions,
    WorkerOptions,
)
from ..options.keywords import checks_keywords
from ..samples import MakesIndexer
from ..types import DTypeLike, Keys, PathLike, Paths
from .arguments import Split
from .from_files import FilesH5DataModule

__all__ = ["LazyH5DataModule"]


@checks_keywords
class LazyH5DataModule(FilesH5DataModule):
    """Train from HDF5 files, reading rows on demand.

    Shards rows across ranks without any Trainer flag, shuffles each epoch, resumes exactly, and evaluates every row
    exactly once. Use it for data that does not fit into memory, or need not.

    Splits are defined by separate files (``val_path``), by groups inside one file (``{split}`` in the keys), or by
    shares of the training files (``split``).

    An argument that accepts an option object also accepts a mapping with its fields, as in YAML.

    Args:
        train_path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of files, globs and
            directories. All files form one dataset, sorted by name for a glob or a directory.
        val_path: files for validation.
        test_path: files for testing.
        predict_path: files for prediction; they need not have a target.
        x_key: the input array, a list of arrays (x is a tuple), or a mapping from names to arrays (x is a dict).
            ``{split}`` in a name stands for train, val, test or predict. A name may end in a member of a table. In a
            mapping, a list of arrays of one shape is stacked to one field, on a new last axis. None infers the input
            if exactly one array qualifies; otherwise an error lists the arrays.
        y_key: the target, in the same forms; a batch is then (x, y). None returns only inputs, x.
        fields: replaces ``x_key`` and ``y_key``; batches are flat dicts. A list of arrays, which are also the keys of a
            batch, or a mapping from keys to arrays in the forms of ``x_key``. The entry of a target can also name its
            axes: ``{"target": {"key": "y", "layout": "NCT"}}`` (N rows, C classes, T steps). ``where``, ``split`` and
            ``weights`` accept the names of fields as well.
        x_dtype: dtype of the input, or of fields. "auto" converts float64 to float32, the usual dtype of models, and
            logs that; other dtypes stay as stored. A name, such as "float16", converts the whole input. With
            ``fields``, it converts floating fields with several values per row, but not ``target``, since 16 bits would
            change ids and labels. A mapping from fields to dtypes converts only these fields. None keeps all stored
            dtypes. Packed integers (``scale_factor``, ``_FillValue`` and the like) raise an error, except in netCDF
            files, unless you pass ``decode`` or name their stored dtype, such as "int16".
        y_dtype: dtype of the target: a name, or a mapping from fields to names. None keeps the stored one.
        transform: runs on each sample's input, a tensor of a row's shape. Its draws from the global generators of
            Python, NumPy and torch depend on the seed, the epoch and the batch, not on the rank or worker. If it has a
            parameter ``rng`` (NumPy) or ``generator`` (torch), it is called with a generator that depends only on
            (seed, epoch, row). Generators that it owns, such as MONAI's and Albumentations', are seeded in the same
            way.
        target_transform: runs on each sample's target.
        eval_transform: replaces ``transform`` in validation, test and prediction. None runs ``transform`` there too.
        batch_transform: runs once on each collated batch; may have a parameter ``rng`` or ``generator``.
        device_transform: runs once on each batch after the Trainer has copied it to the device, in all stages; may
            have a parameter ``rng`` or ``generator`` (on the device). A mapping has a function for "train", for "eval"
            (validation, test and prediction), or both. A ``torch.nn.Module`` is moved to the device.
        collate_fn: a function from a list of samples to a batch; or "pad" (zeros up to the longest sample, and
            ``"length"``), "pack" (samples joined along their steps, with ``"cu_seqlens"`` and ``"max_seqlen"``), "list"
            (a list for each field) or "stack". None stacks whole fields, without building single samples.
        normalize: mean and standard deviation of fields, of all their values or of each channel: a JSON file that
            ``lightning-h5 stats`` has written, or a mapping from fields to numbers or lists,
            ``{"x": {"mean": [0.5, 0.4], "std": [0.2, 0.3], "channel_axis": 0}}``. These fields become
            ``(x - mean) / std``, before any transform. Statistics of other fields, shapes or numbers of channels raise
            an error.
        batch_size: rows of a training batch on one rank. With ``segments.max_tokens``, the number of rows varies; a
            ``batch_size`` other than the default is then the maximum number of samples.
        eval_batch_size: rows of a batch in the other stages. None is ``batch_size``.
        shuffle: how training rows are shuffled each epoch: True, False, "global", "chunks" or ``ShuffleOptions``.
            True chooses "global" if random access is as cheap as sequential access or if all decoded rows fit its
            ``buffer``, and "chunks" otherwise, and logs the choice with the reason.
        drop_last: drop the last rows of a training epoch if they do not fill a batch on every rank. False drops
            nothing: the last two batches of each rank are slightly smaller, so that all ranks run the same number of
            steps.
        seed: seed of the training order. None uses Lightning's ``seed_everything``, or 0.
        with_index: add each sample's index in its split to the batch: last in a tuple, ``"index"`` in a dict. With
            segments, windows or patches, also add ``"segment"`` (name of the group, array or file) and ``"step"``
            (for a patch its start along each axis that is cut).
        num_workers: number of worker processes. 0 reads ahead and decodes in threads on all cores, without copies
            between processes, which is fastest unless a ``transform`` is slow.
        prefetch_factor: number of batches that each worker reads ahead; None is 2, as in torch. Without workers, number
            of batches that this process reads ahead; None is 4, or twice the number of batches that are read together,
            if that is more.
        pin_memory: put batches into page-locked memory. "auto" does so if batches are copied to a GPU.
        prefetch_to_device: number of batches that are copied to the GPU ahead of the present one, while the model
            computes. They take GPU memory. 0 leaves the copy to Lightning, before each step. No effect without CUDA.
        split: how the training files are split: a float (``val_fraction``), the fractions of all splits (``[train,
            val]`` or ``[train, val, test]``, which sum to 1) or ``SplitOptions`` (``val_fraction``, ``test_fraction``,
            ``group_key``, ``group_pattern``, ``stratify_key``, ``num_folds``, ``fold``, ``seed``, ``file``, ``key``,
            ``by``, ``gap``).
        weights: how often each training row is drawn: the name of an array (``weight_key``) or ``WeightOptions``
            (``weight_key``, ``balance_key``, ``class_weights``).
        sample: kind of sample: "row" (one step), "window" or "segment" (all steps of a segment). None infers it from
            ``window`` and ``segments``; ``patch`` requires None. "row" also accepts files that look like one image or
            volume each, for which None raises an error.
        segments: how steps are grouped into segments: a pattern of groups such as ``"data/*"``, or ``SegmentOptions``
            (``groups``, ``key``, ``sort_key``, ``lengths``, ``offsets``, ``ends``, ``spans``, ``join``, ``axis``,
            ``step_axis``, ``steps_per``, ``constants``, ``missing``, ``max_length``, ``bucket``, ``max_tokens``,
            ``keep_together``). None makes each file one segment.
        window: how windows are cut from segments: a length, ``[start, stop]`` relative to each step, a mapping from
            fields to lists of this form, or ``WindowOptions`` (``length``, ``steps``, ``stride``, ``pad``, ``mask``,
            ``random``).
        patch: how patches are cut from volumes (each segment is a volume): ``PatchOptions`` (``shape``, ``stride``,
            ``random``, ``border``), or a mapping of its fields.
        table: a CSV, TSV or Parquet file with a line for each sample. Its columns become fields ``table/<column>``. A
            path, or ``TableOptions`` (``path``, ``on``, ``missing``).
        decode: decoders of fields, by name or pattern: "image" (JPEG and PNG to ``uint8`` of the shape ``(C, H, W)``),
            "category" (text to class numbers, the same in all files and splits), "cf" (scale, offset and fill value, to
            floats with NaN; the default for netCDF files), "real" (complex numbers, or compounds of real and imag, to
            pairs of floats on a new last axis), "bits:527" (unpack this number of bits of each row, to ``uint8``),
            "dense" or "csr" (rows of a sparse matrix), or a function. The function receives the stored row: ``bytes``
            for byte lists and opaque values, else an array.
        select: the part of a field to read, by its axes as stored: ``{"fields": {1: [0, 3], 2: {"stop": 720}}}``.
        where: filter of the rows of all splits: conditions on arrays with one value per row, by name. A condition is a
            value, a list of values, or a range ``{"min": 3, "max": 5}`` (bounds included, either may be left out); in
            Python also a function from the array to a mask. Or one function from all arrays of a file, by name, to a
            mask. With segments, an array with one value per segment keeps or drops whole segments, and an array with
            one value per step drops steps: windows do not cross them. Rows are split before they are filtered, so a new
            filter moves no row to another split. For a file with a live writer, the filter sees the rows that exist in
            ``setup``.
        label: keep rows with this class at any step of the target. The target is ``y_key`` if it names one array, or
            else the field or array ``target``: class ids ``(N,)`` and ``(N, T)``, or one-hot ``(N, T, C)`` and
            ``(N, C, T)``, distinguished by shape and values. Steps that are padded with 0 count as class 0: pass
            ``valid_mask`` to search for class 0.
        valid_mask: array that is nonzero at steps that count for ``label``, with one value per step or per row.
        mixture: replaces ``train_path`` by several sets of files to mix: a mapping from each source's name to its
            files, or ``MixtureOptions`` (``sources``, ``strategy``, ``weights``, ``between``, ``epoch_length``,
            ``mix``, ``pattern``). Batches, or inputs, that are dicts contain the name of each row's source as
            ``"source"``.
        on_bad_file: "raise", or "skip" to leave out files that are missing or broken; each is logged. Training stops if
            ranks leave out different files.
        on_bad_row: "raise", or "skip" to leave out training samples with rows that cannot be decoded, and samples for
            which ``transform`` or ``target_transform`` raises: such batches are smaller, and the number of steps does
            not change. Each sample is logged with the cause. ``BadRowOptions`` (``limit``, ``stages``) sets the number
            of different samples to leave out before the run stops (100), and whether evaluation leaves out samples.
        workers: how worker processes run: ``WorkerOptions`` (``persistent``, ``start_method``, ``timeout``,
            ``init_fn``).
        files: how files are opened, and which are accepted: ``FileOptions`` (``mmap``, ``cache_bytes``, ``swmr``,
            ``allow_external``, ``trusted``, ``min_integrity``, ``verify``, ``catalog_dir``).
        staging: folder on a local disk, such as "$TMPDIR", that caches files on slow storage, or ``StagingOptions``
            (``dir``, ``max_bytes``, ``decoded``, ``storage_options``). Later epochs read from this folder.
        distributed: how ranks work together: ``DistributedOptions`` (``rank``, ``world_size``, ``setup_timeout``,
            ``on_resume_mismatch``).

    Raises:
        H5ValueError: arguments are invalid or contradict each other. Files are checked in ``setup``.

    Example:
        >>> datamodule = LazyH5DataModule("digits.h5", x_key="images", y_key="labels", split=0.1)
        >>> trainer.fit(model, datamodule=datamodule)
    """

    def __init__(
        self,
        train_path: Paths | None = None,
        val_path: Paths | None = None,
        test_path: Paths | None = None,
        predict_path: Paths | None = None,
        *,
        x_key: Keys | None = None,
        y_key: Keys | None = None,
        fields: list[str] | dict[str, Any] | None = None,
        x_dtype: DTypeLike = "auto",
        y_dtype: DTypeLike = None,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        device_transform: Callable[..., Any] | dict[str, Callable[..., Any]] | None = None,
        collate_fn: Callable[[Any], Any] | Literal["stack", "pad", "list", "pack"] | None = None,
        normalize: dict[str, Any] | PathLike | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        shuffle: ShuffleOptions | Literal["global", "chunks"] | bool | dict[str, Any] = True,
        drop_last: bool = False,
        seed: int | None = None,
        with_index: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        prefetch_to_device: int = 0,
        split: SplitOptions | float | list[float] | dict[str, Any] | None = None,
        weights: WeightOptions | str | dict[str, Any] | None = None,
        sample: Literal["row", "window", "segment"] | MakesIndexer | None = None,
        segments: SegmentOptions | str | dict[str, Any] | None = None,
        window: WindowOptions | int | list[int] | dict[str, Any] | None = None,
        patch: PatchOptions | dict[str, Any] | None = None,
        table: TableOptions | dict[Any, Any] | PathLike | None = None,
        decode: dict[str, Any] | None = None,
        select: dict[str, dict[int, Any]] | None = None,
        where: Any = None,
        label: int | None = None,
        valid_mask: str | None = None,
        mixture: MixtureOptions | dict[str, Any] | None = None,
        on_bad_file: Literal["raise", "skip"] = "raise",
        on_bad_row: BadRowOptions | Literal["raise", "skip"] | dict[str, Any] = "raise",
        workers: WorkerOptions | dict[str, Any] | None = None,
        files: FileOptions | dict[str, Any] | None = None,
        staging: StagingOptions | PathLike | dict[str, Any] | None = None,
        distributed: DistributedOptions | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    decodes_on_device = True

    def dataset_of(self, samples: FileSamples, split: Split, *, n_sources: int = 1) -> H5LazyDataset:
        """See ``FilesH5DataModule.dataset_of``."""
        dataset = H5LazyDataset.of(samples)
        for name, reason in dataset.decoded_on_cpu().items():
            self._log_once(f"files.decode_on: {name!r} is decoded on the CPU, since {reason}")
        return dataset
