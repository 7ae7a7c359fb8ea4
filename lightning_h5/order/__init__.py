"""Pure functions for orders, shards and splits, and thin torch samplers over them. Reads no file."""

from .batches import LengthRecipe
from .mixture import EpochLength, Mixture, Strategy, check_mixture
from .permutation import KeyedPermutation, TablePermutation, permutation, stream, uniform
from .plan import (
    PLAN_VERSION,
    EpochPlan,
    EpochRecipe,
    EvaluationBatches,
    Mode,
    OrderParameters,
    Segment,
    SourceOrder,
    TrainBatches,
    order_rows,
)
from .position import OtherShardsError, Passes, Position, Progress, is_position
from .recipes import MixtureRecipe, RowWeights, ShardRows, WeightedRecipe
from .samplers import EpochShuffleSampler, PlanSampler, ShardSampler
from .shards import (
    RankShard,
    Replica,
    Rows,
    ShardMode,
    as_array,
    balanced_contiguous_shard,
    interleaved_indices,
    launched_replica,
    places_in,
    resolve_replica,
    union,
)
from .splits import group_split, k_fold
from .window import BlockTable, WindowOrder

_balanced_contiguous_shard = balanced_contiguous_shard  # the seed documents' names stay importable
_interleaved_indices = interleaved_indices

__all__ = [
    "PLAN_VERSION",
    "BlockTable",
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
    "Segment",
    "ShardMode",
    "ShardRows",
    "ShardSampler",
    "SourceOrder",
    "Strategy",
    "TablePermutation",
    "TrainBatches",
    "WeightedRecipe",
    "WindowOrder",
    "as_array",
    "balanced_contiguous_shard",
    "check_mixture",
    "group_split",
    "interleaved_indices",
    "is_position",
    "k_fold",
    "launched_replica",
    "order_rows",
    "permutation",
    "places_in",
    "resolve_replica",
    "stream",
    "uniform",
    "union",
]
