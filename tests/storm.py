"""A fault every few seconds for a given time, drawn at random, and what the disturbed runs computed in the end.

    python tests/storm.py --learner imitation --minutes 30 --out records/storm.jsonl
    python tests/storm.py --learner practice --minutes 10 --out records/storm.jsonl

A job is a run of a policy, of practice or of agents; when one is finished, the next seed begins. Every `--every` seconds it
suffers one fault of `FAULTS`, and whenever its process ends, it is started again by the same command. Beside it runs the
undisturbed run of the same seed, so that both see the same machine. What a message of the library says is to be done (take a
line out, remove a folder, put a copy in its place) is done by `remedy`, as a person would do it; a fault that no message
explains counts as unexplained, and the bytes from before are put back.

Run folder and data of the disturbed jobs lie on a small file system in memory, which is filled up as one of the faults; where
none may be mounted, that fault is left out, and the first line of the records says so.
"""
import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from chaos import DOTS, begin, copy_demos, marked, role

from clvla.core.records import append_jsonl
from clvla.run.folder import RunFolder
from clvla.run.resume import fingerprint

FAULTS = dict(kill_trainer=4, stop_trainer=10, kill_child=12, stop_child=4, full_disk=4, flip_checkpoint=6, flip_frames=1, flip_record=4,
              flip_document=1, clock=8, moved=1, moved_while_running=1)   # kind -> how often, relative to the others
MB = 2**20
ENDED = re.compile(r"^(?:\w+\.)*(?P<type>\w*(?:Error|Exception|Stopped|Interrupt|Exit)\w*): (?P<text>.*)", re.M|re.S)
OURS = {"ValueError", "OSError", "FileNotFoundError", "NotADirectoryError", "RuntimeError", "RunStopped", "PermissionError", "FileExistsError"}


def imitation(seed, **folders):
    "The default job of run_cl with replay: five tasks of Meta-World, 300 updates each, 20 trials a cell."
    from clvla.train.config import TrainConfig, resolve
    return resolve(TrainConfig(cl="er", suite="mw5", seed=seed, save_every=10, threads=1, **folders))


def short(seed, **folders):
    "The same with 100 updates a task and 5 trials a cell, so that some runs end within the storm."
    from dataclasses import replace
    return replace(imitation(seed, **folders), steps_per_task=100, n_trials=5, save_every=5)


def practice(seed, **folders):
    "Practice along two tasks of the dot."
    from clvla.rl.config import PracticeConfig, resolve_practice
    return resolve_practice(PracticeConfig(suite="dot_2", algo="cloning", stream=True, cl="er", seed=seed, n_demos=4, steps_per_task=60, episodes=36,
                                           round_episodes=6, n_trials=10, n_workers=2, threads=1, batch_size=16, image_size=32, save_every=10,
                                           algo_kw=dict(updates=40), **folders))


def agents(seed, **folders):
    "CLEAR on two tasks of the dot, twice."
    from clvla.crl.config import AgentConfig, resolve_agent
    return resolve_agent(AgentConfig(**DOTS | dict(steps_per_task=3200, eval_every=1600, n_trials=4, save_every=4), algo="clear", seed=seed,
                                     algo_kw=dict(n_envs=4, horizon=20, hidden=64, channels=8), **folders))


JOBS = dict(imitation=imitation, short=short, practice=practice, agents=agents)


def cpu_seconds(pid):
    "CPU time of a process, all its threads; 0 when it is gone."
    try: words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError: return 0.
    return (int(words[11])+int(words[12]))/os.sysconf("SC_CLK_TCK")


