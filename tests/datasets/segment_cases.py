"""Files whose steps belong together in some way, and the samples that plain NumPy makes of them."""

import itertools

import h5py
import numpy as np
from hypothesis import strategies as st

NUMBERS = itertools.count()  # no example writes to a file that is open

CUTS = {
    "lengths": {"lengths": "lengths"},
    "offsets": {"offsets": "offsets"},
    "flags": {"ends": ["terminal", "timeout"]},
    "ends": {"ends": "ends"},
    "spans": {"spans": "spans"},
}
KINDS = ["groups", "levels", "arrays", "files", "axis", *CUTS, "key", "scattered"]
STORAGE = [
    {},
    {"compression": "gzip"},
    {"compression": "gzip"},
    {"compression": "lzf", "shuffle": True},
    {"chunked": True},
    {"fletcher32": True},
]


def write_array(group, name, values, storage, chunks):
    """Writes an array in chunks of about so many of each axis, or as one piece."""
    options = dict(storage)
    if options.pop("chunked", False) or options:
        options["chunks"] = tuple(max(1, min(n, c)) for n, c in zip(values.shape, itertools.cycle(chunks)))
    if 0 in values.shape:
        options = {}
    group.create_dataset(name, data=values, **options)


class Case:
    """How segments are stored: ``files`` are written, ``keys`` and ``segments`` are the arguments that name them.

    ``arrays`` has each segment's arrays by field, with their axes as stored but for that of segments, and
    ``step_axes`` the axis of the steps in these; None for a field without any.
    """

    def __repr__(self):
        return f"Case({self.keys}, {self.segments}, {self.files})"

    def __init__(self, files, keys, segments, arrays, step_axes, names):
        self.files, self.keys, self.segments = files, keys, segments
        self.arrays, self.step_axes, self.names = arrays, step_axes, names


@st.composite
def layouts(draw, folder):
    """A case of a random kind: groups, an array each, files, an axis, or rows that are cut by other arrays."""
    how = draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    storage = {field: draw(st.sampled_from(STORAGE)) for field in ("a", "b", "c")}
    chunks = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    make = {"groups": of_groups, "levels": of_groups, "arrays": of_arrays, "files": of_files, "axis": of_axis}.get(
        how, of_rows
    )
    return make(draw, folder, rng, storage, chunks, how)


def numbers(rng, shape):
    return rng.integers(-1000, 1000, shape).astype(rng.choice(["f4", "i2", "f8"]))


def of_parts(draw, rng):
    """Fields of segments with arrays of their own: steps along any axis, one of them with a step more or fewer."""
    n_segments = draw(st.integers(1, 5))
    more = draw(st.sampled_from([0, 0, 1, -1]))
    axis_a, axis_b = draw(st.sampled_from([0, 0, 1])), draw(st.sampled_from([0, 0, 2]))
    types = rng.choice(["f4", "i2", "f8"], 3)
    segments = []
    for _ in range(n_segments):
        n = draw(st.integers(1, 9))
        a = np.moveaxis(rng.integers(-1000, 1000, (n, 3)), 0, axis_a).astype(types[0])
        b = np.moveaxis(rng.integers(-1000, 1000, (max(0, n + more), 2, 2)), 0, axis_b).astype(types[1])
        segments.append({"a": a, "b": b, "c": rng.integers(-9, 9, (2,)).astype(types[2])})
    options = {"step_axis": {"a": axis_a, "b": axis_b}, "constants": ["c"]}
    return segments, {"a": axis_a, "b": axis_b, "c": None}, options


