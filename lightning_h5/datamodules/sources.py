"""Sources of training rows, and how they are mixed, as a user names them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import H5ValueError, listing
from ..options import MixtureOptions
from ..order import Mixture

__all__ = ["OF_A_SOURCE", "Source", "SourceMixture"]

OF_A_SOURCE = ("load_fields", "label", "where", "field_map", "valid_mask")
"""Arguments that a source may have of its own."""


@dataclass(frozen=True, eq=False)
class Source:
    """One source.

    Attributes:
        name: in samples, logs and errors.
        paths: its files.
        own: arguments that it has instead of the data module's.
        argument: what its files were given as, for errors.
    """

    name: str
    paths: Any
    own: Mapping[str, Any]
    argument: str


@dataclass(frozen=True)
class SourceMixture:
    """Sources, and how they are mixed.

    Attributes:
        options: as the user gave them.
        sources: in their order.
    """

    options: MixtureOptions
    sources: tuple[Source, ...]

    @classmethod
    def parse(cls, options: MixtureOptions) -> SourceMixture:
        """Return the mixture that options describe.

        Raises:
            H5ValueError: a source or a number makes no sense.
        """
        mixture = cls(options, _sources(options.sources))
        mixture.of_rows([1] * len(mixture.sources))  # raises for settings that no number of rows can satisfy
        return mixture

    @property
    def in_batches(self) -> bool:
        """Whether each batch is of one source."""
        return self.of_rows([0] * len(self.sources)).in_batches

    def of_rows(self, n_rows: Sequence[int]) -> Mixture:
        """Return the mixture of sources that have so many rows."""
        names, options = [source.name for source in self.sources], self.options
        return Mixture(
            names=tuple(names),
            n_rows=tuple(n_rows),
            strategy=options.strategy,
            unit=options.mix,
            weights=_weights(options.weights, names),
            pattern=_pattern(options.pattern, names) if options.strategy == "alternating" else (),
            epoch_length=options.epoch_length,
        )


def _sources(given: Any) -> tuple[Source, ...]:
    named: list[tuple[Any, Any]] = []
    if isinstance(given, Mapping):
        named = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, str):
        named = [(None, value) for value in given]
    if not named:
        raise H5ValueError(
            f"mixture.sources={given!r} names no source. Pass a mapping from names to files, or to mappings such as "
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
        raise H5ValueError(f"the source {name!r} has the files {paths!r}. Pass a path, a glob, or a list of these.")
    if name is None and (isinstance(paths, str) or not isinstance(paths, Sequence)):
        name = Path(paths).stem
    if name is None:
        raise H5ValueError(f"the source of the files {paths!r} has no name. Pass a mapping from names to files.")
    return Source(str(name), paths, own, f"mixture[{name!r}]")


def _weights(given: Any, names: Sequence[str]) -> tuple[float, ...] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        given = {str(name): weight for name, weight in given.items()}
        if set(given) != set(names):
            raise H5ValueError(
                f"weights are given for {listing(given)}, but the sources are {listing(names)}. Name all sources."
            )
        given = [given[name] for name in names]
    numbers = list(given) if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str) else []
    if len(numbers) != len(names):
        raise H5ValueError(
            f"weights={given!r} has {len(numbers)} values, but there are {len(names)} sources: {listing(names)}."
        )
    for name, number in zip(names, numbers, strict=True):
        if isinstance(number, bool) or not isinstance(number, int | float | np.number) or not 0 <= number < 1e300:
            raise H5ValueError(f"the weight of the source {name!r} is {number!r}. Pass 0 or more.")
    if not any(numbers):
        raise H5ValueError(f"weights={given!r} are all 0, which leaves nothing to train on. Make one larger.")
    return tuple(map(float, numbers))


def _pattern(given: Any, names: Sequence[str]) -> tuple[int, ...]:
    pattern = list(map(str, given)) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if not pattern:
        raise H5ValueError(
            f"pattern={given!r} was given. strategy='alternating' takes the names of sources in the order of their "
            f"turns, such as {[names[0], *names]}."
        )
    if unknown := [name for name in pattern if name not in names]:
        raise H5ValueError(f"pattern names {listing(unknown)}; the sources are {listing(names)}.")
    return tuple(names.index(name) for name in pattern)
