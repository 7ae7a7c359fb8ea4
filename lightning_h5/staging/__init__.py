"""Mirrors on a local disk of files on slow storage: filled on demand, shared by processes, bounded in size."""

from .checksums import RIGHT, UNREAD, compile_sums
from .decoded import DecodedArray, DecodedMirror
from .folder import MirrorFolder
from .mirror import Mirror, Staged, requests_for
from .network import IN_FLIGHT, Address, network_address, use_network
from .object_status import ObjectStatus, check_url, check_urls, is_url, shown_url
from .objects import (
    INDEX_SUFFIX,
    expand_url,
    look_ahead,
    mirror_of,
    object_status,
    published_index,
    staging_of,
    use_staging,
)
from .origin import Origin, PosixOrigin
from .policy import MIN_BYTES, ensure_folder, mirror_name, why_not_staged

__all__ = [
    "INDEX_SUFFIX",
    "IN_FLIGHT",
    "MIN_BYTES",
    "RIGHT",
    "UNREAD",
    "Address",
    "DecodedArray",
    "DecodedMirror",
    "Mirror",
    "MirrorFolder",
    "ObjectStatus",
    "Origin",
    "PosixOrigin",
    "Staged",
    "check_url",
    "check_urls",
    "compile_sums",
    "ensure_folder",
    "expand_url",
    "is_url",
    "look_ahead",
    "mirror_name",
    "mirror_of",
    "network_address",
    "object_status",
    "published_index",
    "requests_for",
    "shown_url",
    "staging_of",
    "use_network",
    "use_staging",
    "why_not_staged",
]
