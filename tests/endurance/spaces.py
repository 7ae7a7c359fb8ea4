"""File systems of a process's own: small, or read-only, over folders that nobody else sees changed."""

import ctypes
import os

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def leave():
    """Gives this process mounts of its own; says whether the system lets it. It must have one thread."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(CLONE_NEWNS):
        if _libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
            return False
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    return _mount("none", "/", None, MS_REC | MS_PRIVATE) and small("/dev/shm", 64 << 20)


def small(folder, n_bytes):
    """Puts an empty file system of so many bytes over a folder."""
    return _mount("tmpfs", folder, "tmpfs", 0, f"size={n_bytes}")


def read_only(folder):
    """Has a folder refuse all writing."""
    return _mount(folder, folder, None, MS_BIND) and _mount("none", folder, None, MS_REMOUNT | MS_BIND | MS_RDONLY)


def _mount(source, target, kind, flags, options=None):
    encoded = [None if text is None else str(text).encode() for text in (source, target, kind, options)]
    return _libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]) == 0


def can_leave():
    """Whether this system lets processes have mounts of their own; tried in a child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if leave() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
