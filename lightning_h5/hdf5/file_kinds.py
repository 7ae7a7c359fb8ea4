"""Recognize files that are not HDF5 by their first bytes, and propose a remedy. Reads no file."""

from __future__ import annotations

__all__ = ["HEAD_BYTES", "TAR_MARK", "advice_about"]

HEAD_BYTES = 512
"""Bytes at the beginning of a file that show its kind."""

TAR_MARK = (257, b"ustar")
"""Offset and bytes of the mark of a tar archive."""

_DOWNLOAD = "Download the file again, with the credentials that it needs."

_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "It is a pointer of Git LFS, without the data: run `git lfs pull`."),
    (b"/annex/", "It is a pointer of git-annex, without the data: run `git annex get` or `datalad get`."),
    (b"<!doctype html", f"It is a web page, such as a login or an error of a server. {_DOWNLOAD}"),
    (b"<html", f"It is a web page, such as a login or an error of a server. {_DOWNLOAD}"),
    (b"<?xml", f"It is XML, such as an error of an object store. {_DOWNLOAD}"),
    (b"{", f"It is JSON, such as an error of a server. {_DOWNLOAD}"),
    (b"\x1f\x8b", "It is compressed with gzip. Unpack it: `gunzip`, or `tar xzf` for an archive."),
    (b"bzh", "It is compressed with bzip2. Unpack it: `bunzip2`, or `tar xjf` for an archive."),
    (b"\xfd7zxz\0", "It is compressed with xz. Unpack it: `unxz`, or `tar xJf` for an archive."),
    (b"(\xb5/\xfd", "It is compressed with Zstandard. Unpack it: `unzstd`."),
    (b"pk\x03\x04", "It is a ZIP archive, such as .npz and .pt files. Unpack it, or write its arrays to an HDF5 file."),
    (b"\x93numpy", "It is an array of NumPy. Write it to an HDF5 file: h5py.File('x.h5', 'w')['x'] = np.load(...)."),
    (b"matlab 5.0", "It is a MAT file of an older format than 7.3. Write it again with the option '-v7.3' of MATLAB."),
    (b"cdf", "It is netCDF in its classic format. Write it again in format 4: `nccopy -k nc4 in.nc out.nc`."),
    (b"\x0e\x03\x13\x01", "It is HDF4, which is another format. Convert it: `h4toh5convert`."),
    (b"par1", "It is Parquet. Pass a table with columns for HDF5 files as the argument table."),
    (b"\x89png", "It is an image. Pass an HDF5 file with images."),
    (b"\xff\xd8\xff", "It is an image. Pass an HDF5 file with images."),
    (b"\x80\x02", "It is a pickle of Python. Load it, and write its arrays to an HDF5 file."),
    (b"\x80\x04", "It is a pickle of Python. Load it, and write its arrays to an HDF5 file."),
    (b"\x80\x05", "It is a pickle of Python. Load it, and write its arrays to an HDF5 file."),
)
"""The first bytes of files, in lower case, and sentences about them."""


def advice_about(head: bytes) -> str:
    """Return sentences about a file that is not HDF5: its kind, and the remedy.

    Args:
        head: the first ``HEAD_BYTES`` bytes of the file, or fewer.
    """
    if not head:
        return "It is empty. Copy or download it again."
    if not any(head):
        return "Its first bytes are zeros, so a copy or a download is incomplete. Copy or download it again."
    start = head.lstrip(b" \t\r\n\xef\xbb\xbf").lower()
    for signature, advice in _KINDS:
        if start.startswith(signature):
            return advice
    if head[TAR_MARK[0] :].startswith(TAR_MARK[1]):
        return "It is a tar archive. Unpack it: `tar xf`."
    return "Pass an HDF5 file, or check that the copy of this one is complete."
