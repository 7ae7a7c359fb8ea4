"""The position of a run: the consumed part of an epoch, and the order. One object, saved as plain values.

Under a Trainer it is the Trainer's position; in other loops it follows from the passes over a loader (``Passes``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import H5ResumeError, H5ValueError
from ..types import Identity
from .plan import Mode, OrderParameters, Segment, SourceOrder

if TYPE_CHECKING:
    from .samplers import PlanSampler

__all__ = ["EpochSource", "OtherShardsError", "Passes", "Position", "Progress", "is_position", "saved_mode"]

STATE_VERSION = 2
MAX_SEGMENTS = 32
_FIELDS = ("version", "epoch", "segments", "finished", "order", "drop_last", "shards", "n_rows", "n_blocks", "identity")


class OtherShardsError(H5ResumeError):
    """The position is in the middle of an epoch of shards that another number of ranks held: they were other rows."""


@dataclass(frozen=True)
class Position:
    """The consumed part of an epoch, and the epoch's order.

    Attributes:
        epoch: from 0.
        segments: its consumed parts, the earliest first.
        order: the settings that decided its order when it began.
        finished: the epoch is over, whether or not all of it is consumed (``limit_train_batches``).
    """

    epoch: int
    segments: tuple[Segment, ...]
    order: OrderParameters
    finished: bool = False

    def after(self, sampler: PlanSampler, n_steps: int) -> Position:
        """Return the position after more steps of all ranks, under a sampler's present settings."""
        if n_steps <= 0:
            return self
        world_size = sampler.replica.world_size
        segment = Segment(sampler.batch_size, world_size, n_steps * world_size)
        segments = self.segments
        if segments and segments[-1][:2] == segment[:2]:  # merge segments with equal settings
            segments, segment = segments[:-1], segment._replace(n_batches=segments[-1].n_batches + segment.n_batches)
        return replace(self, segments=(*segments, segment))

    @property
    def n_rows(self) -> int:
        """Rows of the epoch that are consumed; a last batch that is not full counts as full."""
        return sum(segment.batch_size * segment.n_batches for segment in self.segments)

    def change_of_nodes(self, sampler: PlanSampler) -> str:
        """Return a message on nodes that get other rows after this epoch, for the log; "" if they keep their rows."""
        n_before, n_after = self.order.nodes, sampler.parameters.nodes
        if n_before == n_after:
            return ""
        return (
            f"the number of nodes was {n_before} and is {n_after}: from epoch {self.epoch + 1} on, blocks are dealt to "
            "nodes again, which then read other rows than before"
        )

    def state(self, sampler: PlanSampler, identity: Identity | None = None) -> dict[str, Any]:
        """Return the position as plain values (text, numbers, lists, dicts), under 4 KiB.

        They load with ``weights_only=True``, and as JSON.
        """
        order = self.order
        parameters: dict[str, Any] = {
            "mode": order.mode,
            "seed": order.seed,
            "batch_size": order.batch_size,
            "streams": order.streams,
            "window": order.window,
            "version": order.version,
        }
        if order.recipe:
            sources = [list(source) for source in order.sources]
            parameters |= {"recipe": order.recipe, "n_units": order.n_units, "sources": sources}
        if order.nodes:
            parameters |= {"nodes": order.nodes, "world_size": order.world_size}
        segments = self.segments
        if len(segments) > MAX_SEGMENTS:  # keeps the state small after any number of changes within an epoch
            segments = (sampler.merged(self.epoch, order, segments[:-1]), segments[-1])
        state = {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "segments": [list(segment) for segment in segments],
            "finished": self.finished,
            "order": parameters,
            "drop_last": sampler.drop_last,
            "shards": sampler.shards,
            "n_rows": sampler.n_rows,
            "n_blocks": sampler.blocks.n_blocks,
            "identity": identity,
        }
        return state | {"digest": _digest_of_state(state)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], sampler: PlanSampler, identity: Identity | None = None) -> Position:
        """Return a saved position, checked against the present data and settings.

        Raises:
            H5ResumeError: it is damaged, or saved and present differ; the text shows both.
        """
        if state.get("version") != STATE_VERSION:
            raise H5ResumeError(
                f"the saved position has version {state.get('version')}; this package reads version {STATE_VERSION}. "
                "Resume with the version of lightning_h5 that saved it."
            )
        try:
            digest = _digest_of_state(state)
        except (KeyError, TypeError, ValueError):
            digest = ""
        if state.get("digest") != digest:  # below, the state is intact
            raise H5ResumeError(
                f"the saved position is damaged: its digest is {state.get('digest')!r}, that of its content is "
                f"{digest!r}. Resume from another checkpoint."
            )
        saved_order = state["order"]
        sources = tuple(SourceOrder(saved_mode(mode), *numbers) for mode, *numbers in saved_order.get("sources", ()))
        order = OrderParameters(**saved_order | {"mode": saved_mode(saved_order["mode"]), "sources": sources})
        segments = tuple(Segment(*segment) for segment in state["segments"])
        position = cls(state["epoch"], segments, order, state["finished"])
        _compare(state, order, sampler, identity)
        saved_ranks, ranks = ((shards or {}).get("world_size") for shards in (state["shards"], sampler.shards))
        if saved_ranks == ranks:
            position._check_rest(sampler)
            return position
        if segments and not position.finished:
            raise OtherShardsError(
                f"the position was saved in the middle of epoch {position.epoch} by {saved_ranks} ranks, and there are "
                f"{ranks} now. Each rank holds its own shard, so the rows of it that were trained on are unknown. "
                "Weights and counters are restored; some rows of the epoch are repeated. LazyH5DataModule resumes "
                "exactly on any number of ranks."
            )
        return replace(position, segments=())

    def _check_rest(self, sampler: PlanSampler) -> None:
        """Raise if the segments cannot be consumed, or the rest cannot be cut under the present settings."""
        try:
            sequence, drop_last = sampler.sequence(self.epoch, self.order), sampler.drop_last
            sequence.n_consumed(self.segments, drop_last=drop_last)
            if not self.finished:
                sequence.plan(self.segments, batch_size=sampler.batch_size, world_size=1, rank=0, drop_last=drop_last)
        except H5ValueError as error:
            raise H5ResumeError(str(error)) from error


