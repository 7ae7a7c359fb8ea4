"""What limits training, from what was counted: a sentence that says so, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["Limit", "what_limits"]

LITTLE = 0.1
"""Waiting below this share of the time is not worth a change: no loader would gain more than that."""

MOSTLY = 0.6
"""From this share of the waiting on it is the first batches of epochs that are waited for."""

LEAST_BATCHES = 10
"""Fewer say nothing."""

IN_MEMORY = 1 << 30
"""Bytes a second that a thread gets from a file only where the system has them in memory already."""

EXPLAINS = 0.2
"""Work that takes less than this share of the waiting does not explain it."""

MIB = 1 << 20

Kind = Literal["model", "transfer", "start", "transforms", "decode", "library", "disk", "copies"]


class Limit(NamedTuple):
    """What limits, and a sentence that says what to change."""

    kind: Kind
    text: str


def what_limits(amounts: Mapping[str, float], *, n_workers: int, n_cores: int) -> Limit | None:
    """What limits a stage; None where too little ran to tell.

    Work that several threads or processes share is divided by their number, since waiting is not: what then takes
    longest is what is waited for.

    Args:
        amounts: what a stage counted, over all ranks (``COUNTED``, ``seconds``, ``transfer_seconds``).
        n_workers: worker processes of a rank.
        n_cores: cores of a rank, where it has no workers.
    """
    seconds, waited = amounts["seconds"], amounts["wait_seconds"]
    if amounts["batches"] < LEAST_BATCHES or seconds <= 0:
        return None
    share = min(1.0, waited / seconds)
    if amounts["transfer_seconds"] > max(LITTLE * seconds, waited):
        part = amounts["transfer_seconds"] / seconds
        return Limit(
            "transfer",
            f"Copying batches to the device takes {part:.0%} of the time: take smaller dtypes (uint8, float16) and "
            "cast on the device, or pin_memory=True.",
        )
    if share < LITTLE:
        return Limit("model", f"Waiting takes {share:.1%} of the time: the model limits, leave the loader as it is.")
    begin = f"Waiting takes {share:.0%} of the time"
    start = amounts["start_seconds"]
    if start > MOSTLY * waited:
        text = f"{begin}, {start / waited:.0%} of it for the first batches of epochs"
        return Limit("start", text + _start_cure(amounts, n_workers))
    crew = n_workers or n_cores
    work: dict[Kind, float] = {
        "transforms": amounts["finish_seconds"] / max(1, n_workers),
        "decode": amounts["decode_seconds"] / crew,
        "library": amounts["library_seconds"] / max(1, n_workers),
        "disk": amounts["read_seconds"] / crew,
    }
    kind = max(work, key=lambda name: work[name])
    is_cached = kind == "disk" and amounts["bytes_read"] > IN_MEMORY * amounts["read_seconds"]
    if work[kind] < EXPLAINS * waited or is_cached:
        kind = "copies"
    return Limit(kind, begin + _cure(kind, amounts, n_workers, n_cores))


def _start_cure(amounts: Mapping[str, float], n_workers: int) -> str:
    if amounts["decode_seconds"] + amounts["library_seconds"] > amounts["start_seconds"] / 2:
        return ", which wait for rows to be decoded: look at a later epoch before you change anything."
    if n_workers:
        return ": keep workers (persistent_workers=True), or take num_workers=0."
    return ": a longer run has less of it."


def _cure(kind: Kind, amounts: Mapping[str, float], n_workers: int, n_cores: int) -> str:
    seconds = amounts["seconds"]
    if kind == "transforms":
        more = f"more workers than {n_workers}" if n_workers else "workers for them (num_workers=2 or more)"
        return f" for transforms: take {more}, work on whole batches (batch_transform), or on the GPU."
    if kind == "decode":
        crew = f"{n_workers} workers" if n_workers else f"{n_cores} core{'s' if n_cores != 1 else ''}"
        rate = amounts["bytes_decoded"] / MIB / seconds
        return (
            f" for decoding, {rate:,.0f} MiB/s by {crew}, which are busy: keep decoded rows (shuffle_bytes that holds "
            "all, or RankCachedH5DataModule), or repack with a faster compression (lightning-h5 repack IN OUT "
            "--compression lzf)."
        )
    if kind == "library":
        return (
            " for the HDF5 library, which serves one thread at a time: lightning-h5 inspect FILE says why it has to; "
            "repack, or take workers (num_workers=2 or more)."
        )
    if kind == "disk":
        rate = amounts["bytes_read"] / MIB / seconds
        return (
            f" for files, which give {rate:,.1f} MiB/s: put them on a nearer or faster disk, or read them once "
            "(RankCachedH5DataModule)."
        )
    return " for copies of bytes that are in memory already: take smaller dtypes or larger batches."
