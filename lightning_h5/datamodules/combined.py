"""``CombinedHDF5DataModule``: many files of the same structure, filtered, and a cache of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ..datasets import CombinedHDF5Dataset, FileSamples
from ..errors import H5ValueError
from ..hdf5 import keys_in
from ..options import (
    BadRowOptions,
    DistributedOptions,
    FileOptions,
    MixtureOptions,
    PatchOptions,
    RowCacheOptions,
    SegmentOptions,
    ShuffleOptions,
    SplitOptions,
    StagingOptions,
    TableOptions,
    WeightOptions,
    WindowOptions,
    WorkerOptions,
)
from ..options.keywords import checks_keywords
from ..samples import MakesIndexer
from ..types import DTypeLike, Keys, PathLike, Paths
from .arguments import Split
from .from_files import FilesH5DataModule
from .lazy import LazyH5DataModule
from .shared_docs import with_arguments_of

__all__ = ["CombinedHDF5DataModule"]


@checks_keywords
@with_arguments_of(LazyH5DataModule)
class CombinedHDF5DataModule(FilesH5DataModule):
    """Train from one or thousands of files of the same structure, with a cache of recently used rows.

    Accepts all arguments of ``LazyH5DataModule``, and yields the same batches. Without ``x_key`` and ``fields`` it
    loads all arrays that share axis 0, as fields.

    An argument that accepts an option object also accepts a mapping with its fields, as in YAML.

    Args:
        row_cache: size of the cache of recently used rows in each process: a number of rows or ``RowCacheOptions``
            (``size``, ``max_bytes``). Windows, segments and patches are not cached.

    Raises:
        H5ValueError: arguments are invalid or contradict each other. Files are checked in ``setup``.

    Example:
        >>> datamodule = CombinedHDF5DataModule(
        ...     "recordings/*.h5", label=2, split={"val_fraction": 0.1, "group_key": "guid"}
        ... )
        >>> trainer.fit(model, datamodule=datamodule)
    """

    loads_all = True

    def __init__(
        self,
        train_path: Paths | None = None,
        val_path: Paths | None = None,
        test_path: Paths | None = None,
        predict_path: Paths | None = None,
        *,
        x_key: Keys | None = None,
        y_key: Keys | None = None,
        fields: list[str] | dict[str, Any] | None = None,
        x_dtype: DTypeLike = "auto",
        y_dtype: DTypeLike = None,
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        device_transform: Callable[..., Any] | dict[str, Callable[..., Any]] | None = None,
        collate_fn: Callable[[Any], Any] | Literal["stack", "pad", "list", "pack"] | None = None,
        normalize: dict[str, Any] | PathLike | None = None,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        shuffle: ShuffleOptions | Literal["global", "chunks"] | bool | dict[str, Any] = True,
        drop_last: bool = False,
        seed: int | None = None,
        with_index: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        prefetch_to_device: int = 0,
        split: SplitOptions | float | list[float] | dict[str, Any] | None = None,
        weights: WeightOptions | str | dict[str, Any] | None = None,
        sample: Literal["row", "window", "segment"] | MakesIndexer | None = None,
        segments: SegmentOptions | str | dict[str, Any] | None = None,
        window: WindowOptions | int | list[int] | dict[str, Any] | None = None,
        patch: PatchOptions | dict[str, Any] | None = None,
        table: TableOptions | dict[Any, Any] | PathLike | None = None,
        decode: dict[str, Any] | None = None,
        select: dict[str, dict[int, Any]] | None = None,
        where: Any = None,
        label: int | None = None,
        valid_mask: str | None = None,
        mixture: MixtureOptions | dict[str, Any] | None = None,
        on_bad_file: Literal["raise", "skip"] = "raise",
        on_bad_row: BadRowOptions | Literal["raise", "skip"] | dict[str, Any] = "raise",
        workers: WorkerOptions | dict[str, Any] | None = None,
        files: FileOptions | dict[str, Any] | None = None,
        staging: StagingOptions | PathLike | dict[str, Any] | None = None,
        distributed: DistributedOptions | dict[str, Any] | None = None,
        row_cache: RowCacheOptions | int | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    def _use_arguments(self, arguments: Mapping[str, Any]) -> None:
        super()._use_arguments(arguments)
        self._row_cache = RowCacheOptions.parse(arguments["row_cache"], "row_cache")
        if arguments["row_cache"] is not None and self._kind.needs_segments(keys_in(*self._named_keys)):
            raise H5ValueError(
                "row_cache caches single rows and does not support windows, segments or patches. Remove row_cache."
            )

    def dataset_of(self, samples: FileSamples, split: Split, *, n_sources: int = 1) -> CombinedHDF5Dataset:
        """See ``FilesH5DataModule.dataset_of``."""
        row_cache = self._row_cache
        return CombinedHDF5Dataset.of(samples, replace(row_cache, max_bytes=row_cache.n_bytes // n_sources))
