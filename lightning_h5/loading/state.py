"""The position of a run as plain values: what was consumed of which epoch, in which order, of which data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from ..errors import H5ResumeError, H5ValueError
from ..sampling import Mode, OrderParameters, PlanSampler, Segment, SourceOrder

__all__ = [
    "STATE_VERSION",
    "LoaderState",
    "OtherShardsError",
    "Position",
    "extend",
    "is_position",
    "position_from",
    "position_state",
    "steps_left",
]

STATE_VERSION = 1
MOST_SEGMENTS = 32
_FIELDS = ("version", "epoch", "segments", "finished", "order", "drop_last", "shards", "n_rows", "n_blocks", "identity")


class OtherShardsError(H5ResumeError):
    """The position is in the middle of an epoch of shards that another number of ranks held: they were other rows."""


def extend(segments: Sequence[Segment], batch_size: int, world_size: int, n_batches: int) -> tuple[Segment, ...]:
    """Segments with more batches consumed at their end, joined where the settings are the same."""
    if n_batches <= 0:
        return tuple(segments)
    last = segments[-1] if segments else None
    if last is not None and (last.batch_size, last.world_size) == (batch_size, world_size):
        return (*segments[:-1], Segment(batch_size, world_size, last.n_batches + n_batches))
    return (*segments, Segment(batch_size, world_size, n_batches))


class Position(NamedTuple):
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
    finished: bool


def position_state(sampler: PlanSampler, position: Position, identity: str | None = None) -> dict[str, Any]:
    """The position as plain values (text, numbers, lists, dicts): loads with ``weights_only=True``, and as JSON."""
    order = position.order
    state = {
        "version": STATE_VERSION,
        "epoch": position.epoch,
        "segments": [list(segment) for segment in _few(position, sampler)],
        "finished": position.finished,
        "order": _order_state(order),
        "drop_last": sampler.drop_last,
        "shards": sampler.shards,
        "n_rows": sampler.n_rows,
        "n_blocks": sampler.blocks.n_blocks,
        "identity": identity,
    }
    return state | {"digest": _digest(state)}


def _order_state(order: OrderParameters) -> dict[str, Any]:
    state: dict[str, Any] = {
        "mode": order.mode,
        "seed": order.seed,
        "batch_size": order.batch_size,
        "lanes": order.lanes,
        "window": order.window,
        "version": order.version,
    }
    if order.recipe:
        state |= {
            "recipe": order.recipe,
            "n_units": order.n_units,
            "sources": [list(source) for source in order.sources],
        }
    return state


def _few(position: Position, sampler: PlanSampler) -> tuple[Segment, ...]:
    """The segments, so few that the state stays small after any number of changes within one epoch."""
    if len(position.segments) <= MOST_SEGMENTS:
        return position.segments
    *before, last = position.segments
    sequence = sampler.sequence(position.epoch, position.order)
    n_rows = sequence.n_consumed(before, drop_last=sampler.drop_last)
    return Segment(1, 1, n_rows), last  # batches of one row say the same


def _digest(state: Mapping[str, Any]) -> str:
    """A digest of all other fields: a number that was changed by accident still looks like a position."""
    others = {name: state.get(name) for name in _FIELDS}  # a subclass may have put something beside them
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:16]


def is_position(value: object) -> bool:
    """Whether something out of a checkpoint looks like a position, whole or damaged."""
    return isinstance(value, Mapping) and {"digest", "segments", "order"} <= value.keys()


def position_from(state: Mapping[str, Any], sampler: PlanSampler, identity: str | None = None) -> Position:
    """Reads a saved position back and checks it against the present data and settings.

    Raises:
        H5ResumeError: a field is missing or makes no sense, or saved and present differ; both are shown.
    """
    if _whole(state, "version", 0) != STATE_VERSION:
        raise H5ResumeError(
            f"the saved position has version {state['version']}; this package reads version {STATE_VERSION}. "
            "Resume with the version of lightning_h5 that saved it."
        )
    if missing := [name for name in _FIELDS if name not in state]:
        raise _damaged(missing[0], None)
    try:
        digest = _digest(state)
    except (TypeError, ValueError) as error:
        raise _damaged("content", state) from error
    if state.get("digest") != digest:
        raise _damaged("digest", state.get("digest"))
    order = state.get("order")
    if not isinstance(order, Mapping) or order.get("mode") not in get_args(Mode):
        raise _damaged("order", order)
    if not isinstance(recipe := order.get("recipe", ""), str):
        raise _damaged("recipe", recipe)
    parameters = OrderParameters(
        recipe=recipe,
        n_units=_whole(order, "n_units", 1) if recipe else 0,
        sources=tuple(_source_order(source) for source in order.get("sources", ())) if recipe else (),
        mode=order["mode"],
        seed=_whole(order, "seed", None),
        batch_size=_whole(order, "batch_size", 1),
        lanes=_whole(order, "lanes", 1),
        window=_whole(order, "window", 0),
        version=_whole(order, "version", 1),
    )
    present = sampler.parameters
    _compare(
        {
            "rows": (_whole(state, "n_rows", 0), sampler.n_rows),
            "files": (state.get("identity"), identity),
            "seed": (parameters.seed, present.seed),
            "order": (_kind_of_order(parameters.mode, sampler), _kind_of_order(present.mode, sampler)),
            "recipe": (parameters.recipe, present.recipe),
            "version of the order": (parameters.version, present.version),
            "drop_last": (state.get("drop_last"), sampler.drop_last),
            **_shards(state.get("shards"), sampler.shards),
        }
    )
    finished = state.get("finished")
    if not isinstance(finished, bool):
        raise _damaged("finished", finished)
    epoch = _whole(state, "epoch", 0)
    shards = (state.get("shards") or {}).get("world_size"), (sampler.shards or {}).get("world_size")
    if shards[0] != shards[1]:
        if state.get("segments") and not finished:
            raise OtherShardsError(
                f"the position was saved in the middle of epoch {epoch} by {shards[0]} ranks, and there are "
                f"{shards[1]} now. Each rank holds a shard of its own, so none knows which of its rows were trained "
                "on. Weights and counters are taken up; some rows of the epoch come again. LazyH5DataModule goes on "
                "exactly with any number of ranks."
            )
        return Position(epoch, (), parameters, finished)
    return Position(epoch, _segments(state, sampler, epoch, parameters), parameters, finished)


def _source_order(source: Any) -> SourceOrder:
    if not isinstance(source, list | tuple) or len(source) != 3 or source[0] not in get_args(Mode):
        raise _damaged("order of a source", source)
    return SourceOrder(*source)


def _shards(saved: Any, present: Mapping[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    """How ranks hold shards, saved and present, but for the number of ranks."""
    if saved is not None and not (isinstance(saved, Mapping) and type(saved.get("world_size")) is int):
        raise _damaged("shards", saved)
    names = {*(saved or {}), *(present or {})} - {"world_size"}
    return {f"shards' {name}": ((saved or {}).get(name), (present or {}).get(name)) for name in sorted(names)}


def _kind_of_order(mode: str, sampler: PlanSampler) -> str:
    """The mode; where it is ours to choose, the same for all that shuffle, since it follows from budget and workers."""
    return "shuffled" if sampler.chooses and mode != "none" else mode


def steps_left(sampler: PlanSampler, epoch: int) -> int:
    """Steps that an epoch has left on each rank, under the present world size."""
    return sampler.plan(epoch).n_steps


def _segments(
    state: Mapping[str, Any], sampler: PlanSampler, epoch: int, order: OrderParameters
) -> tuple[Segment, ...]:
    given = state.get("segments")
    if not isinstance(given, list | tuple):
        raise _damaged("segments", given)
    segments = []
    for entry in given:
        if not isinstance(entry, list | tuple) or len(entry) != 3 or not all(type(n) is int and n > 0 for n in entry):
            raise _damaged("segments", given)
        segments.append(Segment(*entry))
    try:
        sequence = sampler.sequence(epoch, order)
        sequence.n_consumed(segments, drop_last=sampler.drop_last)
    except H5ValueError as error:
        raise _damaged("segments", given) from error
    if not state.get("finished"):
        try:
            sequence.plan(segments, batch_size=sampler.batch_size, world_size=1, rank=0, drop_last=sampler.drop_last)
        except H5ValueError as error:
            raise H5ResumeError(str(error)) from error
    return tuple(segments)


def _whole(state: Mapping[str, Any], name: str, least: int | None) -> int:
    value = state.get(name)
    if type(value) is not int or (least is not None and value < least):
        raise _damaged(name, value)
    return value


def _damaged(name: str, value: object) -> H5ResumeError:
    return H5ResumeError(f"the saved position is damaged: its {name!r} is {value!r}. Resume from another checkpoint.")


def _compare(fields: Mapping[str, tuple[Any, Any]]) -> None:
    differing = {name: pair for name, pair in fields.items() if pair[0] != pair[1]}
    if differing:
        lines = "".join(f"\n  {name}: saved {saved!r}, present {now!r}" for name, (saved, now) in differing.items())
        raise H5ResumeError(
            f"the saved position belongs to other data or settings:{lines}\n"
            "Use the files and settings of the saved run. Or pass on_resume_mismatch='restart_epoch' to the data "
            "module: weights and counters are taken up, and the epoch that was broken off starts over."
        )


class LoaderState:
    """Counts the batches that a loader gave out, for loops without a Trainer."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._before: tuple[Segment, ...] = ()
        self._order: OrderParameters | None = None
        self._n_given = 0
        self._loaded: int | None = None  # an epoch that was loaded, until an iteration goes on with it
        self._iteration = 0

    def begin(self, epoch: int, sampler: PlanSampler) -> int:
        """An iteration of an epoch begins; gives its number. Of several at a time the one that began last counts.

        Raises:
            H5ResumeError: the rest of another epoch was loaded and would be left out.
        """
        loaded, self._loaded = self._loaded, None
        if loaded not in (None, epoch) and not sampler.is_kept and (left := steps_left(sampler, loaded)):
            raise H5ResumeError(
                f"a position in epoch {loaded} was loaded, which has {left} batches left, and an iteration of epoch "
                f"{epoch} was begun. Call loader.sampler.set_epoch({loaded}) first, or do not load the position."
            )
        self._epoch, self._before, self._n_given = epoch, sampler.consumed(epoch), 0
        self._order = sampler.order_of(epoch)
        self._iteration += 1
        return self._iteration

    def advance(self, iteration: int) -> None:
        """One more batch was given out."""
        self._n_given += iteration == self._iteration

    def end(self, iteration: int, sampler: PlanSampler) -> None:
        """An iteration came to its end: the next one of the same epoch is a whole one again."""
        if iteration == self._iteration and not sampler.is_kept:
            sampler.forget()

    def as_dict(self, sampler: PlanSampler, identity: str) -> dict[str, Any]:
        """The position as plain values."""
        epoch = sampler.epoch
        if epoch != self._epoch or self._order is None:  # no iteration of it began here
            position = Position(epoch, sampler.consumed(epoch), sampler.order_of(epoch), False)
            return position_state(sampler, position, identity)
        world_size = sampler.replica.world_size
        segments = extend(self._before, sampler.batch_size, world_size, self._n_given * world_size)
        return position_state(sampler, Position(epoch, segments, self._order, False), identity)

    def load(self, state: Mapping[str, Any], sampler: PlanSampler, identity: str) -> None:
        """Takes over a saved position."""
        position = position_from(state, sampler, identity)
        sampler.restore(position.epoch, position.segments, position.order)
        sampler.go_on_from(position.epoch)
        self.begin(position.epoch, sampler)
        self._loaded = position.epoch
