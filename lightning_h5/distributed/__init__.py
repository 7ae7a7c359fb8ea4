"""Agreement between ranks outside of training. Knows torch's processes, not Lightning."""

from .agreement import Exchange, are_near, exchange, own_store, this_process
from .once_per_node import OncePerNode, first_value

__all__ = ["Exchange", "OncePerNode", "are_near", "exchange", "first_value", "own_store", "this_process"]
