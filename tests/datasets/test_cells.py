"""Arrays of references, as MATLAB and NWB write them: each array that one refers to is a segment."""

import os

import h5py
import numpy as np
import pytest
import torch

from lightning_h5 import CombinedHDF5DataModule, H5LazyDataset, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.catalog import kept_parts
from lightning_h5.errors import H5CorruptError, H5ValueError
from lightning_h5.tools.inspect import inspect_folder
from lightning_h5.tools.stats import compute_stats

LENGTHS = (5, 3, 8, 1, 6)
RNG = np.random.default_rng(3)


def signals(lengths=LENGTHS, channels=2):
    return [RNG.standard_normal((channels, n)) for n in lengths]


def text(word):
    """Characters as MATLAB stores a line of them."""
    return np.frombuffer(word.encode("utf-16-le"), "u2").reshape(-1, 1)


def write(path, **cells):
    """A file of MATLAB 7.3 with arrays of cells; lists of text have characters."""
    with h5py.File(path, "w", userblock_size=512) as file:
        add(file, **cells)
    return str(path)


def add(file, **cells):
    refs = file.require_group("#refs#")
    for name, arrays in cells.items():
        pointers = np.empty((1, len(arrays)), h5py.ref_dtype)
        for at, values in enumerate(arrays):
            array = refs.create_dataset(f"{name}{at:x}", data=text(values) if isinstance(values, str) else values)
            array.attrs["MATLAB_class"] = np.bytes_("char" if isinstance(values, str) else "double")
            pointers[0, at] = array.ref
        file.create_dataset(name, data=pointers, dtype=h5py.ref_dtype).attrs["MATLAB_class"] = np.bytes_("cell")


def referred(path, key):
    """What h5py reads."""
    with h5py.File(path) as file:
        return [file[one][()] for one in file[key][()].reshape(-1)]


def test_samples_are_the_arrays_that_are_referred_to_in_the_order_of_references(tmp_path):
    path = write(tmp_path / "a.mat", cells=signals())
    dataset = H5LazyDataset(path, "cells", segments={"step_axis": -1}, with_index=True, collate_fn="list")
    assert len(dataset) == len(LENGTHS)
    for number, values in enumerate(referred(path, "cells")):
        sample = dataset[number]
        np.testing.assert_array_equal(sample[0], values)
        assert sample[-2] == f"#refs#/cells{number}"


@pytest.mark.parametrize("shape", [(5,), (1, 5), (5, 1)])
def test_references_are_a_list_along_any_axis_and_in_any_group(tmp_path, shape):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        arrays = [file.create_dataset(f"far/{n}/data", data=np.arange(n + 2)) for n in (4, 1, 3, 2, 0)]
        pointers = np.array([one.ref for one in arrays], dtype=h5py.ref_dtype).reshape(shape)
        file.create_dataset("table/columns/series", data=pointers, dtype=h5py.ref_dtype, chunks=shape)
    dataset = H5LazyDataset(str(path), "table/columns/series", collate_fn="list", with_index=True)
    assert [len(dataset[at][0]) for at in range(5)] == [6, 3, 5, 4, 2]
    assert dataset[2][-2] == "far/3/data"


def test_targets_are_cells_text_or_one_value_for_each(tmp_path):
    path = write(tmp_path / "a.mat", cells=signals(), masks=signals(channels=1), words=list("abcde"))
    with h5py.File(path, "r+") as file:
        file["labels"] = np.arange(5.0)[None]
        file["names"] = [b"v", b"w", b"x", b"y", b"z"]
    keys = {name: name for name in ("cells", "masks", "words", "labels", "names")}
    dataset = H5LazyDataset(path, keys, segments={"step_axis": -1}, collate_fn="list")
    for number, (cell, mask) in enumerate(zip(referred(path, "cells"), referred(path, "masks"), strict=True)):
        sample = dataset[number]
        np.testing.assert_array_equal(sample["cells"], cell)
        np.testing.assert_array_equal(sample["masks"], mask)
        assert (sample["words"], sample["labels"], sample["names"]) == ("abcde"[number], number, "vwxyz"[number])


