"""What do decoded values cost beside those that are read as they are stored?

    python examples/benchmarks/values.py [--rounds 5] [--json FILE]

times shuffled epochs of `LazyH5DataModule`, with so little memory for decoded chunks that each is decoded in every
epoch: packed integers of the CF conventions (times x 181 x 360, gzip and shuffle) as they are stored, the same cast to
float32, which writes as many bytes as decoding, decoded, and decoded and normalized; the same without compression; and
a table of 12 members (LZF, chunks of 100 rows of 40), of which one and six are stacked. All take turns; ratios are of
medians, to the first of each case.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import h5py
import numpy as np

from lightning_h5 import LazyH5DataModule
from lightning_h5.datasets.normalize import write_stats

N_TIMES = 720
MEMBERS = [f"m{number}" for number in range(12)]


def write(path: str) -> None:
    """Write the arrays."""
    rng = np.random.default_rng(0)
    time, lat, lon = np.meshgrid(
        np.arange(N_TIMES), np.linspace(0, 9, 181), np.linspace(0, 9, 360), indexing="ij", sparse=True
    )
    weather = (
        np.sin(lat + time / 9) * 5_000 + np.cos(lon * 2 - time / 5) * 3_000 + rng.normal(size=(N_TIMES, 181, 360)) * 5
    )
    packed = weather.astype("i2")
    tracks = np.zeros((120_000, 40), [(name, "f4") for name in MEMBERS])
    for name in MEMBERS:
        tracks[name] = np.round(rng.normal(size=tracks.shape), 2)
    with h5py.File(path, "w") as file:
        file.create_dataset("gzip", data=packed, chunks=(4, 181, 360), compression="gzip", shuffle=True)
        file["plain"] = packed
        file.create_dataset("numbers_gzip", data=packed, chunks=(4, 181, 360), compression="gzip", shuffle=True)
        file["numbers_plain"] = packed
        for name in ("gzip", "plain"):
            file[name].attrs.update({"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-32767)})
        file.create_dataset("tracks", data=tracks, chunks=(100, 40), compression="lzf")


def packed(key: str) -> dict[str, dict[str, Any]]:
    """Return the ways in which an array of packed integers is read."""
    decoded = {"x_key": key, "decode": {key: "cf"}}
    return {
        "as stored": {"x_key": key, "x_dtype": "int16"},
        "cast": {"x_key": f"numbers_{key}", "x_dtype": "float32"},  # without attributes
        "decoded": decoded,
        "normalized": {**decoded, "normalize": f"{key}.json"},
    }


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "packed integers, gzip": packed("gzip"),
    "packed integers, contiguous": packed("plain"),
    "members of a table": {
        "one": {"x_key": {"x": ["tracks/m0"]}},
        "six": {"x_key": {"x": [f"tracks/{name}" for name in MEMBERS[:6]]}},
    },
}
ASKED = {"packed integers, gzip": 1.1, "members of a table": 1.3}


def epoch_seconds(module: LazyH5DataModule, epoch: int) -> float:
    """Return the seconds of an epoch."""
    loader = module.train_dataloader()
    loader.sampler.set_epoch(epoch)
    began = perf_counter()
    for _ in loader:
        pass
    return perf_counter() - began


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/values.h5"
        write(path)
        for key in ("gzip", "plain"):
            write_stats(f"{folder}/{key}.json", {key: {"mean": 280.0, "std": 15.0}})
        for title, ways in CASES.items():
            modules = {}
            for name, arguments in ways.items():
                is_table = "table" in title
                if "normalize" in arguments:
                    arguments = {**arguments, "normalize": f"{folder}/{arguments['normalize']}"}
                modules[name] = LazyH5DataModule(
                    path,
                    batch_size=64 if is_table else 8,
                    files={"cache_bytes": "8 MiB"},
                    shuffle={"mode": "chunks", "buffer": "4 MiB"},
                    **arguments,
                )
                modules[name].setup("fit")
                epoch_seconds(modules[name], 0)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(given.rounds):
                for name, module in modules.items():
                    times[name].append(epoch_seconds(module, number + 1))
            found[title] = {name: median(each) for name, each in times.items()}
            first = next(iter(found[title].values()))
            ratios = ", ".join(f"{name} {found[title][name] / first:.2f}" for name in list(ways)[1:])
            asked = f" (asked: at most {ASKED[title]:g})" if title in ASKED else ""
            print(f"{title:28} {next(iter(ways))} {first:.3f} s; {ratios}{asked}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
