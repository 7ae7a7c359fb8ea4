"""Mirrors on a local disk of files on slow storage: filled on demand, shared by processes, bounded in size."""

from .folder import MirrorFolder
from .mirror import Mirror, Staged
from .origin import Origin, PosixOrigin, Traffic, traffic
from .policy import ensure_folder, mirror_name, why_not_staged

__all__ = [
    "Mirror",
    "MirrorFolder",
    "Origin",
    "PosixOrigin",
    "Staged",
    "Traffic",
    "ensure_folder",
    "mirror_name",
    "traffic",
    "why_not_staged",
]
