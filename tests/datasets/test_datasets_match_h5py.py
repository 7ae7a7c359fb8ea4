"""Every dataset is held to the claims of ``DatasetConformance``."""

from dataclasses import replace
from itertools import cycle, product
from typing import ClassVar

import numpy as np
import pytest
import torch
from arguments import nested_files
from dataset_conformance import (
    A_SHARD_IS_LOADED_AGAIN,
    ARRAYS,
    KINDS_OF_FIELDS,
    STEPS,
    Case,
    DatasetConformance,
    N,
    Readings,
    columns_of,
    no_files_are_inherited,
    row_of,
    same,
    write_files,
)
from torch.utils.data import DataLoader, default_collate

import lightning_h5  # which imports no data module, and so not Lightning, in a worker
from lightning_h5.datasets import (
    CombinedHDF5Dataset,
    H5LazyDataset,
    RankMemCachedH5Dataset,
    mixture_dataset,
    weighted_dataset,
)
from lightning_h5.datasets.file_dataset import FileDataset
from lightning_h5.hdf5 import OpenOptions
from lightning_h5.options import StepRange
from lightning_h5.order import RowWeights
from lightning_h5.samples.segments import Segments, Steps
from lightning_h5.samples.windows import Windows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def columns(files):
    return columns_of(files)


# Arguments of a dataset, and a sample of a row with these arrays and this index -----------------------------------


def double(value):
    return value * 2


def shout(sample):
    return {"b": sample["a"] + 1, "n": sample["n"].upper()}


def batch_of_lists(batch):
    return [*batch, batch[0] + 1]


SUBSET = np.array([5, 30, 20, 30, 0])
KINDS = {
    "x": ({"x_key": "images"}, lambda r, i: r["images"]),
    "x, y": ({"x_key": "images", "y_key": "labels"}, lambda r, i: (r["images"], r["labels"])),
    "one column": ({"x_key": "labels"}, lambda r, i: r["labels"]),
    "dtypes": (
        {"x_key": "images", "y_key": "labels", "x_dtype": "bfloat16", "y_dtype": torch.int64},
        lambda r, i: (r["images"].to(torch.bfloat16), r["labels"].long()),
    ),
    "list": (
        {"x_key": ["images", "g/deep"], "y_key": "labels", "x_dtype": "float32"},
        lambda r, i: ((r["images"].float(), r["g/deep"].float()), r["labels"]),
    ),
    "list with text": (
        {"x_key": ["images", "names"], "y_key": "labels"},
        lambda r, i: ((r["images"], r["names"]), r["labels"]),
    ),
    "mapping": (
        {"x_key": {"a": "images", "b": "table/pair"}, "y_key": ["labels", "table/age"]},
        lambda r, i: ({"a": r["images"], "b": r["table/pair"]}, (r["labels"], r["table/age"])),
    ),
    "text as y": ({"x_key": "g/deep", "y_key": "names"}, lambda r, i: (r["g/deep"], r["names"])),
    "text in a mapping": (
        {"x_key": {"a": "images", "n": "names", "c": "code"}},
        lambda r, i: {"a": r["images"], "n": r["names"], "c": r["code"]},
    ),
    "member": ({"x_key": "table/pair", "y_key": "table/age"}, lambda r, i: (r["table/pair"], r["table/age"])),
    "index": ({"x_key": "images", "with_index": True}, lambda r, i: (r["images"], i)),
    "index after y": (
        {"x_key": "images", "y_key": "labels", "with_index": True},
        lambda r, i: (r["images"], r["labels"], i),
    ),
    "index in a dict": (
        {"x_key": {"a": "images"}, "with_index": True},
        lambda r, i: {"a": r["images"], "index": i},
    ),
    "subset": (
        {"x_key": "images", "y_key": "labels", "indices": SUBSET, "with_index": True},
        lambda r, i: (r["images"], r["labels"], i),
    ),
    "mask": ({"x_key": {"l": "labels"}, "indices": STEPS % 3 == 0}, lambda r, i: {"l": r["labels"]}),
    "transforms": (
        {"x_key": "images", "y_key": "labels", "transform": double, "target_transform": double},
        lambda r, i: (r["images"] * 2, r["labels"] * 2),
    ),
    "transform in place": (
        {"x_key": "raw", "y_key": "labels", "transform": torch.Tensor.neg_},
        lambda r, i: (-r["raw"], r["labels"]),
    ),
    "lists of text": ({"x_key": {"a": "raw", "w": "words"}}, lambda r, i: {"a": r["raw"], "w": r["words"]}),
    "transform of a dict": (
        {"x_key": {"a": "images", "n": "names"}, "y_key": "labels", "transform": shout},
        lambda r, i: ({"b": r["images"] + 1, "n": r["names"].upper()}, r["labels"]),
    ),
    "mmap": (
        {"x_key": "raw", "y_key": "labels", "mmap": True},
        lambda r, i: (r["raw"], r["labels"]),
    ),
}
SOME_ROWS = {"subset": SUBSET, "mask": np.flatnonzero(STEPS % 3 == 0)}