def saved_mode(word: Any) -> Mode:
    """Return the mode that a saved position names."""
    return "chunks" if word == "window" else word  # its name in older checkpoints


def is_position(value: object) -> bool:
    """Return whether something in a checkpoint looks like a position, whole or damaged."""
    return isinstance(value, Mapping) and {"digest", "segments", "order"} <= value.keys()


def _digest_of_state(state: Mapping[str, Any]) -> str:
    """Return a digest of all other fields: a number that was changed by accident still looks like a position."""
    fields = {name: state[name] for name in _FIELDS}  # a subclass may have added others
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _compare(state: Mapping[str, Any], order: OrderParameters, sampler: PlanSampler, identity: Identity | None) -> None:
    """Raise if saved and present data or settings differ; the number of ranks that hold shards is compared later."""
    parameters, saved_shards, present_shards = sampler.parameters, state["shards"] or {}, sampler.shards or {}
    fields = {
        "rows": (state["n_rows"], sampler.n_rows),
        **_digests(state["identity"], identity),
        "seed": (order.seed, parameters.seed),
        "order": (_kind_of_order(order.mode, sampler), _kind_of_order(parameters.mode, sampler)),
        "shuffle.scope": tuple("node" if settings.nodes else "global" for settings in (order, parameters)),
        "recipe": (order.recipe, parameters.recipe),
        "version of the order": (order.version, parameters.version),
        "drop_last": (state["drop_last"], sampler.drop_last),
        **{
            f"shards' {name}": (saved_shards.get(name), present_shards.get(name))
            for name in {*saved_shards, *present_shards} - {"world_size"}
        },
    }
    differences = {name: pair for name, pair in fields.items() if pair[0] != pair[1]}
    if differences:
        lines = "".join(
            f"\n  {name}: saved {saved_value!r}, present {value!r}"
            for name, (saved_value, value) in differences.items()
        )
        raise H5ResumeError(
            f"the saved position belongs to other data or settings:{lines}\n"
            "Use the files and settings of the saved run. Or pass "
            "distributed={'on_resume_mismatch': 'restart_epoch'} to the data module: "
            "weights and counters are restored, and the interrupted epoch starts over."
        )


def _digests(saved_identity: Any, identity: Identity | None) -> dict[str, tuple[str, str]]:
    """Return the digests of the data that both have, to be compared.

    A run may have read fewer files whole, such as objects of a store; older checkpoints have a sampled digest alone.
    """
    saved_digests: Identity = {"sampled": saved_identity} if isinstance(saved_identity, str) else saved_identity or {}
    return {
        "files" if name == "sampled" else f"files ({name})": (saved_digests[name], digest)
        for name, digest in (identity or {}).items()
        if name in saved_digests
    }


def _kind_of_order(mode: str, sampler: PlanSampler) -> str:
    """Return the mode. Modes that the package chose by memory and workers have one name if they shuffle."""
    return "shuffled" if sampler.chooses and mode != "none" else mode


class EpochSource(Protocol):
    """The owner of the epoch, if it is not the sampler: a data module, which has it from its trainer."""

    @property
    def is_attached(self) -> bool:
        """Whether it has a trainer that trains."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        ...

    def start_epoch(self, sampler: PlanSampler) -> int | None:
        """Return the epoch of an iteration that starts now, and restore the sampler's position in it.

        Return None if no trainer keeps them.

        Raises:
            H5ResumeError: a position was loaded and not applied.
        """
        ...


@dataclass(eq=False)
class Progress:
    """The progress of one iteration of a loader.

    Attributes:
        began: the position at which it began.
        first_row: rows of the epoch that were consumed by then.
        n_loaded: positions that were loaded before it began.
        step_rows: rows of a step on all ranks.
        n_given: batches that it has yielded.
        is_complete: whether it has yielded its last batch.
        is_over: whether it was asked for another one after that.
    """

    began: Position
    first_row: int
    n_loaded: int
    step_rows: int
    n_given: int = 0
    is_complete: bool = False
    is_over: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of the epoch that are consumed; a last batch that is not full counts as full."""
        return self.first_row + self.step_rows * self.n_given


