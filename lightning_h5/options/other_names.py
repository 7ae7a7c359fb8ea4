"""What people call arguments that have another name here."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["other_name"]

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("path", "paths", "file", "filename", "data", "dataset", "data_dir", "data_path", "root", "hdf5_files"),
        ("train_path", "path", "paths"),
    ),
    "files": ("train_path", "path", "paths"),
    **dict.fromkeys(("x", "key", "keys", "input", "inputs", "input_key", "data_key", "features", "images"), ("x_key",)),
    **dict.fromkeys(("y", "target", "targets", "labels", "target_key", "label_key"), ("y_key",)),
    "load_fields": ("fields",),
    "fields": ("load_fields",),
    "field_map": ("fields",),
    "dtype": ("x_dtype",),
    **dict.fromkeys(("transforms", "augment", "augmentation", "augmentations", "preprocess"), ("transform",)),
    **dict.fromkeys(("gpu_transform", "gpu_transforms", "gpu_augment", "transform_on_gpu"), ("device_transform",)),
    **dict.fromkeys(("worker", "n_workers", "nworkers", "workers"), ("num_workers",)),
    **dict.fromkeys(("bs", "n_batch"), ("batch_size",)),
    **dict.fromkeys(("val_split", "validation_split", "val_size", "train_val_split", "val_ratio"), ("split=0.1",)),
    "persistent_workers": ("workers={'persistent': True}",),
    "multiprocessing_context": ("workers={'start_method': 'spawn'}",),
    "worker_init_fn": ("workers={'init_fn': ...}",),
    "shuffle_bytes": ("shuffle={'buffer': '512 MiB'}",),
    "cache_size": ("row_cache", "cache_size", "files={'cache_bytes': '1 GiB'}"),
    **dict.fromkeys(("filter", "filters", "condition", "query"), ("where",)),
    "allowed_guids": ("where={'guid': [...]}",),
    "cs_label": ("where={'cs_label': True}",),
    "bg_label": ("where={'bg_label': True}",),
    "epoch_min": ("where={'epoch': {'min': ...}}",),
    "epoch_max": ("where={'epoch': {'max': ...}}",),
    **dict.fromkeys(("window_size", "window_length", "seq_len", "sequence_length", "context_length"), ("window",)),
    "sequence_key": ("segments={'key': ...}",),
    "sequence_order": ("segments={'key': ..., 'sort_key': ...}",),
    "bucket_by_length": ("segments={'bucket': True}",),
    **dict.fromkeys(("patch_size", "crop_size"), ("patch={'shape': [...]}",)),
    **dict.fromkeys(("sampling_strategy", "sources"), ("mixture",)),
    "share_memory": ("memory={'share': True}", "share_memory"),
    "size": ("shape", "length"),
}
"""Names that other libraries, and earlier versions, have for arguments; the first argument that exists is proposed."""


def other_name(name: str, names: Iterable[str]) -> str:
    """Return a ``did you mean`` sentence if a name is common elsewhere, or was ours, with a leading blank, or nothing.

    Args:
        name: the name.
        names: the arguments.
    """
    for call in OTHER_NAMES.get(name.casefold(), ()):
        argument, _, value = call.partition("=")
        if argument in names:
            return f" Did you mean {call if value else repr(call)}?"
    return ""