def test_windows_and_rows_of_cells_stay_inside_them(tmp_path):
    path = write(tmp_path / "a.mat", cells=signals())
    rows = H5LazyDataset(path, "cells", sample="row", segments={"step_axis": 1})
    np.testing.assert_array_equal(torch.stack([*rows]), np.concatenate([v.T for v in referred(path, "cells")]))
    windows = H5LazyDataset(path, "cells", window={"length": 3, "stride": 1}, segments={"step_axis": 1})
    expected = [v[:, t : t + 3] for v in referred(path, "cells") for t in range(v.shape[1] - 2)]
    np.testing.assert_array_equal(torch.stack([*windows]), expected)


def test_patches_are_cut_out_of_cells(tmp_path):
    path = write(tmp_path / "a.mat", cells=[RNG.standard_normal((n, 9, 8)) for n in (8, 10)])
    dataset = H5LazyDataset(path, "cells", patch={"shape": [8, 8, 8], "border": "drop"})
    np.testing.assert_array_equal(torch.stack([*dataset]), [v[:8, :8, :8] for v in referred(path, "cells")])


def test_cells_of_one_value_are_samples(tmp_path):
    path = write(tmp_path / "a.mat", cells=[np.full((1, 1), float(n)) for n in range(4)])
    dataset = H5LazyDataset(path, "cells")
    np.testing.assert_array_equal(torch.stack([*dataset]).reshape(-1), np.arange(4))


def test_scalars_are_samples_of_one_step(tmp_path):
    path = write(tmp_path / "a.mat", cells=list(range(4)), y=["a", "b", "c", "d"])
    dataset = H5LazyDataset(path, "cells", "y")
    samples = [dataset[at] for at in range(4)]
    assert [(x.tolist(), y) for x, y in samples] == [([at], "abcd"[at]) for at in range(4)]


def test_scalars_go_with_arrays(tmp_path):
    path = write(tmp_path / "a.mat", cells=signals(), scale=list(range(5)))
    dataset = H5LazyDataset(path, "cells", "scale", segments={"step_axis": 1}, collate_fn="list")
    assert [dataset[at][1] for at in range(5)] == [*range(5)]


@pytest.mark.parametrize("split", [0.4, {"val_fraction": 0.4, "group_key": "patient"}, {"key": "lists/{split}"}])
def test_splits_divide_cells(tmp_path, split):
    path = write(tmp_path / "a.mat", cells=signals(), patient=["p", "q", "p", "q", "p"])
    with h5py.File(path, "r+") as file:
        file["lists/train"], file["lists/val"] = [b"cells0", b"cells2", b"cells4"], [b"cells1", b"cells3"]
    module = LazyH5DataModule(
        path, x_key="cells", split=split, segments={"step_axis": 1}, collate_fn="pad", with_index=True
    )
    module.setup("fit")
    loaders = module.train_dataloader(), module.val_dataloader()
    names = [{name for batch in loader for name in batch[-2]} for loader in loaders]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {f"#refs#/cells{at}" for at in range(5)}
    if split != 0.4:
        assert {f"#refs#/cells{at}" for at in (1, 3)} in names


@pytest.mark.parametrize("on", ["patient", "number", "@name"])
def test_a_table_is_joined_with_cells_by_text_values_or_names(tmp_path, on):
    path = write(tmp_path / "a.mat", cells=signals(), patient=["e", "d", "c", "b", "a"])
    with h5py.File(path, "r+") as file:
        file["number"] = np.arange(5)[None]
    keys = {"patient": list("edcba"), "number": range(5), "@name": [f"cells{at}" for at in range(5)]}[on]
    lines = sorted(f"{key},{at + 0.5}" for at, key in enumerate(keys))
    (tmp_path / "t.csv").write_text("\n".join(["id,age", *lines]))
    table = {"path": str(tmp_path / "t.csv"), "on": {"id": on}}
    given = {"segments": {"step_axis": 1}, "collate_fn": "list", "table": table}
    dataset = H5LazyDataset(path, {"age": "table/age", "x": "cells"}, **given)
    for number, values in enumerate(referred(path, "cells")):
        np.testing.assert_array_equal(dataset[number]["x"], values)
        assert dataset[number]["age"] == number + 0.5


