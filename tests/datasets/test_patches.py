"""Patches of volumes are what NumPy slices out of them, whatever the cells, the grid and the border."""

import itertools
import json

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_cases import NUMBERS, STORAGE, write_array

from lightning_h5 import (
    H5DataChangedError,
    H5LazyDataset,
    H5ValueError,
    LazyH5DataModule,
    PatchOptions,
    RankMemCachedH5Dataset,
)
from lightning_h5.samples.read_costs import blocks_of

DTYPES = ["u1", "i2", "<f4", ">f4", "f8", "i8", "?", "c8"]
GZIP = {"compression": "gzip", "shuffle": True}


def starts_of(n, size, stride, border):
    """Where patches start along an axis."""
    if border == "pad":
        return [at for at in range(0, n, stride) if at == 0 or at - stride + size < n]
    found = list(range(0, n - size + 1, stride))
    return [*found, n - size] if border == "shift" and found and found[-1] < n - size else found


def cut(volume, axes, place, sizes):
    """The patch of a volume at a place along some axes, with zeros beyond the edge."""
    shape, inside = list(volume.shape), [slice(None)] * volume.ndim
    for axis, start, size in zip(axes, place, sizes, strict=True):
        shape[axis], inside[axis] = size, slice(start, start + size)
    found, there = np.zeros(shape, volume.dtype.newbyteorder("=")), volume[tuple(inside)]
    found[tuple(map(slice, there.shape))] = there
    return found


class Case:
    """Files with volumes, and what NumPy makes of them: for each segment its name, image, label and value."""

    def __init__(self, paths, keys, options, volumes):
        self.paths, self.keys, self.options, self.volumes = paths, keys, options, volumes


@st.composite
def cases(draw, folder):
    """Volumes with 1 to 3 axes that are cut, in files, groups, arrays or along an axis; the image may have channels."""
    how = draw(st.sampled_from(["files", "groups", "arrays", "axis"]))
    n_cut = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    dtypes = rng.choice(DTYPES, 2)
    channels = draw(st.sampled_from([None, 0, n_cut]))  # no such axis, or the first, or the last
    storage = [draw(st.sampled_from([{}, *STORAGE, GZIP])) for _ in range(2)]
    chunks = [draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)) for _ in range(2)]
    taken = draw(st.sampled_from([None, {"start": 1}, [2, 0], {"step": 2}])) if channels is not None else None
    lengths = st.tuples(*[st.integers(1, 9)] * n_cut)
    n_files, n_here = draw(st.integers(1, 2)), draw(st.integers(1, 2)) if how != "files" else 1
    paths, volumes = [], []
    for _ in range(n_files):
        paths.append(str(folder / f"{next(NUMBERS):06}.h5"))
        shapes = [draw(lengths) for _ in range(n_here)]
        shapes = shapes[:1] * n_here if how == "axis" else shapes
        here = []
        for shape in shapes:
            whole = list(shape)
            if channels is not None:
                whole.insert(channels, 3)
            image, label = (
                (rng.integers(0, 250, each) * (1j if dtype == "c8" else 1)).astype(dtype)
                for each, dtype in zip((whole, shape), dtypes, strict=True)
            )
            here.append((image, label, rng.integers(0, 99, 2)))
        with h5py.File(paths[-1], "w") as file:
            if how == "axis":
                for at, name in enumerate(["image", "label"]):
                    write_array(file, name, np.stack([one[at] for one in here]), storage[at], chunks[at])
                file["value"] = np.stack([one[2] for one in here])
            for number, (image, label, value) in enumerate(here, 9 + len(volumes)) if how != "axis" else ():
                names = {"files": "{}", "groups": "volumes/v{n}/{}", "arrays": "{}/v{n}"}[how]
                write_array(file, names.format("image", n=number), image, storage[0], chunks[0])
                write_array(file, names.format("label", n=number), label, storage[1], chunks[1])
                file[names.format("value", n=number)] = value
        volumes += here
    if channels is not None and taken is not None:
        index = taken if isinstance(taken, list) else slice(taken.get("start"), None, taken.get("step"))
        volumes = [(np.take(i, np.arange(3)[index], axis=channels), label, value) for i, label, value in volumes]
    name = "{}/v*" if how == "arrays" else "{}"
    keys = {field: name.format(field) for field in ("image", "label", "value")}
    segments = {"constants": [keys["value"]]}
    if how == "groups":
        segments["groups"] = "volumes/*"
    if how == "axis":
        segments["axis"] = {"*": 0}  # of constants too
    sizes = draw(st.tuples(*[st.integers(1, 6)] * n_cut))
    shape = list(sizes)
    if channels is not None:
        shape.insert(channels, None)
    patch = {
        "shape": {"image": shape, "label": list(sizes)} if channels is not None else list(sizes),
        "stride": draw(st.one_of(st.none(), st.integers(1, 7), st.tuples(*[st.integers(1, 7)] * n_cut))),
        "border": draw(st.sampled_from(["shift", "drop", "pad"])),
    }
    options = {"segments": segments, "patch": patch}
    if taken is not None:
        options["select"] = {"image": {channels + (how == "axis"): taken}}
    axes = [axis for axis in range(n_cut + 1) if axis != channels][:n_cut]
    case = Case(paths, keys, options, volumes)
    case.axes, case.sizes, case.border, case.n_cut = axes, sizes, patch["border"], n_cut
    stride = patch["stride"]
    case.strides = sizes if stride is None else (stride,) * n_cut if isinstance(stride, int) else stride
    return case


