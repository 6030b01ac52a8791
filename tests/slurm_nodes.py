"""A SLURM of two nodes on this machine, for tests: a controller, a daemon for each node, munge between them, all on loopback.

    with nodes(folder) as (env, lose, back): subprocess.run(["sinfo"], env=env); lose("n1"); back("n1")

`why_not()` says in a line why this machine has none. Packages are installed only where $CLVLA_SLURM is "install" (as root, with apt)."""
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from clvla.core.processes import descendants, send_signal

NEEDS = "slurmctld", "slurmd", "sbatch", "munged"
CONF = """ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldParameters=enable_configless
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5,socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
JobRequeue=1
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=1
SlurmctldTimeout=10
SlurmdTimeout=6
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=500
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=500
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


def lacking(): return [name for name in NEEDS if shutil.which(name, path=os.environ["PATH"]+":/usr/sbin:/sbin") is None]


def why_not():
    "Why there can be no SLURM here, in a line; \"\" where there can be one."
    if os.geteuid() != 0: return "SLURM's daemons for the test are started as root, and this user is not"
    if lacking() and os.environ.get("CLVLA_SLURM") == "install":
        for words in (["update"], ["install", "-y", "slurm-wlm", "munge"]):
            try: subprocess.run(["apt-get", "-qq", *words], env=os.environ | dict(DEBIAN_FRONTEND="noninteractive"), capture_output=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired): break
    return f"SLURM is not here ({', '.join(lacking())}); install slurm-wlm and munge, or set CLVLA_SLURM=install" if lacking() else ""


class DoesNotStart(RuntimeError): "The daemons are here, and this machine does not let them come up."


def last_line(folder):
    "What the daemons said last."
    said = [p.read_text(errors="replace").strip().splitlines() for p in (folder/"controller.log", folder/"n0.log", folder/"daemons.txt") if p.is_file()]
    return "; ".join(lines[-1] for lines in said if lines)


def free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets: s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets: s.close()
    return ports


def steps_of(node, env):
    "Processes that hold the job steps of a node: what they have started says on which node it is, and of which SLURM."
    wanted = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={env['SLURM_CONF']}".encode()}
    def of(pid, name):
        try: return Path(f"/proc/{pid}/{name}").read_bytes()
        except OSError: return b""
    holders = [int(p.name) for p in Path("/proc").glob("[0-9]*") if of(p.name, "cmdline").startswith(b"slurmstepd: [")]
    return [pid for pid in holders if any(wanted <= set(of(child, "environ").split(b"\0")) for child in descendants(pid))]


@contextmanager
def nodes(folder):
    "Environment of its commands, a function that takes a node away with all that runs on it, and one that brings it back."
    folder, started = Path(folder), []
    for name in ("state", "spool-n0", "spool-n1", "munge"): (folder/name).mkdir(parents=True)
    for p in (folder, *folder.parents): # munge wants to reach its socket, and nobody else to be able to write there
        if p != Path("/") and p.stat().st_uid == 0: p.chmod(p.stat().st_mode | 0o011)
    env = os.environ | dict(SLURM_CONF=str(folder/"slurm.conf"), PATH=os.environ["PATH"]+":/usr/sbin:/sbin")
    conf = CONF.format(host=socket.gethostname().split(".")[0], folder=folder, ports=free_ports(3), cpus=2)
    (folder/"slurm.conf").write_text(conf.replace("SlurmctldParameters=enable_configless\n", ""))
    (folder/"munge/key").write_bytes(os.urandom(64))
    (folder/"munge/key").chmod(0o600)
    log = open(folder/"daemons.txt", "w")
    def daemon(*words): started.append(subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)); return started[-1]
    daemon("munged", "-F", "--force", "--key-file", folder/"munge/key", "--socket", folder/"munge/socket", "--pid-file", folder/"munge/pid", "--log-file", folder/"munge/log", "--seed-file", folder/"munge/seed")
    try:
        deadline = time.monotonic()+20
        while not (folder/"munge/socket").exists() and time.monotonic() < deadline: time.sleep(.1)
        daemon("slurmctld", "-D", "-f", folder/"slurm.conf")
        time.sleep(1)
        daemons = {}
        def back(node): daemons[node] = daemon("slurmd", "-D", "-f", folder/"slurm.conf", "-N", node)
        for name in ("n0", "n1"): back(name)
        while subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], env=env, capture_output=True, text=True).stdout.strip() != "2":
            if time.monotonic() > deadline+40: raise DoesNotStart(f"SLURM's two nodes are not idle after a minute: {last_line(folder)}")
            time.sleep(.2)

        def lose(node, noticed=False):
            "SIGKILL to a node's daemon and to all of its jobs; `noticed` at once, as by a cluster's own watch over its nodes."
            steps = steps_of(node, env)
            send_signal([daemons[node].pid, *(q for p in steps for q in (p, *descendants(p)))], signal.SIGKILL)
            daemons[node].wait()
            if noticed: subprocess.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost"], env=env, check=True)
        yield env, lose, back
    finally:
        subprocess.run(["scancel", "--user", "root"], env=env, capture_output=True)
        for p in [q for name in ("n0", "n1") for s in steps_of(name, env) for q in (s, *descendants(s))]: send_signal([p], signal.SIGKILL)
        for d in reversed(started): send_signal([d.pid], signal.SIGKILL)
        for d in started: d.wait()
        log.close()
