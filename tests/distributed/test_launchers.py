"""The scripts on the page about clusters, under each launcher that this machine has: each row once per epoch."""

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
from guards import HANG
from processes import run_ranks, values

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
SCRIPT = str(CLUSTER / "train.py")
DONE = "each of 2,000 rows was trained on 3 times"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OF_LAUNCHERS = ("PL_", "LOCAL_", "RANK", "WORLD_", "GROUP_", "SLURM_", "OMPI_", "TORCHELASTIC_", "MASTER_")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    with h5py.File(path / "rows.h5", "w") as file:
        x = np.random.default_rng(0).normal(size=(2000, 8)).astype("f4")
        file.create_dataset("x", data=x, chunks=(50, 8), compression="gzip")
    return path


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OF_LAUNCHERS)}
    paths = os.pathsep.join([str(ROOT), str(CLUSTER)])
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more


def children(pid):
    """All processes that one started, and those that they started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


@contextmanager
def started(command, log, **more):
    """A program that is running; at the end nothing of it is."""
    with open(log, "ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment(**more))
    try:
        yield process
    finally:
        end(process)


def end(process):
    for pid in [process.pid, *children(process.pid)]:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def run(command, folder, **more):
    """What a program prints that ends well."""
    log = folder / "log"
    with started(command, log, **more) as process:
        try:
            code = process.wait(HANG)
        except subprocess.TimeoutExpired:
            code = "none, after the time it had"
    assert code == 0, log.read_text()[-4000:]
    return log.read_text()


def wait_for(condition):
    stop = time.monotonic() + HANG
    while not (done := condition()) and time.monotonic() < stop:
        time.sleep(0.05)
    return done


def newest(folder):
    return max((path.stat().st_mtime for path in folder.glob("*.ckpt")), default=0.0)


# torchrun ------------------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_torchrun_stopped_goes_on_with_one_process_less(folder):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, str(folder), "--seconds", "0.02"]
    with started(command, folder / "log") as process:
        assert wait_for(lambda: newest(folder)), (folder / "log").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG) != 0
    assert list(folder.glob("hpc_ckpt_*.ckpt")), "all ranks were sent SIGTERM, and saved"
    assert DONE in run([sys.executable, SCRIPT, str(folder)], folder)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def hosts():
    """Two network namespaces joined by a cable, and their addresses; or this machine twice, if that is not allowed."""
    names, made = ("h5first", "h5second"), []

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "h5a", "type", "veth", "peer", "name", "h5b")
        for number, (name, link) in enumerate(zip(names, ("h5a", "h5b"), strict=True)):
            ip("link", "set", link, "netns", name, "name", "eth0")
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield [(["ip", "netns", "exec", name], f"10.77.0.{at + 1}", "eth0") for at, name in enumerate(names)]
    except (OSError, subprocess.CalledProcessError):
        yield [([], "127.0.0.1", "lo")] * 2
    finally:
        for name in made:
            ip("netns", "del", name)


def agent(hosts, at, folder, port, num_workers):
    """One node's torchrun, which may be alone or with another."""
    prefix, address, interface = hosts[at]
    settings = "join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [*prefix, *TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0][1]}:{port}", "--rdzv-id", "job"]
    command += ["--rdzv-conf", f"{settings},is_host={'false' if at else 'true'}", "--local-addr", address]
    command += [SCRIPT, str(folder), "--seconds", "0.03", "--num-workers", str(num_workers)]
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": interface}
    return started(command, folder / f"log{at}", **more)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_node_that_is_killed_and_comes_back(hosts, folder, number):
    draws, port = random.Random(number), free_port()
    with agent(hosts, 0, folder, port, number % 2 * 2) as first:
        with agent(hosts, 1, folder, port, number % 2 * 2) as second:
            assert wait_for(lambda: newest(folder)), (folder / "log0").read_text()[-4000:]
            time.sleep(2 * draws.random())
            end(second)
            killed = time.time()
        if number % 3:  # the first goes on alone for a while; otherwise the second is back at once
            wait_for(lambda: newest(folder) > killed + 1 or first.poll() is not None)
        time.sleep(2 * draws.random())
        with agent(hosts, 1, folder, port, number % 2 * 2) as second:
            codes = first.wait(HANG), second.wait(HANG)
    logs = [(folder / f"log{at}").read_text() for at in range(2)]
    assert codes == (0, 0), logs[0][-3000:] + logs[1][-3000:]
    assert DONE in logs[0] + logs[1]


