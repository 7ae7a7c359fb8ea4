"""Hugging Face Accelerate's record of the loops over loaders: by it, ``accumulate`` knows that a batch is the last."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["LoopRecord"]


class LoopRecord:
    """One loop over a loader, as Accelerate keeps it beside those over its own loaders.

    Attributes:
        end_of_dataloader: the batch that the loop has is the last of its pass.
        remainder: samples of the last batch, if others were added to fill it; 0, as ours adds none.
    """

    remainder = 0

    def __init__(self, state: Any) -> None:
        self.end_of_dataloader = False
        self._state = state
        state._add_dataloader(self)

    @classmethod
    def begin(cls) -> LoopRecord | None:
        """Return a record of a loop that begins; None if the script does not use Accelerate."""
        module = sys.modules.get("accelerate.state")
        return None if module is None else cls(module.GradientState())

    def end(self) -> None:
        """Remove the record."""
        self._state._remove_dataloader(self)
