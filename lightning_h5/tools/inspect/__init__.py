"""``inspect_file`` and ``inspect_folder``: contents of files, the cost of a random row, and suggested settings."""

from .advice import Advice, SampleCost
from .contents import ArrayReport, RowCost
from .inspect import FileReport, FolderReport, StoreCost, inspect_file, inspect_folder

__all__ = [
    "Advice",
    "ArrayReport",
    "FileReport",
    "FolderReport",
    "RowCost",
    "SampleCost",
    "StoreCost",
    "inspect_file",
    "inspect_folder",
]
