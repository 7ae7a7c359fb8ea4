"""One set of arguments: each call gives the same batches in all three data modules, and they are what h5py reads."""

import inspect

import h5py
import numpy as np
import pytest
import torch

import lightning_h5
from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule

MODULES = [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule]
ALL = pytest.mark.parametrize("module", MODULES)
N_ROWS = 24
OWN = {LazyH5DataModule: set(), RankCachedH5DataModule: {"memory"}, CombinedHDF5DataModule: {"row_cache"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files of rows, one of segments, and one that is no HDF5 file."""
    folder = tmp_path_factory.mktemp("same")
    rng = np.random.default_rng(0)
    for number in range(2):
        with h5py.File(folder / f"rows{number}.h5", "w") as file:
            file.create_dataset("x", data=rng.normal(size=(N_ROWS, 3)), chunks=(5, 3), compression="gzip")
            file["u"] = rng.integers(0, 200, (N_ROWS, 2)).astype("u1")
            file["y"] = rng.integers(0, 3, N_ROWS)
            file["steps"] = rng.integers(0, 3, (N_ROWS, 4))
            file["is_real"] = rng.integers(0, 2, (N_ROWS, 4)).astype("u1")
            file["quality"] = np.arange(N_ROWS) % 6
            file["meta/site"] = [("A", "B", "C")[row % 3] for row in range(N_ROWS)]
            file["row"] = np.arange(N_ROWS) + number * N_ROWS
    (folder / "broken.h5").write_bytes(b"no HDF5")
    with h5py.File(folder / "segments.hdf5", "w") as file:
        for number in range(6):
            group = file.create_group(f"data/demo_{number}")
            n = 5 + number
            group["obs"] = rng.normal(size=(n, 2)).astype("f4")
            group["keep"] = (np.arange(n) != 2).astype("u1")
            group.attrs["kind"] = "even" if number % 2 == 0 else "odd"
    return folder


@pytest.fixture(scope="module")
def arrays(folder):
    """What h5py reads of the files of rows, one after the other."""
    found = {}
    for number in range(2):
        with h5py.File(folder / f"rows{number}.h5") as file:
            for name in ("x", "u", "y", "steps", "is_real", "quality", "row"):
                found.setdefault(name, []).append(file[name][:])
            found.setdefault("meta/site", []).append(file["meta/site"].asstr()[:].astype(str))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def plain(value):
    """A batch with arrays in the place of tensors."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else np.asarray(value)


def batches_of(module, path, stage_of="train", rank=0, world_size=1, **options):
    distributed = {"rank": rank, "world_size": world_size, "setup_timeout": 1}
    datamodule = module(path, batch_size=7, distributed=distributed, **options)
    datamodule.setup("fit" if stage_of in ("train", "val") else stage_of)
    found = [plain(batch) for batch in getattr(datamodule, f"{stage_of}_dataloader")()]
    datamodule.teardown()
    return found


def joined(batches):
    """All rows of batches, by name or place."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: np.concatenate([batch[name] for batch in batches]) for name in first}
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def assert_same(found, expected):
    keys = found.keys() if isinstance(found, dict) else range(len(found))
    assert len(found) == len(expected)
    for key in keys:
        np.testing.assert_array_equal(found[key], expected[key])
        assert found[key].dtype.kind == np.asarray(expected[key]).dtype.kind


def is_real(a):
    return ((a["steps"] == 1) & (a["is_real"] != 0)).any(1)


CALLS = {
    "x and y": ({"x_key": "x", "y_key": "y"}, ("x", "y"), lambda a: a["row"] >= 0),
    "a list": ({"fields": ["u", "row"]}, {"u": "u", "row": "row"}, lambda a: a["row"] >= 0),
    "a mapping": ({"fields": {"a": "u", "b": "meta/site"}}, {"a": "u", "b": "meta/site"}, lambda a: a["row"] >= 0),
    "a range": (
        {"x_key": "u", "y_key": "row", "where": {"quality": {"min": 4}}},
        ("u", "row"),
        lambda a: a["quality"] > 3,
    ),
    "text": (
        {"fields": {"u": "u", "site": "meta/site"}, "where": {"site": ["A", "C"], "quality": [0, 2, 3]}},
        {"u": "u", "site": "meta/site"},
        lambda a: (a["meta/site"] != "B") & np.isin(a["quality"], [0, 2, 3]),
    ),
    "a function": (
        {"fields": ["row"], "where": lambda columns: columns["quality"] * 2 > columns["y"] + 4},
        {"row": "row"},
        lambda a: a["quality"] * 2 > a["y"] + 4,
    ),
    "a label of the target": (
        {"x_key": "u", "y_key": "steps", "label": 2},
        ("u", "steps"),
        lambda a: (a["steps"] == 2).any(1),
    ),
    "a label at steps that count": (
        {"fields": {"target": "steps", "row": "row"}, "label": 1, "valid_mask": "is_real"},
        {"target": "steps", "row": "row"},
        is_real,
    ),
}


def expected_of(arrays, names, passes):
    mask = passes(arrays)
    assert mask.any()
    return (
        {key: arrays[name][mask] for key, name in names.items()}
        if isinstance(names, dict)
        else tuple(arrays[name][mask] for name in names)
    )


@pytest.mark.parametrize("name", CALLS)
class TestBatchesOfAllModules:
    @ALL
    def test_unshuffled_batches_are_the_rows_that_h5py_reads_in_their_order(self, folder, arrays, module, name):
        options, names, passes = CALLS[name]
        found = joined(batches_of(module, str(folder / "rows*.h5"), shuffle=False, x_dtype=None, **options))
        assert_same(found, expected_of(arrays, names, passes))

    @ALL
    def test_batches_of_validation_are_the_rows_of_their_files(self, folder, arrays, module, name):
        options, names, passes = CALLS[name]
        path = str(folder / "rows*.h5")
        found = joined(batches_of(module, path, "val", val_path=path, x_dtype=None, **options))
        assert_same(found, expected_of(arrays, names, passes))

    def test_shuffled_batches_are_the_same_of_files_read_on_demand_with_and_without_a_cache(self, folder, name):
        options, *_ = CALLS[name]
        each = [
            batches_of(m, str(folder / "rows*.h5"), seed=3, **options)
            for m in (LazyH5DataModule, CombinedHDF5DataModule)
        ]
        assert len(each[0]) == len(each[1])
        for one, other in zip(*each, strict=True):
            assert_same(one, other)

    @ALL
    def test_two_ranks_have_each_row_that_passes_once(self, folder, arrays, module, name):
        options, _, passes = CALLS[name]
        options = {**options, "with_index": True, "seed": 1}
        shards = [batches_of(module, str(folder / "rows*.h5"), rank=rank, world_size=2, **options) for rank in range(2)]
        assert len(shards[0]) == len(shards[1])
        rows = [batch["index"] if isinstance(batch, dict) else batch[-1] for shard in shards for batch in shard]
        assert sorted(np.concatenate(rows).tolist()) == list(range(int(passes(arrays).sum())))

    @ALL
    def test_a_filter_moves_no_row_between_splits(self, folder, arrays, module, name):
        options, names, passes = CALLS[name]
        options = {**options, "shuffle": False, "split": 0.5, "x_dtype": None}
        path = str(folder / "rows*.h5")
        every = batches_of(module, path, "val", fields=["row"], split=0.5)
        found = joined(batches_of(module, path, "val", **options))
        in_split = joined(every)["row"]
        assert_same(found, expected_of(arrays, names, lambda a: passes(a) & np.isin(a["row"], in_split)))


@ALL
@pytest.mark.parametrize(
    "samples", [{"window": 3}, {"sample": "segment", "collate_fn": "pad"}], ids=["windows", "segments"]
)
@pytest.mark.parametrize("where", [None, {"@kind": "even"}, {"keep": 1}], ids=["all", "of segments", "of steps"])
def test_samples_of_segments_are_slices_of_the_steps_that_pass(folder, module, samples, where):
    path = str(folder / "segments.hdf5")
    found = batches_of(module, path, fields={"obs": "obs"}, segments="data/*", where=where, shuffle=False, **samples)
    expected = []
    with h5py.File(path) as file:
        for group in file["data"].values():
            if where == {"@kind": "even"} and group.attrs["kind"] != "even":
                continue
            steps = np.arange(len(group["obs"]))
            runs = [steps] if where != {"keep": 1} else [steps[:2], steps[3:]]
            if "window" in samples:
                starts = range(0, len(steps) - 2, 3)
                expected += [
                    group["obs"][start : start + 3]
                    for start in starts
                    if any({*range(start, start + 3)} <= {*run} for run in runs)
                ]
            else:
                expected.append(group["obs"][:][np.concatenate(runs)])
    rows = [one for batch in found for one in batch["obs"]]
    assert len(rows) == len(expected)
    for row, values in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(row[: len(values)], values)
        assert not row[len(values) :].any()


@ALL
def test_float64_becomes_float32_and_all_else_comes_as_stored(folder, module, caplog):
    def dtypes(**options):
        (batch, *_) = batches_of(module, str(folder / "rows*.h5"), **options)
        values = batch.values() if isinstance(batch, dict) else batch
        return [value.dtype.name for value in values]

    caplog.set_level("INFO")
    assert dtypes(x_key={"x": "x", "u": "u"}) == ["float32", "uint8"]
    assert sum("x_dtype='auto'" in record.message for record in caplog.records) == 1
    caplog.clear()
    assert dtypes(x_key={"x": "x"}, split=[0.5, 0.25, 0.25]) == ["float32"]
    assert sum("x_dtype='auto'" in record.message for record in caplog.records) == 1, "once for all splits"
    assert dtypes(fields=["x", "u", "y"]) == ["float32", "uint8", "int64"]
    assert dtypes(x_key="u", y_key="y") == ["uint8", "int64"]
    assert dtypes(x_key="u", y_key="x") == ["uint8", "float64"]
    assert dtypes(fields=["x", "u"], x_dtype=None) == ["float64", "uint8"]
    assert dtypes(fields=["x", "u", "y"], x_dtype="float16") == ["float16", "uint8", "int64"]
    assert dtypes(fields=["x", "u"], x_dtype={"u": "float32"}) == ["float64", "float32"]


@ALL
def test_files_that_cannot_be_read_are_left_out_if_asked_for(folder, arrays, module, caplog):
    paths = [str(folder / name) for name in ("broken.h5", "rows0.h5", "missing.h5", "rows1.h5")]
    options = {"x_key": "u", "y_key": "row", "where": {"quality": [1, 2]}, "shuffle": False}
    found = joined(batches_of(module, paths, on_bad_file="skip", **options))
    assert_same(found, expected_of(arrays, ("u", "row"), lambda a: np.isin(a["quality"], [1, 2])))
    assert {record.args[0] for record in caplog.records if record.msg.startswith("left out")} == {paths[0], paths[2]}
    with pytest.raises(lightning_h5.H5FileError, match=r"broken\.h5.*on_bad_file='skip'"):
        batches_of(module, [paths[0], paths[1]], **options)


@ALL
def test_a_file_that_was_repaired_is_read_in_the_next_setup(tmp_path, module):
    (tmp_path / "b.h5").write_bytes(b"no HDF5")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3)
    datamodule = module(str(tmp_path / "*.h5"), x_key="x", on_bad_file="skip")
    datamodule.setup("fit")
    n_before = datamodule.train_dataset.n_rows
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = np.arange(4)
    datamodule.setup("fit")
    assert (n_before, datamodule.train_dataset.n_rows) == (3, 7)
    datamodule.teardown()


@pytest.mark.parametrize("module", [LazyH5DataModule, CombinedHDF5DataModule])
def test_a_mixture_has_an_input_and_a_target_or_names_its_sources(folder, arrays, module):
    mixture = {f"part {n}": str(folder / f"rows{n}.h5") for n in range(2)}
    pairs = joined(
        batches_of(module, None, x_key="u", y_key="row", mixture=mixture, where={"quality": 5}, shuffle=False)
    )
    assert_same(pairs, expected_of(arrays, ("u", "row"), lambda a: a["quality"] == 5))
    named = joined(batches_of(module, None, fields=["row"], mixture=mixture, shuffle=False))
    assert named["source"].tolist() == [f"part {row // N_ROWS}" for row in named["row"]]
    (dicts, targets) = zip(*batches_of(module, None, x_key={"u": "u"}, y_key="row", mixture=mixture), strict=True)
    for batch, rows in zip(dicts, targets, strict=True):
        np.testing.assert_array_equal(batch["u"], arrays["u"][rows])
        assert batch["source"].tolist() == [f"part {row // N_ROWS}" for row in rows]


REFUSED = {
    "x_key and fields": ({"x_key": "x", "fields": ["x"]}, "fields cannot be combined with x_key"),
    "y_key and fields": ({"y_key": "y", "fields": ["x"]}, "fields cannot be combined with y_key"),
    "no fields": ({"fields": []}, "fields=.* names no field"),
    "a field twice": ({"fields": ["x", "x"]}, "fields=.* names a field twice"),
    "a mask without a label": ({"x_key": "x", "valid_mask": "is_real"}, "Pass label as well"),
    "a label that is text": ({"x_key": "x", "label": "a"}, "label='a' is not a class number"),
    "an empty range": ({"x_key": "x", "where": {"quality": {"min": 3, "max": 1}}}, "empty range"),
    "another word for bad files": ({"x_key": "x", "on_bad_file": "error"}, "on_bad_file='error' was given"),
    "no dtype": ({"x_key": "x", "x_dtype": "floaty"}, "x_dtype"),
}


@ALL
@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_at_once(folder, module, case):
    options, text = REFUSED[case]
    with pytest.raises(H5ValueError, match=text):
        module(str(folder / "rows0.h5"), **options)


def test_a_mixture_of_shards_is_refused_with_the_reason(folder):
    with pytest.raises(H5ValueError, match="mixture was given to RankCachedH5DataModule, whose ranks draw"):
        RankCachedH5DataModule(fields=["x"], mixture={"a": str(folder / "rows0.h5")})


@ALL
def test_a_filter_that_no_row_passes_is_an_error_with_counts(folder, module):
    with pytest.raises(H5ValueError, match=r"the data of 'train': no row of 24 passes all filters: .* keeps 0"):
        batches_of(module, str(folder / "rows0.h5"), x_key="u", where={"quality": 77})


def test_a_rank_holds_the_rows_that_pass_and_no_others(folder):
    datamodule = RankCachedH5DataModule(str(folder / "rows*.h5"), x_key="u", where={"quality": 1})
    datamodule.setup("fit")
    assert datamodule.train_dataset.kept_bytes == 8 * 2
    datamodule.teardown()


@ALL
def test_all_classes_have_the_same_arguments_and_describe_each(module):
    parameters = dict(inspect.signature(module).parameters)
    expected = dict(inspect.signature(LazyH5DataModule).parameters)
    assert {name: str(one) for name, one in parameters.items() if name not in OWN[module]} == {
        name: str(one) for name, one in expected.items()
    }
    assert OWN[module] <= set(parameters)
    described = [
        line.split(":")[0].strip()
        for line in inspect.getdoc(module).splitlines()
        if line.startswith("    ") and line[4] != " "
    ]
    assert [name for name in described if name in parameters] == list(parameters)


@ALL
def test_the_command_line_explains_each_argument_of_each_class(module):
    pytest.importorskip("jsonargparse")
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(module, "data")
    helps = {action.dest.removeprefix("data."): action.help for action in parser._actions}
    assert [name for name in inspect.signature(module).parameters if not helps.get(name)] == []


def test_batches_are_tensors_of_the_same_dtypes_in_all(folder):
    path, options = (
        str(folder / "rows*.h5"),
        {"fields": ["x", "u", "y", "meta/site"], "where": {"y": 1}, "shuffle": False},
    )
    each = []
    for module in MODULES:
        datamodule = module(path, **options)
        datamodule.setup("fit")
        batch = next(iter(datamodule.train_dataloader()))
        each.append(
            {name: value.dtype if isinstance(value, torch.Tensor) else type(value) for name, value in batch.items()}
        )
        datamodule.teardown()
    assert each[0] == each[1] == each[2]


@ALL
def test_segments_of_several_lengths_are_refused_unless_the_user_says_how_they_become_a_batch(module, folder):
    segments = {"groups": "data/*"}
    options = {"x_key": "obs", "segments": segments, "sample": "segment", "shuffle": False}
    with pytest.raises(H5ValueError, match=r"which cannot be stacked\. Pass collate_fn='pad'"):
        batches_of(module, str(folder / "segments.hdf5"), **options)
