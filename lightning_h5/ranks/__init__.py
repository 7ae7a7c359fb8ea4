"""What ranks tell each other outside of training. Knows torch's processes, not Lightning."""

from .exchange import Exchange, exchange
from .once import Question
from .processes import are_near, this_process

__all__ = ["Exchange", "Question", "are_near", "exchange", "this_process"]