def test_flags_in_cells_cut_cells(tmp_path):
    flags = [np.array([0, 0, 1, 0, 1]), np.array([0, 1])]
    path = write(tmp_path / "a.mat", cells=[np.arange(5.0), np.arange(5.0, 7)], flags=flags)
    dataset = H5LazyDataset(path, "cells", segments={"ends": "flags"}, collate_fn="list")
    assert [sample.tolist() for sample in dataset] == [[0, 1, 2], [3, 4], [5, 6]]


def test_filters_and_names_of_a_combined_data_module_are_those_of_cells(tmp_path):
    path = write(tmp_path / "a.mat", cells=signals(), quality=["good", "bad", "good", "bad", "good"])
    module = CombinedHDF5DataModule(
        path,
        fields={"x": "cells"},
        where={"quality": "good"},
        segments={"step_axis": 1},
        x_dtype=None,
        collate_fn="list",
        shuffle=False,
    )
    module.setup("fit")
    found = [one for batch in module.train_dataloader() for one in batch["x"]]
    for one, values in zip(found, referred(path, "cells")[::2], strict=True):
        np.testing.assert_array_equal(one, values)


MODULES = {
    "lazy": lambda path, **given: LazyH5DataModule(path, x_key={"x": "cells", "y": "labels"}, **given),
    "rank cached": lambda path, **given: RankCachedH5DataModule(path, x_key={"x": "cells", "y": "labels"}, **given),
    "combined": lambda path, **given: CombinedHDF5DataModule(path, fields={"x": "cells", "y": "labels"}, **given),
    "mixture": lambda path, **given: CombinedHDF5DataModule(
        mixture={"a": path, "b": path}, fields={"x": "cells", "y": "labels"}, **given
    ),
}


@pytest.mark.parametrize("kind", MODULES)
def test_cells_are_segments_without_any_other_argument_and_splits_divide_them(tmp_path, kind):
    path = write(tmp_path / "a.mat", cells=[values.T for values in signals()])
    with h5py.File(path, "r+") as file:
        file["labels"] = np.arange(5.0)[None]
    module = MODULES[kind](path, split=0.4, collate_fn="pad", with_index=True, batch_size=2)
    module.setup("fit")
    found = {}
    for name, loader in (("train", module.train_dataloader()), ("val", module.val_dataloader())):
        for batch in loader:
            for place, label in enumerate(batch["y"].tolist()):
                values = referred(path, "cells")[int(label)]
                np.testing.assert_allclose(batch["x"][place, : len(values)], values, rtol=1e-6)
                assert batch["segment"][place] == f"#refs#/cells{int(label)}"
                assert found.setdefault(label, name) == name
    assert sorted(found) == [*range(5)]
    assert set(found.values()) == {"train", "val"}


def test_the_order_of_references_is_a_part_of_the_identity(tmp_path):
    path = write(tmp_path / "a.mat", cells=signals(), y=list(range(5)))
    identity = H5LazyDataset(path, "cells", "y", segments={"step_axis": 1}).table.layouts
    assert len(identity) == 5

    def identity_of():
        table = H5LazyDataset(path, {"x": "cells", "z": "masks"}, segments={"step_axis": 1}).table
        return table.layouts.identity(table.paths, table.guards, table.parts.files)

    with h5py.File(path, "r+") as file:
        add(file, masks=signals(channels=1))
    found = [identity_of(), identity_of()]
    assert found[0] == found[1]
    for key in ("cells", "masks"):
        with h5py.File(path, "r+") as file:
            file[key][0] = file[key][0][::-1].copy()
        found.append(identity_of())
    assert len(set(found)) == 3


