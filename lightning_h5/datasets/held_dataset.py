"""Rows that a rank holds in memory: loaded once, at the speed of the decoder on all cores."""

from __future__ import annotations

import hashlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.utils.data import get_worker_info

from ..cores import is_forked
from ..counters import Counters
from ..errors import H5Error, H5ValueError
from ..hdf5 import OpenOptions, process_pool
from ..order import (
    BlockTable,
    RankShard,
    Replica,
    Rows,
    RowWeights,
    ShardMode,
    as_array,
    note_length,
    present_replica,
    resolve_replica,
    union,
)
from ..readers import BulkTask, TaskQueue, check_bounds
from ..readers.buffers import Column
from ..samples import ReadCost, RowTable, blocks_of, rows_of_all
from ..types import Identity, IntArray
from .fields import Fields, torch_dtype_of
from .held_fields import HeldFields
from .held_rows import HeldRows, RankRows
from .raw_batch import RawBatch
from .sample_layout import Transform
from .second_sharding import refuse_second_sharding
from .shard_loading import Comparison, load_shards
from .table_dataset import TableDataset
from .target_order import TargetComparison

__all__ = ["HeldDataset"]

BLOCKS_A_RANK = 16  # minimum number of blocks per rank for random shards

_log = logging.getLogger(__name__)


