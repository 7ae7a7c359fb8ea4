"""The position of a run: the consumed part of an epoch, and the order. One object, saved as plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import H5ResumeError, H5ValueError
from ..types import Identity
from .plan import Mode, OrderParameters, Segment, SourceOrder
from .run_order import RunOrder

__all__ = [
    "OtherShardsError",
    "Position",
    "common_digests",
    "is_position",
    "order_as_values",
    "order_of_values",
    "saved_mode",
]

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

    def after(self, run: RunOrder, n_steps: int) -> Position:
        """Return the position after more steps of all ranks, under a run's present settings."""
        if n_steps <= 0:
            return self
        world_size = run.replica.world_size
        segment = Segment(run.batch_size, world_size, n_steps * world_size)
        segments = self.segments
        if segments and segments[-1][:2] == segment[:2]:  # merge segments with equal settings
            segments, segment = segments[:-1], segment._replace(n_batches=segments[-1].n_batches + segment.n_batches)
        return replace(self, segments=(*segments, segment))

    def consumed(self, run: RunOrder) -> Segment | None:
        """Return one segment that has consumed the same rows of the epoch; None if nothing is consumed."""
        segments = self.segments
        return run.merged(self.epoch, self.order, segments) if len(segments) > 1 else next(iter(segments), None)

    @property
    def n_rows(self) -> int:
        """Rows of the epoch that are consumed; a last batch that is not full counts as full."""
        return sum(segment.batch_size * segment.n_batches for segment in self.segments)

    @property
    def first_unit(self) -> int:
        """Batches, or rows, of all earlier epochs, for a recipe that continues."""
        order = self.order
        return self.epoch * order.n_units if order.first_unit is None else order.first_unit

    def change_of_nodes(self, run: RunOrder) -> str:
        """Return a message on nodes that get other rows after this epoch, for the log; "" if they keep their rows."""
        n_before, n_after = self.order.nodes, run.parameters.nodes
        if n_before == n_after:
            return ""
        return (
            f"the number of nodes was {n_before} and is {n_after}: from epoch {self.epoch + 1} on, blocks are dealt to "
            "nodes again, which then read other rows than before"
        )

    def change_of_batches(self, batch_size: int, world_size: int) -> str:
        """Return a sentence on the rest of an epoch that has other batches than before; "" if it has the same ones."""
        if self.finished or not self.segments:
            return ""
        saved = self.segments[-1]
        if (saved.batch_size, saved.world_size) == (batch_size, world_size):
            return ""
        return (
            f"the saved position is inside an epoch with batches of {saved.batch_size} rows on {saved.world_size} "
            f"ranks; the present run has batches of {batch_size} on {world_size} ranks"
        )

    def state(self, run: RunOrder, identity: Identity | None = None) -> dict[str, Any]:
        """Return the position as plain values (text, numbers, lists, dicts), under 4 KiB.

        They load with ``weights_only=True``, and as JSON.
        """
        segments = self.segments
        if len(segments) > MAX_SEGMENTS:  # keeps the state small after any number of changes within an epoch
            segments = (run.merged(self.epoch, self.order, segments[:-1]), segments[-1])
        state = {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "segments": [list(segment) for segment in segments],
            "finished": self.finished,
            "order": order_as_values(self.order),
            "drop_last": run.drop_last,
            "shards": run.shards,
            "n_rows": run.n_rows,
            "n_blocks": run.blocks.n_blocks,
            "identity": identity,
        }
        return state | {"digest": _digest_of_state(state)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], run: RunOrder, identity: Identity | None = None) -> Position:
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
                f"the saved position is damaged: its digest is {state.get('digest')!r}, the digest of its "
                f"content is {digest!r}. Resume from another checkpoint."
            )
        order = order_of_values(state["order"])
        segments = tuple(Segment(*segment) for segment in state["segments"])
        position = cls(state["epoch"], segments, order, state["finished"])
        _compare(state, order, run, identity)
        saved_ranks, ranks = ((shards or {}).get("world_size") for shards in (state["shards"], run.shards))
        if saved_ranks == ranks:
            position._check_rest(run)
            return position
        if segments and not position.finished:
            raise OtherShardsError(
                f"the position was saved in the middle of epoch {position.epoch} by {saved_ranks} ranks, and there are "
                f"{ranks} now. Each rank holds its own shard, so it is unknown which rows of the epoch were used. "
                "Weights and counters are restored; some rows of the epoch are repeated. LazyH5DataModule resumes "
                "exactly on any number of ranks."
            )
        return replace(position, segments=())

    def _check_rest(self, run: RunOrder) -> None:
        """Raise if the segments cannot be consumed, or the rest cannot be cut under the present settings."""
        try:
            sequence, drop_last = run.sequence(self.epoch, self.order), run.drop_last
            sequence.n_consumed(self.segments, drop_last=drop_last)
            if not self.finished:
                sequence.plan(self.segments, batch_size=run.batch_size, world_size=1, rank=0, drop_last=drop_last)
        except H5ValueError as error:
            raise H5ResumeError(str(error)) from error


