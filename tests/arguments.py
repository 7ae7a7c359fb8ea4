"""Arguments of data modules and datasets, by one flat name each, so that tests can combine them freely."""

GROUPS = {
    "split": {
        "val_fraction": "val_fraction",
        "test_fraction": "test_fraction",
        "group_key": "group_key",
        "stratify_key": "stratify_key",
        "num_folds": "num_folds",
        "fold": "fold",
        "split_seed": "seed",
        "split_file": "file",
    },
    "weights": {"weight_key": "weight_key", "balance_key": "balance_key", "class_weights": "class_weights"},
    "shuffle": {"shuffle_bytes": "buffer", "streams": "streams", "scope": "scope"},
    "workers": {
        "persistent_workers": "persistent",
        "multiprocessing_context": "start_method",
        "timeout": "timeout",
        "worker_init_fn": "init_fn",
    },
    "distributed": {
        "rank": "rank",
        "world_size": "world_size",
        "setup_timeout": "setup_timeout",
        "on_resume_mismatch": "on_resume_mismatch",
    },
    "memory": {
        "mode": "mode",
        "share_memory": "share",
        "cache_device": "device",
        "pin_host_memory": "pin",
        "reshard_every_n_epochs": "reshard_every_n_epochs",
    },
    "mixture": {
        "sources": "sources",
        "sampling_strategy": "strategy",
        "weights": "weights",
        "between": "between",
        "epoch_length": "epoch_length",
        "mix": "mix",
        "pattern": "pattern",
    },
    "row_cache": {"cache_size": "size", "max_cache_bytes": "max_bytes"},
    "where": {"allowed_guids": "guid", "cs_label": "cs_label", "bg_label": "bg_label"},
    "segments": {"sequence_key": "key", "sequence_order": "sort_key", "bucket_by_length": "bucket"},
}
FILES = {
    "files": {
        "mmap": "mmap",
        "cache_bytes": "cache_bytes",
        "swmr": "swmr",
        "allow_external": "allow_external",
        "trusted": "trusted",
        "min_integrity": "min_integrity",
        "verify": "verify",
    }
}


def nested(**flat):
    """The arguments of a data module."""
    groups = GROUPS | FILES
    if not {"sources", "sampling_strategy"} & set(flat):  # then the weights are of rows
        groups = groups | {"mixture": {name: own for name, own in GROUPS["mixture"].items() if name != "weights"}}
    found = _nested(flat, groups)
    if isinstance(found.get("shuffle"), dict) and isinstance(mode := found["shuffle"].get("mode"), bool):
        found["shuffle"]["mode"] = "auto" if mode else "none"
    return found


def nested_files(**flat):
    """The arguments of a dataset."""
    return _nested(flat, FILES)


def _nested(flat, groups):
    homes = {name: (group, own) for group, names in groups.items() for name, own in names.items()}
    found = {name: value for name, value in flat.items() if name not in homes}
    for name, value in flat.items():
        if name in homes:
            group, own = homes[name]
            inside = found.get(group, {})
            if not isinstance(inside, dict):  # a shorthand
                inside = {{"split": "val_fraction", "weights": "weight_key", "shuffle": "mode"}[group]: inside}
            found[group] = {own: value} | inside
    return found