def of_groups(draw, folder, rng, storage, chunks, how):
    segments, axes, options = of_parts(draw, rng)
    paths, names = [], []
    n_files = min(len(segments), draw(st.integers(1, 2)))
    above = {number: "data" if how == "groups" else f"data/lab_{number // 10}" for number in (9, 10, 11, 100, 101)}
    of_file = [segments[start::n_files] for start in range(n_files)]
    for here in of_file:
        paths.append(str(folder / f"{next(NUMBERS)}.h5"))
        order = [9, 10, 11, 100, 101][: len(here)]  # as text 10 comes before 9
        with h5py.File(paths[-1], "w", track_order=draw(st.booleans())) as file:
            file["data/total"] = 3
            for number, arrays in sorted(zip(order, here, strict=True), key=lambda one: str(one[0])):
                group = file.create_group(f"{above[number]}/demo_{number}")
                for field, values in arrays.items():
                    write_array(group, f"x/{field}", values, storage[field], chunks)
    segments = [one for here in of_file for one in here]
    names = [f"{above[at]}/demo_{at}" for here in of_file for at in [9, 10, 11, 100, 101][: len(here)]]
    keys = {field: f"x/{field}" for field in "abc"}
    pattern = "data/demo_*" if how == "groups" else "data/lab_*/demo_*"
    return Case(paths, keys, {"groups": pattern, **options}, segments, axes, names)


def of_arrays(draw, folder, rng, storage, chunks, how):
    segments, axes, options = of_parts(draw, rng)
    path = str(folder / f"{next(NUMBERS)}.h5")
    with h5py.File(path, "w") as file:
        for number, arrays in enumerate(segments, 8):
            for field, values in arrays.items():
                write_array(file, f"{field}/X{number}", values, storage[field], chunks)
    names = [f"a/X{number}" for number in range(8, 8 + len(segments))]
    return Case([path], {field: f"{field}/X*" for field in "abc"}, options, segments, axes, names)


def of_files(draw, folder, rng, storage, chunks, how):
    segments, axes, options = of_parts(draw, rng)
    paths = []
    for arrays in segments:
        paths.append(str(folder / f"{next(NUMBERS):06}.h5"))
        with h5py.File(paths[-1], "w") as file:
            for field, values in arrays.items():
                write_array(file, field, values, storage[field], chunks)
    names = [path.rsplit("/", 1)[1] for path in paths]
    return Case(paths, {field: field for field in "abc"}, options, segments, axes, names)


