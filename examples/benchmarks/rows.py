"""The rows that benchmarks read: in memory, and on disk as an HDF5 file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

N_MADE_AT_ONCE = 500  # rows; limits the temporary memory
N_WAVES = 16  # waves of an image's smooth part, along each side


@dataclass(frozen=True, kw_only=True)
class RowKind:
    """What a row is.

    Attributes:
        name: in words.
        shape: of a row.
        dtype: of its numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {'x'.join(map(str, self.shape))} ({self.n_bytes / 1024:g} KiB a row)"

    @property
    def n_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


IMAGES = RowKind(name="images", shape=(3, 64, 64), dtype="u1")
SIGNALS = RowKind(name="signals", shape=(4, 1024), dtype="f4")


@dataclass(frozen=True, eq=False)
class Data:
    """Rows on disk and the same rows in memory.

    Attributes:
        path: the HDF5 file, with the arrays "x" and "labels".
        x: the rows, shape ``(n_rows, *row_shape)``.
        labels: another number for each row, so that a batch says which rows it holds; shape ``(n_rows,)``.
        chunks: shape of a chunk of "x"; None where it is contiguous.
        stored_bytes: what the rows take in the file.
    """

    path: Path
    x: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    chunks: tuple[int, ...] | None = field(default=None, kw_only=True)
    stored_bytes: int = field(default=0, kw_only=True)

    @classmethod
    def write(cls, path: Path, x: npt.NDArray[Any], labels: npt.NDArray[np.int64], **storage: Any) -> Data:
        """Writes rows the way ``create_dataset(data=..., **storage)`` does, and waits until they are written."""
        with h5py.File(path, "w") as file:
            array = file.create_dataset("x", data=x, **storage)
            file.create_dataset("labels", data=labels)
            chunks, stored_bytes = array.chunks, array.id.get_storage_size()
        with path.open("rb") as written:
            os.fsync(written.fileno())  # otherwise the system writes it during the measurement
        return cls(path, x, labels, chunks=chunks, stored_bytes=stored_bytes)

    @property
    def storage(self) -> str:
        """How the rows lie in the file, in words."""
        chunks = "" if self.chunks is None else f"chunks ({', '.join(map(str, self.chunks))}), "
        return f"{chunks}{self.stored_bytes / 2**20:,.0f} MiB, {self.gain:.2f} times smaller than the rows"

    @property
    def gain(self) -> float:
        """Bytes of the rows over bytes stored."""
        return self.x.nbytes / self.stored_bytes


def noise(kind: RowKind, n_rows: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Rows of nothing but noise, and labels: for arrays whose bytes are not looked at."""
    rng = np.random.default_rng(0)
    if kind.dtype == "f4":
        x: npt.NDArray[Any] = rng.standard_normal((n_rows, *kind.shape), dtype=np.float32)
    else:
        x = rng.integers(0, 256, (n_rows, *kind.shape), dtype=kind.dtype)
    return x, rng.permutation(n_rows)


def lifelike(kind: RowKind, n_rows: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Rows that compress as recorded data do, and labels."""
    rng = np.random.default_rng(0)
    x = np.empty((n_rows, *kind.shape), kind.dtype)
    make = pictures if kind is IMAGES else waves
    for start in range(0, n_rows, N_MADE_AT_ONCE):
        part = x[start : start + N_MADE_AT_ONCE]
        part[...] = make(rng, *part.shape)
    return x, rng.permutation(n_rows)


def pictures(rng: np.random.Generator, n_rows: int, *shape: int) -> npt.NDArray[np.float32]:
    """Colour pictures: a smooth scene, two discs with sharp edges in front of it, sensor noise of one grey level.

    Shape ``(n_rows, colours, height, width)``, whole numbers from 0 to 255.
    """
    colours, height, width = shape
    order = np.arange(N_WAVES)
    down, across = (np.cos(np.pi * order[:, None] * (np.arange(n) + 0.5) / n).astype("f4") for n in (height, width))
    falloff = (55 / (1 + np.hypot(*np.meshgrid(order, order)) ** 2.5)).astype("f4")  # roughly as in photographs
    shared = rng.standard_normal((n_rows, 1, N_WAVES, N_WAVES), dtype=np.float32)
    own = rng.standard_normal((n_rows, colours, N_WAVES, N_WAVES), dtype=np.float32)
    x = 120 + down.T @ ((shared + 0.4 * own) * falloff) @ across
    y_at, x_at = np.mgrid[:height, :width]
    for _ in range(2):
        place = rng.uniform(0, (height, width, 1), (n_rows, 3))[:, :, None, None]
        radius = height * (0.1 + 0.25 * place[:, 2])
        inside = (y_at - place[:, 0]) ** 2 + (x_at - place[:, 1]) ** 2 < radius**2
        x += inside[:, None] * rng.normal(0, 45, (n_rows, colours, 1, 1)).astype("f4")
    x += rng.standard_normal(x.shape, dtype=np.float32)
    return np.clip(np.rint(x), 0, 255)


def waves(rng: np.random.Generator, n_rows: int, *shape: int) -> npt.NDArray[np.float32]:
    """Signals: four sines a channel and noise of a twentieth of the largest; shape ``(n_rows, channels, length)``."""
    channels, length = shape
    x = 0.05 * rng.standard_normal((n_rows, channels, length), dtype=np.float32)
    at = np.arange(length, dtype="f4") * np.float32(2 * np.pi / length)
    for _ in range(4):
        height, speed, shift = rng.uniform((0.2, 1, 0), (1, 60, 2 * np.pi), (n_rows, channels, 3)).astype("f4").T
        x += height.T[..., None] * np.sin(speed.T[..., None] * at + shift.T[..., None])
    return x
