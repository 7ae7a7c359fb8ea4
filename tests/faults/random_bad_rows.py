"""Random bad samples: files of every kind of sample, faults, and which samples of a batch must be missing.

Values tell where they are from, so a batch of undamaged copies of the files shows which of its samples need a damaged
chunk. Nothing else has to be known of a kind of sample, a random window or a mixture.
"""

import io
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from bad_rows import flip
from factories import known_filters
from PIL import Image

from lightning_h5 import CombinedHDF5DataModule, LazyH5DataModule, RankCachedH5DataModule, check_files

MODULES = {"lazy": LazyH5DataModule, "cached": RankCachedH5DataModule, "combined": CombinedHDF5DataModule}
WIDTH = 16
STORAGES = {
    "gzip": {"compression": "gzip"},
    "shuffled gzip": {"compression": "gzip", "shuffle": True},
    "lzf, checksum": {"compression": "lzf", "fletcher32": True},
    "checksum": {"fletcher32": True},
}
STORAGES |= {
    f"{name}, checksum": {"compression": number, "compression_opts": options, "fletcher32": True}
    for name, (number, options) in known_filters().items()
    if name in ("zstd", "blosc", "blosc zstd, bits", "blosc2", "lz4", "bitshuffle", "bitshuffle lz4", "bzip2")
}
OF_INTEGERS = {
    "szip, checksum": lambda options: options.set_szip(h5py.h5z.SZIP_NN_OPTION_MASK, 2),
    "n bits, checksum": lambda options: options.set_filter(h5py.h5z.FILTER_NBIT, h5py.h5z.FLAG_MANDATORY, ()),
    "scaled, checksum": lambda options: options.set_scaleoffset(h5py.h5z.SO_INT, 0),
}
"""Filters that h5py lets no checksum follow, or has no name for."""


@dataclass
class Piece:
    """Stored bytes that can be damaged.

    ``ids`` are the values that go with them, as ``SampleIds`` finds them in samples.
    """

    file: str
    key: str
    ids: frozenset
    at: tuple | None = None
    offset: int | None = None

    @property
    def place(self):
        return self.file, self.key, self.at, self.offset


@dataclass
class Files:
    """Files in a folder, how a data module reads them, and what of them can be damaged.

    ``pieces`` are for each field of a sample; ``divisor`` makes ids of its values.
    """

    folder: Path
    arguments: dict[str, Any]
    names: Any = "a.h5"
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    divisors: dict[str, int] = field(default_factory=dict)
    modules: tuple[str, ...] = tuple(MODULES)
    is_written: Any = None

    def path(self, folder):
        """Return the argument that names the files, in a copy of the folder."""
        return None if self.names is None else str(Path(folder) / self.names)

    def arguments_in(self, folder):
        """Return the arguments of a data module over a copy of the folder."""
        given = dict(self.arguments)
        if "mixture" in given:
            sources = {name: str(Path(folder) / file) for name, file in given["mixture"]["sources"].items()}
            given["mixture"] = given["mixture"] | {"sources": sources}
        if "staging" in given:
            given["staging"] = {"dir": str(Path(folder) / "staged"), "max_bytes": "64 MiB"}
        return given


def numbered(first, n_rows, width=WIDTH):
    """Rows whose values, divided by their width, are numbers of rows."""
    return (np.arange(first, first + n_rows)[:, None] * width + np.arange(width)).astype("i4")


def put_rows(files, file, key, name, values, rows_per_chunk, first, storage):
    """Write rows in chunks, and note the chunks."""
    width, rows_per_chunk = values.shape[1], min(rows_per_chunk, len(values))
    with h5py.File(files.folder / file, "a") as target:
        target.create_dataset(key, data=values, chunks=(rows_per_chunk, width), **options_of(storage))
    files.divisors[name] = width
    for start in range(0, len(values), rows_per_chunk):
        ids = frozenset(range(first + start, first + min(start + rows_per_chunk, len(values))))
        files.pieces.setdefault(name, []).append(Piece(file, key, ids, (start, 0)))


