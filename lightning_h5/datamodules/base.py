"""The life cycle of all data modules. Subclasses build the datasets of the splits."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeAlias

from .._lightning import (
    PACKAGE,
    loaders_of_fit,
    models_of_the_other_package,
    rank_zero_only,
    rank_zero_warn,
    set_batch_size_of_strategy,
)
from ..catalog import Agreement, Catalog, Categories, check_same_numbers
from ..datasets import RowDataset, TableDataset, check_shapes, checked_step_counts, read_stats
from ..distributed import Bulletin, exchange
from ..errors import H5Error, H5ValueError, listing
from ..hdf5 import INTEGRITY, ArrayLayout, ChangeGuard
from ..loading import H5DataLoader
from ..memory import page_cache_memory
from ..options import SplitOptions, StagingOptions, TableOptions, WeightOptions
from ..options.base import check_transform
from ..readers import fallback_reason, keeps_decoded
from ..samples import SegmentSubset
from ..sizes import bytes_text
from ..staging import check_urls, ensure_folder, why_not_staged
from ..types import IntArray
from .arguments import SPLITS, Split
from .cut_splits import Cut
from .loaders import NoRows
from .missing_arrays import explain_missing_array
from .split_overlap import overlap_of_files, overlap_of_samples
from .step_rows import NamesRows, TrainingData
from .training_rows import segments_left_out, segments_without_steps

__all__ = ["BaseH5DataModule", "Chosen", "arrays_of_fields"]

logger = logging.getLogger(__name__)

Chosen: TypeAlias = IntArray | SegmentSubset
"""The rows, or the segments, of one source in one split."""

SMALL_CHUNK, MANY_CHUNKS = 64 << 10, 1000
"""Bytes of a chunk below which the latency of requests dominates, and number of chunks from which this is logged."""

TRANSFORMS = {
    "transform": "the input of a sample",
    "target_transform": "the target of a sample",
    "eval_transform": "the input of a sample",
    "batch_transform": "a batch",
}
"""The arguments that are functions, and the values that they are called with."""

_STAGE_OF: dict[Split, str] = {"train": "fit", "val": "validate", "test": "test", "predict": "predict"}


class BaseH5DataModule(NamesRows):
    """Builds datasets in ``setup``, loaders on demand, and keeps the position of the run.

    A subclass defines an ``__init__`` with explicit arguments, which passes ``locals()`` on, and ``build_dataset``.

    Args:
        arguments: the constructor's arguments by name.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        check_urls(arguments)  # before they are recorded
        super().__init__(arguments)
        self._matched: dict[Any, Any] = {}  # values that belong to rows by their order, over all setups
        self._categories = Categories()  # of all setups
        self._agreement = Agreement()  # of all setups
        self._is_trained_on = False  # whether training files were set up: later files must agree with them
        self._set_up: set[Split] = set()
        self._data_of_run: TrainingData | None = None  # opened without ``setup``
        self._set_since_setup: list[str] = []  # arguments
        self._use_arguments(self._passed)
        # Ranks may have no rows to predict; all other stages are checked in `setup`.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        if models := models_of_the_other_package():
            # A Trainer refuses such a model first, with a message that does not name the two packages.
            self._log_once(
                f"{', '.join(models)} and this data module come from different Lightning packages, whose classes are "
                f"unrelated; this data module and its Trainer use {PACKAGE!r} (LIGHTNING_H5_IMPORT chooses)"
            )

    def _use_arguments(self, arguments: Mapping[str, Any]) -> None:
        super()._use_arguments(arguments)
        # Contents of the files; filled and dropped by ``setup``.
        self._catalog = Catalog(staging=self._options.files.staged)
        self._table = arguments.get("table")
        if self._table is not None:
            TableOptions.parse(self._table, "table")
        self._path_names = {split: f"{split}_path" for split in SPLITS}
        self._paths: dict[Split, Any] = {split: arguments.get(name) for split, name in self._path_names.items()}
        self._split = SplitOptions.parse(arguments.get("split"), "split")
        self._weights = WeightOptions.parse(arguments.get("weights"), "weights")
        self._cut: Cut[list[Chosen]] | None = None  # rows of each source in each split, once known
        self._transforms = arguments.get("transform"), arguments.get("eval_transform")
        for name, argument in TRANSFORMS.items():
            check_transform(arguments.get(name), name, argument)
        normalize = arguments.get("normalize")
        if normalize is not None and not isinstance(normalize, str | os.PathLike):
            read_stats(normalize)  # raises for an invalid mapping; files are read in setup
        self._check_split()

    def _change(self, name: str, value: Any) -> None:
        if self.is_in_a_fit:
            raise H5ValueError(
                f"{name} was set during a fit, which would continue with the old value. Set it before or after the fit."
            )
        super()._change(name, value)
        self._set_up.clear()
        self._data_of_run = None
        self._set_since_setup.append(name)

    def _check_split(self) -> None:
        for split in ("val", "test"):
            if self._paths[split] is not None and self._split.fills(split):
                name = self._path_names[split]
                raise H5ValueError(
                    f"{name} was given, but split also assigns rows of the training files to {split!r}. Pass {name}, "
                    f"or split with {split}_fraction (or folds), not both."
                )

    def _transform_of(self, split: Split) -> Any:
        transform, eval_transform = self._transforms
        return transform if split == "train" or eval_transform is None else eval_transform

    def build_dataset(self, split: Split) -> RowDataset | None:
        """Return the dataset of a split; None if this module has no data for it.

        Raises:
            H5Error: the data is missing or invalid.
        """
        raise NotImplementedError

    def expected_arrays(self) -> tuple[list[str], list[str]]:
        """Return the arrays that any split may need, and the arrays that select rows, so that files are opened once."""
        return [], []

    def names_data(self, split: Split) -> bool:
        """Return whether the arguments name data for a split, without opening files."""
        return self._paths[split] is not None or (self._paths["train"] is not None and self._split.may_fill(split))

    def other_data(self, split: Split) -> list[str]:
        """Return arguments that name data for a split, other than its own files or a share of the training files."""
        return []

    def missing_data_hint(self, split: Split) -> str:
        """Return a sentence with the arguments that provide data for a split."""
        shares: dict[Split, str] = {"val": "val_fraction (or num_folds and fold)", "test": "test_fraction"}
        cut = [f"split with {shares[split]}"] if split in shares else []
        ways = [self._path_names[split], *cut, *self.other_data(split)]
        return f"Pass {', or '.join(ways)}."

    def why_no_rows(self, split: Split) -> str:
        """Return a sentence with the reason why a split with data has no rows."""
        paths = self._paths[split]
        cut, options = self._cut, self._split
        n = 0 if cut is None else sum(len(part) for rows in cut.parts.values() for part in rows)
        if (split != "train" and paths is not None) or cut is None or not (n and options.has_fractions):
            return f"Its files, {paths or self._paths['train']!r}, contain no rows. Pass files with rows."
        shares = f"val_fraction={options.val_fraction} and test_fraction={options.test_fraction}"
        if cut.n_groups is not None:
            argument = "group_key" if options.group_pattern is None else "group_pattern"
            groups = "1 group" if cut.n_groups == 1 else f"{cut.n_groups} groups"
            parts = ["train", *(name for name in ("val", "test") if options.fills(name))]
            has_too_few = cut.n_groups < len(parts)
            reason = f"{listing(parts)} need one each" if has_too_few else f"{shares} leave none for this split"
            other_fractions = "" if has_too_few else "other fractions, "
            return (
                f"Groups are never divided: split.{argument}={getattr(options, argument)!r} has {groups}, and "
                f"{reason}. Pass {other_fractions}a {argument} with more groups, or a split.file that lists the groups "
                "of each split."
            )
        share = f"One row or segment is a share of {1 / max(1, n):.2g}."
        return f"{shares} of {n} rows or segments leave none for this split. {share}"

    def can_reuse(self, old: RowDataset, new: RowDataset) -> bool:
        """Whether a dataset of an earlier ``setup`` holds the rows that a new one would load again."""
        return False

    def _forget_cuts(self) -> None:
        self._cut = None

    @property
    def train_dataset(self) -> RowDataset | None:
        """The dataset of the training rows, as in ``datasets["train"]``.

        None if its stage is set up and the arguments name no data for it.

        Raises:
            H5ValueError: its stage is not set up.
        """
        return self._dataset("train")

    @property
    def val_dataset(self) -> RowDataset | None:
        """The dataset of the validation rows; see ``train_dataset``."""
        return self._dataset("val")

    @property
    def test_dataset(self) -> RowDataset | None:
        """The dataset of the test rows; see ``train_dataset``."""
        return self._dataset("test")

    @property
    def predict_dataset(self) -> RowDataset | None:
        """The dataset of the rows to predict; see ``train_dataset``."""
        return self._dataset("predict")

    def _dataset(self, split: Split) -> RowDataset | None:
        if split not in self._set_up:
            raise H5ValueError(self._why_not_set_up(split, f"{split}_dataset was read"))
        return self._datasets.get(split)

    @property
    def categories(self) -> dict[str, tuple[Any, ...]]:
        """The categories of categorical fields, by field; codes are the same in all files, splits and checkpoints.

        The categories of the training files are first: in the stored order if all training files have the same
        categories, and sorted otherwise. Categories of other files follow.
        """
        layouts = [dataset.sample_layout for dataset in self._datasets.values()]
        parts = [part.fields for layout in layouts for part in (layout.x, layout.y) if part is not None]
        names = {key: name for fields in parts for key, name in zip(fields.keys, fields.names, strict=True)}
        return {names[key]: categories for key, categories in self._categories.known.items() if key in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training, and the categories of categorical fields, as plain values."""
        state, digests = super().state_dict(), self._categories.digests()
        bad_samples = self._ledger.state()
        state |= {"bad_samples": bad_samples} if state and bad_samples else {}
        return state | {"categories": digests} if state and digests else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved position; it is applied when training starts.

        Raises:
            H5ResumeError: the categories of a field differ from the saved ones.
        """
        state = dict(state_dict)
        self._categories.check(state.pop("categories", {}))
        super().load_state_dict(state)

    def _training_files(self) -> Sequence[str]:
        paths = self._paths["train"]
        return () if paths is None else self._catalog.files(paths, self._path_names["train"])

    def load(self, splits: Sequence[Split]) -> None:
        """Load rows into memory; called on all ranks, once they agree on the data."""

    def release(self, dataset: RowDataset, stage: str | None) -> None:
        """Release a dataset's memory and files at the end of a stage."""
        dataset.close()

    def setup(self, stage: str | None = None) -> None:
        """Build the datasets of a stage, compare them between all ranks, and insert the callbacks.

        May be called again, for each stage and for the same one.

        Args:
            stage: fit, validate, test or predict; None for all of them.

        Raises:
            H5Error: the data is missing, broken, too little, or not the same on all ranks.
        """
        name = getattr(stage, "value", stage)
        if name is not None and name not in _STAGE_OF.values():
            raise H5ValueError(f"setup({stage!r}) was called; the stages are {listing(_STAGE_OF.values())} and None.")
        splits = _splits_of(name)
        if self.is_bystander:
            return
        self._run()  # a second fit must not continue the position of an earlier one, nor disturb one that goes on
        self.check_device_transform()
        self.check_prefetch_to_device()
        if self._set_since_setup:  # no dataset may be used again
            for dataset in self._datasets.values():
                dataset.close()
            self._datasets.clear()
            is_of_training = {"val_path", "test_path", "predict_path"}.issuperset(self._set_since_setup)
            if not (is_of_training and self._is_trained_on):
                self._agreement = Agreement()
        self._set_since_setup.clear()
        self._data_of_run = None
        self._forget_cuts()  # the files may have changed
        self._set_up -= {*splits}  # until all of them are set up without an error
        try:
            self._set_up_splits(splits, name)
        except H5Error as error:
            # The message is complete. Frames and causes inside this package would only hide the line of the user's
            # script.
            raise error.with_traceback(None) from None
        self._set_up |= {*splits}
        self._is_trained_on = self._is_trained_on or "train" in splits
        set_batch_size_of_strategy(self.trainer, self.batch_size)
        self._insert_callbacks()
        training = self._datasets.get("train")
        if name == "fit" and training is not None and getattr(self.trainer, "ckpt_path", None) is None:
            # Now, since the loader is created while the progress bar of the sanity check is shown. A checkpoint may
            # ask for another order.
            self._log_order(self._order(training, training=True), training)

    def _set_up_splits(self, splits: tuple[Split, ...], name: str | None) -> None:
        facts: dict[str, Any] = {}
        failure: Exception | None = None
        overlaps: list[str] = []
        task = f"setting up the data ({name or 'all stages'})"
        with exchange(task, self._options.distributed.setup_timeout, self._is_alone()) as all_ranks:
            try:
                self._resolve()
                self._catalog = self._new_catalog(of_all_ranks=True)
                for split in splits:
                    self._build(split, needed=name is not None and split == splits[0])
                facts = self._facts(splits)
                overlaps = self._overlaps(splits)
                self._catalog.joins.log_unused()
            except Exception as error:  # sent to all ranks first, then raised on all
                explain_missing_array(error, self.hparams, self._kind.segments.groups, self._catalog.joins.side)
                failure = error
            finally:
                # The files may change until the next setup.
                self._catalog = Catalog(staging=self._options.files.staged)
            memories = all_ranks.agree(facts, failure, page_cache_memory())
        if self._bad_rows is not None and not self._is_alone():
            self._ledger.share(Bulletin("bad rows"))
        self._free_memory = min((memory for memory in memories if memory is not None), default=None)
        for text in overlaps:
            self._log_once(text, log=rank_zero_only(logger.warning))
        datasets = {split: self._datasets[split] for split in splits if split in self._datasets}
        self._log_integrity([*datasets.values()])
        self._log_staging([*datasets.values()])
        self.load([*datasets])

    def _new_catalog(self, *, of_all_ranks: bool) -> Catalog:
        return Catalog(
            *self.expected_arrays(),
            of_all_ranks=of_all_ranks,
            categories=self._categories,
            first_files=self._training_files,
            matched=self._matched,
            agreement=self._agreement,
            staging=self._options.files.staged,
        )

    def training_data(self, seed: int) -> TrainingData:
        """See ``NamesRows.training_data``: nothing is loaded into memory, and no rank is waited for."""
        if "train" in self._set_up and (dataset := self._datasets.get("train")) is not None:
            return TrainingData(dataset, self.seed or 0, self._identities["train"])
        if self._data_of_run is None or self._data_of_run.seed != seed:
            self._data_of_run = self._open_training_data(seed)
        return self._data_of_run

    def _open_training_data(self, seed: int) -> TrainingData:
        self._infer(seed=seed)
        self._forget_cuts()
        try:
            self._catalog = self._new_catalog(of_all_ranks=False)
            self._build("train", needed=True)
        except Exception as error:
            explain_missing_array(error, self.hparams, self._kind.segments.groups, self._catalog.joins.side)
            raise
        finally:
            self._catalog = Catalog(staging=self._options.files.staged)
            self._forget_cuts()
        dataset = self._datasets["train"]
        return TrainingData(dataset, seed, dataset.identity())

    @property
    def _has_groups(self) -> bool:
        """Whether each split has arrays of its own."""
        return False

    def _overlaps(self, splits: tuple[Split, ...]) -> list[str]:
        """Return warnings about samples that training and an evaluation share."""
        texts = list[str | None]()
        evaluations: tuple[Split, ...] = ("val", "test")
        if (training := self._datasets.get("train")) is None:
            return []
        for split in evaluations:
            dataset, paths = self._datasets.get(split), self._paths[split]
            if paths is None and not self._has_groups:  # a share of the training files
                continue
            if dataset is not None and {split, "train"} & {*splits}:
                texts.append(overlap_of_samples(training, dataset, split))
            elif "train" in splits and paths is not None and not self._has_rows_by_name:
                with suppress(H5Error):  # files of a later stage may not exist yet
                    files = self._catalog.files(paths, self._path_names[split])
                    texts.append(overlap_of_files([guard.path for guard in training.guards()], files, split))
        return [text for text in texts if text is not None]

    @property
    def _has_rows_by_name(self) -> bool:
        """Whether splits may have other samples of one file: other arrays, or other lines of a table."""
        return self._has_groups or "{split}" in str(self._table)

    def teardown(self, stage: str | None = None) -> None:
        """Stop reading ahead and close files. The next read opens them again."""
        name = getattr(stage, "value", stage)
        if name == "fit" and self._position.is_unused:
            rank_zero_warn(
                "the checkpoint's position was not used: the Trainer counts its epoch as done, and had nothing left to "
                "do. If max_steps interrupted that epoch, raise max_epochs by one to train on the rest of it."
            )
        if name in (None, "fit"):
            self._position.is_over = True
        self._close(_splits_of(name), name)

    def on_exception(self, exception: BaseException) -> None:
        """Close files; Lightning does not call ``teardown`` after an error."""
        if self._bad_rows is not None and (text := self._ledger.excess()) and text not in str(exception):
            exception.add_note(f"lightning_h5: {text}")  # another rank has stopped
        if self.is_in_a_fit:  # the error is another Trainer's, and may be caught
            self._close(SPLITS, None)
        else:
            self.teardown()

    def _close(self, splits: Iterable[Split], stage: str | None) -> None:
        """Close loaders and datasets, except those of a fit that goes on, during which another Trainer was run."""
        in_use = loaders_of_fit(self._position.trainer) if self.is_in_a_fit else []
        for split in splits:
            for loader in list(self._loaders[split]):
                if not any(loader is one for one in in_use):
                    loader.close()
            dataset = self._datasets.get(split)
            if dataset is not None and not any(dataset is loader.dataset for loader in in_use):
                self.release(dataset, stage)

    def train_dataloader(self) -> Any:
        """Return the training loader of this rank, in the order of the plan."""
        loader = self._loader("train")
        self._train_loader = loader if isinstance(loader, H5DataLoader) else None
        if self._train_loader is not None:
            self._position.resume_last_epoch()
        return loader

    def val_dataloader(self) -> Any:
        """Return the validation loader of this rank: a contiguous shard, with every row once over all ranks."""
        return self._loader("val")

    def test_dataloader(self) -> Any:
        """Return the test loader of this rank: a contiguous shard, with every row once over all ranks."""
        return self._loader("test")

    def predict_dataloader(self) -> Any:
        """Return the prediction loader of this rank: a contiguous shard, with every row once over all ranks."""
        return self._loader("predict")

    def _build(self, split: Split, *, needed: bool) -> None:
        old = self._datasets.pop(split, None)
        dataset: RowDataset | None = None
        try:
            dataset = self.build_dataset(split)
            if old is not None and dataset is not None and self.can_reuse(old, dataset):
                dataset, old = old, None
        finally:
            if old is not None:
                old.close()
        if dataset is None:
            if needed:
                raise H5ValueError(f"there is no data for {split!r}. {self.missing_data_hint(split)}")
            return
        self._datasets[split] = dataset
        if self._bad_rows is not None and split in self._bad_rows.stages:
            dataset.skip_bad_rows(self._bad_rows, self._ledger, split)
        options = self._options
        batch_size = (options.eval_batch_size if split != "train" else None) or options.batch_size
        tables = [source for source in dataset.sources or [dataset] if isinstance(source, TableDataset)]
        for source in tables:
            if options.collate_function is None:
                check_shapes(source, options.collate, batch_size)
            if (max_tokens := self._kind.segments.max_tokens) is not None:
                checked_step_counts(source, max_tokens)
        for text in segments_left_out(dataset):
            self._log_once(text)
        for text in dict.fromkeys(text for layout in dataset.layouts() for text in layout.missing_as_stored):
            self._log_once(text, log=rank_zero_only(logger.warning))
        for text in segments_without_steps(dataset):
            self._log_once(text, log=rank_zero_warn)
        for other in self._datasets.values():  # all splits share one transform, which sees the same numbers
            for a, b in zip(arrays_of_fields(other), arrays_of_fields(dataset), strict=False):
                check_same_numbers(a, b)
        self._check_rows(split, dataset.n_rows)

    def _check_rows(self, split: Split, n_rows: int) -> None:
        if n_rows == 0:
            raise H5ValueError(f"the split {split!r} has no rows. {self.why_no_rows(split)}")
        super()._check_rows(split, n_rows)

    def _facts(self, splits: tuple[Split, ...]) -> dict[str, Any]:
        options = self._options
        facts: dict[str, Any] = {"seed": self.seed, "world_size": self.world_size, "shuffle": options.shuffle.mode}
        facts |= {"drop_last": options.drop_last, "batch_size": self.batch_size, "on_bad_row": self._bad_rows}
        if options.shuffle.scope == "node":
            facts["nodes"] = self._nodes
        for split in splits:
            if (dataset := self._datasets.get(split)) is not None:
                facts[f"rows of {split!r}"] = dataset.n_rows
                identity = self._identities[split] = dataset.identity()
                facts[f"content of {split!r}"] = identity["sampled"]
                facts[f"all bytes of {split!r}"] = identity.get("whole")
                if split == "train":
                    facts["order"] = self._parameters(self._order(dataset, training=True))
        return facts

    def _log_integrity(self, datasets: Sequence[RowDataset]) -> None:
        # Debug level: a training run cannot change it, and min_integrity refuses low levels.
        levels = sorted({(layout.integrity, layout.key) for dataset in datasets for layout in dataset.layouts()})
        if levels:
            least, _ = levels[0]
            by_array = ", ".join(f"{key}: {level}" for level, key in levels)
            text = f"integrity levels (0 to 4): {by_array} (level {least}: {INTEGRITY[least]})"
            self._log_once(text, log=rank_zero_only(logger.debug))

    def _log_staging(self, datasets: Sequence[RowDataset]) -> None:
        guards = [guard for dataset in datasets for guard in dataset.guards()]
        staging = next((guard.staging for guard in guards if guard.staging is not None), self._options.files.staged)
        if staging is not None:
            layouts = [layout for dataset in datasets for layout in dataset.layouts()]
            for text in _staging_report(staging, guards, layouts):
                self._log_once(text)

    def _loader(self, split: Split) -> H5DataLoader | NoRows:
        if split not in self._set_up:
            raise H5ValueError(self._why_not_set_up(split, f"{split}_dataloader() was called"))
        if split == "train" and split in self._datasets:
            self._check_rows(split, self._datasets[split].n_rows)  # a tuner may have changed batch_size
        return self._make_loader(split)

    def _why_not_set_up(self, split: Split, request: str) -> str:
        """Return the message of an error: a split was used that ``setup`` has not made.

        Args:
            split: the split.
            request: the use of it, such as "train_dataloader() was called".
        """
        if not self.names_data(split):  # otherwise the advised setup would fail, too
            return f"{request}, and there is no data for {split!r}. {self.missing_data_hint(split)}"
        ready = listing(name for name in SPLITS if name in self._set_up)
        reason = f"setup() has set up {ready} only" if self._set_up else "setup() was not called, or failed"
        if self._set_since_setup:
            reason = f"setup() was not called after {listing(dict.fromkeys(self._set_since_setup))} was set"
        stage = _STAGE_OF[split]
        return (
            f"{request}, and {split!r} is not set up: {reason}. Call setup({stage!r}) first, or "
            f"pass the data module to the Trainer: trainer.{stage}(model, datamodule=datamodule)."
        )


def _staging_report(
    staging: StagingOptions, guards: Iterable[ChangeGuard], layouts: Iterable[ArrayLayout]
) -> Iterator[str]:
    """Yield sentences about the staged files.

    Args:
        staging: the folder of the mirrors.
        guards: change guards of the files.
        layouts: arrays of the files, at least one of each kind.
    """
    files = {guard.path: guard for guard in guards}
    staged = [path for path, guard in files.items() if guard.staging is not None]
    if staged:
        folder = ensure_folder(staging)
        subject = f"{len(staged)} of {len(files)} files are" if len(files) > 1 else f"{staged[0]!r} is"
        yield f"staging: {subject} read through {folder.path!r}, which may take {bytes_text(folder.limit)}"
    if staging.storage_options is not None and not any(guard.is_remote for guard in files.values()):
        yield "staging: storage_options have no effect, since all files are on file systems"
    if staging.decoded:
        yield _decoded_report(staging, layouts)
    reasons: dict[str, list[str]] = {}
    for path, guard in files.items():
        if guard.staging is None and guard.decoded is None:
            why = why_not_staged(staging, guard.device, guard.n_bytes, grows=guard.grows)
            reasons.setdefault(why or "it was set up without", []).append(path)
    for why, paths in reasons.items():
        yield f"staging: {listing(paths, most=3)} {'is' if len(paths) == 1 else 'are'} not staged: {why}"
    for layout in layouts:
        table = layout.table
        if not layout.guard.is_remote or table is None or len(table.sizes) < MANY_CHUNKS:
            continue
        if (size := int(table.sizes.clip(min=0).mean())) < SMALL_CHUNK:
            yield (
                f"staging: the chunks of {layout.key!r} have {bytes_text(size)} on average, and the first epoch sends "
                "one request per chunk, or per run of adjacent chunks. Larger chunks need fewer requests: "
                "`lightning-h5 repack --rows-per-chunk auto --for-object-store`"
            )
    on_disk = [layout for layout in layouts if layout.guard.staging is not None and not layout.guard.is_remote]
    by_library = {layout.key for layout in on_disk if fallback_reason(layout) is not None}
    if by_library:
        yield f"staging: not of {listing(sorted(by_library))}, which only the HDF5 library can read"


def _decoded_report(staging: StagingOptions, layouts: Iterable[ArrayLayout]) -> str:
    """Return a sentence about the arrays with cached decoded chunks."""
    keys = sorted({layout.key for layout in layouts if keeps_decoded(layout)})
    if not keys:
        return (
            "staging: decoded=True has no effect: no array of 1 MiB or more has compressed chunks that are read "
            "without the HDF5 library, or its file is being written"
        )
    folder = ensure_folder(staging)
    return (
        f"staging: decoded chunks of {listing(keys, most=3)} are kept in {folder.path!r}, which may take "
        f"{bytes_text(folder.limit)}"
    )


def _splits_of(stage: str | None) -> tuple[Split, ...]:
    return ("train", "val") if stage == "fit" else tuple(name for name in SPLITS if stage in (None, _STAGE_OF[name]))


def arrays_of_fields(dataset: RowDataset) -> Iterator[ArrayLayout]:
    """Yield the arrays of a dataset's first file, in the order of its fields."""
    return next((fields for _, fields in groupby(dataset.layouts(), lambda layout: layout.path)), iter(()))
