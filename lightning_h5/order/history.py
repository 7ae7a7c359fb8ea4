"""The history of a run: which batches each optimizer step took, in a few numbers for each stretch of epochs.

Within a stretch all epochs have the same settings, so that the batches of a step follow by arithmetic. An unbroken run
is one stretch; a resume adds one if it is in the middle of an epoch, or if settings changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from ..errors import H5ResumeError, H5ValueError
from ..types import Identity, IntArray
from .plan import EpochPlan, EpochRecipe, OrderParameters, Segment
from .position import common_digests, order_as_values, order_of_values
from .run_order import RunOrder

__all__ = ["EpochBatches", "RunHistory", "StepBatch", "Stretch", "batches_of_step", "check_run", "run_settings"]

HISTORY_VERSION = 1
MAX_BYTES = 3072
"""Length of the saved history as JSON, about 100 resumes: beyond it the oldest stretches are dropped."""

LONG_RECIPE = 64
"""Characters of a recipe's text up to which it is saved as it is; of a longer one a digest."""

REASONS = {
    "manual": (
        "the model steps its optimizers itself (automatic_optimization=False), so it is not known how many batches a "
        "step took"
    ),
    "iterator": "training_step takes batches itself (dataloader_iter), so it is not known which batches a step took",
    "beyond": "the epoch had more batches than the Trainer counted for it",
    "several": "the run trained on several loaders at a time, so it is not known which batches of this one a step took",
    "strategy": (
        "the strategy accumulates gradients itself, and the batches of an epoch are no multiple of "
        "accumulate_grad_batches"
    ),
}
"""Why the batches of a step are not determined, by the word that is saved."""


class EpochBatches(NamedTuple):
    """Neighboring batches of an epoch, as the Trainer counts them on each rank.

    Attributes:
        epoch: from 0.
        first: the first batch.
        stop: the one after the last.
    """

    epoch: int
    first: int
    stop: int