class HeldDataset(TableDataset):
    """Rows that a rank holds in memory.

    Args:
        table: see ``TableDataset``, as the four that follow.
        fields: see above.
        batch_transform: see above.
        indices: see above.
        options: see above.
        device: what holds the rows.
        replica: this rank, as the caller passed it; None asks for it when it is first needed.
        mode: which rows a rank has.
        reshard_every: epochs after which shards are drawn again; 0 keeps them.
        seed: decides those.
        pins_memory: lock the pages of the shard for copies to a GPU.
        shares_memory: hold rows once for all processes of this machine that need them.
        log_fn: called with a line about the loaded shard; None logs it.
    """

    weights: RowWeights | None = None  # how often training takes the rows of all ranks, if not once

    def __init__(
        self,
        table: RowTable,
        fields: Fields,
        *,
        batch_transform: Transform | None,
        indices: npt.ArrayLike | None,
        options: OpenOptions,
        device: torch.device,
        replica: Replica | None,
        mode: ShardMode,
        reshard_every: int,
        seed: int,
        pins_memory: bool,
        shares_memory: bool,
        log_fn: Callable[[str], Any] | None,
    ) -> None:
        self._in_memory = HeldFields(table, fields, options)
        self.device, self._replica = device, replica
        super().__init__(table, fields, batch_transform=batch_transform, indices=indices, options=options)
        self._sharding: tuple[ShardMode, int, int] = (mode, reshard_every, seed)
        self._shard = None if replica is None else self.shard_of(replica)
        self.draw, self.for_workers, self.for_training = 0, False, True
        self.pins_memory, self.shares_memory, self._log_fn = pins_memory, shares_memory, log_fn

    def join(self, counters: Counters, work: TaskQueue) -> None:
        """See ``RowDataset.join``."""
        super().join(counters, work)
        self._in_memory.join(counters, work)
        self._held: HeldRows | None = None
        self._has_all = False  # whether it has the rows of all ranks
        self.held_identity: Identity = {}

    # Rank ----------------------------------------------------------------------------------------------------

    @property
    def is_rank_given(self) -> bool:
        """Whether the caller passed the replica."""
        return self._replica is not None

    @property
    def shard(self) -> RankShard:
        """The rows that this rank holds. Unless the caller passed the rank, the first access asks for it."""
        if self._shard is None:
            self._shard = self.shard_of(present_replica())
        return self._shard

    @shard.setter
    def shard(self, shard: RankShard) -> None:
        self._shard = shard

    def shard_of(self, replica: Replica) -> RankShard:
        """Return the rows that a rank holds."""
        rank, world_size = replica
        blocks = _drawn(blocks_of(self.table, self.indices, of_all_fields=True), world_size)
        mode, reshard_every, seed = self._sharding
        return RankShard(blocks, world_size, rank, mode, reshard_every, seed)

    def _check_rank(self) -> None:
        """Raise if another rank requests rows than the one that holds them.

        Raises:
            H5ValueError: the process group was made after the rank was asked for, and has another.
        """
        if self.is_rank_given or not _is_in_group():
            return
        now, held = resolve_replica(), Replica(self.shard.rank, self.shard.world_size)
        if now != held:
            raise H5ValueError(
                f"rows were requested by rank {now.rank} of {now.world_size}, but the dataset holds the rows of rank "
                f"{held.rank} of {held.world_size}: it was made before the process group. Make it after "
                "init_process_group (under a Trainer, in setup or train_dataloader, or use RankCachedH5DataModule), or "
                "pass rank and world_size to it. rank=0 and world_size=1 hold all rows on each rank."
            )

    # Loading -------------------------------------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether the rows are in memory."""
        return self._held is not None

    def load(self) -> None:
        """Load the shard, unless it is loaded.

        Raises:
            H5Error: there is not enough memory, or rows cannot be read.
        """
        if self.is_loaded:
            return
        in_worker = get_worker_info() is not None
        if in_worker:
            warnings.warn(
                "a worker process loads its rank's shard again, since it does not inherit memory. Pass "
                "share_memory=True and load before workers start: they then all read the same copy.",
                stacklevel=2,
            )
        is_alone = self.is_rank_given or not _is_in_group() or not self.shares or in_worker
        load_shards({"": self}, is_alone=is_alone, shows_bar=not in_worker)

    def draw_by(self, weights: RowWeights) -> None:
        """Let training take rows as often as weights ask; each rank draws among those that it holds.

        A row that comes again has a number larger by ``len(self)``, each time.

        Args:
            weights: of the rows of all ranks.

        Raises:
            H5ValueError: all weights of a rank's rows are 0; on all ranks.
        """
        self.weights, self.sample_layout = weights, replace(self.sample_layout, n_rows=self.n_rows)
        self._check_weights()

    def _check_weights(self) -> None:
        """Raise ``H5ValueError`` if a rank holds no row that has a weight, as all ranks find."""
        if self.weights is None:
            return
        for rank in range(self.shard.world_size):
            if not self.weights.weights[as_array(self.shard.rows(self.draw, rank))].any():
                raise H5ValueError(
                    f"rows weighted {self.weights.text}: all rows that rank {rank} of {self.shard.world_size} holds "
                    "have the weight 0. Pass memory='interleave', or train on fewer ranks."
                )

    def reshard(self, draw: int) -> bool:
        """Take the shard of another draw, and give up the one that is held, if it is another.

        Args:
            draw: how often the shards were drawn (see ``RankShard``).

        Returns:
            Whether its rows are in memory; they are if all rows of this machine's ranks were.
        """
        if draw == self.draw:
            return self.is_loaded
        self.draw = draw
        self._check_weights()
        if self._held is not None:
            if self._has_all and not self._held.has_text:
                self._held.regroup(self._rank_rows(self._held.rows))
            else:
                self.close()
        return self.is_loaded

    def can_reuse(self, other: HeldDataset) -> bool:
        """Return whether this one holds, in memory, what another one would load."""
        return (
            self.is_loaded
            and self.shard.is_like(other.shard)
            and (self.fields, self.device, self.batch_transform) == (other.fields, other.device, other.batch_transform)
            and (self.shares_memory, self.for_workers) == (other.shares_memory, other.for_workers)
            and self.table.guards == other.table.guards
            and self.identity() == other.identity()
            and (self.weights and self.weights.recipe) == (other.weights and other.weights.recipe)
        )

    def digest_of_rank(self) -> tuple[int, str] | None:
        """Return this rank and a digest of its rows in memory, for JSON; None if these are not compared on resume.

        Compared are fields that any machine decodes to the same bytes, in the shards that a run begins with.
        """
        if self._held is None or self.draw or not self._digest_fields:
            return None
        digest = self._held.digest(self._digest_fields)
        return None if digest is None else (self.rank, digest)

    @property
    def _digest_fields(self) -> list[int]:
        fields, arrays = self._in_memory.held, self._in_memory.table.layouts[0]
        return [
            at
            for at, ((plan, patch_plan), array) in enumerate(zip(fields, arrays, strict=True))
            if plan.dtype is not None
            and plan.affine is None
            and patch_plan is None
            and array.decoding is None
            and (plan.dtype.is_floating_point or torch_dtype_of(plan.stored) == plan.dtype)
        ]

    def note_digests(self, answers: Sequence[Any]) -> None:
        """Keep the digests of all ranks, for a resume with as many ranks that hold the rows in the same form.

        Args:
            answers: what ``digest_of_rank`` returned on the processes that loaded together.
        """
        shard, by_rank = self.shard, dict(answer for answer in answers if answer is not None)
        if by_rank.keys() != {*range(shard.world_size)}:
            return
        held = self._in_memory.held
        plans = [(at, str(held[at].plan.dtype), held[at].plan.row_shape) for at in self._digest_fields]
        form = hashlib.sha256(repr((sys.byteorder, shard.mode, plans)).encode()).hexdigest()[:8]
        joined = "".join(by_rank[rank] for rank in range(shard.world_size))
        self.held_identity = {
            f"held by {shard.world_size} ranks, {form}": hashlib.sha256(joined.encode()).hexdigest()[:32]
        }

    @property
    def rank(self) -> int:
        """This replica."""
        return self.shard.rank

    @property
    def shares(self) -> bool:
        """Whether processes of a machine hold their rows together."""
        mixes = self.shard.mode == "interleave" and self.shard.world_size > 1
        return self.device.type == "cpu" and (self.shares_memory or mixes)

    def _samples_at(self, numbers: Rows) -> Rows:
        """Return the samples of the table with some numbers among those of all ranks."""
        if self.indices is None or not isinstance(numbers, range):
            return numbers if self.indices is None else self.indices[numbers]
        return self.indices[numbers.start : numbers.stop : numbers.step]

    def _rank_rows(self, rows: Sequence[Rows], *, are_own: bool = False) -> RankRows:
        """Return what this rank has of rows in memory; ``are_own`` is whether all of them are this rank's."""
        numbers = self.shard.rows(self.draw)
        samples = self._samples_at(numbers)
        own = rows if are_own else self._in_memory.rows_of(samples)
        return RankRows(self._in_memory.over(rows, samples), own, numbers)

    def memory(self, ranks: Sequence[int], *, shared: bool, owner: tuple[int, int] | None = None) -> HeldRows:
        """Return memory for the rows of some ranks, nothing loaded yet.

        Args:
            ranks: these ranks, with this one.
            shared: whether their processes share the memory.
            owner: see ``HeldRows``.
        """
        rows = self._in_memory.rows_of(self._samples_at(union([self.shard.rows(self.draw, rank) for rank in ranks])))
        return HeldRows(
            rows,
            self._rank_rows(rows, are_own=tuple(ranks) == (self.rank,)),
            self._in_memory.held,
            device=self.device,
            shared=shared or self.shares_memory or self.for_workers,
            owner=owner,
        )

    def load_tasks(self, held: HeldRows) -> tuple[list[BulkTask], list[BulkTask]]:
        """Return what is to be loaded (see ``HeldRows.tasks``)."""
        return held.tasks(self._in_memory.table, self.options, self.counters, notes_damage=self.bad_rows.skips)

    def note_damage(self, answers: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Note rows that could not be read into memory.

        Args:
            answers: what ``HeldDamage.known`` has on the processes that filled it.
        """
        if self._held is not None:
            self._held.damage.note(damaged for answer in answers for damaged in answer)

    def comparisons(self) -> Iterator[Comparison]:
        """Yield what all ranks compare once their rows are loaded: a sample of the targets, and digests of rows."""
        layout = self.sample_layout
        first, keys = len(layout.x.fields.keys), () if layout.y is None else layout.y.fields.keys

        def read(places: IntArray) -> Sequence[Column]:
            """Return the targets' columns."""
            return self.gather(places).columns[first : first + len(keys)]

        targets = TargetComparison(self.shard, keys, read, self.cost.row_bytes, self.for_training)
        yield Comparison("comparing targets", targets.answer, targets.compare)
        yield Comparison("comparing rows", self.digest_of_rank, self.note_digests)

    def terms(self) -> dict[str, Any]:
        """Return what must be equal on all processes that hold rows together; it is compared before they load."""
        shard = self.shard
        return {
            "rows": shard.n_rows,
            "ranks": shard.world_size,
            "mode": shard.mode,
            "share_memory": self.shares_memory,
            "dtypes": [str(field.plan.dtype) for field in self._in_memory.held],
            "redrawn": (self.draw, shard.reshard_every, shard.seed),
            "content": self.identity() if self.shares else None,
            "normalization": self.fields.normalization,
        }

    def n_host_bytes(self, rank: int) -> int:
        """Return the bytes that a rank's rows take in this machine's memory; about as many however shards are drawn."""
        if self.device.type != "cpu":
            return 0
        return self._in_memory.n_bytes_of(self._samples_at(self.shard.rows(0, rank)))

    def use(self, held: HeldRows, *, has_all: bool) -> None:
        """Serve rows from memory that was filled; ``has_all`` is whether it has the rows of all ranks."""
        self._held, self._has_all = held, has_all
        self.check_unchanged()
        self.close_files()  # no longer needed

    def check_unchanged(self) -> None:
        """Raise ``H5DataChangedError`` if a file is no longer as it was when the dataset was made."""
        for guard in self.table.guards:
            guard.check()

    def log_loaded(self, name: str, seconds: float) -> None:
        """Log a line about the loaded shard, or pass it to ``log_fn``."""
        shard, choice, n_bytes = self.shard, "", 0 if self._held is None else self._held.n_bytes
        if shard.world_size > 1:
            choice = " (neighboring rows)" if shard.mode == "contiguous" else f" (one of every {shard.world_size})"
            choice = " (drawn at random)" if self.draw else choice
        (self._log_fn or _log.info)(
            f"{name + ': ' if name else ''}rank {shard.rank} of {shard.world_size} holds {shard.n_held:,} of "
            f"{shard.n_rows:,} rows{choice}, {n_bytes / 2**20:,.1f} MiB, loaded in {seconds:.1f} s"
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's rows; 0 in workers, which have the same memory."""
        return 0 if self._held is None or get_worker_info() is not None else self._held.n_bytes

    def close(self) -> None:
        """Release the memory; later reads load the rows again."""
        if self._held is not None:
            self._held.close()
        self._held = None
        self.close_files()  # still open if loading failed

    def close_files(self) -> None:
        """Close this process's handles of the files."""
        for path in self.table.paths:
            process_pool().close(path)

    # Rows ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        self._check_rank()
        shard = self.shard
        if shard.world_size > 1:
            refuse_second_sharding(Replica(shard.rank, shard.world_size))
        return note_length(shard)

    @property
    def n_rows(self) -> int:
        """Rows of all ranks."""
        return self.shard.n_rows

    @property
    def rows_on_each_rank(self) -> int:
        """Rows that every rank has at least."""
        return self.shard.n_least

    @property
    def rows(self) -> IntArray:
        """The rows that this rank holds, by their numbers among all that are sharded; shape ``(len(self),)``."""
        return as_array(self.shard.rows(self.draw))

    def begin(self, rows: IntArray, epoch: int | None = None, *, at_once: bool = False) -> Callable[[], RawBatch]:
        """See ``RowDataset.begin``: loads the shard if it is not loaded."""
        self._check_rank()
        if self._held is None:
            self.load()
        all_cores = at_once and not is_forked()
        if self.weights is not None:
            times, held = np.divmod(rows, self.shard.n_held)
            return partial(self._copy_again, times, held, epoch, all_cores=all_cores)
        return partial(self._copy, rows, epoch, all_cores=all_cores)

    def _of_rank(self, rows: IntArray) -> HeldRows:
        """Return the memory that these rows of this rank are in."""
        if self._held is None:
            raise H5Error("the shard was released while its rows were being read. Read them again.")
        if len(rows):
            check_bounds(rows, self.shard.n_held, "this rank's shard")
        return self._held

    def _copy_again(self, times: IntArray, rows: IntArray, epoch: int | None, *, all_cores: bool) -> RawBatch:
        """Return rows with numbers that say how often each was drawn before, so that transforms draw differently."""
        raw = self._copy(rows, epoch, all_cores=all_cores)
        return raw._replace(rows=raw.rows + times * self.n_rows)

    def _copy(self, rows: IntArray, epoch: int | None, *, all_cores: bool) -> RawBatch:
        held = self._of_rank(rows)
        batch = held.rows_of(rows, epoch)
        read = partial(self._in_memory.columns, held, len(rows), batch, self._buffers, all_cores=all_cores)
        return self.assembled(held.numbers(rows), batch, read)

    def numbers_of(self, rows: IntArray) -> IntArray:
        """See ``RowDataset.numbers_of``: numbers among the rows of all ranks."""
        held = rows % self.shard.n_held if self.weights is not None else rows
        return self.rows[held]

    def files_of(self, rows: IntArray) -> list[str]:
        """See ``RowDataset.files_of``: none, since all rows are in memory."""
        return []

    @property
    def cost(self) -> ReadCost:
        """See ``RowDataset.cost``; text is not counted."""
        row_bytes = self.table.indexer.mean_bytes([plan.row_bytes for plan in self.plans]) + self.dense_bytes
        return ReadCost(row_bytes, is_in_memory=True)

    def blocks(self) -> BlockTable:
        """See ``RowDataset.blocks``: one block, since all rows are in memory."""
        return BlockTable.of_sizes([self.shard.n_held])

    def _summary_of_rows(self) -> list[str]:
        shard, held = self._shard, self._held
        if shard is None:  # to show a dataset does not settle its rank
            n_rows = self.table.n_samples if self.indices is None else len(self.indices)
            return [f"{n_rows:,} rows of all ranks", "not loaded"]
        return [
            f"rank {shard.rank} of {shard.world_size} holds {rows_of_all(shard.n_held, shard.n_rows)}",
            "not loaded" if held is None else f"{held.n_bytes / 2**20:,.1f} MiB",
        ]

    def __getstate__(self) -> dict[str, Any]:
        if _is_in_group():
            self.shard  # noqa: B018  # a worker process has no group to ask
        sent = self._held if self._held is not None and self._held.can_be_sent else None
        return super().__getstate__() | {"_held": sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._held = state["_held"]


def _is_in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _drawn(blocks: BlockTable, world_size: int) -> BlockTable:
    """Return the blocks that shards are drawn of: those of the files, cut finer if they are few."""
    sizes = np.diff(blocks.starts)
    max_rows = max(1, blocks.n_rows // (BLOCKS_A_RANK * world_size))
    if len(sizes) >= BLOCKS_A_RANK * world_size or not len(sizes):
        return blocks
    return BlockTable.of_sizes(
        [n for size in sizes.tolist() for n in [max_rows] * (size // max_rows) + [size % max_rows]]
    )
