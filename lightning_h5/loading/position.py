"""The position of a run: what was consumed of which epoch, in which order; as an object, and as plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import H5ResumeError, H5ValueError
from ..order import OrderParameters, PlanSampler, Segment, SourceOrder

__all__ = ["OtherShardsError", "Position", "is_position", "steps_left"]

STATE_VERSION = 1
MAX_SEGMENTS = 32
_FIELDS = ("version", "epoch", "segments", "finished", "order", "drop_last", "shards", "n_rows", "n_blocks", "identity")


class OtherShardsError(H5ResumeError):
    """The position is in the middle of an epoch of shards that another number of ranks held: they were other rows."""


@dataclass(frozen=True)
class Position:
    """What was consumed of which epoch, in which order.

    Attributes:
        epoch: from 0.
        segments: what of it is consumed.
        order: what decided its order.
        finished: the epoch is over, whether or not all of it is consumed (``limit_train_batches``).
    """

    epoch: int
    segments: tuple[Segment, ...]
    order: OrderParameters
    finished: bool = False

    @classmethod
    def of(cls, sampler: PlanSampler, epoch: int) -> Position:
        """The position at which a sampler begins an epoch."""
        return cls(epoch, sampler.consumed(epoch), sampler.order_of(epoch))

    def after(self, sampler: PlanSampler, n_steps: int) -> Position:
        """The position after more steps of all ranks, under a sampler's present settings."""
        if n_steps <= 0:
            return self
        world_size = sampler.replica.world_size
        more = Segment(sampler.batch_size, world_size, n_steps * world_size)
        before = self.segments
        if before and before[-1][:2] == more[:2]:  # joined if the settings are the same
            before, more = before[:-1], more._replace(n_batches=before[-1].n_batches + more.n_batches)
        return replace(self, segments=(*before, more))

    def restore(self, sampler: PlanSampler) -> None:
        """Has a sampler go on from here."""
        sampler.restore(self.epoch, self.segments, self.order)

    @property
    def n_rows(self) -> int:
        """Rows of the epoch that were consumed, but for a last batch that is not full."""
        return sum(each.batch_size * each.n_batches for each in self.segments)

    def state(self, sampler: PlanSampler, identity: str | None = None) -> dict[str, Any]:
        """The position as plain values (text, numbers, lists, dicts): loads with ``weights_only=True``, and as JSON."""
        order = self.order
        parameters: dict[str, Any] = {
            "mode": order.mode,
            "seed": order.seed,
            "batch_size": order.batch_size,
            "lanes": order.streams,
            "window": order.window,
            "version": order.version,
        }
        if order.recipe:
            sources = [list(source) for source in order.sources]
            parameters |= {"recipe": order.recipe, "n_units": order.n_units, "sources": sources}
        state = {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "segments": [list(segment) for segment in self._few(sampler)],
            "finished": self.finished,
            "order": parameters,
            "drop_last": sampler.drop_last,
            "shards": sampler.shards,
            "n_rows": sampler.n_rows,
            "n_blocks": sampler.blocks.n_blocks,
            "identity": identity,
        }
        return state | {"digest": _digest(state)}

    def _few(self, sampler: PlanSampler) -> tuple[Segment, ...]:
        """The segments, so few that the state stays small after any number of changes within one epoch."""
        if len(self.segments) <= MAX_SEGMENTS:
            return self.segments
        *before, last = self.segments
        sequence = sampler.sequence(self.epoch, self.order)
        return Segment(1, 1, sequence.n_consumed(before, drop_last=sampler.drop_last)), last  # batches of one row

    @classmethod
    def from_state(cls, state: Mapping[str, Any], sampler: PlanSampler, identity: str | None = None) -> Position:
        """Reads a saved position back and checks it against the present data and settings.

        Raises:
            H5ResumeError: it is damaged, or saved and present differ; both are shown.
        """
        if state.get("version") != STATE_VERSION:
            raise H5ResumeError(
                f"the saved position has version {state.get('version')}; this package reads version {STATE_VERSION}. "
                "Resume with the version of lightning_h5 that saved it."
            )
        try:
            digest = _digest(state)
        except (KeyError, TypeError, ValueError):
            digest = ""
        if state.get("digest") != digest:  # from here on everything is as it was saved
            raise H5ResumeError(
                f"the saved position is damaged: its digest is {state.get('digest')!r}, that of its content is "
                f"{digest!r}. Resume from another checkpoint."
            )
        saved = state["order"]
        order = OrderParameters(
            mode=saved["mode"],
            seed=saved["seed"],
            batch_size=saved["batch_size"],
            streams=saved["lanes"],
            window=saved["window"],
            version=saved["version"],
            recipe=saved.get("recipe", ""),
            n_units=saved.get("n_units", 0),
            sources=tuple(SourceOrder(*source) for source in saved.get("sources", ())),
        )
        segments = tuple(Segment(*segment) for segment in state["segments"])
        position = cls(state["epoch"], segments, order, state["finished"])
        _compare(state, order, sampler, identity)
        world_sizes = [(shards or {}).get("world_size") for shards in (state["shards"], sampler.shards)]
        if world_sizes[0] == world_sizes[1]:
            position._check_rest(sampler)
            return position
        if segments and not position.finished:
            raise OtherShardsError(
                f"the position was saved in the middle of epoch {position.epoch} by {world_sizes[0]} ranks, and there "
                f"are {world_sizes[1]} now. Each rank holds a shard of its own, so none knows which of its rows were "
                "trained on. Weights and counters are taken up; some rows of the epoch come again. LazyH5DataModule "
                "goes on exactly with any number of ranks."
            )
        return replace(position, segments=())

    def _check_rest(self, sampler: PlanSampler) -> None:
        try:
            sequence = sampler.sequence(self.epoch, self.order)
            sequence.n_consumed(self.segments, drop_last=sampler.drop_last)
            if not self.finished:
                size, drop_last = sampler.batch_size, sampler.drop_last
                sequence.plan(self.segments, batch_size=size, world_size=1, rank=0, drop_last=drop_last)
        except H5ValueError as error:
            raise H5ResumeError(str(error)) from error


