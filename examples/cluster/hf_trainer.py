"""Train with the Trainer of Hugging Face, and resume exactly.

    pip install transformers
    python hf_trainer.py runs/1
    torchrun --nproc-per-node 2 hf_trainer.py runs/1

The Trainer uses the loaders of a data module unchanged: they already shard and shuffle. The position is saved next to
each checkpoint, which replaces counting and skipping batches (``ignore_data_skip``).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_h5 import LazyH5DataModule


class H5Trainer(Trainer):
    """A Trainer of Hugging Face with the loaders of a data module.

    Args:
        model: see ``Trainer``.
        args: see ``Trainer``; needs ``ignore_data_skip=True`` and ``remove_unused_columns=False``.
        datamodule: a data module with dicts as batches; their keys are the arguments of the model.
    """

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, datamodule: Any) -> None:
        datamodule.setup("fit")  # after `args`, which begins the process group
        self.datamodule, self.resumed = datamodule, None
        train, val = (datamodule.datasets.get(split) for split in ("train", "val"))
        super().__init__(model, args, train_dataset=train, eval_dataset=val, callbacks=[SavePosition(self)])

    def train(self, resume_from_checkpoint: str | None = None, **options: Any) -> Any:
        """Train, optionally from a checkpoint's folder."""
        self.resumed = resume_from_checkpoint
        return super().train(resume_from_checkpoint, **options)

    def get_train_dataloader(self) -> Any:
        """Return the training loader, at the position of the checkpoint."""
        self.loader = self.datamodule.train_dataloader()
        if self.resumed is not None:
            self.loader.load_state_dict(torch.load(Path(self.resumed) / "position.pt"))
        return self.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the validation loader."""
        return self.datamodule.val_dataloader()


class SavePosition(TrainerCallback):
    """Saves the position of the training loader next to each checkpoint."""

    def __init__(self, trainer: H5Trainer) -> None:
        self.trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Save the position on rank 0: it is the same on all ranks."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save(self.trainer.loader.state_dict(), folder / "position.pt")


class Net(torch.nn.Module):
    """A linear model in the Trainer's form: called with the fields of a batch, it returns a dict with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, and count the training rows."""
        if self.training:
            self.rows += index.tolist()
        predicted = self.layer(x)
        return {"loss": (predicted - x.sum(1, keepdim=True)).square().mean(), "logits": predicted}


def train(folder: Path, resume_from_checkpoint: str | None = None) -> Net:
    """Train on ``rows.h5`` in a folder."""
    args = TrainingArguments(
        str(folder / "checkpoints"),
        num_train_epochs=2,
        save_steps=50,
        eval_strategy="epoch",
        ignore_data_skip=True,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    datamodule = LazyH5DataModule(
        str(folder / "rows.h5"), x_key={"x": "x"}, batch_size=16, with_index=True, seed=1, split=0.1
    )
    torch.manual_seed(0)
    model = Net()
    H5Trainer(model, args, datamodule).train(resume_from_checkpoint)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="folder of the data and the checkpoints")
    parser.add_argument("--resume", help="folder of a checkpoint to resume from")
    arguments = parser.parse_args()
    trained = train(arguments.folder, arguments.resume)
    print(f"trained on {len(trained.rows):,} rows here")
