"""The argument ``device_transform``: runs on batches after Lightning has copied them to the device.

Lightning calls ``on_after_batch_transfer`` of the data module if the data module overrides this hook, else the model's
hook, and never both. So a data module of this package overrides the hook only if it has a transform for the device, and
then calls the model's own hook.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from .._lightning import LightningDataModule, LightningModule, overrides
from ..datasets import AskedFor, asked_for, fresh_draws, generators, note_rows, own_streams
from ..errors import H5ValueError, listing, named, near
from ..loading import H5DataLoader
from ..options.base import check_callable
from ..order import Progress, stream
from ..types import Draws
from .arguments import Split
from .resume import KeepsPosition

__all__ = ["TransformsOnDevice"]

HOOK = "on_after_batch_transfer"
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
DEVICE = 22  # purpose of the random stream

Stage = Literal["train", "eval"]
STAGES: tuple[Stage, ...] = ("train", "eval")

_SPLIT_OF_STAGE: dict[str, Split] = {
    "train": "train",
    "sanity_check": "val",
    "validate": "val",
    "test": "test",
    "predict": "predict",
}


class _Hook:
    """Lightning's hook, or the hook of a data module with a transform for the device.

    Lightning compares the code of the attribute with its own hook's, to know whether a data module overrides it.
    """

    def __get__(self, module: TransformsOnDevice | None, owner: type) -> Callable[..., Any]:
        if module is None:
            return lambda module, *values, **keywords: self.__get__(module, owner)(*values, **keywords)
        if module.has_device_transform:
            return module.transform_on_device
        return MethodType(LightningDataModule.on_after_batch_transfer, module)


class TransformsOnDevice(KeepsPosition):
    """A data module that transforms batches on the device.

    Args:
        arguments: the constructor's arguments by name.
    """

    on_after_batch_transfer = _Hook()

    def _use_arguments(self, arguments: Mapping[str, Any]) -> None:
        super()._use_arguments(arguments)
        self._device_transforms = _by_stage(arguments.get("device_transform"))
        self._prepared: dict[Stage, AskedFor] = {}  # generators of each, from its first batch on
        if self.has_device_transform:
            self._check_hook()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_prepared": {}}

    @property
    def has_device_transform(self) -> bool:
        """Whether batches of any stage are transformed on the device."""
        return bool(vars(self).get("_device_transforms"))

    def check_device_transform(self) -> None:
        """Raise if Lightning would not run the transform; called when a stage is set up."""
        if not self.has_device_transform:
            return
        self._check_hook()
        model = getattr(self.trainer, "lightning_module", None)
        for step in STEPS:
            function = getattr(model, step, None)
            if function is not None and "dataloader_iter" in inspect.signature(function).parameters:
                raise H5ValueError(
                    f"device_transform was given, but {type(model).__name__}.{step} takes batches from "
                    "dataloader_iter, which Lightning does not copy to the device. Let the step accept batch and "
                    "batch_idx, or remove device_transform and transform in the step."
                )
        if _overrides_hook(model):
            # Lightning warns that it skips the model's hook.
            warnings.filterwarnings("ignore", message=f"You have overridden `{HOOK}` in both")
            self._log_once(f"device_transform runs before {HOOK} of {type(model).__name__}")

    def transform_on_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return a batch after ``device_transform`` of the present stage, and after the model's own hook.

        Args:
            batch: the batch on the device.
            dataloader_idx: number of its loader in the stage.
        """
        trainer = self.trainer
        model = getattr(trainer, "lightning_module", None)
        if not self.is_bystander:
            stage = getattr(getattr(trainer, "state", None), "stage", None)
            split = _SPLIT_OF_STAGE[stage.value] if stage is not None else "train"
            batch = self._transformed_on_device(batch, split, dataloader_idx)
        if model is not None and _overrides_hook(model) and self._hook_owner() is TransformsOnDevice:
            batch = model.on_after_batch_transfer(batch, dataloader_idx)
        return batch

    def _transformed_on_device(self, batch: Any, split: Split, dataloader_idx: int) -> Any:
        stage: Stage = "train" if split == "train" else "eval"
        transform = self._device_transforms.get(stage)
        if transform is None:
            return batch
        loader = self._loader_in_use(split, dataloader_idx)
        progress = None if loader is None else loader.passes.last
        if progress is None and self.trainer is not None:
            return batch  # of another source, such as the model's example_input_array
        device = _device_of(batch)
        if stage not in self._prepared:
            if isinstance(transform, torch.nn.Module):
                transform.to(device)
            self._prepared[stage] = asked_for(transform)
        draws = fresh_draws() if loader is None or progress is None else _draws_on_device(loader, progress)
        with torch.no_grad(), own_streams(draws), _device_stream(device, draws):
            try:
                return transform(batch, **_generators_on(device, generators(self._prepared[stage], draws)))
            except Exception as error:
                note_rows(error, "device_transform", transform, partial(_rows_of, loader, progress))
                raise

    def _loader_in_use(self, split: Split, dataloader_idx: int) -> H5DataLoader | None:
        """Return the loader that has yielded the batch; the last one for training without a Trainer."""
        if self.trainer is None:
            return self._train_loader
        attribute = {"train": "train_dataloader", "val": "val_dataloaders"}.get(split, f"{split}_dataloaders")
        loaders = tree_leaves(getattr(self.trainer, attribute, None))
        in_use = loaders if split == "train" else loaders[dataloader_idx : dataloader_idx + 1]
        dataset = self._datasets.get(split)  # Lightning makes loaders of predictions again
        own = [loader for loader in in_use if isinstance(loader, H5DataLoader) and loader.dataset is dataset]
        return own[0] if own else None

    def _check_hook(self) -> None:
        """Raise an error if a subclass overrides the hook without calling this class's."""
        if self._hook_owner() is TransformsOnDevice:
            return
        own = vars(self).get(HOOK) or vars(self._hook_owner())[HOOK]
        function = inspect.unwrap(getattr(own, "__func__", own))
        if isinstance(function, FunctionType) and HOOK in function.__code__.co_names:  # it calls ours
            return
        raise H5ValueError(
            f"device_transform was given to {type(self).__name__}, whose {named(HOOK, function)} replaces the hook "
            f"that runs it. Call super().{HOOK}(batch, dataloader_idx) there, or pass its code as device_transform."
        )

    def _hook_owner(self) -> type:
        """Return the class that defines the hook; the object's own class if the hook was set on the object."""
        if HOOK in vars(self):
            return type(self)
        return next(kind for kind in type(self).__mro__ if HOOK in vars(kind))


