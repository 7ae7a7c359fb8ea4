"""What every dataset is held to, against the rows that h5py reads from the same files.

A test module makes a subclass of ``DatasetConformance`` for each kind of dataset, with its ``cases``. To hold a further
dataset to these claims, add a ``Case``: a function that makes it of the files that ``write_files`` wrote, and one that
makes its sample number ``i`` of the columns that h5py reads.
"""

import copy
import gc
import os
import pickle
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from factories import H5Factory, Stored, edit, in_threads, make_older, run_forked
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    get_worker_info,
)

from lightning_h5.datasets import RowDataset, h5_worker_init_fn
from lightning_h5.errors import H5DataChangedError, H5FileError, H5ValueError
from lightning_h5.hdf5 import process_pool
from lightning_h5.types import BatchToken

# Files --------------------------------------------------------------------------------------------------------------

N = 40
RANDOM = np.random.default_rng(5)
STEPS = RANDOM.permutation(N).astype("f8")
ARRAYS = {
    "images": np.resize(RANDOM.integers(0, 256, (7, 3, 8, 8), dtype=np.uint8), (N, 3, 8, 8)),
    "signals": RANDOM.normal(size=(N, 6)),
    "masks": RANDOM.integers(0, 2, (N, 5)).astype(bool),
    "raw": RANDOM.normal(size=(N, 2)).astype("f4"),
    "g/deep": RANDOM.normal(size=(N, 5)),
    "labels": np.arange(-3, N - 3, dtype="i2"),
    "names": np.array([f"row {i} ü" for i in range(N)], object),
    "code": np.array([b"ab"[: i % 3] * (i % 4) for i in range(N)]),
    "cs_label": RANDOM.integers(0, 2, N).astype("u1"),
    "patient": np.array([f"patient {i}" for i in RANDOM.integers(0, 9, N)], object),
    "step": STEPS,
    "words": np.array([["a" * (i % 7), "ü"] for i in range(N)], object),
}
KINDS_OF_FIELDS = {
    "uint8": np.arange(N * 2, dtype="u1").reshape(N, 2),
    "uint16": np.arange(N, dtype="u2") + 65_000,
    "uint16 rows": np.arange(N * 6, dtype="u2").reshape(N, 2, 3) * 1000,
    "uint32": np.arange(N, dtype="u4") + 2**31,
    "uint64": np.arange(N, dtype="u8") + 2**63,
    "int16": -np.arange(N, dtype="i2"),
    "big-endian": np.arange(N * 2, dtype=">i4").reshape(N, 2),
    "bool": np.arange(N) % 3 == 0,
    "bool rows": np.arange(N * 3).reshape(N, 3) % 2 == 0,
    "float16": np.linspace(-1, 1, N * 2).astype("f2").reshape(N, 2),
    "float32": np.linspace(-1, 1, N * 4).astype("f4").reshape(N, 4),
    "float64": np.linspace(-1, 1, N),
    "nothing": np.zeros((N, 0), "f4"),
    "nothing more": np.zeros((N, 2, 0), "u2"),
    "one": np.arange(N, dtype="f8").reshape(N, 1),
    "text": np.array([f"row {i} ü".encode() for i in range(N)]),
    "texts": np.array([[f"{i}{j}".encode() for j in "abc"] for i in range(N)]),
    "text table": np.array([[[f"{i}{j}{k}".encode() for k in "xy"] for j in "abc"] for i in range(N)]),
}
ARRAYS |= {f"kinds/{name}": values for name, values in KINDS_OF_FIELDS.items()}
TABLE = np.zeros(N, [("age", ">f4"), ("pair", "i2", (2,))])
TABLE["age"], TABLE["pair"] = RANDOM.normal(size=N), RANDOM.integers(0, 9, (N, 2))
ARRAYS["raw"][3, 1], ARRAYS["signals"][5, :2] = np.nan, (np.nan, np.inf)

LAYOUTS = {
    # As h5py guesses chunks: a row takes part in many, and they hold many rows.
    "images": [((20, 1, 4, 4), ("gzip",)), ((3, 3, 8, 8), ("shuffle", "gzip")), ((5, 3, 3, 8), ("lzf", "fletcher32"))],
    "signals": [((8, 6), ("shuffle", "lzf")), ((1, 6), ("gzip",)), ((6, 4), ("fletcher32",))],
    "masks": [((30, 5), ("gzip",)), ((7, 2), ()), ((2, 5), ("shuffle",))],
    "kinds/uint16 rows": [((2, 2, 3), ("lzf",))] * 3,
    "kinds/bool rows": [((2, 3), ("lzf",))] * 3,
    "kinds/float32": [((2, 4), ("lzf",))] * 3,
}
NONE = range(0)
SEVERAL = (NONE, range(14), range(14, 27), NONE, range(27, N), NONE)  # some of the files have no rows


