"""Draws what one sample of each page of the gallery looks like.

    python docs/pictures.py

writes small files of each community, as the benchmarks do, takes a sample of the call on its page, and draws its fields
into `docs/_parts/samples/NAME.html`. The pictures take the theme's colours, light and dark.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parent
FOLDER = DOCS / "_parts" / "samples"
SIZE = 0.03  # of the files; those of the measurements are 1
SIZES = {"fastmri": 1.0}  # whose slices are smaller in smaller files
WIDTH, GLYPH, GAP, CELLS, BARS, SHADES = 360, 132, 14, (12, 20), 44, 6
AXES = {
    "robomimic": {
        "image": "steps, y, x, RGB",
        "pos": "steps, coordinates",
        "actions": "steps, joints",
    },
    "aloha": {
        "image": "y, x, RGB",
        "qpos": "joints",
        "action": "steps, joints",
        "action_valid": "steps",
    },
    "the_well": {
        "density": "steps, x, y",
        "pressure": "steps, x, y",
        "velocity": "steps, x, y, components",
        "tcool": "a constant of the run",
    },
    "pdebench": {"u": "steps, x, y, quantities"},
    "era5": {"fields": "steps, channels, latitude, longitude"},
    "fastmri": {
        "kspace": "coils, y, x, (real, imag)",
        "target": "y, x",
        "max": "attribute of the file",
    },
    "volumes": {"raw": "z, y, x", "label": "z, y, x"},
    "clam": {
        "features": "patches, features",
        "coords": "patches, (x, y)",
        "label": "class of the slide",
    },
    "labram": {"eeg": "channels, time"},
    "cells": {"X": "genes", "obs/cell_type": "code of the type"},
    "tenx": {"matrix": "genes"},
    "prott5": {"embedding": "residues, features", "target": "locations"},
    "spice": {
        "z": "atoms",
        "pos": "atoms, (x, y, z)",
        "gradient": "atoms, (x, y, z)",
        "dft_total_energy": "energy",
    },
    "salt": {
        "jets": "variables",
        "tracks": "tracks, variables",
        "valid": "tracks",
        "jets/flavour_label": "flavour",
    },
    "ml4gw": {"H1": "time", "L1": "time"},
}
"""The axes of each field of a sample, by pages."""


def fields_of(
    sample: Any, options: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield name and values of each field of a sample, whichever form it has."""
    if isinstance(sample, tuple | list):
        for value, key in zip(sample, ("x_key", "y_key"), strict=False):
            yield from fields_of(value, {"x_key": options[key]})
    elif isinstance(sample, Mapping):
        for name, value in sample.items():
            if not isinstance(value, str) and name not in ("index", "step", "length"):
                yield name, np.asarray(value)
    else:
        yield options["x_key"], np.asarray(sample)


