"""What ranks tell each other outside of training. Knows torch's processes, not Lightning."""

from .agreement import Exchange, are_near, exchange, own_store, this_process
from .once_per_node import Question, first_told

__all__ = ["Exchange", "Question", "are_near", "exchange", "first_told", "own_store", "this_process"]
