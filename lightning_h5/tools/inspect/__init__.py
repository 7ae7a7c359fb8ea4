"""``inspect_file`` and ``inspect_folder``: what is in files, what a random row costs, and which settings to use."""

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