class Passes:
    """Keeps the position of a loader without a Trainer: the position of the iteration that trains.

    Args:
        sampler: the loader's.

    Attributes:
        last: the iteration that yielded the last batch, or came to its end after that.
    """

    def __init__(self, sampler: PlanSampler) -> None:
        self._sampler = sampler
        self.last: Progress | None = None
        self._furthest: Progress | None = None  # furthest of the earlier iterations of its epoch
        self._loaded_epoch: int | None = None  # until an iteration begins
        self._n_loaded = 0

    def begin(self, epoch: int) -> Progress:
        """Begin an iteration of an epoch.

        Raises:
            H5ResumeError: the rest of another epoch was loaded and would be left out.
        """
        sampler, loaded_epoch = self._sampler, self._loaded_epoch
        self._loaded_epoch = None
        if (
            loaded_epoch not in (None, epoch)
            and sampler.epoch_source is None
            and (n_left := sampler.plan(loaded_epoch).n_steps)
        ):
            raise H5ResumeError(
                f"a position in epoch {loaded_epoch} was loaded, which has {n_left} batches left, but an iteration of "
                f"epoch {epoch} was started. Call loader.sampler.set_epoch({loaded_epoch}) first, or do not load the "
                "position."
            )
        position = sampler.position(epoch)
        return Progress(position, position.n_rows, self._n_loaded, sampler.batch_size * sampler.replica.world_size)

    def switch(self, iteration: Progress) -> None:
        """Note that another iteration yields batches from now on; ignored if it began before a position was loaded."""
        if iteration.n_loaded != self._n_loaded:
            return
        previous, self.last, furthest = self.last, iteration, self._furthest
        if previous is None or previous.is_over:
            return
        if furthest is None or furthest.began.epoch != previous.began.epoch or furthest.n_rows < previous.n_rows:
            self._furthest = previous

    def complete(self, iteration: Progress) -> None:
        """Note that an iteration has yielded its last batch, after which some loops never ask for its end.

        The next iteration is over the next epoch, or over all of the same one if ``set_epoch`` was called.
        """
        if iteration.is_complete:
            return
        iteration.is_complete = True
        if iteration.n_loaded == self._n_loaded and self._sampler.epoch_source is None:
            self._sampler.restore(None)
            self._sampler.complete(iteration.began.epoch)

    def end(self, iteration: Progress) -> None:
        """End an iteration: the next one is another pass."""
        self.complete(iteration)
        iteration.is_over = True
        if self._furthest is iteration or (self._furthest is not None and self._furthest.n_rows < iteration.n_rows):
            self._furthest = None
        if iteration.n_loaded == self._n_loaded:
            self.last = iteration

    def position(self, running: Iterable[Progress]) -> Position:
        """Return the position of the iteration which yielded the last batch.

        After ``set_epoch``, iterations of other epochs are ignored. Before, any unfinished one may be training.

        Args:
            running: iterations that began, and neither ended nor failed.

        Raises:
            H5ResumeError: others are at other batches, so that it is not known which of them trains.
        """
        epoch, counts_passes = self._sampler.epoch, self._sampler.counts_passes
        last, furthest = self.last, self._furthest
        candidates = [iteration for iteration in running if iteration.n_given and iteration.n_loaded == self._n_loaded]
        if not counts_passes:
            candidates = [iteration for iteration in candidates if iteration.began.epoch == epoch]
        if last is None or (last.began.epoch != epoch and not counts_passes):
            last = candidates[0] if candidates else None
        if last is None:  # no iteration of this epoch was started here
            return self._sampler.position(epoch)
        rivals = [
            iteration for iteration in candidates if (iteration.began, iteration.n_given) != (last.began, last.n_given)
        ]
        if last not in candidates and furthest and furthest.began.epoch == last.began.epoch:
            rivals += [furthest] if furthest.n_rows > last.n_rows else []
        if rivals:
            places = sorted({(iteration.began.epoch, iteration.n_given) for iteration in (last, *rivals)})
            raise H5ResumeError(
                "the loader's position was requested, but several of its iterations are at different batches: they "
                f"have yielded {', '.join(f'{n} of epoch {at}' for at, n in places)}. It is unknown which of them "
                "trains. Delete the other iterators, let the training loop take its next batch first, call "
                "loader.sampler.set_epoch(epoch) before each epoch, or look at batches through a loader of its own."
            )
        if counts_passes and last.is_over:
            return self._sampler.position(epoch)
        return last.began.after(self._sampler, last.n_given)

    def load(self, position: Position) -> None:
        """Continue from a saved position."""
        self._sampler.restore(position)
        self._sampler.resume_epoch(position.epoch)
        self.last = self._furthest = None
        self._n_loaded += 1
        self._loaded_epoch = position.epoch
