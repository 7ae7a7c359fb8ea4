"""Several loaders as one, for training loops without a Trainer: exact shares, and an exact resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader, SequentialSampler

from ..errors import H5ResumeError, H5ValueError, listing
from ..order import Mixture, PlanSampler, Position
from ..order.mixture import EpochLength, Strategy
from ..sizes import whole

__all__ = ["LoaderBatch", "MultiDataLoader", "MultiDataLoaderConfig", "SamplingStrategy"]

AHEAD = 256  # units of a schedule that are computed together


class SamplingStrategy(StrEnum):
    """How ``MultiDataLoader`` selects the loader of the next batch.

    Attributes:
        ROUND_ROBIN: cycle through the loaders.
        WEIGHTED: shares by weights, spread evenly: no loader is ever a whole batch ahead of its share or behind it.
        SEQUENTIAL: all batches of one loader, then all batches of the next one.
        ALTERNATING: repeat a pattern.
    """

    ROUND_ROBIN = "round_robin"
    WEIGHTED = "weighted"
    SEQUENTIAL = "sequential"
    ALTERNATING = "alternating"


@dataclass(frozen=True, kw_only=True)
class MultiDataLoaderConfig:
    """How ``MultiDataLoader`` mixes loaders.

    Args:
        sampling_strategy: a ``SamplingStrategy``, or its name, such as "weighted".
        dataloader_weights: weights of the loaders, 0 or more, for "weighted". None uses their numbers of batches.
        dataloader_names: names of the loaders. None numbers them.
        cycle_short_loaders: restart an exhausted loader in a new order; the next epoch continues at its position. False
            leaves it out for the rest of the epoch, so that each batch is used once.
        alternating_pattern: names or numbers of loaders in the order of their turns, for "alternating".
        epoch_length: "sum" (the number of batches of all loaders), "max" (until every loader was exhausted once), "min"
            (until the first loader is exhausted) or a number of batches. With ``cycle_short_loaders=False``, only a
            number is allowed.

    Raises:
        H5ValueError: an argument is invalid, or belongs to another strategy.
    """

    sampling_strategy: SamplingStrategy | str = SamplingStrategy.ROUND_ROBIN
    dataloader_weights: Sequence[float] | None = None
    dataloader_names: Sequence[str] | None = None
    cycle_short_loaders: bool = True
    alternating_pattern: Sequence[str | int] | None = None
    epoch_length: EpochLength = "sum"

    def __post_init__(self) -> None:
        names = [strategy.value for strategy in SamplingStrategy]
        if self.sampling_strategy not in names:
            raise H5ValueError(f"sampling_strategy={self.sampling_strategy!r} was given. Pass {listing(names)}.")
        object.__setattr__(self, "sampling_strategy", SamplingStrategy(self.sampling_strategy))
        for name, strategy in (("dataloader_weights", "weighted"), ("alternating_pattern", "alternating")):
            if getattr(self, name) is not None and self.sampling_strategy != strategy:
                raise H5ValueError(
                    f"{name} was given with sampling_strategy={str(self.sampling_strategy)!r}, which does not use it. "
                    f"Pass sampling_strategy={strategy!r}, or leave {name} out."
                )
        if self.sampling_strategy == "alternating" and not self.alternating_pattern:
            raise H5ValueError("sampling_strategy='alternating' needs alternating_pattern, such as ['a', 'a', 'b'].")
        if self.epoch_length not in ("sum", "max", "min"):
            whole(cast("int", self.epoch_length), "epoch_length", least=1)
        elif not self.cycle_short_loaders and self.epoch_length != "sum":
            raise H5ValueError(
                f"epoch_length={self.epoch_length!r} cannot be combined with cycle_short_loaders=False: without cycles "
                "an epoch has each batch once. Remove one of them."
            )

    def mixture(self, n_batches: Sequence[int]) -> Mixture:
        """Return the mixture of loaders with the given numbers of batches."""
        n = len(n_batches)
        names = tuple(map(str, range(n))) if self.dataloader_names is None else tuple(self.dataloader_names)
        if len(names) != n or len(set(names)) != n:
            raise H5ValueError(f"dataloader_names={list(names)} was given for {n} loaders. Pass one name for each.")
        weights = self.dataloader_weights
        if weights is not None and (len(weights) != n or min(weights) < 0 or not any(weights)):
            raise H5ValueError(
                f"dataloader_weights={list(weights)} was given for {n} loaders. Pass a weight of 0 or more for each."
            )
        pattern = []
        for entry in self.alternating_pattern or ():
            number = names.index(entry) if entry in names else entry
            if not isinstance(number, int) or not 0 <= number < n:
                raise H5ValueError(f"alternating_pattern names {entry!r}; the loaders are {listing(names)}.")
            pattern.append(number)
        return Mixture(
            names=names,
            n_rows=tuple(n_batches),
            strategy=cast("Strategy", str(self.sampling_strategy)),
            weights=None if weights is None else tuple(map(float, weights)),
            pattern=tuple(pattern),
            epoch_length=self.epoch_length if self.cycle_short_loaders else "max",
        )


class LoaderBatch(NamedTuple):
    """A batch and its loader; in the order of Lightning's ``CombinedLoader``.

    Attributes:
        batch: the batch.
        batch_idx: its number in the epoch of all loaders.
        dataloader_idx: number of its loader.
        dataloader_name: name of its loader.
    """

    batch: Any
    batch_idx: int
    dataloader_idx: int
    dataloader_name: str


class _LoaderReading(NamedTuple):
    """An unfinished iteration of a loader."""

    cycle: int
    step: int
    batches: Iterator[Any]


class MultiDataLoader:
    """Batches of several loaders, mixed by a configuration, for your own training loop.

    The schedule is a pure function of the configuration, the lengths of the loaders and the epoch, and so the same on
    all ranks. A complete pass advances the epoch, unless ``set_epoch`` sets it.

    Args:
        loaders: loaders of ``create_multi_dataloaders`` or ``create_optimized_dataloader``, or other loaders with a
            length. For an exact resume the sampler of a shuffled loader needs ``set_epoch``.
        config: how the loaders are mixed.

    Attributes:
        names: names of the loaders.
        epoch: epoch of the next iteration.

    Raises:
        H5ValueError: the configuration does not fit the loaders, or a loader has no batch.

    Example:
        >>> loaders, config = create_multi_dataloaders({"a": (a, 32), "b": (b, 16)})
        >>> for batch, batch_idx, dataloader_idx, name in MultiDataLoader(loaders, config):
        ...     loss = model.training_step(batch, batch_idx, dataloader_idx)
    """

    def __init__(self, loaders: Sequence[DataLoader[Any]], config: MultiDataLoaderConfig | None = None) -> None:
        self.loaders, self.config = list(loaders), config or MultiDataLoaderConfig()
        self._lengths = [len(loader) for loader in self.loaders]
        self._mixture = self.config.mixture(self._lengths)
        self.names = self._mixture.names
        if not self.loaders or 0 in self._lengths:
            raise H5ValueError(
                f"loaders with {self._lengths} batches were given. Pass at least one loader, and only loaders with a "
                "batch or more: reduce batch_size, or pass drop_last=False."
            )
        self._n_units = self._mixture.n_units(self._lengths, 1)
        self.epoch = self._n_given = 0
        self._readings: dict[int, _LoaderReading] = {}

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        if self.config.cycle_short_loaders:
            return self._n_units
        limit = self.config.epoch_length
        lengths = [n for n, share in zip(self._lengths, self._mixture.shares(self._lengths), strict=True) if share]
        return min(sum(lengths), limit) if isinstance(limit, int) else sum(lengths)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; the epoch of a loaded position continues at this position."""
        if epoch != self.epoch:
            self.epoch, self._n_given = epoch, 0

    def __iter__(self) -> Iterator[LoaderBatch]:
        """Yield the rest of the epoch."""
        epoch, first = self.epoch, self._n_given
        for number, (source, cycle, step) in enumerate(self._schedule(epoch)):
            if number < first:
                continue
            if number == len(self):
                break
            batch = self._batch(source, cycle, step)
            self._n_given = number + 1
            yield LoaderBatch(batch, number, source, self.names[source])
        if self.epoch == epoch:
            self.epoch, self._n_given = epoch + 1, 0

    def _schedule(self, epoch: int) -> Iterator[tuple[int, int, int]]:
        """Yield the loader of each batch of an epoch, the loader's cycle, and the number of the batch in the cycle."""
        cycles = self.config.cycle_short_loaders
        schedule = self._mixture.schedule(self._lengths, self._n_units, epoch if cycles else 0)
        counts = schedule.counts(0).tolist()
        for start in range(0, self._n_units, AHEAD):
            for source in schedule.sources(start, min(start + AHEAD, self._n_units)).tolist():
                cycle, step = divmod(counts[source], self._lengths[source])
                counts[source] += 1
                if cycles:
                    yield source, cycle, step
                elif not cycle:
                    yield source, epoch, step

    def _batch(self, source: int, cycle: int, step: int) -> Any:
        """Return a batch of a loader, from its unfinished iteration if this is the next batch."""
        reading = self._readings.pop(source, None)
        if reading is None or reading[:2] != (cycle, step):
            reading = _LoaderReading(cycle, step, self._read_from(source, cycle, step))
        batch = next(reading.batches)
        if step + 1 < self._lengths[source]:
            self._readings[source] = reading._replace(step=step + 1)
        else:
            next(reading.batches, None)  # the loader notices its end
        return batch

    def _read_from(self, source: int, cycle: int, step: int) -> Iterator[Any]:
        loader = self.loaders[source]
        sampler: Any = loader.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(cycle)
        elif step and not isinstance(sampler, SequentialSampler):
            raise H5ResumeError(
                f"the loader {self.names[source]!r} has to continue at its batch {step}, but its "
                f"{type(sampler).__name__} shuffles in a new order each time. Create the loader with "
                "create_optimized_dataloader, or with a sampler that has set_epoch."
            )
        if isinstance(sampler, PlanSampler) and not sampler.evaluation:  # reads nothing to get there
            sampler.restore(Position(cycle, (), sampler.present_order()).after(sampler, step))
            return iter(loader)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        return batches

    # Position ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, as plain values."""
        return {"epoch": self.epoch, "n_batches": self._n_given, "mixture": self._text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of ``state_dict``.

        Raises:
            H5ResumeError: the loaders or the configuration have changed.
        """
        if state.get("mixture") != self._text:
            raise H5ResumeError(
                f"the saved position is of {state.get('mixture')!r}, and the present loaders are {self._text!r}. "
                "Resume with the same loaders, batch sizes, number of ranks and configuration."
            )
        self.epoch, self._n_given = int(state["epoch"]), int(state["n_batches"])
        self._readings.clear()

    @property
    def _text(self) -> str:
        """The settings that a position depends on, as text."""
        return f"{self._mixture.text}, {self._n_units} batches, cycles: {self.config.cycle_short_loaders}"
