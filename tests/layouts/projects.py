"""Files as projects write them (names, chunks, dtypes, attributes), and the samples that these projects train on.

Each function writes into a folder, and returns the arguments of a data module and the samples, made by h5py and NumPy.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

RNG = np.random.default_rng(20)
GZIP = {"compression": "gzip"}

PROJECTS: dict[str, Callable[[Path], "Layout"]] = {}


@dataclass
class Layout:
    """The arguments of a data module, and the samples in order: dicts, or what ``x_key`` without a mapping gives."""

    arguments: dict[str, Any]
    samples: list[dict[str, Any]]
    are_rows: bool = False


def project(function):
    PROJECTS[function.__name__] = function
    return function


def warning_of(name):
    """Expect the warning that data modules give of a layout, if any."""
    if name == "ragged_by_offsets":
        return pytest.warns(UserWarning, match="1 segment has no steps in at least one field")
    return nullcontext()


def normal(*shape):
    return RNG.standard_normal(shape).astype("f4")


def pixels(*shape):
    return RNG.integers(0, 256, shape).astype("u1")


def padded(array, start, stop, pad):
    """Steps from start to before stop, also beyond the ends."""
    steps = np.arange(start, stop)
    found = array[np.clip(steps, 0, len(array) - 1)]
    return (
        np.where(((steps >= 0) & (steps < len(array))).reshape(-1, *[1] * (array.ndim - 1)), found, 0)
        if pad == "zeros"
        else found
    )


@project
def act_aloha(folder):
    """A file per episode, one frame a chunk; the observation at t, the actions from t on, zero-padded, with a mask."""
    samples = []
    for number, n in enumerate([7, 3, 12]):
        qpos, action, image = normal(n, 14), normal(n, 14), pixels(n, 6, 8, 3)
        with h5py.File(folder / f"episode_{number}.hdf5", "w", rdcc_nbytes=1 << 20) as file:
            file.attrs["sim"] = False
            group = file.create_group("observations")
            group.create_group("images").create_dataset("top", data=image, chunks=(1, 6, 8, 3), **GZIP)
            group["qpos"], group["qvel"], file["action"] = qpos, normal(n, 14), action
        samples += [
            {
                "qpos": qpos[t],
                "image": image[t],
                "action": padded(action, t, t + 5, "zeros"),
                "action_valid": np.arange(t, t + 5) < n,
            }
            for t in range(n)
        ]
    keys = {"qpos": "observations/qpos", "image": "observations/images/top", "action": "action"}
    window = {"steps": {"qpos": 0, "image": 0, "action": [0, 5]}, "pad": "zeros", "mask": True}
    return Layout({"path": str(folder / "*.hdf5"), "x_key": keys, "window": window}, samples)


@project
def robomimic(folder):
    """Groups ``data/demo_i``, sorted as numbers; frames before t and actions after it, the ends repeated."""
    path, demos = folder / "low_dim.hdf5", {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = 31
        for number, n in {0: 9, 1: 1, 10: 16, 2: 5}.items():
            demos[number] = normal(n, 7), pixels(n, 8, 8, 3)
            group = data.create_group(f"demo_{number}")
            group.attrs["num_samples"] = n
            group.create_dataset("actions", data=demos[number][0])
            group.create_dataset("obs/agentview_image", data=demos[number][1], chunks=(min(n, 4), 8, 8, 3), **GZIP)
            group.create_dataset("next_obs/agentview_image", data=demos[number][1], **GZIP)
        file["mask/train"] = np.array([b"demo_0", b"demo_2"])
    samples = [
        {"image": padded(image, t - 1, t + 1, "edge"), "action": padded(action, t, t + 4, "edge")}
        for _, (action, image) in sorted(demos.items())
        for t in range(len(action))
    ]
    keys = {"image": "obs/agentview_image", "action": "actions"}
    window = {"steps": {"image": [-1, 1], "action": [0, 4]}, "pad": "edge"}
    return Layout({"path": str(path), "x_key": keys, "segments": "data/*", "window": window}, samples)


@project
def maniskill(folder):
    """Trajectories with T + 1 observations and T actions."""
    path, samples = folder / "trajectory.h5", []
    with h5py.File(path, "w") as file:
        for number, n in enumerate([6, 4, 9]):
            obs, actions = normal(n + 1, 5), normal(n, 3)
            group = file.create_group(f"traj_{number}")
            group.create_dataset("obs", data=obs, **GZIP)
            group.create_dataset("actions", data=actions, **GZIP)
            samples += [{"obs": obs[t : t + 2], "action": actions[t]} for t in range(n)]
    keys, window = {"obs": "obs", "action": "actions"}, {"obs": [0, 2], "action": 0}
    return Layout({"path": str(path), "x_key": keys, "segments": "traj_*", "window": window}, samples)


@project
def clam(folder):
    """A file per slide: a bag of features of any number, growable, in chunks of one row."""
    samples = []
    for number, n in enumerate([5, 11, 1, 8]):
        features, coords = normal(n, 16), RNG.integers(0, 9999, (n, 2))
        with h5py.File(folder / f"slide_{number:03}.h5", "w") as file:
            file.create_dataset("features", data=features, chunks=(1, 16), maxshape=(None, 16))
            file.create_dataset("coords", data=coords, chunks=(1, 2), maxshape=(None, 2))
        samples.append({"features": features, "coords": coords})
    keys = {"features": "features", "coords": "coords"}
    more = {"sample": "segment", "collate_fn": "list"}
    return Layout({"path": str(folder), "x_key": keys, **more}, samples)


@project
def image_per_file(folder):
    """A file per image, each of another size; image and label are whole arrays."""
    samples = []
    for number, (height, width) in enumerate([(9, 7), (8, 8), (12, 5)]):
        image, label = RNG.random((height, width)), pixels(height, width) % 4
        with h5py.File(folder / f"patient{number:03}_frame01_slice_1.h5", "w") as file:
            file.create_dataset("image", data=image, compression="gzip")
            file.create_dataset("label", data=label, compression="gzip")
        samples.append({"image": image, "label": label})
    keys = {"image": "image", "label": "label"}
    return Layout({"path": str(folder), "x_key": keys, "sample": "segment", "collate_fn": "list"}, samples)


@project
def protein_embeddings(folder):
    """An array of half floats for each accession, of any length."""
    path, samples = folder / "per-residue.h5", []
    arrays = {name: normal(n, 12).astype("f2") for name, n in [("P12345", 9), ("A0A024", 30), ("Q9Y6K9", 2)]}
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values)
    samples = [{"x": arrays[name]} for name in ["A0A024", "P12345", "Q9Y6K9"]]
    return Layout({"path": str(path), "x_key": {"x": "*"}, "collate_fn": "pad"}, samples)


@project
def the_well(folder):
    """Fields of shape (trajectory, step, x, y), a vector field, and constants (x, y)."""
    samples = []
    for number, n_trajectories in enumerate([3, 2]):
        density, velocity, mask = normal(n_trajectories, 8, 4, 6), normal(n_trajectories, 8, 4, 6, 2), normal(4, 6)
        with h5py.File(folder / f"part_{number}.hdf5", "w") as file:
            file.create_dataset("t0_fields/density", data=density, chunks=(1, 3, 4, 6), **GZIP)
            file.create_dataset("t1_fields/velocity", data=velocity)
            file.create_dataset("t0_fields/mask", data=mask)
        samples += [
            {"density": density[i, t : t + 4], "velocity": velocity[i, t : t + 4], "mask": mask}
            for i in range(n_trajectories)
            for t in range(5)
        ]
    keys = {"density": "t0_fields/density", "velocity": "t1_fields/velocity", "mask": "t0_fields/mask"}
    segments = {"axis": {"density": 0, "velocity": 0, "mask": None}, "step_axis": 1, "constants": ["mask"]}
    window = {"length": 4, "stride": 1}
    return Layout({"path": str(folder), "x_key": keys, "segments": segments, "window": window}, samples)


@project
def pdebench_groups(folder):
    """Groups ``0000``, ``0001``, ... with ``data`` (t, x, y, c) and a grid."""
    path, samples = folder / "2D_diff-react.h5", []
    with h5py.File(path, "w") as file:
        for number in range(3):
            data, grid = normal(11, 4, 4, 2), normal(4)
            group = file.create_group(f"{number:04}")
            group.create_dataset("data", data=data, chunks=(5, 4, 4, 2), **GZIP)
            group["grid/x"], group["grid/t"] = grid, np.arange(11, dtype="f4")
            samples += [{"u": data[t : t + 10], "x": grid} for t in range(2)]
    keys, segments = {"u": "data", "x": "grid/x"}, {"groups": "*", "constants": ["x"]}
    return Layout({"path": str(path), "x_key": keys, "segments": segments, "window": [0, 10]}, samples)


@project
def fourcastnet(folder):
    """A file per year of shape (time, channel, lat, lon); pairs of times, some channels, a crop; none across years."""
    samples = []
    for year, n in [(1979, 5), (1980, 6)]:
        fields = normal(n, 5, 9, 8)
        with h5py.File(folder / f"{year}.h5", "w") as file:
            file.create_dataset("fields", data=fields, chunks=(1, 5, 9, 8))
        taken = fields[:, [0, 3, 2]][:, :, :6]
        samples += [{"fields": taken[[t, t + 1]]} for t in range(n - 1)]
    select = {"fields": {1: [0, 3, 2], 2: {"stop": 6}}}
    return Layout({"path": str(folder), "x_key": {"fields": "fields"}, "window": [0, 2], "select": select}, samples)


@project
def fastmri(folder):
    """A file per volume; a sample is a slice with attributes of its file. Coils and widths differ."""
    samples = []
    for number, (n, coils, width) in enumerate([(4, 2, 6), (3, 3, 6), (5, 2, 8)]):
        kspace = (normal(n, coils, 5, width) + 1j * normal(n, coils, 5, width)).astype("c8")
        target = normal(n, 4, 4)
        with h5py.File(folder / f"file100000{number}.h5", "w") as file:
            file.create_dataset("kspace", data=kspace)
            file.create_dataset("reconstruction_rss", data=target)
            file.attrs.update(
                {"max": 0.5 + number, "norm": 2.0, "patient_id": f"p{number}", "acquisition": "CORPD_FBK"}
            )
        samples += [
            {"kspace": kspace[i], "target": target[i], "max": np.float64(0.5 + number), "patient": f"p{number}"}
            for i in range(n)
        ]
    keys = {"kspace": "kspace", "target": "reconstruction_rss", "max": "@max", "patient": "@patient_id"}
    return Layout({"path": str(folder), "x_key": keys, "sample": "row", "collate_fn": "list"}, samples)


@project
def labram_eeg(folder):
    """A group per subject with ``eeg`` (channel, time); windows along axis 1. One recording is a step too short."""
    path, samples = folder / "dataset.hdf5", []
    with h5py.File(path, "w") as file:
        for number, n in enumerate([50, 20, 19, 41]):
            eeg = normal(4, n)
            group = file.create_group(f"subject{number}")
            group.create_dataset("eeg", data=eeg, chunks=(4, 16), **GZIP)
            group["eeg"].attrs["rsFreq"] = 200
            samples += [{"eeg": eeg[:, t : t + 20]} for t in range(0, n - 19, 10)]
    segments, window = {"groups": "subject*", "step_axis": 1}, {"length": 20, "stride": 10}
    return Layout({"path": str(path), "x_key": {"eeg": "eeg"}, "segments": segments, "window": window}, samples)


@project
def spice(folder):
    """A group per molecule; a sample is a conformation. The number of atoms differs."""
    path, samples = folder / "SPICE.hdf5", []
    with h5py.File(path, "w") as file:
        for name, n, atoms in [("CCO", 4, 9), ("c1ccccc1", 6, 12), ("O", 1, 3)]:
            positions, energy, numbers = normal(n, atoms, 3), RNG.random(n), RNG.integers(1, 9, atoms).astype("i2")
            group = file.create_group(name)
            group.create_dataset("conformations", data=positions, **GZIP)
            group["formation_energy"], group["atomic_numbers"] = energy, numbers
        for name in sorted(file):
            group = file[name]
            samples += [
                {"pos": group["conformations"][i], "y": group["formation_energy"][i], "z": group["atomic_numbers"][()]}
                for i in range(len(group["formation_energy"]))
            ]
    keys = {"pos": "conformations", "y": "formation_energy", "z": "atomic_numbers"}
    more = {"sample": "row", "segments": {"groups": "*", "constants": ["z"]}, "collate_fn": "pad"}
    return Layout({"path": str(path), "x_key": keys, **more}, samples)


@project
def molecules(folder):
    """A group for each molecule, with arrays for its atoms, and its energy and name as scalars."""
    path, samples = folder / "molecules.h5", []
    with h5py.File(path, "w") as file:
        for number, n in enumerate([3, 12, 5, 7, 1, 9, 4]):
            group = file.create_group(f"mol_{number}")
            group["positions"], group["numbers"] = positions, numbers = normal(n, 3), RNG.integers(1, 9, n)
            group["energy"], group["smiles"] = -10.5 * n, f"C{n}"
            samples.append({"pos": positions, "z": numbers, "energy": -10.5 * n, "smiles": f"C{n}"})
    keys = {"pos": "positions", "z": "numbers", "energy": "energy", "smiles": "smiles"}
    return Layout({"path": str(path), "x_key": keys, "segments": "mol_*", "collate_fn": "pad"}, samples)


@project
def ml4gw(folder):
    """A file per segment of strain; windows of all detectors at the same time."""
    samples = []
    for number, n in enumerate([300, 170]):
        strain = {name: RNG.standard_normal(n) for name in ("H1", "L1")}
        with h5py.File(folder / f"background-{number}.h5", "w") as file:
            for name, values in strain.items():
                file.create_dataset(name, data=values)
                file[name].attrs["dx"] = 1 / 2048
        samples += [{name: values[t : t + 64] for name, values in strain.items()} for t in range(0, n - 63, 64)]
    return Layout({"path": str(folder), "x_key": {"H1": "H1", "L1": "L1"}, "window": 64}, samples)


@project
def d4rl(folder):
    """Steps of all episodes one after the other, with flags at the last step of each."""
    path, samples = folder / "hopper.hdf5", []
    lengths = [6, 2, 9, 4]  # the last episode is cut off
    n = sum(lengths)
    observations, actions = normal(n, 11), normal(n, 3)
    terminals, timeouts = np.zeros(n, "?"), np.zeros(n, "?")
    terminals[5] = timeouts[7] = terminals[16] = True
    with h5py.File(path, "w") as file:
        for name, values in {"observations": observations, "actions": actions, "terminals": terminals}.items():
            file.create_dataset(name, data=values, compression="gzip")
        file["timeouts"] = timeouts
    for first, last in zip(np.cumsum([0, *lengths[:-1]]), np.cumsum(lengths), strict=True):
        samples += [{"obs": observations[t : t + 3], "action": actions[t : t + 3]} for t in range(first, last - 2)]
    keys, segments = {"obs": "observations", "action": "actions"}, {"ends": ["terminals", "timeouts"]}
    return Layout({"path": str(path), "x_key": keys, "segments": segments, "window": [0, 3]}, samples)


@project
def ragged_by_offsets(folder):
    """Values of all events one after the other, and where each begins."""
    path = folder / "events.h5"
    hits, offsets, label = normal(20, 3), np.array([0, 4, 4, 11, 20]), RNG.integers(0, 3, 20)
    with h5py.File(path, "w") as file:
        file.create_dataset("hits", data=hits, chunks=(6, 3), **GZIP)
        file["indptr"], file["hit_label"] = offsets, label
    samples = [{"hits": hits[a:b], "label": label[a:b]} for a, b in [(0, 4), (4, 11), (11, 20)]]
    keys, more = {"hits": "hits", "label": "hit_label"}, {"sample": "segment", "collate_fn": "pad"}
    return Layout({"path": str(path), "x_key": keys, "segments": {"offsets": "indptr"}, **more}, samples)


@project
def nwb(folder):
    """Series below ``acquisition``, of shape (time, channel), with a conversion factor as an attribute."""
    path, samples = folder / "sub-1_ecephys.nwb", []
    with h5py.File(path, "w") as file:
        for name, n in [("ElectricalSeries", 45), ("Lfp", 30)]:
            data = RNG.integers(-500, 500, (n, 4)).astype("i2")
            group = file.create_group(f"acquisition/{name}")
            group.create_dataset("data", data=data, chunks=(16, 4), maxshape=(None, 4), **GZIP)
            group["data"].attrs["conversion"] = 1e-6 * n
            samples += [{"data": data[t : t + 10], "scale": np.float64(1e-6 * n)} for t in range(0, n - 9, 10)]
    keys = {"data": "data", "scale": "data@conversion"}
    return Layout({"path": str(path), "x_key": keys, "segments": "acquisition/*", "window": 10}, samples)


@project
def monthly_files(folder):
    """A file per month with a time coordinate: pairs of times also across files, not across a gap."""
    samples, fields, hours = [], [], []
    for month, (first, n) in enumerate([(0, 4), (24, 3), (60, 5)]):  # the second one follows the first
        values, times = normal(n, 3, 4), first + 6 * np.arange(n, dtype="f8")
        with h5py.File(folder / f"era5_2020{month + 1:02}.nc", "w") as file:
            file.create_dataset(
                "t2m", data=values, chunks=(1, 3, 4), compression="gzip", shuffle=True, maxshape=(None, 3, 4)
            )
            file.create_dataset("time", data=times, maxshape=(None,))
        fields.append(values)
        hours.append(times)
    values, times = np.concatenate(fields), np.concatenate(hours)
    samples = [{"t2m": values[[t, t + 1]]} for t in range(len(values) - 1) if times[t + 1] - times[t] == 6]
    more = {"segments": {"join": "time"}, "window": [0, 2]}
    return Layout({"path": str(folder / "*.nc"), "x_key": {"t2m": "t2m"}, **more}, samples)


@project
def matlab(folder):
    """A user block, and samples along the last axis."""
    path = folder / "train.mat"
    x, y = pixels(4, 10, 23), pixels(5, 23)
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("trainxdata", data=x, chunks=(4, 10, 6), **GZIP)
        file.create_dataset("traindata", data=y, chunks=(5, 23), **GZIP)
    samples = [{"x": x[..., i], "y": y[..., i]} for i in range(23)]
    keys, segments = {"x": "trainxdata", "y": "traindata"}, {"step_axis": -1}
    return Layout({"path": str(path), "x_key": keys, "segments": segments, "sample": "row"}, samples)


@project
def matlab_cells(folder):
    """Cells of MATLAB, references to arrays with reversed axes, so that steps are the last one; a label for each."""
    path, samples, labels = folder / "recordings.mat", [], RNG.integers(0, 3, 11).astype("f8")
    with h5py.File(path, "w", userblock_size=512) as file:
        refs = file.create_group("#refs#")
        refs.create_dataset("a", data=np.zeros(2, "u8")).attrs["MATLAB_empty"] = np.uint8(1)
        cells = file.create_dataset("recordings", (1, 11), h5py.ref_dtype)
        cells.attrs["MATLAB_class"] = np.bytes_("cell")
        for at, label in enumerate(labels):
            n = int(RNG.integers(5, 30))
            options = {"chunks": (3, 4), **GZIP} if at % 2 else {}
            array = refs.create_dataset("bcdefghijkl"[-at], data=RNG.standard_normal((3, n)), **options)
            array.attrs["MATLAB_class"] = np.bytes_("double")
            cells[0, at] = array.ref
            samples.append({"x": array[()], "label": label})
        file["labels"] = labels[None]
    keys, segments = {"x": "recordings", "label": "labels"}, {"step_axis": -1}
    return Layout({"path": str(path), "x_key": keys, "segments": segments, "collate_fn": "pad"}, samples)


def places(shape, sizes, strides):
    """Where patches start, the last of an axis moved back to the edge."""
    axes = [
        sorted({*range(0, n - size + 1, stride), n - size})
        for n, size, stride in zip(shape, sizes, strides, strict=True)
    ]
    return list(itertools.product(*axes))


@project
def cremi(folder):
    """An electron microscopy volume per file, with 64-bit labels in other chunks; overlapping patches of both."""
    samples = []
    for name, shape in {"sample_A": (9, 30, 33), "sample_B": (6, 24, 40), "sample_C": (3, 30, 30)}.items():
        raw, labels = pixels(*shape), RNG.integers(0, 2**40, shape).astype("u8")
        with h5py.File(folder / f"{name}.hdf", "w") as file:
            volumes = file.create_group("volumes")
            volumes.create_dataset("raw", data=raw, chunks=(3, 16, 16), **GZIP).attrs["resolution"] = [40.0, 4.0, 4.0]
            volumes.create_dataset("labels/neuron_ids", data=labels, chunks=(2, 8, 20), shuffle=True, **GZIP)
        for z, y, x in places(shape, (4, 16, 16), (2, 8, 16)) if shape[0] >= 4 else ():
            inside = slice(z, z + 4), slice(y, y + 16), slice(x, x + 16)
            samples.append({"raw": raw[inside], "labels": labels[inside].astype("i8")})
    keys = {"raw": "volumes/raw", "labels": "volumes/labels/neuron_ids"}
    patch = {"shape": [4, 16, 16], "stride": [2, 8, 16]}
    return Layout(
        {"path": str(folder / "*.hdf"), "x_key": keys, "patch": patch, "x_dtype": {"labels": "int64"}}, samples
    )


@project
def brats(folder):
    """A case per group: four MRI sequences as the first axis, a segmentation without such an axis, an age; padded."""
    path, cases = folder / "brats.h5", {}
    with h5py.File(path, "w") as file:
        for number, shape in {0: (12, 14, 10), 2: (7, 14, 16), 10: (12, 9, 10)}.items():
            cases[number] = normal(4, *shape), RNG.integers(0, 4, shape).astype("u1")
            group = file.create_group(f"cases/case_{number}")
            group.create_dataset("image", data=cases[number][0], chunks=(1, 6, 7, 8), **GZIP)
            group.create_dataset("seg", data=cases[number][1])
            group.attrs["age"] = 40.5 + number
    samples = []
    for number, (image, seg) in sorted(cases.items()):
        whole = [np.pad(each, [(0, 0)] * (each.ndim - 3) + [(0, 8)] * 3) for each in (image, seg)]
        for place in itertools.product(*(range(0, max(n - 8, 0) + 8, 8) for n in seg.shape)):
            if any(at >= n for at, n in zip(place, seg.shape, strict=True)):
                continue
            inside = tuple(slice(at, at + 8) for at in place)
            samples.append({"image": whole[0][:, *inside], "seg": whole[1][inside], "age": 40.5 + number})
    arguments = {
        "path": str(path),
        "x_key": {"image": "image", "seg": "seg", "age": "@age"},
        "segments": "cases/*",
        "patch": {"shape": {"image": [None, 8, 8, 8], "seg": [8, 8, 8]}, "border": "pad"},
    }
    return Layout(arguments, samples)


@project
def cell_tracking(folder):
    """Frames of a movie of cells, which are volumes each; one of two channels, and half the resolution in y."""
    path, movie, masks = folder / "movie.h5", pixels(5, 2, 8, 20, 18), RNG.integers(0, 99, (5, 8, 10, 18)).astype("u2")
    with h5py.File(path, "w") as file:
        file.create_dataset("raw", data=movie, chunks=(2, 1, 8, 9, 9), **GZIP)
        file.create_dataset("masks", data=masks, chunks=(1, 8, 10, 18), compression="lzf")
    samples = [
        {"raw": raw[1, :, ::2][:, y : y + 6, x : x + 9], "masks": mask[:, y : y + 6, x : x + 9].astype("i4")}
        for raw, mask in zip(movie, masks, strict=True)
        for y, x in itertools.product((0, 4), (0, 9))
    ]
    arguments = {
        "path": str(path),
        "x_key": {"raw": "raw", "masks": "masks"},
        "x_dtype": {"masks": "int32"},
        "segments": {"axis": 0},
        "select": {"raw": {1: 1, 3: {"step": 2}}},
        "patch": {"shape": [None, 6, 9]},
    }
    return Layout(arguments, samples)
