"""How much memory is left, by the files of a system that says so; here, of made-up systems."""

import pytest

from lightning_h5.memory import available_memory, page_cache_memory

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


def system(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return available_memory(root)


def machine(available, **more):
    numbers = {"MemTotal": 64 * GIB, "MemAvailable": available, **more}
    return {"proc/meminfo": "\n".join(f"{name}:  {size >> 10:>12} kB" for name, size in numbers.items())}


def group(path, limit, usage, cache=0):
    """A control group of version 2."""
    folder = f"sys/fs/cgroup{path}"
    stat = f"anon 77\nfile 88\ninactive_file {cache}\nactive_file 99"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": usage, f"{folder}/memory.stat": stat}


def group_v1(path, limit, usage, cache=0):
    folder = f"sys/fs/cgroup/memory{path}"
    stat = f"cache 88\ninactive_file 3\ntotal_inactive_file {cache}"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": usage,
        f"{folder}/memory.stat": stat,
    }


V1 = {"proc/self/cgroup": "12:cpu,cpuacct:/other\n5:hugetlb:/job\n4:memory:/job\n1:name=systemd:/"}
V2 = {"proc/self/cgroup": "0::/slurm/job/step"}
MAX = "memory.max"
SYSTEMS = {
    "no limit but the machine's": (machine(9 * GIB), 9 * GIB, "the machine's memory"),
    "a group": (machine(9 * GIB) | V2 | group("/slurm/job/step", 4 * GIB, GIB), 3 * GIB, MAX),
    "what the system would give up is free": (
        machine(9 * GIB) | V2 | group("/slurm/job/step", 4 * GIB, 3 * GIB, cache=2 * GIB),
        3 * GIB,
        MAX,
    ),
    "a group above with less": (
        machine(9 * GIB)
        | V2
        | group("/slurm/job/step", 8 * GIB, GIB)
        | group("/slurm/job", "max", 2 * GIB)
        | group("/slurm", 3 * GIB, 2 * GIB),
        GIB,
        MAX,
    ),
    "groups without limit": (
        machine(9 * GIB) | V2 | group("/slurm/job/step", "max", GIB) | group("/slurm", "max", GIB),
        9 * GIB,
        "the machine's memory",
    ),
    "more than the limit is taken": (
        machine(9 * GIB) | V2 | group("/slurm/job/step", 4 * GIB, 5 * GIB, cache=GIB >> 1),
        0,
        MAX,
    ),
    "a container that sees its own group alone": (machine(9 * GIB) | V2 | group("", 2 * GIB, GIB), GIB, MAX),
    "version 1": (machine(9 * GIB) | V1 | group_v1("/job", 4 * GIB, 2 * GIB, cache=GIB), 3 * GIB, "limit_in_bytes"),
    "version 1, a group above with less": (
        machine(9 * GIB) | V1 | group_v1("/job", NO_LIMIT_V1, GIB) | group_v1("", 2 * GIB, GIB),
        GIB,
        "limit_in_bytes",
    ),
    "version 1 without limit": (
        machine(9 * GIB) | V1 | group_v1("/job", NO_LIMIT_V1, GIB),
        9 * GIB,
        "the machine's memory",
    ),
    "version 1 in a container": (machine(9 * GIB) | V1 | group_v1("", 4 * GIB, GIB), 3 * GIB, "limit_in_bytes"),
    "strict overcommit": (
        machine(9 * GIB, CommitLimit=8 * GIB, Committed_AS=6 * GIB) | {"proc/sys/vm/overcommit_memory": 2},
        2 * GIB,
        "overcommit_memory=2",
    ),
    "strict overcommit, all committed": (
        machine(9 * GIB, CommitLimit=8 * GIB, Committed_AS=9 * GIB) | {"proc/sys/vm/overcommit_memory": 2},
        0,
        "overcommit_memory=2",
    ),
    "the usual overcommit": (
        machine(9 * GIB, CommitLimit=8 * GIB, Committed_AS=6 * GIB) | {"proc/sys/vm/overcommit_memory": 0},
        9 * GIB,
        "the machine's memory",
    ),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_least_that_anything_grants_is_left(tmp_path, name):
    files, n_bytes, limit = SYSTEMS[name]
    found = system(tmp_path, files)
    assert found.n_bytes == n_bytes
    assert limit in found.limit


def test_a_system_that_does_not_say_is_not_guessed_at(tmp_path):
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize("name", ["proc/self/cgroup", "proc/sys/vm/overcommit_memory"])
@pytest.mark.parametrize("content", ["", "rubbish", "0::", "2"], ids=repr)
def test_files_that_say_something_else_grant_nothing_and_break_nothing(tmp_path, name, content):
    """As in sandboxes that imitate a part of the kernel; here without ``CommitLimit``."""
    assert system(tmp_path, machine(GIB) | {name: content}).n_bytes == GIB


def test_this_machine_says_what_is_left():
    found = available_memory()
    assert found is None or 0 < found.n_bytes < 1 << 50


# Pages of files ---------------------------------------------------------------------------------------------------


def test_pages_of_files_may_take_what_they_take_now(tmp_path):
    own = {"proc/self/cgroup": "0::/job"} | group("/job", 10 * GIB, 9 * GIB, cache=6 * GIB)
    system(tmp_path, machine(40 * GIB) | own)
    assert page_cache_memory(tmp_path) == 7 * GIB + 99  # with those in active use
    assert available_memory(tmp_path).n_bytes == 7 * GIB


def test_pages_of_files_may_take_what_the_machine_has_without_a_limit(tmp_path):
    assert page_cache_memory(tmp_path) is None
    system(tmp_path, machine(40 * GIB))
    assert page_cache_memory(tmp_path) == 40 * GIB
    assert page_cache_memory() > 0
