"Transitions against a loop over steps, and the replay ring against a plain list of episodes."
import numpy as np, pytest, torch
from clvla.core.state import load_state, save_state
from clvla.rl.replay import Queue, Replay
from clvla.rl.transitions import action_chunks, transitions

torch.set_num_threads(1)
DEVICES = ["cpu", *["cuda"]*torch.cuda.is_available()]


# --- transitions
def by_loop(at, reward, terminated, C, gamma):
    "The transitions of an episode, one step after the other: start, step reached, steps, reward, mask."
    rows = []
    for k, t in enumerate(at[:-1]):
        total, step, discount = 0., int(t), 1.
        while step < len(reward) and step - t < C:
            total += discount*float(reward[step])
            discount *= gamma
            step += 1
        rows.append((k, step, step - t, total, 0. if terminated and step == len(reward) else discount))
    return np.array(rows)


def observed(T, stride): return np.array([*range(0, T, stride), T])


def check(at, reward, terminated, C, gamma):
    tr, rows = transitions(at, reward, terminated, C, gamma), by_loop(at, reward, terminated, C, gamma)
    assert {len(v) for v in tr.values()} == {len(rows)}
    assert np.array_equal(np.stack([tr["start"], at[tr["next"]], tr["n_steps"]], 1), rows[:, :3])
    assert np.array_equal(tr["first"], at[:-1])
    np.testing.assert_allclose(np.stack([tr["reward"], tr["mask"]], 1), rows[:, 3:], rtol=1e-6, atol=1e-7)
    return tr


@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("stride, C", [(s, C) for s in (1, 2, 4, 8) for C in (1, 2, 4, 8) if C%s == 0])
def test_sparse_success_at_every_position(stride, C, terminated):
    "An episode of T steps with its reward in the last one: T up to four chunks, so the end falls on every position."
    for T in range(1, 4*C + 2):
        tr = check(observed(T, stride), np.eye(T)[-1], terminated, C, .97)
        near = tr["first"] + C >= T
        assert np.array_equal(tr["mask"] == 0, near & terminated)
        np.testing.assert_allclose(tr["reward"], np.where(near, .97**(T - 1 - tr["first"]), 0), rtol=1e-6)


@pytest.mark.parametrize("gamma", [0., .5, .99, 1.])
@pytest.mark.parametrize("stride, C", [(1, 1), (1, 5), (2, 2), (2, 8), (3, 9), (5, 10)])
def test_dense_rewards(stride, C, gamma):
    rng = np.random.default_rng(stride*100 + C)
    for T in range(1, 31): check(observed(T, stride), rng.normal(size=T), bool(T%2), C, gamma)


