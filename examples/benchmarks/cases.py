"""What `compressed.py` measures: arrays as people store them, and the ways to read them. Data, no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common import N_EPOCHS
from rows import IMAGES, SIGNALS, RowKind

PLAIN, WHOLE = "plain h5py", "h5py, whole batches"
OURS, FITS = "lightning_h5", "lightning_h5, rows fit in memory"
MAPPED, CHUNKS = "lightning_h5, mmap", "lightning_h5, chunks"
MAPPED_CHUNKS = f"{MAPPED}, chunks"
DECODE, PREADV, MEMORY = "bare decode loop", "bare preadv", "index_select in memory"


@dataclass(frozen=True, kw_only=True)
class Way:
    """Arguments of our data module, and which of its epochs are timed.

    Attributes:
        name: in the tables.
        team: ways of which the slowest is drawn.
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
    """An array as people store it, and the ways to read it.

    Attributes:
        name: for ``--cases``.
        kind: its rows.
        title: how it is stored, in words.
        n_together: rows of a chunk; None leaves the chunks to h5py.
        filters: more arguments of ``create_dataset``.
        ways: of ours to read it.
    """

    name: str
    kind: RowKind
    title: str
    n_together: int | None = None
    filters: Mapping[str, Any] = field(default_factory=dict)
    ways: tuple[Way, ...] = BOUND

    def storage(self) -> dict[str, Any]:
        """Arguments of ``create_dataset``."""
        chunks = {} if self.n_together is None else {"chunks": (self.n_together, *self.kind.shape)}
        return {**chunks, **self.filters}

    def __str__(self) -> str:
        return f"{self.kind}, {self.title}"


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
        ),
        Case(
            name="images-chunked-32",
            kind=IMAGES,
            title="no filter, 32 rows a chunk",
            n_together=32,
        ),
        Case(
            name="images-lzf-32",
            kind=IMAGES,
            title="LZF, 32 rows a chunk",
            n_together=32,
            filters=LZF,
        ),
        Case(
            name="images-gzip-1",
            kind=IMAGES,
            title="gzip, 1 row a chunk",
            n_together=1,
            filters=GZIP,
        ),
        Case(
            name="images-lzf-1",
            kind=IMAGES,
            title="LZF, 1 row a chunk",
            n_together=1,
            filters=LZF,
        ),
        Case(
            name="images-guess",
            kind=IMAGES,
            title="gzip, h5py's own guess of the chunks",
            filters=GZIP,
        ),
        Case(
            name="images-contiguous",
            kind=IMAGES,
            title="contiguous",
            ways=UNCHUNKED,
        ),
        Case(
            name="signals-gzip-32",
            kind=SIGNALS,
            title="shuffle and gzip, 32 rows a chunk",
            n_together=32,
            filters=SHUFFLED,
            ways=BOUND + AMPLE,
        ),
        Case(
            name="signals-contiguous",
            kind=SIGNALS,
            title="contiguous",
            ways=UNCHUNKED,
        ),
    )
}