def is_position(value: object) -> bool:
    """Whether something out of a checkpoint looks like a position, whole or damaged."""
    return isinstance(value, Mapping) and {"digest", "segments", "order"} <= value.keys()


def steps_left(sampler: PlanSampler, epoch: int) -> int:
    """Steps that an epoch has left on each rank, under the present world size."""
    return sampler.plan(epoch).n_steps


def _digest(state: Mapping[str, Any]) -> str:
    """A digest of all other fields: a number that was changed by accident still looks like a position."""
    others = {name: state[name] for name in _FIELDS}  # a subclass may have added others
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:16]


def _compare(state: Mapping[str, Any], order: OrderParameters, sampler: PlanSampler, identity: str | None) -> None:
    """Raises if saved and present data or settings differ; the number of ranks that hold shards is compared apart."""
    present, shards, held = sampler.parameters, state["shards"] or {}, sampler.shards or {}
    fields = {
        "rows": (state["n_rows"], sampler.n_rows),
        "files": (state["identity"], identity),
        "seed": (order.seed, present.seed),
        "order": (_kind_of_order(order.mode, sampler), _kind_of_order(present.mode, sampler)),
        "recipe": (order.recipe, present.recipe),
        "version of the order": (order.version, present.version),
        "drop_last": (state["drop_last"], sampler.drop_last),
        **{f"shards' {name}": (shards.get(name), held.get(name)) for name in {*shards, *held} - {"world_size"}},
    }
    differing = {name: pair for name, pair in fields.items() if pair[0] != pair[1]}
    if differing:
        lines = "".join(f"\n  {name}: saved {saved!r}, present {now!r}" for name, (saved, now) in differing.items())
        raise H5ResumeError(
            f"the saved position belongs to other data or settings:{lines}\n"
            "Use the files and settings of the saved run. Or pass on_resume_mismatch='restart_epoch' to the data "
            "module: weights and counters are taken up, and the epoch that was broken off starts over."
        )


def _kind_of_order(mode: str, sampler: PlanSampler) -> str:
    """The mode; if the package chose it, the same for all that shuffle: it follows from memory and workers."""
    return "shuffled" if sampler.chooses and mode != "none" else mode
