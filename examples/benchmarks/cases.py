"""What `compressed.py` measures: arrays as people store them, who reads them, and what is promised. Data, no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common import N_EPOCHS, Target
from peers import PEERS
from rows import IMAGES, SIGNALS, RowKind

PLAIN, WHOLE = "plain h5py", "h5py, whole batches"
OURS, FITS = "lightning_h5", "lightning_h5, 512 MiB"
MAPPED, CHUNKS = "lightning_h5, mmap", "lightning_h5, chunks"
MAPPED_CHUNKS = f"{MAPPED}, chunks"
DECODE, PREADV, MEMORY = "bare decode loop", "bare preadv", "index_select in memory"


@dataclass(frozen=True, kw_only=True)
class Way:
    """Arguments of our data module, and which of its epochs are timed.

    Attributes:
        name: in the tables.
        team: of which the slowest is held to a target.
        options: arguments.
        is_first: a new data module for each timing, so that each is of a first epoch.
        n_warm: epochs before the first that is timed, after the one that is checked.
        n_epochs: epochs of a timing.
    """

    name: str
    team: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_first: bool = False
    n_warm: int = 0
    n_epochs: int = 1


BUDGET = {"shuffle": {"buffer": "64 MiB"}, "files": {"cache_bytes": "64 MiB"}}
LARGE = {"shuffle": {"buffer": "512 MiB"}, "files": {"cache_bytes": "512 MiB"}}
IN_CHUNKS = {"mode": "chunks", "buffer": "64 MiB"}
BOUND = (
    Way(name="lightning_h5, first epoch", team=OURS, options=BUDGET, is_first=True),
    Way(name="lightning_h5, tenth epoch on", team=OURS, options=BUDGET, n_warm=8),
)
AMPLE = (Way(name="lightning_h5, 512 MiB, second epoch on", team=FITS, options=LARGE, n_epochs=N_EPOCHS),)
UNCHUNKED = (
    Way(name=OURS, team=OURS, n_epochs=N_EPOCHS),
    Way(name=MAPPED, team=MAPPED, options={"files": {"mmap": True}}, n_epochs=N_EPOCHS),
    Way(
        name=CHUNKS,
        team=CHUNKS,
        options={"shuffle": IN_CHUNKS, "files": {"cache_bytes": "64 MiB"}},
        n_epochs=N_EPOCHS,
    ),
    Way(
        name=MAPPED_CHUNKS,
        team=MAPPED_CHUNKS,
        options={"shuffle": IN_CHUNKS, "files": {"cache_bytes": "64 MiB", "mmap": True}},
        n_epochs=N_EPOCHS,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An array as people store it, who reads it, and what is promised.

    Attributes:
        name: for ``--cases``.
        kind: its rows.
        title: how it is stored, in words.
        n_together: rows of a chunk; None leaves the chunks to h5py.
        filters: more arguments of ``create_dataset``.
        ways: of ours to read it.
        peers: that read their own copy of its rows.
        targets: the ratios.
    """

    name: str
    kind: RowKind
    title: str
    n_together: int | None = None
    filters: Mapping[str, Any] = field(default_factory=dict)
    ways: tuple[Way, ...] = BOUND
    peers: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()

    def storage(self) -> dict[str, Any]:
        """Arguments of ``create_dataset``."""
        chunks = {} if self.n_together is None else {"chunks": (self.n_together, *self.kind.shape)}
        return {**chunks, **self.filters}

    def __str__(self) -> str:
        return f"{self.kind}, {self.title}"


def together(times_plain: float) -> tuple[Target, ...]:
    """What is promised of gzip with many whole rows in a chunk."""
    return (
        Target(of=OURS, against=PLAIN, least=times_plain),
        Target(of=OURS, against=WHOLE, least=None),
        Target(of=OURS, against="litdata", least=5.0),
        Target(of=OURS, against="litdata with arrays", least=None),
        Target(of=OURS, against="mosaicml-streaming", least=4.0),
        Target(of=OURS, against="ffcv", least=None),
        Target(of=OURS, against=DECODE, least=0.85),
        Target(of=FITS, against=MEMORY, least=0.7),
    )


def others(times_plain: float, of_decode: float | None = None) -> tuple[Target, ...]:
    """What is promised of other chunked arrays."""
    return (
        Target(of=OURS, against=PLAIN, least=times_plain),
        Target(of=OURS, against=WHOLE, least=None),
        Target(of=OURS, against=DECODE, least=of_decode),
    )


NO_CHUNKS = (
    Target(of=OURS, against=PLAIN, least=3.5),
    Target(of=MAPPED, against=PLAIN, least=6.0),
    Target(of=OURS, against=PREADV, least=0.9),
    Target(of=MAPPED, against="ffcv", least=1.0),
    Target(of=CHUNKS, against=MEMORY, least=0.8),
    Target(of=MAPPED_CHUNKS, against=MEMORY, least=None),
)
GZIP, SHUFFLED, LZF = {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}
CASES = {
    case.name: case
    for case in (
        Case(
            name="images-gzip-32",
            kind=IMAGES,
            title="gzip, 32 rows a chunk",
            n_together=32,
            filters=GZIP,
            ways=BOUND + AMPLE,
            peers=tuple(PEERS),
            targets=together(45),
        ),
        Case(
            name="images-chunked-32",
            kind=IMAGES,
            title="no filter, 32 rows a chunk",
            n_together=32,
            targets=others(100),
        ),
        Case(
            name="images-lzf-32",
            kind=IMAGES,
            title="LZF, 32 rows a chunk",
            n_together=32,
            filters=LZF,
            targets=others(20),
        ),
        Case(
            name="images-gzip-1",
            kind=IMAGES,
            title="gzip, 1 row a chunk",
            n_together=1,
            filters=GZIP,
            targets=others(2.5),
        ),
        Case(
            name="images-lzf-1",
            kind=IMAGES,
            title="LZF, 1 row a chunk",
            n_together=1,
            filters=LZF,
            targets=others(2.5),
        ),
        Case(
            name="images-guess",
            kind=IMAGES,
            title="gzip, h5py's own guess of the chunks",
            filters=GZIP,
            targets=others(1000, 0.7),
        ),
        Case(
            name="images-contiguous",
            kind=IMAGES,
            title="contiguous",
            ways=UNCHUNKED,
            peers=("ffcv",),
            targets=NO_CHUNKS,
        ),
        Case(
            name="signals-gzip-32",
            kind=SIGNALS,
            title="shuffle and gzip, 32 rows a chunk",
            n_together=32,
            filters=SHUFFLED,
            ways=BOUND + AMPLE,
            peers=tuple(PEERS),
            targets=together(25),
        ),
        Case(
            name="signals-contiguous",
            kind=SIGNALS,
            title="contiguous",
            ways=UNCHUNKED,
            peers=("ffcv",),
            targets=NO_CHUNKS,
        ),
    )
}