class Log:
    "Counts the records of a growing log.jsonl without reading it again."
    def __init__(self): self.path, self.size, self.lines, self.inode = None, 0, 0, None

    def count(self, folder):
        "Records so far, and the stage of the newest."
        path = Path(folder)/"log.jsonl"
        try:
            with open(path, "rb") as f:
                stat = os.fstat(f.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.size: self.inode, self.size, self.lines = stat.st_ino, 0, 0
                f.seek(self.size)
                data = f.read()
        except OSError: return 0
        self.size, self.lines = self.size+len(data), self.lines+data.count(b"\n")
        return self.lines


class Job:
    "One run: its settings, its process, and how fast it learnt while it did."
    def __init__(self, learner, seed, folder, data, name, say):
        self.make, self.seed, self.name, self.say = JOBS[learner], seed, name, say
        self.data, self.cfg = data, None
        self.place(folder)
        self.process, self.starts, self.console, self.heard = None, 0, Path(tempfile.mkdtemp())/"console.txt", 0
        self.log, self.began, self.segments, self.segment, self.stopped = Log(), time.monotonic(), [], None, 0.
        self.progress_at, self.seen, self.life = time.monotonic(), None, ""

    def place(self, folder): self.cfg = self.make(self.seed, run_dir=str(folder), data_dir=str(self.data))
    @property
    def folder(self): return Path(self.cfg.run_dir)
    @property
    def pid(self): return self.process.pid
    @property
    def done(self): return RunFolder(self.folder).done

    def start(self):
        "The command: claim the folder, and start the process. The library's words when the folder is refused."
        try: RunFolder(self.folder).begin(self.cfg, self.say)
        except Exception as e: return f"{type(e).__name__}: {e}"
        self.process, self.starts, self.began = begin(self.cfg, self.name, self.console), self.starts+1, time.monotonic()
        self.life = ""   # what this process has printed
        self.end_segment()
        return ""

    def words(self):
        "What the process has printed since the last call."
        with open(self.console, "a+") as f:
            f.seek(self.heard)
            text = f.read()
        self.heard += len(text.encode())
        self.life += text
        return text

    def sample(self):
        "Look at the log; a segment is a stretch of updates inside one process without a pause of five seconds."
        now, n = time.monotonic(), self.log.count(self.folder)
        here = (n, now-self.stopped, cpu_seconds(self.pid) if self.process else 0.)
        seen = (n, *(p.stat().st_size if p.exists() else 0 for p in (self.folder/"episodes.jsonl", self.console)))
        if seen != self.seen: self.seen, self.progress_at = seen, now
        if self.segment is None: self.segment = [here, here]
        elif n > self.segment[1][0]:
            if here[1]-self.segment[1][1] > 5: self.end_segment(); self.segment = [here, here]
            self.segment[1] = here
        elif n < self.segment[1][0]: self.segment = [here, here]
        return n

    def end_segment(self):
        "Keep what a stretch of updates took; shorter ones than five updates are left out."
        if self.segment:
            (n0, t0, c0), (n1, t1, c1) = self.segment
            if n1-n0 >= 5 and c1 > c0: self.segments.append((n1-n0, round(t1-t0, 2), round(c1-c0, 2)))
        self.segment = None

    def rates(self):
        "Updates, seconds and CPU seconds of all stretches."
        return [round(sum(x), 2) for x in zip(*self.segments)] if self.segments else [0, 0, 0]


def flip(path, rng):
    "Flip one bit of a file; returns how to undo it."
    data = bytearray(Path(path).read_bytes())
    at = rng.randrange(len(data))
    before = bytes(data)
    data[at] ^= 1 << rng.randrange(8)
    with open(path, "r+b") as f: f.write(data)
    return dict(file=str(path), byte=at, was=before)


def files_for(job, kind, rng):
    "A file that a fault can hit."
    f = job.folder
    if kind == "flip_checkpoint":
        from clvla.run.checkpoint import checkpoints
        found = checkpoints(f/"checkpoints")
        found = [p for p in sorted(found[-1].rglob("*")) if p.is_file() and p.stat().st_size] if found else []
    elif kind == "flip_frames": found = sorted(p for p in Path(job.data).rglob("*") if p.suffix in (".npy", ".parquet", ".safetensors") and p.stat().st_size
                                               and not any(part.startswith(".") for part in p.parts))
    elif kind == "flip_record": found = sorted(p for p in f.glob("*.jsonl") if p.stat().st_size)
    else: found = sorted(p for p in f.glob("*.json") if p.stat().st_size)
    return rng.choice(found) if found else None


class Storm:
    "Faults for one job after the other."
    def __init__(self, learner, home, references, every, seed, out, tmpfs, say=print):
        self.learner, self.home, self.references, self.every, self.out, self.say = learner, Path(home), Path(references), every, out, say
        self.rng, self.tmpfs, self.t0, self.moves, self.job, self.twin = random.Random(seed), tmpfs, time.monotonic(), 0, None, None
        self.undo, self.rows, self.results, self.curve, self.frozen = None, [], [], [], []

    def now(self): return round(time.monotonic()-self.t0, 2)
    def children(self): return [p for p in marked(self.job.name) if p != self.job.pid]

    def row(self, kind, **more):
        row = dict(row="fault", learner=self.learner, t=self.now(), seed=self.job.seed, kind=kind, updates=self.job.log.lines) | more
        self.rows.append(row)
        self.say(json.dumps(row)[:400])
        return row

    def watch(self, seconds, until=lambda: False):
        "Let time go by and look; the undisturbed run is looked at too."
        end, last = time.monotonic()+seconds, 0
        while True:
            n = self.job.sample()
            m = self.twin.sample() if self.twin else 0
            if not self.curve or self.now()-self.curve[-1][0] >= 2: self.curve.append((round(self.now(), 1), self.job.seed, n, self.twin.seed if self.twin else None, m))
            if until() or time.monotonic() >= end: return
            self.tend_twin()
            time.sleep(.2)

    def tend_twin(self):
        "Begin the undisturbed run of the next seed when one has ended."
        if self.twin and self.twin.process.poll() is not None:
            assert self.twin.done, f"the undisturbed run ended: {self.twin.words()[-800:]}"
            self.twin.end_segment()
            self.results.append(dict(row="undisturbed", learner=self.learner, seed=self.twin.seed, fingerprint=fingerprint(self.twin.folder),
                                     rates=self.twin.rates(), seconds=round(time.monotonic()-self.twin.began, 1)))
            self.say(json.dumps(self.results[-1]))
            seed, self.twin = self.twin.seed+1, None
            if self.more_twins: self.start_twin(seed)

    def start_twin(self, seed):
        self.twin = Job(self.learner, seed, self.references/f"run-{seed}", self.references/"data", f"storm-reference-{os.getpid()}", len)
        assert not self.twin.start()

    def kill(self):
        "SIGKILL of the training process, and what it leaves is waited for."
        self.job.end_segment()
        self.job.process.kill(); self.job.process.wait()
        until = time.monotonic()+10
        while marked(self.job.name) and time.monotonic() < until: time.sleep(.05)
        return [role(p) for p in marked(self.job.name)]

    def fault(self):
        "One fault, drawn until one can happen now."
        for _ in range(100):
            kind = self.rng.choices([*FAULTS], [*FAULTS.values()])[0]
            if self.inflict(kind): return

    def inflict(self, kind):
        job, rng = self.job, self.rng
        if job.process.poll() is not None and not kind.startswith("flip"): return False
        if kind == "kill_trainer": self.row(kind, left=self.kill())
        elif kind == "stop_trainer":
            pause = round(rng.uniform(1, 4), 1)
            self.row(kind, pause=pause)
            with suppress(ProcessLookupError): os.kill(job.pid, signal.SIGSTOP)
            began = time.monotonic()
            self.watch(pause)
            job.stopped += time.monotonic()-began
            with suppress(ProcessLookupError): os.kill(job.pid, signal.SIGCONT)
        elif kind in ("kill_child", "stop_child"):
            if not (found := self.children()): return False
            pid = rng.choice(found)
            self.row(kind, victim=role(pid))
            with suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL if kind == "kill_child" else signal.SIGSTOP)
        elif kind == "full_disk":
            if not self.tmpfs: return False
            pause = round(rng.uniform(1, 5), 1)
            self.row(kind, pause=pause)
            ballast = self.home/"ballast"
            with open(ballast, "wb", buffering=0) as f:
                for block in (MB, 512):
                    with suppress(OSError):
                        while f.write(bytes(block)): pass
            self.watch(pause)
            ballast.unlink()
        elif kind.startswith("flip"):
            if files_for(job, kind, random.Random(0)) is None: return False
            self.kill()   # no process looks: it is the disk that flips it
            if (path := files_for(job, kind, rng)) is None: return False
            self.undo = flip(path, rng)
            self.row(kind, file=str(path.relative_to(self.home)), byte=self.undo["byte"])
        elif kind == "clock":
            years = rng.choice((-20, -1, 1, 20))
            self.row(kind, years=years)
            when = time.time()+years*365*86400
            for p in [*job.folder.rglob("*"), *Path(job.data).rglob("*")]:
                with suppress(OSError): os.utime(p, (when, when))
        else:
            if kind == "moved": self.kill()
            self.moves += 1
            to = job.folder.with_name(f"run-{job.seed}-moved-{self.moves}")
            old = job.folder
            row = self.row(kind, to=to.name)
            old.rename(to)
            if kind == "moved_while_running":
                self.watch(30, lambda: job.process.poll() is not None)
                if job.process.poll() is None: row["went_on"] = True; self.kill()   # while it makes demonstrations it writes nothing here
                if old.exists(): row["made_again"] = sorted(str(p.relative_to(old)) for p in old.rglob("*"))[:20]
                self.say(json.dumps(row)[:400])
            job.place(to)
        return True

    def restart(self):
        "Start the job again as often as it is refused, doing what the messages say."
        job = self.job
        job.words()
        text = job.life
        code = job.process.poll() if job.process else 0
        if code not in (0, None, -signal.SIGKILL): self.judge(text, code)
        for _ in range(6):
            said = job.start()
            if not said: return
            self.judge(said, "refused")
        self.row("given_up", said=said[:300])
        shutil.rmtree(job.folder, ignore_errors=True)
        assert not job.start()

    def judge(self, text, code):
        "Keep what an end says, and do it."
        lines = text.strip().splitlines()
        at = max((i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Stopped|Interrupt|Exit)\b", line)), default=0)
        last = ENDED.match("\n".join(lines[at:]))
        said = f"{last['type']}: {last['text']}".strip() if last else text.strip()[-300:]
        ours = last is not None and last["type"] in OURS and len(last["text"]) > 30
        done = self.remedy(said)
        row = self.row("end", code=code, said=said[:500], ours=ours, done=done)
        if not ours: (Path(self.out).with_suffix(f".{len(self.rows)}.txt")).write_text(text)
        return row

    def remedy(self, said):
        "Do what a message says."
        if m := re.search(r"\((sed -i '?\d+d'? [^)]*)\)", said):
            subprocess.run(shlex.split(m[1]), check=True)
            return m[1].replace(str(self.home), "")
        if m := re.search(r"(/\S+) is a copy, put it in its place", said):
            shutil.copy(m[1], self.job.folder/"config.json")
            return "copied"
        if said.endswith("choose another run_dir"):
            shutil.rmtree(self.job.folder)
            self.moves += 1
            self.job.place(self.job.folder.with_name(f"run-{self.job.seed}-again-{self.moves}"))
            return "another run_dir"
        for m in re.finditer(r"remove (/\S+?)(?:,|;| and|$)|(?P<p>/\S+?)(?:/meta\.json|/\w+\.\w+)?[: ].*remove (?:it|the folder)", said):
            path = Path(m[1] or m["p"])
            if self.home in path.parents and path.exists():
                if path.is_dir(): shutil.rmtree(path)
                else: path.unlink()
                return f"removed {path.relative_to(self.home)}"
        if self.undo and "space" not in said and "is gone" not in said and Path(self.undo["file"]).exists():
            Path(self.undo["file"]).write_bytes(self.undo["was"])
            return "the bytes from before were put back"
        return ""

    def notice(self):
        "Keep the lines that the library printed about damage."
        for line in self.job.words().splitlines():
            if not ENDED.match(line) and not line.startswith(" ") and re.search(r"passed over|torn|missing|damaged|changed|left by|half-written|Training goes on|not whole|taken from|differ", line):
                self.row("line", said=line[:300])

    def run(self, seconds, first=0):
        "The storm, then the rest of the last job without faults; whether all runs ended as the undisturbed ones."
        self.more_twins = True
        self.start_twin(first)
        while not self.twin.sample(): time.sleep(.5)   # it makes the demonstrations; their making is no part of the storm
        if self.twin.data.is_dir(): copy_demos(self.twin.data, self.home/"data")
        self.t0 = time.monotonic()
        seed, calm = first, False
        while not calm:
            self.job = Job(self.learner, seed, self.home/f"run-{seed}", self.home/"data", f"storm-{os.getpid()}", lambda line: self.row("line", said=line[:300]))
            self.undo, began, faults, in_storm = None, self.now(), 0, None
            self.restart()
            following = time.monotonic()+self.every
            while not self.job.done or self.job.process.poll() is None:
                self.watch(max(.2, following-time.monotonic()), lambda: self.job.process.poll() is not None)
                calm = self.now() > seconds
                if calm and in_storm is None:
                    self.job.end_segment()
                    in_storm = self.job.rates()
                if self.job.process.poll() is not None:
                    if self.job.done: break
                    self.notice() if self.job.process.returncode in (-9, 0) else None
                    self.restart()
                    if time.monotonic() < following: continue
                if time.monotonic()-self.job.progress_at > 240: self.row("hang", said=self.job.words()[-500:]); self.kill(); self.job.progress_at = time.monotonic()
                if time.monotonic() >= following and not calm:
                    self.notice()
                    self.fault(); faults += 1
                    following = max(following+self.every, time.monotonic()+1)
                elif calm: following = time.monotonic()+5
            self.notice()
            self.job.end_segment()
            self.results.append(dict(row="job", learner=self.learner, seed=seed, began=began, seconds=round(self.now()-began, 1), faults=faults,
                                     starts=self.job.starts, fingerprint=fingerprint(self.job.folder), rates=in_storm or self.job.rates(), finished_by_itself=in_storm is None,
                                     left=[role(p) for p in marked(self.job.name)]))
            self.say(json.dumps(self.results[-1]))
            shutil.rmtree(self.job.folder)
            seed += 1
            calm = self.now() > seconds
        self.more_twins = False
        while self.twin and self.twin.seed < seed:
            self.tend_twin()
            if self.twin is None and (left := [s for s in range(first, seed) if s not in {r["seed"] for r in self.results if r["row"] == "undisturbed"}]):
                self.start_twin(left[0])
            if self.twin: self.twin.sample()
            time.sleep(.2)
        if self.twin: self.twin.process.kill()


@contextmanager
def small_disk(path, mb):
    "A file system in memory at `path`, and whether it could be mounted."
    Path(path).mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mb}m", "tmpfs", str(path)], capture_output=True).returncode == 0
    try: yield mounted
    finally:
        if mounted: subprocess.run(["umount", "-l", str(path)], check=True)


