"""Callbacks that the data modules insert, and that can be passed by hand."""

from .save_on_preemption import SaveOnPreemption
from .set_epoch import SetEpochCallback
from .stats_monitor import H5StatsMonitor

__all__ = ["H5StatsMonitor", "SaveOnPreemption", "SetEpochCallback"]
