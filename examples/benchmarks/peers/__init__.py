"""Other loaders, each used as its documentation says.

A module has ``as_stored(data, stack, n_rows)``, the ways to read the HDF5 file, or ``open_epochs(data, folder,
stack)``, which writes a copy into a folder and returns the ways to read it; by name, and those that start processes
first.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

PEERS = {"spdl": "peers.spdl", "insitubatch": "peers.insitu", "litdata": "peers.litdata"}
"""Modules of the peers, by the name to install them with."""
AS_STORED, CONVERTED = ("spdl", "insitubatch"), ("litdata", "insitubatch")
"""Peers that read the HDF5 file, and peers that read a copy of their own."""
VERSIONS = (*PEERS, "virtualizarr", "zarr", "annbatch", "scdataset", "anndata")


def find(names: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the modules of the peers that can be had here, and why others cannot."""
    modules, missing = {}, {}
    for name in names:
        try:
            modules[name] = importlib.import_module(PEERS[name])
        except Exception as error:  # not installed, or incompatible: peers fail at import in many ways
            reason = str(error).splitlines()[0] if str(error) else "no reason given"
            missing[name] = f"{type(error).__name__}: {reason}"
    return modules, missing


class LoaderEpochs:
    """Epochs of a torch loader whose batches are dicts of "x" and "label"; its worker processes stay until the end.

    Args:
        loader: the loader.
        stack: forgets the loader when it is closed, which ends the workers.
    """

    def __init__(self, loader: DataLoader[Any], stack: ExitStack) -> None:
        self._loader: DataLoader[Any] | None = loader
        stack.callback(self.close)

    def __call__(self, number: int) -> Iterator[tuple[Any, Tensor]]:
        assert self._loader is not None
        for batch in self._loader:
            yield batch["x"], batch["label"]

    def close(self) -> None:
        """Forgets the loader."""
        self._loader = None
