"Stands in for training in tests/test_launch.py: each process of a 'run' does what the file `do.json` in its folder says."
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from clvla.core.files import write_json
from clvla.core.progress import emit
from clvla.run.child import as_child, end_with_parent
from clvla.run.ranks import launch_ranks
from clvla.run.folder import RunFolder
from clvla.run.stop import Stopped, StopFlag


def work(path):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    run = RunFolder(path, rank)
    do = json.loads((Path(path)/"do.json").read_text())
    with StopFlag() as flag, run.lock():   # once the folder says "running", a signal is answered
        run.begin_again()
        act = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); time.sleep(90)"
        helper = subprocess.Popen([sys.executable, "-c", act])  # stands for a simulator, which ends with its parent
        (Path(path)/f"pids-{rank}").write_text(json.dumps([os.getpid(), helper.pid]))
        while any(not (Path(path)/f"pids-{r}").exists() for r in range(world)): time.sleep(.02)  # a barrier
        print(f"hello from {rank} of {world}", flush=True)
        try:
            for i in range(do.get("steps", 5)):
                flag.check()
                if do.get("raise") == rank and i == 1: raise ValueError(f"rank {rank} has bad luck")
                if do.get("kill") == rank and i == 1: os.kill(os.getpid(), 9)
                run.log(stage=0, task="push", step=i, lr=.1, **{"train/loss": 1.})
                emit(phase="training", task="push", done=i+1, total=do.get("steps", 5))
                time.sleep(do.get("pause", .05))
        except Stopped:
            if (run.path/"failed.json").exists(): raise  # another process failed, and this one was ended for it
            assert helper.poll() is None, "the simulator must live while the run saves"
            for line in range(2000): print("saving", line)  # more than a pipe holds, should nobody read it
            time.sleep(do.get("saving", .5))
            (Path(path)/f"saved-{rank}").write_text("")
            run.note_stopped(step=i)
            raise
        except Exception as e:
            run.note_failed(e)
            raise
        finally: helper.kill()
        if rank == 0: write_json(run.path/"done.json", {})


def main(path):
    end_with_parent()
    cfg = RunFolder(path).cfg
    if "RANK" not in os.environ and (cfg.num_processes > 1 or cfg.machines): sys.exit(launch_ranks(cfg, "ranks_work"))
    work(path)


if __name__ == "__main__": as_child(lambda: main(sys.argv[1]))
