"""A real Slurm on this machine for tests: controller, one node and munge, with private folders, keys and ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue")
CORES = 8  # claimed, whatever the machine has: the tests' jobs are small and wait for each other mostly


def why_not() -> str:
    """Why no Slurm can be started here, "" if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge, or bash scripts/test.sh)"
    return "" if os.getuid() == 0 else "needs root, as slurmd does"


@contextmanager
def running_slurm(folder: Path) -> Iterator[None]:
    """Start it, make the Slurm commands of this process use it, and stop it with all jobs at the end."""
    host = socket.gethostname()
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = _free_ports(2)
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
KillWait=60
InactiveLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={CORES} RealMemory=4000
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
    )
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        log = open(folder / f"{command[0]}.out", "wb")  # noqa: SIM115 - the daemon's for as long as it lives
        daemons.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))

    try:
        start(
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        )
        wait_for(lambda: (folder / "munge.socket").exists(), "munge", folder, 60)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D", "-N", host)
        wait_for(lambda: "idle" in ask("sinfo", "-h", "-o", "%T"), "an idle node", folder, 120)
        yield
    finally:
        subprocess.run(["scancel", "--user=root"], capture_output=True)
        deadline = time.monotonic() + 20
        while ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.5)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        if before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = before


def ask(*command: str) -> str:
    """The output of a Slurm command, "" if it fails."""
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def wait_for(holds: Callable[[], object], what: str, folder: Path, seconds: float) -> None:
    """Wait until ``holds()``; fails with the newest log lines below ``folder``."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            logs = sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime)[-4:]
            tails = "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)
            raise AssertionError(f"waited {seconds:.0f} s for {what}\n{ask('squeue')}\n{tails}")
        time.sleep(0.3)


def state_of(number: str) -> str:
    """The state of a job (RUNNING, COMPLETED, ...), as the controller remembers it; "" when it has forgotten."""
    for word in ask("scontrol", "show", "job", number).split():
        if word.startswith("JobState="):
            return word.split("=", 1)[1]
    return ""


def kill_tasks(*words: str) -> bool:
    """SIGKILL for the Python processes with all these words in their command line; whether there was one."""
    found = False
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "-m" in line and "jetspec_train" in line and all(word in line for word in words) and "srun" not in line[0]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                found = True
    return found


def hurry(number: str) -> None:
    """Start a requeued job soon; Slurm itself makes it wait for two minutes.

    At once would be too soon: the node still refuses the number of the job that has just ended there.
    """
    time.sleep(4)
    ask("scontrol", "update", f"JobId={number}", "StartTime=now")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
