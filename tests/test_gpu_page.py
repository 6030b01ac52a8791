"The page of the first ten minutes on a GPU: its lines run on the CPU, small; without a GPU it says so in one line."
from pathlib import Path

import papermill
import pytest

PAGE = Path(__file__).resolve().parents[1]/"nbs/benchmarks/gpu.ipynb"


def said(folder, monkeypatch, **parameters):
    "What the cell of the table gives, as text."
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    nb = papermill.execute_notebook(PAGE, folder/"gpu.ipynb", parameters, kernel_name="python3", progress_bar=False, cwd=PAGE.parent)
    outputs, = [c["outputs"] for c in nb.cells if c.source.startswith("names = ")]
    return "\n".join("".join(o["text"] if o["output_type"] == "stream" else o["data"]["text/plain"]) for o in outputs)


def test_its_lines_run_small_on_the_cpu(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    # the two that start processes of their own are left out
    names = "parity", "resumed", "bf16", "fp16", "samples_per_second", "td3_updates_per_second"
    table = said(tmp_path, monkeypatch, small=True, only=", ".join(names))
    rows = {line.split()[1]: line.split()[2] for line in table.splitlines()[1:7]}   # the columns behind may be wrapped
    assert [*rows] == [*names] and float(rows["parity"]) == 0 and rows["resumed"] == "True" and rows["fp16"] == "None"
    assert 0 < float(rows["bf16"]) < .1 and float(rows["samples_per_second"]) > 0 and float(rows["td3_updates_per_second"]) > 0

def test_without_a_gpu_it_says_so(tmp_path, monkeypatch):
    line, = said(tmp_path, monkeypatch).splitlines()
    assert line.startswith("skipped: torch finds no GPU here") and "parity" in line and "frames_per_second" in line
