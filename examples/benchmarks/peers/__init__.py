"""Loaders that want the rows in a format of their own: each converts a copy, and reads that.

A module here has ``open_epochs(data, folder, stack)``: it writes the rows into a folder and gives the ways to read
them that are worth timing, by name. Those that start processes come first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from common import Epoch
from rows import Data
from torch import Tensor
from torch.utils.data import DataLoader

PEERS = {"litdata": "peers.litdata", "mosaicml-streaming": "peers.mosaic", "ffcv": "peers.ffcv"}
"""Modules of the peers, by the name to install them with."""

OpenEpochs: TypeAlias = Callable[[Data, Path, ExitStack], dict[str, Epoch]]


def load(peer: str) -> OpenEpochs | str:
    """What opens a peer's epochs, or why it cannot be had here."""
    try:
        module = importlib.import_module(PEERS[peer])
    except Exception as error:  # not installed, or incompatible: peers fail at import in many ways
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    open_epochs: OpenEpochs = module.open_epochs
    return open_epochs


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