def storm(learner, minutes, every, seed, out, first=0, mb=300, say=print):
    "One storm; its rows are appended to `out`. Whether each job ended with the fingerprint of the undisturbed run."
    with tempfile.TemporaryDirectory() as tmp, small_disk(Path(tmp)/"disk", mb) as tmpfs:
        s = Storm(learner, Path(tmp)/"disk", Path(tmp)/"references", every, seed, out, tmpfs, say)
        try: s.run(60*minutes, first)
        finally:
            for j in (s.job, s.twin):
                if j and j.process and j.process.poll() is None: j.process.kill(); j.process.wait()
            append_jsonl(out, dict(row="storm", learner=learner, minutes=minutes, every=every, seed=seed, small_disk=tmpfs, mb=mb))
            for row in [*s.rows, *s.results]: append_jsonl(out, row)
            append_jsonl(out, dict(row="curve", learner=learner, points=s.curve))
        same = {r["seed"]: r["fingerprint"] for r in s.results if r["row"] == "undisturbed"}
        return all(same.get(r["seed"]) == r["fingerprint"] for r in s.results if r["row"] == "job")


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--learner", choices=[*JOBS], default="imitation"); a.add_argument("--minutes", type=float, default=30)
    a.add_argument("--every", type=float, default=9); a.add_argument("--seed", type=int, default=0)
    a.add_argument("--out", required=True)
    a = a.parse_args()
    return not storm(a.learner, a.minutes, a.every, a.seed, a.out, say=lambda line: print(line, flush=True))


if __name__ == "__main__": sys.exit(main())
