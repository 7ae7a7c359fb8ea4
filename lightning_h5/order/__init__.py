"""Pure functions for orders, shards and splits, and thin torch samplers over them. Reads no file.

Samplers are imported when they are first used: nothing else here needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .batches import LengthRecipe
from .history import RunHistory, StepBatch, Stretch, batches_of_step, check_run, run_settings
from .mixture import EpochLength, Mixture, Strategy, check_mixture
from .nodes import N_LABELS, NodeOrder, NodeTurns, deal_blocks, epoch_order, label_entropy
from .permutation import KeyedPermutation, TablePermutation, permutation, stream, uniform
from .plan import (
    PLAN_VERSION,
    EpochPlan,
    EpochRecipe,
    Mode,
    OrderParameters,
    Segment,
    SourceOrder,
    TrainBatches,
    order_rows,
)
from .position import OtherShardsError, Position, is_position, saved_mode
from .recipes import EachRowOnce, MixtureRecipe, RowWeights, WeightedRecipe
from .shard_rows import ShardRows
from .shards import (
    EvaluationBatches,
    RankShard,
    Replica,
    Rows,
    ShardMode,
    as_array,
    balanced_contiguous_shard,
    check_nodes,
    condensed,
    find_places,
    interleaved_indices,
    launched_nodes,
    launched_replica,
    note_length,
    places_in,
    present_replica,
    resolve_replica,
    rows_at,
    union,
)
from .splits import group_split, k_fold, time_split
from .token_batches import TokenRecipe
from .token_mixture import TokenMixtureRecipe
from .weight_schedule import WeightSchedule
from .window import BlockTable, WindowOrder

if TYPE_CHECKING:
    from .passes import Passes, Progress
    from .samplers import EpochShuffleSampler, PlanSampler, ShardSampler

_balanced_contiguous_shard = balanced_contiguous_shard  # the seed documents' names stay importable
_interleaved_indices = interleaved_indices

__all__ = [
    "N_LABELS",
    "PLAN_VERSION",
    "BlockTable",
    "EachRowOnce",
    "EpochLength",
    "EpochPlan",
    "EpochRecipe",
    "EpochShuffleSampler",
    "EvaluationBatches",
    "KeyedPermutation",
    "LengthRecipe",
    "Mixture",
    "MixtureRecipe",
    "Mode",
    "NodeOrder",
    "NodeTurns",
    "OrderParameters",
    "OtherShardsError",
    "Passes",
    "PlanSampler",
    "Position",
    "Progress",
    "RankShard",
    "Replica",
    "RowWeights",
    "Rows",
    "RunHistory",
    "Segment",
    "ShardMode",
    "ShardRows",
    "ShardSampler",
    "SourceOrder",
    "StepBatch",
    "Strategy",
    "Stretch",
    "TablePermutation",
    "TokenMixtureRecipe",
    "TokenRecipe",
    "TrainBatches",
    "WeightSchedule",
    "WeightedRecipe",
    "WindowOrder",
    "as_array",
    "balanced_contiguous_shard",
    "batches_of_step",
    "check_mixture",
    "check_nodes",
    "check_run",
    "condensed",
    "deal_blocks",
    "epoch_order",
    "find_places",
    "group_split",
    "interleaved_indices",
    "is_position",
    "k_fold",
    "label_entropy",
    "launched_nodes",
    "launched_replica",
    "note_length",
    "order_rows",
    "permutation",
    "places_in",
    "present_replica",
    "resolve_replica",
    "rows_at",
    "run_settings",
    "saved_mode",
    "stream",
    "time_split",
    "uniform",
    "union",
]


_MODULES = {
    **dict.fromkeys(("EpochShuffleSampler", "PlanSampler", "ShardSampler"), "samplers"),
    **dict.fromkeys(("Passes", "Progress"), "passes"),
}
"""Names of modules that import torch."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
