"""Agreement between ranks outside of training: all see the same data, or all stop; values that a node computes once.

Ranks talk through the key-value store by which they found each other. Knows torch's processes, not Lightning.
"""

from .bulletin import Bulletin
from .exchange import Exchange, exchange
from .process_group import own_store
from .processes import OncePerNode, are_near, first_value, this_process

__all__ = ["Bulletin", "Exchange", "OncePerNode", "are_near", "exchange", "first_value", "own_store", "this_process"]
