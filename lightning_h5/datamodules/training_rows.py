"""The rows of a training epoch, from the arguments: sources and mixtures, weighted rows, segments by length."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ..datasets import MixtureDataset, RowDataset, TableDataset, checked_step_counts
from ..errors import H5ValueError, listing, near
from ..loading.choose_order import Order
from ..options import MixtureOptions, SegmentOptions, WeightOptions
from ..order import (
    LengthRecipe,
    Mixture,
    MixtureRecipe,
    RankShard,
    RowWeights,
    TokenMixtureRecipe,
    TokenRecipe,
    WeightSchedule,
)
from ..samples import RowTable
from ..types import IntArray

__all__ = [
    "OF_A_SOURCE",
    "Source",
    "SourceMixture",
    "mixture_recipe",
    "row_weights",
    "segment_ends",
    "segment_order",
    "segments_left_out",
    "segments_without_steps",
    "token_recipe",
    "weights_of",
]

OF_A_SOURCE = ("x_key", "y_key", "fields", "where", "label", "valid_mask")
"""Arguments that a source can replace."""


@dataclass(frozen=True, eq=False)
class Source:
    """A source of a data module.

    Attributes:
        name: name in samples, logs and errors.
        paths: its files.
        own: arguments that replace the data module's.
        argument: the argument with its files, for errors.
    """

    name: str
    paths: Any
    own: Mapping[str, Any]
    argument: str


@dataclass(frozen=True)
class SourceMixture:
    """Sources, and how they are mixed.

    Attributes:
        options: the options of the mixture.
        sources: the sources, in their order.
    """

    options: MixtureOptions
    sources: tuple[Source, ...]

    @classmethod
    def parse(cls, options: MixtureOptions) -> SourceMixture:
        """Return the mixture that options describe.

        Raises:
            H5ValueError: a source or a number is invalid.
        """
        mixture = cls(options, _sources(options.sources))
        mixture.of_rows([1] * len(mixture.sources))  # raises for settings that no number of rows can satisfy
        return mixture

    @property
    def in_batches(self) -> bool:
        """Whether each batch has rows of one source."""
        return self.of_rows([0] * len(self.sources)).in_batches

    @property
    def mixes_rows(self) -> bool:
        """Whether batches mix rows of several sources."""
        return self.options.mix == "rows" and self.options.strategy != "concat"

    def of_rows(self, n_rows: Sequence[int]) -> Mixture:
        """Return the mixture for sources with the given numbers of rows."""
        names, options = [source.name for source in self.sources], self.options
        return Mixture(
            names=tuple(names),
            n_rows=tuple(n_rows),
            strategy=options.strategy,
            unit=options.mix,
            weights=_weights_over_run(options, names),
            pattern=_pattern(options.pattern, names) if options.strategy == "alternating" else (),
            epoch_length=options.epoch_length,
        )


def _sources(setting: Any) -> tuple[Source, ...]:
    named: list[tuple[Any, Any]] = []
    if isinstance(setting, Mapping):
        named = list(setting.items())
    elif isinstance(setting, Sequence) and not isinstance(setting, str):
        named = [(None, value) for value in setting]
    if not named:
        raise H5ValueError(
            f"mixture.sources={setting!r} names no source. Pass a mapping from names to files, or to mappings such as "
            "{'paths': 'site_a/*.h5', 'label': 2}."
        )
    sources = [_source(name, value) for name, value in named]
    names = [source.name for source in sources]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise H5ValueError(f"mixture has several sources named {listing(twice)}. Give each its own name.")
    return tuple(sources)


def _source(name: Any, value: Any) -> Source:
    own = dict(value) if isinstance(value, Mapping) else {"paths": value}
    name, paths = own.pop("name", name), own.pop("paths", None)
    if paths is None:
        raise H5ValueError(f"the source {name!r} has no files: {value!r}. Pass its paths.")
    if unknown := [key for key in own if key not in OF_A_SOURCE]:
        raise H5ValueError(
            f"the source {name!r} has the unknown settings {listing(unknown)}. A source can set {listing(OF_A_SOURCE)}."
        )
    if not isinstance(paths, str | os.PathLike | Sequence):
        raise H5ValueError(
            f"the source {name!r} has the files {paths!r}. Pass a path, a glob, or a list of paths and globs."
        )
    if name is None and (isinstance(paths, str) or not isinstance(paths, Sequence)):
        name = Path(paths).stem
    if name is None:
        raise H5ValueError(f"the source of the files {paths!r} has no name. Pass a mapping from names to files.")
    return Source(str(name), paths, own, f"mixture[{name!r}]")


def _weights_over_run(options: MixtureOptions, names: Sequence[str]) -> tuple[float, ...] | WeightSchedule | None:
    """Return the weights of the sources, or a schedule of them if they change."""
    weights = options.weights
    if not options.has_schedule:
        return None if weights is None else _source_weights(weights, names)
    steps = dict(cast("Mapping[Any, Any]", weights))
    schedule = WeightSchedule(
        _schedule_steps(steps),
        tuple(_source_weights(step_weights, names, f" at step {step}") for step, step_weights in steps.items()),
        options.between,
    )
    if len(schedule.steps) == 1:
        return schedule.weights[0]
    if options.epoch_length in ("max", "min"):
        raise H5ValueError(
            f"epoch_length={options.epoch_length!r} cannot be combined with weights that change: the length of epochs "
            "would change as well. Pass 'sum' or a number of steps."
        )
    return schedule


def _schedule_steps(steps: Iterable[Any]) -> tuple[int, ...]:
    """Return the steps of a schedule of weights.

    Raises:
        H5ValueError: the steps are not whole numbers in ascending order, or do not begin with 0.
    """
    numbers: list[int] = []
    for step in steps:
        text = str(step)  # keys of a configuration may be text
        if isinstance(step, bool) or not text.isdecimal():
            raise H5ValueError(
                f"weights has the step {step!r}. Pass whole numbers of 0 or more, such as {{0: {{...}}, 10000: "
                "{...}}."
            )
        if numbers and int(text) <= numbers[-1]:
            raise H5ValueError(
                f"weights has step {text} after step {numbers[-1]}. Pass each step once, in ascending order."
            )
        numbers.append(int(text))
    if numbers[0]:
        raise H5ValueError(
            f"weights has no step 0; its first step is {numbers[0]}. Pass the weights at step 0, from which training "
            "starts."
        )
    return tuple(numbers)


def _source_weights(weights: Any, names: Sequence[str], place: str = "") -> tuple[float, ...]:
    """Return the weights of the sources, in their order.

    Args:
        weights: weights by name, or in the order of the sources.
        names: names of the sources.
        place: the step of the weights, for errors.
    """
    if isinstance(weights, Mapping):
        weights = {str(name): weight for name, weight in weights.items()}
        if set(weights) != set(names):
            unknown = next((name for name in weights if name not in names), "")
            raise H5ValueError(
                f"weights{place} are given for {listing(weights)}, but the sources are {listing(names)}."
                f"{near(unknown, names)} Name all sources."
            )
        weights = [weights[name] for name in names]
    numbers = list(weights) if isinstance(weights, Sequence | np.ndarray) and not isinstance(weights, str) else []
    if len(numbers) != len(names):
        raise H5ValueError(
            f"weights={weights!r}{place} has {len(numbers)} values, but there are {len(names)} sources: "
            f"{listing(names)}. Pass one weight for each source, or a mapping from their names."
        )
    for name, number in zip(names, numbers, strict=True):
        if isinstance(number, bool) or not isinstance(number, int | float | np.number) or not 0 <= number < 1e300:
            raise H5ValueError(f"the weight of the source {name!r}{place} is {number!r}. Pass 0 or more.")
    if not any(numbers):
        raise H5ValueError(f"weights={weights!r}{place} are all 0, so no row is drawn. Pass a positive weight.")
    return tuple(map(float, numbers))


def _pattern(pattern: Any, names: Sequence[str]) -> tuple[int, ...]:
    turns = list(map(str, pattern)) if isinstance(pattern, Sequence) and not isinstance(pattern, str) else []
    if not turns:
        raise H5ValueError(
            f"pattern={pattern!r} was given. Pass strategy='alternating' the names of sources in the order of their "
            f"turns, such as {[names[0], *names]}."
        )
    if unknown := [name for name in turns if name not in names]:
        raise H5ValueError(
            f"pattern names {listing(unknown)}; the sources are {listing(names)}.{near(unknown[0], names)} Name some "
            "of these."
        )
    return tuple(names.index(name) for name in turns)


def row_weights(options: WeightOptions, column: Callable[[str, str], npt.NDArray[Any]]) -> RowWeights:
    """Return the weights of a dataset's rows.

    Args:
        options: options that define the weights.
        column: returns an array with one value per row, from its name and the argument that names it.

    Raises:
        H5ValueError: weights are missing, negative, all 0, or name unknown classes.
    """
    if options.weight_key is not None:
        values = column(options.weight_key, "weight_key")
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise H5ValueError(
                f"weight_key={options.weight_key!r} has values of {values.dtype}, shape {values.shape}. Name an array "
                "with one number per row."
            )
        return RowWeights(values.astype(np.float64), f"by {options.weight_key!r}")
    labels = column(options.keys[0], "balance_key")
    if labels.ndim != 1 or (labels.dtype.kind == "f" and np.isnan(labels).any()):
        raise H5ValueError(
            f"balance_key={options.balance_key!r} has values of shape {labels.shape}, or rows without one (NaN). Name "
            "an array with one class per row."
        )
    classes, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights = _class_weights(options, classes)
    text = f"by class of {options.balance_key!r}, {_classes_text(classes, weights)}"
    return RowWeights((weights / counts)[codes], text)


def _class_weights(options: WeightOptions, classes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if options.class_weights is None:
        return np.ones(len(classes))
    is_number = classes.dtype.kind in "biuf"
    names = [_plain_name(value, is_number=is_number) for value in classes.tolist()]
    weights = {_plain_name(name, is_number=is_number): weight for name, weight in options.class_weights.items()}
    if weights.keys() != set(names) or len(weights) != len(options.class_weights):
        raise H5ValueError(
            f"class_weights names {listing(options.class_weights)}; the classes of {options.balance_key!r} are "
            f"{listing(names)}. Name each once; 0 leaves one out."
        )
    return np.array([weights[name] for name in names], dtype=np.float64)


def _classes_text(classes: npt.NDArray[Any], weights: npt.NDArray[np.float64]) -> str:
    if len(classes) > 12:
        return f"{len(classes)} classes"
    return ", ".join(f"{name}: {weight:g}" for name, weight in zip(classes.tolist(), weights.tolist(), strict=True))


def _plain_name(name: Any, *, is_number: bool) -> Any:
    """Normalize a class label so that 1, 1.0, True and "1" compare equal (YAML keys may be strings)."""
    if not is_number:
        return str(name)
    if not isinstance(name, str):
        return name
    text = {"true": "1", "false": "0"}.get(name.lower(), name)
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def weights_of(dataset: RowDataset) -> RowWeights | None:
    """Return how often each row of a dataset is drawn in training; None for once each."""
    return dataset.weights if isinstance(dataset, MixtureDataset) else None


def segment_order(order: Order, dataset: RowDataset, segments: SegmentOptions) -> Order:
    """Return the order of a dataset's epochs; with ``segments.bucket``, in batches of segments of similar length."""
    lengths = dataset.table.indexer.lengths if isinstance(dataset, TableDataset) else None
    if not segments.bucket or order.mode == "none" or lengths is None:
        return order
    return order._replace(recipe=LengthRecipe(lengths, dataset.blocks(), f"{len(lengths):,} segments, by length"))


