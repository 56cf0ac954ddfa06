"""A real SLURM on this one host: `python -m tests.slurm.one_host COMMAND...` installs it, starts it, runs COMMAND, ends it.

What it does, as root on Debian or Ubuntu:
  1. apt-get install slurm-wlm munge, unless sbatch, slurmctld, slurmd and munged are there;
  2. writes a key, a slurm.conf for this host's cores and all state into a new folder under /tmp;
  3. starts munged, slurmctld and slurmd by that configuration, on free ports, beside any SLURM that is configured here;
  4. runs COMMAND with SLURM_CONF set, then ends the three and removes the folder.
Elsewhere, or without root, it says why it does nothing, and leaves with code 0.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "scontrol")
_START_S = 60.0
# cred_expire: a job that is queued again waits for its old credential to expire, by default two minutes.
CONFIG = """\
ClusterName=oelm
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,requeue_setup_env_fail
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=20
MinJobAge=600
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes={host} MaxTime=1 State=UP
"""


def missing() -> list[str]:
    """Return the programs of SLURM and munge that are not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def install() -> str:
    """Install what is missing; return why that cannot be done, or nothing."""
    if not missing():
        return "" if os.geteuid() == 0 else "slurmctld and munged are started as root here, and this is not root"
    if os.geteuid() != 0:
        return f"not root, so {', '.join(missing())} cannot be installed by apt-get"
    if shutil.which("apt-get") is None:
        return f"no apt-get here to install {', '.join(missing())} with"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "slurm-wlm", "munge"]):
        print("+", " ".join(command), flush=True)
        if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode:
            return f"`{' '.join(command)}` failed; is there a network?"
    return ""


@contextlib.contextmanager
def one_host_cluster() -> Iterator[Path]:
    """Run SLURM on this host; yield the path of its configuration."""
    folder = Path(tempfile.mkdtemp(prefix="oelm-slurm-"))
    folder.chmod(0o755)
    processes: list[subprocess.Popen[bytes]] = []
    config = folder / "slurm.conf"
    try:
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        ports = {"ctld_port": _free_port(), "slurmd_port": _free_port()}
        config.write_text(CONFIG.format(host=host, folder=folder, cores=os.cpu_count(), **ports))
        environment = {**os.environ, "SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        munge = ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
        for command in (["munged", *munge], ["slurmctld", "-D", "-f", str(config)], ["slurmd", "-D", "-f", str(config)]):
            processes.append(_start(command, environment, folder))
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: _answers(environment), folder)
        yield config
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _start(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"{command[0]}.out").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _answers(environment: dict[str, str]) -> bool:
    said = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
    return "idle" in said.stdout


def _wait(condition: object, folder: Path) -> None:
    began = time.monotonic()
    assert callable(condition)
    while not condition():
        if time.monotonic() - began > _START_S:
            logs = {path.name: path.read_text(errors="replace")[-2000:] for path in folder.glob("*.[lo]*")}
            raise SystemExit(f"SLURM did not start within {_START_S:g} s: {logs}")
        time.sleep(0.2)


def main() -> None:
    if reason := install():
        print(f"skipped: {reason}")
        return
    with one_host_cluster() as config:
        print(f"SLURM runs by {config}", flush=True)
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, "SLURM_CONF": str(config)}).returncode)


if __name__ == "__main__":
    main()
