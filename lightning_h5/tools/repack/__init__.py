"""``repack_file``: a copy of a file with other chunks, another compression, or its rows in random order."""

from .compression import COMPRESSIONS
from .repack import RepackedArray, RepackReport, StoredAs, repack_file

__all__ = ["COMPRESSIONS", "RepackReport", "RepackedArray", "StoredAs", "repack_file"]
