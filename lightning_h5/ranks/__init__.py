"""What ranks tell each other outside of training. Knows torch's processes, not Lightning."""

from .exchange import Exchange, exchange
from .processes import this_process

__all__ = ["Exchange", "exchange", "this_process"]
