"""Pure functions for orders, shards and splits, and thin torch samplers over them. Reads no file."""

from .buckets import LengthRecipe
from .epoch import (
    PLAN_VERSION,
    EpochPlan,
    EpochRecipe,
    EvaluationBatches,
    Mode,
    OrderParameters,
    Segment,
    SourceOrder,
    TrainBatches,
    balanced_contiguous_shard,
    consumed_rows,
    interleaved_indices,
    order_rows,
)
from .mixture import EpochLength, Mixture, MixtureRecipe, Strategy, check_mixture
from .permutation import KeyedPermutation, TablePermutation, permutation, stream
from .position import OtherShardsError, Position, is_position
from .samplers import PlanSampler, Replica, launched_replica, resolve_replica
from .shards import (
    EpochShuffleSampler,
    RankShard,
    Rows,
    ShardMode,
    ShardSampler,
    as_array,
    places_in,
    union,
)
from .splits import group_split, k_fold
from .weights import RowWeights, WeightedRecipe
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
    "PlanSampler",
    "Position",
    "RankShard",
    "Replica",
    "RowWeights",
    "Rows",
    "Segment",
    "ShardMode",
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
    "consumed_rows",
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
    "union",
]