def a_storage(rng):
    return str(rng.choice(list(STORAGES)))


def of_integers(rng):
    return str(rng.choice([*STORAGES, *OF_INTEGERS]))


def options_of(storage):
    """Return the arguments of h5py's ``create_dataset``."""
    if storage not in OF_INTEGERS:
        return STORAGES[storage]
    options = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    OF_INTEGERS[storage](options)
    return {"dcpl": options, "fletcher32": True}


def rows(rng, folder):
    files = Files(folder, {"fields": {"x": "x", "y": "y"}})
    n = int(rng.integers(30, 90))
    put_rows(files, "a.h5", "x", "x", numbered(0, n), int(rng.integers(1, 7)), 0, of_integers(rng))
    put_rows(files, "a.h5", "y", "y", numbered(0, n, 2), int(rng.integers(1, 9)), 0, of_integers(rng))
    return files


def input_and_target(rng, folder):
    files = rows(rng, folder)
    files.arguments = {"x_key": "x", "y_key": "y"}
    return files


def narrow_chunks(rng, folder):
    """Rows that several chunks have a part of, and an array that cannot fail."""
    n, high, wide = int(rng.integers(30, 90)), int(rng.integers(2, 7)), int(rng.choice([3, 4, 8]))
    files = Files(folder, {"fields": ["x", "z"]})
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=numbered(0, n), chunks=(high, wide), **options_of(of_integers(rng)))
        file["z"] = np.arange(n)
    files.divisors["x"] = WIDTH
    files.pieces["x"] = [
        Piece("a.h5", "x", frozenset(range(row, min(row + high, n))), (row, column))
        for row in range(0, n, high)
        for column in range(0, WIDTH, wide)
    ]
    return files


def contiguous(rng, folder):
    """Rows without chunks, and digests of their pieces."""
    n, width = int(rng.integers(8, 20)), 1 << 16  # rows of the bytes that have a digest
    files = Files(folder, {"fields": ["x"], "files": {"verify": "digest"}})
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = numbered(0, n, width)
        start = file["x"].id.get_offset()
    assert check_files(str(folder / "a.h5"), write_digests=True).digested
    files.divisors["x"] = width
    files.pieces["x"] = [
        Piece("a.h5", "x", frozenset([row]), offset=start + row * 4 * width + int(rng.integers(4 * width)))
        for row in range(n)
    ]
    return files


def many_files(rng, folder):
    files, first = Files(folder, {"fields": ["x"]}, "*.h5"), 0
    for name in "abc":
        n = int(rng.integers(9, 30))
        put_rows(files, f"{name}.h5", "x", "x", numbered(first, n), int(rng.integers(1, 6)), first, of_integers(rng))
        first += n
    return files


def stacked(rng, folder):
    """Two arrays as one field."""
    files, n = Files(folder, {"fields": {"x": ["a", "b"]}}), int(rng.integers(30, 60))
    for key in "ab":
        put_rows(files, "a.h5", key, "x", numbered(0, n), int(rng.integers(1, 7)), 0, of_integers(rng))
    return files


def tables(rng, folder):
    """Members of a compound array."""
    n, rows_per_chunk = int(rng.integers(30, 90)), int(rng.integers(1, 7))
    values = np.zeros(n, [("a", "i4"), ("b", "i4", (3,)), ("c", "f8")])
    values["a"], values["b"] = np.arange(n), np.arange(n)[:, None]
    files = Files(folder, {"fields": {"a": "t/a", "b": "t/b"}})
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("t", data=values, chunks=(rows_per_chunk,), **options_of(a_storage(rng)))
    for name in "ab":
        files.divisors[name] = 1
        files.pieces[name] = [
            Piece("a.h5", "t", frozenset(range(row, min(row + rows_per_chunk, n))), (row,))
            for row in range(0, n, rows_per_chunk)
        ]
    return files


