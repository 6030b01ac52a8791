"""What avalanche-lib reaches on the digits, as JSON: `PYTHON tests/avalanche_reference.py OUT [--streams ...] [--methods ...] [--seeds N]`

PYTHON is an environment of its own: pip install avalanche-lib==0.6.0 "setuptools<82" quadprog (it needs the last two without saying so).
`PYTHON tests/avalanche_reference.py --data` writes digits.npz from scikit-learn. The numbers stand in avalanche_digits.json."""
import argparse, contextlib, io, json, sys, time
from pathlib import Path
import numpy as np, torch
from torch import nn

HERE = Path(__file__).parent
TASKS,WIDTH,B,EPOCHS = 5,100,32,10
LR = dict(cil=.05, perm=.05, permreg=.5)


def write_data():
    "The 1797 digits as bytes, and which of them are for training: a stratified split, seed 0."
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    digits = load_digits()
    train,test = train_test_split(np.arange(len(digits.target)), test_size=.3, random_state=0, stratify=digits.target)
    np.savez_compressed(HERE/"digits.npz", x=digits.data.astype("uint8"), y=digits.target.astype("uint8"),
                        train=train.astype("int16"), test=test.astype("int16"))

def tasks(stream):
    "Five tasks, each ((x, y) for training, (x, y) for testing): two digits each, or all ten behind another order of the pixels."
    data = np.load(HERE/"digits.npz", allow_pickle=False)
    x,y = torch.tensor(data["x"]/16, dtype=torch.float32),torch.tensor(data["y"].astype("int64"))
    def part(k, rows):
        if stream == "cil":
            rows = rows[y[rows]//2 == k]
            return x[rows], y[rows]
        order = np.arange(64) if k == 0 else np.random.RandomState(1000+k).permutation(64)
        return x[rows][:, order], y[rows]
    return [[part(k, torch.tensor(data[name].astype("int64"))) for name in ("train", "test")] for k in range(TASKS)]

def squares(pred, y): return nn.functional.mse_loss(pred, nn.functional.one_hot(y, 10).float())

def measures(R):
    "ACC, BWT and LA of accuracies after each task."
    K = len(R)
    return dict(ACC=R[-1].mean(), BWT=np.mean([R[-1, i]-R[i, i] for i in range(K-1)]), LA=R.diagonal().mean())

def summary(Rs):
    "Mean and standard deviation over seeds, in points."
    rows = [measures(100*R) for R in Rs]
    return {k: dict(mean=round(float(np.mean([r[k] for r in rows])), 2), std=round(float(np.std([r[k] for r in rows], ddof=1)), 2))
            for k in rows[0]} | dict(seeds=len(Rs))


# --- avalanche-lib
def makers():
    "name -> function of the arguments of every strategy"
    from avalanche.training import supervised as S
    from avalanche.training.plugins import SynapticIntelligencePlugin as SI
    def extract(attribute):
        def read(model, target, excluded):
            for name,p in SI.allowed_parameters(model, excluded):
                target[name].data = getattr(p, attribute).detach().flatten().clone()  # 0.6.0 keeps a view of the live weight on a CPU
        return staticmethod(torch.no_grad()(read))
    SI.extract_weights,SI.extract_grad = extract("data"),extract("grad")
    der = lambda beta: lambda kw: S.DER(mem_size=200, batch_size_mem=B, alpha=.1, beta=beta, **kw)
    ewc_lam = lambda kw: 3000 if kw["criterion"] is squares else 100
    return dict(naive=lambda kw: S.Naive(**kw), cumulative=lambda kw: S.Cumulative(**kw), joint=lambda kw: S.JointTraining(**kw),
        er=lambda kw: S.Replay(mem_size=200, **kw), ewc=lambda kw: S.EWC(ewc_lambda=ewc_lam(kw), **kw),
        lwf=lambda kw: S.LwF(alpha=1, temperature=2, **kw), si=lambda kw: S.SynapticIntelligence(si_lambda=1000, **kw),
        agem=lambda kw: S.AGEM(patterns_per_exp=50, sample_size=64, **kw), gem=lambda kw: S.GEM(patterns_per_exp=50, memory_strength=.5, **kw),
        der=der(0.), derpp=der(.5), gdumb=lambda kw: S.GDumb(mem_size=200, **kw), er_ace=lambda kw: S.ER_ACE(mem_size=200, batch_size_mem=B, **kw))

def run(make, stream, seed):
    "(K,K) accuracies; of joint training the last row alone."
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils.classification_dataset import _make_taskaware_tensor_classification_dataset as dataset
    from avalanche.training.determinism.rng_manager import RNGManager
    RNGManager.set_random_seeds(seed)
    torch.manual_seed(seed)
    data = tasks(stream)
    sets = [dataset(*train, task_labels=0) for train,_ in data]
    bench = benchmark_from_datasets(train=sets, test=[dataset(*test, task_labels=0) for _,test in data])
    if stream == "cil":
        from avalanche.benchmarks.scenarios.supervised import with_classes_timeline
        bench = with_classes_timeline(bench)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    strategy = make(dict(model=model, optimizer=torch.optim.SGD(model.parameters(), LR[stream]), train_mb_size=B, train_epochs=EPOCHS,
        criterion=squares if stream == "permreg" else nn.CrossEntropyLoss(), evaluator=None))
    R = np.full((TASKS, TASKS), np.nan)
    def evaluate(t):
        net = strategy.model.eval()
        with torch.no_grad(): R[t] = [float((net(x).argmax(1) == y).float().mean()) for _,(x,y) in data]
        net.train()
    with contextlib.redirect_stdout(io.StringIO()):
        if type(strategy).__name__ == "JointTraining":
            strategy.train(bench.train_stream)
            evaluate(TASKS-1)
            R[:] = R[-1]
        else:
            for t,exp in enumerate(bench.train_stream):
                strategy.train(exp)
                evaluate(t)
    return R

def text(found):
    "JSON with a line for each method."
    lines = [f'"versions": {json.dumps(found["versions"])}']
    for stream in (k for k in found if k != "versions"):
        rows = ",\n".join(f'  "{name}": {json.dumps(row)}' for name,row in found[stream].items())
        lines.append(f'"{stream}": {{\n{rows}\n }}')
    return "{"+",\n ".join(lines)+"}\n"

def main():
    if sys.argv[1:] == ["--data"]: return write_data()
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--streams", nargs="+", default=["cil", "perm", "permreg"])
    p.add_argument("--methods", nargs="+", default=None)
    p.add_argument("--seeds", type=int, default=5)
    a = p.parse_args()
    from importlib.metadata import version
    torch.set_num_threads(1)
    path,made = Path(a.out),makers()
    found = json.loads(path.read_text()) if path.exists() else {}
    found["versions"] = {k: version(k) for k in ("avalanche-lib", "torch", "numpy", "quadprog")}
    for stream in a.streams:
        for name in a.methods or made:
            if stream == "permreg" and name not in ("naive", "joint", "er", "ewc", "agem", "gem"): continue  # the others speak of classes
            start = time.time()
            Rs = [run(made[name], stream, seed) for seed in range(a.seeds)]
            row = summary(Rs)
            if name == "joint": row = {k: row[k] for k in ("ACC", "seeds")}
            found.setdefault(stream, {})[name] = row
            print(stream, name, row, f"{time.time()-start:.0f} s", flush=True)
            path.write_text(text(found))

if __name__ == "__main__": main()
