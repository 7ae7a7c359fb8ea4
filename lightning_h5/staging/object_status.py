"""URLs, and the state of the object that one names."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass

__all__ = ["ObjectStatus", "is_url", "shown_url"]

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def is_url(path: object) -> bool:
    """Return whether a path names an object of a store, such as "s3://bucket/run.h5"."""
    return isinstance(path, str) and URL.match(path) is not None


def shown_url(url: str) -> str:
    """Return a URL without what may be a secret: a password, and a signature after "?" or "#"."""
    return re.sub(r"(://)[^/@]*:[^/@]*@", r"\1", re.split("[?#]", url, maxsplit=1)[0])


@dataclass(frozen=True)
class ObjectStatus:
    """The state of an object. Fields are named as in ``os.stat_result``.

    Attributes:
        st_size: bytes.
        etag: the store's name for this content; nothing if it gives none.
        st_mtime_ns: when it was written, if there is no ``etag``; otherwise 0, as a copy has another time.
    """

    st_size: int
    etag: str
    st_mtime_ns: int
    st_dev: int = 0
    st_ino: int = 0
    st_ctime_ns: int = 0
    st_mode: int = stat.S_IFREG