def test_what_was_kept_of_cells_on_disk_is_used_and_forgotten_when_the_file_changes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.mat", cells=signals(LENGTHS * 3), masks=signals(LENGTHS * 3, 1))
    with h5py.File(path, "r+") as file:
        file["labels"] = np.arange(15)
    monkeypatch.setattr(kept_parts, "MIN_ARRAYS", 10)
    monkeypatch.setattr(kept_parts, "MIN_BYTES", 1)
    keys, folder = {"x": "cells", "m": "masks", "y": "labels"}, str(tmp_path / "kept")

    def samples():
        given = {"files": {"catalog_dir": folder}, "segments": {"step_axis": 1}, "collate_fn": "list"}
        return [*H5LazyDataset(path, keys, **given)]

    def assert_those_of_the_file():
        found = samples()
        for number, (x, m) in enumerate(zip(referred(path, "cells"), referred(path, "masks"), strict=True)):
            np.testing.assert_array_equal(found[number]["x"], x)
            np.testing.assert_array_equal(found[number]["m"], m)
            assert found[number]["y"] == number

    assert_those_of_the_file()
    assert len(os.listdir(folder)) == 1
    with monkeypatch.context() as patched:
        patched.setattr("lightning_h5.catalog.segment_parts.names_of_cells", None)  # is not asked again
        assert_those_of_the_file()
    with h5py.File(path, "r+") as file:
        for key in ("cells", "masks"):
            file[key][0] = file[key][0][::-1].copy()
    assert_those_of_the_file()


def test_statistics_are_those_of_cells(tmp_path):
    path = write(tmp_path / "a.mat", cells=signals())
    (found,) = compute_stats(path, "cells", segments={"step_axis": -1}).arrays
    values = np.concatenate([v.reshape(-1) for v in referred(path, "cells")])
    assert (found.mean, found.n_values) == (pytest.approx(values.mean()), values.size)


# What is refused -----------------------------------------------------------------------------------------------------


def null(file):
    file["cells"][0, 2] = h5py.Reference()


def group(file):
    file["cells"][0, 2] = file.create_group("#refs#/g").ref


def other_dtype(file):
    file["cells"][0, 2] = file.create_dataset("#refs#/f4", data=np.zeros((2, 4), "f4")).ref


def scalar_among_arrays(file):
    file["cells"][0, 2] = file.create_dataset("#refs#/s", data=1.0).ref


def volume_among_images(file):
    file["cells"][0, 2] = file.create_dataset("#refs#/v", data=np.zeros((2, 3, 4))).ref


def characters_among_numbers(file):
    file["cells"][0, 2] = file.create_dataset("#refs#/t", data=text("word")).ref
    file["#refs#/t"].attrs["MATLAB_class"] = np.bytes_("char")


def nested(file):
    file["cells"][0, 2] = file["other"].ref


def empty(file):
    file["cells"][0, 2] = file.create_dataset("#refs#/e", data=np.zeros(2)).ref
    file["#refs#/e"].attrs["MATLAB_empty"] = np.uint8(1)


def repeated(file):
    file["cells"][0, 2] = file["cells"][0, 1]


def without_a_name(file):
    del file["#refs#/cells2"]


def astray(file):
    """A reference to a byte of the file that begins no object."""
    place, name = file["cells"].id.get_offset() + 2 * 8, file.filename
    file.close()
    with open(name, "r+b") as raw:
        raw.seek(place)
        raw.write((1001).to_bytes(8, "little"))


def never_written_array(file):
    array = file.create_dataset("#refs#/huge", (2, 1 << 40), "f8", chunks=(2, 1 << 10))
    file["cells"][0, 2] = array.ref


def two_axes(file):
    pointers = np.array([file["#refs#/cells0"].ref] * 4, dtype=h5py.ref_dtype).reshape(2, 2)
    del file["cells"]
    file.create_dataset("cells", data=pointers, dtype=h5py.ref_dtype)


def regions(file):
    regions = [file[f"#refs#/cells{at}"].regionref[:, :1] for at in range(5)]
    del file["cells"]
    file.create_dataset("cells", data=regions, dtype=h5py.regionref_dtype)


def nothing(file):
    del file["cells"]
    file.create_dataset("cells", (1, 0), h5py.ref_dtype)


def never_written(file):
    del file["cells"]
    file.create_dataset("cells", (1, 1 << 28), h5py.ref_dtype, chunks=(1, 1 << 20))


def stored_elsewhere(file):
    array = file.create_dataset("#refs#/ext", (2, 4), "f8", external=[("elsewhere.bin", 0, 64)])
    file["cells"][0, 2] = array.ref