_TOKEN_RECIPES: WeakKeyDictionary[RowDataset, TokenRecipe] = WeakKeyDictionary()
"""The last recipe of each dataset; counting its batches takes time."""


def token_recipe(
    dataset: RowDataset, segments: SegmentOptions, *, packs: bool, shard: RankShard | None = None
) -> TokenRecipe | None:
    """Return the recipe of epochs with batches of at most ``segments.max_tokens`` steps; None without this option.

    Args:
        dataset: the samples.
        segments: options of segments.
        packs: whether samples are joined instead of padded.
        shard: the samples that the rank holds; None if ranks share all samples.
    """
    sources = [source for source in dataset.sources or [dataset] if isinstance(source, TableDataset)]
    if segments.max_tokens is None or not sources:
        return None
    recipe = _TOKEN_RECIPES.get(dataset)
    if recipe is None or (recipe.max_tokens, recipe.packs, recipe.shard) != (segments.max_tokens, packs, shard):
        counts = np.concatenate([checked_step_counts(source, segments.max_tokens) for source in sources])
        recipe = TokenRecipe(counts, dataset.blocks(), segments.max_tokens, packs, shard)
        _TOKEN_RECIPES[dataset] = recipe
    return recipe


def mixture_recipe(
    mixture: Mixture, sources: Sequence[RowDataset], segments: SegmentOptions, *, packs: bool
) -> MixtureRecipe:
    """Return the recipe of epochs over the sources of a mixture.

    Args:
        mixture: how sources are mixed.
        sources: the sources; for ``concat``, one dataset of all sources.
        segments: options of segments.
        packs: whether samples are joined instead of padded.
    """
    blocks = [source.blocks() for source in sources]
    tokens = [recipe for source in sources if (recipe := token_recipe(source, segments, packs=packs)) is not None]
    return TokenMixtureRecipe(mixture, blocks, tokens) if tokens else MixtureRecipe(mixture, blocks)


