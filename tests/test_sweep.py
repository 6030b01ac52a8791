"Sweeps: what a file means, one holder for each entry whoever races for it, kills and stops in the middle, and the same runs as without one."
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from clvla.command.entries import Sweep, check_entries, config_of, entries_of, grid_of, read_sweep, values_of
from clvla.command.main import main
from clvla.command.runs import LEARNERS, given_by
from clvla.command.sweep import duration, estimate, gpus_for, spent
from clvla.command.words import PAGES, read_words
from clvla.core.files import write_json
from clvla.run import queue as queues
from clvla.run.all import configs
from clvla.run.claims import Claims, Watcher, this_machine
from clvla.run.config import identity, make_config, resolve
from clvla.run.engines import Plan, engines, room
from clvla.run.queue import Entry, Queue, do_entry, remember, state_of, take_next, work
from clvla.run.resume import fingerprint
from clvla.run.stop import StopFlag

ROOT = Path(__file__).resolve().parents[1]
CLVLA = [sys.executable, "-c", "import sys; from clvla.command.main import main; sys.exit(main())"]
TINY = dict(suite="dot_2", n_demos=2, steps_per_task=10, n_trials=1, threads=1, n_workers=1)


def entries(n, **given): return [Entry(k, f"s{k}", "run_cl", dict(seed=k), given | dict(seed=k)) for k in range(n)]


def queue_in(folder, n=3, patience=60.):
    queue = Queue(folder/"sweep", entries(n), patience)
    queue.begin()
    return queue