# Launchers that set variables ----------------------------------------------------------------------------------------


def train_here(rank, folder, port, variables, num_workers):
    """The script's function in a process that a launcher started with variables of its own."""
    for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
        del os.environ[name]
    os.environ |= {name: value.format(rank=rank, port=port) for name, value in variables.items()}
    sys.path.insert(0, str(CLUSTER))
    import train

    assert train.launched(1)["devices"] * train.launched(1)["num_nodes"] == 2
    train.train(Path(folder), num_workers=num_workers)


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
LAUNCHERS = {
    "srun, two tasks of a node": {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "rows",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        **MASTER,
    },
    "srun, two nodes": {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "rows",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "{rank}",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "localhost",
        **MASTER,
    },
    "Kubeflow, two pods": {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "RANK": "{rank}", "WORLD_SIZE": "2", **MASTER},
}


@pytest.mark.wide
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_launcher_that_sets_variables(folder, tmp_path, launcher, num_workers):
    outcomes = run_ranks(train_here, 2, tmp_path / "logs", str(folder), free_port(), LAUNCHERS[launcher], num_workers)
    values(outcomes)
    assert DONE in outcomes[0].output


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None, reason="there is no MPI with mpi4py"
)
def test_mpirun(folder):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, SCRIPT, str(folder)]
    assert DONE in run(command, folder)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ray(folder, num_workers):
    subprocess.run(
        [sys.executable, "-m", "lightning_h5", "check", str(folder / "rows.h5"), "--write-digests"],
        check=True,
        env=environment(),
    )
    command = [sys.executable, str(CLUSTER / "ray_train.py"), str(folder), "--workers", "2"]
    output = run([*command, "--num-workers", str(num_workers), "--verify", "digest"], folder)
    assert "each row was trained on once per epoch" in output


def squeue(job):
    """The state of a job of SLURM; nothing once it has ended and is forgotten."""
    return subprocess.run(["squeue", "-h", "-j", job, "-o", "%T"], capture_output=True, text=True, check=False).stdout


def slurm_answers():
    with suppress(OSError, subprocess.TimeoutExpired):
        return b"idle" in subprocess.run(["sinfo", "-h"], capture_output=True, check=False, timeout=HANG).stdout
    return False


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_job_of_slurm_that_is_signalled_is_requeued_and_goes_on(folder, num_workers):
    if not slurm_answers():
        pytest.skip("there is no SLURM with an idle node")
    script = (CLUSTER / "job.sbatch").read_text().replace("--nodes=2", f"--nodes=1\n#SBATCH --output={folder}/log")
    (folder / "job.sbatch").write_text(script.replace("srun python", f"srun {sys.executable}"))
    command = ["sbatch", "--parsable", f"--chdir={CLUSTER}", str(folder / "job.sbatch"), str(folder)]
    options = ["--seconds", "0.05", "--num-workers", str(num_workers)]
    job = subprocess.run([*command, *options], check=True, capture_output=True, text=True, env=environment()).stdout
    job = job.strip()
    assert wait_for(lambda: newest(folder) and "RUNNING" in squeue(job)), (folder / "log").read_text()[-4000:]
    time.sleep(random.random())
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    assert wait_for(lambda: "PENDING" in squeue(job)), (folder / "log").read_text()[-4000:]
    assert list(folder.glob("hpc_ckpt_*.ckpt"))
    assert wait_for(lambda: DONE in (folder / "log").read_text()), (folder / "log").read_text()[-4000:]


def spawned(rank, folder):
    """Trains with processes that the Trainer itself spawns."""
    sys.path.insert(0, str(CLUSTER))
    import train
    from lightning.pytorch import Trainer

    from lightning_h5 import LazyH5DataModule

    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_spawn",
        max_epochs=train.EPOCHS,
        logger=False,
        default_root_dir=folder,
    )
    model = train.Net()
    trainer.fit(model, datamodule=LazyH5DataModule(f"{folder}/rows.h5", x_key="x", batch_size=16, with_index=True))
    return int(model.n_trained.min()), int(model.n_trained.max())


@pytest.mark.wide
def test_processes_that_the_trainer_spawns(folder, tmp_path):
    assert values(run_ranks(spawned, 1, tmp_path / "logs", str(folder))) == [(3, 3)]
