"""Files whose labels are in tables or other files, or whose values are decoded: see ``projects``."""

import h5py
import numpy as np
from projects import GZIP, RNG, Layout, normal, pixels, project


@project
def era5_packed(folder):
    """A file per month as netCDF-4 writes it: integers with a scale and an offset of that month, and missing values."""
    samples = []
    for month, n in enumerate([13, 8]):
        stored, scale, offset = RNG.integers(-3000, 3000, (n, 5, 6)).astype("i2"), 0.0017 + month / 1000, 273.15
        with h5py.File(folder / f"era5_{month}.nc", "w") as file:
            file.attrs["_NCProperties"] = "version=2,netcdf=4.9.2,hdf5=1.14.3"
            t2m = file.create_dataset("t2m", data=stored, chunks=(1, 5, 6), shuffle=True, **GZIP)
            t2m.attrs.update({"scale_factor": scale, "add_offset": offset, "_FillValue": stored[0, 0, 0]})
        values = np.where(stored == stored[0, 0, 0], np.nan, stored * scale + offset).astype("f4")
        samples += [{"t2m": value} for value in values]
    return Layout({"path": str(folder / "*.nc"), "x_key": {"t2m": "t2m"}, "sample": "row"}, samples, are_rows=True)


@project
def photos(folder):
    """PNG files as lists of bytes; names and labels in a CSV file, in another order."""
    import imagecodecs

    images, order = [pixels(6, 8, 3) for _ in range(11)], RNG.permutation(11).tolist()
    with h5py.File(folder / "photos.h5", "w") as file:
        array = file.create_dataset("images", (11,), h5py.vlen_dtype("u1"), chunks=(3,))
        for row, image in enumerate(images):
            array[row] = np.frombuffer(imagecodecs.png_encode(image), "u1")
        file["name"] = np.array([f"{row}.png" for row in range(11)], dtype=h5py.string_dtype())
    lines = ["file,label,score", *(f"{row}.png,{row % 3},{row / 4}" for row in order)]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    samples = [
        {"image": image.transpose(2, 0, 1), "y": np.int64(row % 3), "score": np.float64(row / 4)}
        for row, image in enumerate(images)
    ]
    keys = {"image": "images", "y": "table/label", "score": "table/score"}
    table = {"path": str(folder / "labels.csv"), "on": {"file": "name"}}
    more = {"decode": {"image": "image"}, "table": table}
    return Layout({"path": str(folder / "photos.h5"), "x_key": keys, **more}, samples, are_rows=True)


@project
def volumes_of_patients(folder):
    """A file per patient, each a sample; age and outcome in a TSV file that names the patient as the file does."""
    samples, lines = [], ["patient\tage\toutcome"]
    for number in range(5):
        volume = normal(3, 4, 5)
        with h5py.File(folder / f"patient{number}.h5", "w") as file:
            file.create_dataset("ct", data=volume, chunks=(1, 4, 5), **GZIP)
        lines.append(f"patient{number}\t{40 + number}\t{number % 2}")
        samples.append({"ct": volume, "age": np.int64(40 + number), "y": np.int64(number % 2)})
    (folder / "patients.tsv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    keys = {"ct": "ct", "age": "table/age", "y": "table/outcome"}
    more = {"sample": "segment", "table": {"path": str(folder / "patients.tsv"), "on": {"patient": "@stem"}}}
    return Layout({"path": str(folder / "*.h5"), "x_key": keys, **more}, samples)


@project
def label_file(folder):
    """Spectra in one file, their targets in another one, row by row."""
    spectra, targets = normal(19, 7), normal(19, 2)
    with h5py.File(folder / "spectra.h5", "w") as file:
        file.create_dataset("x", data=spectra, chunks=(4, 7), **GZIP)
    with h5py.File(folder / "targets.h5", "w") as file:
        file.create_dataset("y", data=targets, chunks=(5, 2), **GZIP)
    keys = {"x": "x", "y": {"path": str(folder / "targets.h5"), "key": "y"}}
    samples = [{"x": x, "y": y} for x, y in zip(spectra, targets, strict=True)]
    return Layout({"path": str(folder / "spectra.h5"), "x_key": keys}, samples, are_rows=True)


@project
def jets(folder):
    """Tracks of jets as a table of members, of which some become a matrix."""
    tracks = np.zeros((23, 5), [("pt", "f4"), ("eta", "f8"), ("charge", "i1"), ("valid", "?")])
    for name in ("pt", "eta"):
        tracks[name] = normal(23, 5)
    tracks["charge"], tracks["valid"] = RNG.integers(-1, 2, (23, 5)), RNG.integers(0, 2, (23, 5))
    with h5py.File(folder / "jets.h5", "w") as file:
        file.create_dataset("tracks", data=tracks, chunks=(4, 5), compression="lzf")
        file["flavour"] = np.arange(23) % 3
    members = ["pt", "eta", "charge"]
    keys = {"tracks": [f"tracks/{name}" for name in members], "valid": "tracks/valid", "flavour": "flavour"}
    stacked = np.stack([tracks[name].astype("f4") for name in members], axis=-1)
    samples = [
        {"tracks": stacked[row], "valid": tracks["valid"][row], "flavour": np.int64(row % 3)} for row in range(23)
    ]
    return Layout({"path": str(folder / "jets.h5"), "x_key": keys}, samples, are_rows=True)


@project
def bits_and_waves(folder):
    """Packed bits as genomics has them, and complex numbers as microscopes and scanners have them."""
    bits, waves = RNG.integers(0, 2, (17, 21)).astype("u1"), (normal(17, 3) + 1j * normal(17, 3)).astype("c8")
    with h5py.File(folder / "signals.h5", "w") as file:
        file.create_dataset("bits", data=np.packbits(bits, axis=-1), chunks=(4, 3), **GZIP)
        file.create_dataset("waves", data=waves, chunks=(5, 3), **GZIP)
        file["raw"] = waves
    samples = [
        {"bits": b, "waves": np.stack([w.real, w.imag], axis=-1), "raw": w} for b, w in zip(bits, waves, strict=True)
    ]
    keys, decode = {name: name for name in ("bits", "waves", "raw")}, {"bits": "bits:21", "waves": "real"}
    return Layout({"path": str(folder / "signals.h5"), "x_key": keys, "decode": decode}, samples, are_rows=True)


@project
def slices_of_buckets(folder):
    """Waveforms as slices of buckets, which a CSV file names, as SeisBench writes them."""
    samples, lines = [], ["trace_name,magnitude"]
    buckets = {"bucket0": normal(4, 3, 30), "bucket1": normal(3, 3, 24)}
    with h5py.File(folder / "waveforms.hdf5", "w") as file:
        for name, values in buckets.items():
            file.create_dataset(f"data/{name}", data=values, chunks=(1, 3, 12), **GZIP)
            for at in range(len(values)):
                n = values.shape[-1] - 4 * at
                lines.append(f'"{name}${at},:3,:{n}",{at / 2}')
                samples.append({"x": values[at, :, :n], "magnitude": np.float64(at / 2)})
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    table = {"path": str(folder / "metadata.csv"), "on": {"trace_name": "@name"}}
    more = {"table": table, "collate_fn": "pad", "sample": "segment", "segments": {"axis": 0, "step_axis": 2}}
    return Layout(
        {"path": str(folder / "waveforms.hdf5"), "x_key": {"x": "data/*", "magnitude": "table/magnitude"}, **more},
        samples,
    )
