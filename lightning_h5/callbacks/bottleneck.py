"""What limits training, from what was counted: a sentence that says so, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["Limit", "what_limits"]

LITTLE = 0.1
"""Waiting below this share of the time is not worth a change: no loader would gain more than that."""

MOSTLY = 0.6
"""From this share of the waiting on it is the first batches of epochs that are waited for."""

ENOUGH_BATCHES = 10
"""Fewer are measured all the same, and the sentence has their number."""

IN_MEMORY = 1 << 30
"""Bytes a second that a thread gets from a file only where the system has them in memory already."""

EXPLAINS = 0.2
"""Work that takes less than this share of the waiting does not explain it."""

Kind = Literal["model", "transfer", "start", "transforms", "decode", "library", "disk", "copies"]


class Limit(NamedTuple):
    """What limits, and a sentence that says what to change."""

    kind: Kind
    text: str


def what_limits(
    amounts: Mapping[str, float], *, n_workers: int, n_cores: int, to_keep: str | None = "shuffle_bytes that holds all"
) -> Limit | None:
    """Return what limits a stage; None if no batch was measured.

    Work that several threads or processes share is divided by their number, since waiting is not: what then takes
    longest is what is waited for.

    Args:
        amounts: what a stage counted, over all ranks (``COUNTED``, ``seconds``, ``transfer_seconds``).
        n_workers: worker processes of a rank.
        n_cores: cores of a rank, used if it has no workers.
        to_keep: what to pass so that all decoded rows stay in memory; empty if they do, None if that would not help,
            since the stage reads each row once.
    """
    n_batches = amounts["batches"]
    if not n_batches or amounts["seconds"] <= 0:
        return None
    limit = _limit(amounts, n_workers, n_cores, to_keep)
    if n_batches >= ENOUGH_BATCHES:
        return limit
    more = "" if "longer run" in limit.text else " A longer run is more certain."
    return limit._replace(text=f"{limit.text} (Batches measured: {n_batches:.0f}.{more})")


def _limit(amounts: Mapping[str, float], n_workers: int, n_cores: int, to_keep: str | None) -> Limit:
    seconds, waited = amounts["seconds"], amounts["wait_seconds"]
    share = min(1.0, waited / seconds)
    if amounts["transfer_seconds"] > max(LITTLE * seconds, waited):
        part = amounts["transfer_seconds"] / seconds
        return Limit(
            "transfer",
            f"{part:.0%} of the time was spent copying batches to the device. Use smaller dtypes (uint8, float16) and "
            "cast on the device, or pin_memory=True.",
        )
    if share < LITTLE:
        return Limit("model", f"{share:.1%} of the time was spent waiting for data. The model is the bottleneck.")
    begin = f"{share:.0%} of the time was spent waiting for data"
    start = amounts["start_seconds"]
    if start > MOSTLY * waited:
        text = f"{begin}, {start / waited:.0%} of that for the first batches of epochs"
        return Limit("start", text + _start_cure(amounts, n_workers))
    group = n_workers or n_cores
    work: dict[Kind, float] = {
        "transforms": amounts["finish_seconds"] / max(1, n_workers),
        "decode": amounts["decode_seconds"] / group,
        "library": amounts["library_seconds"] / max(1, n_workers),
        "disk": amounts["read_seconds"] / group,
    }
    kind = max(work, key=lambda name: work[name])
    is_cached = kind == "disk" and amounts["bytes_read"] > IN_MEMORY * amounts["read_seconds"]
    if work[kind] < EXPLAINS * waited or is_cached:
        kind = "copies"
    return Limit(kind, f"{begin}. {_cure(kind, n_workers, n_cores, to_keep)}")


def _start_cure(amounts: Mapping[str, float], n_workers: int) -> str:
    if amounts["decode_seconds"] + amounts["library_seconds"] > amounts["start_seconds"] / 2:
        return ", whose rows had to be decoded. Look at a later epoch before you change anything."
    if n_workers:
        return ". A longer run spends a smaller share on them if workers persist, and num_workers=0 starts none."
    return ". A longer run spends a smaller share on them."


def _cure(kind: Kind, n_workers: int, n_cores: int, to_keep: str | None) -> str:
    if kind == "transforms":
        more = f"more workers than {n_workers}" if n_workers else "workers for them (num_workers=2 or more)"
        return f"Transforms are the bottleneck: use {more}, transform whole batches (batch_transform), or on the GPU."
    if kind == "decode":
        group, n = ("worker", n_workers) if n_workers else ("core", n_cores)
        begin = f"Decoding on {n} {group}{'s' if n != 1 else ''} is the bottleneck"
        if to_keep == "":
            return f"{begin} until all rows are in memory. Look at a later epoch before you change anything."
        faster = "repack with a faster compression (lightning-h5 repack IN OUT --compression lzf)"
        if to_keep is None:
            return f"{begin}: {faster}, or use more {group}s."
        return f"{begin}: keep decoded rows in memory ({to_keep}, or RankCachedH5DataModule), or {faster}."
    if kind == "library":
        return (
            "The HDF5 library, which serves one thread at a time, is the bottleneck: lightning-h5 inspect FILE shows "
            "why it is needed. Repack the file, or use workers (num_workers=2 or more)."
        )
    if kind == "disk":
        once = "" if to_keep is None else ", or read them once (RankCachedH5DataModule)"
        return f"Reading files is the bottleneck: put them on a closer or faster disk{once}."
    return "Copying rows that are in memory is the bottleneck: use smaller dtypes or larger batches."