def order_as_values(order: OrderParameters) -> dict[str, Any]:
    """Return the settings of an order as plain values."""
    values: dict[str, Any] = {
        "mode": order.mode,
        "seed": order.seed,
        "batch_size": order.batch_size,
        "streams": order.streams,
        "window": order.window,
        "version": order.version,
    }
    if order.recipe:
        sources = [list(source) for source in order.sources]
        values |= {"recipe": order.recipe, "n_units": order.n_units, "sources": sources}
    if order.first_unit is not None:
        values["first_unit"] = order.first_unit
    if order.nodes:
        values |= {"nodes": order.nodes, "world_size": order.world_size}
    return values


def order_of_values(values: Mapping[str, Any]) -> OrderParameters:
    """Return the settings of an order from what ``order_as_values`` returned."""
    sources = tuple(SourceOrder(saved_mode(mode), *numbers) for mode, *numbers in values.get("sources", ()))
    return OrderParameters(**{**values, "mode": saved_mode(values["mode"]), "sources": sources})


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


def _compare(state: Mapping[str, Any], order: OrderParameters, run: RunOrder, identity: Identity | None) -> None:
    """Raise if saved and present data or settings differ; the number of ranks that hold shards is compared later."""
    parameters, saved_shards, present_shards = run.parameters, state["shards"] or {}, run.shards or {}
    # Whether shards differ by a row follows from the number of ranks, unless an older version saved the position.
    of_ranks = {"world_size", "sizes"}
    if saved_shards.get("world_size") == present_shards.get("world_size"):
        of_ranks = {"world_size"}
    fields = {
        "rows": (state["n_rows"], run.n_rows),
        **common_digests(state["identity"], identity),
        "seed": (order.seed, parameters.seed),
        "order": (_kind_of_order(order.mode, run), _kind_of_order(parameters.mode, run)),
        "shuffle.scope": tuple("node" if settings.nodes else "global" for settings in (order, parameters)),
        "recipe": (order.recipe, parameters.recipe),
        "version of the order": (order.version, parameters.version),
        "drop_last": (state["drop_last"], run.drop_last),
        **{
            f"shards' {name}": (saved_shards.get(name), present_shards.get(name))
            for name in {*saved_shards, *present_shards} - of_ranks
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


def common_digests(saved_identity: Any, identity: Identity | None) -> dict[str, tuple[str, str]]:
    """Return the digests of the data that both have, to be compared.

    A run may have read fewer files whole, such as objects of a store; older checkpoints have a sampled digest alone.
    """
    saved_digests: Identity = {"sampled": saved_identity} if isinstance(saved_identity, str) else saved_identity or {}
    return {
        "files" if name == "sampled" else f"files ({name})": (saved_digests[name], digest)
        for name, digest in (identity or {}).items()
        if name in saved_digests
    }


def _kind_of_order(mode: str, run: RunOrder) -> str:
    """Return the mode. Modes that the package chose by memory and workers have one name if they shuffle."""
    return "shuffled" if run.chooses and mode != "none" else mode
