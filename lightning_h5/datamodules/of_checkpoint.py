"""The data module of a checkpoint, created from the checkpoint's hyperparameters or from a configuration."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import fsspec
import torch

from .._lightning import LightningDataModule
from ..errors import H5CorruptError, H5Error, H5FileError, H5ValueError, listing
from ..hdf5 import expand_user
from ..order import is_position
from ..types import PathLike
from .base import BaseH5DataModule
from .combined import CombinedHDF5DataModule
from .lazy import LazyH5DataModule
from .rank_cached import RankCachedH5DataModule
from .settings import NOT_STORED

__all__ = ["datamodule_of_checkpoint"]

CLASSES = {kind.__name__: kind for kind in (LazyH5DataModule, RankCachedH5DataModule, CombinedHDF5DataModule)}
OF_VALUES = ("transform", "target_transform", "eval_transform", "batch_transform", "normalize")
"""Arguments that change the values of samples, but not their selection."""

METADATA = "meta.pt"  # of a sharded checkpoint, which is a folder


def datamodule_of_checkpoint(
    path: PathLike,
    *,
    arguments: Mapping[str, Any] | None = None,
    config: PathLike | None = None,
    replays: bool = False,
    trusted: bool = False,
) -> BaseH5DataModule:
    """Return the data module that saved a checkpoint, with the history of its run. Opens none of its files.

    Args:
        path: the checkpoint: a file, a sharded checkpoint's folder, or a URL.
        arguments: replacements for arguments in the checkpoint, by name.
        config: a configuration of LightningCLI, with the data module in ``data``; None uses the checkpoint's arguments.
        replays: also restore the functions that build batches, such as transforms.
        trusted: load objects of any class, which may run code from the checkpoint.

    Raises:
        H5Error: the checkpoint cannot be read, has no data module of this package, or lacks arguments.
    """
    path = expand_user(path)
    checkpoint = _read(path, trusted=trusted)
    names = [name for name, value in checkpoint.items() if is_position(value)]
    if len(names) != 1:
        saved = f"it has {len(names)}: {listing(names)}" if names else "it has none"
        raise H5ValueError(
            f"the rows of {path!r} were requested. A checkpoint needs the position of one data module of lightning_h5, "
            f"but {saved}. Pass a checkpoint that a Trainer saved while it trained from such a data module."
        )
    (name,) = names
    if config is not None:
        datamodule = _of_config(expand_user(config), arguments or {})
    elif name in CLASSES:
        settings = checkpoint.get(LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY) or {}
        datamodule = CLASSES[name](**_usable(name, settings, arguments or {}, replays=replays))
    else:
        raise H5ValueError(
            f"{path!r} was saved by {name!r}, which is not a class of lightning_h5; classes in a checkpoint are "
            "not imported. Pass --config with the run's configuration, or call in Python: "
            f"{name}.load_from_checkpoint({path!r}).rows_of_step(step)."
        )
    datamodule.load_state_dict(checkpoint[name])
    return datamodule


def _read(path: str, *, trusted: bool) -> dict[str, Any]:
    file = os.path.join(path, METADATA) if os.path.isdir(path) else path
    try:
        if "://" in file:
            with fsspec.open(file, "rb") as remote:
                checkpoint = torch.load(remote, map_location="cpu", weights_only=not trusted)
        else:
            mmap = zipfile.is_zipfile(file)  # all but old ones: weights are not read
            checkpoint = torch.load(file, map_location="cpu", weights_only=not trusted, mmap=mmap)
    except pickle.UnpicklingError as error:
        if (match := re.search(r"GLOBAL (\S+)", str(error))) is None:
            raise H5CorruptError(f"{path!r} is not a checkpoint, or is damaged. Pass another one.") from error
        raise H5FileError(
            f"{path!r} has objects of {match[1]}; by default, only plain values and tensors are loaded. Pass --trusted "
            "if you trust the checkpoint: loading other objects can run any code."
        ) from None
    except OSError as error:
        raise H5FileError(f"the checkpoint {path!r} cannot be opened: {error.strerror or error}.") from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise H5CorruptError(f"{path!r} is not a checkpoint, or is damaged: {error}") from error
    if not isinstance(checkpoint, dict):
        raise H5CorruptError(f"{path!r} is not a checkpoint: it holds a {type(checkpoint).__name__}.")
    return checkpoint


def _usable(name: str, settings: Mapping[str, Any], arguments: Mapping[str, Any], *, replays: bool) -> dict[str, Any]:
    """Return the arguments for a data module that runs in one process without workers."""
    usable = {key: _without_class(value) for key, value in settings.items() if not key.startswith("_")}
    usable |= {"num_workers": 0, "prefetch_factor": None, "workers": None, "distributed": None, "pin_memory": False}
    if isinstance(memory := usable.get("memory"), Mapping):
        usable["memory"] = {**memory, "device": "cpu", "pin": False, "share": False}
    if not replays:
        usable |= dict.fromkeys(OF_VALUES)
        if usable.get("collate_fn") not in ("stack", "pad", None):
            usable["collate_fn"] = "list"  # supports samples of any shape
    usable |= arguments
    if replays and (missing := [key for key in (*OF_VALUES, "collate_fn") if _is_function(key, usable.get(key))]):
        raise H5ValueError(
            f"batches of {name} were requested, but the checkpoint does not hold functions: {listing(missing)}. Pass "
            "--config with the run's configuration, or call in Python: "
            f"{name}.load_from_checkpoint(path, {missing[0]}=...).batches_of_step(step)."
        )
    return usable


def _is_function(name: str, value: Any) -> bool:
    """Return whether a setting is a function: a placeholder in a checkpoint, or a name in a configuration."""
    if name in ("normalize", "collate_fn"):
        return isinstance(value, str) and (value.startswith(NOT_STORED) or (name == "collate_fn" and "." in value))
    return value is not None and not callable(value)


def _without_class(value: Any) -> Any:
    """Return the fields of an option object of this package that LightningCLI stored with its class."""
    if isinstance(value, Mapping) and str(value.get("class_path", "")).startswith("lightning_h5."):
        return value.get("init_args", {})
    return value


def _of_config(path: str, arguments: Mapping[str, Any]) -> BaseH5DataModule:
    """Return the data module of a configuration. A configuration is code: it names classes that are imported."""
    import yaml

    try:
        jsonargparse = import_module("jsonargparse")
    except ImportError as error:
        raise H5Error(f"--config needs jsonargparse ({error}). Run `pip install 'lightning-h5[cli]'`.") from error
    try:
        with open(path, encoding="utf-8") as file:
            data = (yaml.safe_load(file) or {}).get("data")
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise H5FileError(f"the configuration {path!r} cannot be read: {error}") from error
    if not isinstance(data, Mapping) or "class_path" not in data:
        raise H5ValueError(f"the configuration {path!r} has no data with a class_path. Pass the run's configuration.")
    data = {**data, "init_args": {**data.get("init_args", {}), **arguments}}
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data", fail_untyped=False)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    try:
        datamodule = instantiate(parser.parse_object({"data": data})).data
    except H5Error:
        raise
    except Exception as error:  # jsonargparse raises many kinds
        raise H5ValueError(f"the data of the configuration {path!r} cannot be created: {error}") from error
    if not isinstance(datamodule, BaseH5DataModule):
        raise H5ValueError(
            f"the configuration {path!r} has a {type(datamodule).__name__}, which is not of lightning_h5."
        )
    return datamodule
