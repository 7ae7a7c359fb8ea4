"""``inspect`` recognizes how files store samples: what it prints works, and says when it is not sure."""

import contextlib
import io
import re

import decoded_values  # noqa: F401  # more projects
import h5py
import numpy as np
import pytest
import single_cells  # noqa: F401  # more projects
import yaml
from projects import PROJECTS, warning_of
from test_layouts import assert_epoch

from lightning_h5 import H5KeyError, H5ValueError, LazyH5DataModule
from lightning_h5.cli import main
from lightning_h5.hdf5 import keys_in
from lightning_h5.tools.bench import bench_file
from lightning_h5.tools.inspect import inspect_file, inspect_folder
from lightning_h5.tools.inspect.recognize_parts import PERSON

# What a sample is in the printed call: a number of steps around one, by field for episodes, or what ``sample`` says.
KINDS = {
    **dict.fromkeys(["act_aloha", "robomimic", "maniskill", "d4rl"], "episode"),
    **dict.fromkeys(["the_well", "pdebench_groups", "fourcastnet", "labram_eeg", "ml4gw", "nwb"], "window"),
    **dict.fromkeys(["clam", "image_per_file", "ragged_by_offsets", "matlab_cells"], "segment"),
    **dict.fromkeys(["fastmri", "spice", "matlab"], "row"),
    "monthly_files": "window",
    "protein_embeddings": None,
}
CELLS = {"anndata_files": ("X", "obs/cell_type"), "cell_ranger": ("matrix", None)}