def places_of(case):
    """The number of the volume, and the place, of each patch, in order."""
    found = []
    for number, (_, label, _) in enumerate(case.volumes):
        each = zip(label.shape, case.sizes, case.strides, strict=True)
        found += [(number, place) for place in itertools.product(*(starts_of(*one, case.border) for one in each))]
    return found


def assert_patches(case, samples, numbers):
    """Samples are the patches of their volumes at their places; return these."""
    places = []
    for sample in samples:
        place = tuple(sample["step"].tolist())
        number = numbers[sample["segment"]]
        image, label, value = case.volumes[number]
        for name, volume, axes in (("image", image, case.axes), ("label", label, range(case.n_cut))):
            expected = cut(volume, axes, place, case.sizes)
            np.testing.assert_array_equal(sample[name].numpy(), expected)
            assert sample[name].numpy().dtype == expected.dtype
        assert sample["value"].tolist() == value.tolist()
        places.append((number, place))
    return places


def dataset_of(kind, case, **options):
    return kind(case.paths, case.keys, x_dtype=None, with_index=True, **case.options, **options)


def names_of(table):
    return {table.segment_name(number): number for number in range(len(table.indexer.kinds))}


@pytest.mark.parametrize("kind", [H5LazyDataset, RankMemCachedH5Dataset])
@given(data=st.data())
@settings(max_examples=25)
def test_patches_are_what_numpy_cuts_out_of_volumes_each_once(kind, data, tmp_path_factory):
    case = data.draw(cases(tmp_path_factory.mktemp("patches")))
    expected = places_of(case)
    if not expected:
        with pytest.raises(H5ValueError, match="no volume is as large as a patch"):
            dataset_of(kind, case)
        return
    memory = data.draw(st.sampled_from([1, 300, 2000, "1 MiB"]))  # for decoded cells: none, few, some, all
    dataset = dataset_of(kind, case, files={"cache_bytes": memory})
    names = names_of(dataset.table)
    assert assert_patches(case, [dataset[i] for i in range(len(dataset))], names) == expected
    order = np.random.default_rng(0).permutation(len(dataset))
    batch = dataset.read_batch(order)
    samples = [{name: column[at] for name, column in batch.items()} for at in range(len(order))]
    assert_patches(case, samples, names)
    assert [sample["index"].item() for sample in samples] == order.tolist()
    n_left_out = len(case.volumes) - len({number for number, _ in expected})
    left_out = dataset.table.indexer.left_out()
    assert left_out.startswith(f"{n_left_out} of {len(case.volumes)} volumes") if n_left_out else left_out is None