def shell(folder, *words, **kw):
    "A command in a session of its own, as in a terminal of its own."
    return subprocess.Popen([*CLVLA, "sweep", *map(str, words)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **kw)


def until(true, seconds=180.):
    deadline = time.monotonic()+seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(.05)


# what a file means

@pytest.mark.parametrize("said, means", [("er,mir", ["er", "mir"]), ("0..3", [0, 1, 2, 3]), ("-1..1", [-1, 0, 1]), ("0..1,7", [0, 1, "7"]), ([1, "2..3"], [1, 2, 3]), (.5, [.5]),
                                         ([[1, 2], [3]], [[1, 2], [3]]), ("er", ["er"]), ("3..3", [3])])
def test_values_of_a_grid(said, means): assert values_of(said) == means


@pytest.mark.parametrize("said, says", [("er,mir", "expected NAME=VALUES"), ("seed=5..2", "one that goes up"), ("seed=1;seed=2", "gives a name twice"), ([1], "a list, expected names"),
                                        (dict(seed=[]), "'seed' has no values"), ("a b=1", "expected NAME=VALUES")])
def test_what_is_no_grid(said, says):
    with pytest.raises(ValueError, match=says): grid_of(said)


def test_a_grid_and_a_list_are_every_line_with_every_point():
    found = entries_of(Sweep(list=[dict(cl="er", buffer_size=30), dict(name="plain", cl="sequential")], grid=dict(seed="0..2"), shared=TINY))
    assert [(e.number, e.folder, e.given["cl"], e.given["seed"]) for e in found] == [
        (0, "000-er-buffer_size-30-s0", "er", 0), (1, "001-er-buffer_size-30-s1", "er", 1), (2, "002-er-buffer_size-30-s2", "er", 2),
        (3, "003-plain-s0", "sequential", 0), (4, "004-plain-s1", "sequential", 1), (5, "005-plain-s2", "sequential", 2)]
    assert "buffer_size" not in found[3].given and found[0].given["suite"] == "dot_2"


@pytest.mark.parametrize("end", ["json", "yaml"])
def test_coras_list_of_settings(tmp_path, end):
    "A list of dicts that say `policy` and `experiment`, as CORA's files do; its numbers are theirs."
    (tmp_path/f"cora.{end}").write_text(json.dumps([dict(policy="impala", experiment="procgen_climber_fixed_seq"), dict(policy="clear", experiment="procgen_6_tasks_5_cycles")]))
    found = entries_of(read_sweep(tmp_path/f"cora.{end}"))
    assert [(e.number, e.experiment, e.given["algo"], e.given["suite"]) for e in found] == [(0, "run_crl", "impala", "procgen_climber_fixed_seq"), (1, "run_crl", "clear", "procgen_6_tasks_5_cycles")]


@pytest.mark.parametrize("experiment, words", [("run_cl", "--cl er --buffer_size 40"), ("run_cl", "--cl er+ewc --seed 3"), ("run_rl", "--algo cloning --suite dot_2 --updates 5"), ("run_crl", "--algo impala --horizon 8 --suite dot_2"),
                                               ("run_crl", "--suite minigrid_reach_3 --seed 2")])
def test_an_entry_is_what_its_page_makes_of_the_same_words(experiment, words, tmp_path):
    "As a line of a list, as a grid, as what all share, or as `-p`: the settings that decide what a run computes are those of the single command."
    command = {page: name for name,page in PAGES.items()}[experiment]
    said = read_words(words.split())
    cls = configs[LEARNERS[command]]
    alone = identity(resolve(make_config(cls, given_by(command, said)|dict(run_dir=str(tmp_path/"alone")))))
    given = dict(said.given)
    ways = [Sweep(experiment, list=[given]), Sweep(experiment, grid={k: [v] for k,v in given.items()}), Sweep(experiment, shared=given)]
    found = [entries_of(way)[0] for way in ways] + entries_of(Sweep(experiment), given)
    for e in found: assert identity(config_of(Queue(tmp_path, [e]), e)) == alone


def test_a_parameters_file_of_an_entry(tmp_path):
    (tmp_path/"plan.yaml").write_text("cl: mir\nrefresh: 5\nsuite: dot_2\nn_trials: 3\n")
    (tmp_path/"sweep.yaml").write_text("list:\n- {parameters: plan.yaml}\n- {parameters: plan.yaml, cl: er}\n")
    said = []
    a, b = entries_of(read_sweep(tmp_path/"sweep.yaml"), say=said.append)
    assert (a.given["refresh"], a.given["n_trials"]) == (5, 3) and b.given["cl"] == "er" and "refresh" not in b.given and "left out" in said[0]


SWEEPS = sorted(p for p in (ROOT/"nbs/protocols").glob("*.yaml") if re.search(r"^(grid|list):", p.read_text(), re.M))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_shipped_sweeps_are_sweeps(path, tmp_path):
    "Every name and value in them is known; whether this machine has the weights and the games is another question."
    found = entries_of(read_sweep(f"protocols/{path.name}"), say=len)
    keys = {json.dumps(identity(config_of(Queue(tmp_path, found), e)), sort_keys=True, default=str) for e in found}
    assert len(keys) == len(found) >= 4 and {p.stem for p in SWEEPS} >= {"smoke", "libero_tables", "cora"}


# refused at the door

WRONG = {
    "an algorithm": ("list: [{cl: er}, {cl: mirr}]\n", [], "entry 1 (mirr): unknown", "did you mean 'mir'?"),
    "a setting in entry 12": ("list: ["+"{cl: er, buffer_size: %d}, "*12 % tuple(range(10, 22))+"{cl: er, bufer_size: 5}]\n", [], "entry 12 (er-bufer_size-5): unknown parameter", "did you mean 'buffer_size'?"),
    "many": ("grid: {cl: [mirr, err], seed: 0..3}\n", [], "8 of 8 entries cannot work", "entries 4, 5, 6, 7 (err-s0 and others)"),
    "a value": ("grid: {n_trials: [1, many]}\n", [], "entry 1 (n_trials-many)", "'many' is not a value"),
    "a stream": ("grid: {suite: [dot_2, dot_7]}\n", [], "entry 1 (dot_7)", "did you mean 'dot_3'?"),
    "the same twice": ("list: [{cl: er, seed: 1}, {seed: 1, cl: er}]\n", [], "entry 1 (s1-er): the same settings as entry 0 (er-s1)", ""),
    "its own folder": ("list: [{run_dir: here}]\n", [], "run_dir is chosen by the sweep", ""),
    "given twice": ("grid: {seed: 0..1}\n", ["-p", "seed", "3"], "'seed' is given twice, by this entry and by the command", ""),
    "in line and grid": ("list: [{seed: 4}]\ngrid: {seed: 0..1}\n", [], "'seed' is given twice, by this entry and by the grid", ""),
    "a key": ("gird: {seed: 0..1}\nlist: [{}]\n", [], "unknown entry 'gird'; did you mean 'grid'?", ""),
    "no sweep": ("cl: er\n", [], "expected a list of settings, or a dict with 'grid' or 'list'", ""),
    "no YAML": ("a: [", [], "expected a sweep in YAML or JSON", ""),
    "a line": ("list: [er]\n", [], "entry 0 (er): found 'er' (str), expected a dict", ""),
    "an experiment": ("experiment: run_cll\nlist: [{}]\n", [], "unknown experiment 'run_cll'; did you mean 'run_cl'?", ""),
    "no run to evaluate": ("experiment: eval_cl\nlist: [{run_dir: nowhere}]\n", [], "entry 0 (nowhere): nowhere is no run folder", ""),
    "a disk": ("experiment: run_crl\nlist: [{algo: clear, file: true, frames: 1000000000000, suite: {base: dot_2, env: {discrete: true}}}]\n", [], "entry 0 (clear-file-True-", "its disk has"),
    "a number": ("grid: {seed: 0..1}\n", ["--only", "2"], "only: found 2, expected numbers of entries, 0 to 1", ""),
    "an engine": ("grid: {seed: 0..1}\n", ["--engine", "slrum"], "unknown engine 'slrum'; did you mean 'slurm'?", ""),
    "a file and a grid": ("grid: {seed: 0..1}\n", ["--grid", "seed=1"], "expected a file or a grid, found both", ""),
    "parallel": ("grid: {seed: 0..1}\n", ["--parallel", "-1"], "parallel must be 0 or more", ""),
    "empty": ("list: []\ngrid: {seed: []}\n", [], "'seed' has no values", ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_before_anything_starts(name, tmp_path, capsys, monkeypatch):
    text, words, *says = WRONG[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"data"))
    (tmp_path/"x.yaml").write_text(text)
    assert main(["sweep", "x.yaml", *words]) == 1
    said = capsys.readouterr().err
    assert all(s in said for s in says) and "Traceback" not in said, said
    assert [p.name for p in tmp_path.iterdir()] == ["x.yaml"], "a refusal leaves nothing behind"


def test_a_sweep_that_was_changed_is_another_one(tmp_path):
    queue_in(tmp_path, 3)
    more = Queue(tmp_path/"sweep", entries(5))
    more.begin()
    assert len(Queue.open(tmp_path/"sweep").entries) == 5, "entries may be added at the end"
    with pytest.raises(ValueError, match="entry 4 was run_cl {'seed': 4} there, and is nothing now"): Queue(tmp_path/"sweep", entries(4)).check()
    with pytest.raises(ValueError, match="with other settings that all share"): Queue(tmp_path/"sweep", entries(5, n_trials=2)).check()
    (tmp_path/"full").mkdir()
    (tmp_path/"full/x").touch()
    with pytest.raises(ValueError, match="not empty and no sweep"): Queue(tmp_path/"full", entries(1)).check()
    with pytest.raises(FileNotFoundError, match="is no sweep"): Queue.open(tmp_path)


# who has an entry

RACE = """
import sys, time
from clvla.run.claims import Claims
while time.time() < float(sys.argv[2]): pass
print(*[k for k in range(40) if Claims(f"{sys.argv[1]}/{k}").take(1)])
"""


def test_processes_that_race_never_have_the_same_entry(tmp_path):
    "Eight processes that begin within a millisecond try to claim forty entries."
    at = str(time.time()+3)
    racers = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path), at], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    got = [[int(k) for k in r.communicate(timeout=120)[0].split()] for r in racers]
    assert sorted(k for ks in got for k in ks) == list(range(40)), "each was claimed once"
    assert sum(map(bool, got)) > 1, "they did race"
    assert all(Claims(tmp_path/str(k)).read(1)["machine"] == this_machine() for k in range(40))


