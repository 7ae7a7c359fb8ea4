"""Things that people and programs do to files while others train from them, done by a thread or by a process."""

import os
import random
import shutil
import threading
import time
import traceback
from multiprocessing import get_context

from guards import HANG

SPAN = 16 * 1024  # bytes of a chunk to overwrite


class Deed:
    """What is done to a file.

    Args:
        path: the file.
        other: another valid file of the same size, with other values at each place.
        longer: one with more rows.
        places: where in the file each run of ``SPAN`` bytes of values is stored, and how many bytes it takes there.
    """

    def __init__(self, path, other, longer, places, seed):
        self.path, self.other, self.longer, self.places = path, other, longer, places
        self.chosen = random.Random(seed)

    def _write(self, start, content):
        fd = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(fd, content, start)
        finally:
            os.close(fd)

    def _other_bytes(self, start, n_bytes):
        with open(self.other, "rb") as file:
            file.seek(start)
            return file.read(n_bytes)

    def truncate(self):
        os.truncate(self.path, self.chosen.randrange(os.path.getsize(self.path)))

    def truncate_and_grow(self):
        """What is behind the cut reads as zeros."""
        n_bytes = os.path.getsize(self.path)
        os.truncate(self.path, self.chosen.randrange(n_bytes))
        os.truncate(self.path, n_bytes)

    def edit_bytes(self):
        start, n_bytes = self.chosen.choice(self.places)
        at = start + self.chosen.randrange(n_bytes - 8)
        self._write(at, self._other_bytes(at, 8))

    def edit_chunk(self):
        """All bytes of a chunk, which decodes to other values."""
        start, n_bytes = self.chosen.choice(self.places)
        self._write(start, self._other_bytes(start, n_bytes))

    def overwrite(self):
        """As ``cp`` over it does: all of the file, in place."""
        shutil.copyfile(self.other, self.path)

    def _put(self, source):
        shutil.copyfile(source, f"{self.path}.new")
        os.replace(f"{self.path}.new", self.path)

    def replace(self):
        self._put(self.other)

    def replace_by_longer(self):
        self._put(self.longer)

    def replace_and_put_back(self, seconds=0.0):
        """The name leads to another file for a moment, and is never without one."""
        os.link(self.path, f"{self.path}.away")
        self._put(self.other)
        time.sleep(seconds)
        os.replace(f"{self.path}.away", self.path)

    def replace_and_put_back_later(self):
        """The same for long enough that rows are asked for meanwhile."""
        self.replace_and_put_back(self.chosen.uniform(0.02, 0.2))

    def touch(self):
        os.utime(self.path)

    def append(self):
        with open(self.path, "ab") as file:
            file.write(b"more")

    def delete(self):
        os.unlink(self.path)

    def delete_and_make(self):
        os.unlink(self.path)
        shutil.copyfile(self.other, self.path)

    def rename(self):
        os.rename(self.path, f"{self.path}.away")

    def rename_and_back(self):
        os.rename(self.path, f"{self.path}.away")
        os.rename(f"{self.path}.away", self.path)


GONE, SIZE, OTHER, WRITTEN = "and cannot be found", "bytes and has", "was replaced by another file", "was written to"

DEEDS = {
    "truncate": {SIZE, WRITTEN},
    "truncate_and_grow": {SIZE, WRITTEN},
    "edit_bytes": {WRITTEN},
    "edit_chunk": {WRITTEN},
    "overwrite": {SIZE, WRITTEN},  # the file is empty for a moment
    "replace": {OTHER},
    "replace_by_longer": {OTHER},
    "replace_and_put_back": {OTHER},
    "replace_and_put_back_later": {OTHER},
    "touch": {WRITTEN},
    "append": {SIZE, WRITTEN},
    "delete": {GONE},
    "delete_and_make": {GONE, OTHER, SIZE, WRITTEN},  # as another file, or as one with the same inode
    "rename": {GONE},
    "rename_and_back": {GONE},
}
"""For each deed the differences that an error may name: times and sizes do not change at one instant."""

UNDONE = ("rename_and_back", "replace_and_put_back", "replace_and_put_back_later")
"""Deeds after which the file is what it was: harmless but for the moment."""


class ByThread:
    """Does deeds in a thread of this process."""

    def start(self, deed, name, wait=0.0):
        """Begins; does not wait until it is done."""
        self._error = None
        self._thread = threading.Thread(target=self._do, args=(deed, name, wait), name="deeds")
        self._thread.start()

    def _do(self, deed, name, wait):
        time.sleep(wait)
        try:
            getattr(deed, name)()
        except BaseException as error:
            self._error = error

    def join(self):
        """Waits until it is done."""
        self._thread.join()
        assert self._error is None, self._error


class ByProcess:
    """Does deeds in a process of its own, which lives until ``close``."""

    def __init__(self):
        context = get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def start(self, deed, name, wait=0.0):
        """Begins; does not wait until it is done."""
        self._ours.send((deed, name, wait))

    def join(self):
        """Waits until it is done."""
        assert self._ours.poll(HANG)
        assert (error := self._ours.recv()) is None, error

    def close(self):
        """Ends the process."""
        self._ours.send(None)
        self._process.join(HANG)
        self._ours.close()


def _serve(pipe):
    while (asked := pipe.recv()) is not None:
        deed, name, wait = asked
        time.sleep(wait)
        try:
            getattr(deed, name)()
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