@given(data=st.data())
@settings(max_examples=10)
def test_random_patches_lie_inside_their_volumes_and_depend_on_seed_and_epoch(data, tmp_path_factory):
    case = data.draw(cases(tmp_path_factory.mktemp("patches")))
    case.options["patch"] |= {"random": 3, "stride": None}
    if not places_of(case):
        return
    lazy, held = (dataset_of(kind, case, seed=5) for kind in (H5LazyDataset, RankMemCachedH5Dataset))
    names, samples = names_of(lazy.table), np.arange(len(lazy))
    drawn = []
    for epoch in (0, 1):
        read = [dataset.begin(samples, epoch)() for dataset in (lazy, held)]
        batches = [dataset.finish(raw) for dataset, raw in zip((lazy, held), read, strict=True)]
        of_epoch = [[{n: c[at] for n, c in batch.items()} for at in samples] for batch in batches]
        places = [assert_patches(case, each, names) for each in of_epoch]
        assert places[0] == places[1]
        drawn.append(places[0])
        for number, place in places[0]:
            for start, size, n in zip(place, case.sizes, case.volumes[number][1].shape, strict=True):
                assert 0 <= start <= max(0, n - size)
    again = lazy.table.indexer.places(samples[::-1], 1).steps[::-1]
    assert [place for _, place in drawn[1]] == list(map(tuple, again.tolist()))


