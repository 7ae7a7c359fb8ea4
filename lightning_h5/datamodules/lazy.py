"""``LazyH5DataModule`` reads rows on demand; with the shared parts of all modules of x_key and y_key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from .._lightning import rank_zero_info
from ..datasets import (
    FieldStats,
    H5LazyDataset,
    MixtureDataset,
    RowDataset,
    SampleOptions,
    SegmentChoice,
    SegmentSubset,
    TableDataset,
    are_cells,
    column_of,
    count_rows,
    matrices_in,
    read_stats,
    rows_without_line,
    weighted_dataset,
)
from ..errors import H5ValueError
from ..hdf5 import OpenOptions, field_names, fill_split, guess_keys_in, keys_in, kind_of, own_keys_in, torch_dtype
from ..loading.choose_order import Order
from ..options import (
    DistributedOptions,
    FileOptions,
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
from ..order import RowWeights
from ..types import DTypeLike, IntArray, Keys, PathLike, Paths
from .arguments import SPLITS, SampleArguments, Split, picked
from .base import BaseH5DataModule, Chosen, fields_of
from .cut_splits import check_split_of_rows, cut_rows, cut_segments
from .training_rows import row_weights, segment_order

__all__ = ["KeyedH5DataModule", "LazyH5DataModule"]


class Source(NamedTuple):
    """Where a split's rows come from: its own files, its group inside the training files, or a share of their rows.

    Attributes:
        files: the files, expanded.
        group: what ``{split}`` stands for in the keys.
        is_cut: whether the split has a part of the files' rows (see ``cut_rows``).
    """

    files: tuple[str, ...]
    group: Split
    is_cut: bool = False


class KeyedH5DataModule(BaseH5DataModule):
    """Splits of files with an input and a target.

    Args:
        given: the constructor's arguments by name.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._samples = samples = picked(SampleArguments, given)
        self.x_key, self.y_key = samples.x_key, samples.y_key
        self._check_arguments()

    def on_exception(self, exception: BaseException) -> None:
        """Add a note on what to pass to an error about dtypes, if arrays come in the file's dtype; close files."""
        text = str(exception)
        if isinstance(exception, RuntimeError | ValueError) and ("type" in text or "not implemented for" in text):
            for note in self._notes_on_dtypes():
                exception.add_note(note)
        super().on_exception(exception)

    def _notes_on_dtypes(self) -> Iterator[str]:
        """Yield what to pass for arrays that come in the file's dtype if the model computes in another one."""
        model, samples = getattr(self.trainer, "lightning_module", None), self._samples
        dtypes = [] if model is None else [each.dtype for each in model.parameters() if each.is_floating_point()]
        if not dtypes or not self._datasets or samples.batch_transform is not None or samples.normalize is not None:
            return
        computes_in = f"{dtypes[0]}".removeprefix("torch.")
        for number, layout in enumerate(fields_of(next(iter(self._datasets.values())))):
            argument, changes = "y_dtype", samples.target_transform
            if number < len(keys_in(self.x_key)):
                argument, changes = "x_dtype", samples.transform or samples.eval_transform
            is_class = argument == "y_dtype" and layout.dtype.kind in "iub"
            wanted = ["int64", computes_in] if is_class else [computes_in]
            is_as_stored = getattr(samples, argument) is None and changes is None and kind_of(layout.dtype) == "number"
            if is_as_stored and (stored := layout.dtype.name) not in wanted:
                yield (
                    f"lightning_h5: {layout.key!r} is loaded as {stored}, as stored in the file, but the model "
                    f"computes in {computes_in}. Pass {argument}={' or '.join(map(repr, wanted))} to the data module."
                )

    def dataset_arguments(self, split: Split) -> dict[str, Any] | None:
        """Return the arguments of a split's dataset; None without data for it."""
        source = self._source(split)
        if source is None:
            return None
        self._catalog.joins.split = source.group
        self._catalog.joins.group = source.group if self._has_groups else ""
        self._catalog.joins.use(self._samples.table)
        x_key, y_key = self._keys(source, split)
        arguments = self._arguments(source, split, x_key, y_key)
        if not source.is_cut:
            return arguments
        if self._cut is None:
            self._cut = self._cut_files(source, arguments)
        if split not in self._cut:
            return None  # no list names it
        (chosen,) = self._cut[split]
        if isinstance(chosen, SegmentSubset):
            columns = self._weights.keys if split == "train" else []
            return arguments | {"choice": replace(arguments["choice"], subset=chosen, columns=columns)}
        if not len(chosen) and split != "train" and not self._split.fills(split):
            return None  # a file that says nothing of this split
        return arguments | {"indices": chosen}

    def _cut_files(self, source: Source, arguments: Mapping[str, Any]) -> Mapping[Split, Sequence[Chosen]]:
        """Return the rows, or the segments, of each split of the training files."""
        if "choice" in arguments:
            table, opened = H5LazyDataset(**arguments).table, OpenOptions(files=self._options.files)
            return cut_segments([table], self._split, self._catalog, opened, self._paths)
        check_split_of_rows(self._split)
        return {split: [rows] for split, rows in self._cut_rows(source.files, arguments["x_key"]).items()}

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """See ``BaseH5DataModule.order_of``; in batches of segments of similar length if these are asked for."""
        return segment_order(super().order_of(dataset, shuffles=shuffles), dataset, self._samples.segments)

    def _arguments(self, source: Source, split: Split, x_key: Keys, y_key: Keys | None) -> dict[str, Any]:
        """Return the arguments of a dataset of all samples of a split's files."""
        arguments = vars(self._samples) | {
            "path": source.files,
            "x_key": x_key,
            "y_key": y_key,
            "transform": self._transform_of(split),
            "normalize": self._statistics(source),
            "indices": None,
            "files": self._options.files,
            "catalog": self._catalog,
            "collate_fn": self._options.collate,
        }
        samples = self._samples
        given = SampleOptions.parse(
            samples.sample, samples.segments, samples.window, samples.select, patch=samples.patch
        )
        keys = keys_in(x_key, y_key)
        if given.needs_segments(keys) or self._are_segments(source.files, keys):
            columns = self._split.columns
            weights = self._weights.keys if split == "train" else []
            every = [*columns, *self._weights.keys] if source.is_cut else weights
            choice = SegmentChoice(columns=columns if source.is_cut else weights, others_ask=every)
            arguments |= {"seed": self.seed or 0, "choice": choice}
        del arguments["eval_transform"]
        return arguments if y_key is not None else arguments | {"y_dtype": None, "target_transform": None}

    def _source(self, split: Split) -> Source | None:
        own, training = self._paths[split], self._paths["train"]
        if own is not None:
            return Source(self._catalog.files(own, f"{split}_path"), split, split == "train" and self._split.is_given)
        if training is None or split == "train":
            return None
        files = self._catalog.files(training, "train_path")
        if self._split.may_fill(split):
            return Source(files, "train", is_cut=True)
        keys = own_keys_in(self.x_key, self.y_key)
        filled = [str(fill_split(key, split)) for key in keys]
        return Source(files, split) if filled != keys and self._has(files[0], filled) else None

    def expected_arrays(self) -> tuple[list[str], list[str]]:
        """See ``BaseH5DataModule.expected_arrays``."""
        fields = [str(fill_split(key, split)) for key in keys_in(self.x_key, self.y_key) for split in SPLITS]
        lists = [] if self._split.column else [self._split.list_of(split) for split in SPLITS]
        columns = [*self._split.columns, *self._weights.keys]
        fields += [key for key in lists if key is not None]
        return fields, [str(fill_split(key, "train")) for key in columns]

    def _statistics(self, source: Source) -> Mapping[str, FieldStats] | None:
        """Statistics by what the arrays are called in a split: those of the training arrays hold for all."""
        if self._samples.normalize is None:
            return None
        stats = read_stats(self._samples.normalize)
        for key in keys_in(self.x_key, self.y_key):
            own, train = str(fill_split(key, source.group)), str(fill_split(key, "train"))
            for name in (key, train):
                if name != own and own not in stats and name in stats:
                    stats[own] = stats.pop(name)
        return stats

    def _cut_rows(self, files: tuple[str, ...], x_key: Keys) -> dict[Split, IntArray]:
        own = own_keys_in(x_key, self.y_key) or keys_in(x_key)
        n_rows = count_rows(files, own[0], self._options.files, catalog=self._catalog)
        groups, labels = (
            None if key is None else self._column(files, key, n_rows, argument)
            for argument, key in (("group_key", self._split.group_key), ("stratify_key", self._split.stratify_key))
        )
        key = self._split.column
        names = None if key is None else self._column(files, key, n_rows, "split.key")
        every = [*keys_in(self.x_key, self.y_key), *self._split.columns, *self._weights.keys]
        lacks = rows_without_line(files, every, self._options.files, self._catalog)
        return cut_rows(n_rows, self._split, paths=self._paths, groups=groups, labels=labels, names=names, lacks=lacks)

    def weights_of_rows(self, dataset: TableDataset, files: tuple[str, ...]) -> RowWeights:
        """Return how often each sample of the training files is to come."""

        def column(key: str, argument: str) -> npt.NDArray[Any]:
            if dataset.table.sampling is not None:
                return dataset.table.values_of_samples(key)
            found, rows = self._column(files, key, dataset.table.n_rows, argument), dataset.indices
            return found if rows is None else found[rows]

        return row_weights(self._weights, column)

    def _column(self, files: tuple[str, ...], key: str, n_rows: int, argument: str) -> npt.NDArray[Any]:
        """One value of each row of the training files."""
        own = key.replace("{split}", "train")
        opened, catalog = self._options.files, self._catalog
        first = keys_in(self.x_key)[0].replace("{split}", "train") if opened.swmr else None
        return column_of(files, own, n_rows, argument=argument, files=opened, same_rows_as=first, catalog=catalog)

    @property
    def _has_groups(self) -> bool:
        """Whether each split has arrays of its own."""
        return any("{split}" in key for key in keys_in(self.x_key, self.y_key))

    def names_data(self, split: Split) -> bool:
        """See ``BaseH5DataModule.names_data``."""
        return super().names_data(split) or (self._has_groups and split != "train" and self._paths["train"] is not None)

    def other_data(self, split: Split) -> list[str]:
        """See ``BaseH5DataModule.other_data``."""
        return ["train_path and keys with {split} in them"]

    def _check_arguments(self) -> None:
        samples = self._samples
        for keys, name in ((self.x_key, "x_key"), (self.y_key, "y_key")):
            if keys is not None:
                field_names(keys, name)
        if self.x_key is None and self.y_key is not None:
            raise H5ValueError(f"y_key={self.y_key!r} was given without x_key. Pass both.")
        if self.x_key is None and samples.segments.groups is not None:
            raise H5ValueError(
                f"segments.groups={samples.segments.groups!r} was given without x_key, and arrays of groups are not "
                "guessed. Pass x_key, with names relative to a group; `lightning-h5 inspect FILE` suggests some."
            )
        for dtype, name in ((samples.x_dtype, "x_dtype"), (samples.y_dtype, "y_dtype")):
            for one in dtype.values() if isinstance(dtype, dict) else [dtype]:
                torch_dtype(one, name)
        if samples.target_transform is not None and self.y_key is None and self.x_key is not None:
            raise H5ValueError("target_transform was given without y_key. Pass y_key, or leave target_transform out.")

    def _keys(self, source: Source, split: Split) -> tuple[Keys, Keys | None]:
        """The arrays of a split; guessed from its first file where none are named."""
        if self.x_key is None:
            path = source.files[0]

            def guess(file: Any) -> tuple[tuple[str, str | None], list[str]]:
                found = guess_keys_in(file, path)
                return found, keys_in(*found)

            self.x_key, self.y_key = self._catalog.search(path, OpenOptions(files=self._options.files), "keys", guess)
            rank_zero_info(f"Inferred x_key={self.x_key!r}, y_key={self.y_key!r} from {source.files[0]!r}.")
        x_key = fill_split(self.x_key, source.group)
        y_key = None if self.y_key is None else fill_split(self.y_key, source.group)
        own = own_keys_in(y_key)
        is_elsewhere = any(map(self._catalog.joins.is_column, own)) or own != keys_in(y_key)
        if split == "predict" and (is_elsewhere or not self._has(source.files[0], y_key)):
            rank_zero_info(f"predicting without a target: {y_key!r} is not in {source.files[0]!r}")
            y_key = None
        return x_key, y_key

    def _are_segments(self, files: Sequence[str], keys: Sequence[str]) -> bool:
        """Whether arrays of the files make segments, whatever the user says: sparse matrices, or references."""
        opened = OpenOptions(files=self._options.files)
        return bool(matrices_in(self._catalog, files, keys, opened)) or are_cells(self._catalog, files, keys, opened)

    def _has(self, path: str, keys: Keys | None) -> bool:
        return self._catalog.has(path, keys_in(keys), OpenOptions(files=self._options.files))


