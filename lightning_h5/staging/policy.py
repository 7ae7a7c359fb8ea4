"""Whether a file is staged, and the folder that its mirror is in."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from contextlib import suppress
from typing import Any

from ..errors import H5ValueError
from ..options import StagingOptions
from .folder import MirrorFolder
from .locks import has_range_locks
from .mirror_file import drop_inherited_mirrors
from .object_status import is_url

__all__ = ["MIN_BYTES", "ensure_folder", "mirror_name", "why_not_staged"]

MIN_BYTES = 1 << 20
"""Files below this size are not staged: reading one takes as long as opening its mirror."""

FORMAT = 2

NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "panfs", "smb3"}
"""Types of file systems that several machines share: a mirror's marks would not be seen by others at once."""

_folders: dict[tuple[str, int | None], MirrorFolder] = {}  # of this process
_hooks: list[object] = []  # the function that runs in forked children, once it is needed


def why_not_staged(options: StagingOptions, device: int, n_bytes: int, *, grows: bool) -> str | None:
    """Return why a file is not staged, in a few words; None if it is.

    Args:
        options: where mirrors are kept.
        device: of the file.
        n_bytes: of the file.
        grows: whether the file has a live writer.

    Raises:
        H5ValueError: the folder cannot be used.
    """
    if grows:
        return "it is being written"
    if n_bytes < MIN_BYTES:
        return f"it is smaller than {MIN_BYTES >> 20} MiB"
    if _is_on(device, ensure_folder(options).path):
        return "it is on the disk that it would be staged to"
    return None


def _is_on(device: int, folder: str) -> bool:
    return os.stat(folder).st_dev == device


def ensure_folder(options: StagingOptions) -> MirrorFolder:
    """Return the folder with the mirrors of this user, which is created if it does not exist.

    Raises:
        H5ValueError: the system has no locks, or the folder cannot be created, written to, or belongs to another user.
    """
    key = options.folder, options.limit
    folder = _folders.get(key)
    if folder is not None and folder.is_usable:
        return folder
    if not has_range_locks():
        raise H5ValueError(
            f"staging.dir={os.fsdecode(options.dir)!r} was given, and staging requires Linux. Leave staging out."
        )
    path = os.path.join(key[0], f"lightning_h5-{os.geteuid()}")
    try:
        os.makedirs(key[0], exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, f"{path!r} is not a folder of this user alone")
        if (kind := _file_system(path)) in NETWORK:
            raise OSError(errno.EINVAL, f"it is on a network file system ({kind})")
        folder = MirrorFolder(path, key[1])
    except OSError as error:
        raise H5ValueError(
            f"staging.dir={os.fsdecode(options.dir)!r} cannot be used: {error.strerror} ({key[0]!r}). Pass a folder "
            "on a local disk that is writable and has free space, or leave staging out."
        ) from error
    if not _hooks:
        _hooks.append(_close_copies)
        os.register_at_fork(after_in_child=_close_copies)
    _folders[key] = folder
    return folder


def _file_system(path: str) -> str:
    """Return the type of the file system that a folder is on, such as "ext4"; nothing if that is unknown."""
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    with suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split()[2] == device:
                return after.split()[0]
    return ""


def mirror_name(path: str, version: tuple[int | str, ...], part: str = "") -> str:
    """Return a name for the mirror of a file, which is another one once the file was changed or the machine restarted.

    After a crash of the machine, marks may have reached the disk before the bytes that they stand for. All names of a
    file begin alike, so that a folder finds the mirrors of its earlier versions.

    Args:
        path: the file.
        version: its state, as numbers and text.
        part: identity of the part of the file that is mirrored; empty for the whole file.
    """
    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    name = path if is_url(path) else os.path.realpath(path)
    source, state = (_digest(*values) for values in ((FORMAT, name), (FORMAT, name, version, boot)))
    return f"{source}-{state}-{_digest(part)}" if part else f"{source}-{state}"


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:24]


def _close_copies() -> None:
    """Close a forked child's copies of descriptors: they would keep locks if the parent dies."""
    drop_inherited_mirrors()
    for folder in _folders.values():
        folder.close()
    _folders.clear()
