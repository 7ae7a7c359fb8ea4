"""``inspect`` on real files: its call works, and names arrays that people would train on.

The files are inside packages of the index (see ``real_files``): ``make test-real`` downloads them once.
"""

import h5py
import hdf5plugin  # noqa: F401  # its filters, for h5py
import numpy as np
import pytest
import torch
from real_files import FILES, fetched

import lightning_h5
from lightning_h5.hdf5 import keys_in
from lightning_h5.tools.inspect import inspect_file

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings(r"ignore:[\d,]+ segments? ha(s|ve) no steps in at least one field:UserWarning"),
]

CLASSES = {name: getattr(lightning_h5, name) for name in ("LazyH5DataModule", "RankCachedH5DataModule")}


def cases(mistake, error):
    """Return all files, those with a mistake as expected failures with an error."""
    params = []
    for package, names in FILES.items():
        for name, answers in names.items():
            reason = getattr(answers, mistake)
            marks = [] if reason is None else [pytest.mark.xfail(reason=reason, raises=error, strict=True)]
            case = f"{package.partition('==')[0]}-{'-'.join(name.split('/')[-2:])}"
            params.append(pytest.param(package, name, marks=marks, id=case))
    return params


@pytest.fixture
def path(request, package, name):
    """Downloads the file of a case, if it has to be."""
    if "real" not in request.config.option.markexpr:
        pytest.skip("real files are downloaded only with -m real")
    return str(fetched(package, name))


@pytest.mark.parametrize(("package", "name"), cases("wrong", AssertionError))
def test_the_suggested_arrays_are_data(path, package, name):
    advice, answers = inspect_file(path).advice, FILES[package][name]
    suggestions = [advice] if advice.other is None else [advice, advice.other]
    is_accepted = any(map(answers.accept, suggestions)) or (answers.unsure and advice.other is not None)
    assert is_accepted, [(suggestion.settings, suggestion.reasons) for suggestion in suggestions]


@pytest.mark.parametrize(("package", "name"), cases("broken", lightning_h5.H5ValueError))
def test_the_suggested_calls_read_what_h5py_reads(path, package, name):
    advice = inspect_file(path).advice
    for suggestion in (advice, advice.other):
        if suggestion is None or suggestion.datamodule is None:
            continue
        assert_finite_shapes(first_batch(eval(suggestion.python, CLASSES)))
        if arrays := arrays_of_rows(path, suggestion):
            settings = {key: value for key, value in suggestion.settings.items() if key != "split"}
            batch = first_batch(CLASSES[suggestion.datamodule](**settings, with_index=True))
            *fields, rows = batch.values() if isinstance(batch, dict) else batch
            assert_rows(list(leaves_of(fields)), arrays, rows.numpy())


def first_batch(module):
    module.setup("fit")
    return next(iter(module.train_dataloader()))


def leaves_of(batch):
    """Yield the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for item in batch.values() if isinstance(batch, dict) else batch:
            yield from leaves_of(item)


def assert_finite_shapes(batch):
    """Check that a batch has tensors, and that none is empty."""
    shapes = [tuple(leaf.shape) for leaf in leaves_of(batch)]
    assert shapes
    assert all(all(shape) for shape in shapes), shapes


def arrays_of_rows(path, advice):
    """Return the arrays whose indices along axis 0 are the samples, as h5py reads them; none for other samples."""
    if (
        advice.settings.keys() & {"segments", "window", "decode", "collate_fn"}
        or advice.settings.get("sample") == "segment"
    ):
        return []
    keys = [*keys_in(advice.settings["x_key"]), *keys_in(advice.settings.get("y_key"))]
    with h5py.File(path) as file:
        arrays = [array_of(file, key) for key in keys]
    are_numbers = all(isinstance(array, np.ndarray) and array.dtype.kind in "biuf" for array in arrays)
    return arrays if are_numbers else []


def array_of(file, key):
    """Return an array, or the members of a table that a key names; a group for one of a sparse matrix or of codes."""
    name, members = key, []
    while name not in file:
        name, _, member = name.rpartition("/")
        members.insert(0, member)
    array = file[name] if isinstance(file[name], h5py.Group) else file[name][()]
    for member in members:
        array = array[member]
    return array


def assert_rows(columns, arrays, rows):
    """Check the columns of a batch against rows of arrays; NaN stands for a missing value."""
    assert len(columns) == len(arrays)
    for column, array in zip(columns, arrays, strict=True):
        values, expected = column.numpy(), array[rows]
        is_read = ~np.isnan(values)
        assert values.shape == expected.shape
        assert is_read.any()
        np.testing.assert_array_equal(values[is_read], expected.astype(values.dtype)[is_read])
