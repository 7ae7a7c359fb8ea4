"""Files that are one image or volume each: their lines are no rows, unless the user says so."""

from pathlib import Path

import numpy as np
import pytest
from arguments import nested, nested_files
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from lightning_h5 import CombinedHDF5DataModule, H5ValueError, LazyH5DataModule, RankCachedH5DataModule
from lightning_h5.datasets import CombinedHDF5Dataset, H5LazyDataset, RankMemCachedH5Dataset
from lightning_h5.tools.bench import bench_file

KEYS = ["image", "label"]
LOOKS_LIKE_AN_IMAGE = {
    "image and label": [{"image": (8, 6), "label": (8, 6)}] * 3,
    "volume and label": [{"image": (5, 8, 6), "label": (5, 8, 6)}] * 2,
    "colors and label": [{"image": (8, 6, 3), "label": (8, 6)}] * 2,
    "volume of channels and label": [{"image": (5, 8, 6, 4), "label": (5, 8, 6)}] * 2,
    "small images": [{"image": (12, 10), "label": (12, 10)}] * 3,
    "squares": [{"image": (16, 16), "label": (16, 16)}] * 2,
    "wide images": [{"image": (20, 30), "label": (20, 30)}] * 2,
    "volume of a brain": [{"image": (31, 48, 48, 4), "label": (31, 48, 48)}] * 2,
    "an axis that is four times as long": [{"image": (5, 20), "label": (5, 20)}] * 2,
}
ROWS = {
    "one file": [{"image": (8, 6), "label": (8, 6)}],
    "files of different lengths": [{"image": (n, 6), "label": (n, 6)} for n in (8, 8, 5)],
    "an array with one value a row": [{"image": (8, 6), "label": (8, 6), "id": (8,)}] * 2,
    "an array with one value a row, as a column": [{"image": (8, 6), "other": (8, 6), "label": (8, 1)}] * 2,
    "different shapes": [{"image": (8, 6), "label": (8, 5)}] * 2,
    "images in rows": [{"image": (8, 6, 6, 6), "label": (8, 6, 6, 6)}] * 2,
    "one row a file": [{"image": (1, 6, 6), "label": (1, 6, 6)}] * 2,
    "one array": [{"image": (8, 6, 6)}] * 3,
    "two views and a label of other axes": [{"image": (8, 6), "other": (8, 6), "label": (8, 5)}] * 2,
    "an episode of a robot": [{"qpos": (60, 14), "action": (60, 14)}] * 3,
    "a short episode with a camera": [{"cam": (20, 8, 8, 3), "qpos": (20, 14), "action": (20, 14)}] * 3,
    "pairs of signals": [{"noisy": (50, 800), "clean": (50, 800)}] * 3,
    "images in rows, and their masks": [{"x": (50, 8, 8, 3), "mask": (50, 8, 8)}] * 3,
    "features in and out": [{"feat": (600, 128), "y": (600, 128)}] * 3,
}


def write(make_h5, shapes):
    values = [
        {key: np.random.default_rng(at).random(shape).astype("f4") for key, shape in each.items()}
        for at, each in enumerate(shapes)
    ]
    return [make_h5(each) for each in values], values


def read_by_all(paths, keys, **how):
    """The rows of all files, by each kind of data set, as a dict."""
    names = {key: key for key in keys}
    for make in (
        lambda: H5LazyDataset(paths, names, **nested_files(**how)),
        lambda: RankMemCachedH5Dataset(paths, names, **nested_files(rank=0, world_size=1, **how)),
        lambda: CombinedHDF5Dataset(paths, list(keys), **nested_files(dtype=None, **how)),
    ):
        dataset = make()
        yield dataset.read_batch(range(len(dataset)))
        dataset.close()


def check_rows(paths, values, **how):
    for batch in read_by_all(paths, values[0], **how):
        for key in values[0]:
            assert np.array_equal(batch[key].numpy(), np.concatenate([each[key] for each in values]))


