"""The base of data modules that read files: one set of arguments, and the same batches from disk or from memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from .._lightning import rank_zero_info, rank_zero_warn
from ..catalog import bad_files
from ..datasets import FileSamples, MixtureDataset, RowDataset, TableDataset, mixture_dataset, weighted_dataset
from ..errors import H5ValueError, listing
from ..hdf5 import (
    OpenOptions,
    arrays_in,
    expand_user,
    field_names,
    fill_split,
    keys_in,
    kind_of,
    name_objects,
    resolve_path,
    target_of,
    torch_dtype,
    with_constants,
)
from ..loading.choose_order import Order, choose_mixed_order
from ..options import MixtureOptions
from ..order import Mixture, RowWeights, check_mixture
from ..samples import NoRowPassesError
from ..types import Keys
from .arguments import SPLITS, SampleArguments, Split, parsed_fields, picked
from .base import BaseH5DataModule, arrays_of_fields
from .cut_sources import check_kinds, columns_of_sources, cut_sources, refuse_images_of_sources
from .dtypes_of_fields import check_x_dtype, is_settled_late
from .source_files import Reading, SourceFiles, has_keys
from .training_rows import Source, SourceMixture, mixture_recipe, row_weights, segment_order, token_recipe, weights_of

__all__ = ["FilesH5DataModule"]

SPELLINGS = {
    "val": ("valid", "validation", "validate", "dev", "eval", "evaluation"),
    "test": ("testing", "tests", "holdout", "held_out"),
}
"""Other names for a split in files."""


class SplitData(NamedTuple):
    """The source of a split's rows: its own files, its group in the training files, or a share of their rows.

    Attributes:
        sources: the files.
        group: value of ``{split}`` in the keys.
        is_cut: whether the split has a share of the files' rows (see ``cut_rows``).
        is_mixed: whether the mixture defines the sources.
    """

    sources: tuple[Source, ...]
    group: Split
    is_cut: bool = False
    is_mixed: bool = False


class FilesH5DataModule(BaseH5DataModule):
    """Splits of files, with one set of arguments. Subclasses create the datasets: ``dataset_of``.

    Args:
        arguments: the constructor's arguments by name.
    """

    x_key: Keys | None
    y_key: Keys | None
    loads_all = False
    """Whether all arrays are fields if no keys are passed; otherwise an input and a target are inferred."""
    cannot_mix: str | None = None
    """The reason for not supporting mixtures; None if they are supported."""

    def _use_arguments(self, arguments: Mapping[str, Any]) -> None:
        super()._use_arguments(arguments)
        self._samples = samples = picked(SampleArguments, arguments)
        x_key, y_key = samples.x_key, samples.y_key
        if x_key is not None:
            x_key = with_constants(x_key, y_key, self._kind.segments.constants)
        self._infer(x_key=x_key, y_key=y_key)
        self._bad = bad_files(samples.on_bad_file)
        mixture = arguments["mixture"]
        if mixture is not None and self.cannot_mix is not None:
            raise H5ValueError(f"mixture was given to {type(self).__name__}, {self.cannot_mix}")
        self._mixture = None if mixture is None else SourceMixture.parse(MixtureOptions.parse(mixture, "mixture"))
        self._check_arguments()

    def _forget_cuts(self) -> None:
        super()._forget_cuts()
        self._bad = bad_files(self._samples.on_bad_file)

    def _check_arguments(self) -> None:
        samples, groups = self._samples, self._kind.segments.groups
        for source in self._training_sources or (Source("train", (), {}, ""),):
            own = self._arguments_of(source)
            SourceFiles(self._reading(), source, own, "train").filters  # noqa: B018  # raises for invalid filters
            self._check_keys(own)
        check_x_dtype(
            samples.x_dtype, is_of_fields=samples.fields is not None or (self.x_key is None and self.loads_all)
        )
        for dtype in samples.y_dtype.values() if isinstance(samples.y_dtype, dict) else [samples.y_dtype]:
            torch_dtype(dtype, "y_dtype")
        if self.has_no_keys and groups is not None and not self.loads_all:
            raise H5ValueError(
                f"segments.groups={groups!r} was given without x_key or fields, and arrays of groups are not inferred. "
                "Pass x_key or fields, with names relative to a group; `lightning-h5 inspect FILE` suggests names."
            )
        if self._mixture is not None:
            self._check_mixture(self._mixture)
        if self._kind.segments.max_tokens is not None and self._weights.is_given:
            raise H5ValueError(
                "segments.max_tokens cannot be combined with weights: other samples in each epoch would change the "
                "number of batches. Remove one of them."
            )

    @property
    def has_no_keys(self) -> bool:
        """Whether no argument names arrays of samples."""
        return self.x_key is None and self._samples.fields is None

    def _check_keys(self, samples: SampleArguments) -> None:
        for keys, name in ((samples.x_key, "x_key"), (samples.y_key, "y_key")):
            if keys is not None:
                field_names(keys, name)
        if samples.x_key is None and samples.y_key is not None:
            raise H5ValueError(f"y_key={samples.y_key!r} was given without x_key. Pass both.")
        lacks_target = samples.y_key is None and (samples.x_key is not None or self.loads_all)
        for name in ("target_transform", "y_dtype"):
            if getattr(samples, name) is not None and lacks_target:
                raise H5ValueError(f"{name} was given without y_key. Pass y_key, or leave {name} out.")

    def _check_mixture(self, mixture: SourceMixture) -> None:
        if self._kind.segments.bucket:
            raise H5ValueError("segments.bucket cannot be combined with a mixture. Remove one of them.")
        if self._kind.segments.max_tokens is not None and mixture.mixes_rows:
            raise H5ValueError(
                "segments.max_tokens cannot be combined with mixture.mix='rows': it fills each batch from one source. "
                "Pass mix='batches', or strategy='concat', which joins all samples."
            )
        if self._paths["train"] is not None:
            raise H5ValueError("train_path and mixture were given; both name the training files. Pass one.")
        options = mixture.options
        if self._weights.is_given and (options.strategy, options.epoch_length) != ("concat", "sum"):
            raise H5ValueError(
                f"weights cannot be combined with a mixture of strategy={options.strategy!r} and "
                f"epoch_length={options.epoch_length!r}: both decide how often rows are drawn. Remove weights, or pass "
                "strategy='concat' with epoch_length='sum'."
            )

    def on_exception(self, exception: BaseException | None = None) -> None:
        """Close files, and add advice to an error about dtypes.

        Raises:
            H5ValueError: a Trainer received the class instead of an instance.
        """
        if exception is None:  # called on the class, where the exception is in the place of an instance
            raise H5ValueError(
                "the Trainer received the class of a data module instead of an instance. Pass an instance, such as "
                "datamodule=LazyH5DataModule('train.h5', ...)."
            ) from None
        text = str(exception)
        is_of_dtypes = isinstance(exception, RuntimeError | ValueError) and (
            "type" in text or "not implemented for" in text
        )
        if is_of_dtypes or _asks_for_integers(text):
            for note in self._notes_on_dtypes(text):
                exception.add_note(note)
        if isinstance(exception, TypeError | AttributeError) and re.search(r"\blist\b", text):
            for note in map(_advice_about_text, self._text_targets()):
                exception.add_note(f"lightning_h5: {note}")
        super().on_exception(exception)

    def _notes_on_dtypes(self, text: str) -> Iterator[str]:
        """Yield advice on dtype arguments, for arrays whose stored dtype the model does not support.

        Args:
            text: message of the error. It may require integers, or name a dtype that few torch operations support.
        """
        model, samples = getattr(self.trainer, "lightning_module", None), self._samples
        weights = () if model is None else model.parameters()
        dtypes = [weight.dtype for weight in weights if weight.is_floating_point()]
        if not dtypes or not self._datasets or samples.normalize is not None:
            return
        asks_for_integers = _asks_for_integers(text)
        computes_in = f"{dtypes[0]}".removeprefix("torch.")
        x_key, _ = self._named_keys
        for number, layout in enumerate(arrays_of_fields(next(iter(self._datasets.values())))):
            argument, changes = "y_dtype", samples.target_transform
            if x_key is None or number < len(keys_in(x_key)):
                argument, changes = "x_dtype", samples.transform or samples.eval_transform
            is_auto = argument == "x_dtype" and is_settled_late(samples.x_dtype, is_of_fields=False)
            stored = "float32" if is_auto and layout.dtype == "f8" else layout.dtype.name
            is_named = repr(stored) in text.lower()  # transforms receive this dtype, too
            if (changes is not None or samples.batch_transform is not None) and not is_named:
                continue
            is_target = argument == "y_dtype"
            choices = ["int64", computes_in] if is_target and layout.dtype.kind in "iub" else [computes_in]
            # Errors that ask for integers are usually about class numbers: the target, or the input without a target.
            if asks_for_integers and stored != "int64" and (is_target or not self.y_key):
                choices = ["int64"]
            if is_target and _asks_for_floats(text):
                choices = [computes_in]
            is_as_stored = (is_auto or getattr(samples, argument) is None) and kind_of(layout.dtype) == "number"
            if is_as_stored and stored not in choices:
                needs = (
                    "torch requires integers here" if choices == ["int64"] else f"the model computes in {computes_in}"
                )
                as_in_file = ", as stored in the file" if stored == layout.dtype.name else ""
                yield (
                    f"lightning_h5: {layout.key!r} is loaded as {stored}{as_in_file}, but {needs}. "
                    f"Pass {argument}={' or '.join(map(repr, choices))} to the data module."
                )

    def setup(self, stage: str | None = None) -> None:
        """See ``BaseH5DataModule.setup``."""
        super().setup(stage)
        for key in self._text_targets():
            self._log_once(_advice_about_text(key))

    def _text_targets(self) -> list[str]:
        """Return the arrays of the target that are text; batches have them as lists of str."""
        x_key, y_key = self._named_keys
        is_changed = self._samples.target_transform is not None or self._samples.batch_transform is not None
        if x_key is None or y_key is None or is_changed or not self._datasets:
            return []
        layouts = [*arrays_of_fields(next(iter(self._datasets.values())))][len(keys_in(x_key)) :]
        return [layout.key for layout in layouts if kind_of(layout.dtype) == "text"]

    # Sources -------------------------------------------------------------------------------------------------

    @property
    def _named_keys(self) -> tuple[Keys | None, Keys | None]:
        """The input and the target, as passed or inferred."""
        named, _ = parsed_fields(self._samples.fields)
        return (self.x_key, self.y_key) if named is None else (named, None)

    @property
    def _training_sources(self) -> tuple[Source, ...]:
        return self._own_files("train") if self._mixture is None else self._mixture.sources

    def _training_files(self) -> Sequence[str]:
        """See ``BaseH5DataModule._training_files``; bad files are left out."""
        if not (sources := self._own_files("train")):
            return ()
        files = SourceFiles(self._reading(), sources[0], self._arguments_of(sources[0]), "train")
        return files.readable

    def _own_files(self, split: Split) -> tuple[Source, ...]:
        paths = self._paths[split]
        return () if paths is None else (Source(split, paths, {}, f"{split}_path"),)

    def _reading(self) -> Reading:
        """How files are read."""
        return Reading(
            self._catalog,
            self._options.files,
            replace(self._kind, seed=self.seed or 0),
            self._options.collate,
            self._bad,
            self.loads_all,
            [*self._split.columns, *self._weights.keys],
            keeps_apart=self._mixture is not None and self._mixture.in_batches,
        )

    def _arguments_of(self, source: Source) -> SampleArguments:
        """Return the arguments for a source, with its own arguments and inferred keys."""
        inferred = {} if self._samples.fields is not None else {"x_key": self.x_key, "y_key": self.y_key}
        return replace(self._samples, **inferred | dict(source.own))

    def _files_of(self, data: SplitData, split: Split) -> list[SourceFiles]:
        """Return the files of a split's sources."""
        reading, lacks_target = self._reading(), split == "predict"
        files = [
            SourceFiles(reading, source, self._arguments_of(source), data.group, without_target=lacks_target)
            for source in data.sources
        ]
        if self.has_no_keys and not self.loads_all and not data.is_mixed:
            x, y = files[0].keys
            self._infer(x_key=x, y_key=y)
            rank_zero_info(f"Inferred x_key={x!r}, y_key={y!r} from {files[0].first!r}.")
            return self._files_of(data, split)
        return files

    def _data_of(self, split: Split) -> SplitData | None:
        """Return the source of a split's rows; None if the arguments name no data for it."""
        training = self._training_sources
        is_mixed = self._mixture is not None
        if split == "train":
            return SplitData(training, split, self._split.is_given, is_mixed) if training else None
        if own := self._own_files(split):
            return SplitData(own, split)
        if not training:
            return None
        if self._split.may_fill(split):
            return SplitData(training, "train", is_cut=True, is_mixed=is_mixed)
        keys = arrays_in(*self._named_keys, of_others=False)
        filled = [str(fill_split(key, split)) for key in keys]
        if filled == keys or is_mixed:
            return None
        data = SplitData(training, split)
        (files,) = self._files_of(data, split)
        if has_keys(files.reading, files.first, filled):
            return data
        self._warn_of_spellings(files.first, keys, split)
        return None

    @property
    def _has_groups(self) -> bool:
        """Whether each split has arrays of its own."""
        return any("{split}" in key for key in keys_in(*self._named_keys))

    def names_data(self, split: Split) -> bool:
        """See ``BaseH5DataModule.names_data``."""
        is_mixed = self._mixture is not None and (split == "train" or self._split.may_fill(split))
        has_group = self._has_groups and split != "train" and self._paths["train"] is not None
        return super().names_data(split) or is_mixed or has_group

    def missing_data_hint(self, split: Split) -> str:
        """See ``BaseH5DataModule.missing_data_hint``."""
        if split == "train" and isinstance(self._split.key, Mapping) and self._training_sources:
            return f"split.key={self._split.key!r} has no entry 'train'. Add the array that lists its segments."
        return super().missing_data_hint(split)

    def other_data(self, split: Split) -> list[str]:
        """See ``BaseH5DataModule.other_data``."""
        if split == "train":
            return ["mixture"] if self.cannot_mix is None else []
        return ["train_path and keys with {split} in them"]

    def expected_arrays(self) -> tuple[list[str], list[str]]:
        """See ``BaseH5DataModule.expected_arrays``."""
        lists = [] if self._split.column else [self._split.list_of(split) for split in SPLITS]
        columns = [*self._split.columns, *self._weights.keys, *self._kind.segments.cut_keys]
        fields = [key for key in lists if key is not None]
        of_filters: list[str] = []
        for source in self._training_sources or (Source("train", (), {}, ""),):
            files = SourceFiles(self._reading(), source, self._arguments_of(source), "{split}")
            named, _ = parsed_fields(files.samples.fields)
            both = (files.samples.x_key, files.samples.y_key) if named is None else (named, None)
            by_name = {
                name: key
                for part in (field_names(keys, "key") for keys in both if keys is not None)
                for name, key in zip(part.names, part.keys, strict=True)
            }
            fields += [
                *keys_in(*both),
                *arrays_in(*both),
                *(by_name.get(name, name) for name in files.filters.of_label),
            ]
            of_filters += [by_name.get(name, name) for name in [*columns, *files.filters.columns]]
        fields = [str(fill_split(key, split)) for key in dict.fromkeys(fields) for split in SPLITS]
        return fields, [str(fill_split(key, "train")) for key in of_filters]

    def _warn_of_spellings(self, path: str, keys: Sequence[str], split: Split) -> None:
        """Warn if arrays of a split are missing, but exist under another name of the split."""
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

        names = [] if "*" in group else self._catalog.search(path, options, f"names in {group!r}", names_of_group)
        own = f"{before}{split}{after}"
        spellings = {f"{before}{name}{after}".casefold() for name in (split, *SPELLINGS.get(split, ()))}
        synonym = next((name for name in names if name.casefold() in spellings), None)
        if own in names:
            self._log_once(
                f"there is no {split!r} split: {path!r} has {f'{group}/{own}'.strip('/')!r}, but not all arrays that "
                f"{listing(keys)} name there. Write them, or pass {split}_path.",
                log=rank_zero_warn,
            )
        elif synonym is not None:
            link, target = (f"{group}/{name}".strip("/") for name in (own, synonym))
            self._log_once(
                f"there is no {split!r} split: {key!r} names {link!r}, and {path!r} has {listing(names)}"
                f"{f' in {group!r}' if group else ''}. If {target!r} is meant, write a link to it: "
                f"file[{link!r}] = h5py.SoftLink('/{target}').",
                log=rank_zero_warn,
            )

    # Datasets ------------------------------------------------------------------------------------------------

    def dataset_of(self, samples: FileSamples, split: Split, *, n_sources: int = 1) -> TableDataset:
        """Return a dataset of a split, or of one source of a split.

        Args:
            samples: the samples.
            split: the split.
            n_sources: number of sources that share the memory for rows.
        """
        raise NotImplementedError

    def weigh(self, dataset: RowDataset, weights: RowWeights) -> RowDataset:
        """Return a dataset that repeats rows by their weights."""
        return weighted_dataset(dataset, weights)

    def build_dataset(self, split: Split) -> RowDataset | None:
        """Return the dataset of a split, or None without data for it."""
        self._refuse_keys_as_paths()
        if (data := self._data_of(split)) is None:
            return None
        joins = self._catalog.joins
        joins.split, joins.group = data.group, data.group if self._has_groups else ""
        joins.use(self._samples.table)
        files = self._files_of(data, split)
        chosen: Sequence[Any] = [None] * len(files)
        if data.is_cut:
            if self._cut is None:
                self._cut = cut_sources(files, self._split, self._paths)
            if split not in self._cut.parts:
                return None  # no list names this split
            chosen = self._cut.parts[split]
            if not any(map(len, chosen)):
                if split != "train" and not self._split.fills(split):
                    return None  # the file has no entry for this split
                raise H5ValueError(f"the split {split!r} has no rows. {self.why_no_rows(split)}")
        columns = self._weights.keys if split == "train" else []
        dataset: RowDataset
        if data.is_mixed:
            dataset, opened = self._mixed(split, files, chosen, columns)
        else:
            samples = self._opened(files[0], chosen[0], f"the data of {split!r}", columns, **self._of_samples(split))
            single = self.dataset_of(samples, split)
            dataset, opened = single, [(files[0], single)]
        if not columns:
            return dataset

        def column(name: str, argument: str) -> Any:
            parts = [(source, of_source.table, of_source.indices) for source, of_source in opened]
            return columns_of_sources(parts, name, argument)

        return self.weigh(dataset, row_weights(self._weights, column))

    def _refuse_keys_as_paths(self) -> None:
        """Raise an ``H5ValueError`` if keys were passed by position, as the paths of other splits."""
        paths = {split: path for split, path in self._paths.items() if split != "train" and isinstance(path, str)}
        absent = {split: path for split, path in paths.items() if not os.path.exists(expand_user(path))}
        own = self._own_files("train")
        if not absent or not own or name_objects(own[0].paths, *absent.values()):
            return
        files = SourceFiles(self._reading(), own[0], self._arguments_of(own[0]), "train")
        keys = {split: path for split, path in absent.items() if has_keys(files.reading, files.first, [path])}
        if keys:
            paths_text = ", ".join(f"{split}_path={key!r}" for split, key in keys.items())
            named = zip(("x_key", "y_key"), keys.values(), strict=False)
            raise H5ValueError(
                f"{paths_text}: no such file, but {files.first!r} has {'an array' if len(keys) == 1 else 'arrays'} of "
                f"this name. Pass keys by name: {', '.join(f'{name}={key!r}' for name, key in named)}."
            )

    def _of_samples(self, split: Split) -> dict[str, Any]:
        samples = self._samples
        return {
            "transform": self._transform_of(split),
            "target_transform": samples.target_transform,
            "batch_transform": samples.batch_transform,
        }

    def _opened(
        self, files: SourceFiles, rows: Any, subject: str, columns: Sequence[str], **of_samples: Any
    ) -> FileSamples:
        try:
            return files.open(rows, columns=columns, **of_samples)
        except NoRowPassesError as error:
            raise NoRowPassesError(f"{subject}: {error}") from error

    def _mixed(
        self, split: Split, files: Sequence[SourceFiles], chosen: Sequence[Any], columns: Sequence[str]
    ) -> tuple[MixtureDataset, list[tuple[SourceFiles, TableDataset]]]:
        """Return the sources that have rows in a split as one dataset."""
        check_kinds(files)
        nothing = dict.fromkeys(self._of_samples(split))
        opened: list[tuple[SourceFiles, FileSamples]] = []
        lacking: list[H5ValueError] = []
        for source, rows in zip(files, chosen, strict=True):
            subject = f"the source {source.source.name!r} of {split!r}"
            try:
                opened.append((source, self._opened(source, rows, subject, columns, **nothing)))
            except NoRowPassesError as error:
                # A named source must have rows to train on, but a small one may have none to evaluate on.
                if split == "train":
                    raise
                lacking.append(error)
            except H5ValueError as error:
                raise H5ValueError(f"{subject}: {error}") from error
        if not opened:
            raise lacking[0]
        if self._kind.sample is None:
            refuse_images_of_sources([samples for _, samples in opened])
        datasets = [(source, self.dataset_of(samples, split, n_sources=len(files))) for source, samples in opened]
        named = {source.source.name: of_source for source, of_source in datasets}
        mixes = split != "train" or self._mixture is None or not self._mixture.in_batches
        return mixture_dataset(
            named, mixes=mixes, **self._of_samples(split), with_index=self._samples.with_index
        ), datasets

    # Order ---------------------------------------------------------------------------------------------------

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """See ``BaseH5DataModule.order_of``; also for mixtures, and for segments by length."""
        segments, packs = self._kind.segments, self._options.collate == "pack"
        if (mixture := self._mixture_of(dataset)) is None:
            order = segment_order(super().order_of(dataset, shuffles=shuffles), dataset, segments)
            tokens = token_recipe(dataset, segments, packs=packs)
            return order if tokens is None else order._replace(recipe=tokens)
        sources = [dataset] if mixture.strategy == "concat" else cast("MixtureDataset", dataset).sources
        return choose_mixed_order(
            mixture_recipe(mixture, sources, segments, packs=packs),
            sources,
            self._shuffle(shuffles),
            world_size=self.world_size or 1,
            num_workers=self._options.num_workers,
            memory=self._free_memory,
            saved_modes=self.kept_modes(),
        )

    def read_with(self, dataset: RowDataset, order: Order, cache_bytes: int, *, training: bool) -> None:
        """See ``BaseH5DataModule.read_with``; each source has its own order."""
        if len(order.sources) < 2:
            super().read_with(dataset, order.sources[0] if order.sources else order, cache_bytes, training=training)
            return
        total = max(1, sum(of_source.cache_bytes for of_source in order.sources))
        for source, of_source in zip(cast("MixtureDataset", dataset).sources, order.sources, strict=True):
            super().read_with(source, of_source, cache_bytes * of_source.cache_bytes // total, training=training)

    def _mixture_of(self, dataset: RowDataset) -> Mixture | None:
        """Return the mixture of the training sources; None for other splits."""
        if self._mixture is None or dataset is not self._datasets.get("train") or weights_of(dataset) is not None:
            return None
        return self._mixture.of_rows([len(source) for source in cast("MixtureDataset", dataset).sources])

    def _check_rows(self, split: Split, n_rows: int) -> None:
        dataset = self._datasets[split]
        if (mixture := self._mixture_of(dataset)) is None:
            super()._check_rows(split, n_rows)
            return
        max_tokens = self._kind.segments.max_tokens
        check_mixture(mixture, self.batch_size, self._options.drop_last and max_tokens is None)
        if not len(self.sampler_of(dataset, self._order(dataset, training=True), training=True)):
            name, size = ("batch_size", self.batch_size) if max_tokens is None else ("segments.max_tokens", max_tokens)
            raise H5ValueError(
                f"an epoch of {mixture.text} with epoch_length={mixture.epoch_length!r} has no step for "
                f"{self.world_size} ranks of {name} {size}. Make {name} smaller, or use fewer devices."
            )
        if max_tokens is not None:
            self._check_token_batches(dataset)


def _asks_for_integers(text: str) -> bool:
    """Return whether an error of torch asks for class numbers or indices: "expected scalar type Long"."""
    request, _, _ = text.partition("but")
    return bool(re.search(r"\b([Ll]ong|LongTensor|int32/int64)\b", request)) and not _asks_for_floats(text)


def _asks_for_floats(text: str) -> bool:
    """Return whether an error of torch asks for a target of floats: "Found dtype Long but expected Float"."""
    return "desired output type" in text or bool(re.search(r"but expected (Float|Double|Half|BFloat16)\b", text))


def _advice_about_text(key: str) -> str:
    """Return advice on the argument ``decode`` for a target that is text."""
    return (
        f"{key!r} is text; a batch has it as a list of str. If a loss needs numbers, pass "
        f"decode={{{key!r}: 'category'}} for class numbers."
    )
