"""Write nbs/map.ipynb: pages by what one wants to do, and every page by folder with the line that says what it is. Called by tools/readme.py.

    python tools/map.py
"""
import json
import re
from pathlib import Path

NBS = Path(__file__).resolve().parents[1]/"nbs"
ROOMS = {   # folder -> its heading
    ".": "Experiments", "tutorials": "Tutorials", "guides": "Guides", "core": "core: names, files, configs, state",
    "data": "data: tasks, demonstrations, data sets", "envs": "envs: environments and their processes",
    "envs/metaworld": "envs/metaworld", "envs/libero": "envs/libero", "envs/gym": "envs/gym: Gymnasium, MiniGrid, games",
    "policies": "policies: the contract, heads, adapters", "policies/lerobot": "policies/lerobot", "policies/vlm": "policies/vlm: families on language models",
    "cl": "cl: methods against forgetting", "train": "train: imitation", "rl": "rl: practice", "crl": "crl: agents that learn by reward",
    "eval": "eval: metrics, intervals, episodes, figures", "run": "run: a run as a process", "command": "command: `clvla` from a terminal", "benchmarks": "Benchmarks", "atlas": "Atlas: others' claims, asked small", "speedrun": "The forgetting speedrun"}

WANTED = {   # what somebody wants to do -> the pages for it, the first one first
    "see a policy forget, in two minutes": "tutorials/first_forgetting", "read a success matrix": "tutorials/read_a_matrix eval/00_metrics",
    "train a policy along tasks": "run_cl guides/run_experiments train/01_trainer", "choose a method against forgetting": "cl/90_all claims benchmarks/mw5_family",
    "understand one method": "cl/08_er tutorials/ppo_by_hand cl/09_mir cl/10_ewc cl/13_lwf cl/14_packnet", "write an algorithm": "tutorials/own_algorithm cl/00_base cl/16_compose",
    "bring a policy": "tutorials/own_policy policies/00_base", "bring data": "tutorials/own_data data/12_check data/05_layouts",
    "bring a simulator": "tutorials/own_simulator envs/00_base", "bring an agent": "tutorials/own_agent crl/02_agent",
    "compare runs": "compare eval/08_compare eval/22_paired", "compare at equal memory, time or samples": "eval/19_budgets benchmarks/equal_budgets", "race against forgetting": "speedrun/rules speedrun/records", "say whether a difference is shown": "audit eval/01_stats", "write down before the runs what will decide": "eval/13_plan eval/14_followed", "evaluate a checkpoint again": "eval_cl train/06_checkpoint_eval",
    "let a policy practise": "run_rl rl/10_method rl/17_best_of_n rl/13_token_method", "train agents by reward": "run_crl crl/01_experiment crl/16_presets",
    "use LIBERO": "guides/libero envs/libero/08_env benchmarks/libero_five", "use Meta-World": "envs/metaworld/00_tasks envs/metaworld/01_env",
    "use Gymnasium, MiniGrid or games": "envs/gym/01_env envs/gym/05_games", "use LeRobot's data, policies or commands": "data/07_lerobot policies/lerobot/00_adapter run/18_lerobot",
    "fine-tune a large model": "policies/vlm/08_pretrained policies/04_lora policies/vlm/10_sizes benchmarks/full_size", "use a GPU": "benchmarks/gpu rl/27_placement",
    "use several processes or machines": "guides/several_machines run/04_ranks train/02_zero", "stop, go on and watch": "guides/stop_and_continue run/12_watch command/11_watch run/09_resume",
    "start many runs": "run/14_sweep", "know what a machine lacks": "command/03_doctor", "play a trained policy on a robot": "train/14_robot",
    "come from another library": "guides/coming_from guides/terms cl/91_avalanche", "know what was measured": "claims", "see whether a published claim holds here": "atlas/atlas eval/21_verdict run/28_planned",
    "start from a pretrained policy": "guides/run_experiments train/21_recipe train/03_prepare policies/03_weights"}


def title(page):
    "A page's heading and the line below it; ValueError for a page that lacks one."
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    text = next(("".join(c["source"]) for c in cells if c["cell_type"] == "markdown"), "")
    found = re.match(r"# (.+)\n+> (.+)", text)
    if not found: raise ValueError(f"{page}: its first text needs a heading '# name' and a line '> what it is', found {text[:60]!r}")
    return found[1].strip(), found[2].strip()


def pages():
    "Folder -> its pages, in order; ValueError for a folder without a heading."
    found = {}
    for page in sorted(NBS.rglob("*.ipynb")):
        place = page.relative_to(NBS)
        if any(part[0] in "._" for part in place.parts) or place.name in ("map.ipynb", "index.ipynb"): continue
        found.setdefault(place.parent.as_posix(), []).append(page)
    if unknown := sorted(set(found)-set(ROOMS)): raise ValueError(f"tools/map.py knows no heading for nbs/{unknown[0]}; add it to ROOMS")
    return {room: found[room] for room in ROOMS if room in found}


def wanted():
    "A line for each thing that somebody wants to do; ValueError for a page that is not there."
    def link(place):
        if not (NBS/f"{place}.ipynb").exists(): raise ValueError(f"tools/map.py leads to nbs/{place}.ipynb, and there is no such page; correct WANTED")
        name = title(NBS/f"{place}.ipynb")[0]
        if "/" in place and not place.startswith(("tutorials", "guides")): name = re.sub(r"(^|/)\d+_", r"\1", place)   # several rooms have a page `base`
        return f"[{name}]({place}.ipynb)"
    return "\n".join(f"- {what}: {', '.join(map(link, places.split()))}" for what, places in WANTED.items())


def notebook(texts):
    "Markdown cells as a notebook."
    cells = [dict(cell_type="markdown", id=f"map{k:05d}", metadata={}, source=text.splitlines(True)) for k, text in enumerate(texts)]
    meta = dict(kernelspec=dict(display_name="python3", language="python", name="python3"))
    return json.dumps(dict(cells=cells, metadata=meta, nbformat=4, nbformat_minor=5), indent=1, ensure_ascii=False)+"\n"


def main():
    there = pages()
    lines = lambda room: "\n".join(f"- [{title(p)[0]}]({p.relative_to(NBS).as_posix()}): {title(p)[1]}" for p in there[room])
    texts = [f"# map\n> Pages by what you want to do, then every page by folder with the line that says what it is\n\n{sum(map(len, there.values()))} pages. "
             "In which order to read them: [what to read](guides/what_to_read.ipynb)."]
    texts.append(f"## I want to ...\n\n{wanted()}")
    texts += [f"## {ROOMS[room]}\n\n{lines(room)}" for room in there]
    (NBS/"map.ipynb").write_text(notebook(texts), encoding="utf-8")


if __name__ == "__main__": main()
