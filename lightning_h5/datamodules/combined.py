"""``CombinedHDF5DataModule``: trains from many files of the same structure, filtered, with samples as dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

from ..datasets import CombinedHDF5Dataset, MixtureDataset, RowDataset, mixture_dataset, weighted_dataset
from ..errors import H5ValueError
from ..loading.choose_order import Order, choose_mixed_order
from ..options import (
    DistributedOptions,
    FileOptions,
    MixtureOptions,
    PatchOptions,
    RowCacheOptions,
    SegmentOptions,
    ShuffleOptions,
    SplitOptions,
    StagingOptions,
    TableOptions,
    WeightOptions,
    WindowOptions,
    WorkerOptions,
)
from ..order import Mixture, check_mixture
from ..samples import MakesIndexer, NoRowPassesError
from ..types import DTypeLike, PathLike, Paths
from .arguments import Split
from .base import BaseH5DataModule, Chosen
from .source_files import SourceFiles, SplitDataset
from .training_rows import Source, SourceMixture, row_weights, segment_order, weights_of

__all__ = ["CombinedHDF5DataModule"]


class CombinedHDF5DataModule(BaseH5DataModule):
    """Trains from one or thousands of files of the same structure: filtered rows, samples as dicts of fields, a cache.

    Shards by rank, shuffles, resumes and evaluates as ``LazyH5DataModule`` does. Filters hold for all splits. Fractions
    and folds are of all rows, before any filter: another filter moves no row between training and test.

    An argument that takes an option object also takes a mapping with its fields, which is its form in YAML.

    Args:
        train_paths: one file, a glob, a directory of ``*.h5``/``*.hdf5``/``*.h5ad``, or a list of these.
        val_paths: files to validate on.
        test_paths: files to test on.
        predict_paths: files to predict on.
        load_fields: arrays to load; their names are the sample's keys. None loads all that share axis 0.
        field_map: names of ours for arrays that are called otherwise: ``{"guid": "meta/patient"}``. A list of
            arrays of one shape is one field, with the arrays on a new last axis.
        where: conditions on any one-dimensional arrays, by name: a value, a list of values, or a range
            ``{"min": 3, "max": 5}``; from Python also functions (see ``CombinedHDF5Dataset``).
        label: keep rows that have this class at any step of ``target`` (see ``CombinedHDF5Dataset``).
        valid_mask: array that is not 0 at steps that count for ``label``.
        dtype: of floating fields with more than one axis, except for the target. None leaves all as stored. A
            mapping from fields to dtypes names those of some, and leaves the others as stored; the stored dtype by name
            accepts packed integers as stored.
        row_cache: how many recently used rows each process keeps: a number or ``RowCacheOptions`` (``size``,
            ``max_bytes``).
        mixture: instead of ``train_paths``, several sets of files to mix: a mapping from each source's name to its
            files, or ``MixtureOptions`` (``sources``, ``strategy``, ``weights``, ``epoch_length``, ``mix``,
            ``pattern``).
        on_bad_file: "error", or "skip" to leave out files that are missing or broken; each is logged, and ranks that
            do not leave out the same stop.
        transform: runs on each sample, a dict. See ``LazyH5DataModule`` for what it may draw.
        eval_transform: replaces ``transform`` for validation, test and prediction. None runs ``transform`` there too.
        batch_transform: runs once on each collated batch; may ask for ``rng`` or ``generator`` too.
        collate_fn: makes a batch of a list of samples: a function, or "pad" (samples of several lengths with zeros, and
            ``"length"``), "list" (a list of each field) or "stack". None stacks, without making samples first.
        normalize: mean and standard deviation of fields, of all their values or of each channel: a JSON file that
            ``lightning-h5 stats`` has written, or a mapping from fields to numbers or lists,
            ``{"x": {"mean": [0.5, 0.4], "std": [0.2, 0.3], "channel_axis": 0}}``. These fields become
            ``(x - mean) / std``, before any transform. Raises if the statistics are of other fields, shapes or numbers
            of channels.
        batch_size: rows of a training batch on one rank.
        eval_batch_size: rows of a batch in the other stages. None takes ``batch_size``.
        shuffle: how training rows are shuffled each epoch: True, False, "global", "chunks" or ``ShuffleOptions``.
            True takes "global" if random access is as cheap as sequential access or all decoded rows fit its
            ``buffer``, and "chunks" otherwise, and logs which, and why.
        drop_last: drop the ragged end of a training epoch. False drops nothing: the last two rounds are cut into
            slightly smaller batches, so that all ranks take the same number of steps.
        seed: seed of the training order. None takes Lightning's ``seed_everything``, or 0.
        with_index: add each row's index in its split to the batch, as ``"index"``.
        num_workers: worker processes. 0 reads ahead and decodes in threads on all cores, without copies between
            processes: the fastest unless a ``transform`` is slow.
        prefetch_factor: batches that each worker reads ahead; None means 2, as in torch. Without workers, batches that
            this process reads ahead; None means 4, or twice as many as are read together, if that is more.
        pin_memory: put batches into page-locked memory. "auto" does so if they go to a GPU.
        split: how the training files are split: a float (``val_fraction``), the fractions of all splits (``[train,
            val]`` or ``[train, val, test]``, which sum to 1) or ``SplitOptions`` (``val_fraction``, ``test_fraction``,
            ``group_key``, ``group_pattern``, ``stratify_key``, ``num_folds``, ``fold``, ``seed``, ``file``, ``key``,
            ``by``, ``gap``). Samples of segments are split by these, before any filter.
        weights: how often each training row is drawn: the name of an array (``weight_key``) or ``WeightOptions``
            (``weight_key``, ``balance_key``, ``class_weights``).
        sample: what a sample is: "row", "window" or "segment" (see ``LazyH5DataModule``, as for the four that follow).
            Fields, and columns that filters name, are relative to the groups of ``segments``. A filter by values of
            segments keeps these whole. One by values of steps leaves steps out: windows do not reach over them, and a
            whole segment has those that stay.
        segments: which steps belong together: a pattern of groups, or ``SegmentOptions``.
        window: which steps of a segment make a sample: a length, ``[start, stop]``, a mapping, or ``WindowOptions``.
        patch: which part of a volume makes a sample, each segment being one: ``PatchOptions``.
        table: values of samples, in a CSV, TSV or Parquet file. Its columns are fields ``table/<column>``. A path, or
            ``TableOptions`` (``path``, ``on``, ``missing``).
        decode: what decodes fields, by name or pattern: "image" (JPEG and PNG to ``uint8`` of the shape ``(C, H, W)``),
            "cf" (scale, offset and fill value, to floats with NaN, as by default in netCDF files), "real" (complex
            numbers as pairs of floats on a new last axis), "bits:527" (so many packed bits of a row, as ``uint8``
            each), "dense" or "csr" (rows of a sparse matrix), or a function of what is stored of a row.
        select: the part of a field to read, by its axes as stored.
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
        >>> datamodule = CombinedHDF5DataModule(
        ...     "recordings/*.h5", label=2, split={"val_fraction": 0.1, "group_key": "guid"}
        ... )
        >>> trainer.fit(model, datamodule=datamodule)
    """

    def __init__(
        self,
        train_paths: Paths | None = None,
        val_paths: Paths | None = None,
        test_paths: Paths | None = None,
        predict_paths: Paths | None = None,
        *,
        load_fields: list[str] | None = None,
        field_map: dict[str, Any] | None = None,
        where: Any = None,
        label: int | None = None,
        valid_mask: str | None = None,
        dtype: DTypeLike = "float32",
        row_cache: RowCacheOptions | int | dict[str, Any] | None = None,
        mixture: MixtureOptions | dict[str, Any] | None = None,
        on_bad_file: Literal["error", "skip"] = "error",
        transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[Any], Any] | Literal["stack", "pad", "list"] | None = None,
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
        workers: WorkerOptions | dict[str, Any] | None = None,
        files: FileOptions | dict[str, Any] | None = None,
        staging: StagingOptions | PathLike | dict[str, Any] | None = None,
        distributed: DistributedOptions | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    def _use_arguments(self, given: Mapping[str, Any]) -> None:
        super()._use_arguments(given)
        self._keeps_rows = given["row_cache"] is not None
        self._of_samples: dict[str, Any] = {name: given[name] for name in ("batch_transform", "with_index")}
        asked = [*self._split.columns, *self._weights.keys]
        self._files = SourceFiles(given, self._options.files, self._options.collate, self._kind, asked)
        mixture = given["mixture"]
        self._mixture = None if mixture is None else SourceMixture.parse(MixtureOptions.parse(mixture, "mixture"))
        self._sources = self._own_files("train") if self._mixture is None else self._mixture.sources
        self._check_arguments()

    def _check_arguments(self) -> None:
        self._has_segments = self._files.have_segments(self._sources) if self._sources else False
        if self._has_segments and self._keeps_rows:
            raise H5ValueError("row_cache was given, which keeps rows, and samples are of segments. Leave it out.")
        if self._mixture is not None:
            if self._kind.segments.bucket:
                raise H5ValueError("segments.bucket was given with a mixture of sources. Leave one of them out.")
            if self._paths["train"] is not None:
                raise H5ValueError("train_paths and mixture were given; both name the training files. Pass one.")
            options = self._mixture.options
            if self._weights.is_given and (options.strategy, options.epoch_length) != ("concat", "sum"):
                raise H5ValueError(
                    f"weights was given, and a mixture with strategy={options.strategy!r} and "
                    f"epoch_length={options.epoch_length!r}: both decide how often rows are drawn. Weight rows of "
                    "strategy='concat' with epoch_length='sum'."
                )

    def setup(self, stage: str | None = None) -> None:
        """See ``BaseH5DataModule.setup``."""
        try:
            super().setup(stage)
        finally:
            self._files.catalog = self._catalog  # reset

    def expected_arrays(self) -> tuple[list[str], list[str]]:
        """See ``BaseH5DataModule.expected_arrays``."""
        split = self._split
        names = [*split.columns, *self._weights.keys, *self._kind.segments.cut_keys]
        return self._files.expected_arrays(self._sources, names)

    def build_dataset(self, split: Split) -> CombinedHDF5Dataset | MixtureDataset | None:
        """Return the dataset of a split, or None without data for it."""
        self._files.catalog, self._files.seed = self._catalog, self.seed or 0
        trains = split == "train"
        is_cut = not trains and self._paths[split] is None and self._split.may_fill(split)
        sources = self._sources if trains or is_cut else self._own_files(split)
        self._catalog.joins.split = "train" if trains or is_cut else split
        if not sources:
            return None
        chosen: Sequence[Chosen | None] = [None] * len(sources)
        if is_cut or (trains and self._split.is_given):
            if (found := self._cut_sources().get(split)) is None:
                return None  # no list names this split
            chosen = found
            if not any(map(len, found)):
                if not trains and not self._split.fills(split):
                    return None  # the file does not name this split
                raise H5ValueError(f"the split {split!r} has no rows. {self.why_no_rows(split)}")
        of_samples = {"transform": self._transform_of(split), **self._of_samples}
        weighs = trains and self._weights.is_given
        opens = partial(self._files.open, columns=self._weights.keys if weighs else [])
        dataset: SplitDataset | MixtureDataset
        if self._mixture is not None and (trains or is_cut):
            opened = self._open(split, sources, chosen, opens)
            self._files.refuse_images(opened)
            named = {source.name: each for source, each in opened.items()}
            mixes = not trains or not self._mixture.in_batches
            dataset = mixture_dataset(named, mixes=mixes, is_named=True, **of_samples)
        else:
            try:
                dataset = opens(sources[0], chosen[0], **of_samples)
            except H5ValueError as error:
                raise H5ValueError(f"the data of {split!r}: {error}") from error
            opened = {sources[0]: dataset}
        column = partial(self._files.column, opened)
        return weighted_dataset(dataset, row_weights(self._weights, column)) if weighs else dataset

    def _cut_sources(self) -> Mapping[Split, Sequence[Chosen]]:
        """The rows, or the segments, of each source by split."""
        if self._cut is None:
            has_segments = self._files.hold_segments(self._sources)
            cut = self._files.cut_segments if has_segments else self._files.cut_rows
            self._cut = cut(self._sources, self._split, self._paths)
        return self._cut

    def _open(
        self,
        split: Split,
        sources: Sequence[Source],
        chosen: Sequence[Chosen | None],
        opens: Callable[..., SplitDataset],
    ) -> dict[Source, SplitDataset]:
        """The sources that have rows in a split."""
        opened: dict[Source, SplitDataset] = {}
        lacking: list[H5ValueError] = []
        for source, of_split in zip(sources, chosen, strict=True):
            try:
                with_index = self._of_samples["with_index"]  # for segments and steps
                opened[source] = opens(source, of_split, n_sources=len(sources), with_index=with_index)
            except H5ValueError as error:
                told = H5ValueError(f"the source {source.name!r} of {split!r}: {error}")
                # A named source must have rows to train on, but a small one may have none to evaluate on.
                if split == "train" or not isinstance(error, NoRowPassesError):
                    raise told from error
                lacking.append(told)
        if not opened:
            raise lacking[0]
        return opened

    def _own_files(self, split: Split) -> tuple[Source, ...]:
        paths = self._paths[split]
        return () if paths is None else (Source(split, paths, {}, f"{split}_paths"),)

    def names_data(self, split: Split) -> bool:
        """See ``BaseH5DataModule.names_data``."""
        is_mixed = self._mixture is not None and (split == "train" or self._split.may_fill(split))
        return super().names_data(split) or is_mixed

    def other_data(self, split: Split) -> list[str]:
        """See ``BaseH5DataModule.other_data``."""
        return ["mixture"] if split == "train" else []

    # Order ---------------------------------------------------------------------------------------------------

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """See ``BaseH5DataModule.order_of``; of a mixture that of each source."""
        if (mixture := self._mixture_of(dataset)) is None:
            return segment_order(super().order_of(dataset, shuffles=shuffles), dataset, self._kind.segments)
        return choose_mixed_order(
            mixture,
            [dataset] if mixture.strategy == "concat" else cast("MixtureDataset", dataset).sources,
            self._shuffle(shuffles),
            world_size=self.world_size or 1,
            num_workers=self._options.num_workers,
            memory=self._free_memory,
            kept=self.kept_modes(),
        )

    def read_with(self, dataset: RowDataset, order: Order, cache_bytes: int, *, training: bool) -> None:
        """See ``BaseH5DataModule.read_with``; each source as its order needs."""
        if len(order.sources) < 2:
            super().read_with(dataset, order.sources[0] if order.sources else order, cache_bytes, training=training)
            return
        total = max(1, sum(each.cache_bytes for each in order.sources))
        for source, each in zip(cast("MixtureDataset", dataset).sources, order.sources, strict=True):
            super().read_with(source, each, cache_bytes * each.cache_bytes // total, training=training)

    def _mixture_of(self, dataset: RowDataset) -> Mixture | None:
        """How the training sources are mixed; None for other splits."""
        if self._mixture is None or dataset is not self._datasets.get("train") or weights_of(dataset) is not None:
            return None
        return self._mixture.of_rows([len(source) for source in cast("MixtureDataset", dataset).sources])

    def _check_rows(self, split: Split, n_rows: int) -> None:
        dataset = self._datasets[split]
        if (mixture := self._mixture_of(dataset)) is None:
            super()._check_rows(split, n_rows)
            return
        check_mixture(mixture, self.batch_size, self._options.drop_last)
        if not len(self.sampler_of(dataset, self._order(dataset, training=True), training=True)):
            raise H5ValueError(
                f"an epoch of {mixture.text} with epoch_length={mixture.epoch_length!r} has no step for "
                f"{self.world_size} ranks of batch_size {self.batch_size}. Make batch_size smaller, or use fewer "
                "devices."
            )
