"""The loaders of a data module: the order of an epoch, its sampler, the loader, and log messages about them."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import log as ln
from types import MappingProxyType
from typing import Any

import torch

from .._lightning import check_trainer, overrides, rank_zero_info
from ..cores import share_cores
from ..datasets import BadSampleLedger, RowDataset, TableDataset
from ..errors import H5ValueError
from ..loading import H5DataLoader, SampleCollate
from ..loading.choose_order import FEW_BLOCKS, Order, choose_order
from ..options import BadRowOptions, SegmentOptions, ShuffleOptions, WeightOptions
from ..order import (
    N_LABELS,
    EpochRecipe,
    Mode,
    OrderParameters,
    PlanSampler,
    Replica,
    SourceOrder,
    TrainBatches,
    WeightedRecipe,
    check_nodes,
    label_entropy,
    launched_nodes,
    resolve_replica,
)
from ..readers import keeps_decoded, storage_rates
from ..samples import SampleOptions
from ..sizes import bytes_text, whole
from ..types import IntArray
from .arguments import SPLITS, LoaderArguments, Split, picked
from .settings import RecordsSettings
from .training_rows import segment_ends, weights_of

__all__ = ["MakesLoaders", "NoRows"]

DEFAULT_BATCH_SIZE = 32
"""The default of ``batch_size``; with ``segments.max_tokens`` it is not a limit."""

_GATHER_IN_FORWARD = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}


class NoRows(list[Any]):
    """The empty loader of a split without data."""


class MakesLoaders(RecordsSettings):
    """A data module that creates loaders for its datasets.

    Attributes:
        seed: seed of the order; set by ``setup``.

    Args:
        arguments: the constructor's arguments by name.
    """

    seed: int | None
    decodes_on_device = False
    """Whether ``files.decode_on`` is supported."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self._nodes = 0  # number of nodes that blocks are assigned to, from ``setup`` on; 0 without scope="node"
        self._free_memory: int | None = None  # for pages of files, on the node with the least, from ``setup`` on
        self._datasets: dict[Split, RowDataset] = {}
        self._loaders = _no_loaders()
        self._logged: set[str] = set()
        self._measured: set[OrderParameters] = set()  # orders whose mixing was logged

    def _use_arguments(self, arguments: Mapping[str, Any]) -> None:
        super()._use_arguments(arguments)
        self._options = options = picked(LoaderArguments, arguments)
        self._rank, self._world_size = options.distributed.rank, options.distributed.world_size
        self._infer(seed=options.seed)
        self._bad_rows = BadRowOptions.of(arguments.get("on_bad_row", "raise"))
        self._ledger = BadSampleLedger(0 if self._bad_rows is None else self._bad_rows.limit)
        self._kind = SampleOptions.parse(
            arguments["sample"],
            arguments["segments"],
            arguments["window"],
            arguments["select"],
            patch=arguments["patch"],
        )
        self._keeps_together = self._kind.segments.keep_together
        _check_scope(options.shuffle, arguments, self._kind.segments)
        if options.files.decode_on != "cpu":
            self._check_decoding(options.files.decode_on, arguments)

    @property
    def rank(self) -> int | None:
        """The number of this replica; set by ``setup``."""
        return self._rank

    @rank.setter
    def rank(self, rank: object) -> None:
        raise _found_by_setup("rank", rank)

    @property
    def world_size(self) -> int | None:
        """The number of replicas; set by ``setup``."""
        return self._world_size

    @world_size.setter
    def world_size(self, world_size: object) -> None:
        raise _found_by_setup("world_size", world_size)

    # Lightning sets this attribute; as a property it can refuse a Trainer of the other Lightning package early.
    @property
    def trainer(self) -> Any:
        """The trainer that this module is attached to, or None."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        if trainer is not None:
            check_trainer(trainer)
        self._trainer = trainer

    @property
    def datasets(self) -> Mapping[Split, RowDataset]:
        """The datasets that ``setup`` has created so far, by split (train, val, test, predict)."""
        return MappingProxyType(self._datasets)

    @property
    def is_overfitting(self) -> bool:
        """Whether the trainer repeats the same few batches each epoch (``overfit_batches``)."""
        return bool(getattr(self.trainer, "overfit_batches", False))

    def __repr__(self) -> str:
        status = f"rank {self.rank} of {self.world_size}" if self._datasets else "not set up: setup() opens the files"
        max_tokens = self._kind.segments.max_tokens
        size = f"batch_size {self.batch_size}" if max_tokens is None else f"at most {max_tokens:,} steps a batch"
        lines = [self._shown_settings(), f"  {size}, {status}"]
        lines += [f"  {split}: {self._datasets[split]!r}" for split in SPLITS if split in self._datasets]
        return "\n".join(lines)

    __str__ = __repr__  # Lightning's __str__ creates loaders

    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks receive the module before it has loaders, and create their own.
        return self.__dict__ | {"_loaders": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_loaders": _no_loaders()})

    # Order ---------------------------------------------------------------------------------------------------

    def train_batches(self, n_rows: int) -> TrainBatches:
        """Return the division of a training epoch into batches."""
        return TrainBatches(n_rows, self.batch_size, self.world_size or 1, self._options.drop_last)

    def _check_rows(self, split: Split, n_rows: int) -> None:
        """Raise an error for numbers of rows, ranks and batches that leave a rank without rows or steps."""
        world_size = self.world_size or 1
        if n_rows < world_size and split != "predict":
            raise H5ValueError(
                f"the split {split!r} has {n_rows} rows and there are {world_size} ranks; each needs at least one. "
                "Use fewer devices, or more rows."
            )
        if split != "train":
            self._check_equal_batches(split, n_rows, world_size)
            return
        if self._kind.segments.max_tokens is not None:
            self._check_token_batches(self._datasets[split])
            return
        cut = self.train_batches(n_rows)
        if cut.n_steps == 0:
            raise H5ValueError(
                f"drop_last drops all {n_rows} rows of 'train': a step needs batch_size {cut.batch_size} x "
                f"{world_size} ranks = {cut.batch_size * world_size} rows. Make batch_size smaller, or leave drop_last "
                "out."
            )
        if cut.n_left_out and not cut.drop_last:
            self._log_once(
                f"batch_size=1 on {world_size} ranks: {cut.n_left_out} of {n_rows} rows, different ones each epoch, "
                "are left out so that all ranks take the same number of steps"
            )

    def _check_token_batches(self, dataset: RowDataset) -> None:
        """Refuse an epoch of training without a step, and log batches that are left out."""
        world_size = self.world_size or 1
        sampler = self.sampler_of(dataset, self._order(dataset, training=True), training=True)
        n_batches, n_left_out = sampler.recipe.n_batches(sampler.present_order(), world_size)
        if not len(sampler):
            raise H5ValueError(
                f"drop_last drops all {n_batches} batches of 'train', which has {dataset.n_rows} samples: a step needs "
                f"{world_size} batches. Make segments.max_tokens smaller, or leave drop_last out."
            )
        if n_left_out and not self._options.drop_last:
            self._log_once(
                f"{n_left_out} of {n_batches} batches, different ones each epoch, are left out so that all "
                f"{world_size} ranks take the same number of steps: most batches have a single sample"
            )

    def _check_equal_batches(self, split: Split, n_rows: int, world_size: int) -> None:
        """Raise an error if some ranks evaluate a batch more and would wait for the others in ``forward``."""
        strategy, batch_size = getattr(self.trainer, "strategy", None), self._rows_of_a_batch(training=False)
        if not any(kind.__name__ in _GATHER_IN_FORWARD for kind in type(strategy).__mro__):
            return
        ends = self.shard_ends(self._datasets[split])
        ranks = range(world_size) if ends is not None else (0, world_size - 1)  # the first have the larger shards
        recipe = self._order(self._datasets[split], training=False).recipe or EpochRecipe()
        steps = [recipe.evaluation(n_rows, batch_size, world_size, rank, ends).n_steps for rank in ranks]
        if min(steps) < max(steps):
            raise H5ValueError(
                f"the {n_rows} rows of {split!r} make {max(steps)} batches of {batch_size} on some of {world_size} "
                f"ranks and {min(steps)} on others, and {type(strategy).__name__} would hang, since it gathers "
                "parameters in forward. Pass eval_batch_size=2 or more, at least one row per rank, and no "
                "segments.keep_together."
            )

    def kept_modes(self) -> tuple[Mode, ...]:
        """The order's mode in a resumed run, or the mode of each source of a mixture; empty without a resumed run."""
        return ()

    def order_of(self, dataset: RowDataset, *, shuffles: bool) -> Order:
        """Return the order of rows."""
        order = choose_order(
            dataset,
            self._shuffle(shuffles),
            world_size=self.world_size or 1,
            num_workers=self._options.num_workers,
            nodes=self._nodes,
            memory=self._free_memory,
            saved_mode=next(iter(self.kept_modes()), None),
        )
        weights = weights_of(dataset)
        return order if weights is None else order._replace(recipe=WeightedRecipe(weights, dataset.blocks()))

    def sampler_of(self, dataset: RowDataset, order: Order, *, training: bool) -> PlanSampler:
        """Return the sampler of a loader."""
        rank, world_size = self._replica()
        return PlanSampler(
            dataset.blocks(),
            self._parameters(order),
            **self._sampler_arguments(training=training),
            rank=rank,
            world_size=world_size,
            chooses=self._options.shuffle.mode == "auto",
            recipe=order.recipe,
            repeats=self.is_overfitting,
            ends=None if training else self.shard_ends(dataset),
        )

    def shard_ends(self, dataset: RowDataset) -> IntArray | None:
        """Return the sample numbers at which a rank's shard of an evaluation may end; None for all."""
        return segment_ends(dataset) if self._keeps_together else None

    def _sampler_arguments(self, *, training: bool) -> dict[str, Any]:
        return {
            "batch_size": self._rows_of_a_batch(training=training),
            "drop_last": training and self._options.drop_last,
            "evaluation": not training,
            "samples": self._options.collate_function is not None,
            "epoch_source": self if training else None,
        }

    def read_with(self, dataset: RowDataset, order: Order, cache_bytes: int, *, training: bool) -> None:
        """Prepare a dataset for the order in which its rows will be visited."""
        # Evaluation needs each chunk once, for a short time.
        retain = order.retain(cache_bytes) if training else False
        in_runs = order.mode == "chunks"
        dataset.read_with(cache_bytes, retain=retain, in_runs=in_runs, gives_back=order.exceeds_memory)

    def mixed_rows(self, n_rows: int, noun: str) -> str:
        """Describe the rows that a training order mixes, for the log.

        Args:
            n_rows: rows of all ranks.
            noun: "rows", or "samples" if a sample has several rows.
        """
        if self._nodes > 1 and not self.is_overfitting:
            return f"the {noun} of each node, {n_rows // self._nodes:,} of {n_rows:,} (dealt to {self._nodes} nodes)"
        return f"{n_rows:,} {noun}"

    def _shuffle(self, shuffles: bool) -> Any:
        options = self._options.shuffle
        return options if shuffles else replace(options, mode="none", scope="global")

    def _order(self, dataset: RowDataset, *, training: bool) -> Order:
        return self.order_of(dataset, shuffles=training and not self.is_overfitting)

    def _rows_of_a_batch(self, *, training: bool) -> int:
        """Return the most rows of a batch on one rank."""
        if not training and self._options.eval_batch_size is not None:
            return self._options.eval_batch_size
        max_tokens = self._kind.segments.max_tokens
        return self.batch_size if max_tokens is None or self.batch_size != DEFAULT_BATCH_SIZE else max_tokens

    def _parameters(self, order: Order) -> OrderParameters:
        return OrderParameters(
            mode=order.mode,
            seed=self.seed or 0,
            batch_size=self._rows_of_a_batch(training=True),
            streams=order.streams,
            window=order.window,
            recipe="" if order.recipe is None else order.recipe.text,
            sources=tuple(SourceOrder(source.mode, source.streams, source.window) for source in order.sources),
            nodes=order.nodes,
            world_size=(self.world_size or 1) if order.nodes else 0,
        )

    # Ranks ---------------------------------------------------------------------------------------------------

    def _resolve(self) -> None:
        """Determine rank, number of replicas, and seed."""
        options = self._options
        rank, world_size = options.distributed.rank, options.distributed.world_size
        if rank is None and world_size is None and self.trainer is not None:
            # None under a single-device strategy, even if other processes exist.
            kwargs = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
            self._rank, self._world_size = int(kwargs["rank"]), int(kwargs["num_replicas"])
            share_cores(self.trainer.num_devices)  # one process per device of the machine
        else:
            self._rank, self._world_size = resolve_replica(rank, world_size)
        self._nodes = self._find_nodes(self._rank, self._world_size) if options.shuffle.scope == "node" else 0
        self._infer(seed=int(os.environ.get("PL_GLOBAL_SEED", "0") if options.seed is None else options.seed))

    def _find_nodes(self, rank: int, world_size: int) -> int:
        """Return the number of nodes that the ranks are on, in their order."""
        trainer = self.trainer
        nodes = 1 if trainer is None else int(trainer.num_nodes)
        if trainer is None or (nodes == 1 and trainer.world_size > 1):  # Ray's strategies do not know their nodes
            nodes = launched_nodes(world_size)
        check_nodes(nodes, world_size)
        dealt = rank * nodes // world_size
        if trainer is not None and trainer.world_size > 1 and (own := int(trainer.node_rank)) != dealt:
            raise H5ValueError(
                f"shuffle.scope='node' was requested, and rank {rank} of {world_size} on {nodes} nodes is on node "
                f"{own} instead of {dealt}. Number ranks node by node (srun --distribution=block), pass num_nodes to "
                "the Trainer, or pass shuffle.scope='global'."
            )
        return nodes

    def _is_alone(self) -> bool:
        """Whether the trainer has a single process, even if other processes exist."""
        return self.trainer is not None and self.trainer.world_size == 1

    def _replica(self) -> Replica | tuple[None, None]:
        """Rank and number of replicas for loaders; None leaves them to the start of iteration."""
        fixed = self.trainer is not None or self._options.distributed.rank is not None
        return Replica(self.rank or 0, self.world_size or 1) if fixed and self.rank is not None else (None, None)

    def _check_decoding(self, decode_on: str, arguments: Mapping[str, Any]) -> None:
        """Raise an error if the arguments do not allow to decode on a device."""
        given = f"files.decode_on={decode_on!r} was given"
        if not self.decodes_on_device:
            raise H5ValueError(
                f"{given} to {type(self).__name__}, which keeps decoded rows elsewhere. Use LazyH5DataModule, or "
                "remove files.decode_on."
            )
        if self._options.num_workers:
            raise H5ValueError(
                f"{given} with num_workers={self._options.num_workers}; a GPU's memory is not shared with workers. "
                "Pass num_workers=0: threads read ahead."
            )
        if arguments.get("mixture") is not None:
            raise H5ValueError(f"{given} with mixture, whose batches are put together on the CPU. Remove one of them.")

    def check_prefetch_to_device(self) -> None:
        """Raise an error if Lightning would pass batches that are on the device already to a hook for host memory."""
        n_ahead = self._options.prefetch_to_device
        for module in (self, getattr(self.trainer, "lightning_module", None)):
            for hook in ("on_before_batch_transfer", "transfer_batch_to_device"):
                if n_ahead and module is not None and overrides(module, hook):
                    raise H5ValueError(
                        f"prefetch_to_device={n_ahead} was given, but {type(module).__name__} overrides {hook}, which "
                        "would get batches that are on the device already. Remove prefetch_to_device, or use "
                        "batch_transform (in host memory) or device_transform (on the device) instead of the hook."
                    )

    # Loaders -------------------------------------------------------------------------------------------------

    def _make_loader(self, split: Split) -> H5DataLoader | NoRows:
        dataset = self._datasets.get(split)
        if dataset is None:
            # Lightning warns about a loader without batches, by the name of its class. This loader is empty on purpose.
            warnings.filterwarnings("ignore", message="Total length of `NoRows`")
            return NoRows()
        self.batch_size = whole(self.batch_size, "batch_size", least=1)
        options, training = self._options, split == "train"
        order = self._order(dataset, training=training)
        if training:
            self._log_order(order, dataset)
        dataset.asked_cache_bytes = cache_bytes = options.files.cache_size
        self.read_with(dataset, order, order.cache_bytes if cache_bytes is None else cache_bytes, training=training)
        loader = H5DataLoader(
            dataset,
            sampler=self.sampler_of(dataset, order, training=training),
            num_workers=options.num_workers,
            collate_fn=options.collate_function and SampleCollate(options.collate_function, dataset.batch_transform),
            pin_memory=self._pin_memory(),
            prefetch_to_device=options.prefetch_to_device,
            device=self._batch_device(),
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.workers.persistent,
            multiprocessing_context=options.workers.start_method,
            timeout=options.workers.timeout,
            worker_init_fn=options.workers.init_fn,
        )
        self._loaders[split].add(loader)
        return loader

    def _pin_memory(self) -> bool:
        if self._options.pin_memory != "auto":
            return self._options.pin_memory
        return torch.cuda.is_available() and self._batch_device().type == "cuda"

    def _batch_device(self) -> torch.device:
        """Return the device that batches are copied to: the trainer's, or CUDA's present one without a trainer.

        It initializes nothing: worker processes may still be forked.
        """
        device: torch.device | None = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device

    # Log -----------------------------------------------------------------------------------------------------

    def _log_order(self, order: Order, dataset: RowDataset) -> None:
        text = order.why + f", seed {self.seed}"
        if not order.sources:
            is_of_samples = isinstance(dataset, TableDataset) and dataset.table.indexer.noun != "rows"
            noun = "samples" if is_of_samples else "rows"
            rows = self.mixed_rows(dataset.n_rows, noun) if order.recipe is None else order.recipe.text
            mixed = f", {_blocks_text(order.window)} mixed at a time" if order.mode == "chunks" else ""
            streams = f" in each of {order.streams} streams" if order.streams > 1 else ""
            text = f"{order.mode} over {rows}, seed {self.seed}{mixed}{streams} ({order.why})"
        integrity = min((layout.integrity for layout in dataset.layouts()), default=0)
        checksums = "" if integrity else "no checksums, "
        self._log_once(f"training order: {text}; {checksums}integrity level {integrity} of 4")
        self._log_memory(order, dataset)
        self._log_mixing(order, dataset)
        self._log_rates(order, dataset)
        has_patches = isinstance(dataset, TableDataset) and bool(dataset.table.fields_cut)
        chunks = "" if has_patches else ", or rewrite the file with fewer rows per chunk (lightning-h5 repack)"
        workers = ", or use fewer workers" if self._options.num_workers > 1 else ""
        for source in order.sources or (order,):
            if source.mode == "chunks" and source.window < FEW_BLOCKS:
                self._log_once(
                    f"shuffle.buffer={self._options.shuffle.buffer!r} mixes {_blocks_text(source.window)} at a time, "
                    "so neighboring rows of the file often share a batch. Raise shuffle.buffer to "
                    f"'{-(-source.enough >> 20)} MiB' for {FEW_BLOCKS} or more{workers}{chunks}."
                )

    def _log_rates(self, order: Order, dataset: RowDataset) -> None:
        """Log the disk's rates for single rows and for runs of rows, if the order mixes runs to save memory."""
        if self.rank or not order.exceeds_memory or self._options.shuffle.mode != "auto" or order.mode != "chunks":
            return
        with suppress(OSError):  # reading in training raises it again
            layouts = sorted(dataset.layouts(), key=lambda layout: layout.n_bytes)
            if layouts and (rates := storage_rates(layouts[-1])) is not None:
                self._log_once(
                    f"the disk reads about {rates[0]:,.0f} single rows per second of {layouts[-1].key!r}, and "
                    f"{rates[1]:,.0f} in runs of rows; shuffle='global' mixes better, but reads single rows"
                )

    def _log_memory(self, order: Order, dataset: RowDataset) -> None:
        """Log that chunks are decoded more than once, if memory was set to less than the order takes."""
        given, cost = self._options.files.cache_size, dataset.cost
        if given is None or order.mode != "global" or cost.has_cheap_random_access:
            return
        if any(map(keeps_decoded, dataset.layouts())):  # a chunk that leaves memory is read from the local disk
            return
        if given < min(order.cache_bytes, cost.decoded_bytes):
            held, needed = bytes_text(given), bytes_text(cost.decoded_bytes)
            self._log_once(
                f"files.cache_bytes ({held}) cannot hold the decoded rows ({needed}): in random order over all rows, "
                "chunks are decoded several times in each epoch. Leave it out, or pass shuffle='chunks', which mixes "
                "some blocks at a time."
            )

    def _log_mixing(self, order: Order, dataset: RowDataset) -> None:
        """Log how well batches are mixed if each node has its own rows."""
        if order.nodes == 1:
            self._log_once("shuffle.scope='node' on one node: the order equals scope='global'")
        parameters, world_size, drop_last = self._parameters(order), self.world_size or 1, self._options.drop_last
        if order.nodes < 2 or self.rank or parameters in self._measured:
            return
        self._measured.add(parameters)
        blocks, undealt = dataset.blocks(), replace(parameters, nodes=0, world_size=0)
        of_node = label_entropy(blocks, parameters, world_size, drop_last=drop_last)
        of_all = label_entropy(blocks, undealt, world_size, drop_last=drop_last)
        self._log_once(
            f"shuffle.scope='node': if the file were sorted by {N_LABELS} labels, batches would have an entropy of "
            f"{of_node:.2f}, and {of_all:.2f} with scope='global' (nats; ln {N_LABELS} = {ln(N_LABELS):.2f})"
        )

    def _log_once(self, text: str, log: Callable[[str], object] = rank_zero_info) -> None:
        if text and text not in self._logged:
            self._logged.add(text)
            log(text)


def _found_by_setup(name: str, value: object) -> H5ValueError:
    return H5ValueError(
        f"{name}={value!r} was set, but setup() determines rank and world_size. To set them, pass "
        "distributed={'rank': ..., 'world_size': ...}."
    )


def _check_scope(shuffle: ShuffleOptions, arguments: Mapping[str, Any], segments: SegmentOptions) -> None:
    """Raise an error for ``shuffle.scope="node"`` if an epoch is not one pass over each row."""
    if WeightOptions.parse(arguments.get("weights"), "weights").is_given:
        shuffle.check_scope("weights", "which draw rows of all nodes")
    if arguments.get("mixture") is not None:
        shuffle.check_scope("mixture", "which mixes rows of all nodes")
    for name, is_given in (("bucket", segments.bucket), ("max_tokens", segments.max_tokens is not None)):
        if is_given:
            shuffle.check_scope(f"segments.{name}", "which sorts segments of all nodes by length")


def _no_loaders() -> dict[Split, weakref.WeakSet[H5DataLoader]]:
    return {split: weakref.WeakSet() for split in SPLITS}


def _blocks_text(n: int) -> str:
    return f"{n} block{'s' if n != 1 else ''}"