def test_a_takeover_is_claimed_once_too(tmp_path):
    "Twenty workers notice at once that a machine has died; one of them has the entry, in its second claim."
    queue = queue_in(tmp_path, 1, patience=.2)
    claims = queue.claims(queue.entries[0])
    write_json(claims.path(1), dict(host="far", pid=1, machine="far", began="1"))
    found, barrier = [], threading.Barrier(20)

    def worker():
        mine = Queue.open(queue.folder, patience=.2)
        state_of(mine, mine.entries[0])   # looks for the first time
        barrier.wait()
        time.sleep(.3)
        found.append(take_next(mine)[1])
    threads = [threading.Thread(target=worker) for _ in range(20)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert sorted(found, key=str) == [2]+[None]*19 and claims.newest == 2


def test_a_heartbeat_keeps_an_entry_and_silence_gives_it_away(tmp_path):
    "By what is written, never by a clock: files from the year 2000 and from 2100 count as alive while they change."
    claims, watcher = Claims(tmp_path), Watcher(patience=.4)
    write_json(claims.path(1), dict(host="far", pid=os.getpid(), machine="far", began="1"))
    for k, year in enumerate((9e8, 4.1e9, 9e8, 4.1e9, 9e8)):
        claims.path(1, "beat").write_text(str(k))
        os.utime(claims.path(1, "beat"), (year, year))
        assert not watcher.is_gone(claims, 1)
        time.sleep(.15)
    assert not watcher.is_gone(claims, 1)
    time.sleep(.6)
    assert watcher.is_gone(claims, 1)
    assert not Watcher(patience=.4).is_gone(claims, 1), "whoever has just come has to wait too"


def test_a_holder_that_beats_slowly_is_waited_for(tmp_path):
    "Its own command said a longer patience than this one."
    claims, watcher = Claims(tmp_path), Watcher(patience=.1)
    write_json(claims.path(1), dict(host="far", pid=1, machine="far", began="1", every=.3))
    watcher.is_gone(claims, 1)
    time.sleep(.4)
    assert not watcher.is_gone(claims, 1)
    time.sleep(1)
    assert watcher.is_gone(claims, 1)


@pytest.mark.parametrize("facts, gone", [(dict(), False), (dict(began="1"), True), (dict(pid=2**22+5), True), (dict(machine="other", began="1"), False)],
                         ids=["here and alive", "its number was given again", "ended", "elsewhere"])
def test_processes_of_this_machine_are_looked_for(facts, gone, tmp_path):
    claims = Claims(tmp_path)
    claims.take(1, **facts)
    assert Watcher(patience=60).is_gone(claims, 1) is gone


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_claim_that_was_cut_off_is_a_silent_holder(text, tmp_path):
    claims, watcher = Claims(tmp_path), Watcher(patience=.1)
    claims.path(1).write_text(text)
    assert claims.newest == 1 and not claims.take(1) and not watcher.is_gone(claims, 1)
    time.sleep(.2)
    assert watcher.is_gone(claims, 1)


# from a claim to an end, with a child of our own in the place of a run

def child(monkeypatch, code):
    "Entries start this code in place of a run; its argument is the entry's number."
    def start(number, args=(), console=None, variables=None, **kw):
        console.parent.mkdir(parents=True, exist_ok=True)
        with open(console, "a") as out: return subprocess.Popen([sys.executable, "-c", code, str(number)], stdout=out, stderr=out, env=os.environ | (variables or {}))
    monkeypatch.setattr(queues, "start", start)
    return lambda queue, entry: ([entry.number], 5)


def test_ends_of_entries(tmp_path, monkeypatch):
    "0 is done, 75 is stopped, anything else has failed with the last lines; a failed one comes back only when it is asked for."
    begin = child(monkeypatch, "import sys; print('line one'); print('@{}'); print('the very reason'); sys.exit([0, 75, 3][int(sys.argv[1])])")
    queue, ended = queue_in(tmp_path), []
    on_end = lambda entry, end: ended.append((entry.number, end["state"]))
    work(queue, begin, StopFlag(), on_end=on_end)
    assert ended == [(0, "done"), (1, "stopped"), (2, "failed")]
    write_json(queue.run_dir(queue.entries[0])/"done.json", {})   # as a run does
    assert queue.states()[2].end["error"] == "ended with exit code 3\nline one\nthe very reason"
    remember(queue)
    work(queue, begin, StopFlag(), on_end=on_end)
    assert ended[3:] == [(1, "stopped")], "a new command goes on with what was stopped, and leaves what has failed"
    remember(queue)
    work(queue, begin, StopFlag(), chosen=[2], again=True, on_end=on_end)
    assert ended[4:] == [(2, "failed")] and queue.states()[2].claim == 2


def test_whoever_has_lost_its_claim_kills_its_run(tmp_path, monkeypatch):
    "A worker that slept too long wakes up: another one has the entry, and this one writes no end."
    begin = child(monkeypatch, "import time; time.sleep(60)")
    queue = queue_in(tmp_path, 1, patience=.6)
    entry, n, _ = take_next(queue)
    threading.Timer(.6, lambda: queue.claims(entry).take(n+1)).start()
    t0 = time.monotonic()
    assert do_entry(queue, entry, n, begin, StopFlag()) == dict(state="lost") and time.monotonic()-t0 < 20
    assert queue.claims(entry).end(n) is None and state_of(queue, entry).state == "running"


def test_cores_and_gpus_are_divided(tmp_path, monkeypatch):
    "What an entry's process may use, as the system says it; a worker alone has everything."
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2: pytest.skip("one core cannot be divided")
    begin = child(monkeypatch, f"import os, time; time.sleep(.5); open({str(tmp_path)!r}+f'/{{os.getpid()}}', 'w').write(repr((sorted(os.sched_getaffinity(0)), os.environ.get('CUDA_VISIBLE_DEVICES'))))")
    queue = queue_in(tmp_path, 4)
    engines["local"](queue, begin, Plan(parallel=2, gpus=(4, 7)), StopFlag())
    said = {p.read_text() for p in tmp_path.iterdir() if p.is_file()}
    half = len(cores)//2
    assert said == {repr((cores[:half], "4")), repr((cores[half:], "7"))} and sorted(os.sched_getaffinity(0)) == cores


def test_gpus_are_shared_out_unless_an_entry_says_which(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    cfg = lambda **kw: make_config(configs["imitation"], TINY | kw)
    assert gpus_for([cfg(), cfg(device="cpu")]) == ("2", "5") and gpus_for([cfg(device="cpu")]) == () and gpus_for([cfg(), cfg(gpus="1")]) == ()
    assert gpus_for([make_config(configs["practice"], dict(suite="dot_2", rollout_gpus="1"))]) == ()
    assert room([*range(8)], ["2", "5"]) == 2 and room([*range(8)], ["2", "5"], each=2) == 1 and room([*range(8)], []) == 4 and room([*range(8)], [], each=4) == 2


def test_an_engine_is_a_plugin_of_a_few_lines(tmp_path, monkeypatch, capsys):
    (tmp_path/"mine.py").write_text("from clvla.run.engines import engines\nfrom clvla.run.queue import work\n"
                                    "def one(queue, begin, plan, stop):\n    'In this process, the last entry first.'\n"
                                    "    for entry in queue.entries[::-1]: work(queue, begin, stop, [entry.number], on_end=plan.on_end)\nengines['backwards'] = one\n")
    begin = child(monkeypatch, "pass")
    monkeypatch.setattr("clvla.command.sweep.begin_entry", begin)
    assert main(["sweep", "--grid", "seed=0..2", *sum((["-p", k, str(v)] for k,v in TINY.items()), []), "-p", "plugins", str([str(tmp_path/"mine.py")]), "--engine", "backwards", "--folder", str(tmp_path/"x"),
                 "-p", "data_dir", str(tmp_path/"data")]) in (0, 75), capsys.readouterr().err
    assert re.findall(r"^entry (\d)", capsys.readouterr().out, re.M) == ["2", "1", "0"]


# how long it takes

def test_costs_are_those_that_were_measured(tmp_path):
    cfg = lambda **kw: resolve(make_config(configs["imitation"], TINY | dict(run_dir=str(tmp_path)) | kw))
    er = dict(training=10., evaluation=6., demonstrations=50., all=70.)
    known = [(cfg(cl="er"), er)]
    assert estimate(cfg(cl="er", seed=5), []) is None
    assert estimate(cfg(cl="er", seed=5), known) == 10+6+4
    assert estimate(cfg(cl="er", steps_per_task=30, n_trials=2), known) == 30+12+4
    assert estimate(cfg(cl="mir"), known) == 20, "of another method, where there is nothing better"
    assert estimate(cfg(cl="mir"), [*known, (cfg(cl="mir", seed=1), er | dict(all=75.))]) == 25
    assert estimate(cfg(cl="er", suite="dot_3"), known) is None, "another stream says nothing"
    assert duration(None) == "unknown"


def test_time_is_added_up_over_claims(tmp_path):
    queue = queue_in(tmp_path, 1)
    claims = queue.claims(queue.entries[0])
    for n, (begin, end) in enumerate([(100., 130.), (500., 512.)], 1):
        claims.take(n, time=begin)
        write_json(claims.path(n, "end"), dict(state="stopped", asked=True, time=end))
    assert spent(queue, queue.states()[0])["all"] == 42.


# the whole, with real runs

@pytest.fixture(scope="module")
def home(tmp_path_factory, shared_data):
    folder = tmp_path_factory.mktemp("sweep")
    (folder/"s.yaml").write_text(json.dumps(dict(shared=TINY | dict(data_dir=str(shared_data), save_every=4, steps_per_task=32), grid=dict(cl=["er"], seed="0..1"))))
    return folder


def states(home): return [s.state for s in Queue.open(home/"runs/s").states()]
def has_begun(home, k): return any((home/f"runs/s/00{k}-er-s{k}/checkpoints").glob("*"))


@pytest.fixture(scope="module")
def finished(home):
    "A sweep that was stopped once, then taken by two shells at the same time, one of which was killed in the middle of a run."
    first = shell(home, "s.yaml", "--parallel", "1")
    until(lambda: has_begun(home, 0))
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=150)[0]
    after_stop = first.returncode, said, states(home)
    two = [shell(home, "s.yaml", "--parallel", "1", "--json") for _ in range(2)]
    claims = lambda k: Queue.open(home/"runs/s").claims(Queue.open(home/"runs/s").entries[k])
    until(lambda: has_begun(home, 1) and claims(1).newest)
    victim = next(p for p in two if p.pid == claims(1).read(claims(1).newest)["pid"])
    os.kill(victim.pid, signal.SIGKILL)
    other = next(p for p in two if p is not victim)
    said = other.communicate(timeout=280)[0]
    victim.communicate()
    return after_stop, (other.returncode, said), victim.pid


def test_a_stop_is_75_and_saves(finished):
    (code, said, after), _, _ = finished
    assert code == 75 and after == ["stopped", "todo"] and "1 stopped" in said, said


def test_the_other_shell_finishes_all(finished, home):
    _, (code, said), _ = finished
    assert code == 0, said
    assert states(home) == ["done"]*2
    found = json.loads(said.strip().splitlines()[-1])
    assert [r["state"] for r in found["entries"]] == ["done"]*2 and found["exit_status"] == 0
    assert found["comparisons"]["dot_2"]["baseline"] == "er"


def test_nothing_was_run_twice_to_its_end(finished, home):
    "One end `done` for each entry, and the entry of the killed shell has a claim without an end and a later one that is done."
    queue = Queue.open(home/"runs/s")
    ends = {k: [(queue.claims(e).end(n) or {}).get("state") for n in range(1, queue.claims(e).newest+1)] for k,e in enumerate(queue.entries)}
    assert all(found.count("done") == 1 and found[-1] == "done" for found in ends.values()), ends
    assert ends[0][0] == "stopped" and None in ends[1], ends


def test_each_run_is_its_twin_alone(finished, home):
    "The one that was stopped, and the one whose shell was killed, against `clvla run` with the same words."
    words = [w for k,v in (json.loads((home/"s.yaml").read_text())["shared"] | dict(cl="er", save_every=0)).items() for w in (f"--{k}", str(v))]
    for seed in (0, 1):
        done = subprocess.run([*CLVLA, "run", *words, "--seed", str(seed), "--run_dir", str(home/f"twin{seed}")], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        assert fingerprint(home/f"twin{seed}") == fingerprint(home/f"runs/s/00{seed}-er-s{seed}")
    assert fingerprint(home/"twin0") != fingerprint(home/"twin1")


def test_the_same_command_again_does_nothing_and_says_what_it_took(finished, home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    before = {p: p.stat().st_mtime_ns for p in (home/"runs/s").rglob("*") if p.is_file()}
    assert main(["sweep", "s.yaml", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["entries"]
    assert all(r["seconds"] > 1 for r in rows) and before == {p: p.stat().st_mtime_ns for p in (home/"runs/s").rglob("*") if p.is_file()}
    assert main(["sweep", "runs/s", "--only", "1", "--dry_run"]) == 0 and "er-s1  done" in capsys.readouterr().out
    # a third seed is added: the two that are done say how long it will take, and nothing is written
    said = json.loads((home/"s.yaml").read_text())
    said["grid"]["seed"] = "0..2"
    (home/"more.yaml").write_text(json.dumps(said))
    assert main(["sweep", "more.yaml", "--folder", "runs/s", "--dry_run", "--json"]) == 0
    more = json.loads(capsys.readouterr().out)["entries"]
    assert more[2]["state"] == "todo" and 0 < more[2]["estimate"] < 3*max(r["seconds"] for r in rows) and not (home/"runs/s/002-er-s2").exists()


def test_the_page_shows_the_same(finished, home):
    done = subprocess.run([sys.executable, "-m", "papermill", str(ROOT/"nbs/sweep.ipynb"), str(home/"page.ipynb"), "-p", "file", "s.yaml", "--no-progress-bar"], cwd=home, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    text = (home/"page.ipynb").read_text()
    assert "er-s1" in text and "ASR" in text and "plotly" in text


def test_other_experiments_in_one_list(finished, home, shared_data, capsys, monkeypatch):
    "Practice, agents, and the evaluation of a run, each as a line; a second command plays nothing again."
    monkeypatch.chdir(home)
    common = dict(threads=1, data_dir=str(shared_data))
    lines = [dict(experiment="run_rl", suite="dot_2", algo="cloning", smoke=True, n_workers=1, episodes=2, round_episodes=2, n_trials=1, **common),
             dict(experiment="run_crl", suite=dict(base="dot_2", env=dict(discrete=True), name="dots"), smoke=True, image_size=16, algo_kw=dict(n_envs=2, horizon=16), **common),
             dict(experiment="eval_cl", run_dir=str(home/"runs/s/000-er-s0"), n_trials=2, n_workers=1)]
    (home/"three.json").write_text(json.dumps(lines))
    assert main(["sweep", "three.json", "--json", "--parallel", "2"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert [r["state"] for r in found["entries"]] == ["done"]*3
    evaluation, = (home/"runs/s/000-er-s0/evals").iterdir()
    played = (evaluation/"episodes.jsonl").read_text()
    assert len(played.splitlines()) == 6   # stage 0: 1 task, stage 1: 2 tasks, of 2 trials
    assert main(["sweep", "three.json", "--json"]) == 0 and (evaluation/"episodes.jsonl").read_text() == played


# an evaluation in parts

def test_parts_of_an_evaluation_are_merged_by_one_command(finished, home, capsys, monkeypatch):
    "Three entries in two workers, and the whole after them: record for record what one process plays."
    from clvla.train.checkpoint_eval import eval_cl
    from clvla.train.eval_config import EvalConfig
    monkeypatch.chdir(home)
    run = home/"runs/s/001-er-s1"
    words = ["--experiment", "eval_cl", "--parts", "3", "-p", "run_dir", str(run), "-p", "n_trials", "3", "-p", "evaluate", "full", "-p", "n_workers", "1", "--folder", "runs/parts"]
    assert main(["sweep", *words, "--parallel", "2", "--json"]) == 0, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out)["entries"]
    assert [r["name"].rpartition("-")[2] for r in rows] == ["part0of3", "part1of3", "part2of3", "run"] and {r["state"] for r in rows} == {"done"}
    bare = lambda folder: sorted((r["stage"], r["task"], r["trial"], r["success"], r["steps"], r["reward"]) for r in map(json.loads, (folder/"episodes.jsonl").read_text().splitlines()))
    whole = run/"evals/full-0+3-s0"
    merged, parts = bare(whole), [bare(whole.with_name(f"{whole.name}-part{k}of3")) for k in range(3)]
    assert list(map(len, parts)) == [4]*3 and sorted(sum(parts, [])) == merged, "the whole has played nothing itself"
    whole.rename(run/"evals/aside")
    for k in range(3): whole.with_name(f"{whole.name}-part{k}of3").rename(home/f"part{k}")
    alone = eval_cl(EvalConfig(run_dir=str(run), n_trials=3, evaluate="full", n_workers=1, batch=8), len)
    assert bare(alone.path) == merged


def test_the_whole_waits_for_its_parts_and_is_taken_once(tmp_path):
    "Workers that have one part each, as the tasks of an array job: the one that ends last takes the whole; after a failure nobody does."
    parts = [Entry(k, f"p{k}", "eval_cl", dict(part=f"{k}/2"), dict(part=f"{k}/2")) for k in range(2)]
    queue = Queue(tmp_path/"q", [*parts, Entry(2, "whole", "eval_cl", {}, {}, after=[0, 1])])
    queue.begin()
    assert Queue.open(queue.folder).entries == queue.entries
    one, other = Queue.open(queue.folder), Queue.open(queue.folder)
    a, b = take_next(one, [0])[0], take_next(other, [1])[0]
    one.claims(a).write_end(1, state="done")
    assert take_next(one, [0]) == (None, None, False), "it does not wait for the other one"
    other.claims(b).write_end(1, state="failed", error="x")
    assert take_next(other, [1]) == (None, None, False) and take_next(other) == (None, None, False)
    other.claims(b).take(2)
    other.claims(b).write_end(2, state="done")
    assert take_next(other, [1])[0].name == "whole" and take_next(one, [0]) == (None, None, True)


def test_gpus_by_name_give_each_worker_one(tmp_path, monkeypatch):
    begin = child(monkeypatch, f"import os; open({str(tmp_path)!r}+f'/{{os.getpid()}}', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.setattr("clvla.run.engines.count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    queue = queue_in(tmp_path, 4)
    engines["local"](queue, begin, Plan(settings=dict(gpus="0,1")), StopFlag())
    said = sorted(p.read_text() for p in tmp_path.iterdir() if p.is_file())
    assert len(said) == 4 and set(said) <= {"0", "1"}
    with pytest.raises(ValueError, match="this machine has 2 of them"): engines["local"](queue, begin, Plan(settings=dict(gpus="2")), StopFlag())
