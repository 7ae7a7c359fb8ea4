"""Find the bottleneck of a loader from its counters, and recommend a change."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader

from ..errors import H5ValueError
from ..readers import usable_cores
from .loader import H5DataLoader

__all__ = ["Limit", "LoaderReport", "diagnose_dataloader_speed", "what_limits"]

MIN_WAITING = 0.1
"""Waiting below this share of the time is not worth a change: a faster loader could gain no more than this share."""

MIN_START = 0.6
"""From this share of the waiting on, the first batches of epochs are the bottleneck."""

MIN_BATCHES = 10
"""With fewer batches, the sentence includes their number."""

IN_MEMORY = 1 << 30
"""Bytes per second and thread above which the system must have the file in memory."""

MIN_EXPLAINED = 0.2
"""Work that takes less than this share of the waiting does not explain it."""

ENOUGH_ROOM = 0.9
"""Hit rate from which the mirror has enough room for the training data."""

SMALL_REQUEST = 64 << 10
"""Bytes of a request below which the latency of the storage dominates."""

Kind = Literal["model", "transfer", "start", "transforms", "decode", "library", "origin", "disk", "copies"]


class Limit(NamedTuple):
    """The bottleneck, and a sentence with the remedy."""

    kind: Kind
    text: str


def what_limits(
    amounts: Mapping[str, float], *, n_workers: int, n_cores: int, to_keep: str | None = "shuffle.buffer that holds all"
) -> Limit | None:
    """Return the bottleneck of a stage; None if no batch was measured.

    Work that several threads or processes share is divided by their number. The kind of work with the longest time is
    the bottleneck.

    Args:
        amounts: counts of the stage, over all ranks (``COUNTED``, ``seconds``, ``transfer_seconds``).
        n_workers: worker processes of a rank.
        n_cores: cores of a rank, used if it has no workers.
        to_keep: the argument that keeps all decoded rows in memory; empty if they are in memory already, None if the
            stage reads each row once.
    """
    n_batches = amounts["batches"]
    if not n_batches or amounts["seconds"] <= 0:
        return None
    limit = _limit_text(amounts, n_workers, n_cores, to_keep)
    if n_batches >= MIN_BATCHES:
        return limit
    hint = "" if "longer run" in limit.text else " A longer run is more certain."
    return limit._replace(text=f"{limit.text} (Batches measured: {n_batches:.0f}.{hint})")


def _limit_text(amounts: Mapping[str, float], n_workers: int, n_cores: int, to_keep: str | None) -> Limit:
    seconds, wait_seconds = amounts["seconds"], amounts["wait_seconds"]
    share = min(1.0, wait_seconds / seconds)
    if amounts["transfer_seconds"] > max(MIN_WAITING * seconds, wait_seconds):
        part = amounts["transfer_seconds"] / seconds
        return Limit(
            "transfer",
            f"{part:.0%} of the time was spent copying batches to the device. Use smaller dtypes (uint8, float16) and "
            "cast on the device, or pin_memory=True.",
        )
    if share < MIN_WAITING:
        return Limit("model", f"{share:.1%} of the time was spent waiting for data. The model is the bottleneck.")
    opening = f"{share:.0%} of the time was spent waiting for data"
    start = amounts["start_seconds"]
    if start > MIN_START * wait_seconds:
        text = f"{opening}, {start / wait_seconds:.0%} of that for the first batches of epochs"
        return Limit("start", text + _start_advice(amounts, n_workers))
    kind = _slowest_work(amounts, n_workers, n_cores)
    return Limit(kind, f"{opening}. {_advice_on_workers(kind, amounts, n_workers, n_cores, to_keep)}")


def _slowest_work(amounts: Mapping[str, float], n_workers: int, n_cores: int) -> Kind:
    group = n_workers or n_cores
    work: dict[Kind, float] = {
        "transforms": amounts["finish_seconds"] / max(1, n_workers),
        "decode": amounts["decode_seconds"] / group,
        "library": amounts["library_seconds"] / max(1, n_workers),
        "origin": amounts["origin_seconds"] / group,
        "disk": (amounts["read_seconds"] - amounts["origin_seconds"]) / group,
    }
    kind = max(work, key=lambda name: work[name])
    is_cached = kind == "disk" and amounts["bytes_read"] > IN_MEMORY * amounts["read_seconds"]
    return "copies" if is_cached or work[kind] < MIN_EXPLAINED * amounts["wait_seconds"] else kind


def _start_advice(amounts: Mapping[str, float], n_workers: int) -> str:
    if amounts["decode_seconds"] + amounts["library_seconds"] > amounts["start_seconds"] / 2:
        return ", whose rows had to be decoded. Look at a later epoch before you change anything."
    if n_workers:
        return ". This share shrinks in a longer run if workers persist; num_workers=0 starts no workers."
    return ". This share shrinks in a longer run."


def _advice_on_workers(
    kind: Kind, amounts: Mapping[str, float], n_workers: int, n_cores: int, to_keep: str | None
) -> str:
    if kind == "transforms":
        replacement = f"more workers than {n_workers}" if n_workers else "workers for them (num_workers=2 or more)"
        return (
            f"Transforms are the bottleneck: use {replacement}, transform whole batches (batch_transform), or on the "
            "GPU."
        )
    if kind == "decode":
        group, n = ("worker", n_workers) if n_workers else ("core", n_cores)
        opening = f"Decoding on {n} {group}{'s' if n != 1 else ''} is the bottleneck"
        if to_keep == "":
            return f"{opening} until all rows are in memory. Look at a later epoch before you change anything."
        repacking = "repack with a faster compression (lightning-h5 repack IN OUT --compression lzf)"
        if to_keep is None:
            return f"{opening}: {repacking}, or use more {group}s."
        return f"{opening}: keep decoded rows in memory ({to_keep}, or RankCachedH5DataModule), or {repacking}."
    if kind == "library":
        return (
            "The HDF5 library, which serves one thread at a time, is the bottleneck: lightning-h5 inspect FILE shows "
            "why it is needed. Repack the file, or use workers (num_workers=2 or more)."
        )
    if kind == "origin":
        return _origin_advice(amounts, to_keep)
    if kind == "disk":
        alternative = "" if to_keep is None else ", or read them once (RankCachedH5DataModule)"
        return f"Reading files is the bottleneck: put them on a closer or faster disk{alternative}."
    return "Copying rows that are in memory is the bottleneck: use smaller dtypes or larger batches."


def _origin_advice(amounts: Mapping[str, float], to_keep: str | None) -> str:
    """Return advice for waiting on the origin of files that are staged."""
    held_share = amounts["mirror_bytes"] / max(1.0, amounts["mirror_bytes"] + amounts["missed_bytes"])
    request = amounts["origin_bytes"] / max(1.0, amounts["origin_requests"])
    text, hint = "Filling the mirror is the bottleneck: later reads of the same rows use the local disk.", ""
    if to_keep is not None and held_share < ENOUGH_ROOM:
        text = (
            f"Reading past the mirror is the bottleneck: it had room for {held_share:.0%} of the bytes needed. Raise "
        )
        text += "staging.max_bytes, if the disk has room."
    elif to_keep is not None:
        hint = " Look at a later epoch before you change anything."
    if request < SMALL_REQUEST:
        kib = f"{request / 1024:.0f} KiB"
        return f"{text} A request has {kib} on average: larger chunks need fewer (lightning-h5 repack IN OUT)."
    return text + hint


@dataclass(frozen=True)
class LoaderReport:
    """The speed of a loader without a model.

    Attributes:
        n_batches: number of timed batches.
        n_rows: rows of these batches, as far as they can be counted.
        seconds: time for all batches.
        advice: the bottleneck, and a remedy.
    """

    n_batches: int
    n_rows: int
    seconds: float
    advice: str

    def __str__(self) -> str:
        rate = f", {self.n_rows / self.seconds:,.0f} rows/s" if self.seconds else ""
        return f"{1000 * self.seconds / max(1, self.n_batches):.2f} ms per batch{rate}. {self.advice}"


def diagnose_dataloader_speed(dataloader: DataLoader[Any], n_batches: int = 50, n_warm: int = 3) -> LoaderReport:
    """Time a loader without a model, after its workers have started, and return its bottleneck.

    Args:
        dataloader: any loader.
        n_batches: maximum number of batches to time.
        n_warm: number of batches to skip before timing.

    Returns:
        Figures and advice; print the report to see them.

    Raises:
        H5ValueError: the loader has too few batches.
    """
    batches = iter(dataloader)
    for _ in islice(batches, n_warm):
        pass
    h5_loader = dataloader if isinstance(dataloader, H5DataLoader) else None
    amounts_before = {} if h5_loader is None else h5_loader.counters.total()
    n_timed, n_rows, start_time = 0, 0, perf_counter()
    for batch in islice(batches, n_batches):
        n_timed, n_rows = n_timed + 1, n_rows + _rows_of(batch)
    seconds = perf_counter() - start_time
    del batches
    if not n_timed:
        raise H5ValueError(f"the loader has no batch after the first {n_warm}. Diagnose it on more rows.")
    n_workers = dataloader.num_workers
    if h5_loader is not None:
        amounts = {name: amount - amounts_before[name] for name, amount in h5_loader.counters.total().items()}
        if not (h5_loader.dataset.has_transforms or h5_loader.sampler.samples):
            amounts["finish_seconds"] = 0.0  # collating alone, which no setting changes
        h5_loader.close()
        kind = _slowest_work(amounts, n_workers, usable_cores())
        advice = _advice_on_workers(kind, amounts, n_workers, usable_cores(), "shuffle.buffer that holds all")
    elif n_workers == 0:
        advice = "It reads in the training process: use num_workers > 0, or a dataset of this package."
    else:
        advice = f"It has {n_workers} workers: profile the dataset itself."
    return LoaderReport(n_timed, n_rows, seconds, advice)


def _rows_of(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, dict):
        return _rows_of(next(iter(batch.values()), None))
    if isinstance(batch, tuple | list) and batch and not isinstance(batch[0], str):
        return _rows_of(batch[0])
    return len(batch) if isinstance(batch, Sized) else 0
