"""The constructor arguments of data modules, bundled: what all of them take, and what their samples are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from ..errors import H5ValueError
from ..options import DistributedOptions, FileOptions, ShuffleOptions, WorkerOptions
from ..options.base import Options, check_callable, check_choice, check_whole
from ..types import DTypeLike, Keys, PathLike

__all__ = ["SPLITS", "Arguments", "LoaderArguments", "SampleArguments", "Split"]

Split = Literal["train", "val", "test", "predict"]
SPLITS: tuple[Split, ...] = ("train", "val", "test", "predict")


class Arguments:
    """Base of bundles of arguments.

    Attributes:
        option_objects: the arguments that hold an option object, with its class.
    """

    option_objects: ClassVar[Mapping[str, type[Options]]] = {}

    @classmethod
    def pick(cls, given: Mapping[str, Any]) -> Self:
        """Return the bundle, from a constructor's arguments by name.

        Args:
            given: the arguments; those that the bundle does not have are ignored.

        Raises:
            H5ValueError: an argument makes no sense.
        """
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # subclasses are dataclasses
        parsed = {name: kind.parse(given[name], name) for name, kind in cls.option_objects.items()}
        return cls(**{name: given[name] for name in names} | parsed)


@dataclass(frozen=True, kw_only=True)
class LoaderArguments(Arguments):
    """How batches are made and loaded, and how ranks work together; see the arguments of the data modules."""

    option_objects: ClassVar[Mapping[str, type[Options]]] = {
        "shuffle": ShuffleOptions,
        "workers": WorkerOptions,
        "files": FileOptions,
        "distributed": DistributedOptions,
    }

    batch_size: int
    eval_batch_size: int | None
    drop_last: bool
    seed: int | None
    collate_fn: Callable[[Any], Any] | None
    num_workers: int
    pin_memory: bool | Literal["auto"]
    shuffle: ShuffleOptions
    workers: WorkerOptions
    files: FileOptions
    distributed: DistributedOptions

    def __post_init__(self) -> None:
        check_whole(self.batch_size, "batch_size", 1, allow_none=False)
        check_whole(self.eval_batch_size, "eval_batch_size", 1)
        check_whole(self.seed, "seed", 0)
        check_whole(self.num_workers, "num_workers", 0, allow_none=False)
        if self.pin_memory not in (True, False, "auto"):
            raise H5ValueError(f"pin_memory={self.pin_memory!r} was given. Pass True, False or 'auto'.")
        check_callable(self.collate_fn, "collate_fn")


@dataclass(frozen=True, kw_only=True)
class SampleArguments(Arguments):
    """What a sample of an input and a target is made of; see the arguments of the data modules."""

    x_key: Keys | None
    y_key: Keys | None
    x_dtype: DTypeLike
    y_dtype: DTypeLike
    transform: Callable[..., Any] | None
    target_transform: Callable[..., Any] | None
    eval_transform: Callable[..., Any] | None
    batch_transform: Callable[..., Any] | None
    normalize: PathLike | None
    with_index: bool
    sample: Literal["row"] | None

    def __post_init__(self) -> None:
        for name in ("transform", "target_transform", "eval_transform", "batch_transform"):
            check_callable(getattr(self, name), name)
        check_choice(self.sample, "sample", (None, "row"))