@pytest.mark.parametrize("name", LOOKS_LIKE_AN_IMAGE)
def test_an_image_in_each_file_is_not_taken_for_rows(make_h5, name):
    paths, values = write(make_h5, LOOKS_LIKE_AN_IMAGE[name])
    keys = {key: key for key in values[0]}
    for make in (
        lambda: H5LazyDataset(paths, keys),
        lambda: H5LazyDataset(paths, "image", [key for key in keys if key != "image"]),
        lambda: RankMemCachedH5Dataset(paths, keys, rank=0, world_size=1),
        lambda: CombinedHDF5Dataset(paths, list(keys)),
        lambda: LazyH5DataModule(paths, x_key=keys).setup("fit"),
        lambda: RankCachedH5DataModule(paths, x_key=keys).setup("fit"),
        lambda: CombinedHDF5DataModule(paths, fields=list(keys)).setup("fit"),
        lambda: CombinedHDF5DataModule(mixture={"a": paths}, fields=list(keys)).setup("fit"),
    ):
        with pytest.raises(H5ValueError, match=r"may be one image or volume.* pass sample='row'"):
            make()


@pytest.mark.parametrize("name", [*LOOKS_LIKE_AN_IMAGE, *ROWS])
def test_rows_are_what_they_are_if_the_user_says_so(make_h5, name):
    check_rows(*write(make_h5, (LOOKS_LIKE_AN_IMAGE | ROWS)[name]), sample="row")


@pytest.mark.parametrize("name", ROWS)
def test_files_that_leave_no_doubt_are_rows(make_h5, name):
    check_rows(*write(make_h5, ROWS[name]))


@pytest.mark.parametrize(
    "make",
    [
        lambda paths, **how: LazyH5DataModule(paths, **nested(x_key="image", y_key="label", batch_size=24, **how)),
        lambda paths, **how: RankCachedH5DataModule(
            paths, **nested(x_key="image", y_key="label", batch_size=24, **how)
        ),
        lambda paths, **how: CombinedHDF5DataModule(paths, **nested(fields=KEYS, batch_size=24, **how)),
    ],
    ids=["lazy", "cached", "combined"],
)
def test_data_modules_train_on_rows_if_the_user_says_so(make_h5, make):
    paths, values = write(make_h5, LOOKS_LIKE_AN_IMAGE["image and label"])
    datamodule = make(paths, sample="row", split=0.25, shuffle=False)
    datamodule.setup("fit")
    found = []
    for batch in (*datamodule.train_dataloader(), *datamodule.val_dataloader()):
        found += (batch["label"] if isinstance(batch, dict) else batch[1]).tolist()
    assert sorted(found) == sorted(np.concatenate([each["label"] for each in values]).tolist())


def combined_of_all(paths, **how):
    datamodule = CombinedHDF5DataModule(paths, **nested(fields=KEYS, **how))
    datamodule.setup("fit")
    return datamodule


@pytest.mark.parametrize("n_broken", [1, 2])
@pytest.mark.parametrize(
    "make",
    [lambda paths, **how: CombinedHDF5Dataset(paths, KEYS, **nested_files(**how)), combined_of_all],
    ids=["data set", "data module"],
)
def test_images_are_refused_if_one_file_of_several_can_be_read(make_h5, tmp_path, make, n_broken):
    (path,), _ = write(make_h5, [{"image": (8, 6), "label": (8, 6)}])
    broken = [str(tmp_path / f"broken{at}.h5") for at in range(n_broken)]
    for each in broken:
        Path(each).write_bytes(b"broken")
    with pytest.raises(H5ValueError, match="sample='row'"):
        make([*broken, path], on_bad_file="skip")
    make([*broken, path], on_bad_file="skip", sample="row")
    make([path], on_bad_file="skip")


