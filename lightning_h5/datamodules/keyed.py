"""What data modules share whose fields are ``x_key`` and ``y_key``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy.typing as npt

from .._lightning import rank_zero_info, rank_zero_warn
from ..datasets import Fields, FieldStats, FileSamples, RowDataset, TableDataset, open_samples, read_stats
from ..errors import H5ValueError, listing
from ..hdf5 import (
    OpenOptions,
    arrays_in,
    field_names,
    fill_split,
    guess_keys_in,
    keys_in,
    kind_of,
    matching_objects,
    resolve_path,
    target_of,
    torch_dtype,
    with_constants,
)
from ..loading.choose_order import Order
from ..order import RowWeights
from ..samples import SegmentChoice, SegmentSubset, column_of, count_rows, rows_without_line, sample_kind
from ..types import IntArray, Keys
from .arguments import SPLITS, SampleArguments, Split, picked
from .base import BaseH5DataModule, Chosen, arrays_of_fields
from .cut_splits import check_split_of_rows, cut_rows, cut_segments
from .training_rows import row_weights, segment_order

__all__ = ["KeyedH5DataModule"]

SPELLINGS = {
    "val": ("valid", "validation", "validate", "dev", "eval", "evaluation"),
    "test": ("testing", "tests", "holdout", "held_out"),
}
"""Other names of a split that files use."""


class SplitSource(NamedTuple):
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

    x_key: Keys | None
    y_key: Keys | None

    def _use_arguments(self, given: Mapping[str, Any]) -> None:
        super()._use_arguments(given)
        self._samples = samples = picked(SampleArguments, given)
        x_key, y_key = samples.x_key, samples.y_key
        if x_key is not None:
            x_key = with_constants(x_key, y_key, self._kind.segments.constants)
        self._infer(x_key=x_key, y_key=y_key)
        self._check_arguments()

    def on_exception(self, exception: BaseException) -> None:
        """Add a note on what to pass to an error about dtypes, if arrays come in the file's dtype; close files."""
        text = str(exception)
        is_of_dtypes = isinstance(exception, RuntimeError | ValueError) and (
            "type" in text or "not implemented for" in text
        )
        if is_of_dtypes or _asks_for_integers(text):
            for note in self._notes_on_dtypes(text):
                exception.add_note(note)
        super().on_exception(exception)

    def _notes_on_dtypes(self, text: str) -> Iterator[str]:
        """Yield what to pass for arrays that come in the file's dtype if the model computes in another one.

        Args:
            text: the error's. Some ask for integers, and some name a dtype with which torch computes hardly anything.
        """
        model, samples = getattr(self.trainer, "lightning_module", None), self._samples
        dtypes = [] if model is None else [each.dtype for each in model.parameters() if each.is_floating_point()]
        if not dtypes or not self._datasets or samples.normalize is not None:
            return
        asks_for_integers = _asks_for_integers(text)
        computes_in = f"{dtypes[0]}".removeprefix("torch.")
        for number, layout in enumerate(arrays_of_fields(next(iter(self._datasets.values())))):
            argument, changes = "y_dtype", samples.target_transform
            if number < len(keys_in(self.x_key)):
                argument, changes = "x_dtype", samples.transform or samples.eval_transform
            stored = layout.dtype.name
            is_named = repr(stored) in text.lower()  # also a transform gets it so
            if (changes is not None or samples.batch_transform is not None) and not is_named:
                continue
            is_class = argument == "y_dtype" and layout.dtype.kind in "iub"
            wanted = ["int64", computes_in] if is_class else [computes_in]
            # Most often classes are meant. An input is meant if there is no target, and an integer one is a class.
            if asks_for_integers and stored != "int64" and not is_class and (argument == "y_dtype" or not self.y_key):
                wanted = ["int64"]
            is_as_stored = getattr(samples, argument) is None and kind_of(layout.dtype) == "number"
            if is_as_stored and stored not in wanted:
                needs = (
                    "torch asks for integers here" if wanted == ["int64"] else f"the model computes in {computes_in}"
                )
                yield (
                    f"lightning_h5: {layout.key!r} is loaded as {stored}, as stored in the file, but {needs}. "
                    f"Pass {argument}={' or '.join(map(repr, wanted))} to the data module."
                )

    def open_split(self, split: Split) -> FileSamples | None:
        """Return the samples of a split; None without data for it."""
        source = self._source(split)
        if source is None:
            return None
        self._catalog.joins.split = source.group
        self._catalog.joins.group = source.group if self._has_groups else ""
        self._catalog.joins.use(self._samples.table)
        x_key, y_key = self._keys(source, split)
        columns = self._weights.keys if split == "train" else []
        if not source.is_cut:
            return self._open(source, split, x_key, y_key, SegmentChoice(columns=columns, others_ask=columns))
        if self._cut is None:
            self._cut = self._cut_files(source, split, x_key, y_key)
        if split not in self._cut:
            return None  # no list names it
        (chosen,) = self._cut[split]
        if isinstance(chosen, SegmentSubset):
            choice = SegmentChoice(subset=chosen, columns=columns, others_ask=self._columns)
            return self._open(source, split, x_key, y_key, choice)
        if not len(chosen) and split != "train" and not self._split.fills(split):
            return None  # a file that says nothing of this split
        return self._open(source, split, x_key, y_key, SegmentChoice(), chosen)

    def _open(
        self,
        source: SplitSource,
        split: Split,
        x_key: Keys,
        y_key: Keys | None,
        choice: SegmentChoice,
        indices: IntArray | None = None,
    ) -> FileSamples:
        """Return samples of a split's files."""
        samples = self._samples
        fields = Fields.of(
            x_key,
            y_key,
            x_dtype=samples.x_dtype,
            y_dtype=None if y_key is None else samples.y_dtype,
            transform=self._transform_of(split),
            target_transform=None if y_key is None else samples.target_transform,
            with_index=samples.with_index,
            as_one=self._kind.has_mask,
            decode=samples.decode,
        )
        return open_samples(
            source.files,
            fields,
            replace(self._kind, seed=self.seed or 0),
            self._options.files,
            self._catalog,
            normalize=self._statistics(source),
            collate=self._options.collate,
            choice=choice,
            indices=indices,
            batch_transform=samples.batch_transform,
        )

    @property
    def _columns(self) -> list[str]:
        """Arrays with values of segments that splits and weights ask for."""
        return [*self._split.columns, *self._weights.keys]

    def _cut_files(
        self, source: SplitSource, split: Split, x_key: Keys, y_key: Keys | None
    ) -> Mapping[Split, Sequence[Chosen]]:
        """Return the rows, or the segments, of each split of the training files."""
        opened = OpenOptions(files=self._options.files)
        kind = replace(self._kind, seed=self.seed or 0)
        if sample_kind(self._catalog, source.files, keys_in(x_key, y_key), opened, kind).has_segments:
            choice = SegmentChoice(columns=self._split.columns, others_ask=self._columns)
            table = self._open(source, split, x_key, y_key, choice).table
            return cut_segments([table], self._split, self._catalog, opened, self._paths)
        check_split_of_rows(self._split)
        return {split: [rows] for split, rows in self._cut_rows(source.files, x_key).items()}

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """See ``BaseH5DataModule.order_of``; in batches of segments of similar length if these are asked for."""
        return segment_order(super().order_of(dataset, shuffles=shuffles), dataset, self._kind.segments)

    def _source(self, split: Split) -> SplitSource | None:
        own, training = self._paths[split], self._paths["train"]
        if own is not None:
            return SplitSource(
                self._catalog.files(own, f"{split}_path"), split, split == "train" and self._split.is_given
            )
        if training is None or split == "train":
            return None
        files = self._catalog.files(training, "train_path")
        if self._split.may_fill(split):
            return SplitSource(files, "train", is_cut=True)
        keys = arrays_in(self.x_key, self.y_key, of_others=False)
        filled = [str(fill_split(key, split)) for key in keys]
        if filled == keys:
            return None
        if self._has(files[0], filled):
            return SplitSource(files, split)
        self._warn_of_spellings(files[0], keys, split)
        return None

    def _warn_of_spellings(self, path: str, keys: Sequence[str], split: Split) -> None:
        """Warn if arrays of a split are missing, and the file has some under another name of the split."""
        key = next(key for key in keys if "{split}" in key)
        above, _, after = key.strip("/").partition("{split}")
        group, _, before = above.rpartition("/")
        after, options = after.partition("/")[0], OpenOptions(files=self._options.files)
        allow_external = options.files.allow_external

        def names_of_group(file: Any) -> tuple[list[str], list[str]]:
            target = target_of(file, file, group, allow_external=allow_external) if group else None
            if group and (target is None or target.kind != "group"):
                return [], []
            return list(resolve_path(file, group, allow_external=allow_external)[0] if group else file), []

        found = [] if "*" in group else self._catalog.search(path, options, f"names in {group!r}", names_of_group)
        own = f"{before}{split}{after}"
        spellings = {f"{before}{name}{after}".casefold() for name in (split, *SPELLINGS.get(split, ()))}
        other = next((name for name in found if name.casefold() in spellings), None)
        if own in found:
            self._log_once(
                f"there is no {split!r} split: {path!r} has {f'{group}/{own}'.strip('/')!r}, but not all arrays that "
                f"{listing(keys)} name there. Write them, or pass {split}_path.",
                log=rank_zero_warn,
            )
        elif other is not None:
            wanted, link = (f"{group}/{name}".strip("/") for name in (own, other))
            self._log_once(
                f"there is no {split!r} split: {key!r} names {wanted!r}, and {path!r} has {listing(found)}"
                f"{f' in {group!r}' if group else ''}. If {link!r} is meant, write a link to it: "
                f"file[{wanted!r}] = h5py.SoftLink('/{link}').",
                log=rank_zero_warn,
            )

    def expected_arrays(self) -> tuple[list[str], list[str]]:
        """See ``BaseH5DataModule.expected_arrays``."""
        keys = dict.fromkeys([*keys_in(self.x_key, self.y_key), *arrays_in(self.x_key, self.y_key)])
        fields = [str(fill_split(key, split)) for key in keys for split in SPLITS]
        lists = [] if self._split.column else [self._split.list_of(split) for split in SPLITS]
        columns = [*self._split.columns, *self._weights.keys]
        fields += [key for key in lists if key is not None]
        return fields, [str(fill_split(key, "train")) for key in columns]

    def _statistics(self, source: SplitSource) -> Mapping[str, FieldStats] | None:
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
        own = arrays_in(x_key, self.y_key, of_others=False) or arrays_in(x_key)
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

    def weights_of_rows(self, dataset: TableDataset) -> RowWeights:
        """Return how often each sample of the training files is to come."""

        def column(key: str, argument: str) -> npt.NDArray[Any]:
            if key in dataset.table.columns:
                return dataset.table.values_of_samples(key)
            found, rows = self._column(dataset.table.paths, key, dataset.table.n_rows, argument), dataset.indices
            return found if rows is None else found[rows]

        return row_weights(self._weights, column)

    def _column(self, files: tuple[str, ...], key: str, n_rows: int, argument: str) -> npt.NDArray[Any]:
        """One value of each row of the training files."""
        own = key.replace("{split}", "train")
        opened, catalog = self._options.files, self._catalog
        first = arrays_in(self.x_key)[0].replace("{split}", "train") if opened.swmr else None
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
        if self.x_key is None and self._kind.segments.groups is not None:
            raise H5ValueError(
                f"segments.groups={self._kind.segments.groups!r} was given without x_key, and arrays of groups are not "
                "guessed. Pass x_key, with names relative to a group; `lightning-h5 inspect FILE` suggests some."
            )
        for dtype, name in ((samples.x_dtype, "x_dtype"), (samples.y_dtype, "y_dtype")):
            for one in dtype.values() if isinstance(dtype, dict) else [dtype]:
                torch_dtype(one, name)
        if samples.target_transform is not None and self.y_key is None and self.x_key is not None:
            raise H5ValueError("target_transform was given without y_key. Pass y_key, or leave target_transform out.")

    def _keys(self, source: SplitSource, split: Split) -> tuple[Keys, Keys | None]:
        """The arrays of a split; guessed from its first file where none are named."""
        if self.x_key is None:
            path = source.files[0]

            def guess(file: Any) -> tuple[tuple[str, str | None], list[str]]:
                found = guess_keys_in(file, path)
                return found, keys_in(*found)

            x, y = self._catalog.search(path, OpenOptions(files=self._options.files), "keys", guess)
            self._infer(x_key=x, y_key=y)
            rank_zero_info(f"Inferred x_key={self.x_key!r}, y_key={self.y_key!r} from {source.files[0]!r}.")
        x_key = fill_split(cast("Keys", self.x_key), source.group)
        y_key = None if self.y_key is None else fill_split(self.y_key, source.group)
        own = arrays_in(y_key, of_others=False)
        is_elsewhere = any(map(self._catalog.joins.is_column, own)) or own != arrays_in(y_key)
        if split == "predict" and (is_elsewhere or not self._has(source.files[0], y_key)):
            rank_zero_info(f"predicting without a target: {y_key!r} is not in {source.files[0]!r}")
            y_key = None
        return x_key, y_key

    def _has(self, path: str, keys: Keys | None) -> bool:
        names, opened = arrays_in(keys), OpenOptions(files=self._options.files)
        patterns = [name for name in names if "*" in name]
        for pattern in patterns:

            def matches(file: Any, pattern: str = pattern) -> tuple[bool, list[str]]:
                found = matching_objects(
                    file, path, pattern, "array", allow_external=self._options.files.allow_external, may_lack=True
                )
                return bool(found), []

            if not self._catalog.search(path, opened, f"arrays like {pattern!r}", matches):
                return False
        others = [name for name in names if name not in patterns]
        return not others or self._catalog.has(path, others, opened)


def _asks_for_integers(text: str) -> bool:
    """Return whether an error of torch asks for class numbers or indices: "expected scalar type Long"."""
    asked, _, _ = text.partition("but")
    return bool(re.search(r"\b([Ll]ong|LongTensor|int32/int64)\b", asked)) and "desired output type" not in asked
