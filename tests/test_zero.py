"ZeRO: two processes do what one does, whatever is done to gradients, moments and weights; runs go on in fresh processes, bit for bit."
import json, os, signal, subprocess, sys
from pathlib import Path
import pytest

pytest.importorskip("deepspeed")
HERE,TINY,SAME = Path(__file__).parent,1e-5,dict(weights=0., moments=0.)


def two(what, folder):
    "Run the cases in two processes; never wait for ever."
    cmd = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(HERE/"zero_ranks.py"), what, str(folder)]
    env = {k: v for k,v in os.environ.items() if k not in ("DS_ACCELERATOR", "ACCELERATE_USE_CPU")}
    env |= dict(OMP_NUM_THREADS="1", TORCH_EXTENSIONS_DIR=str(folder/"compiled"))
    p = subprocess.Popen(cmd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try: out = p.communicate(timeout=240)[0]
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL); pytest.fail("two processes hang:\n"+p.communicate()[0][-4000:], pytrace=False)
    assert p.returncode == 0, out[-6000:]
    return json.loads((folder/f"{what}.json").read_text())

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("zero")

@pytest.fixture(scope="module")
def first(folder): return two("first", folder)

@pytest.fixture(scope="module")
def second(folder, first): return two("second", folder)

@pytest.mark.parametrize("stage", "123")
@pytest.mark.parametrize("case", ["plain", "odd", "peek", "tiny"])
def test_two_processes_do_what_one_does(first, stage, case):
    d = first[stage][case]
    assert all(d[k] < TINY for k in ("weights", "norms", "moments")) and d["groups"], d

@pytest.mark.parametrize("stage", "123")
def test_making_the_engine_draws_no_random_number(first, stage): assert first[stage]["rng"]

@pytest.mark.parametrize("stage", "123")
def test_a_gradient_that_is_no_number_leaves_the_weights_alone(first, stage): assert first[stage]["nan"]

@pytest.mark.parametrize("stage", "123")
def test_the_precision_of_training_holds_inside_deepspeed(first, stage):
    assert first[stage]["bf16"] == ["torch.bfloat16", "torch.float32"]

@pytest.mark.parametrize("stage", "123")
def test_a_fresh_process_goes_on_bit_for_bit(second, stage):
    assert second[f"zero{stage} to zero{stage}"] == dict(loaded=SAME, **SAME)

@pytest.mark.parametrize("way", ["plain to zero1", "plain to zero2", "plain to zero3", "zero3 to zero2", "zero1 to plain", "zero2 to plain", "zero3 to plain"])
def test_a_state_of_another_strategy_goes_on(second, way):
    d = second[way]
    assert d["loaded"] == SAME and d["weights"] < TINY and d["moments"] < TINY, d

def test_states_that_do_not_fit_are_refused(second):
    unknown,counts = second["messages"]
    assert "knows ['other']" in unknown and "counts of [4.0, 5.0]" in counts and "strategy='ddp'" in counts

def test_nothing_was_compiled(folder, second): assert not (folder/"compiled").exists()
