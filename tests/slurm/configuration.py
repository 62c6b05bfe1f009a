"""The files of a cluster: Slurm's settings, munge's key, host names, fake GPUs."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

# Slurm's pmix plugin loads `libpmix.so` from here, but Debian's libpmix2 brings only `libpmix.so.2`;
# the link is in libpmix-dev. Our machines see a copy of the directory that has it.
PMIX = Path("/usr/lib") / f"{os.uname().machine}-linux-gnu" / "pmix2" / "lib"

# ClusterName             of its own: tests bring up several clusters, and a job of the same number in another
#                         one is not to be taken for the same job
# cred_expire             also how long a requeued job waits before it may start again (120 s otherwise)
# TmpFS                   the node's own disk: the pmix plugins of two nodes would collide in /tmp
# linuxproc, task/none    no cgroups
# config_overrides        the nodes may have more CPUs than this machine
# sched/backfill          sched/builtin refuses heterogeneous jobs
# KillWait                seconds from TERM to KILL
# OverTimeLimit           time limits are looked at every 30 s, whatever we set
# no SrunPortRange        threads of one srun begin at the same port of it; two that bind it at once fail
SLURM_CONF = """
ClusterName={state.name}
SlurmctldHost=head(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={state}/head/controller
SlurmdSpoolDir={state}/%n/spool
TmpFS={state}/disk
SlurmctldPidFile={state}/head/slurmctld.pid
SlurmdPidFile={state}/%n/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
PropagateResourceLimitsExcept=ALL
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1,sched_interval=2,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=3
OverTimeLimit=0
JobRequeue=1
MinJobAge=3600
MailProg=/bin/true
TreeWidth=65533
{settings}
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP
"""

NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=4096 {gpus} State=UNKNOWN"
)


def write(state: Path, ports: Mapping[str, int], cpus: int, gpus: int, settings: Mapping[str, str]) -> None:
    """Everything that the daemons of a cluster read, into `state`.

    ports      of slurmctld, as "head", and of each node's slurmd
    settings   further lines of slurm.conf
    """
    nodes = [name for name in ports if name != "head"]
    for directory in ("head/controller", "disk", "work", *(f"{name}/spool" for name in nodes)):
        (state / directory).mkdir(parents=True)
    (state / "munge.key").write_bytes(os.urandom(128))
    (state / "munge.key").chmod(0o600)
    (state / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *ports)))
    if (PMIX / "libpmix.so.2").exists():
        shutil.copytree(PMIX, state / "pmix")
        if not (state / "pmix" / "libpmix.so").exists():
            (state / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")
    # Slurm only looks whether these are character devices; they are /dev/null.
    for gpu in range(gpus):
        os.mknod(state / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (state / "gres.conf").write_text(f"Name=gpu File={state}/gpu[0-{gpus - 1}]\n" if gpus else "")
    # Not used by our plugins, but without it slurmd looks into /sys/fs/cgroup and dies where it cannot.
    (state / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    gres = f"Gres=gpu:{gpus}" if gpus else ""
    (state / "slurm.conf").write_text(
        SLURM_CONF.format(
            state=state,
            port=ports["head"],
            settings="\n".join(f"{name}={value}" for name, value in settings.items()),
            nodes="\n".join(NODE.format(name=n, port=ports[n], cpus=cpus, gpus=gres) for n in nodes),
        )
    )


def mounts(state: Path) -> dict[Path, Path]:
    """Which directory of `state` the machines shall see in place of which of the system's."""
    return {PMIX: state / "pmix"} if (state / "pmix").exists() else {}
