"""Lightning's base classes, from whichever of its two packages the user has imported.

``lightning`` and ``pytorch_lightning`` hold the same code as unrelated classes: a Trainer of one refuses the
modules of the other. ``lightning`` is taken, unless ``pytorch_lightning`` alone is imported already, or the
environment variable ``LIGHTNING_H5_IMPORT=pytorch_lightning`` asks for it.

Undocumented attributes of a Trainer are used here (for callbacks) and in ``datamodules/trainer_progress.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves  # Lightning finds loaders with it, too

from .errors import H5ValueError

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.tuner.tuning import Tuner
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

__all__ = [
    "PACKAGE",
    "Callback",
    "Checkpoint",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "Tuner",
    "check_trainer",
    "drop_logged",
    "is_between_batches",
    "is_logging_step",
    "loaders_of_fit",
    "logged_step",
    "models_of_the_other_package",
    "overrides",
    "passed_loaders",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "set_batch_size_of_strategy",
    "takes_loaders_from",
    "training_loaders",
]


def _choose_lightning() -> str:
    setting = os.environ.get("LIGHTNING_H5_IMPORT")
    if setting is not None:
        if setting not in ("lightning", "pytorch_lightning"):
            raise H5ValueError(
                f"LIGHTNING_H5_IMPORT={setting!r} is set. Set it to 'lightning' or 'pytorch_lightning', or not at all."
            )
        return "lightning.pytorch" if setting == "lightning" else setting
    only_old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return "pytorch_lightning" if only_old else "lightning.pytorch"


PACKAGE = _choose_lightning()

if not TYPE_CHECKING:
    _root = import_module(PACKAGE)
    Callback = _root.Callback
    LightningDataModule = _root.LightningDataModule
    LightningModule = _root.LightningModule
    Trainer = _root.Trainer
    Tuner = import_module(f"{PACKAGE}.tuner").Tuner
    Checkpoint = import_module(f"{PACKAGE}.callbacks").Checkpoint
    _utilities = import_module(f"{PACKAGE}.utilities")
    rank_zero_info = _utilities.rank_zero_info
    rank_zero_only = _utilities.rank_zero_only
    rank_zero_warn = _utilities.rank_zero_warn


def check_trainer(trainer: Any) -> None:
    """Check that a Trainer belongs to the Lightning package in use.

    Raises:
        H5ValueError: it belongs to the other package.
    """
    trainer_package = type(trainer).__module__.split(".")[0]
    own_package = PACKAGE.split(".")[0]
    if isinstance(trainer, Trainer) or trainer_package not in ("lightning", "pytorch_lightning"):
        return
    raise H5ValueError(
        f"a Trainer of {trainer_package!r} was given a data module that lightning_h5 made for {own_package!r}; the two "
        f"packages hold unrelated classes of the same names. Import everything from one of them: either "
        f"`from {PACKAGE} import Trainer`, or set LIGHTNING_H5_IMPORT={trainer_package} before Python starts "
        f"(or import {trainer_package} before lightning_h5)."
    )


def models_of_the_other_package() -> list[str]:
    """Return names of model classes that derive from the Lightning package which is not in use."""
    other_package = "pytorch_lightning" if PACKAGE == "lightning.pytorch" else "lightning.pytorch"
    if other_package not in sys.modules:
        return []
    models = sys.modules[other_package].LightningModule.__subclasses__()
    packages = (other_package.split(".")[0], PACKAGE.split(".")[0])
    return [f"{c.__module__}.{c.__qualname__}" for c in models if c.__module__.split(".")[0] not in packages]


def overrides(module: Any, hook: str) -> bool:
    """Return whether a model or data module, or its class, overrides one of Lightning's hooks."""
    base = LightningModule if isinstance(module, LightningModule) else LightningDataModule
    return hook in vars(module) or getattr(type(module), hook, None) is not getattr(base, hook)