def of_axis(draw, folder, rng, storage, chunks, how):
    """Each index along axis 0 or 1 is a segment; fields differ in steps, and one has no steps."""
    axis, step_axis = draw(st.sampled_from([(0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]))
    more = draw(st.sampled_from([0, 0, 1]))
    paths, segments, names = [], [], []
    for _ in range(draw(st.integers(1, 2))):
        n_segments, n = draw(st.integers(1, 4)), draw(st.integers(1, 7))
        (other,) = {0, 1, 2} - {axis, step_axis}
        paths.append(str(folder / f"{next(NUMBERS):06}.h5"))
        whole = {}
        for field, n_steps in (("a", n), ("b", n + more)):
            shape = [0, 0, 0]
            shape[axis], shape[step_axis], shape[other] = n_segments, n_steps, 2
            whole[field] = rng.integers(-1000, 1000, shape).astype("f4")
        whole["c"] = rng.integers(-9, 9, (n_segments, 3)).astype("i2")
        with h5py.File(paths[-1], "w") as file:
            for field, values in whole.items():
                write_array(file, field, values, storage[field], chunks)
        for number in range(n_segments):
            arrays = {field: np.take(whole[field], number, axis=axis) for field in "ab"}
            segments.append({**arrays, "c": whole["c"][number]})
            names.append(paths[-1].rsplit("/", 1)[1] + (f"[{number}]" if n_segments > 1 else ""))
    inside = step_axis - (axis < step_axis)
    options = {"axis": {"a": axis, "b": axis, "c": 0}, "step_axis": {"a": step_axis, "b": step_axis, "c": None}}
    axes = {"a": inside, "b": inside, "c": None}
    return Case(paths, {field: field for field in "abc"}, options, segments, axes, names)


def of_rows(draw, folder, rng, storage, chunks, how):
    """Consecutive rows, cut by their number, first rows, flags at the last one, or a value."""
    paths, segments, names = [], [], []
    number = 0
    for _ in range(1 if how == "scattered" else draw(st.integers(1, 2))):
        lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
        n = sum(lengths)
        a = rng.integers(-1000, 1000, (n, 3)).astype("f4")
        b = rng.integers(-1000, 1000, n).astype("i8")
        has_value_a_segment = how in CUTS
        c = rng.integers(0, 9, len(lengths)) if has_value_a_segment else rng.integers(-9, 9, (2, 2)).astype("i2")
        groups = np.repeat(np.arange(number, number + len(lengths)), lengths)
        places = rng.permutation(n) if how == "scattered" else np.arange(n)
        paths.append(str(folder / f"{next(NUMBERS):06}.h5"))
        with h5py.File(paths[-1], "w") as file:
            for field, values in {"a": a[places], "b": b[places], "c": c}.items():
                write_array(file, field, values, storage[field], chunks)
            ends = np.cumsum(lengths)
            file["lengths"], file["ends"] = lengths, ends
            file["spans"] = np.stack([ends - lengths, ends], axis=1)
            file["offsets"] = [0, *ends] if draw(st.booleans()) else [0, *ends[:-1]]
            flags = np.zeros((2, n), "?")
            flags[rng.integers(0, 2, len(ends)), ends - 1] = True
            if draw(st.booleans()):
                flags[:, -1] = False  # the last one is cut off
            file["terminal"], file["timeout"] = flags
            file["key"] = np.char.add("s", groups[places].astype(str)).astype("S9")
        if how == "scattered":
            order = list(dict.fromkeys(groups[places].tolist()))
            rows = [np.flatnonzero(groups[places] == group) for group in order]
            segments += [{"a": a[places][here], "b": b[places][here], "c": c} for here in rows]
        else:
            cuts = np.split(np.arange(n), ends[:-1])
            segments += [
                {"a": a[here], "b": b[here], "c": c[at] if has_value_a_segment else c} for at, here in enumerate(cuts)
            ]
        name = paths[-1].rsplit("/", 1)[1]
        names += [name + (f"[{at}]" if len(lengths) > 1 else "") for at in range(len(lengths))]
        number += len(lengths)
    options = {**CUTS.get(how, {"key": "key"}), "constants": ["c"]}
    axes = {"a": 0, "b": 0, "c": None}
    return Case(paths, {field: field for field in "abc"}, options, segments, axes, names)


def expected_windows(case, ranges, *, stride=1, pad=None):
    """The samples, as dicts of arrays, masks, the segment's name and the step.

    ``ranges`` has for each field with steps a list of relative steps, or a number.
    """
    samples = []
    fields = [field for field, axis in case.step_axes.items() if axis is not None]
    for arrays, name in zip(case.arrays, case.names, strict=True):
        n = {field: arrays[field].shape[case.step_axes[field]] for field in fields}
        offsets = {field: list(np.atleast_1d(ranges[field])) for field in fields}
        steps = [
            t
            for t in range(min(n.values()))
            if pad or all(0 <= t + offset < n[field] for field in fields for offset in offsets[field])
        ]
        for t in steps[::stride]:
            sample = {"segment": name, "step": t}
            for field, values in arrays.items():
                if (axis := case.step_axes[field]) is None:
                    sample[field] = values
                    continue
                wanted = np.array([t + offset for offset in offsets[field]])
                valid = (wanted >= 0) & (wanted < n[field])
                taken = np.moveaxis(np.take(values, np.clip(wanted, 0, n[field] - 1), axis=axis), axis, 0).copy()
                if pad == "zeros":
                    taken[~valid] = 0
                is_single = np.ndim(ranges[field]) == 0
                sample[field] = taken[0] if is_single else np.moveaxis(taken, 0, axis)
                sample[f"{field}_valid"] = valid[0] if is_single else valid
            samples.append(sample)
    return samples
