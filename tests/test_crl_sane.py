"SANE: which node acts, when one is made, whose memory stays, beside plain loops; and the same bits after a crash in the middle of a node's rollouts."
import pytest
import torch

from test_crl import Crash, small

KW = dict(n_envs=2, horizon=20, hidden=8, channels=2, epochs=2, frames=120, max_nodes=2, mergeable=1., rise=0., fall=0., hold=2)


def run(path, **kw):
    from clvla.crl.learner import learn_tasks
    base = dict(algo="sane", algo_kw=KW, cycles=1, steps_per_task=280, eval_every=280, save_every=1)
    return learn_tasks(small(path, **base | kw), say=len)


@pytest.fixture(scope="module")
def whole(tmp_path_factory): return run(tmp_path_factory.mktemp("sane")/"run")


def built(cls, *args, **kw):
    from clvla.crl.experiment import Spaces
    agent = cls(*args, **dict(n_envs=2, horizon=4, hidden=8, channels=2) | kw)
    agent.build(None, Spaces(4, 2, dict(a=3)))
    return agent


def starts(n=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    return dict(image=torch.randint(0, 256, (n, 4, 4, 3), dtype=torch.uint8, generator=g), state=torch.randn(n, 2, generator=g), n_actions=torch.full((n,), 3))


def says(node, v, u, anchor=None):
    "Let a node, and its anchor, answer these numbers everywhere."
    for net, value in ((node.net, v), (node.anchor, v if anchor is None else anchor)):
        for head, x in ((net.value, value), (net.uncertainty, u)):
            torch.nn.init.zeros_(head.weight)
            torch.nn.init.constant_(head.bias, x)


def test_the_records_of_a_run_show_its_nodes(whole):
    "Comparisons come after every second rollout and never between; a stage begins with a new choice; nodes were made, and merged."
    logs = whole.logs()
    assert len(logs) == 14 and all(r["train/drift"] == 0 for k, r in enumerate(logs) if k % 7 not in (1, 3, 5))
    made, gone = sum(r["train/drift"] < 0 for r in logs), sum(r["train/merged"] for r in logs)
    assert made > 1 and gone > 0 and logs[-1]["train/nodes"] == 1+made-gone and max(r["train/nodes"] for r in logs) == 2
    for k in (0, 2, 4, 7, 9, 11): assert logs[k]["train/node"] == logs[k+1]["train/node"]


@pytest.mark.parametrize("n", [9, 10], ids=["inside a node's rollouts", "behind a comparison"])
def test_a_run_that_lost_power_ends_with_the_same_bits(tmp_path, whole, n):
    from clvla.crl.sane import SANE
    from clvla.run.resume import fingerprint
    count, real = [0], SANE.learn

    def learn(self, rollout):
        count[0] += 1
        if count[0] == n: raise Crash
        return real(self, rollout)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(SANE, "learn", learn)
        with pytest.raises(Crash): run(tmp_path/"run")
    assert fingerprint(run(tmp_path/"run").path) == fingerprint(whole.path)


def test_the_same_seed_twice_and_another(tmp_path, whole):
    from clvla.run.resume import fingerprint
    assert fingerprint(run(tmp_path/"again").path) == fingerprint(whole.path) != fingerprint(run(tmp_path/"other", seed=1).path)


@pytest.mark.parametrize("optimism, wins", [(0., 1), (1., 1), (3., 2)])
def test_the_largest_promise_acts(optimism, wins):
    "Values 1, 3, 2 and uncertainties .1, .2, -1: 1+.1c, 3+.2c, 2+c."
    from clvla.crl.sane import Node, most_hopeful
    nodes = [built(Node, 0, k, 1.) for k in range(3)]
    for node, v, u in zip(nodes, (1., 3., 2.), (.1, .2, -1.)): says(node, v, u)
    assert most_hopeful(nodes, starts(), optimism).number == wins


@pytest.mark.parametrize("anchor, n, moved", [(2.7, 1, 1), (2.9, 1, 0), (3.3, 1, 0), (3.5, 2, -1)])
def test_a_copy_is_made_when_the_value_fell(anchor, n, moved):
    "The value 3 with uncertainty .2, between 3-.2 and 3+2*.2; the copy has the weights, the optimizer's state as its own, and no memory."
    from clvla.cl.base import flat
    from clvla.crl.sane import SANE
    agent = built(SANE)
    node, = agent.nodes
    for p in node.net.parameters(): p.grad = torch.ones_like(p)
    node.opt.step()
    says(node, 3., -.2, anchor)
    agent.on_starts(starts())
    assert (agent.grow(node), len(agent.nodes), agent.n_made) == (moved, n, n)
    assert node.judge(starts(), anchor=True)[0] == pytest.approx(3. if moved else anchor, abs=1e-5)
    if n == 1: return
    new = agent.nodes[1]
    of = lambda a: flat(a.net.parameters()).detach().clone()
    assert torch.equal(of(new), of(node)) and new.number == 1 and not len(new.memory)
    average, before = new.opt.state_dict()["state"][0]["square_avg"], of(node)
    old = node.opt.state_dict()["state"][0]["square_avg"]
    assert torch.equal(average, old) and average.data_ptr() != old.data_ptr()
    for p in new.net.parameters(): p.grad = torch.ones_like(p)
    new.opt.step()
    assert torch.equal(of(node), before) and not torch.equal(of(new), before) and not torch.equal(average, old)
    agent.on_starts(starts())
    assert agent.active is new or agent.active is node


def unrolls(memory, n, state, seed):
    "Show a memory `n` unrolls whose pictures and states are all one number."
    for k in range(n):
        rows = dict(image=torch.full((4, 2, 4, 4, 3), int(100*state), dtype=torch.uint8), state=torch.full((4, 2, 2), state), reward=torch.full((4, 2), k+seed/100))
        cut = dict(image=rows["image"][0, :0], state=rows["state"][0, :0])
        memory.add(rows | dict(cut=cut, cut_at=torch.zeros(0, 2, dtype=torch.long)))


def test_the_nearest_pair_by_a_plain_loop():
    from clvla.crl.clear import Unrolls
    from clvla.crl.sane import nearest
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        levels = torch.rand(5, generator=g).tolist()
        memories = [Unrolls(40, 4, k) for k in range(5)]
        for k, (memory, level) in enumerate(zip(memories, levels)): unrolls(memory, 1, level, k)
        plain = min(((48*(int(100*a)-int(100*b))**2/255**2 + 2*(a-b)**2), i, j) for i, a in enumerate(levels) for j, b in enumerate(levels) if i < j)
        assert nearest(memories) == plain[1:]
    assert nearest([memories[0], memories[1], Unrolls(40, 4, 9)]) == (0, 2)


def test_a_merged_memory_has_the_largest_keys_of_both_once():
    "And no unroll twice where one memory was inherited from the other."
    from clvla.crl.clear import Unrolls
    from clvla.crl.sane import Node
    a, b = (built(Node, 0, k, 1., frames=40) for k in (1, 2))
    unrolls(a.memory, 30, .1, 1)
    unrolls(b.memory, 12, .7, 2)
    owner = {key: float(u["reward"][0, 0]) for m in (a.memory, b.memory) for key, u in zip(m.keys, m.items)}
    keys = sorted([*a.memory.keys, *b.memory.keys])[-10:]
    a.replay = 0.   # no update: these unrolls have no actions
    a.absorb(b)
    assert sorted(a.memory.keys) == keys and {k: float(u["reward"][0, 0]) for k, u in zip(a.memory.keys, a.memory.items)} == {k: owner[k] for k in keys}
    assert {round(100*float(u["state"].mean())) for u in a.memory.items} == {10, 70}
    small, copy = Unrolls(40, 4, 5), built(Node, 0, 3, 0., frames=40)
    unrolls(small, 3, .2, 3)
    for holder in (a, copy): holder.memory.keys, holder.memory.items, holder.replay = list(small.keys), list(small.items), 0.
    a.absorb(copy)
    assert len(a.memory) == 6 and sorted(a.memory.keys) == sorted(small.keys)


def test_methods_from_outside_are_refused(tmp_path):
    with pytest.raises(ValueError, match="choose ppo, impala or clear"): run(tmp_path/"run", cl="ewc")
    assert not (tmp_path/"run").exists()


@pytest.mark.parametrize("kw, says", [
    (dict(max_nodes=0), "max_nodes must be a whole number"), (dict(max_nodes=2, mergeable=.75), "is 1 nodes that may be merged"), (dict(mergeable=1.5), r"mergeable must be a number in \[0,1\]"),
    (dict(hold=0), "hold must be a whole number"), (dict(rise=-1.), "rise must be a number at least 0"), (dict(fall=float("nan")), "fall must be"), (dict(optimism=-1.), "optimism must be"),
    (dict(uncertainty_weight=-.1), "uncertainty_weight must be"), (dict(inherit=1), "inherit must be True or False"), (dict(frames=10), "holds no unroll of 20 steps"),
    (dict(replay=-1), "replay must be"), (dict(lag=2), "lag"), (dict(gamma=2.), "gamma must be")])
def test_bad_settings_are_refused_before_anything_is_made(tmp_path, kw, says):
    with pytest.raises(ValueError, match=says): run(tmp_path/"run", algo_kw=KW | kw)
    assert not (tmp_path/"run").exists()