def test_random_patches_are_at_all_places_alike_and_along_axes_by_themselves(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((9, 12), "u1")
    patch = PatchOptions(shape=(3, 4), random=2000)
    sampling = H5LazyDataset(tmp_path / "a.h5", "x", patch=patch, seed=3).table.indexer
    steps = np.concatenate([sampling.places(np.arange(2000), epoch).steps for epoch in range(10)])
    counts = np.histogram2d(*steps.T, bins=(7, 9), range=((0, 7), (0, 9)))[0]
    assert counts.min() > 0.75 * counts.mean()
    assert abs(np.corrcoef(steps.T)[0, 1]) < 0.03


def write_volumes(path, shapes, chunks, **more):
    """Random volumes as groups ``v0`` and so on, compressed; return them."""
    rng = np.random.default_rng(1)
    volumes = [rng.integers(0, 256, shape).astype("u1") for shape in shapes]
    with h5py.File(path, "w") as file:
        for number, volume in enumerate(volumes):
            file.create_dataset(f"v{number}/x", data=volume, chunks=chunks, **GZIP, **more)
    return volumes


def n_decoded(module, loader, epoch):
    """Chunks that an epoch decodes."""
    counters = module.datasets["train"].counters
    before = counters.total()["chunks_decoded"]
    loader.sampler.set_epoch(epoch)
    n = sum(len(batch) for batch in loader)
    assert n == len(module.datasets["train"])
    return counters.total()["chunks_decoded"] - before


@pytest.mark.parametrize("shuffle", ["chunks", False])
def test_each_chunk_is_decoded_once_an_epoch_however_many_patches_have_it(tmp_path, shuffle):
    write_volumes(tmp_path / "a.h5", [(32, 32, 32)] * 12, (8, 8, 8))
    shuffle = {"mode": "chunks", "buffer": "128 KiB"} if shuffle else shuffle
    patch = {"shape": [8, 8, 8], "stride": 4}
    module = LazyH5DataModule(
        tmp_path / "a.h5", x_key="x", segments="v*", patch=patch, shuffle=shuffle, files={"cache_bytes": "192 KiB"}
    )
    module.setup("fit")
    assert module.datasets["train"].cost.block_bytes == 32**3
    loader = module.train_dataloader()
    assert n_decoded(module, loader, 0) == 12 * 64
    assert n_decoded(module, loader, 1) <= 12 * 64  # some are in memory already
    module.teardown("fit")


def test_blocks_of_a_large_volume_share_few_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_h5.samples.patches.BLOCK_BYTES", 8 * 8**3 * 8)
    write_volumes(tmp_path / "a.h5", [(64, 64, 64)], (8, 8, 8))
    patch = {"shape": [8, 8, 8], "stride": 4}
    module = LazyH5DataModule(
        tmp_path / "a.h5",
        x_key="v0/x",
        patch=patch,
        shuffle={"mode": "chunks", "buffer": "64 KiB"},
        files={"cache_bytes": "96 KiB"},
    )
    module.setup("fit")
    dataset = module.datasets["train"]
    assert dataset.cost.block_bytes <= 8 * 8**3 * 8
    assert dataset.blocks().n_blocks >= 8
    assert n_decoded(module, module.train_dataloader(), 0) < 2.2 * 8**3  # patches on their own decode 15 times as many
    module.teardown("fit")


def test_chunks_that_no_patch_has_are_not_read(tmp_path):
    write_volumes(tmp_path / "a.h5", [(20, 24), (6, 40)], (4, 6))
    dataset = H5LazyDataset(
        tmp_path / "a.h5", "x", segments="v*", patch=PatchOptions(shape=(8, 8), stride=12, border="drop")
    )
    assert len(dataset) == 4  # of the first volume alone, at 0 and 12
    dataset.read_batch(range(len(dataset)))
    assert dataset.counters.total()["chunks_decoded"] == 4 * (2 * 2)
    held = RankMemCachedH5Dataset(
        tmp_path / "a.h5",
        "x",
        segments="v*",
        patch={"shape": (8, 8), "stride": 12, "border": "drop"},
        world_size=2,
        rank=1,
    )
    assert held.kept_bytes == 2 * (2 * 2) * 24  # as stored, although batches are float32
    assert held[0].dtype == torch.float32


@pytest.mark.parametrize("kind", [H5LazyDataset, RankMemCachedH5Dataset])
def test_members_arrays_as_elements_and_arrays_that_hdf5_alone_reads_are_cut_alike(kind, tmp_path):
    rng = np.random.default_rng(2)
    table = np.zeros((9, 10), [("a", "i2"), ("b", "f4", (3,))])
    table["a"], table["b"] = rng.integers(0, 99, (9, 10)), rng.normal(size=(9, 10, 3))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("table", data=table, chunks=(4, 3), **GZIP)
        file.create_dataset("scaled", data=table["a"], chunks=(4, 4), scaleoffset=0)
        layout = h5py.VirtualLayout((9, 10), "i2")
        layout[...] = h5py.VirtualSource(".", "scaled", (9, 10))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("sparse", (9, 10), "f4", chunks=(2, 2), fillvalue=7)[3:5] = 1
    keys = {"a": "table/a", "b": "table/b", "scaled": "scaled", "virtual": "virtual", "sparse": "sparse"}
    dataset = kind(tmp_path / "a.h5", keys, x_dtype=None, patch={"shape": [5, 4]}, with_index=True)
    expected = {"a": table["a"], "b": table["b"], "scaled": table["a"], "virtual": table["a"]}
    with h5py.File(tmp_path / "a.h5") as file:
        expected["sparse"] = file["sparse"][()]
    for number in range(len(dataset)):
        sample = dataset[number]
        place = tuple(slice(at, at + n) for at, n in zip(sample["step"].tolist(), (5, 4), strict=True))
        for name, values in expected.items():
            np.testing.assert_array_equal(sample[name].numpy(), values[place])


@pytest.mark.parametrize("kind", [H5LazyDataset, RankMemCachedH5Dataset])
def test_patches_are_normalized_and_zeros_beyond_the_edge_are_not(kind, tmp_path):
    volume = np.random.default_rng(3).normal(3, 2, (6, 7, 2)).astype("f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = volume
    entry = {"mean": [1.0, 2.0], "std": [2.0, 4.0], "channel_axis": 1, "row_shape": [7, 2]}
    for numbers in (entry, {"mean": 1.5, "std": 2.0, "row_shape": [7, 2]}):
        (tmp_path / "stats.json").write_text(json.dumps({"fields": {"x": numbers}}))
        patch = {"shape": [4, 5, None], "border": "pad"}
        dataset = kind(tmp_path / "a.h5", "x", patch=patch, normalize=tmp_path / "stats.json", with_index=True)
        scaled = (volume - np.array(numbers["mean"])) / np.array(numbers["std"])
        for number in range(len(dataset)):
            x, *_, place = dataset[number]
            expected = cut(scaled.astype("f4"), (0, 1), place.tolist(), (4, 5))
            np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_splits_take_whole_volumes_and_small_volumes_are_counted(tmp_path, caplog):
    write_volumes(tmp_path / "a.h5", [(8, 8)] * 8 + [(3, 9)] * 2, (3, 4))
    arguments = {"x_key": "x", "segments": "v*", "patch": {"shape": [4, 4]}, "with_index": True, "shuffle": False}
    module = LazyH5DataModule(tmp_path / "a.h5", split=0.3, **arguments)
    with caplog.at_level("INFO"):
        module.setup("fit")
    assert "volumes are smaller than a patch (4, 4) and have no sample" in caplog.text
    found = [
        {name for _, _, names, _ in loader for name in names}
        for loader in (module.train_dataloader(), module.val_dataloader())
    ]
    assert not found[0] & found[1]
    assert found[0] | found[1] == {f"v{number}" for number in range(8)}
    module.teardown("fit")
    with pytest.raises(H5ValueError, match="volumes have no steps"):
        LazyH5DataModule(tmp_path / "a.h5", split={"val_fraction": 0.3, "by": "time"}, **arguments).setup("fit")


ERRORS = [
    ({"patch": {"shape": "large"}}, "Pass a size for each axis"),
    ({"patch": {"shape": [0, 4]}}, "Pass a size for each axis"),
    ({"patch": {"shape": [None, None]}}, "of which the sizes are None"),
    ({"patch": {"shape": {"image": [4, 4], "label": [4, 5]}}}, "the same sizes"),
    ({"patch": {"shape": [4, 4], "stride": [2]}}, "are cut along 2 axes"),
    ({"patch": {"shape": [4, 4], "stride": 0}}, "at least 1"),
    ({"patch": {"shape": [4, 4], "stride": 2, "random": 3}}, "random patches have no stride"),
    ({"patch": {"shape": [4, 4], "random": 0}}, "patch.random"),
    ({"patch": {"shape": [4, 4], "border": "mirror"}}, "patch.border"),
    ({"patch": 4}, "Pass patch="),
    ({"patch": {"shape": [4, 4]}, "window": 3}, "samples made of steps"),
    ({"patch": {"shape": [4, 4]}, "sample": "segment"}, "samples made of steps"),
    ({"patch": {"shape": [4, 4]}, "segments": {"lengths": "n"}}, "samples made of steps"),
    ({"patch": {"shape": [4, 4]}, "segments": {"step_axis": 1}}, "samples made of steps"),
    ({"patch": {"shape": [4, 4]}, "segments": {"bucket": True}}, "samples made of steps"),
    ({"patch": {"shape": [4]}}, "has 1 axes for 'image'"),
    ({"patch": {"shape": {"image": [4, 4]}}}, "no entry for the field 'label'"),
    ({"patch": {"shape": {"image": [4, 4], "label": [4, 4], "mask": [4, 4]}}}, "patch.shape names"),
    ({"patch": {"shape": [4, 4]}, "x_key": {"image": "image", "label": "small"}}, "are cut at the same place"),
    ({"patch": {"shape": [4, 4]}, "x_key": {"image": "image", "label": "text"}}, "holds text"),
    ({"patch": {"shape": [99, 4]}}, "no volume is as large"),
    ({"patch": {"shape": [4, 4]}, "select": {"image": {1: [99]}}}, "select takes"),
    ({"patch": {"shape": [None, 4]}, "path": "*.h5"}, "leaves an axis whole"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_patches_that_make_no_sense_are_errors_that_say_so(arguments, message, tmp_path):
    for name, n in (("a", 12), ("b", 11)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["image"], file["label"], file["small"] = (np.zeros(shape) for shape in ((n, 9), (n, 9), (n, 8)))
            file["text"] = np.full((n, 9), b"a")
            file["n"] = [n]
    given = {"path": "a.h5", "x_key": {"image": "image", "label": "label"}, **arguments}
    path = str(tmp_path / given.pop("path"))
    for kind in (H5LazyDataset, RankMemCachedH5Dataset):
        with pytest.raises(H5ValueError, match=message):
            kind(path, **given)


def test_what_changes_patches_changes_their_identity_and_nothing_else_does(tmp_path):
    write_volumes(tmp_path / "a.h5", [(8, 9)] * 3, (4, 4))
    given = {"shape": [4, 3]}
    options = [given, given | {"stride": 2}, given | {"border": "drop"}, {"shape": [3, 4]}, given | {"random": 4}]

    def identity(patch, **more):
        return H5LazyDataset(tmp_path / "a.h5", "x", segments="v*", patch=patch, **more).identity()["sampled"]

    found = [identity(patch) for patch in options]
    found += [identity(options[-1], seed=1), identity(given, select={"x": {0: {"start": 2}}})]
    assert len(set(found)) == len(found)
    assert identity({"shape": (4, 3), "stride": (4, 3)}) == found[0] == identity(given, seed=1)


def test_errors_name_the_file_of_a_patch_and_changed_files_are_noticed(tmp_path):
    write_volumes(tmp_path / "a.h5", [(8, 9)], (4, 4))
    write_volumes(tmp_path / "b.h5", [(8, 9)], (4, 4))

    def fail(x):
        raise RuntimeError("no patch")

    dataset = H5LazyDataset(tmp_path / "*.h5", "v0/x", patch={"shape": [8, 3]}, transform=fail)
    with pytest.raises(RuntimeError, match="no patch") as error:
        dataset[4]
    assert "row 4 of" in error.value.__notes__[0]
    assert "b.h5" in error.value.__notes__[0]
    dataset = H5LazyDataset(tmp_path / "*.h5", "v0/x", patch={"shape": [8, 3]})
    dataset.read_batch([0, 4])
    write_volumes(tmp_path / "b.h5", [(9, 9)], (4, 4))
    with pytest.raises(H5DataChangedError, match=r"b\.h5"):
        dataset.read_batch([0, 4])


@pytest.mark.wide
def test_blocks_of_a_few_chunks_give_the_same_patches_in_another_order(tmp_path, monkeypatch):
    """Volumes of several kinds, cut into blocks of many sizes: each place once, blocks one after the other."""
    volumes = write_volumes(tmp_path / "a.h5", [(20, 17, 9), (9, 30, 9), (20, 17, 9)], (4, 5, 3))
    for n_bytes in (60, 400, 1500, 4000, 1 << 20):
        monkeypatch.setattr("lightning_h5.samples.patches.BLOCK_BYTES", n_bytes)
        dataset = H5LazyDataset(
            tmp_path / "a.h5", "x", segments="v*", patch={"shape": [5, 6, 4], "stride": [2, 3, 1]}, with_index=True
        )
        x, _, names, steps = dataset.read_batch(range(len(dataset)))
        found = list(zip(names, map(tuple, steps.tolist()), strict=True))
        expected = [
            (f"v{number}", place)
            for number, volume in enumerate(volumes)
            for place in itertools.product(
                *(starts_of(*one, "shift") for one in zip(volume.shape, (5, 6, 4), (2, 3, 1), strict=True))
            )
        ]
        assert sorted(found) == sorted(expected)
        assert found == expected or n_bytes < 1 << 20
        assert dataset.blocks().n_blocks >= 3 * (1 + (n_bytes < 1500))
        for value, (name, place) in zip(x.numpy(), found, strict=True):
            np.testing.assert_array_equal(value, cut(volumes[int(name[1:])], range(3), place, (5, 6, 4)))
        blocks = dataset.blocks()
        some = np.arange(len(dataset))[::3]
        cuts = np.searchsorted(blocks.starts, some, side="right")
        of_some = blocks_of(dataset.table, some)
        assert np.diff(of_some.starts).tolist() == np.unique(cuts, return_counts=True)[1].tolist()


def test_a_rank_that_takes_another_shard_has_the_patches_of_that(tmp_path):
    volumes = write_volumes(tmp_path / "a.h5", [(12, 15)] * 6, (4, 5))
    dataset = RankMemCachedH5Dataset(
        tmp_path / "a.h5",
        "x",
        x_dtype=None,
        segments="v*",
        patch={"shape": [5, 6], "stride": 3},
        with_index=True,
        rank=0,
        world_size=2,
        reshard_every_n_epochs=1,
    )
    seen = []
    for draw in range(3):
        if not dataset.reshard(draw):
            dataset.load()
        x, index, names, steps = dataset.read_batch(range(len(dataset)))
        for value, name, place in zip(x.numpy(), names, steps.tolist(), strict=True):
            np.testing.assert_array_equal(value, cut(volumes[int(name[1:])], range(2), place, (5, 6)))
        seen.append(tuple(sorted(index.tolist())))
    assert len(set(seen)) == 3