def mixture_of(sources, **how):
    datamodule = CombinedHDF5DataModule(**nested(sources=sources, fields=KEYS, sampling_strategy="round_robin", **how))
    datamodule.setup("fit")


def test_an_image_in_each_source_is_not_taken_for_rows(make_h5):
    (a, b, other), _ = write(make_h5, [{"image": (n, 6), "label": (n, 6)} for n in (8, 8, 7)])
    for how in ({}, {"val_fraction": 0.25}):
        with pytest.raises(H5ValueError, match="sample='row'"):
            mixture_of({"a": a, "b": b}, **how)
        mixture_of({"a": a, "b": b}, sample="row", **how)
        mixture_of({"a": a, "b": other}, **how)
        mixture_of({"a": a, "b": {"paths": a}}, **how)  # of one file


def test_a_column_that_a_filter_looks_at_proves_rows(make_h5):
    paths, _ = write(make_h5, [{"image": (8, 6), "label": (8, 6), "age": (8,)}] * 2)
    for how in ({}, {"val_fraction": 0.25}):
        combined_of_all(paths, where={"age": {"min": 0}}, **how)
        mixture_of(dict(zip("ab", paths, strict=True)), where={"age": {"min": 0}}, **how)


def test_another_sample_is_refused(make_h5):
    with pytest.raises(H5ValueError, match=r"sample='lines' was given\. Pass 'row'"):
        H5LazyDataset(make_h5(x=np.zeros((4, 2))), "x", sample="lines")


@pytest.mark.wide
def test_a_benchmark_reads_rows_of_any_files(make_h5):
    paths, _ = write(make_h5, LOOKS_LIKE_AN_IMAGE["image and label"])
    assert bench_file(paths, "image", "label", seconds=0.05, batch_size=4).n_rows == 24


# Any folder ----------------------------------------------------------------------------------------------------


@st.composite
def folders(draw):
    """Shapes of the arrays of some files: images, or rows."""
    n_files, n_arrays = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = draw(st.sampled_from([1, 4, 6]))
    axes = [
        draw(st.sampled_from([(), (1,), (5,), (5, 3), (5, 6), (5, 6, 2), (2, 5, 6, 3), (30,), (5, 30)]))
        for _ in range(n_arrays)
    ]
    if draw(st.booleans()):
        axes = [axes[0]] * n_arrays
    lengths = [rows if draw(st.integers(0, 3)) else 3 for _ in range(n_files)]
    return [{f"a{at}": (n, *each) for at, each in enumerate(axes)} for n in lengths]


def is_doubtful(shapes):
    """Whether files may be an image each: by the words of the documentation, two arrays at a time."""

    def pixels(shape):
        return shape[:-1] if len(shape) > 2 and shape[-1] <= 4 else shape

    def is_image(shape):
        return 2 <= len(shape) <= 3 and all(a <= 4 * b for a in shape for b in shape)

    first = shapes[0]
    return (
        len(shapes) > 1
        and len(first) > 1
        and all(each == first for each in shapes)
        and all(shape[0] > 1 and is_image(pixels(shape)) for shape in first.values())
        and all(pixels(first[a]) == pixels(first[b]) for a in first for b in first)
    )


def check_folder(make_h5, shapes):
    paths, values = write(make_h5, shapes)
    if is_doubtful(shapes):
        for make in (H5LazyDataset, RankMemCachedH5Dataset, CombinedHDF5Dataset):
            with pytest.raises(H5ValueError, match="sample='row'"):
                make(paths, list(values[0]))
        check_rows(paths, values, sample="row")
    else:
        check_rows(paths, values)


@pytest.mark.wide
@given(shapes=folders())
def test_any_folder_gives_the_rows_of_its_files_or_an_error(make_h5, shapes):
    check_folder(make_h5, shapes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=examples(2500))
@given(shapes=folders())
def test_thousands_of_folders_give_the_rows_of_their_files_or_an_error(make_h5, shapes):
    check_folder(make_h5, shapes)