def images(rng, folder):
    n = int(rng.integers(12, 40))
    files = Files(folder, {"fields": ["image"], "decode": {"image": "image"}}, is_written=write_images(n))
    files.divisors["image"] = 1
    files.pieces["image"] = [Piece("a.h5", "image", frozenset([row])) for row in range(n)]
    write_images(n)(folder, [])
    return files


def write_images(n):
    def write(folder, bad):
        with h5py.File(folder / "a.h5", "w") as file:
            pictures = file.create_dataset("image", (n,), h5py.vlen_dtype("u1"))
            for row in range(n):
                memory = io.BytesIO()
                Image.fromarray(np.full((4, 4, 3), row, "u1")).save(memory, "PNG")
                octets = np.frombuffer(memory.getvalue(), "u1")
                pictures[row] = octets[:20] if row in bad else octets

    return write


def segments(rng, folder, *, equal):
    files = Files(folder, {"fields": ["obs", "act"], "segments": "data/*"})
    first = 0
    for number in range(int(rng.integers(8, 14))):
        n = 12 if equal else int(rng.integers(4, 14))
        for name, width in (("obs", WIDTH), ("act", 3)):
            key = f"data/demo_{number}/{name}"
            put_rows(
                files, "a.h5", key, name, numbered(first, n, width), int(rng.integers(1, 6)), first, of_integers(rng)
            )
        first += n
    return files


def windows(rng, folder):
    files = segments(rng, folder, equal=False)
    window = {"length": int(rng.integers(2, 5)), "stride": int(rng.integers(1, 4))}
    files.arguments["window"] = window | {"random": bool(rng.integers(2))}
    return files


def segment_samples(rng, folder):
    collate = [None, "pad", "list", "pack"][rng.integers(4)]
    files = segments(rng, folder, equal=collate is None)
    files.arguments |= {"sample": "segment", "collate_fn": collate}
    return files


def token_batches(rng, folder):
    files = segments(rng, folder, equal=False)
    files.arguments |= {"sample": "segment", "collate_fn": ["pad", "pack"][rng.integers(2)]}
    files.arguments["segments"] = {"groups": "data/*", "max_tokens": int(rng.integers(26, 60))}
    return files


def steps_of_segments(rng, folder):
    """Segments cut by offsets out of one array."""
    lengths = rng.integers(3, 12, 12)
    n = int(lengths.sum())
    files = Files(folder, {"fields": ["x"], "segments": {"offsets": "offsets"}})
    put_rows(files, "a.h5", "x", "x", numbered(0, n), int(rng.integers(1, 9)), 0, of_integers(rng))
    with h5py.File(folder / "a.h5", "a") as file:
        file["offsets"] = np.append(0, np.cumsum(lengths))
    if rng.integers(2):
        files.arguments |= {"sample": "segment", "collate_fn": "pad"}
    else:
        files.arguments["window"] = {"length": 3, "stride": 2}
    return files


def patches(rng, folder):
    files = Files(folder, {"x_key": "volume*", "patch": {"shape": [6, 6, 6]}})
    if rng.integers(2):
        files.arguments["patch"] |= {"random": 12}
    with h5py.File(folder / "a.h5", "w") as file:
        for number in range(2):
            volume = (np.arange(16**3).reshape(16, 16, 16) + number * 16**3).astype("i4")
            file.create_dataset(f"volume{number}", data=volume, chunks=(8, 8, 8), **options_of(of_integers(rng)))
            for at in np.ndindex(2, 2, 2):
                cell = volume[tuple(slice(8 * i, 8 * i + 8) for i in at)]
                piece = Piece("a.h5", f"volume{number}", frozenset(cell.ravel().tolist()), tuple(8 * i for i in at))
                files.pieces.setdefault("x", []).append(piece)
    files.divisors["x"] = 1
    return files


