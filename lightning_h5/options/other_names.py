"""Names of arguments in other libraries, and their names here."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["other_name"]

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("path", "paths", "file", "filename", "data", "dataset", "data_dir", "data_path", "root", "hdf5_files"),
        ("train_path", "path", "paths"),
    ),
    **dict.fromkeys(
        ("h5_path", "hdf5_path", "h5_file", "hdf5_file", "file_path", "filepath", "train", "train_file", "train_data"),
        ("train_path", "path", "paths", "val_fraction"),
    ),
    "files": ("train_path", "path", "paths"),
    **dict.fromkeys(("x", "key", "keys", "input", "inputs", "input_key", "data_key", "features", "images"), ("x_key",)),
    **dict.fromkeys(("y", "target", "targets", "labels", "target_key", "label_key"), ("y_key",)),
    **dict.fromkeys(("obs_keys", "data_keys", "dataset_keys", "feature_keys", "columns"), ("fields", "load_fields")),
    "load_fields": ("fields",),
    "fields": ("load_fields",),
    "field_map": ("fields",),
    "dtype": ("x_dtype",),
    **dict.fromkeys(("transforms", "augment", "augmentation", "augmentations", "preprocess"), ("transform",)),
    **dict.fromkeys(("gpu_transform", "gpu_transforms", "gpu_augment", "transform_on_gpu"), ("device_transform",)),
    **dict.fromkeys(("worker", "n_workers", "nworkers", "workers"), ("num_workers",)),
    **dict.fromkeys(("bs", "n_batch"), ("batch_size",)),
    **dict.fromkeys(("val_split", "validation_split", "val_size", "train_val_split", "val_ratio"), ("split=0.1",)),
    **dict.fromkeys(("train_fraction", "train_size", "train_ratio", "train_split"), ("split=[0.8, 0.2]",)),
    **dict.fromkeys(("filter_key", "filter_by_attribute"), ("split={'key': 'mask/{split}'}",)),
    **dict.fromkeys(("sample_weight", "sample_weights"), ("weights",)),
    **dict.fromkeys(("mean", "std"), ("normalize={'x': {'mean': ..., 'std': ...}}",)),
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
    **dict.fromkeys(
        ("window_size", "window_length", "seq_len", "seq_length", "sequence_length", "context_length"), ("window",)
    ),
    "frame_stack": ("window=[-1, 1]",),
    "sequence_key": ("segments={'key': ...}",),
    "sequence_order": ("segments={'key': ..., 'sort_key': ...}",),
    "bucket_by_length": ("segments={'bucket': True}",),
    **dict.fromkeys(("max_tokens", "batch_tokens", "token_budget"), ("segments={'max_tokens': 16384}",)),
    **dict.fromkeys(("pack", "packing"), ("collate_fn='pack'",)),
    **dict.fromkeys(("patch_size", "crop_size"), ("patch={'shape': [...]}",)),
    **dict.fromkeys(("sampling_strategy", "sources"), ("mixture",)),
    "share_memory": ("memory={'share': True}", "share_memory"),
    "size": ("shape", "length"),
}
"""Arguments for names from other libraries or earlier versions; the first argument that the class has is proposed."""


_IN_MEMORY = "RankCachedH5DataModule and RankMemCachedH5Dataset keep rows in memory."
_SAMPLERS = "The order has arguments of its own: shuffle, weights, mixture."

ADVICE: dict[str, str] = {
    **dict.fromkeys(("in_memory", "preload", "cache", "cache_data", "cache_mode", "hdf5_cache_mode"), _IN_MEMORY),
    **dict.fromkeys(("sampler", "batch_sampler"), _SAMPLERS),
    "device": "The Trainer moves batches to its device.",
    "chunks": "Chunks are as stored; `lightning-h5 repack` writes others.",
}
"""Advice on names of other libraries without an argument here."""


def other_name(name: str, names: Iterable[str]) -> str:
    """Return a hint for a name from another library or an earlier version, with a leading space; empty if unknown.

    Args:
        name: the name.
        names: the arguments.
    """
    for call in OTHER_NAMES.get(name.casefold(), ()):
        argument, _, value = call.partition("=")
        if argument in names:
            return f" Did you mean {call if value else repr(call)}?"
    return f" {ADVICE[name.casefold()]}" if name.casefold() in ADVICE else ""
