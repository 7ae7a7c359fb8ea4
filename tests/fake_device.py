"""A device that tests pretend to have: its copies are made as late as a real device's may be."""

import torch
from torch.utils._pytree import tree_map_only


class FakeStream:
    """Fills a copy when the model is about to use it. Before that, it holds -1.

    Attributes:
        of_device: the streams that were made.
        n_begun: number of copies that were begun.
        n_ended: number of copies that were handed over.
        ahead: number of copies that were under way after each batch that was handed over.
    """

    of_device: list = []  # noqa: RUF012

    def __init__(self, device):
        self.n_begun = self.n_ended = 0
        self.ahead = []
        self.of_device.append(self)

    def begin(self, batch):
        self.n_begun += 1
        return tree_map_only(torch.Tensor, lambda tensor: torch.full_like(tensor, -1), batch), batch

    def end(self, pending):
        copied, batch = pending
        sources = [tensor for tensor in torch.utils._pytree.tree_leaves(batch) if isinstance(tensor, torch.Tensor)]
        tree_map_only(torch.Tensor, lambda tensor: tensor.copy_(sources.pop(0)), copied)
        self.n_ended += 1
        self.ahead.append(self.n_begun - self.n_ended)
        return copied