def virtual(file):
    layout = h5py.VirtualLayout((1, 5), h5py.ref_dtype)
    layout[:] = h5py.VirtualSource(".", "other", (1, 5), h5py.ref_dtype)
    del file["cells"]
    file.create_virtual_dataset("cells", layout)


REFUSED = {
    null: r"'cells' in '.*a\.mat' refers at index 2 to nothing",
    group: r"'cells' in '.*a\.mat' refers at index 2 to a group",
    other_dtype: r"'cells' in .* at index 2 to '#refs#/f4' \(float32, 2 axes\), .* '#refs#/cells0' \(float64",
    scalar_among_arrays: r"'cells' in .* at index 2 to '#refs#/s' \(float64, 0 axes\)",
    volume_among_images: r"'cells' in .* at index 2 to '#refs#/v' \(float64, 3 axes\)",
    characters_among_numbers: r"'cells' in .* at index 2 to '#refs#/t' \(text",
    nested: r"'cells' in '.*' refers at index 2 to 'other', which holds references itself",
    empty: r"'cells' in '.*' refers at index 2 to '#refs#/e', an empty array of MATLAB",
    repeated: r"'cells' in '.*' refers at index 1 and at index 2 to '#refs#/cells1'",
    without_a_name: r"'cells' in '.*' refers at index 2 to",
    astray: r"'cells' in '.*' refers at index 2 to no object of the file",
    never_written_array: r"'#refs#/huge' in .* most were never written",
    two_axes: r"'cells' in .* shape \(2, 2\)",
    regions: r"'cells' in .* references to regions",
    nothing: "'cells'",
    never_written: r"'cells' in .* declares 268,435,456 references",
    stored_elsewhere: r"'#refs#/ext' in .* keeps its bytes in other files",
    virtual: r"'cells' in .* virtual",
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_makes_no_segments_is_refused_before_training(tmp_path, damage):
    path = write(tmp_path / "a.mat", cells=signals(), other=signals())
    with h5py.File(path, "r+") as file:
        damage(file)
    module = LazyH5DataModule(path, x_key="cells", segments={"step_axis": 1}, collate_fn="pad")
    with pytest.raises((H5ValueError, H5CorruptError), match=REFUSED[damage]):
        module.setup("fit")


def test_arrays_of_other_lengths_are_refused(tmp_path):
    path = write(tmp_path / "a.mat", cells=signals(), other=signals(LENGTHS[:4]), matrix=[text("ab").repeat(2, 1)])
    with h5py.File(path, "r+") as file:
        file["labels"] = np.arange(4)
        file["#refs#/matrix0"].attrs["MATLAB_class"] = np.bytes_("char")
    with pytest.raises(H5ValueError, match=r"'cells' has 5 references and 'other' has 4"):
        H5LazyDataset(path, "cells", "other")
    with pytest.raises(H5ValueError, match=r"'labels' in .* has 4 values, .* 5 references"):
        H5LazyDataset(path, "cells", "labels")
    with pytest.raises(H5ValueError, match=r"'matrix' in .* characters of shape \(2, 2\)"):
        H5LazyDataset(path, {"a": "matrix", "b": "matrix"})


def test_other_files_have_cells_too(tmp_path):
    paths = [write(tmp_path / f"{n}.mat", cells=signals()) for n in range(2)]
    dataset = H5LazyDataset(paths, "cells", segments={"step_axis": 1}, collate_fn="list")
    expected = [values for path in paths for values in referred(path, "cells")]
    for number, values in enumerate(expected):
        np.testing.assert_array_equal(dataset[number], values)
    dataset.close()
    with h5py.File(paths[1], "r+") as file:
        del file["cells"]
        file["cells"] = np.zeros((2, 5))
    with pytest.raises(H5ValueError, match="holds references in only one of"):
        H5LazyDataset(paths, "cells")


@pytest.mark.parametrize("given", [{"segments": "#refs*"}, {"files": {"swmr": True}}])
def test_references_are_refused_where_they_do_not_make_segments(tmp_path, given):
    path = write(tmp_path / "a.mat", cells=signals())
    with h5py.File(path, "r+") as file:
        file["#refs#/inner"] = file["cells"]
    key = "inner" if "segments" in given else "cells"
    with pytest.raises(H5ValueError, match="holds references to other arrays"):
        H5LazyDataset(path, key, **given)


def test_a_folder_of_files_with_cells_is_recognized_whatever_their_number(tmp_path):
    for number in range(3):
        path = write(tmp_path / f"{number}.mat", cells=signals(LENGTHS[number:]))
        with h5py.File(path, "r+") as file:
            file["label"] = np.arange(5.0 - number)[None]
    report = inspect_folder(str(tmp_path / "*.mat"))
    assert not report.outliers
    advice = report.example.advice
    assert (advice.x_keys, advice.y_keys) == (("cells",), ("label",))
    assert (advice.settings["sample"], advice.settings["segments"]) == ("segment", {"step_axis": 1})


WORDS = ["bath", "café", "", "kitchen", "bath", "hall"]


def of_labelled_rows(path, words=WORDS):
    """Pictures with a text, and a number, in a cell for each."""
    write(path, words=[word or np.zeros(2, "u8") for word in words], numbers=[[[n / 2]] for n in range(len(words))])
    with h5py.File(path, "r+") as file:
        file["images"] = np.arange(len(words) * 12, dtype="u1").reshape(-1, 3, 4)
        for at, word in enumerate(words):
            if not word:
                attributes = file[f"#refs#/words{at:x}"].attrs
                attributes["MATLAB_class"], attributes["MATLAB_empty"] = np.bytes_("char"), np.uint8(1)
    return str(path)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule])