def texts_as_lists(samples):
    """A batch of samples, in which torch would change rows and columns of text that has axes."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {name: each if isinstance(each[0], list) else default_collate(each) for name, each in columns.items()}


def rows_case(make, sample, numbers=None, *, shown=None, **more):
    """A case whose samples are rows of these numbers; ``shown`` are their numbers as ``with_index`` gives them."""
    numbers = np.arange(N) if numbers is None else numbers
    shown = np.arange(len(numbers)) if shown is None else shown
    return Case(make, lambda columns, i: sample(row_of(columns, numbers[i]), int(shown[i])), n=len(numbers), **more)


def collate_of(kind):
    return texts_as_lists if kind == "lists of text" else default_collate


# Rows read from files on demand ---------------------------------------------------------------------------------------


def lazy(kind, place, **more):
    options, sample = KINDS[kind]
    return rows_case(
        lambda folder: H5LazyDataset(folder / place, **nested_files(**options)),
        sample,
        SOME_ROWS.get(kind),
        transforms="transform" in options,
        collate=collate_of(kind),
        **more,
    )


# Fields whose chunks lie differently in each file, with memory for all decoded rows, some, or none.
FIELDS = ["images", "signals", "masks", "raw"]


def decoded(n_bytes, fields=FIELDS):
    def make(folder):
        keys = {name: name for name in fields}
        return H5LazyDataset(folder / "several", keys, "labels", files={"cache_bytes": n_bytes})

    return rows_case(make, lambda r, i: ({name: r[name] for name in fields}, r["labels"]))


def transformed(folder):
    return H5LazyDataset(folder / "one", "images", "labels", batch_transform=batch_of_lists)


def external(folder):
    """Arrays that are links to another file."""
    return H5LazyDataset(folder / "links", "images", "raw", files={"allow_external": True})


SEGMENTS = Segments((Steps(np.array([11, 0, 24]), np.array([3, 2, 3])),), (0, 0))
SINGLE_STEPS = Windows(SEGMENTS, (StepRange(0, 1, is_single=True),) * 2)
SEGMENT_ROWS = np.array([11, 12, 13, 0, 1, 24, 25, 26])


def segments(indices):
    def make(folder):
        plain = H5LazyDataset(folder / "several", "images", "labels")
        table = replace(plain.table, indexer=SINGLE_STEPS, has_steps=(True, True), step_places=(0, 0))
        return FileDataset(
            table, plain.fields, batch_transform=None, indices=indices, options=OpenOptions(), cache_bytes=1 << 20
        )

    numbers = SEGMENT_ROWS if indices is None else SEGMENT_ROWS[indices]
    return rows_case(make, lambda r, i: (r["images"], r["labels"]), numbers)


class TestLazyDataset(DatasetConformance):
    few = ("memory for some", "text in a mapping, several files", "mapping, held", "mmap, one file")
    cases: ClassVar = {
        "memory for some": decoded(5000),
        "memory for none": decoded(0),
        "one byte": decoded(1),
        "some, one field": decoded(4000, ["images"]),
        "memory for all": decoded("64MB"),
        "batch transform": rows_case(
            transformed, lambda r, i: (r["images"], r["labels"]), collate=lambda s: batch_of_lists(default_collate(s))
        ),
        "links to another file": rows_case(external, lambda r, i: (r["images"], r["raw"])),
        "runs of rows": segments(None),
        "some of runs of rows": segments([7, 0, 4, 4]),
        **{f"{kind}, several files": lazy(kind, "several") for kind in KINDS},
        **{f"{kind}, held": lazy(kind, "one", holds_small=True) for kind in KINDS},
        **{f"{kind}, one file": lazy(kind, "one") for kind in ("x", "list with text", "member", "subset", "mmap")},
    }


# Rows that a rank holds -----------------------------------------------------------------------------------------------


def cached(kind, mode, place="several", **more):
    options, sample = KINDS[kind]
    options = {f"dtype_{name[0]}" if name.endswith("dtype") else name: value for name, value in options.items()}
    numbers = np.arange(N)[SOME_ROWS.get(kind, slice(None))]
    halves = {"contiguous": np.array_split(np.arange(len(numbers)), 2)[1], "interleave": np.arange(1, len(numbers), 2)}

    def make(folder):
        return RankMemCachedH5Dataset(
            folder / place, **nested_files(**{"dtype_x": None} | options, mode=mode, rank=1, world_size=2, **more)
        )

    return rows_case(
        make,
        sample,
        numbers[halves[mode]],
        shown=halves[mode],
        is_loaded=more.get("preload", True),
        keeps_rows=True,
        transforms="transform" in options,
        collate=collate_of(kind),
    )


SHARDS = [*product(("interleave", "contiguous"), (True, False))]  # the mode, and whether ranks share memory


class TestCachedRows(DatasetConformance):
    few = ("index after y, contiguous", "text in a mapping, interleave")
    cases: ClassVar = {
        **{
            f"{kind}, {mode}": cached(kind, mode, share_memory=shares)
            for kind, (mode, shares) in zip([kind for kind in KINDS if kind != "mmap"], cycle(SHARDS), strict=False)
        },
        "not loaded, text": cached("text in a mapping", "interleave", preload=False, share_memory=True),
        "one rank": rows_case(
            lambda folder: RankMemCachedH5Dataset(folder / "one", "images", "names"),
            lambda r, i: (r["images"].float(), r["names"]),  # inputs are float32 unless another dtype is named
            is_loaded=True,
            keeps_rows=True,
        ),
        "not loaded": cached("index after y", "contiguous", preload=False),
    }


# Rows of combined files -----------------------------------------------------------------------------------------------

ALL = sorted(name for name in ("cs_label", "g/deep", "images", "labels", "masks", "names", "patient", "raw", "signals"))


def combined_sample(row, names, dtype):
    """Fields of a row as ``CombinedHDF5Dataset`` has them: flags as bool, floating arrays in its dtype."""

    def field(name):
        value = row[name]
        if name == "cs_label":
            return bool(value)
        is_array = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim
        return value.to(dtype) if is_array and dtype is not None else value

    return {name: field(name) for name in names}


def combined(
    place="several",
    names=ALL,
    numbers=None,
    *,
    dtype=torch.float32,
    more=None,
    collate=default_collate,
    holds_small=False,
    **options,
):
    def make(folder):
        return CombinedHDF5Dataset(folder / place, names, dtype=dtype, **options)

    def sample(row, index):
        return (more or (lambda found, index: found))(combined_sample(row, names, dtype), index)

    keeps_rows, transforms = options.get("cache_size", N) == N, "transform" in options
    return rows_case(
        make,
        sample,
        numbers,
        keeps_rows=keeps_rows,
        transforms=transforms,
        collate=collate,
        holds_small=holds_small,
    )


def of_each_kind(cache_size, dtype, holds_small, place="several"):
    """Fields of all dtypes; torch does not collate text with axes as it lies."""
    names = [f"kinds/{name}" for name in KINDS_OF_FIELDS] + ["words", "cs_label"]
    more = {} if cache_size is None else {"cache_size": cache_size}
    return combined(place, names, dtype=dtype, collate=texts_as_lists, holds_small=holds_small, **more)


def twice(batch):
    return {**batch, "twice": batch["raw"] * 2}


def scaled(sample):
    return {**sample, "raw": sample["raw"] + 1, "is bool": isinstance(sample["cs_label"], bool)}


class TestCombinedFiles(DatasetConformance):
    few = ("each kind, one file", "a transform")
    cases: ClassVar = {
        **{
            f"each kind, {cache_size} rows cached, {dtype}": of_each_kind(cache_size, dtype, (row + column) % 2 == 0)
            for row, cache_size in enumerate((1, 3, None))
            for column, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, None))
        },
        "each kind, one file": of_each_kind(3, None, False, place="one"),
        "each kind, no cache": of_each_kind(0, torch.float32, False),
        "all": combined(),
        "one file": combined("one"),
        "one row cached": combined(cache_size=1),
        "some rows cached": combined(names=["g/deep", "labels", "names"], cache_size=9, dtype=torch.bfloat16),
        "some bytes cached": combined(cache_size={"max_bytes": 4000}, dtype=None),
        "chosen fields": combined(names=["raw", "table/age", "names"], dtype=torch.float16),
        "some rows": combined(numbers=SUBSET, indices=SUBSET),
        "a filter": combined(numbers=np.flatnonzero(STEPS >= 20), where={"step": lambda step: step >= 20}),
        "an index": combined(with_index=True, more=lambda found, i: {**found, "index": i}),
        "a transform": combined(
            names=["raw", "cs_label", "names"],
            transform=scaled,
            batch_transform=twice,
            with_index=True,
            more=lambda found, i: {**scaled(found), "index": i},
            collate=lambda samples: twice(default_collate(samples)),
        ),
        "no cache": combined(cache_size=0),
        "names of its own": rows_case(
            lambda folder: CombinedHDF5Dataset(
                folder / "several", ["age", "who"], field_map={"age": "table/age", "who": "patient"}, dtype=None
            ),
            lambda r, i: {"age": r["table/age"], "who": r["patient"]},
            keeps_rows=True,
        ),
    }


# Datasets made of others: mixtures ------------------------------------------------------------------------------------

MIXED = ["images", "raw", "names"]
PLACES = {"a": "one", "b": "several"}
CHOSEN = {"a": np.array([3, 1, 39]), "b": np.arange(20, 32)}


def mixture(*, is_named=True, with_index=False, transform=None, **options):
    def make(folder):
        sources = {
            name: CombinedHDF5Dataset(folder / place, MIXED, indices=CHOSEN[name], **options)
            for name, place in PLACES.items()
        }
        return mixture_dataset(
            sources,
            mixes=True,
            is_named=is_named,
            transform=transform,
            batch_transform=None,
            with_index=with_index,
        )

    def sample(row, index):
        found = combined_sample(row, MIXED, torch.float32)
        found |= {"source": "a" if index < len(CHOSEN["a"]) else "b"} if is_named else {}
        found = found if transform is None else transform(found)
        return found | ({"index": index} if with_index else {})

    keeps_rows, transforms = "cache_size" not in options, transform is not None
    return rows_case(make, sample, np.concatenate([*CHOSEN.values()]), keeps_rows=keeps_rows, transforms=transforms)


def doubled(sample):
    return {**sample, "raw": sample["raw"] * 2}


def weighted(make, sample, **more):
    weights = RowWeights(np.arange(N, dtype="f8"), "by a test")
    return rows_case(lambda folder: weighted_dataset(make(folder), weights), sample, **more)


def of_a_module(module):
    module.setup("fit")
    return module.train_dataloader().dataset


# Sequences ------------------------------------------------------------------------------------------------------------

STEPPED = ["images", "raw", "labels", "names", "patient"]


def sequences(place, *, sorts=True, names=STEPPED, transform=None, with_index=False):
    def make(folder):
        segments = {"key": "patient", "sort_key": "step" if sorts else None}
        how = {"transform": transform, "with_index": with_index, "collate_fn": "pad"}
        return CombinedHDF5Dataset(folder / place, names, dtype=None, segments=segments, **how)

    def expected(columns, i):
        rows = rows_of_patients(columns, sorts)[i]
        found = {name: [columns[name][row] for row in rows] for name in names}
        found = {n: torch.stack(each) if isinstance(each[0], torch.Tensor) else each for n, each in found.items()}
        found |= {"patient": found["patient"][0]} if "patient" in names else {}
        found = found if transform is None else transform(found)
        return found | ({"index": i, "segment": f"part0.h5[{i}]", "step": 0} if with_index else {})

    return Case(
        make,
        expected,
        n=len(set(ARRAYS["patient"])),
        collate=padded,
        has_steps=True,
        transforms=transform is not None,
    )


def rows_of_patients(columns, sorts):
    """Rows of each patient, in the order of their first rows."""
    found = {}
    for row, patient in enumerate(columns["patient"]):
        found.setdefault(patient, []).append(row)
    return [sorted(rows, key=lambda row: float(columns["step"][row]) if sorts else row) for rows in found.values()]


def padded(samples, group="patient"):
    """A batch of sequences: nothing but zeros behind their ends; text is not padded."""
    batch = {}
    for name in samples[0]:
        each = [sample[name] for sample in samples]
        if name in ("index", "segment", "step"):
            continue
        if name == group:
            batch[name] = default_collate(each)
        elif isinstance(each[0], torch.Tensor):
            batch[name] = torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
        else:
            batch[name] = each
    batch |= {"length": torch.tensor([len(sample["raw"]) for sample in samples])}
    more = [name for name in ("index", "segment", "step") if name in samples[0]]
    return batch | {name: default_collate([one[name] for one in samples]) for name in more}


def sequences_of_a_module(folder):
    """Sequences of a row each, in batches of about the same length."""
    segments = {"key": "labels", "sort_key": None, "bucket": True}
    return of_a_module(
        lightning_h5.CombinedHDF5DataModule(
            folder / "one", fields=["raw", "labels"], segments=segments, shuffle=False, collate_fn="pad"
        )
    )


class TestDatasetsOfOthers(DatasetConformance):
    few = ("mixture: an index", "mixture: weighted", "sequences: sorted")
    cases: ClassVar = {
        "mixture: of a data module": rows_case(
            lambda folder: of_a_module(
                lightning_h5.CombinedHDF5DataModule(mixture={"a": folder / "one"}, fields=MIXED, shuffle=False)
            ),
            lambda r, i: combined_sample(r, MIXED, torch.float32) | {"source": "a"},
            keeps_rows=True,
        ),
        "mixture: weighted, of a data module": rows_case(
            lambda folder: of_a_module(
                lightning_h5.LazyH5DataModule(
                    folder / "one", x_key="images", y_key="labels", weights="step", shuffle=False
                )
            ),
            lambda r, i: (r["images"], r["labels"]),
        ),
        "mixture: named": mixture(),
        "mixture: not named": mixture(is_named=False),
        "mixture: an index": mixture(with_index=True),
        "mixture: a transform": mixture(transform=doubled, cache_size=4),
        "mixture: weighted": weighted(
            lambda folder: H5LazyDataset(folder / "several", "images", "labels"),
            lambda r, i: (r["images"], r["labels"]),
        ),
        "mixture: weighted, combined": weighted(
            lambda folder: CombinedHDF5Dataset(folder / "one", MIXED),
            lambda r, i: combined_sample(r, MIXED, torch.float32),
            keeps_rows=True,
        ),
        "sequences: of a data module": Case(
            sequences_of_a_module,
            lambda columns, i: {"raw": columns["raw"][i][None], "labels": columns["labels"][i]},
            collate=lambda samples: padded(samples, group="labels"),
            has_steps=True,
        ),
        "sequences: sorted": sequences("several"),
        "sequences: in the order of storage": sequences("one", sorts=False),
        "sequences: without the group": sequences("several", names=["raw", "names"]),
        "sequences: an index": sequences("one", with_index=True),
        "sequences: a transform": sequences("several", transform=doubled),
    }


# Worker processes -----------------------------------------------------------------------------------------------------

SOME_CASES = {
    f"{kind.__name__}, {name}": kind.cases[name] for kind in DatasetConformance.__subclasses__() for name in kind.few
}


@A_SHARD_IS_LOADED_AGAIN
@pytest.mark.parametrize(
    ("start_method", "is_used", "worker_init_fn"),
    [
        ("fork", True, no_files_are_inherited),
        pytest.param("fork", False, None, marks=pytest.mark.wide),
        pytest.param("fork", False, no_files_are_inherited, marks=pytest.mark.wide),
        pytest.param("fork", True, None, marks=pytest.mark.wide),
        pytest.param("forkserver", True, no_files_are_inherited, marks=pytest.mark.wide),
        pytest.param("spawn", True, no_files_are_inherited, marks=pytest.mark.wide),
    ],
)
def test_workers_of_a_plain_loader_read_what_h5py_reads(files, columns, start_method, is_used, worker_init_fn):
    """Datasets of all kinds in one loader, fresh or used before by the process that starts the workers; two epochs."""
    datasets, readings = {}, []
    for number, (name, case) in enumerate(SOME_CASES.items()):
        dataset = datasets[name] = case.make(files)
        if is_used:
            dataset.read_batch(range(case.n))
        order = np.random.default_rng(number).permutation(case.n).tolist()
        ways = ("batch", "samples", "sample")
        readings += [(name, ways[at], order[at::3]) for at in range(3) if order[at::3]]
    loader = DataLoader(
        Readings(datasets),
        batch_size=None,
        sampler=readings,
        num_workers=2,
        multiprocessing_context=start_method,
        persistent_workers=True,
        collate_fn=as_it_is,
        worker_init_fn=worker_init_fn,
    )
    for _ in range(2):
        for (name, way, rows), found in zip(readings, loader, strict=True):
            case = SOME_CASES[name]
            samples = case.samples(columns, rows)
            expected = {"batch": case.collate(samples), "samples": samples, "sample": samples[0]}[way]
            assert same(found, expected), (name, way)
    for name, dataset in datasets.items():  # the parent's own files still work
        assert same(dataset[0], SOME_CASES[name].samples(columns, [0])[0]), name
        dataset.close()


def as_it_is(found):
    return found
