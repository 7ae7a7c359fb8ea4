"""Sources of a mixture, as a user names them: checked, and made into datasets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import H5ValueError, listing
from ..order import EpochLength, Mixture, Strategy
from .checks import whole

__all__ = ["MixtureOptions", "SourceOptions"]

OF_A_SOURCE = (
    "load_fields",
    "allowed_guids",
    "cs_label",
    "bg_label",
    "epoch_min",
    "epoch_max",
    "label",
    "where",
    "field_map",
    "valid_mask",
)
"""Arguments that a source may have of its own."""

_STRATEGIES = ("concat", "weighted", "round_robin", "alternating", "sequential")


@dataclass(frozen=True, eq=False)
class SourceOptions:
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


@dataclass(frozen=True, kw_only=True)
class MixtureOptions:
    """What is mixed, and how; see the arguments of ``CombinedHDF5DataModule``."""

    sources: tuple[SourceOptions, ...]
    strategy: Strategy
    weights: tuple[float, ...] | None
    pattern: tuple[int, ...]
    epoch_length: EpochLength
    unit: Literal["batches", "rows"]

    @classmethod
    def of(
        cls,
        sources: Any,
        *,
        sampling_strategy: str,
        weights: Sequence[float] | Mapping[str, float] | None,
        pattern: Sequence[str] | None,
        epoch_length: EpochLength,
        mix: str,
    ) -> MixtureOptions:
        """The options as a user gave them, checked.

        Raises:
            H5ValueError: one makes no sense, or contradicts another.
        """
        given = _sources(sources)
        names = [source.name for source in given]
        for value, name, allowed in (
            (sampling_strategy, "sampling_strategy", _STRATEGIES),
            (mix, "mix", ("batches", "rows")),
        ):
            if value not in allowed:
                raise H5ValueError(f"{name}={value!r} was given. Pass {listing(allowed)}.")
        for argument, name, belongs_to in ((weights, "weights", "weighted"), (pattern, "pattern", "alternating")):
            if argument is not None and sampling_strategy != belongs_to:
                raise H5ValueError(
                    f"{name}={argument!r} was given with sampling_strategy={sampling_strategy!r}, which has none. Pass "
                    f"sampling_strategy={belongs_to!r}, or leave {name} out."
                )
        options = cls(
            sources=given,
            strategy=sampling_strategy,  # type: ignore[arg-type]  # looked at above
            weights=_weights(weights, names),
            pattern=_pattern(pattern, names) if sampling_strategy == "alternating" else (),
            epoch_length=_epoch_length(epoch_length),
            unit=mix,  # type: ignore[arg-type]
        )
        options.mixture([1] * len(names))  # refuses what no number of rows makes possible
        return options

    @property
    def in_batches(self) -> bool:
        """Whether each batch is of one source."""
        return self.mixture([0] * len(self.sources)).in_batches

    def mixture(self, n_rows: Sequence[int]) -> Mixture:
        """The mixture of sources that have so many rows."""
        return Mixture(
            names=tuple(source.name for source in self.sources),
            n_rows=tuple(n_rows),
            strategy=self.strategy,
            unit=self.unit,
            weights=self.weights,
            pattern=self.pattern,
            epoch_length=self.epoch_length,
        )


def _sources(given: Any) -> tuple[SourceOptions, ...]:
    if isinstance(given, Mapping):
        sources = [_source(name, value) for name, value in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        sources = [_source(None, value) for value in given]
    else:
        sources = []
    if not sources:
        raise H5ValueError(
            f"sources={given!r} names none. Pass a mapping from names to files, or to mappings such as "
            "{'paths': 'site_a/*.h5', 'label': 2}."
        )
    names = [source.name for source in sources]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise H5ValueError(f"sources has several of the name {listing(twice)}. Give each a name of its own.")
    return tuple(sources)


def _source(name: Any, value: Any) -> SourceOptions:
    own = dict(value) if isinstance(value, Mapping) else {"paths": value}
    name, paths = own.pop("name", name), own.pop("paths", None)
    if paths is None:
        raise H5ValueError(f"the source {name!r} has no files: {value!r}. Pass its paths.")
    if unknown := [key for key in own if key not in OF_A_SOURCE]:
        raise H5ValueError(
            f"the source {name!r} has {listing(unknown)}. A source may have of its own: {listing(OF_A_SOURCE)}."
        )
    if not isinstance(paths, str | os.PathLike | Sequence):
        raise H5ValueError(f"the source {name!r} has the files {paths!r}. Pass a path, a glob, or a list of these.")
    if name is None and (isinstance(paths, str) or not isinstance(paths, Sequence)):
        name = Path(paths).stem
    if name is None:
        raise H5ValueError(f"the source of the files {paths!r} has no name. Pass a mapping from names to files.")
    return SourceOptions(str(name), paths, own, f"sources[{name!r}]")


def _weights(given: Any, names: Sequence[str]) -> tuple[float, ...] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        given = {str(name): weight for name, weight in given.items()}
        if set(given) != set(names):
            raise H5ValueError(f"weights are of {listing(given)}, and the sources are {listing(names)}. Name them all.")
        given = [given[name] for name in names]
    given = given.tolist() if isinstance(given, np.ndarray) else given
    numbers = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if len(numbers) != len(names):
        raise H5ValueError(
            f"weights={given!r} are {len(numbers)}, and there are {len(names)} sources: {listing(names)}."
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
            f"pattern={given!r} was given. sampling_strategy='alternating' takes the names of sources in their turn, "
            f"such as {[names[0], *names]}."
        )
    if unknown := [name for name in pattern if name not in names]:
        raise H5ValueError(f"pattern names {listing(unknown)}; the sources are {listing(names)}.")
    return tuple(names.index(name) for name in pattern)


def _epoch_length(given: Any) -> EpochLength:
    if given in ("sum", "max", "min"):
        length: Literal["sum", "max", "min"] = given
        return length
    if isinstance(given, str):
        raise H5ValueError(f"epoch_length={given!r} was given. Pass 'sum', 'max', 'min' or a number of steps.")
    return whole(given, "epoch_length", least=1)