def reduced(
    values: np.ndarray[Any, Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Values at places spread over an array, from 0 to 1."""
    places = [
        np.linspace(0, n - 1, min(n, most)).astype(int)
        for n, most in zip(values.shape, shape, strict=True)
    ]
    found = np.nan_to_num(values[np.ix_(*places)].astype(float))
    least, most = found.min(), found.max()
    return (
        (found - least) / (most - least) if most > least else np.full(found.shape, 0.5)
    )


def cells(
    values: np.ndarray[Any, Any], x: float, y: float, width: float, height: float
) -> list[str]:
    """The cells of a table in a few shades, darker for larger values; a path for each shade."""
    rows, columns = values.shape
    wide, high = width / columns, height / rows
    shades = np.round(values * (SHADES - 1)).astype(int)
    return [
        f'<path class="value" fill-opacity="{0.1 + 0.9 * shade / (SHADES - 1):.2f}" d="'
        + "".join(
            f"M{x + column * wide:.1f},{y + row * high:.1f}h{wide:.1f}v{high:.1f}h-{wide:.1f}z"
            for row, column in np.argwhere(shades == shade).tolist()
        )
        + '"/>'
        for shade in np.unique(shades).tolist()
    ]


def glyph(
    name: str, values: np.ndarray[Any, Any], axes: str, y: float
) -> tuple[list[str], float]:
    """The drawing of a field, and its height: a square, bars or a curve, a table, or frames one behind the other."""
    if values.ndim == 0:
        return [
            f'<rect class="value" x="0" y="{y}" width="16" height="16" rx="2"/>'
        ], 16
    if values.ndim == 1:
        bars = reduced(values, (BARS,))
        wide = GLYPH / len(bars)
        return [
            f'<rect class="value" x="{i * wide:.1f}" y="{y + 36 * (1 - bar):.1f}" width="{0.8 * wide:.1f}" '
            f'height="{2 + 36 * bar:.1f}"/>'
            for i, bar in enumerate(bars)
        ], 40
    if values.ndim >= 3 and (
        values.shape[-1] <= 3
    ):  # colors, components, real and imaginary
        values = values[..., 0]
    n_frames = min(3, int(np.prod(values.shape[:-2]))) if values.ndim > 2 else 1
    frame = values.reshape(-1, *values.shape[-2:])[0]
    height = (
        min(72.0, max(24.0, 96 * frame.shape[0] / frame.shape[1]))
        if n_frames > 1
        else 64.0
    )
    width = (
        min(GLYPH - 12.0, height * frame.shape[1] / frame.shape[0])
        if n_frames > 1
        else GLYPH - 0.0
    )
    shift = 6 * (n_frames - 1)
    parts = [
        f'<rect class="frame" x="{6 * i}" y="{y + shift - 6 * i:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        for i in reversed(range(n_frames))
    ]
    return [
        *parts,
        *cells(reduced(frame, CELLS), 0, y + shift, width, height),
    ], height + shift


def picture(name: str, fields: list[tuple[str, np.ndarray[Any, Any]]]) -> str:
    """The fields of a sample, one below the other, each with its name, shape, dtype and axes."""
    parts: list[str] = []
    told, y = [], 4.0
    for field, values in fields:
        shape = " x ".join(f"{n:,}" for n in values.shape) or "one value"
        axes = AXES[name].get(field, "")
        drawn, height = glyph(name, values, axes, y)
        middle = y + max(height, 44) / 2
        label = field if len(field) < 26 else f"...{field[-22:]}"
        parts += [
            *drawn,
            f'<text class="name" x="{GLYPH + 16}" y="{middle - 11:.0f}">{label}</text>',
            f'<text class="note" x="{GLYPH + 16}" y="{middle + 5:.0f}">{shape}, {values.dtype}</text>',
            f'<text class="note" x="{GLYPH + 16}" y="{middle + 21:.0f}">{axes}</text>',
        ]
        told.append(f"{field}: {shape}{f' ({axes})' if axes else ''}")
        y += max(height, 48) + GAP
    title = f"One sample: {'; '.join(told)}."
    head = (
        f'<svg viewBox="0 0 {WIDTH} {y:.0f}" role="img" aria-labelledby="sample-title">'
    )
    lines = [
        '<div class="way sample">',
        head,
        f'<title id="sample-title">{title}</title>',
        *parts,
        "</svg>",
        "</div>",
    ]
    return "\n".join(lines) + "\n"


def draw(name: str) -> str:
    """The picture of a page, of files that are written now."""
    sys.path.insert(0, str(DOCS.parent / "examples" / "benchmarks"))
    import lightning_h5
    from communities import COMMUNITIES

    community = COMMUNITIES[name]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        community.write(Path(folder), SIZES.get(name, SIZE))
        kind = getattr(lightning_h5, community.data_module)
        datamodule = kind(**community.options)
        datamodule.setup("fit")
        dataset = datamodule.train_dataset
        fields = list(fields_of(dataset[len(dataset) // 2], community.options))
        datamodule.teardown("fit")
    return picture(name, fields)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page in sys.argv[1:] or AXES:
        (FOLDER / f"{page}.html").write_text(draw(page), encoding="utf-8")