class Stretch(NamedTuple):
    """A stretch of a run with the same settings, from one of its batches on.

    Attributes:
        epoch: epoch of its first batch.
        batch: its first batch in that epoch, as the Trainer counts them on each rank.
        step: optimizer steps of the run before it.
        batch_size: rows of a batch on one rank.
        world_size: number of ranks.
        n_batches: batches of an epoch on each rank.
        accumulated: batches of an optimizer step.
        is_fresh: no gradients are left of the batches before it, since a process began with it.
        consumed: the part of its first epoch that was consumed before it; None for nothing.
        settings: the data and the order (see ``run_settings``), or ``{"unknown": word}`` (see ``REASONS``).
    """

    epoch: int
    batch: int
    step: int
    batch_size: int
    world_size: int
    n_batches: int
    accumulated: int
    is_fresh: bool
    consumed: Segment | None
    settings: Mapping[str, Any]

    @property
    def order(self) -> OrderParameters:
        """The settings of the order."""
        return order_of_values(self.settings["order"])

    @property
    def is_known(self) -> bool:
        """Whether it is determined which batches a step took."""
        return "unknown" not in self.settings

    def step_before(self, epoch: int, batch: int) -> int:
        """Return the optimizer steps of the run before a batch of this stretch."""
        n_epochs = epoch - self.epoch
        return self.step + n_epochs * self._steps_per_epoch + self._n_steps(batch) - self._n_steps(self.batch)

    def batches_of(self, step: int) -> EpochBatches:
        """Return the batches of an optimizer step.

        Raises:
            H5ValueError: gradients are left of batches that are not known.
        """
        n_epochs, window = divmod(step - self.step + self._n_steps(self.batch), self._steps_per_epoch)
        epoch = self.epoch + n_epochs
        first, stop = window * self.accumulated, min((window + 1) * self.accumulated, self.n_batches)
        if epoch == self.epoch and first < self.batch:
            if not self.is_fresh:
                raise H5ValueError(
                    f"the rows of step {step} were requested, and accumulate_grad_batches changed while its gradients "
                    "were accumulated. Request another step."
                )
            first = self.batch
        return EpochBatches(epoch, first, stop)

    def _n_steps(self, batch: int) -> int:
        """Return the steps of a whole epoch before a batch, without the one at the epoch's end."""
        return batch // self.accumulated

    @property
    def _steps_per_epoch(self) -> int:
        return -(-self.n_batches // self.accumulated)

    def goes_on_as(self, other: Stretch) -> bool:
        """Return whether another stretch, which begins later, follows from this one."""
        if not self.is_known:
            return self.settings == other.settings
        is_alike = self[3:7] == other[3:7] and self.settings == other.settings
        is_whole = other.batch == 0 or not other.is_fresh
        return is_alike and is_whole and self.step_before(other.epoch, other.batch) == other.step


@dataclass(frozen=True)
class RunHistory:
    """The stretches of a run, the earliest first.

    Attributes:
        stretches: each begins with a later step than the one before it.
    """

    stretches: tuple[Stretch, ...] = ()

    def followed_by(self, stretch: Stretch) -> RunHistory:
        """Return the history of a run that continues with a stretch; drop the steps that were undone."""
        earlier = [other for other in self.stretches if other.step < stretch.step]
        return RunHistory((*earlier, stretch))

    def stretch_of(self, step: int) -> Stretch:
        """Return the stretch that an optimizer step belongs to.

        Raises:
            H5ValueError: it is unknown, or not determined.
        """
        if step < 0:
            raise H5ValueError(f"the rows of step {step} were requested. Steps count from 0, as trainer.global_step.")
        if not self.stretches:
            raise H5ValueError(
                f"the rows of step {step} were requested, but nothing is known of the run: its checkpoint was saved "
                "before the first batch, or by a version of lightning_h5 that kept no history. Pass a checkpoint that "
                "was saved later."
            )
        if step < (first := self.stretches[0].step):
            raise H5ValueError(
                f"the rows of step {step} were requested, but the history in the checkpoint begins with step {first}: "
                "the run resumed there from a checkpoint without a history, or was resumed so often that the oldest "
                "part was dropped. Pass an older checkpoint of the run, or a later step."
            )
        stretch = [stretch for stretch in self.stretches if stretch.step <= step][-1]
        if not stretch.is_known:
            reason = REASONS.get(stretch.settings["unknown"], "it is not known which batches it took")
            raise H5ValueError(
                f"the rows of step {step} were requested, but {reason}. Add with_index=True to log them."
            )
        return stretch

    def state(self) -> dict[str, Any]:
        """Return the history as plain values, ``MAX_BYTES`` as JSON at most."""
        stretches = self.stretches
        while len(_as_json(values := _as_values(stretches))) > MAX_BYTES and len(stretches) > 1:
            stretches = stretches[1:]
        return values | {"digest": _digest(values)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> RunHistory:
        """Return a saved history; an empty one for None.

        Raises:
            H5ResumeError: it is damaged, or belongs to another version of this package.
        """
        if state is None:
            return cls()
        values = {name: value for name, value in state.items() if name != "digest"}
        if values.get("version") != HISTORY_VERSION or state.get("digest") != _digest(values):
            raise H5ResumeError(
                "the history of the run in the checkpoint is damaged, or has another version "
                f"({values.get('version')}; this package reads version {HISTORY_VERSION}). Take another checkpoint."
            )
        return cls(tuple(_stretch_of_values(values, *numbers) for numbers in values["stretches"]))


def _stretch_of_values(
    values: Mapping[str, Any], epoch: int, batch: int, step: int, cut: int, is_fresh: int, *consumed: int
) -> Stretch:
    *numbers, settings = values["cuts"][cut]
    batch_size, world_size, n_batches, accumulated = numbers
    segment = None
    if consumed:
        segment = Segment(*consumed) if len(consumed) > 1 else Segment(batch_size, world_size, *consumed)
    return Stretch(
        epoch,
        batch,
        step,
        batch_size,
        world_size,
        n_batches,
        accumulated,
        bool(is_fresh),
        segment,
        values["settings"][settings],
    )


def _as_values(stretches: Sequence[Stretch]) -> dict[str, Any]:
    """Return stretches as plain values; settings that several stretches share are saved once."""
    settings: list[Mapping[str, Any]] = []
    cuts: list[list[int]] = []
    numbers: list[list[int]] = []
    for stretch in stretches:
        if stretch.settings not in settings:
            settings.append(stretch.settings)
        cut = [*stretch[3:7], settings.index(stretch.settings)]
        if cut not in cuts:
            cuts.append(cut)
        consumed = list(stretch.consumed or ())
        if consumed[:2] == cut[:2]:
            del consumed[:2]
        numbers.append([*stretch[:3], cuts.index(cut), int(stretch.is_fresh), *consumed])
    plain_settings = [dict(values) for values in settings]
    return {"version": HISTORY_VERSION, "settings": plain_settings, "cuts": cuts, "stretches": numbers}


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(_as_json(values).encode()).hexdigest()[:16]


def run_settings(run: RunOrder, epoch: int, order: OrderParameters, identity: Identity) -> dict[str, Any]:
    """Return the settings, besides the numbers in ``Stretch``, that determine the rows of a run's epochs.

    Args:
        run: the order of the run.
        epoch: an epoch.
        order: the settings of its order.
        identity: of the training data.
    """
    values = order_as_values(order)
    if order.recipe:
        values["recipe"] = _short_recipe(order.recipe)
    if order.first_unit is not None:  # without the units of as many epochs: later ones have equal settings
        values["first_unit"] = order.first_unit - epoch * order.n_units
    settings = {"order": values, "drop_last": run.drop_last, "n_rows": run.n_rows, "identity": dict(identity)}
    if run.shards is not None:
        settings["shards"] = {name: run.shards[name] for name in ("mode", "reshard_every")}
    return settings | ({"repeats": True} if run.repeats else {})


def _short_recipe(text: str) -> str:
    return text if len(text) <= LONG_RECIPE else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def check_run(stretch: Stretch, *, seed: int, n_rows: int, recipe: EpochRecipe, identity: Identity) -> None:
    """Check that the present data and settings equal the data and settings of a stretch of a run.

    Args:
        stretch: the stretch.
        seed: the present seed, as the following ones.
        n_rows: rows of all ranks.
        recipe: how epochs visit rows.
        identity: of the data.

    Raises:
        H5ResumeError: they differ; the text shows the saved and the present values.
    """
    settings = stretch.settings
    shard = recipe.held_shard
    shards = None if shard is None else {"mode": shard.mode, "reshard_every": shard.reshard_every}
    pairs = {
        "rows": (settings["n_rows"], n_rows),
        **common_digests(settings["identity"], identity),
        "seed": (stretch.order.seed, seed),
        "recipe": (stretch.order.recipe, _short_recipe(recipe.text)),
        "shards": (settings.get("shards"), shards),
    }
    differences = [f"\n  {name}: trained {old!r}, present {new!r}" for name, (old, new) in pairs.items() if old != new]
    if differences:
        raise H5ResumeError(
            "the rows of a step were requested that was trained on other data or settings than the present:"
            f"{''.join(differences)}\nUse the files and the arguments of that run."
        )


class StepBatch(NamedTuple):
    """A batch of an optimizer step on one rank.

    Attributes:
        rank: the rank.
        epoch: from 0.
        batch: number of the batch in the epoch, as the Trainer counts on each rank.
        rows: numbers of its rows among the rows of all ranks, in the order of the batch. Each repetition of a row, as
            in mixtures, adds the number of rows.
        position: place of the first row in the epoch's sequence, over all ranks.
    """

    rank: int
    epoch: int
    batch: int
    rows: IntArray
    position: int


def batches_of_step(
    stretch: Stretch, step: int, recipe_of: Callable[[int], EpochRecipe], ranks: Sequence[int]
) -> Iterator[StepBatch]:
    """Yield the batches of an optimizer step, of one rank after the other.

    Args:
        stretch: that the step belongs to.
        step: the step: optimizer steps of the run before it.
        recipe_of: returns how a rank's epochs visit rows; ranks without shards have one object.
        ranks: the ranks.
    """
    epoch, first, stop = stretch.batches_of(step)
    order, drop_last = stretch.order, bool(stretch.settings["drop_last"])
    if order.first_unit is not None:
        order = replace(order, first_unit=order.first_unit + epoch * order.n_units)
    is_first_epoch = epoch == stretch.epoch
    segments = [stretch.consumed] if is_first_epoch and stretch.consumed is not None else []
    n_before = stretch.batch if is_first_epoch else 0
    order_epoch = 0 if stretch.settings.get("repeats") else epoch
    sequence_of = cache(lambda recipe: recipe.sequence(_with_text(order, recipe), order_epoch, drop_last=drop_last))
    for rank in ranks:
        recipe = recipe_of(rank)
        rank_in_plan, world_size = (rank, stretch.world_size) if recipe.held_shard is None else (0, 1)
        plan: EpochPlan = sequence_of(recipe).plan(
            segments, batch_size=stretch.batch_size, world_size=world_size, rank=rank_in_plan, drop_last=drop_last
        )
        for batch in range(first, stop):
            at = batch - n_before
            position = recipe.first_position + plan.bounds(at)[0]
            yield StepBatch(rank, epoch, batch, recipe.numbers(plan.rows(at), order_epoch), position)


def _with_text(order: OrderParameters, recipe: EpochRecipe) -> OrderParameters:
    """Return the settings of an order with the recipe's text, of which a digest may have been saved."""
    return OrderParameters(**{**vars(order), "recipe": recipe.text}) if order.recipe else order