def takes_loaders_from(trainer: Any, datamodule: Any) -> bool:
    """Return whether a trainer's present run requests loaders from a data module.

    Lightning keeps the data module of an earlier run, and calls its hooks even if loaders are passed to a run.
    """
    loop = {"fit": "fit_loop", "validate": "validate_loop", "test": "test_loop", "predict": "predict_loop"}
    name = loop.get(getattr(trainer.state.fn, "value", ""))
    source = None if name is None else getattr(getattr(trainer, name, None), "_data_source", None)
    return source is None or source.instance is None or source.instance is datamodule


def training_loaders(trainer: Any) -> list[Any]:
    """Return the loaders that a trainer trains on, as a flat list; ``trainer.train_dataloader`` has the nested form."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def loaders_of_fit(trainer: Any) -> list[Any]:
    """Return the loaders that a trainer trains and validates on during a fit, as a flat list."""
    loaders = (loop._combined_loader for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop))
    return [loader for combined in loaders if combined is not None for loader in combined.flattened]


def passed_loaders(trainer: Any) -> list[Any]:
    """Return, as a flat list, the loaders that were passed to the trainer's methods rather than made by a module."""
    fit = trainer.fit_loop
    loops = (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    sources = [loop._data_source.instance for loop in loops]
    return tree_leaves([source for source in sources if not hasattr(source, "prepare_data")])


# The step that Lightning logs counts batches that end with an optimizer step. It has no public name: Lightning's own
# LearningRateMonitor and DeviceStatsMonitor read it from the same attribute. ``global_step`` is another number: one
# more after a batch, and several more if a model has several optimizers.


def logged_step(trainer: Any) -> int:
    """Return the step that Lightning logs for the batch that is being trained on."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def is_logging_step(trainer: Any, every: int | None = None) -> bool:
    """Return whether values are to be logged after a batch; for ``on_train_batch_end``.

    Args:
        trainer: the Trainer.
        every: number of optimizer steps between logs. None returns whether Lightning logs, as it does before stopping.
    """
    if trainer.fit_loop._should_accumulate() and trainer.lightning_module.automatic_optimization:
        return False
    if every is None:
        return bool(trainer._logger_connector.should_update_logs or trainer.fast_dev_run)
    return (logged_step(trainer) + 1) % every == 0


def is_between_batches(trainer: Any, batch_idx: int) -> bool:
    """Return whether nothing but the next batch follows a batch; for ``on_train_batch_end``.

    Otherwise gradients are still accumulated, or a validation or the end of the epoch follows, which would be left out
    by a run that resumes from a checkpoint of this batch.
    """
    if trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches:
        return False
    is_by_epoch = trainer.check_val_every_n_epoch is not None
    n_batches = batch_idx + 1 if is_by_epoch else trainer.fit_loop.epoch_loop.total_batch_idx + 1
    every = trainer.val_check_batch  # None if validation is due by the clock (Lightning 2.6)
    return not trainer.enable_validation or not every or bool(n_batches % every)


def set_batch_size_of_strategy(trainer: Any, batch_size: int) -> None:
    """Let DeepSpeed know the batch size, unless its configuration does.

    Lightning's strategy would make a loader for it, before there are ranks.
    """
    strategy = getattr(trainer, "strategy", None)
    config = getattr(strategy, "config", None)
    if isinstance(config, dict) and any(kind.__name__ == "DeepSpeedStrategy" for kind in type(strategy).__mro__):
        config.setdefault("train_micro_batch_size_per_gpu", batch_size)


def drop_logged(trainer: Any, hook: str, names: Iterable[str]) -> None:
    """Drop values that were logged by step, which Lightning would log again at each later step of the epoch.

    Args:
        trainer: that trains.
        hook: in which they were logged.
        names: of the values; those that were not logged are ignored.
    """
    for name in names:
        if (result := trainer.fit_loop._results.get(f"{hook}.{name}")) is not None:
            result.reset()