def sparse_rows(rng, folder):
    n_rows, n_columns = int(rng.integers(20, 50)), 8
    counts = rng.integers(1, 5, n_rows)
    n, n_together = int(counts.sum()), int(rng.integers(4, 16))
    columns = np.concatenate([np.sort(rng.choice(n_columns, count, replace=False)) for count in counts])
    files = Files(folder, {"fields": ["X"]})
    with h5py.File(folder / "a.h5", "w") as file:
        group, chunks = file.create_group("X"), {"chunks": (n_together,)} | options_of(a_storage(rng))
        group.create_dataset("data", data=np.arange(1, n + 1, dtype="f4"), **chunks)
        group.create_dataset("indices", data=columns, **chunks)
        group["indptr"] = np.append(0, np.cumsum(counts))
        shape = (n_rows, n_columns)
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape})
    files.divisors["X"] = 1
    files.pieces["X"] = [
        Piece("a.h5", f"X/{key}", frozenset(range(start + 1, min(start + n_together, n) + 1)), (start,))
        for key in ("data", "indices")
        for start in range(0, n, n_together)
    ]
    return files


def references(rng, folder):
    files, first = Files(folder, {"fields": {"x": "recordings"}, "sample": "segment"}), 0
    n = int(rng.integers(6, 20))
    for number in range(n):
        put_rows(files, "a.h5", f"#refs#/r{number}", "x", numbered(first, 8), 3, first, "gzip")
        first += 8
    with h5py.File(folder / "a.h5", "a") as file:
        pointers = np.empty((1, n), h5py.ref_dtype)
        for number in range(n):
            file[f"#refs#/r{number}"].attrs["MATLAB_class"] = np.bytes_("double")
            pointers[0, number] = file[f"#refs#/r{number}"].ref
        file.create_dataset("recordings", data=pointers, dtype=h5py.ref_dtype)
        file["recordings"].attrs["MATLAB_class"] = np.bytes_("cell")
    return files


def mixture(rng, folder):
    files = Files(folder, {"fields": ["x"]}, None, modules=("lazy", "combined"))
    put_rows(files, "a.h5", "x", "x", numbered(0, 40), int(rng.integers(1, 6)), 0, of_integers(rng))
    put_rows(files, "b.h5", "x", "x", numbered(40, 24), int(rng.integers(1, 6)), 40, of_integers(rng))
    files.arguments["mixture"] = {"sources": {"a": "a.h5", "b": "b.h5"}}
    files.arguments["mixture"] |= [
        {"strategy": "sequential"},
        {"strategy": "round_robin"},
        {"strategy": "weighted", "weights": [1, 2], "epoch_length": 70},
        {},
    ][rng.integers(4)]
    return files


def weights(rng, folder):
    files = rows(rng, folder)
    with h5py.File(folder / "a.h5", "a") as file:
        file["w"] = rng.choice([0.0, 1.0, 1.0, 4.0], len(file["x"]))
    files.arguments |= {"weights": "w"}
    return files


def filtered(rng, folder):
    """Rows that a filter and a split leave of several files."""
    files, first = (
        Files(folder, {"fields": ["x"], "where": {"kept": 1}, "split": 0.2, "eval_batch_size": 64}, "*.h5"),
        0,
    )
    for name in "ab":
        n = int(rng.integers(20, 50))
        put_rows(files, f"{name}.h5", "x", "x", numbered(first, n), int(rng.integers(1, 6)), first, of_integers(rng))
        with h5py.File(folder / f"{name}.h5", "a") as file:
            file["kept"] = rng.integers(0, 3, n) // 2 ^ 1
        first += n
    return files


