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

    Splits come from separate files (``val_path``), from groups inside one file (``{split}`` in the keys), or
    from the training files (``split``).

    An argument that takes an option object also takes a mapping with its fields, which is its form in YAML.

    Args:
        train_path: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these. Several files
            are one dataset, in sorted order for a glob or a directory.
        val_path: files to validate on.
        test_path: files to test on.
        predict_path: files to predict on; they need not have a target.
        x_key: the input array, a list of arrays (x is a tuple), or a mapping from names to arrays (x is a dict).
            ``{split}`` in it stands for train, val, test or predict. A name may end in a member of a table. In a
            mapping, a list of arrays of one shape is one field, with the arrays on a new last axis. If None, inferred
            when exactly one array qualifies; otherwise an error lists the arrays.
        y_key: the target, in the same forms. None yields inputs alone: a batch is x, otherwise (x, y).
        fields: instead of ``x_key`` and ``y_key``, so that batches are flat dicts: a list of arrays, the keys of a
            batch, or a mapping from keys to arrays in the forms of ``x_key``. The axes of a target can be given too:
            ``{"target": {"key": "y", "layout": "NCT"}}`` (N rows, C classes, T steps). Names of fields stand for their
            arrays in ``where``, ``split`` and ``weights``.
        x_dtype: dtype of the input, or of fields. "auto" makes float64 float32, as models compute, and logs that; all
            else comes as stored. A name, such as "float16", is for all of the input; for fields of several floats in a
            row, but not ``target``, as 16 bits would change ids and labels. A mapping from fields to names is for
            those. None keeps all as stored. Packed integers (``scale_factor``, ``_FillValue`` and the like) of other
            files than netCDF are an error unless ``decode`` or their stored dtype, such as "int16", is named.
        y_dtype: dtype of the target: a name, or a mapping from fields to names. None keeps the stored one.
        transform: runs on each sample's input, a tensor of a row's shape. What it draws from the global generators of
            Python, NumPy and torch depends on the seed, the epoch and the batch, not on the rank or worker. If it has a
            parameter ``rng`` (NumPy) or ``generator`` (torch), it gets one that depends on (seed, epoch, row) only.
            Generators that it owns, such as MONAI's and Albumentations', are seeded in the same way.
        target_transform: runs on each sample's target.
        eval_transform: replaces ``transform`` for validation, test and prediction. None runs ``transform`` there too.
        batch_transform: runs once on each collated batch; may ask for ``rng`` or ``generator`` too.
        device_transform: runs once on each batch after the Trainer has copied it to the device, in all stages; may ask
            for ``rng`` or ``generator`` (on the device) too. A mapping has a function for "train", for "eval"
            (validation, test and prediction), or both. A ``torch.nn.Module`` is moved to the device.
        collate_fn: a function that makes a batch of a list of samples; "pad" (zeros up to the longest, and
            ``"length"``), "pack" (samples joined along their steps, with ``"cu_seqlens"`` and ``"max_seqlen"``), "list"
            (a list for each field) or "stack". None stacks, without making samples first.
        normalize: mean and standard deviation of fields, of all their values or of each channel: a JSON file that
            ``lightning-h5 stats`` has written, or a mapping from fields to numbers or lists,
            ``{"x": {"mean": [0.5, 0.4], "std": [0.2, 0.3], "channel_axis": 0}}``. These fields become
            ``(x - mean) / std``, before any transform. Raises if the statistics are of other fields, shapes or numbers
            of channels.
        batch_size: rows of a training batch on one rank. ``segments.max_tokens`` decides it instead; a ``batch_size``
            other than the default is then the most samples of a batch.
        eval_batch_size: rows of a batch in the other stages. None takes ``batch_size``.
        shuffle: how training rows are shuffled each epoch: True, False, "global", "chunks" or ``ShuffleOptions``.
            True takes "global" if random access is as cheap as sequential access or all decoded rows fit its
            ``buffer``, and "chunks" otherwise, and logs which, and why.
        drop_last: drop the ragged end of a training epoch. False drops nothing: the last two rounds are cut into
            slightly smaller batches, so that all ranks take the same number of steps.
        seed: seed of the training order. None takes Lightning's ``seed_everything``, or 0.
        with_index: add each sample's index in its split to the batch: last in a tuple, ``"index"`` in a dict; with
            segments, windows or patches also its ``"segment"`` (name of the group, array or file) and ``"step"`` (of a
            patch where it starts, along each axis that is cut).
        num_workers: worker processes. 0 reads ahead and decodes in threads on all cores, without copies between
            processes: the fastest unless a ``transform`` is slow.
        prefetch_factor: batches that each worker reads ahead; None means 2, as in torch. Without workers, batches that
            this process reads ahead; None means 4, or twice as many as are read together, if that is more.
        pin_memory: put batches into page-locked memory. "auto" does so if they go to a GPU.
        split: how the training files are split: a float (``val_fraction``), the fractions of all splits (``[train,
            val]`` or ``[train, val, test]``, which sum to 1) or ``SplitOptions`` (``val_fraction``, ``test_fraction``,
            ``group_key``, ``group_pattern``, ``stratify_key``, ``num_folds``, ``fold``, ``seed``, ``file``, ``key``,
            ``by``, ``gap``).
        weights: how often each training row is drawn: the name of an array (``weight_key``) or ``WeightOptions``
            (``weight_key``, ``balance_key``, ``class_weights``).
        sample: what a sample is: "row" (one step), "window" or "segment" (all steps of a segment). None follows from
            ``window`` and ``segments``, and is required with ``patch``. "row" also accepts files that look like one
            image or volume each, for which None raises.
        segments: which steps belong together: a pattern of groups such as ``"data/*"``, or ``SegmentOptions``
            (``groups``, ``key``, ``sort_key``, ``lengths``, ``offsets``, ``ends``, ``spans``, ``join``, ``axis``,
            ``step_axis``, ``steps_per``, ``constants``, ``missing``, ``max_length``, ``bucket``, ``max_tokens``,
            ``keep_together``). None makes each file one.
        window: which steps of a segment make a sample: a length, ``[start, stop]`` relative to each step, a mapping
            from fields to these, or ``WindowOptions`` (``length``, ``steps``, ``stride``, ``pad``, ``mask``,
            ``random``).
        patch: which part of a volume makes a sample, each segment being one: ``PatchOptions`` (``shape``, ``stride``,
            ``random``, ``border``), or a mapping of its fields.
        table: values of samples, in a CSV, TSV or Parquet file. Its columns are fields ``table/<column>``. A path, or
            ``TableOptions`` (``path``, ``on``, ``missing``).
        decode: what decodes fields, by name or pattern: "image" (JPEG and PNG to ``uint8`` of the shape ``(C, H, W)``),
            "category" (text to class numbers, the same in all files and splits), "cf" (scale, offset and fill value, to
            floats with NaN, as by default in netCDF files), "real" (complex numbers, or compounds of real and imag, as
            pairs of floats on a new last axis), "bits:527" (so many packed bits of a row, as ``uint8`` each), "dense"
            or "csr" (rows of a sparse matrix), or a function of what is stored of a row.
        select: the part of a field to read, by its axes as stored: ``{"fields": {1: [0, 3], 2: {"stop": 720}}}``.
        where: rows to keep, of all splits: conditions on arrays with a value a row, by name: a value, a list of values,
            or a range ``{"min": 3, "max": 5}`` (bounds included, either may be left out); from Python also a function
            from the array to a mask, or one function from all arrays of a file, by name, to a mask. With segments,
            arrays have a value for each segment, which stays or goes as a whole, or for each step: windows do not reach
            over steps that are left out. Rows are split before they are filtered: another filter moves no row to
            another split. Of a file with a live writer, rows that exist in ``setup`` are asked.
        label: keep rows that have this class at any step of the target, which is ``y_key`` if that is one array, or
            else the field or array ``target``: class ids ``(N,)`` and ``(N, T)``, or one-hot ``(N, T, C)`` and
            ``(N, C, T)``, distinguished by shape and values. Steps that were padded with 0 have class 0: name a
            ``valid_mask`` to look for that one.
        valid_mask: array that is not 0 at steps that count for ``label``, one value a step or one a row.
        mixture: instead of ``train_path``, several sets of files to mix: a mapping from each source's name to its
            files, or ``MixtureOptions`` (``sources``, ``strategy``, ``weights``, ``between``, ``epoch_length``,
            ``mix``, ``pattern``). Batches, or inputs, that are dicts have the name of each row's source, as
            ``"source"``.
        on_bad_file: "raise", or "skip" to leave out files that are missing or broken; each is logged, and ranks that
            do not leave out the same stop.
        on_bad_row: "raise", or "skip" to leave out samples with rows that cannot be decoded, and samples whose
            ``transform`` or ``target_transform`` raises, in training: their batch has fewer samples, and the number of
            steps stays. Each is logged, with its cause. ``BadRowOptions`` (``limit``, ``stages``) sets how many
            different samples may be left out before the run stops (100), and whether evaluation leaves out any.
        workers: how worker processes are run: ``WorkerOptions`` (``persistent``, ``start_method``, ``timeout``,
            ``init_fn``).
        files: how files are opened, and which are accepted: ``FileOptions`` (``mmap``, ``cache_bytes``, ``swmr``,
            ``allow_external``, ``trusted``, ``min_integrity``, ``verify``, ``catalog_dir``).
        staging: folder on a local disk, such as "$TMPDIR", that keeps what was read of files on slow storage, or
            ``StagingOptions`` (``dir``, ``max_bytes``, ``storage_options``). Later epochs read from there.
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

    def dataset_of(self, samples: FileSamples, split: Split, *, n_sources: int = 1) -> H5LazyDataset:
        """See ``FilesH5DataModule.dataset_of``."""
        return H5LazyDataset.of(samples)
