"""What ranks tell each other outside of training. Knows torch's processes, not Lightning."""

from .exchange import Exchange, exchange
from .once import Question, first_told
from .processes import are_near, this_process
from .store import own_store

__all__ = ["Exchange", "Question", "are_near", "exchange", "first_told", "own_store", "this_process"]
