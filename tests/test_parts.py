"The folder of a long evaluation: continued after any crash, merged from several machines, refused when it is another one."
import json
import pytest
from clvla.eval.metrics import record_key
from clvla.eval.parts import merge, plan_of, write_plan
from clvla.run.folder import RunFolder

INFO,N,IDS = dict(stage=0, after="d", step=None),5,list("abcde")
PLAN = plan_of({"weights": "12ab"}, [(INFO, IDS)], range(N), 7, 4)

@pytest.fixture
def reference(): return [dict(INFO, task=j, trial=i, success=(i+k)%3 > 0, steps=9+i, reward=.1*k, seed=7, restarts=0, seconds=1., **{"time/act": .5}) for k,j in enumerate(IDS) for i in range(N)]

def book(folder, plan, records=()):
    "A folder with a plan and records of it."
    write_plan(folder, plan)
    for r in records: RunFolder(folder).episode(r)
    return folder

def bare(recs): return [{k: v for k,v in r.items() if k != "seconds" and "time/" not in k} for r in recs]

def test_parts_are_merged_and_wrong_ones_refused(reference, tmp_path):
    share = lambda r, a, b: [(t, i) for t in IDS for i in range(N)].index((r["task"], r["trial"]))%b == a
    parts = [book(tmp_path/f"{a}", {**PLAN, "part": [a, 3]}, [r for r in reference if share(r, a, 3)]) for a in range(3)]
    got = merge(parts); assert bare(got.records) == bare(reference) and (got.missing, got.parts, got.plan["part"]) == ([], [], [0, 1])
    assert [len(merge([p]).records) for p in parts] == [sum(share(r, a, 3) for r in reference) for a in range(3)]
    two = merge(parts[1:]); assert two.parts == ["0/3"] and {k[2:] for k in two.missing} == {(r["task"], r["trial"]) for r in reference if share(r, 0, 3)}
    twice = book(tmp_path/"twice", {**PLAN, "part": [1, 3]}, [r | {"seconds": 1., "restarts": 2, "time/act": 9.} for r in reference[:4]]); assert len(merge([*parts, twice]).records) == len(reference)
    for name,recs,kw,text in (("seed", [], dict(seed=8), "different evaluations: seed: 8 -> 7"), ("policy", [], dict(policy={"weights": "ff"}), "ff.* -> .*12ab"),
                              ("trials", [], dict(trials=[0, 1]), "trials"), ("batch", [], dict(batch=5), "batch: 5 -> 4"), ("b", [], dict(part=[0, 2]), "part: 2 -> 3"),
                              ("lie", [reference[0] | {"steps": 99}], {}, "different things of episode .*steps: .* -> 99"),
                              ("odd", [reference[0] | {"trial": 77}], {}, "does not know")):
        with pytest.raises(ValueError, match=text): merge([parts[0], book(tmp_path/name, {**PLAN, "part": [1, 3], **kw}, recs)])
    with pytest.raises(ValueError, match="nothing to merge"): merge([])
    with pytest.raises(FileNotFoundError): merge([tmp_path/"nowhere"])

def test_parts_of_a_run_that_has_grown_meanwhile_are_merged(tmp_path):
    "One machine has seen both checkpoints, the other only the first: the rest is missing, not refused; so are keys that older plans lack."
    stages = [dict(stage=k, after="ab"[k], step=None, tasks=["a", "b"][:k+1]) for k in range(2)]
    plan = dict(policy=[{"w": "1"}, {"w": "2"}], stages=stages, trials=[0, 1], seed=7, batch=4, torch="2.9")
    early = {k: v[:1] if k in ("policy", "stages") else v for k,v in plan.items() if k != "torch"}
    rec = lambda t, task, i: dict(stage=t, after="ab"[t], task=task, trial=i, success=True, steps=3, reward=1., seed=7, step=None)
    book(tmp_path/"0", {**plan, "part": [0, 2]}, [rec(0, "a", 0), rec(1, "a", 0)])
    book(tmp_path/"1", {**early, "part": [1, 2]}, [rec(0, "a", 1)])
    for folders in (["0", "1"], ["1", "0"]):
        got = merge([tmp_path/f for f in folders])
        assert (len(got.records), got.missing, got.parts) == (3, [(1, None, "a", 1), (1, None, "b", 0), (1, None, "b", 1)], [])
    book(tmp_path/"2", {**early, "policy": [{"w": "3"}], "part": [1, 2]})
    with pytest.raises(ValueError, match="2 and .*0 are parts of different evaluations: policy"): merge([tmp_path/"0", tmp_path/"2"])

def test_a_folder_is_held_by_one_and_mended(tmp_path):
    run = RunFolder(book(tmp_path, PLAN))
    with run.lock():
        run.episode(dict(INFO, task="a", trial=0, success=True))
        with pytest.raises(ValueError, match="is being written by"):
            with RunFolder(tmp_path).lock(): pass
        assert [record_key(r) for r in run.episodes()] == [(0, None, "a", 0)]
    path = tmp_path/"episodes.jsonl"; whole = path.read_bytes()
    for half in (b"{", b'{"stage": 0}', b"\xff\xfe"):
        path.write_bytes(whole+half)
        assert len(merge([tmp_path]).records) == 1
        with run.lock(): run.clean()
        assert path.read_bytes() == whole
    path.write_bytes(b"rubbish\n"+whole)
    with pytest.raises(ValueError, match="line 1 of .* is damaged"): merge([tmp_path])
    with pytest.raises(ValueError, match="belongs to another evaluation, which differs in seed: 7 -> 3; remove that folder"): write_plan(tmp_path, {**PLAN, "seed": 3})

def test_a_plan_grows_by_later_stages_only(tmp_path):
    "And one that was begun before libraries were named goes on without naming them."
    infos = [(dict(stage=k, after="abc"[k], step=None), list("abc"[:k+1])) for k in range(3)]
    plan = lambda n, names="xyz", stages=infos, **kw: plan_of(list(names[:n]), stages[:n], range(2), 7, 4, **kw)
    read = lambda: json.loads((tmp_path/"plan.json").read_text())
    for n in (1, 2): write_plan(tmp_path, plan(n)); assert read() == plan(n)
    for bad in (plan(1), plan(3, "qyz"), plan(3, stages=infos[::-1]), plan(2, "xq"), {**plan(3), "seed": 8}, {**plan(3), "part": [0, 2]}):
        with pytest.raises(ValueError, match="remove that folder"): write_plan(tmp_path, bad)
        assert read() == plan(2)
    write_plan(tmp_path, plan(3, torch="2.9", gl="osmesa")); assert read() == plan(3)
    write_plan(tmp_path/"new", plan(1, torch="2.9", gl="osmesa"))
    with pytest.raises(ValueError, match="gl: .osmesa. -> .egl.; torch: .2.9. -> .2.10."): write_plan(tmp_path/"new", plan(2, torch="2.10", gl="egl"))
