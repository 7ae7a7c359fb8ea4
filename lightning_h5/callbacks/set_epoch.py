"""``SetEpochCallback``: applies a restored position, and sets the epoch of samplers and datasets."""

from __future__ import annotations

from typing import Any

from .._lightning import Callback, LightningModule, Trainer, training_loaders

__all__ = ["SetEpochCallback"]


class SetEpochCallback(Callback):
    """Apply the position of a resumed run before its first batch, and call ``set_epoch`` each epoch.

    The data modules of this package insert it themselves. It has no state. Loaders of this package read the epoch from
    the trainer. Without this callback, a resumed run stops with an error at the first batch, since the restored
    position was not applied. ``set_epoch`` is called for your own samplers and datasets.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Find the position that a data module with another class name saved; Lightning would ignore it."""
        find = getattr(getattr(trainer, "datamodule", None), "find_position", None)
        if find is not None:
            find(checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the restored position, if any."""
        _call(trainer, "apply_position")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let the data module correct Lightning's counters after a resume."""
        _call(trainer, "position_before_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let the data module count the batches of the step."""
        _call(trainer, "position_after_step")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notify the data module of the end of the epoch."""
        _call(trainer, "position_after_epoch")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the epoch of every training sampler and dataset."""
        for loader in training_loaders(trainer):
            for part in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
                set_epoch = getattr(part, "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(trainer.current_epoch)


def _call(trainer: Trainer, method: str) -> None:
    """Call a method of the data module, if it belongs to this package."""
    function = getattr(getattr(trainer, "datamodule", None), method, None)
    if function is not None:
        function()