def _tables(dataset: RowDataset) -> list[RowTable]:
    """Return the tables of a dataset, or of its sources."""
    return [source.table for source in dataset.sources or [dataset] if isinstance(source, TableDataset)]


def segments_left_out(dataset: RowDataset) -> Iterator[str]:
    """Yield how many segments lack an array, are too short for a window, or too small for a patch."""
    for table in _tables(dataset):
        if table.n_missing:
            yield f"{table.n_missing:,} segments or files lack an array and are left out"
        if (text := table.indexer.left_out()) is not None:
            yield text


def segments_without_steps(dataset: RowDataset) -> Iterator[str]:
    """Yield a warning if whole segments are samples, and some have no steps."""
    for table in _tables(dataset):
        if (text := table.indexer.warning()) is not None:
            yield text


def segment_ends(dataset: RowDataset) -> IntArray | None:
    """Return the number of samples up to the end of each segment; None if samples are not parts of segments."""
    ends: list[IntArray] = []
    for source in dataset.sources or [dataset]:
        if not isinstance(source, TableDataset) or source.indices is not None:
            return None
        if (ends_in_source := source.table.indexer.ends_of_segments) is None:
            return None
        ends.append(ends_in_source + (ends[-1][-1] if ends else 0))
    return np.concatenate(ends)
