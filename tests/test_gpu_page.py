"The page of the first ten minutes on a GPU: its lines run on the CPU, small; without a GPU it says so in one line."
import json
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1]/"nbs/benchmarks/gpu.ipynb"
SLOW = "two_ranks", "frames_per_second"   # processes of their own, which tests/test_ranks.py and the runs of `dot` have


def played(**parameters):
    "The page's names after its code cells, the tagged one replaced."
    names = {}
    for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code": continue
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", ()): names |= parameters
        else: exec(compile(source, str(PAGE), "exec"), names)   # the project's own page
    return names


def test_its_lines_run_small_on_the_cpu():
    pytest.importorskip("transformers")
    names = played(small=True, only="parity, resumed, bf16, fp16, samples_per_second, td3_updates_per_second")
    found = names["found"]
    assert set(found)|set(SLOW) == set(names["measurements"])
    assert found["parity"][0] == 0 and found["resumed"][0] is True and 0 < found["bf16"][0] < .1 and found["fp16"][0] is None
    assert found["samples_per_second"][0] > 0 and found["td3_updates_per_second"][0] > 0
    assert list(names["table"].measured) == list(found) and set(names["table"].machine) == {"CPU, small"}

def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names = played(small=False, only="")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "no GPU here" in said[0] and "parity" in said[0] and names["found"] == {}