@pytest.mark.parametrize("T", [1, 7, 20])
def test_a_chunk_longer_than_the_episode(T):
    tr = check(observed(T, 2), np.ones(T), False, 40, .9)
    assert np.array_equal(tr["next"], np.full(len(tr["next"]), (T + 1)//2))


def test_one_chunk_observed_at_its_ends_only():
    assert transitions([0, 5], np.ones(5), True, 5, 1.)["reward"].tolist() == [5]
    assert transitions([0, 5], np.ones(5), True, 8, 1.)["n_steps"].tolist() == [5]


@pytest.mark.parametrize("C", [1, 4, 8])
def test_truncation_keeps_the_value_of_a_task_without_end(C):
    "Reward 1 in every step is worth 1/(1-gamma) from each start, however the time limit cuts the chunks."
    for T in range(1, 20):
        tr = transitions(observed(T, 1), np.ones(T), False, C, .9)
        np.testing.assert_allclose(tr["reward"]/(1 - tr["mask"]), 10, rtol=1e-5)


def test_types():
    tr = transitions(range(0, 9, 2), torch.ones(8), np.bool_(True), 4, 1)
    assert {k: v.dtype for k, v in tr.items()} == dict(reward=np.float32, mask=np.float32, **dict.fromkeys(("start", "next", "first", "n_steps"), np.int64))


@pytest.mark.parametrize("at, T, C, gamma, says", [
    ([0, 2, 4], 4, 3, .9, "take a multiple of that stride"), ([0, 4], 4, 2, .9, "take a multiple of that stride"),
    ([0, 2, 4, 5], 5, 0, .9, "take a multiple of that stride"), ([0, 2, 4], 5, 2, .9, "..., 5, found [0 2 4]"),
    ([0, 2, 3, 5], 5, 2, .9, "needs observations at"), ([2, 4, 5], 5, 2, .9, "needs observations at"), ([0], 1, 2, .9, "needs observations at"),
    ([0, 0, 5], 5, 2, .9, "needs observations at"), ([0, 2, 4, 5, 5], 5, 2, .9, "needs observations at"),
    ([0], 0, 2, .9, "at least one step"), ([0, 1], 1, 1, 1.01, "in 0..1"), ([0, 1], 1, 1, -.1, "in 0..1"), ([0, 1], 1, 1, float("nan"), "in 0..1")])
def test_refused_episodes(at, T, C, gamma, says):
    with pytest.raises(ValueError) as e: transitions(at, np.ones(T), True, C, gamma)
    assert says in str(e.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_refused_rewards(bad):
    with pytest.raises(ValueError, match="finite rewards"): transitions([0, 1, 2], [0, bad], True, 1, .9)


@pytest.mark.parametrize("T, stride, C", [(1, 1, 4), (5, 2, 4), (8, 2, 4), (20, 4, 8), (3, 1, 8)])
def test_action_chunks(T, stride, C):
    action = np.random.default_rng(T).normal(size=(T, 3)).astype(np.float32)
    tr = transitions(observed(T, stride), np.zeros(T), False, C, .9)
    chunk, pad = action_chunks(action, tr["first"], C)
    assert chunk.dtype == np.float32 and pad.dtype == bool
    for k, t in enumerate(tr["first"]):
        for i in range(C):
            assert np.array_equal(chunk[k, i], action[min(t + i, T - 1)]) and pad[k, i] == (t + i >= T)
    assert np.array_equal((~pad).sum(1), tr["n_steps"])


@pytest.mark.parametrize("T, first", [(0, [0]), (5, [5]), (5, [-1]), (5, [0, 9])])
def test_refused_action_chunks(T, first):
    with pytest.raises(ValueError, match="within the"): action_chunks(np.zeros((T, 2)), first, 4)


# --- the ring
def small(capacity=50, seed=0, **kw):
    return Replay(capacity, dict(state=((4,), torch.float32), token=((3, 2), torch.float16)),
                  dict(reward=((), torch.float32), chunk=((2, 2), torch.float32), pad=((2,), torch.bool)), seed=seed, **kw)


def episode(task, number, N, skip=2, every=1):
    "States (task, episode, position, 1); transitions from every so many states lead `skip` states on, or to the end."
    start = np.arange(0, N - 1, every)
    states = np.stack([np.full(N, task), np.full(N, number), np.arange(N), np.ones(N)], 1)
    return dict(states=dict(state=states, token=np.tile(states[:, 2, None, None], (1, 3, 2))), task=task,
                transitions=dict(start=start, next=np.minimum(start + skip, N - 1), reward=start + 1000.*number, first=start,
                                 chunk=np.full((len(start), 2, 2), number), pad=np.full((len(start), 2), number%2 == 1)))


def alive(pushed, capacity):
    "(task, episode, start, next) of all transitions whose start is among the newest states, from the list of all episodes."
    places = [(e, k) for e in pushed for k in range(len(e["states"]["state"]))][-capacity:]
    links = {(id(e), s): n for e in pushed for s, n in zip(e["transitions"]["start"], e["transitions"]["next"])}
    return {(e["task"], int(e["states"]["state"][0, 1]), k, int(links[id(e), k])) for e, k in places if (id(e), k) in links}


def drawn(batch):
    s, n = batch["state"].long(), batch["next_state"].long()
    return [tuple(map(int, (s[i, 0], s[i, 1], s[i, 2], n[i, 2]))) for i in range(len(s))]


def check_batch(b):
    "State, next state, token and fields belong together."
    assert torch.equal(b["state"][:, :2], b["next_state"][:, :2]) and torch.equal(b["state"][:, 0].long(), b["task"])
    assert torch.equal(b["token"][:, 0, 0], b["state"][:, 2]) and torch.equal(b["next_token"][:, 2, 1], b["next_state"][:, 2])
    assert torch.equal(b["reward"], b["state"][:, 2] + 1000*b["state"][:, 1])
    assert torch.equal(b["chunk"][:, 1, 1], b["state"][:, 1]) and torch.equal(b["pad"][:, 0], b["state"][:, 1]%2 == 1)
    assert {k: v.dtype for k, v in b.items() if v.dtype != torch.float32} == dict(task=torch.int64, pad=torch.bool)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skip, every", [(1, 1), (4, 1), (4, 2), (50, 3)])
@pytest.mark.parametrize("capacity", [5, 16, 37])
def test_the_ring_holds_what_a_list_would(capacity, skip, every, device):
    "After each push: exactly the transitions whose states are there, in draws, in counts and in both kinds of sampling."
    memory, rng, pushed = small(capacity, device=device), np.random.default_rng(capacity), []
    for number in range(40):
        pushed.append(episode(int(rng.choice([-3, 0, 7])), number, int(rng.integers(2, min(capacity, 12) + 1)), skip, every))
        memory.push(**pushed[-1])
        want = alive(pushed, capacity)
        assert len(memory) == len(want) and memory.counts() == {t: sum(w[0] == t for w in want) for t in sorted({w[0] for w in want})}
        for stratified in (False, True):
            b = {k: v.cpu() for k, v in memory.sample(60, stratified).items()}
            check_batch(b)
            assert set(drawn(b)) <= want
    assert set(drawn({k: v.cpu() for k, v in memory.sample(4000).items()})) == want
    assert memory.n_states == capacity


def test_an_episode_as_long_as_the_ring_replaces_everything():
    memory = small(10)
    for number, N in enumerate([4, 10, 10, 3]):
        memory.push(**episode(number, number, N))
        assert (N < 10 or list(memory.counts()) == [number]) and set(drawn(memory.sample(500))) == alive([episode(k, k, M) for k, M in enumerate([4, 10, 10, 3][:number + 1])], 10)


def test_a_queue_against_a_list():
    rng, queue, plain = np.random.default_rng(0), Queue(17), []
    for _ in range(300):
        leave = int(rng.integers(len(plain) + 1))
        queue.lo += leave
        plain = plain[leave:]
        come = rng.integers(1000, size=rng.integers(17 - len(plain) + 1))
        queue.push(come)
        plain += come.tolist()
        assert len(queue) == len(plain) and (not plain or set(queue.draw(200, rng).tolist()) <= set(plain))


# --- sampling laws
def filled(sizes, **kw):
    "A replay with this many transitions of each task."
    memory = small(1000, **kw)
    for number, (task, n) in enumerate(sizes.items()): memory.push(**episode(task, number, n + 1))
    return memory


@pytest.mark.parametrize("B", [1, 2, 3, 5, 7, 16])
@pytest.mark.parametrize("K", [1, 2, 3, 6])
def test_stratified_treats_tasks_alike(B, K):
    "In each batch the tasks differ by one place at most; over many batches every task has B/K places."
    tasks = [10*k - 7 for k in range(K)]
    memory = filled({task: 3**(k%4 + 1) for k, task in enumerate(tasks)})
    steps = 600
    n = np.array([[(b == task).sum() for task in tasks] for b in (memory.sample(B, stratified=True)["task"].numpy() for _ in range(steps))])
    assert (n.sum(1) == B).all() and (n.max(1) - n.min(1) <= 1).all()
    p = B%K/K
    assert abs(n.mean(0) - B/K).max() <= 4.5*(p*(1 - p)/steps)**.5


def chi2(seen, n):
    "Statistic over its expectation's deviation: about a standard normal number for fair draws."
    expected = n/len(seen)
    return (((seen - expected)**2/expected).sum() - (len(seen) - 1))/(2*(len(seen) - 1))**.5


@pytest.mark.parametrize("wrapped", [False, True])
def test_uniform_draws_all_transitions_alike(wrapped):
    memory = small(120)
    for number in range(9 if wrapped else 4): memory.push(**episode(number%2, number, 28))
    rows = memory.all.draw(60_000, memory.rng)
    seen = np.bincount(rows, minlength=120)
    assert np.array_equal(seen > 0, memory.next >= 0) and abs(chi2(seen[seen > 0], 60_000)) < 4


def test_stratified_draws_within_a_task_alike():
    memory = filled({1: 200, 2: 20})
    b = memory.sample(40_000, stratified=True)
    for task, n in {1: 200, 2: 20}.items():
        seen = np.bincount(b["state"][b["task"] == task, 2].long().numpy(), minlength=n)
        assert len(seen) == n and abs(chi2(seen, 20_000)) < 4


def test_a_task_that_left_gets_no_place_and_one_that_returns_does():
    memory = small(20)
    for number, task in enumerate([4, 9, 9, 4]):
        memory.push(**episode(task, number, 10))
        assert list(memory.counts()) == [[4], [4, 9], [9], [4, 9]][number]
        assert sorted(set(memory.sample(10, stratified=True)["task"].tolist())) == list(memory.counts())


# --- what comes out
def test_equal_seeds_draw_equal_batches():
    a, b, c = (filled({0: 50, 1: 5}, seed=seed) for seed in (0, 0, 1))
    x, y, z = (m.sample(64)["reward"] for m in (a, b, c))
    assert torch.equal(x, y) and not torch.equal(x, z)


def test_float16_states_come_out_rounded_once():
    x = torch.randn(30, 8)
    memory = Replay(40, dict(token=((8,), torch.float16)), dict(weight=((), torch.float64), n=((), torch.int32)))
    memory.push(dict(token=x), dict(start=range(29), next=range(1, 30), weight=torch.rand(29), n=torch.arange(29)), 0)
    b = memory.sample(100)
    assert torch.equal(b["token"], x.half().float()[b["n"].long()]) and torch.equal(b["next_token"], x.half().float()[b["n"].long() + 1])
    assert [b[k].dtype for k in ("token", "weight", "n")] == [torch.float32, torch.float32, torch.int32]


def test_a_batch_is_a_copy():
    memory = filled({0: 50})
    for x in memory.sample(32).values(): x.zero_()
    check_batch(memory.sample(32))
    assert (memory.sample(32)["state"][:, 3] == 1).all()


def test_out_reuses_the_memory_of_a_batch():
    memory, twin = filled({0: 50}), filled({0: 50})
    first = [m.sample(32) for m in (memory, twin)][0]
    want, again = twin.sample(32), memory.sample(32, out=first)
    assert all(torch.equal(again[k], want[k]) for k in want) and list(again) == list(want)
    assert all(again[k].data_ptr() == first[k].data_ptr() for k in first if k != "task")
    with pytest.raises(ValueError, match="out is a batch of 32, 8 are to be drawn"): memory.sample(8, out=first)


def test_pushed_tensors_are_copied_without_their_graph():
    memory, x = Replay(10, dict(s=((2,), torch.float32)), {}), torch.randn(5, 2, requires_grad=True)
    memory.push(dict(s=x*2), dict(start=[0], next=[4]), 0)
    with torch.inference_mode(): memory.push(dict(s=torch.ones(5, 2)), dict(start=[1], next=[3]), 0)
    b = memory.sample(20)["s"]
    assert not b.requires_grad and not b.is_inference()
    weight = torch.ones(2, requires_grad=True)
    (b@weight).sum().backward()
    assert weight.grad is not None


# --- going on
@pytest.mark.parametrize("n", [0, 1, 3, 20])
def test_resume_gives_the_same_bits(n, tmp_path):
    "Saved after n episodes: the same draws, now and after further episodes, whatever the other replay held before."
    a, b = small(60, seed=3), small(60, seed=8)
    for number in range(5): b.push(**episode(99, number, 14))
    for number in range(n):
        a.push(**episode(number%3*5, number, 5 + number*7%20))
        a.sample(3)
    path = save_state(tmp_path/"replay.safetensors", a.state_dict())
    b.load_state_dict(load_state(path))
    assert len(a) == len(b) and a.counts() == b.counts()
    for number in range(n, n + 30):
        for memory in (a, b): memory.push(**episode(number%4, number, 3 + number*5%30))
        for stratified in (False, True):
            x, y = a.sample(17, stratified), b.sample(17, stratified)
            assert all(torch.equal(x[k], y[k]) for k in x)


def test_a_checkpoint_holds_only_what_is_there(tmp_path):
    memory = small(5000)
    memory.push(**episode(0, 0, 10))
    assert save_state(tmp_path/"r.safetensors", memory.state_dict()).stat().st_size < 8000


@pytest.mark.parametrize("other", [lambda: small(49), lambda: Replay(50, dict(state=((4,), torch.float32)), {}),
                                   lambda: Replay(50, dict(state=((4,), torch.float32), token=((3, 2), torch.float32)), dict(reward=((), torch.float32), chunk=((2, 2), torch.float32), pad=((2,), torch.bool)))])
def test_a_state_of_another_replay_is_refused(other):
    with pytest.raises(ValueError, match="use the run's own settings"): other().load_state_dict(small(50).state_dict())


# --- what is refused
GOOD = episode(0, 0, 6)


@pytest.mark.parametrize("change, says", [
    (dict(states=dict(state=np.ones((60, 4)), token=np.ones((60, 3, 2)))), "an episode of 60 states does not fit a replay of 50; raise the capacity"),
    (dict(states=dict(state=np.ones((1, 4)), token=np.ones((1, 3, 2)))), "an episode of 1 states"), (dict(states={}), "an episode of 0 states"),
    (dict(states=dict(state=np.ones((6, 4)))), "missing are ['token']"), (dict(states=GOOD["states"] | dict(token=np.ones((5, 3, 2)))), "token needs shape (6, 3, 2), found (5, 3, 2)"),
    (dict(states=GOOD["states"] | dict(state=np.full((6, 4), np.nan))), "finite ones that fit torch.float32"), (dict(states=GOOD["states"] | dict(state=np.full((6, 4), -np.inf))), "finite ones"),
    (dict(states=GOOD["states"] | dict(token=np.full((6, 3, 2), 7e4))), "finite ones that fit torch.float16"),
    (dict(transitions=GOOD["transitions"] | dict(next=[1, 2, 3, 4, 6])), "among 6 states"), (dict(transitions=GOOD["transitions"] | dict(next=[1, 2, 3, 4, 4])), "next > start"),
    (dict(transitions=GOOD["transitions"] | dict(start=[0, 1, 1, 3, 4])), "rising starts"), (dict(transitions=GOOD["transitions"] | dict(start=[-1, 1, 2, 3, 4])), "rising starts"),
    (dict(transitions=GOOD["transitions"] | dict(start=[], next=[])), "rising starts"), (dict(transitions=GOOD["transitions"] | dict(next=[5])), "rising starts"),
    (dict(transitions=GOOD["transitions"] | dict(reward=np.ones(6))), "reward needs shape (5,), found (6,)"), (dict(transitions=GOOD["transitions"] | dict(pad=np.ones((5, 2)))), "pad is stored as torch.bool, found torch.float64"),
    (dict(transitions={k: v for k, v in GOOD["transitions"].items() if k != "chunk"}), "missing are ['chunk']"), (dict(transitions={}), "rising starts"),
    (dict(task="drawer"), "task is a whole number, found 'drawer'"), (dict(task=1.), "task is a whole number"), (dict(task=True), "task is a whole number")])
def test_a_refused_episode_changes_nothing(change, says):
    memory, twin = small(50), small(50)
    for m in (memory, twin): m.push(**episode(3, 7, 45))
    with pytest.raises(ValueError) as e: memory.push(**GOOD | change)
    assert says in str(e.value)
    assert memory.counts() == twin.counts() and all(torch.equal(x, y) for x, y in zip(memory.sample(90).values(), twin.sample(90).values()))


@pytest.mark.parametrize("args, says", [
    ((1, dict(s=((2,), torch.float32)), {}), "capacity is a whole number of states"), ((10., dict(s=((2,), torch.float32)), {}), "capacity is a whole number"),
    ((10, {}, {}), "at least one state field"), ((10, dict(s=((2,), torch.float32)), dict(s=((), torch.float32))), "['s'] twice"),
    ((10, dict(s=((2,), torch.float32)), dict(next_s=((), torch.float32))), "['next_s'] twice"), ((10, dict(task=((2,), torch.float32)), {}), "['task'] twice"),
    ((10, dict(s=(2, torch.float32)), {}), "s needs (shape, dtype)"), ((10, dict(s=((2,), "float16")), {}), "s needs (shape, dtype)")])
def test_refused_fields(args, says):
    with pytest.raises(ValueError) as e: Replay(*args)
    assert says in str(e.value)


def test_nothing_is_drawn_from_an_empty_ring_and_no_empty_batch():
    with pytest.raises(ValueError, match="the replay is empty"): small().sample(4)
    with pytest.raises(ValueError, match="the replay is empty"): small().sample(4, stratified=True)
    with pytest.raises(ValueError, match="at least one transition, found B=0"): filled({0: 5}).sample(0)


# --- rings that grow
def test_rings_grow_as_they_fill_and_draw_as_whole_ones(monkeypatch, tmp_path):
    import clvla.rl.replay as module
    monkeypatch.setattr(module, "FIRST", 3)
    spec = dict(state=((3,), torch.float16)), dict(reward=((), torch.float32))
    grows = Replay(40, *spec)
    monkeypatch.setattr(module, "FIRST", 40)
    whole, sizes = Replay(40, *spec), []
    for k in range(9):   # 45 to 63 states: around the end of the ring, too
        n = 5+k%3
        episode = dict(state=torch.arange(3*n).view(n, 3)+100.*k), dict(start=range(n-1), next=range(1, n), reward=torch.full((n-1,), float(k)))
        for replay in (grows, whole): replay.push(*episode, task=k%2)
        sizes.append(len(grows.states["state"]))
        a, b = grows.sample(8, stratified=True), whole.sample(8, stratified=True)
        assert all(torch.equal(a[name], x) for name, x in b.items())
    assert sizes[:4] == [6, 12, 24, 24] and sizes[-1] == 40
    save_state(tmp_path/"r.safetensors", grows.state_dict())
    monkeypatch.setattr(module, "FIRST", 3)
    again = Replay(40, *spec)
    again.load_state_dict(load_state(tmp_path/"r.safetensors"))
    assert all(torch.equal(x, again.states[k]) for k, x in grows.states.items())

def test_a_ring_beyond_the_memory_is_refused():
    with pytest.raises(ValueError, match=r"a replay of 50000 states of 0.43 MB needs 32.2 GB, and cpu has 16 GB; lower capacity, to at most 248"):
        from clvla.rl.replay import check_memory
        check_memory(50_000, dict(x=((215_000,), torch.float16)), "cpu", 16)
    with pytest.raises(ValueError, match="lower capacity"): Replay(10**9, dict(x=((215_000,), torch.float16)), {})
