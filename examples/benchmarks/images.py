"""How fast are JPEG images decoded, beside a bare loop of the same decoder on all cores?

    python examples/benchmarks/images.py [--images 2000] [--side 256] [--rounds 3] [--json FILE]

writes images as lists of bytes, and times shuffled epochs: a `Dataset` that reads a row with h5py and decodes it with
Pillow, in a `DataLoader` with 0 and with 2 workers; `LazyH5DataModule`; and the limit, a loop that decodes bytes in
memory with the decoder that the data module uses, in as many threads as cores. All take turns; ratios are of medians.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import h5py
import imagecodecs
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lightning_h5 import LazyH5DataModule

BATCH_SIZE = 64


def write(path: str, n_images: int, side: int) -> list[bytes]:
    """Write images of smooth shapes with noise; return them as they are stored."""
    rng = np.random.default_rng(0)
    files = []
    with h5py.File(path, "w") as file:
        array = file.create_dataset("image", (n_images,), h5py.vlen_dtype("uint8"), chunks=(100,))
        for row in range(n_images):
            scene = rng.integers(0, 220, (side // 16, side // 16, 3)).repeat(16, axis=0).repeat(16, axis=1)
            pixels = (scene + rng.integers(0, 30, scene.shape)).astype("u1")
            files.append(imagecodecs.jpeg8_encode(pixels, level=85))
            array[row] = np.frombuffer(files[-1], np.uint8)
    return files


class Plain(Dataset[Any]):
    """Reads and decodes each image by itself."""

    def __init__(self, path: str, n_images: int) -> None:
        self._path, self._n_images, self._file = path, n_images, None

    def __len__(self) -> int:
        return self._n_images

    def __getitem__(self, index: int) -> Any:
        if self._file is None:
            self._file = h5py.File(self._path)
        pixels = np.array(Image.open(io.BytesIO(self._file["image"][index].tobytes())))
        return torch.from_numpy(pixels).permute(2, 0, 1)


def bare(files: list[bytes]) -> None:
    """Decode all images in all threads, and keep none."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda data: imagecodecs.jpeg8_decode(data).shape, files, chunksize=8))


def rate(epoch: Any, n_images: int) -> float:
    """Return images a second of an epoch."""
    began = perf_counter()
    for _ in epoch:
        pass
    return n_images / (perf_counter() - began)


def main() -> None:
    """Measure all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    n = given.images
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/images.h5"
        files = write(path, n, given.side)
        module = LazyH5DataModule(path, x_key="image", decode={"image": "image"}, batch_size=BATCH_SIZE)
        module.setup("fit")
        loader = module.train_dataloader()
        rates: dict[str, list[float]] = {}
        for number in range(given.rounds + 1):
            for workers in (0, 2):
                plain = DataLoader(Plain(path, n), BATCH_SIZE, shuffle=True, num_workers=workers)
                rates.setdefault(f"plain, {workers} workers", []).append(rate(plain, n))
            loader.sampler.set_epoch(number)
            rates.setdefault("lightning_h5", []).append(rate(loader, n))
            began = perf_counter()
            bare(files)
            rates.setdefault("bare decoding", []).append(n / (perf_counter() - began))
        module.teardown("fit")
    found = {name: median(each[1:]) for name, each in rates.items()}
    print(f"{n:,} JPEG images of {given.side} x {given.side}, {sum(map(len, files)) / n / 1024:.1f} KiB each")
    for name, images in found.items():
        print(f"  {name:20} {images:9,.0f} images/s")
    mine = found["lightning_h5"]
    plain_rate = max(found["plain, 0 workers"], found["plain, 2 workers"])
    share = mine / found["bare decoding"]
    print(f"  {share:.2f} of bare decoding (asked 0.8), {mine / plain_rate:.2f} x the plain loader")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
