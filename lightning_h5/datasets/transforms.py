"""The transforms of a dataset. Like torchvision's, they can be assigned as attributes."""

from __future__ import annotations

from dataclasses import replace

from ..errors import H5ValueError
from .sample_layout import SampleLayout, Transform
from .user_functions import AskedFor, asked_for

__all__ = ["HasTransforms"]


class HasTransforms:
    """A dataset with transforms.

    Transforms can be assigned at any time, and act on all samples after that. Worker processes receive them at the
    start of the next iteration. With this package's loaders that includes persistent workers.

    Attributes:
        sample_layout: the layout of a sample.
        n_assigned: number of assignments of transforms.
    """

    sample_layout: SampleLayout
    n_assigned = 0
    _batch_transform: Transform | None = None
    _batch_asks_for = AskedFor()

    @property
    def transform(self) -> Transform | None:
        """Runs on each sample's input."""
        return self.sample_layout.x.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self._assign(replace(self.sample_layout, x=replace(self.sample_layout.x, transform=transform)))

    @property
    def target_transform(self) -> Transform | None:
        """Runs on each sample's target."""
        return None if self.sample_layout.y is None else self.sample_layout.y.transform

    @target_transform.setter
    def target_transform(self, transform: Transform | None) -> None:
        y = self.sample_layout.y
        if y is not None:
            self._assign(replace(self.sample_layout, y=replace(y, transform=transform)))
        elif transform is not None:
            raise H5ValueError(
                "target_transform was assigned to a dataset whose samples have no target of their own. Pass y_key to "
                "the dataset, or assign transform."
            )

    @property
    def batch_transform(self) -> Transform | None:
        """Runs once on each collated batch."""
        return self._batch_transform

    @batch_transform.setter
    def batch_transform(self, transform: Transform | None) -> None:
        self._batch_transform, self._batch_asks_for = transform, asked_for(transform)
        self.n_assigned += 1

    def _assign(self, layout: SampleLayout) -> None:
        """Use another layout for all samples from now on."""
        self.sample_layout = layout
        self.n_assigned += 1
