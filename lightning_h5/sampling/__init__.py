"""Pure functions for orders, shards and splits, and thin torch samplers over them. Reads no file."""

from .blocks import BlockTable
from .cuts import EvaluationCut, TrainingCut
from .lengths import LengthRecipe
from .mixture import EpochLength, Mixture, MixtureRecipe, Strategy, check_mixture
from .permutation import KeyedPermutation, TablePermutation, permutation, stream
from .plan import (
    PLAN_VERSION,
    EpochPlan,
    EvaluationPlan,
    Mode,
    OrderParameters,
    Segment,
    SourceOrder,
    TrainingPlan,
    consumed_rows,
    order_rows,
)
from .replica import Replica, resolve_replica
from .rows import Rows, as_array, places_in, union
from .samplers import PlanSampler
from .sequences import EpochSequence, Recipe
from .shard_samplers import EpochShuffleSampler, ShardSampler
from .shards import RankShard, ShardMode, balanced_contiguous_shard, interleaved_indices
from .splits import group_split, k_fold
from .weighted import RowWeights, WeightedRecipe
from .window import WindowOrder

_balanced_contiguous_shard = balanced_contiguous_shard  # the seed documents' names stay importable
_interleaved_indices = interleaved_indices

__all__ = [
    "PLAN_VERSION",
    "BlockTable",
    "EpochLength",
    "EpochPlan",
    "EpochSequence",
    "EpochShuffleSampler",
    "EvaluationCut",
    "EvaluationPlan",
    "KeyedPermutation",
    "LengthRecipe",
    "Mixture",
    "MixtureRecipe",
    "Mode",
    "OrderParameters",
    "PlanSampler",
    "RankShard",
    "Recipe",
    "Replica",
    "RowWeights",
    "Rows",
    "Segment",
    "ShardMode",
    "ShardSampler",
    "SourceOrder",
    "Strategy",
    "TablePermutation",
    "TrainingCut",
    "TrainingPlan",
    "WeightedRecipe",
    "WindowOrder",
    "as_array",
    "balanced_contiguous_shard",
    "check_mixture",
    "consumed_rows",
    "group_split",
    "interleaved_indices",
    "k_fold",
    "order_rows",
    "permutation",
    "places_in",
    "resolve_replica",
    "stream",
    "union",
]