def printed(path):
    """All that ``inspect`` prints, the Python call that it begins with, and its arguments in YAML."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(["inspect", str(path)])
    text = out.getvalue()
    assert ended.value.code == 0
    call = re.search(r"\A\w+DataModule\(\n(?:    .*\n)+\)$", text, re.MULTILINE)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        main(["inspect", str(path), "--yaml"])
    assert out.getvalue() in text or "--yaml" in text
    return text, call[0], yaml.safe_load(out.getvalue())["data"]["init_args"]


def executed(call):
    return eval(call, {"LazyH5DataModule": LazyH5DataModule})


def first_batch(module):
    module.setup("fit")
    return next(iter(module.train_dataloader()))


def test_all_layouts_but_small_volumes_and_molecules_are_recognized_without_doubt():
    seen = {name for name, write in PROJECTS.items() if write.__module__ != "decoded_values"}
    assert seen - set(KINDS) - set(CELLS) == {"cremi", "brats", "cell_tracking", "molecules"}


DECODED = {
    "era5_packed": "t2m",
    "photos": "images",
    "volumes_of_patients": "ct",
    "label_file": "x",
    "bits_and_waves": "raw",
    "slices_of_buckets": "data/*",
}


@pytest.mark.parametrize("name", DECODED)
def test_values_that_are_decoded_are_recognized(tmp_path, name):
    layout = PROJECTS[name](tmp_path)
    _, call, in_yaml = printed(layout.arguments["path"])
    module = executed(call)
    assert first_batch(module) is not None
    assert module.hparams["x_key"] == DECODED[name]
    assert dict(module.hparams)["decode"] == ({"images": "image"} if name == "photos" else None)
    assert dict(LazyH5DataModule(**in_yaml).hparams) == dict(module.hparams)


@pytest.mark.parametrize("name", CELLS)
def test_of_cells_it_names_matrix_and_categories(tmp_path, name):
    layout = PROJECTS[name](tmp_path)
    files = sorted(tmp_path.iterdir())
    text, call, in_yaml = printed(layout.arguments["path"] if len(files) > 1 else files[0])
    module = executed(call)
    assert first_batch(module) is not None
    assert (module.hparams["x_key"], module.hparams["y_key"]) == CELLS[name]
    assert "not sure" not in text
    assert dict(LazyH5DataModule(**in_yaml).hparams) == dict(module.hparams)


@pytest.mark.parametrize("name", ["cremi", "brats"])
def test_of_volumes_it_says_how_patches_are_cut(tmp_path, name):
    text, call, _ = printed(PROJECTS[name](tmp_path).arguments["path"])
    assert first_batch(executed(call)) is not None
    assert "the argument patch cuts pieces of one size from it" in " ".join(text.split())


@pytest.mark.parametrize("name", KINDS)
def test_the_call_that_is_printed_for_a_layout_yields_its_samples(tmp_path, name):
    layout = PROJECTS[name](tmp_path)
    files = sorted(tmp_path.iterdir())
    text, call, in_yaml = printed(layout.arguments["path"] if len(files) > 1 else files[0])
    module = executed(call)
    with warning_of(name):
        assert first_batch(module) is not None
    assert "not sure" not in text
    settings = module.hparams
    kind = settings["sample"] or ("episode" if "pad" in str(settings["window"]) else settings["window"] and "window")
    assert kind == KINDS[name]
    assert dict(LazyH5DataModule(**in_yaml).hparams) == dict(settings)

    # With the project's own windows and names of fields, what was recognized gives the project's samples.
    keys, given = layout.arguments["x_key"], layout.arguments
    of_each_file = {"@patient_id"}  # another text in each file is no input
    assert set(keys.values()) - of_each_file <= set(keys_in(settings["x_key"], settings["y_key"]))
    options = {key: settings[key] for key in ("segments", "sample", "collate_fn") if settings[key]}
    options |= {key: given[key] for key in ("window", "select") if key in given}
    options |= {"x_dtype": None, "batch_size": 4, "with_index": True, "shuffle": False}
    same = LazyH5DataModule(given["path"], x_key=keys, **options)
    with warning_of(name):
        same.setup("fit")
    assert_epoch(same.train_dataloader(), layout.samples)


N = np.random.default_rng(0).standard_normal


def codes(_):
    return {"codes": np.arange(30) % 2, "categories": [b"a", b"b"]}


def sparse(_):
    return {"data": N(40), "indices": np.arange(40) % 9, "indptr": np.arange(11) * 4}


def images(n, width):
    return {"image": N((9 + n, width)), "mask": N((9 + n, width))}


FRAMES = np.zeros((30, 8, 8, 3), "u1")


def in_groups(names, arrays):
    return {f"{name}/{key}": value for at, name in enumerate(names) for key, value in arrays(at).items()}


def episodes(lengths, rewards=()):
    """Episodes of these lengths; those with the numbers in ``rewards`` have rewards."""
    arrays = {}
    for at, n in enumerate(lengths):
        arrays |= {f"data/demo_{at}/actions": N((n, 2)), f"data/demo_{at}/obs/state": N((n, 3))}
        arrays |= {f"data/demo_{at}/rewards": N(n)} if at in rewards else {}
    return arrays


def subjects(numbers):
    """Recordings with names of their own: ``S001/S001R02``. ``numbers``: how many of each subject."""
    names = [f"S00{subject}/S00{subject}R0{run}" for subject, n in enumerate(numbers) for run in range(n)]
    return in_groups(names, lambda at: {"eeg": N((100 + at, 4)), "events": np.arange(100 + at)})


def traces(networks="N"):
    """Traces of stations, as ASDF names them, with their metadata."""
    arrays = {}
    for at in range(4):
        station = f"{networks[at % len(networks)]}T.ST{at}"
        arrays |= {f"Waveforms/{station}/{station}..BH{c}__tag{at}{c}": np.zeros(200 + at, "i4") for c in "ZNE"}
        arrays[f"Waveforms/{station}/StationXML"] = np.zeros(50 + at, "i1")
    return arrays


EPISODES = {"x_key": {"actions": "actions", "state": "obs/state"}}
EEG = {"x_key": {"eeg": "eeg", "events": "events"}}

# Files, and what is said of them: the data module's arguments; None for rows along axis 0.
FILES = {
    "rows in files of several lengths": (
        {f"{n}.h5": {"signal": N((n, 2, 120)), "label": np.arange(n) % 3} for n in (20, 30, 25)},
        None,
    ),
    "columns in groups": (
        {
            "a.h5": {
                f"{group}/{group[0]}_{name}": N(30 + len(group)) for group in ("jets", "muons") for name in "abcdefg"
            }
        },
        None,
    ),
    "splits": ({"a.h5": in_groups(["train", "test"], lambda at: {"x": N((60 - at, 28, 28)), "y": N(60 - at)})}, None),
    "columns of categories": (
        {
            "a.h5": {
                "X": N((30, 5)),
                **in_groups(["obs/a", "obs/b"], codes),
            }
        },
        None,
    ),
    "sparse matrices": (
        {
            "a.h5": {
                "y": N(10),
                **in_groups(["X", "raw"], sparse),
            }
        },
        None,
    ),
    "two cameras and one action": ({"a.h5": {"left/img": FRAMES, "right/img": FRAMES, "action": N((30, 7))}}, None),
    "a time for each visit": ({"a.h5": {"x": N((50, 4)), "time": np.cumsum(abs(N(50)))}}, None),
    "counts that do not add up": ({"a.h5": {"x": N((50, 4)), "count": np.ones(40, int)}}, None),
    "episodes of one length": (
        {f"episode_{n}.hdf5": {"obs/q": N((9, 4)), "action": N((9, 2))} for n in range(3)},
        {"window": {"steps": {"action": [0, 8], "q": 0}, "pad": "edge"}},
    ),
    "groups of several files": (
        {
            f"{n}.h5": in_groups(
                ["data/demo_0", "data/demo_1"],
                lambda at, n=n: {"actions": N((5 + n + at, 2))},
            )
            for n in range(2)
        },
        {"segments": "data/*"},
    ),
    "other groups beside": (
        {"a.h5": {"meta/info": N(3), **in_groups(["traj_0", "traj_1"], lambda at: {"actions": N((5 + at, 2))})}},
        {"segments": "traj_*"},
    ),
    "trajectories by a coordinate": (
        {"a.h5": {"tensor": N((20, 11, 16)), "t-coordinate": np.arange(12.0), "x-coordinate": np.arange(16.0)}},
        {"segments": {"axis": 0, "step_axis": 1}},
    ),
    "a recording per file": (
        {f"{n}.h5": {"eeg": N((4, 300 + n))} for n in range(3)},
        {"segments": {"step_axis": 1}, "window": 256},
    ),
    "one recording": ({"a.h5": {"eeg": N((4, 300))}}, {"segments": {"step_axis": 1}, "window": 256}),
    "years": ({f"{year}.h5": {"fields": N((6, 4, 8, 9))} for year in (1979, 1980)}, {"window": [0, 2]}),
    "an array that one episode lacks, and no suggestion needs": (
        {"a.h5": episodes(range(20, 30), rewards={0, 1, 2, 4, 5, 6, 7, 8, 9})},
        EPISODES | {"segments": "data/*"},
    ),
    "an array that some episodes lack": (
        {"a.h5": episodes(range(20, 30), rewards=range(6))},
        EPISODES | {"segments": "data/*"},
    ),
    "a group among episodes that is none": (
        {"a.h5": episodes(range(20, 30)) | {"data/demo_info/version": N(3)}},
        EPISODES | {"segments": {"groups": "data/*", "missing": "drop"}},
    ),
    "an empty episode": ({"a.h5": episodes([20, 21, 0, 30])}, EPISODES | {"segments": "data/*"}),
    "recordings with names of their own": ({"a.h5": subjects([3, 3, 3])}, EEG | {"segments": "*/*"}),
    "recordings with names of their own, and a subject with one": (
        {"a.h5": subjects([3, 1, 3]) | in_groups([f"S00{n}" for n in range(3)], lambda at: {"age": at})},
        EEG | {"segments": "*/*"},
    ),
    "other groups beside recordings with names of their own": (
        {"a.h5": subjects([3, 2, 3]) | in_groups([f"S00{n}" for n in range(3)], lambda at: {"info/x": N(3)})},
        EEG | {"segments": "*/S*"},
    ),
    "sessions of a few subjects, named by them": (
        {
            "a.h5": in_groups(
                [f"sub-{n // 3}/sub-{n // 3}_ses-{n % 3}" for n in range(12)], lambda at: {"eeg": N((4, 99))}
            )
        },
        {"segments": {"groups": "*/*", "step_axis": 1}, "split": {"val_fraction": 0.15, "group_pattern": PERSON}},
    ),
    "molecules on two levels with names of their own": (
        {
            "a.h5": in_groups(
                [f"s0{size}/s0{size}-{n}" for size in range(3) for n in range(4)],
                lambda at: {"pos": N((9 + at, 5 + at // 4, 3)), "energies": N(9 + at), "z": np.ones(5 + at // 4)},
            )
        },
        {"segments": {"groups": "*/*", "constants": ["z"]}, "sample": "row"},
    ),
    "traces of stations": ({"a.h5": traces()}, {"x_key": "Waveforms/*/NT.ST*", "collate_fn": "pad"}),
    "pairs by number": (
        {"a.h5": {f"{name}{n}": N((10 + n, 4) if name == "X" else 10 + n) for n in range(5) for name in "Xy"}},
        {"x_key": "X*", "y_key": "y*"},
    ),
    "lengths, and a label for each": (
        {"a.h5": {"tokens": np.arange(30), "lengths": np.array([10, 5, 15]), "label": np.array([1, 0, 1])}},
        {"segments": {"lengths": "lengths", "constants": ["label"]}, "sample": "segment"},
    ),
    "offsets, and a label for each": (
        {"a.h5": {"tokens": np.arange(30), "offset": np.array([0, 10, 15]), "label": np.array([1, 0, 1])}},
        {"segments": {"offsets": "offset", "constants": ["label"]}, "sample": "segment"},
    ),
    "numbers of episodes": (
        {"a.h5": {"obs": N((30, 4)), "action": N((30, 2)), "episode": np.repeat([0, 1, 2], 10)}},
        {"segments": {"key": "episode"}},
    ),
    "images of other lengths in each episode, padded": (
        {
            f"episode_{n}.hdf5": {
                "images/top": np.zeros((40, 500 + n), "u1"),
                "action": N((40, 2)),
                "len": np.ones((1, 40)),
            }
            for n in range(3)
        },
        {
            "segments": {"constants": ["len"]},
            "window": {"steps": {"action": [0, 8], "top": 0}, "pad": "edge"},
            "collate_fn": "pad",
        },
    ),
    "a recording at two rates": (
        {f"{n}.h5": {"signals": N((4, 2000 + n)), "resampled": N((4, 1000 + n))} for n in range(3)},
        {"x_key": "signals", "segments": {"step_axis": 1}},
    ),
    "molecules with one atom more than conformations": (
        {
            "a.h5": in_groups(
                ["A", "B"], lambda at: {"pos": N((4 + at, 5 + at, 3)), "z": np.ones(5 + at), "e": N(4 + at)}
            )
        },
        {"segments": {"groups": "*", "constants": ["z"]}, "sample": "row"},
    ),
    "trials of subjects, each with a label": (
        {"a.h5": in_groups(["s1", "s2"], lambda at: {"X": N((9 + at, 4, 50)), "y": np.arange(9 + at) % 2})},
        {"x_key": "X", "y_key": "y", "segments": "*", "sample": "row"},
    ),
    "a name with the word time": (
        {
            f"{n}.h5": {"time_series": N((90 + n, 3)), "time_series@fs": 100, "time": np.arange(90 + n)}
            for n in range(2)
        },
        {"x_key": "time_series"},
    ),
    "a constant of several lengths": (
        {"a.h5": in_groups(["s1", "s2"], lambda at: {"action": N((20 + at, 3)), "goal": N(4 + 2 * at)})},
        {"segments": {"groups": "*", "constants": ["goal"]}, "collate_fn": "pad"},
    ),
    "volumes and their labels": (
        {f"{n}.h5": {"label": N((9, 8 + n, 7)), "raw": N((9, 8 + n, 7))} for n in range(3)},
        {"x_key": "raw", "y_key": "label", "sample": "segment"},
    ),
    "packed integers": (
        {"a.h5": {"t2m": np.zeros((8, 3, 4), "i2"), "t2m@scale_factor": 0.1, "time": np.arange(8)}},
        {"decode": {"t2m": "cf"}},
    ),
    "patients": (
        {
            f"patient{n // 2}_frame{n % 2}.h5": {"image": N((9 + n, 30 - n)), "mask": N((9 + n, 30 - n))}
            for n in range(12)
        },
        {"sample": "segment", "split": {"val_fraction": 0.1, "group_pattern": PERSON}},
    ),
}


def write(folder, files):
    for name, arrays in files.items():
        with h5py.File(folder / name, "w") as file:
            for key, values in arrays.items():
                owner, _, attribute = key.partition("@")
                if attribute:
                    file[owner].attrs[attribute] = values
                else:
                    file[key] = values


def advice_on(folder, files):
    write(folder, files)
    path = folder / next(iter(files))
    return inspect_file(path).advice if len(files) == 1 else inspect_folder(folder).example.advice


@pytest.mark.parametrize("name", FILES)
def test_files_of_no_project_are_recognized_and_rows_stay_rows(tmp_path, name):
    files, expected = FILES[name]
    advice = advice_on(tmp_path, files)
    assert advice.other is None
    for option in ("segments", "window", "sample"):
        if expected is None:
            assert option not in advice.settings
    assert {key: advice.settings[key] for key in expected or {}} == (expected or {})
    first_batch(executed(advice.python))


UNSURE = {
    "files of several lengths": ({f"{n}.h5": {"x": N((n, 12))} for n in (20, 30)}, ("segment", "row")),
    "one image per file, or rows": (
        {f"{n}.h5": {"image": N((9, 9, 4)), "mask": N((9, 9))} for n in range(3)},
        ("segment", "row"),
    ),
    "a label for each step": (
        {"a.h5": in_groups(["s1", "s2"], lambda at: {"X": N((9 + at, 4)), "y": np.arange(9 + at) % 2})},
        ("row", "segment"),
    ),
    "a scalar of each molecule": (
        {"a.h5": in_groups(["m1", "m2", "m3"], lambda at: {"pos": N((9, 3)), "energy": np.float64(at)})},
        ("segment", None),
    ),
    "two groups": ({"a.h5": {"left/x": N((30, 8)), "right/x": N((30, 8))}}, ("segment", None)),
    "arrays of one length": ({"a.h5": {f"x{n}": N((30, 4)) for n in range(3)}}, (None, None)),
    "a wide matrix": ({"a.h5": {"X": N((20, 400))}}, (None, None)),
}


@pytest.mark.parametrize("name", UNSURE)
def test_two_calls_are_printed_in_doubt_and_both_work(tmp_path, name):
    files, samples = UNSURE[name]
    advice = advice_on(tmp_path, files)
    assert (advice.settings.get("sample"), advice.other.settings.get("sample")) == samples
    assert advice.python != advice.other.python
    for each in (advice, advice.other):
        first_batch(executed(each.python))
    text, call, _ = printed(tmp_path if len(files) > 1 else tmp_path / next(iter(files)))
    assert call == advice.python
    assert advice.other.python in text
    assert "not sure" in text


@pytest.mark.parametrize(
    ("arrays", "argument"),
    [
        (in_groups(["r_0", "r_1", "r_2"], lambda at: {"x": N((9, 4)).astype("f4" if at else "f8")}), "segments='*'"),
        (in_groups(["a", "b", "info"], lambda at: {"xxy"[at]: N((9 - at, 4))}), "segments='*'"),
        (in_groups([f"run_{n}" for n in range(3)], lambda at: {"hits": np.zeros(9 + at, "f4,f4")}), "segments='*'"),
        (traces("NAB"), "x_key='Waveforms/*/*'"),
        ({f"g{n}/c{n}": N((9 + n, 4)) for n in range(3)}, "x_key='*/*'"),
    ],
    ids=["dtypes that differ", "another group beside two", "tables", "no common name", "numbered names"],
)
def test_one_of_several_groups_is_never_suggested_without_doubt(tmp_path, arrays, argument):
    advice = advice_on(tmp_path, {"a.h5": arrays})
    assert advice.other.datamodule is None
    first_batch(executed(advice.python))
    text = " ".join(printed(tmp_path / "a.h5")[0].split())
    assert "not sure If that is wrong" in text
    assert "arrays in groups side by side, and the call reads no other" in text
    assert argument in text


@pytest.mark.parametrize("is_attribute", [True, False])
def test_a_number_whose_dtype_differs_between_groups_is_no_field(tmp_path, is_attribute):
    files = in_groups([f"r_{n}" for n in range(12)], lambda at: {"x": N((30 + at, 4))})
    for at in range(12):
        files[f"r_{at}{'@' if is_attribute else '/'}score"] = [1, 0.5][at % 2]
        files[f"r_{at}@label"] = "ab"[at % 2]
    advice = advice_on(tmp_path, {"a.h5": files})
    score = "'@score'" if is_attribute else "'score'"
    for each in (advice, advice.other):
        assert (each.settings["x_key"], each.settings["y_key"]) == ("x", "@label")
        assert f"Not used: {score}, since the dtype is not the same in all" in each.reasons[0]
        first_batch(executed(each.python))


def test_groups_that_lack_an_array_are_left_out_and_counted(tmp_path):
    arrays = in_groups([f"r_{n}" for n in range(12)], lambda at: {"x": N((9, 3, 4)), "label": np.arange(9) % 2})
    del arrays["r_3/label"]
    advice = advice_on(tmp_path, {"a.h5": arrays})
    assert advice.settings["segments"] == {"groups": "*", "missing": "drop"}
    assert "11 of 12 groups have the same arrays" in advice.reasons[0]
    assert "'r_3' lacks 'label': missing='drop' leaves out groups that lack an array." in advice.reasons[0]
    module = executed(advice.python)
    first_batch(module)
    assert sum(len(dataset) for dataset in (module.train_dataset, module.val_dataset)) == 11 * 9


@pytest.mark.parametrize("sides", [[40], [40, 40], [40, 50, 33]])
@pytest.mark.parametrize("varies", [0, 2])
def test_patches_are_advised_for_volumes_of_any_sizes_with_masks(tmp_path, sides, varies):
    for number, side in enumerate(sides):
        shape = [36, 34, 80]
        shape[varies] = side
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            for name in ("raw", "label"):
                file.create_dataset(name, data=np.full(shape, number, "u1"), chunks=(16, 16, 16), compression="gzip")
    advice = (inspect_folder(tmp_path).example if len(sides) > 1 else inspect_file(tmp_path / "0.h5")).advice
    x, y = first_batch(executed(advice.python))
    least = [34 if axis == 1 else 36 for axis in range(2)] + [64]
    least[varies] = min(64, *sides)
    assert x.shape[1:] == y.shape[1:] == tuple(least)
    assert (advice.settings["x_key"], advice.settings["y_key"]) == ("raw", "label")
    assert advice.cost.n_bytes == 2 * np.prod(least)
    first_batch(executed(advice.other.python))


def test_groups_of_groups_have_a_pattern_of_two_levels(tmp_path):
    files = {
        "a.h5": in_groups([f"s{i}/run{j}" for i in range(3) for j in range(2)], lambda at: {"eeg": N((4, 99 + at))})
    }
    advice = advice_on(tmp_path, files)
    assert advice.datamodule == "LazyH5DataModule"
    segments = advice.settings["segments"]
    assert (segments["groups"] if isinstance(segments, dict) else segments) == "*/*"


def test_the_cost_of_a_sample_is_that_of_its_chunks(tmp_path):
    frames = np.zeros((64, 4, 4), "u1")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(2):
            group = file.create_group(f"demo_{number}")
            group.create_dataset("obs", data=frames, chunks=(16, 4, 4), compression="gzip")
            group["actions"] = N((64, 2)).astype("f4")
    cost = inspect_file(tmp_path / "a.h5").advice.cost
    assert (cost.n_samples, cost.n_segments, cost.n_chunks) == (128, 2, 1)
    assert cost.n_bytes == 16 + 8 * 8
    assert cost.bytes_decoded == 16 * 16 + 8 * 8
    assert cost.bytes_decoded_in_chunk_order == 8 * 16 * 16 // 128 + 8 * 8
    text, _, _ = printed(tmp_path / "a.h5")
    assert "128 samples of 2 segments; 80 B each, in 1 chunk." in text


# Keys that would be guessed --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["robomimic", "labram_eeg", "spice", "nwb", "protein_embeddings"])
def test_no_keys_are_guessed_over_groups_or_arrays_side_by_side(tmp_path, name):
    path = PROJECTS[name](tmp_path).arguments["path"]
    with pytest.raises(H5KeyError, match=r"lightning-h5 inspect"):
        LazyH5DataModule(path).setup("fit")


def test_keys_of_two_groups_are_no_input_and_target(tmp_path):
    write(
        tmp_path,
        {"a.h5": {"demo_0/obs": N((30, 4)), "demo_1/reward": N(30)}, "b.h5": {"g/x": N((30, 4)), "g/y": N(30)}},
    )
    with pytest.raises(H5KeyError, match="lightning-h5 inspect"):
        LazyH5DataModule(tmp_path / "a.h5").setup("fit")
    write(tmp_path, {"c.h5": {"s1/eeg": N((4, 9)), "s2/eeg": N((4, 9))}})
    with pytest.raises(H5KeyError, match="lightning-h5 inspect") as refused:
        LazyH5DataModule(tmp_path / "c.h5").setup("fit")
    assert "y_key=" not in str(refused.value)
    with pytest.raises(H5ValueError, match=r"without x_key.*lightning-h5 inspect"):
        LazyH5DataModule(tmp_path / "c.h5", segments="*")
    module = LazyH5DataModule(tmp_path / "b.h5")
    module.setup("fit")
    assert (module.x_key, module.y_key) == ("g/x", "g/y")


def test_images_are_not_taken_for_rows_of_pixels(tmp_path):
    write(tmp_path, UNSURE["one image per file, or rows"][0])
    with pytest.raises(H5ValueError, match="sample='segment'"):
        LazyH5DataModule(tmp_path, x_key=["image", "mask"]).setup("fit")
    with pytest.raises(H5KeyError, match="lightning-h5 inspect"):
        LazyH5DataModule(tmp_path).setup("fit")


def test_bench_measures_the_windows_of_segments(tmp_path):
    path = PROJECTS["robomimic"](tmp_path).arguments["path"]
    report = bench_file(path, seconds=0.01, rounds=1, num_workers=0)
    advice = inspect_file(path).advice
    assert (report.unit, report.n_rows) == ("sample", advice.cost.n_samples)
    assert report.chosen.settings["window"] == advice.settings["window"]


@pytest.mark.parametrize("cut", [{"lengths": "n"}, {"offsets": "first"}, {"ends": "end"}])
def test_each_segment_of_cut_rows_has_its_own_value_of_a_constant(tmp_path, cut):
    lengths, labels, values = np.array([4, 1, 7]), np.array([5, 7, 9]), N((12, 2))
    ends = np.isin(np.arange(12), np.cumsum(lengths) - 1)
    firsts = np.cumsum(lengths) - lengths
    write(tmp_path, {"a.h5": {"x": values, "y": labels, "n": lengths, "first": firsts, "end": ends}})
    for window in (None, 2):
        module = LazyH5DataModule(
            tmp_path / "a.h5",
            x_key={"x": "x", "y": "y"},
            x_dtype=None,
            segments=cut | {"constants": ["y"]},
            window=window,
            collate_fn="list",
            with_index=True,
        )
        batch = first_batch(module)
        assert len(batch["y"]) == (3 if window is None else 2 + 3)
        for x, y in zip(batch["x"], batch["y"], strict=True):
            (row,) = np.flatnonzero((values == x[0].numpy()).all(axis=1))
            assert y == labels[np.searchsorted(firsts, row, side="right") - 1]


NAMES = ["x", "y", "label", "actions", "eeg", "time", "lengths", "indptr", "done", "features", "next_obs", "X1", "X2"]
PLACES = ["", "", "g/", "s1/", "s2/", "data/demo_0/", "data/demo_1/", "s1/r1/", "t0_fields/"]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.wide), pytest.param(3, marks=pytest.mark.wide)])
def test_what_is_printed_works_whatever_the_names_and_shapes(tmp_path, seed):
    rng = np.random.default_rng(seed)
    n_tried = 0
    for number in range(12):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        n_files, sizes = int(rng.integers(1, 4)), [*rng.integers(1, 40, 3), 1, 2, 3]
        names = {f"{rng.choice(PLACES)}{rng.choice(NAMES)}" for _ in range(5)}
        shapes = {name: rng.choice(sizes, rng.integers(1, 5)) for name in sorted(names)}
        for file in range(n_files):
            with h5py.File(folder / f"{file}.h5", "w") as made:
                for name, shape in shapes.items():
                    made[name] = np.floor(rng.random([*(shape[:1] + file), *shape[1:]]) * 3)
        report = inspect_file(folder / "0.h5") if n_files == 1 else inspect_folder(folder).example
        for advice in (report.advice, report.advice.other):
            if advice is not None and advice.cost is not None:
                first_batch(executed(advice.python))
                n_tried += 1
    assert n_tried > 3
