"""Counts that a file states, of any integer type and size, give the right samples or an error."""

import itertools
import json

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_h5 import H5LazyDataset, H5ValueError, LazyH5DataModule
from lightning_h5.errors import H5CorruptError

NUMBERS = itertools.count()  # no example writes to a file that is open
N = 20
DTYPES = ["i8", "u8", "i4", "u4", "i2", "u2", "i1", "u1", ">i8", ">u4"]
EDGES = [0, 1, N - 1, N, N + 1, *(2**power + more for power in (7, 8, 15, 16, 31, 32, 62, 63) for more in (-1, 0, N))]


@st.composite
def counts(draw):
    """Numbers of a dtype, often such that they add up to the number of rows if sums wrap around."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    limits = np.iinfo(dtype)
    pool = [sign * edge for edge in EDGES for sign in (1, -1) if limits.min <= sign * edge <= limits.max]
    numbers = draw(st.lists(st.sampled_from(pool) | st.integers(0, N), max_size=6))
    bits = draw(st.sampled_from([None, 32, 64]))
    if bits is not None:
        rest = (N - sum(numbers)) % 2**bits
        if rest > limits.max:
            rest -= 2**bits
        if rest >= limits.min:
            numbers.append(rest)
    return np.array(numbers, dtype=dtype)


def write(tmp_path, **arrays):
    path = str(tmp_path / f"{next(NUMBERS)}.h5")
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
    return path


@given(lengths=counts(), sample=st.sampled_from(["row", "segment"]))
def test_lengths_add_up_to_the_rows_or_are_refused(tmp_path, lengths, sample):
    path = write(tmp_path, x=np.arange(N), n=lengths)
    sizes = lengths.tolist()
    options = {"segments": {"lengths": "n"}, "sample": sample, "collate_fn": "list"}
    if min(sizes, default=0) < 0 or sum(sizes) != N:
        with pytest.raises(H5ValueError, match=r"segments.lengths='n' has the sum .* 20 steps"):
            H5LazyDataset(path, "x", **options)
        return
    with H5LazyDataset(path, "x", **options) as dataset:
        samples = [sample.reshape(-1).tolist() for sample in dataset.read_batch(range(len(dataset)))]
    pieces = np.split(np.arange(N), np.cumsum(sizes)[:-1])
    assert [one for one in samples if one] == [
        one.tolist() for one in (pieces if sample == "segment" else np.split(np.arange(N), N)) if len(one)
    ]


@given(offsets=counts(), ascends=st.booleans())
def test_offsets_ascend_from_0_to_the_rows_or_are_refused(tmp_path, offsets, ascends):
    offsets = np.sort(offsets) if ascends else offsets
    path = write(tmp_path, x=np.arange(N), n=offsets)
    bounds = offsets.tolist()
    options = {"segments": {"offsets": "n"}, "sample": "segment", "collate_fn": "list"}
    if not bounds or bounds[0] != 0 or sorted(bounds) != bounds or bounds[-1] > N:
        with pytest.raises(H5ValueError, match=r"segments.offsets='n' has the values"):
            H5LazyDataset(path, "x", **options)
        return
    with H5LazyDataset(path, "x", **options) as dataset:
        samples = [sample.tolist() for sample in dataset.read_batch(range(len(dataset)))]
    assert [one for one in samples if one] == [one.tolist() for one in np.split(np.arange(N), bounds) if len(one)]


@given(indptr=counts(), ascends=st.booleans())
def test_boundaries_of_sparse_rows_ascend_from_0_to_the_values_or_are_refused(tmp_path, indptr, ascends):
    indptr = np.sort(indptr) if ascends else indptr
    path = write(tmp_path, **{"X/data": np.arange(1, N + 1.0), "X/indices": np.zeros(N, "i4"), "X/indptr": indptr})
    with h5py.File(path, "r+") as file:
        file["X"].attrs["shape"] = (len(indptr) - 1, 1)
    bounds = indptr.tolist()
    if not bounds or (bounds[0], bounds[-1]) != (0, N) or sorted(bounds) != bounds:
        with pytest.raises(H5CorruptError):
            H5LazyDataset(path, "X")
        return
    with H5LazyDataset(path, "X") as dataset:
        sums = [sum(range(low + 1, high + 1)) for low, high in itertools.pairwise(bounds)]
        assert dataset.read_batch(range(len(dataset))).reshape(-1).tolist() == sums


# The differences between these boundaries are all positive if they wrap around.
AROUND = np.array([0, 2**62, -(2**63) + 1, -(2**62), 0, N])


def test_boundaries_whose_differences_wrap_around_are_refused(tmp_path):
    path = write(tmp_path, x=np.arange(N), n=AROUND)
    with pytest.raises(H5ValueError, match=r"segments.offsets='n' has the values \[0, 4611686018427387904"):
        H5LazyDataset(path, "x", segments={"offsets": "n"}, window=2)
    path = write(tmp_path, **{"X/data": np.ones(N), "X/indices": np.zeros(N, "i4"), "X/indptr": AROUND})
    with h5py.File(path, "r+") as file:
        file["X"].attrs["shape"] = (len(AROUND) - 1, 3)
    with pytest.raises(H5CorruptError, match=r"'X/indptr' .* says that rows end at 20"):
        H5LazyDataset(path, "X")


@pytest.mark.parametrize("shape", [(N, -1), (N, 2**62), (-1, 3), (np.nan, 3.0)])
def test_a_matrix_of_an_impossible_shape_is_refused(tmp_path, shape):
    arrays = {"X/data": np.ones(N), "X/indices": np.zeros(N, "i4"), "X/indptr": np.arange(N + 1)}
    path = write(tmp_path, **arrays)
    with h5py.File(path, "r+") as file:
        file["X"].attrs["shape"] = shape
    with pytest.raises(H5CorruptError, match=r"'X' in .* cannot be read"):
        H5LazyDataset(path, "X", decode={"X": "csr"})


@pytest.mark.parametrize(
    "train", [[[0, 10**15]], [[-5, N]], [[0.0, 20.0]], [[True, N]], [[0, N]] * 5, [[N, 0]], [["0", N]], [{"a": 1}]]
)
def test_ranges_of_a_split_file_are_of_rows_that_exist(tmp_path, train):
    path = write(tmp_path, x=np.arange(N))
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"format": "lightning_h5 splits", "splits": {"train": train, "val": []}}))
    with pytest.raises(H5ValueError, match=r"is not a list of ranges|has 100 rows, of which 20 differ"):
        LazyH5DataModule(path, x_key="x", split={"file": str(splits)}).setup("fit")