def test_cells_with_a_value_for_each_row_of_another_array_are_columns(tmp_path, make, num_workers):
    paths = [of_labelled_rows(tmp_path / f"{at}.mat", WORDS[at:]) for at in range(2)]
    keys = {"images": "images", "words": "words", "numbers": "numbers"}
    fields = {"fields": keys} if make is CombinedHDF5DataModule else {"x_key": keys}
    datamodule = make(paths, **fields, sample="row", batch_size=4, seed=1, num_workers=num_workers)
    datamodule.setup("fit")
    seen = []
    for batch in datamodule.train_dataloader():
        firsts = batch["images"][:, 0, 0].tolist()
        seen += zip(firsts, batch["words"], batch["numbers"].tolist(), strict=True)
    datamodule.teardown("fit")
    expected = [(12 * n, word, n / 2) for at in range(2) for n, word in enumerate(WORDS[at:])]
    assert sorted(seen) == sorted(expected)


def test_text_in_cells_filters_stratifies_and_is_a_target(tmp_path):
    path = of_labelled_rows(tmp_path / "a.mat", [word or "none" for word in WORDS])
    x, y = H5LazyDataset(path, "images", "words").read_batch([3, 1])
    assert (x.shape, y) == ((2, 3, 4), ["kitchen", "café"])
    combined = CombinedHDF5DataModule(path, fields=["images"], where={"words": "bath"}, batch_size=9)
    combined.setup("fit")
    assert next(iter(combined.train_dataloader()))["images"][:, 0, 0].sort().values.tolist() == [0, 48]
    grouped = LazyH5DataModule(path, x_key="images", split={"val_fraction": 0.3, "group_key": "words"}, batch_size=9)
    grouped.setup("fit")
    sides = [set(next(iter(each))[:, 0, 0].tolist()) for each in (grouped.train_dataloader(), grouped.val_dataloader())]
    assert any({0, 48} <= side for side in sides)


@pytest.mark.parametrize("cell", [np.zeros((2, 3)), "a"], ids=["array", "text among numbers"])
def test_cells_without_one_value_for_each_row_are_no_columns(tmp_path, cell):
    path = write(tmp_path / "a.mat", numbers=[[[0.0]], cell, [[2.0]]])
    with h5py.File(path, "r+") as file:
        file["images"] = np.zeros((3, 2, 2))
    with pytest.raises(H5ValueError, match=r"references|refers"):
        H5LazyDataset(path, "images", "numbers")