def _by_stage(setting: Any) -> dict[Stage, Callable[..., Any]]:
    """Return the functions of ``device_transform`` by stage.

    Raises:
        H5ValueError: a value is not callable, or a stage is unknown.
    """
    if not isinstance(setting, Mapping):
        check_callable(setting, "device_transform")
        return {} if setting is None else dict.fromkeys(STAGES, setting)
    for name, function in setting.items():
        if name not in STAGES:
            raise H5ValueError(
                f"device_transform has no stage {name!r}.{near(str(name), STAGES)} Pass a function for all stages, or "
                f"a mapping with {listing(STAGES)}."
            )
        check_callable(function, f"device_transform[{name!r}]")
    return {stage: setting[stage] for stage in STAGES if setting.get(stage) is not None}


def _overrides_hook(model: Any) -> bool:
    return isinstance(model, LightningModule) and overrides(model, HOOK)


def _device_of(batch: Any) -> torch.device:
    """Return the device of a batch's first tensor; the CPU if it has none."""
    devices = (leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return next(devices, torch.device("cpu"))


def _rows_of(loader: H5DataLoader | None, progress: Progress | None) -> str:
    """Return the rows of the batch that a loader yielded last, as text."""
    plan = None if progress is None or progress.plan is None else progress.plan()
    if loader is None or progress is None or plan is None:
        return "rows that cannot be named"
    return loader.dataset.describe(plan.rows(progress.n_given - 1))


# Draws ---------------------------------------------------------------------------------------------------------


def _draws_on_device(loader: H5DataLoader, progress: Progress) -> Draws:
    """Return the seed of the draws for the batch that a loader yielded last; the host's draws are different."""
    sampler = loader.sampler
    seed = int(stream(sampler.seed, 0, DEVICE).random_raw()) >> 2
    return Draws(seed, progress.began.epoch, sampler.first_position + progress.position)


def _generators_on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the generators that a function requests; torch's generator is on the device."""
    if "generator" in arguments and _has_stream(device):
        seed = arguments["generator"].initial_seed()
        arguments["generator"] = torch.Generator(device).manual_seed(seed)
    return arguments


@contextmanager
def _device_stream(device: torch.device, draws: Draws) -> Iterator[None]:
    """Run a block with the device's global stream seeded for one batch; afterwards it continues unchanged."""
    if not _has_stream(device):
        yield
        return
    module: Any = torch.get_device_module(device)
    place = () if device.type == "mps" else (device,)  # which has one device
    state = module.get_rng_state(*place)
    seed = int(stream(draws.seed, draws.epoch, DEVICE, draws.position).random_raw()) >> 1
    module.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), *place)
    try:
        yield
    finally:
        module.set_rng_state(state, *place)


def _has_stream(device: torch.device) -> bool:
    """Return whether a device has a random stream of its own, besides the CPU's."""
    return device.type not in ("cpu", "meta")