def write_files(folder):
    """Write the same rows to a file in ``folder/one``, to several that store them differently, and as links."""
    make = H5Factory(folder)
    for place, parts in {"one": (range(N),), "several": SEVERAL}.items():
        for number, part in enumerate(parts):
            make(_arrays(list(part), number), name=f"{place}/part{number}.h5")
    with h5py.File(make(name="links/part0.h5"), "a") as file:
        for name in ("images", "raw"):
            file[name] = h5py.ExternalLink("../one/part0.h5", f"/{name}")
    return Path(folder)


def _arrays(rows, number):
    arrays, way = {}, number % 4 % 3
    for name, values in ARRAYS.items():
        if name in LAYOUTS:
            chunks, filters = LAYOUTS[name][way]
            arrays[name] = Stored(values[rows], "chunked", chunks, filters=filters)
        elif values.dtype == object:
            arrays[name] = Stored(values[rows], dtype=h5py.string_dtype())
        else:
            arrays[name] = values[rows]
    # Byte orders, and how text is stored, may differ between files.
    arrays["labels"] = arrays["labels"].astype(">i2" if way else "<i2")
    code = arrays["code"]
    arrays["code"] = (code.astype("S9"), code, Stored(code.astype(object), dtype=h5py.string_dtype()))[way]
    return arrays | {"table": TABLE[rows]}


def columns_of(folder):
    """Return for each array what h5py reads of each row: a tensor, or text."""
    columns = {}
    for path in sorted(Path(folder, "several").glob("*.h5")):
        with h5py.File(path) as file:
            for name in [*ARRAYS, "table"]:
                for value in (file[name][row] for row in range(len(file[name]))):
                    for member in value.dtype.names or () if name == "table" else ():
                        columns.setdefault(f"table/{member}", []).append(as_sample(value[member]))
                    if name != "table":
                        columns.setdefault(name, []).append(as_sample(value))
    return columns


def as_sample(value):
    """Return a number or an array as a tensor, in native byte order, and text as text."""
    value = np.asarray(value)
    if value.dtype.kind in "OS":
        return np.vectorize(bytes.decode, otypes=[object])(value).tolist()
    return torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))


# Cases --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A dataset over the files of ``write_files``, and its samples by h5py.

    Attributes:
        open: opens the dataset, of the folder.
        expected: sample ``i``, of the columns that h5py reads and ``i``.
        n: number of samples.
        collate: a batch of samples.
        holds_small: small arrays are read once and stay in memory; otherwise each read goes to the file.
        is_loaded: all rows are in memory once the dataset is made, whatever becomes of the files.
        keeps_rows: rows that were read stay in memory until the dataset is closed.
        has_steps: samples have different lengths, so that a batch of none has no steps, either.
        transforms: a function of the user makes samples, so that it is not known what a batch of none looks like.
    """

    open: Callable[[Path], RowDataset]
    expected: Callable[[Mapping[str, list[Any]], int], Any]
    n: int = N
    collate: Callable[[list[Any]], Any] = default_collate
    holds_small: bool = False
    is_loaded: bool = False
    keeps_rows: bool = False
    has_steps: bool = False
    transforms: bool = False

    def make(self, folder):
        """Return the dataset of the files in a folder."""
        with pytest.MonkeyPatch.context() as patch:
            if not self.holds_small:
                patch.setattr("lightning_h5.samples.row_table.HELD_BYTES", -1)
            return self.open(folder)

    def samples(self, columns, indices):
        """Return samples, as h5py reads them, by indices that may be negative."""
        return [self.expected(columns, int(i) % self.n) for i in indices]

    def batch(self, columns, indices):
        """Return a batch, as h5py reads it."""
        return self.collate(self.samples(columns, indices))


def row_of(columns, number):
    """Return what h5py reads of one row of each array."""
    return {name: column[number] for name, column in columns.items()}


def same(a, b):
    """Equal in structure, type and dtype, and bit by bit, so that NaN equals NaN.

    A list does for a tuple, as in torch's own collation.
    """
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    return type(a) is type(b) and a == b


def bits(tensor):
    """Return the bytes of a tensor's numbers."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def spoil(value):
    """Change a value in place, wherever it can be changed."""
    if isinstance(value, torch.Tensor):
        value.view(-1).view(torch.uint8).fill_(93) if value.numel() and value.dim() else value.zero_()
    elif isinstance(value, dict):
        for one in value.values():
            spoil(one)
        value.clear()
    elif isinstance(value, list | tuple):
        for one in value:
            spoil(one)
        if isinstance(value, list):
            value[:] = ["spoilt"] * len(value)