def virtual(rng, folder):
    files = Files(folder, {"fields": ["x"], "files": {"allow_external": True}}, "v.h5")
    put_rows(files, "a.h5", "x", "x", numbered(0, 30), int(rng.integers(1, 6)), 0, "gzip")
    put_rows(files, "b.h5", "x", "x", numbered(30, 20), int(rng.integers(1, 6)), 30, "gzip")
    layout = h5py.VirtualLayout((50, WIDTH), "i4")
    layout[:30] = h5py.VirtualSource("a.h5", "x", (30, WIDTH))
    layout[30:] = h5py.VirtualSource("b.h5", "x", (20, WIDTH))
    with h5py.File(folder / "v.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    return files


def staged(rng, folder):
    files = rows(rng, folder)
    files.arguments |= {"staging": True}
    return files


KINDS = {
    make.__name__: make
    for make in (
        rows,
        input_and_target,
        narrow_chunks,
        contiguous,
        many_files,
        stacked,
        tables,
        images,
        windows,
        segment_samples,
        token_batches,
        steps_of_segments,
        patches,
        sparse_rows,
        references,
        mixture,
        weights,
        filtered,
        virtual,
        staged,
    )
}


OF_ROWS = {"rows", "input_and_target", "narrow_chunks", "contiguous", "many_files", "stacked", "tables", "images"}
OF_ROWS |= {"mixture", "weights", "filtered", "staged"}
"""Kinds of which a sample is a row."""

WITH_MANY = {"rows", "input_and_target", "narrow_chunks", "many_files", "stacked", "tables", "virtual", "staged"}
WITH_MANY |= {"mixture", "weights", "token_batches"}
"""Kinds with a batch of nine samples for each of three ranks at least."""


class Refuse:
    """A transform that fails for samples with some ids in a field."""

    def __init__(self, name, ids, divisor):
        self.name, self.ids, self.divisor = name, frozenset(ids), divisor

    def __call__(self, sample):
        value = sample[self.name] if isinstance(sample, dict) else sample
        if self.ids & ids_of(value, self.divisor):
            raise ZeroDivisionError(f"of {self.name}")
        return sample


def ids_of(value, divisor):
    """Return the ids that a sample's value has: numbers of rows, cells or entries."""
    values = value if isinstance(value, list) else [value]
    return {int(i) for part in values for i in np.unique(np.asarray(part).astype(np.int64) // divisor)}


class Case:
    """A random case, which follows from its seed.

    Args:
        seed: decides all.
        folder: for the files.
        kinds: names of kinds to choose from.
    """

    def __init__(self, seed, folder, kinds=tuple(KINDS)):
        rng = np.random.default_rng(seed)
        self.kind = str(rng.choice(list(kinds)))
        self.good, self.bad = folder / "good", folder / "bad"
        self.good.mkdir(parents=True)
        self.files = KINDS[self.kind](rng, self.good)
        self.module = str(rng.choice(self.files.modules))
        self.world_size, self.n_workers = int(rng.integers(1, 4)), int(rng.choice([0, 0, 2]))
        self.options = {
            "batch_size": int(rng.integers(3, 10)),
            "shuffle": [True, "chunks", {"mode": "chunks", "buffer": "4 KiB"}, "global", False][rng.integers(5)],
            "seed": int(rng.integers(99)),
            "drop_last": bool(rng.integers(4) == 0),
        }
        if self.kind not in WITH_MANY:
            self.options |= {"batch_size": int(rng.integers(2, 5)), "drop_last": False}
        if self.kind == "token_batches":
            del self.options["batch_size"], self.options["drop_last"]
        if self.module == "combined" and self.kind in ("rows", "many_files", "narrow_chunks", "mixture"):
            self.options["row_cache"] = int(rng.choice([0, 7, 1000]))
        if self.module == "cached":
            self.options["shuffle"] = bool(rng.integers(4))
            self.options["memory"] = {"mode": str(rng.choice(["interleave", "contiguous"]))}
            if rng.integers(3) == 0 and self.kind != "token_batches":
                self.options["memory"]["reshard_every_n_epochs"] = 1
        elif rng.integers(3) == 0:
            self.options["files"] = self.files.arguments.get("files", {}) | {
                "cache_bytes": int(rng.choice([0, 300, 1000, 4000]))
            }
        if rng.integers(3) == 0:
            self.options["prefetch_factor"] = int(rng.integers(1, 6))
        if self.n_workers:
            self.options["workers"] = {"persistent": bool(rng.integers(2))}
        self.is_held = bool(rng.integers(4) == 0)
        self.is_resumed = bool(rng.integers(3) == 0)
        self.stop = float(rng.random())
        self.has_lost_end = False
        self._damage(rng)

    def _damage(self, rng):
        """Choose pieces and ids that fail, and write the damaged copy."""
        self.damaged = {name: set() for name in self.files.pieces}
        self.refused = {name: set() for name in self.files.pieces}
        hurt, lost = [], []
        for _ in range(int(rng.integers(1, 5))):
            name = str(rng.choice(list(self.files.pieces)))
            pieces = self.files.pieces[name]
            piece = pieces[rng.integers(len(pieces))]
            if rng.integers(4) == 0:
                self.refused[name].add(int(rng.choice(sorted(piece.ids))))
            else:
                hurt.append((name, piece))
        if hurt and self.files.is_written is None and rng.integers(4) == 0:
            name, piece = hurt[0]
            lost = pieces_of_end(rng, self.good / piece.file, piece.key, self.files.pieces[name])
            hurt = [*hurt[1:], *((name, other) for other in lost)]
            self.has_lost_end = True
        name = str(rng.choice(list(self.files.pieces)))
        self.field = name
        for other in self.refused:
            if other != name:  # one transform looks at one field
                self.refused[other].clear()
        if hurt and self.files.is_written is not None:
            self.bad.mkdir()
            self.files.is_written(self.bad, {i for _, piece in hurt for i in piece.ids})
            for name, piece in hurt:
                self.damaged[name] |= piece.ids
            return
        shutil.copytree(self.good, self.bad, copy_function=shutil.copy2)
        for piece in {piece.place: piece for _, piece in hurt}.values():
            for name, pieces in self.files.pieces.items():  # members of a table share chunks
                if any(other.place == piece.place for other in pieces):
                    self.damaged[name] |= piece.ids
        for piece in lost:
            lose(self.bad / piece.file, piece, is_first=piece is lost[0])
        for piece in {piece.place: piece for _, piece in hurt}.values():
            damage(self.bad / piece.file, piece)

    def __str__(self):
        hurt = {name: sorted(ids)[:6] for name, ids in self.damaged.items() if ids}
        refused = {name: sorted(ids) for name, ids in self.refused.items() if ids}
        return (
            f"{self.kind}, {self.module}, {self.world_size} ranks, {self.n_workers} workers, {self.options}, "
            f"{self.files.arguments}, held={self.is_held}, damaged={hurt}, lost end={self.has_lost_end}, "
            f"refused={refused}"
        )

    def datamodule(self, rank, *, is_bad, world_size=None, **options):
        """Return a data module over one of the two copies."""
        folder = self.bad if is_bad else self.good
        refuse = Refuse(self.field, self.refused[self.field] if is_bad else (), self.files.divisors[self.field])
        given = self.files.arguments_in(folder) | {"with_index": True, "num_workers": self.n_workers}
        if any(self.refused.values()):
            given["transform" if self.field != "y" or "y_key" not in given else "target_transform"] = refuse
        given |= (
            {"on_bad_row": {"limit": 10_000, "stages": ["train", "val"]} if is_bad else "raise"}
            | self.options
            | options
        )
        if world_size is not None:
            given["distributed"] = {"rank": rank, "world_size": world_size}
        return MODULES[self.module](self.files.path(folder), **given)

    def truncate(self):
        """Cut a file of the damaged copy in the middle of its data."""
        pieces = [piece for pieces in self.files.pieces.values() for piece in pieces]
        piece = pieces[int(self.stop * len(pieces))]
        path = self.bad / piece.file
        if piece.offset is not None:
            os.truncate(path, piece.offset)
        elif piece.at is None:  # heaps of lists have no chunks
            os.truncate(path, os.path.getsize(path) // 2)
        else:
            chunk = chunk_of(path, piece)
            os.truncate(path, chunk.byte_offset + chunk.size // 2)

    def place(self, sample):
        """Return the file and the row of a sample that is a row of chunks; None of another."""
        name = next(iter(self.files.pieces))
        if self.kind not in OF_ROWS:
            return None
        (number,) = ids_of(sample[name], self.files.divisors[name])
        file = next(piece.file for piece in self.files.pieces[name] if number in piece.ids)
        first = min(min(piece.ids) for piece in self.files.pieces[name] if piece.file == file)
        return str(self.bad / file), f"row {number - first}"

    def is_left_out(self, sample):
        """Return whether a sample of the undamaged files is to be missing."""
        return any(
            (self.damaged[name] | self.refused[name]) & ids_of(value, self.files.divisors[name])
            for name, value in sample.items()
            if name in self.files.pieces
        )

    def samples(self, batch):
        """Return the index of each sample of a batch, and its fields by name."""
        return samples_of(batch, self.files.arguments)


def pieces_of_end(rng, path, key, pieces):
    """Return the last pieces of an array in its file, up to a third of them."""
    of_array = [piece for piece in pieces if (piece.file, piece.key) == (path.name, key)]
    of_array.sort(key=lambda piece: piece.offset if piece.at is None else chunk_of(path, piece).byte_offset)
    return of_array[-1 - int(rng.integers(max(1, len(of_array) // 3))) :]


def lose(path, piece, *, is_first):
    """Put zeros over a chunk, the first from its middle on, as a copy that ended early may have them."""
    if piece.at is None:  # pieces without chunks are damaged otherwise
        return
    before, chunk = os.stat(path), chunk_of(path, piece)
    n_kept = chunk.size // 2 if is_first else 0
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset + n_kept)
        file.write(bytes(chunk.size - n_kept))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def chunk_of(path, piece):
    """Return where a piece is stored."""
    with h5py.File(path) as file:
        return file[piece.key].id.get_chunk_info_by_coord(piece.at)


def damage(path, piece):
    """Change a bit of a piece; another one of a chunk that still decodes, as some bits of a code do not matter."""
    before = os.stat(path)
    if piece.offset is not None:
        flip(path, piece.offset)
    else:
        chunk = chunk_of(path, piece)
        for place in (chunk.size // 2, chunk.size - 1):
            if _decodes(path, piece):
                flip(path, chunk.byte_offset + place)
        assert not _decodes(path, piece)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _decodes(path, piece):
    with h5py.File(path) as file:
        try:
            file[piece.key][tuple(slice(at, at + 1) for at in piece.at)]
        except OSError:
            return False
    return True


def samples_of(batch, arguments):
    """Return the index of each sample of a batch, and its fields by name: single samples, without padding."""
    if not isinstance(batch, dict):
        names = ["x", "y", "index"] if "y_key" in arguments else ["x", "index"]
        batch = dict(zip(names, batch, strict=False))
    index = batch["index"].tolist()
    ends = batch.get("cu_seqlens")
    samples = []
    for at, number in enumerate(index):
        sample = {}
        for name, column in batch.items():
            if name.endswith(("seqlen", "seqlens")):
                continue
            if ends is not None and isinstance(column, torch.Tensor) and len(column) == int(ends[-1]) != len(index):
                sample[name] = column[int(ends[at]) : int(ends[at + 1])]
            elif "length" in batch and isinstance(column, torch.Tensor) and column.ndim > 1:
                sample[name] = column[at, : int(batch["length"][at])]
                assert not column[at, int(batch["length"][at]) :].any(), f"padding of {name} is not zero"
            else:
                sample[name] = column[at]
        samples.append((number, sample))
    return samples


def are_equal(one, other):
    """Return whether two samples have the same fields and values."""
    return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)


def _is_equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return one == other
