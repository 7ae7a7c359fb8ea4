"""The mirrors of one folder: which processes use them, and the disk space that they share.

A file ``lock`` in the folder holds the number of bytes of all mirrors, and is locked for every change of it. Each
process has a file with the names of the mirrors that it uses, and keeps it locked as long as it lives. The kernel
drops locks of processes that die, so nothing has to be cleaned up after them.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..sizes import bytes_text
from .granules import GRANULE
from .locks import lock_within, try_lock, unlock

__all__ = ["MIRROR", "USES", "MirrorFolder"]

_log = logging.getLogger(__name__)

LOCK, USES, MIRROR = "lock", ".uses", ".mirror"  # a name, and suffixes
FREE_SHARE = 0.9
"""Share of the free disk space that mirrors may take if no limit is set."""

OVERHEAD, OVERHEAD_SHARE = 64 << 10, 128
"""What is left of a limit for tables of the file system, which it writes later: bytes, and a 128th part."""

TABLE_BYTES, RESERVED_SHARE = 4 << 20, 32
"""The last 32nd part of a limit is for the first bytes of mirrors, such as tables of files that are opened later: in a
full folder each read of an object's tables is a request (1,030 instead of 222 for 100 arrays, 2026-11-28). Decoded
chunks of files that are not staged may have it."""

PATIENCE = 5.0  # seconds to wait for the folder's lock, which is held for milliseconds
RECOVERY = 30.0  # seconds without writing after an error of the disk, or of the lock
RETRY = 1.0  # seconds until it is looked again whether there is room; more if there are many mirrors
MANY = 100  # mirrors
COUNT = struct.Struct("<QQ")  # bytes of all mirrors, and whether a write was begun that may not be counted


class MirrorFolder:
    """A folder with mirrors, as one process uses it. Safe to use from threads.

    Args:
        path: the folder, which exists.
        limit: maximum bytes of all mirrors in the folder; None for a share of the free space.

    Raises:
        OSError: it is not writable, or its file system has no locks.
    """

    def __init__(self, path: str, limit: int | None) -> None:
        self.path, self._pid = path, os.getpid()
        self._thread_lock = threading.Lock()
        self._names: set[str] = set()  # of mirrors that this process has used
        self._open: dict[int, str] = {}  # of mirrors that are open, by descriptor
        self._of_source: dict[str, set[str]] = {}  # names of mirrors by the start that those of one file share
        self._uses = -1
        self._no_writes_until = 0.0
        self._has_warned = False
        self._fd = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with self._locked() as is_locked:
                if not is_locked:
                    raise TimeoutError(errno.ETIMEDOUT, "another process has had the folder's lock for seconds")
                n_bytes_used = self._count()
                for name in os.listdir(path):
                    self._note_source(name)
                free = os.statvfs(path)
                self.limit = n_bytes_used + int(FREE_SHARE * free.f_bavail * free.f_frsize) if limit is None else limit
                self._limit = self.limit - self.limit // OVERHEAD_SHARE - OVERHEAD
                self._uses = self._new_uses()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder's files. Its mirrors count as unused then."""
        for name in ("_fd", "_uses"):
            if (fd := getattr(self, name)) >= 0:
                setattr(self, name, -1)
                os.close(fd)

    @property
    def is_usable(self) -> bool:
        """Whether the folder's files still exist, and belong to this process."""
        return self._fd >= 0 and self._pid == os.getpid() and os.fstat(self._fd).st_nlink > 0

    @property
    def takes_writes(self) -> bool:
        """Whether there may be room, as far as this process knows."""
        return time.monotonic() >= self._no_writes_until

    def open_mirror(self, name: str, n_bytes: int, tables: int) -> int:
        """Return the descriptor of a mirror's file, which is created if it does not exist.

        Args:
            name: of the file.
            n_bytes: its length.
            tables: where its tables begin.

        Raises:
            OSError: it cannot be created, or has no space for its tables.
        """
        path = os.path.join(self.path, name)
        with self._locked() as is_locked:
            if not is_locked:
                raise TimeoutError(errno.ETIMEDOUT, "another process has had the folder's lock for seconds")
            self._use(name)  # first: mirrors in use are not deleted
            self._delete_earlier(name)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if os.fstat(fd).st_size not in (0, n_bytes):  # not written by this package
                os.close(fd)
                os.unlink(path)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._open[fd] = name
            try:
                os.ftruncate(fd, n_bytes)
                self._allocate(fd, tables)
                os.utime(fd)  # unused mirrors are deleted by age
            except OSError as error:
                self.release(fd)
                os.close(fd)
                self._warn(error)
                raise
        return fd

    def release(self, fd: int) -> None:
        """Note that this process is about to close a mirror's file. Waits for nothing: a forked child calls it, too."""
        self._open.pop(fd, None)

    def _note_source(self, name: str) -> None:
        source, _, rest = name.partition("-")
        if name.endswith(MIRROR) and "-" in rest:
            self._of_source.setdefault(source, set()).add(name)

    def _delete_earlier(self, name: str) -> None:
        """Delete mirrors of earlier versions of a file, which no process uses: their bytes are never read again."""
        source, _, rest = name.partition("-")
        state = rest.partition("-")[0]
        names = self._of_source.get(source, set())
        earlier = {other for other in names if other.split("-")[1] != state}
        if earlier and (unused := earlier - self._names_of_others() - {*list(self._open.values())}):
            for other in unused:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, other))
            names -= unused
            self._count()
        self._note_source(name)

    def _allocate(self, fd: int, tables: int) -> None:
        """Allocate the disk space of a mirror's tables: they are mapped, and a lack of space would be a SIGBUS."""
        before = os.fstat(fd)
        try:
            os.posix_fallocate(fd, tables, before.st_size - tables)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._delete_unused(self.limit, self._limit)
            os.posix_fallocate(fd, tables, before.st_size - tables)
        n_bytes_used, is_unsure = self._read_count()
        self._write_count(n_bytes_used + (os.fstat(fd).st_blocks - before.st_blocks) * 512, is_unsure=is_unsure)

    def write(self, fd: int, tables: int, n_bytes: int, put: Callable[[], None]) -> float:
        """Write granules to a mirror if there is room for them, or room can be made. The caller has them locked.

        Args:
            fd: descriptor of the mirror's file.
            tables: where its tables begin.
            n_bytes: bytes of the granules; the last one of the file may have fewer than the others.
            put: writes them.

        Returns:
            Seconds after which to try again; 0 if they were written.
        """
        n_bytes = -(-n_bytes // GRANULE) * GRANULE
        try:
            with self._locked() as is_locked:
                if not is_locked or not self.is_usable:
                    self._no_writes_until = time.monotonic() + RECOVERY
                    return RECOVERY
                status = os.fstat(fd)
                n_bytes_used, seconds = self._room(status, tables, n_bytes)
                if seconds:
                    return seconds
                self._write_count(n_bytes_used, is_unsure=True)
                put()
                self._write_count(n_bytes_used + (os.fstat(fd).st_blocks - status.st_blocks) * 512)
        except OSError as error:
            return self.pause(error)
        return 0

    def reserve(self, fd: int, tables: int, n_bytes: int, *, leaves_tables: bool = True) -> float:
        """Count room for bytes that are written to a mirror without the lock.

        Args:
            fd: see ``write``.
            tables: see there.
            n_bytes: see there.
            leaves_tables: leave the room for the first bytes of mirrors.

        Returns:
            See there.
        """
        try:
            with self._locked() as is_locked:
                if not is_locked or not self.is_usable:
                    self._no_writes_until = time.monotonic() + RECOVERY
                    return RECOVERY
                n_bytes_used, seconds = self._room(os.fstat(fd), tables, n_bytes, leaves_tables=leaves_tables)
                if not seconds:
                    self._write_count(n_bytes_used + n_bytes)
                return seconds
        except OSError as error:
            return self.pause(error)

    def pause(self, error: OSError) -> float:
        """Write nothing for some time after an error of the disk; return the seconds."""
        self._no_writes_until = time.monotonic() + RECOVERY
        self._after_error(error)
        return RECOVERY

    def _room(
        self, status: os.stat_result, tables: int, n_bytes: int, *, leaves_tables: bool = True
    ) -> tuple[int, float]:
        """Return the bytes that all mirrors take, and seconds until it is looked again if there is no room for more.

        Args:
            status: of the mirror's file.
            tables: where its tables begin.
            n_bytes: bytes to write.
            leaves_tables: see ``reserve``.
        """
        n_bytes_used, is_unsure = self._read_count()
        n_bytes_used = self._count() if is_unsure else n_bytes_used
        reserved = status.st_blocks * 512 - (status.st_size - tables)
        takes_all = not leaves_tables or reserved + n_bytes <= TABLE_BYTES
        limit = self._limit if takes_all else self._limit - self._limit // RESERVED_SHARE
        if n_bytes_used + n_bytes > limit:
            n_bytes_used, n_mirrors = self._delete_unused(n_bytes, limit)
            if n_bytes_used + n_bytes > limit:
                return n_bytes_used, RETRY * (1 + n_mirrors / MANY)
        return n_bytes_used, 0

    def used(self) -> int:
        """Return the disk space that all files in the folder take."""
        n_bytes = 0
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    n_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        return n_bytes

    # Inside the lock ------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Lock the folder for other threads and processes; yields whether that was possible."""
        if not self._thread_lock.acquire(timeout=PATIENCE):
            yield False
            return
        try:
            if not lock_within(self._fd, PATIENCE):
                yield False
                return
            try:
                yield True
            finally:
                unlock(self._fd)
        finally:
            self._thread_lock.release()

    def _read_count(self) -> tuple[int, bool]:
        data = os.pread(self._fd, COUNT.size, 0)
        n_bytes_used, is_unsure = COUNT.unpack(data) if len(data) == COUNT.size else (0, 1)
        return n_bytes_used, bool(is_unsure)

    def _write_count(self, used: int, *, is_unsure: bool = False) -> None:
        os.pwrite(self._fd, COUNT.pack(used, is_unsure), 0)

    def _count(self) -> int:
        """Count the bytes of all mirrors again: a process may have died during a write."""
        n_bytes_used = self.used()
        self._write_count(n_bytes_used)
        return n_bytes_used

    def _new_uses(self) -> int:
        """Return the descriptor of a new, locked file for the names of the mirrors that this process uses."""
        path = os.path.join(self.path, f"{secrets.token_hex(8)}{USES}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try_lock(fd)
        return fd

    def _use(self, name: str) -> None:
        if name not in self._names:
            os.write(self._uses, f"{name}\n".encode())
            self._names.add(name)

    def _names_of_others(self) -> set[str]:
        """Return the names of mirrors that other living processes use; files of dead processes are deleted."""
        names: set[str] = set()
        for name in [name for name in os.listdir(self.path) if name.endswith(USES)]:
            path = os.path.join(self.path, name)
            with suppress(OSError), open(path, "rb") as file:
                if os.path.samestat(os.fstat(file.fileno()), os.fstat(self._uses)):
                    continue
                if try_lock(file.fileno(), shared=True):
                    os.unlink(path)
                else:
                    names |= set(file.read().decode().split("\n"))
        return names

    def _delete_unused(self, n_bytes: int, limit: int) -> tuple[int, int]:
        """Delete mirrors that no process uses, the oldest first, until there is room for a number of bytes.

        Args:
            n_bytes: bytes to write.
            limit: bytes that all mirrors may take then.

        Returns:
            Bytes that the other mirrors take, and their number.
        """
        n_bytes_used, in_use = self._count(), self._names | self._names_of_others()
        names = [name for name in os.listdir(self.path) if name.endswith(MIRROR)]
        status = {name: os.stat(os.path.join(self.path, name)) for name in names if name not in in_use}
        n_deleted = 0
        for name in sorted(status, key=lambda name: status[name].st_mtime_ns):
            if n_bytes_used + n_bytes <= limit:
                break
            os.unlink(os.path.join(self.path, name))
            n_bytes_used -= status[name].st_blocks * 512
            n_deleted += 1
        self._write_count(n_bytes_used)
        return n_bytes_used, len(names) - n_deleted

    def _after_error(self, error: OSError) -> None:
        """Delete unused mirrors if the disk is full, and warn once."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError), self._locked() as is_locked:
                if is_locked and self.is_usable:
                    self._delete_unused(self.limit, self._limit)
        self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "staging: writing to %r failed: %s. What the mirrors there hold (%s) is used, and the rest is read from "
            "the original files. Free disk space there, or set staging.max_bytes.",
            self.path,
            error.strerror,
            bytes_text(self.used()),
        )