def is_open(path):
    """Return whether this process has a file open."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return any(os.path.realpath(link) == os.path.realpath(path) for link in links if os.path.exists(link))


def paths_of(dataset):
    """Return the files that have rows of a dataset."""
    return sorted({path for path, _ in dataset.places_of(np.arange(len(dataset)))})


# Claims -------------------------------------------------------------------------------------------------------------


A_SHARD_IS_LOADED_AGAIN = pytest.mark.filterwarnings("ignore:a worker process loads its rank's shard again")
NO_INDICES = [
    # with how the error shows them, and what it advises
    ((1, 2), r"\(1, 2\) was", r"read_batch\(\[3, 1, 2\]\)"),
    ([[1, 2]], r"\[\[1, 2\]\] was", r"read_batch\(\[3, 1, 2\]\)"),
    ([[1, 2], [3]], r"\[\[1, 2\], \[3\]\] was", r"read_batch\(\[3, 1, 2\]\)"),
    (np.zeros((2, 2), int), r"an array of dtype int64 and shape \(2, 2\) was", r"read_batch\(\[3, 1, 2\]\)"),
    ([True, False], "a mask of shape", "np.flatnonzero"),
    (torch.ones(N, dtype=torch.bool), "a mask of shape", "np.flatnonzero"),
    (True, "a mask of shape", "selected by integers"),
    ([0.5], r"\[0\.5\] was", "selected by integers. Pass integers"),
    (1.0, r"1\.0 was", "selected by integers. Pass integers"),
    ("x", "'x' was", "selected by integers. Pass integers"),
    ("1", "'1' was", "selected by integers. Pass integers"),
    (None, r"\[None\] was", "selected by integers. Pass integers"),
]


class DatasetConformance:
    """Claims about the datasets of ``cases``, over ``files`` that no test changes; h5py reads ``columns`` of them.

    ``make test`` tries a ``few`` of the cases.
    """

    cases: ClassVar[Mapping[str, Case]]
    few: ClassVar[tuple[str, ...]]

    @pytest.fixture
    def make(self, request, files):
        """Make the dataset of the case, of the common files or of those in a folder."""
        made = []

        def make(folder=files):
            made.append(weakref.ref(dataset := case.make(folder)))
            return dataset

        case = request.getfixturevalue("some_case" if "some_case" in request.fixturenames else "case")

        yield make
        for dataset in made:
            if dataset() is not None:
                dataset().close()

    @pytest.fixture
    def dataset(self, make):
        return make()

    # Values

    @pytest.mark.property
    def test_samples_and_batches_are_what_h5py_reads(self, case, dataset, columns):
        """One sample, several of them, and a batch, by any indices in any order, repeated or negative."""

        @given(st.lists(st.integers(-case.n, case.n - 1), min_size=1, max_size=12), st.integers(0, 2))
        @settings(max_examples=examples(25))
        def check(indices, epoch):
            samples, batch = case.samples(columns, indices), case.batch(columns, indices)
            assert same(dataset.__getitems__(indices), samples)
            assert same([dataset[i] for i in indices], samples)
            for kind in (list, np.array, torch.tensor, partial(np.array, dtype="i4")):
                assert same(dataset[kind(indices)], batch)
                assert same(dataset.read_batch(kind(indices)), batch)
            assert same(dataset.read_batch(iter(indices)), batch)
            token = BatchToken(epoch=epoch, step=0, rows=np.arange(case.n)[indices])
            assert same(dataset[token], batch)
            assert same([*dataset[token._replace(samples=True)]], samples)

        check()

    @pytest.mark.property
    def test_a_slice_or_a_range_gives_a_batch(self, case, dataset, columns):
        @given(st.slices(case.n).filter(lambda rows: range(case.n)[rows]))
        @settings(max_examples=examples(20))
        def check(rows):
            indices = range(case.n)[rows]
            batch = case.batch(columns, indices)
            assert same(dataset[rows], batch)
            assert same(dataset[indices], batch)

        check()

    def test_all_rows_are_there_in_their_order(self, case, dataset, columns):
        """Also by the protocol of iteration; and each lies in a file, in a block."""
        expected = case.samples(columns, range(case.n))
        assert len(dataset) == len(expected)
        assert same(dataset.read_batch(range(case.n)), case.collate(expected))
        assert same(list(dataset), expected)
        assert dataset.blocks().n_rows == case.n
        assert all(os.path.isfile(path) for path in paths_of(dataset))

    def test_no_rows_give_an_empty_batch_of_the_right_structure(self, case, dataset, columns):
        full = case.batch(columns, [0])
        if case.transforms:
            with pytest.raises(H5ValueError, match=r"an empty batch was requested, but the transform runs"):
                dataset.read_batch([])
        else:
            for _ in range(2):  # before rows were read, and after
                assert_empty(dataset.read_batch([]), full, case.has_steps)
                assert same(dataset.read_batch([0]), full)
        assert dataset.__getitems__([]) == []

    def test_one_index_gives_a_sample_whatever_kind_of_integer_it_is(self, some_case, files, columns):
        with some_case.make(files) as dataset:
            for index in (some_case.n - 1, -1, -some_case.n):
                for kind in (int, np.int64, np.int32, np.array, torch.tensor, *[np.uint8] * (index >= 0)):
                    assert same(dataset[kind(index)], some_case.samples(columns, [index])[0]), kind

    # Indices that are refused

    def test_an_index_outside_is_an_index_error(self, some_case, dataset):
        for index in (some_case.n, -some_case.n - 1, 10**9):
            several = [0, index]
            with pytest.raises(IndexError, match=(text := rf"index {index} .*a dataset with {some_case.n} rows")):
                dataset[index]
            for ask in (dataset.__getitem__, dataset.__getitems__, dataset.read_batch):
                for indices in (several, np.array([index])):
                    with pytest.raises(IndexError, match=text):
                        ask(indices)

    def test_what_is_no_index_is_refused_by_name_with_what_to_pass(self, some_case, files):
        with some_case.make(files) as dataset:
            for index, shown, advice in NO_INDICES:
                with pytest.raises(H5ValueError, match=rf"^{shown}.* passed as (an index|indices); .*{advice}"):
                    dataset[index]

    # Torch's loaders

    def test_a_plain_loader_gives_each_row_once_an_epoch_and_a_subset_its_rows(self, case, dataset, columns):
        subset = Subset(dataset, [case.n - 1, 0, 1])
        assert same(subset[[2, 0]], case.batch(columns, [1, case.n - 1]))
        for epoch in range(2):
            order = np.random.default_rng(epoch).permutation(case.n).tolist()
            loader = DataLoader(dataset, batch_size=7, sampler=order, collate_fn=list)
            assert same([sample for batch in loader for sample in batch], case.samples(columns, order))
            if case.collate is default_collate:
                for at, batch in enumerate(DataLoader(dataset, batch_size=7, sampler=order)):
                    assert same(batch, case.batch(columns, order[7 * at : 7 * at + 7]))

    @A_SHARD_IS_LOADED_AGAIN
    @pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.wide)])
    def test_torchs_batch_sampler_reads_whole_batches(self, some_case, files, columns, num_workers):
        dataset = some_case.make(files)
        sampler = BatchSampler(SequentialSampler(dataset), 3, drop_last=False)
        loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=num_workers)
        assert same(list(loader), [some_case.batch(columns, rows) for rows in sampler])
        shuffled = DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), 3, drop_last=True), batch_size=None)
        assert len(list(shuffled)) == some_case.n // 3
        dataset.close()

    @A_SHARD_IS_LOADED_AGAIN
    @pytest.mark.wide
    @pytest.mark.parametrize("num_workers", [0, 1])
    @pytest.mark.parametrize("options", [{}, {"batch_size": 2}], ids=str)
    def test_a_batch_sampler_without_batch_size_none_says_how_it_is_passed(
        self, some_case, files, num_workers, options
    ):
        dataset = some_case.make(files)
        sampler = BatchSampler(SequentialSampler(dataset), 3, drop_last=False)  # the last batch may be shorter
        loader = DataLoader(dataset, sampler=sampler, num_workers=num_workers, **options)
        text = r"batch_sampler=\.\.\., or as sampler=\.\.\. together with batch_size=None"
        with pytest.raises(ValueError, match=text):
            list(loader)
        dataset.close()

    # What becomes of results

    @pytest.mark.parametrize(
        "smallest",
        [pytest.param(None, id="memory of its own", marks=pytest.mark.wide), pytest.param(1, id="used again")],
    )
    def test_changing_a_sample_or_a_batch_in_place_changes_no_other_and_no_file(
        self, some_case, make, files, columns, tmp_path, monkeypatch, smallest
    ):
        """Also if memory of batches is used again, as that of large ones is."""
        if smallest is not None:
            monkeypatch.setattr("lightning_h5.readers.buffers.SMALLEST", smallest)
        folder = copy_of(files, tmp_path)
        dataset = make(folder)
        before = contents(folder)
        rows = [1, 1, some_case.n - 1, 0, some_case.n // 2, 1]
        expected, batch = some_case.samples(columns, rows), some_case.batch(columns, rows)
        for ask in (
            lambda: dataset.read_batch(rows),
            lambda: dataset.__getitems__(rows),
            lambda: dataset[rows[0]],
            lambda: dataset.read_batch(range(some_case.n)),
            lambda: dataset.read_batch([1]),
        ):
            spoil(ask())
            first, *others = dataset.__getitems__(rows)
            assert same(first, expected[0])
            spoil(first)  # the same row comes again after it
            assert same(others, expected[1:])
            spoil(others)
            assert same(dataset.read_batch(rows), batch)
        dataset.close()
        assert contents(folder) == before

    def test_batches_that_are_kept_keep_their_values(self, some_case, dataset, columns, monkeypatch):
        """Also if memory of batches is used again, as that of large ones is."""
        monkeypatch.setattr("lightning_h5.readers.buffers.SMALLEST", 1)
        random, kept = np.random.default_rng(1), []
        for _ in range(30):
            rows = random.integers(0, some_case.n, random.integers(1, 9)).tolist()
            kept.append((rows, dataset.read_batch(rows)))
            if len(kept) > 6:
                kept.pop(random.integers(len(kept)))
        assert all(same(batch, some_case.batch(columns, rows)) for rows, batch in kept)

    # Copies, and the end

    @pytest.mark.parametrize(
        "how", ["pickle", *[pytest.param(n, marks=pytest.mark.wide) for n in ("copy", "deepcopy")]]
    )
    def test_a_copy_reads_for_itself(self, some_case, files, columns, how):
        """Of a dataset that was not used yet, and of one that was."""
        make = {"pickle": lambda d: pickle.loads(pickle.dumps(d)), "copy": copy.copy, "deepcopy": copy.deepcopy}[how]
        dataset, rows = some_case.make(files), list(range(some_case.n))[::-1]
        expected = some_case.batch(columns, rows)

        def check(one):
            assert same(one.read_batch(rows), expected)

        for _ in range(2):
            mine = make(dataset)
            assert mine.work is not dataset.work
            assert mine.identity() == dataset.identity()
            in_threads(*[partial(check, one) for one in (dataset, mine)])
            mine.close()
            check(dataset)
            check(mine)
            mine.close()
        dataset.close()

    def test_data_that_was_read_is_not_pickled(self, case, dataset, columns):
        before = pickle.dumps(dataset)
        rows = range(case.n)
        assert same(dataset.read_batch(rows), case.batch(columns, rows))
        after = pickle.dumps(dataset)
        assert len(after) < len(before) + 2000  # what follows from the description of the files may be kept
        for pickled in (before, after):
            with pickle.loads(pickled) as other:
                assert same(other.read_batch(rows), case.batch(columns, rows))

    def test_a_closed_dataset_opens_its_files_again(self, case, make, columns):
        """Closing it twice does nothing; a ``with`` block closes it."""
        rows = [1, case.n - 1, 0]
        with make() as dataset:
            expected, paths = case.batch(columns, rows), paths_of(dataset)
            assert same(dataset.read_batch(rows), expected)
        assert not any(map(is_open, paths))
        for _ in range(3):
            dataset.close()
            assert same(dataset.read_batch(rows), expected)
        dataset.close()
        dataset.close()
        assert not any(map(is_open, paths))

    def test_a_dataset_that_is_forgotten_closes_its_files_at_once(self, some_case, make, columns):
        gc.disable()  # by counting references alone
        try:
            dataset = make()
            paths, batch = paths_of(dataset), dataset.read_batch([1, 0])
            dataset = weakref.ref(dataset)
            assert dataset() is None
            assert not any(map(is_open, paths))
        finally:
            gc.enable()
        assert same(batch, some_case.batch(columns, [1, 0]))

    # Other threads and processes

    def test_many_threads_read_from_one_dataset(self, some_case, dataset, columns):
        samples = some_case.samples(columns, range(some_case.n))

        def read(seed):
            random = np.random.default_rng(seed)
            for turn in range(6):
                rows = random.integers(0, some_case.n, random.integers(1, 9))
                if seed % 2:
                    dataset.prefetch(rows)
                if turn % 3 == 2:
                    assert same(dataset.__getitems__(rows), [samples[row] for row in rows])
                else:
                    assert same(dataset.read_batch(rows), some_case.collate([samples[row] for row in rows]))

        in_threads(*(partial(read, seed) for seed in range(6)))

    def test_a_forked_child_and_its_parent_read_on(self, some_case, dataset, columns):
        rows = range(some_case.n)
        expected = some_case.batch(columns, rows)

        def check():
            assert same(dataset.read_batch(rows), expected)

        check()
        dataset.prefetch(np.arange(some_case.n))  # what the parent was about to do is not the child's

        def child():
            for _ in range(2):
                in_threads(check, check)

        assert run_forked(child) == 0
        check()

    # Files that change

    @pytest.mark.parametrize("change", ["edit", "touch", "replace", "replace by a smaller one", "truncate", "delete"])
    def test_a_file_that_changed_is_an_error_that_names_it(self, some_case, files, columns, tmp_path, change):
        """Before the first read, and after it. Rows that are in memory are what they were until they are given back."""
        folders = [copy_of(files, tmp_path / name) for name in ("fresh", "used")]
        for is_used, folder in enumerate(folders):
            dataset, rows = some_case.make(folder), range(some_case.n)
            path = paths_of(dataset)[-1]
            if is_used:
                dataset.read_batch(rows)
            change_file(path, change)
            if some_case.is_loaded or (is_used and some_case.keeps_rows):
                assert same(dataset.read_batch(rows), some_case.batch(columns, rows))
                dataset.close()
            # A file that is missing or short may be noticed by the read itself; an edited one by the guard alone.
            error = H5FileError if change in ("truncate", "delete") else H5DataChangedError
            for _ in range(2):
                with pytest.raises(error, match=re.escape(path)):
                    dataset.read_batch(rows)
                dataset.close()


def assert_empty(empty, full, has_steps):
    """A batch without rows is as one with rows, in all but their number."""
    if isinstance(full, dict):
        assert list(empty) == list(full)
        for name in full:
            assert_empty(empty[name], full[name], has_steps)
    elif isinstance(full, torch.Tensor):
        shape = (0, 0, *full.shape[2:])[: full.ndim] if has_steps else (0, *full.shape[1:])
        assert (empty.shape, empty.dtype) == (shape, full.dtype)
    elif is_text(full):
        assert empty == []
    else:
        assert len(empty) == len(full)
        for pair in zip(empty, full, strict=True):
            assert_empty(*pair, has_steps)


def is_text(value):
    """Return whether a value is text, or text with axes."""
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(map(is_text, value)))


def copy_of(files, folder):
    """Return a copy of the files, made some time ago."""
    shutil.copytree(files, folder := folder / "copy")
    for path in folder.glob("*/*.h5"):
        make_older(path)
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.glob("*/*.h5")}


def change_file(path, change):
    if change == "edit":
        edit(path, os.path.getsize(path) - 1)
    elif change == "touch":
        os.utime(path)
    elif change == "replace":
        shutil.copy(path, f"{path}.new")
        os.replace(f"{path}.new", path)
    elif change == "replace by a smaller one":
        with h5py.File(f"{path}.new", "w") as file:
            file["images"] = np.zeros((1, 3, 8, 8), "u1")
        os.replace(f"{path}.new", path)
    elif change == "truncate":
        os.truncate(path, os.path.getsize(path) - 1)
    else:
        os.unlink(path)


# All datasets in one loader -----------------------------------------------------------------------------------------


class Readings(torch.utils.data.Dataset):
    """Reads of several datasets as one dataset, so that the workers of one loader try all of them."""

    def __init__(self, datasets):
        self.datasets, self.pid = datasets, os.getpid()

    def __getitem__(self, reading):
        name, way, indices = reading
        dataset = self.datasets[name]
        assert os.getpid() != self.pid
        if way == "sample":
            return dataset[indices[0]]
        return dataset.__getitems__(indices) if way == "samples" else dataset[indices]


def no_files_are_inherited(worker_id):
    """Prepare a worker as users do, and check that it has no file of its parent."""
    h5_worker_init_fn(worker_id)
    assert len(process_pool()) == 0
    assert get_worker_info().id == worker_id