class LazyH5DataModule(KeyedH5DataModule):
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
            ``{split}`` in it stands for train, val, test or predict. A name may end in a member of a table. If None,
            inferred when exactly one array qualifies; otherwise an error lists the arrays.
        y_key: the target, in the same forms. None yields inputs alone.
        x_dtype: dtype of the input by name, such as "float16", or a mapping from fields to names. None keeps the
            file's. Packed integers (``scale_factor``, ``_FillValue`` and the like) of other files than netCDF are an
            error unless ``decode`` or their stored dtype, such as "int16", is named.
        y_dtype: dtype of the target, in the same forms.
        transform: runs on each sample's input, a tensor of a row's shape. What it draws from the global generators of
            Python, NumPy and torch depends on the seed, the epoch and the batch, not on the rank or worker. If it has a
            parameter ``rng`` (NumPy) or ``generator`` (torch), it gets one that depends on (seed, epoch, row) only.
        target_transform: runs on each sample's target.
        eval_transform: replaces ``transform`` for validation, test and prediction. None runs ``transform`` there too.
        batch_transform: runs once on each collated batch; may ask for ``rng`` or ``generator`` too.
        collate_fn: a function that makes a batch of a list of samples; "pad" (zeros up to the longest, and
            ``"length"``), "list" (a list for each field) or "stack". None stacks, without making samples first.
        normalize: JSON file with mean and standard deviation of fields, of all their values or of each channel, as
            ``lightning-h5 stats`` writes it. These fields become ``(x - mean) / std``, before any transform. Raises if
            the statistics are of other fields, shapes or numbers of channels.
        batch_size: rows of a training batch on one rank.
        eval_batch_size: rows of a batch in the other stages. None takes ``batch_size``.
        shuffle: how training rows are shuffled each epoch: True, False, "global", "window" or ``ShuffleOptions``.
            True takes "global" if random access is as cheap as sequential access or all decoded rows fit its
            ``buffer``, and "window" otherwise, and logs which, and why.
        drop_last: drop the ragged end of a training epoch. False drops nothing: the last two rounds are cut into
            slightly smaller batches, so that all ranks take the same number of steps.
        seed: seed of the training order. None takes Lightning's ``seed_everything``, or 0.
        with_index: add each sample's index in its split to the batch: last in a tuple, ``"index"`` in a dict; with
            segments, windows or patches also its ``"segment"`` (name of the group, array or file) and ``"step"`` (of a
            patch where it starts, along each axis that is cut).
        num_workers: worker processes. 0 reads ahead and decodes in threads on all cores, without copies between
            processes: the fastest unless a ``transform`` is slow.
        pin_memory: put batches into page-locked memory. "auto" does so if they go to a GPU.
        split: how the training files are split: a float (``val_fraction``) or ``SplitOptions`` (``val_fraction``,
            ``test_fraction``, ``group_key``, ``group_pattern``, ``stratify_key``, ``num_folds``, ``fold``, ``seed``,
            ``file``, ``key``, ``by``, ``gap``).
        weights: how often each training row is drawn: the name of an array (``weight_key``) or ``WeightOptions``
            (``weight_key``, ``balance_key``, ``class_weights``).
        sample: what a sample is: "row" (one step), "window" or "segment" (all steps of a segment). None follows from
            ``window`` and ``segments``, and is required with ``patch``. "row" also accepts files that look like one
            image or volume each, for which None raises.
        segments: which steps belong together: a pattern of groups such as ``"data/*"``, or ``SegmentOptions``
            (``groups``, ``key``, ``sort_key``, ``lengths``, ``offsets``, ``ends``, ``join``, ``axis``, ``step_axis``,
            ``constants``, ``max_length``, ``bucket``, ``keep_together``). None makes each file a segment.
        window: which steps of a segment make a sample: a length, ``[start, stop]`` relative to each step, a mapping
            from fields to these, or ``WindowOptions`` (``length``, ``steps``, ``stride``, ``pad``, ``mask``,
            ``random``).
        patch: which part of a volume makes a sample, each segment being one: ``PatchOptions`` (``shape``, ``stride``,
            ``random``, ``border``), or a mapping of its fields.
        table: values of samples, in a CSV, TSV or Parquet file. Its columns are fields ``table/<column>``. A path, or
            ``TableOptions`` (``path``, ``on``, ``missing``).
        decode: what decodes fields, by name or pattern: "image" (JPEG and PNG to ``uint8`` of the shape ``(C, H, W)``),
            "cf" (scale, offset and fill value, to floats with NaN, as by default in netCDF files), "real" (complex
            numbers as pairs of floats on a new last axis), "bits:527" (so many packed bits of a row, as ``uint8``
            each), "dense" or "csr" (rows of a sparse matrix), or a function of what is stored of a row.
        select: the part of a field to read, by its axes as stored: ``{"fields": {1: [0, 3], 2: {"stop": 720}}}``.
        workers: how worker processes are run: ``WorkerOptions`` (``prefetch_factor``, ``persistent``, ``start_method``,
            ``timeout``, ``init_fn``).
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
        x_dtype: DTypeLike = None,
        y_dtype: DTypeLike = None,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[Any], Any] | Literal["stack", "pad", "list"] | None = None,
        normalize: PathLike | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        shuffle: ShuffleOptions | Literal["global", "window"] | bool | dict[str, Any] = True,
        drop_last: bool = False,
        seed: int | None = None,
        with_index: bool = False,
        num_workers: int = 0,
        pin_memory: bool | Literal["auto"] = "auto",
        split: SplitOptions | float | dict[str, Any] | None = None,
        weights: WeightOptions | str | dict[str, Any] | None = None,
        sample: Literal["row", "window", "segment"] | None = None,
        segments: SegmentOptions | str | dict[str, Any] | None = None,
        window: WindowOptions | int | list[int] | dict[str, Any] | None = None,
        patch: PatchOptions | dict[str, Any] | None = None,
        table: TableOptions | dict[Any, Any] | PathLike | None = None,
        decode: dict[str, Any] | None = None,
        select: dict[str, dict[int, Any]] | None = None,
        workers: WorkerOptions | dict[str, Any] | None = None,
        files: FileOptions | dict[str, Any] | None = None,
        staging: StagingOptions | PathLike | dict[str, Any] | None = None,
        distributed: DistributedOptions | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    def build_dataset(self, split: Split) -> H5LazyDataset | MixtureDataset | None:
        """Return the dataset of a split, or None without data for it."""
        arguments = self.dataset_arguments(split)
        if arguments is None:
            return None
        dataset = H5LazyDataset(**arguments)
        if split != "train" or not self._weights.is_given:
            return dataset

        return weighted_dataset(dataset, self.weights_of_rows(dataset, arguments["path"]))
