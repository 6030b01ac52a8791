"""Draw nbs/images/rooms.svg: the rooms of the library, each above those that it imports, with their pages and lines. Called by tools/readme.py.

    python tools/rooms.py
"""
import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAYS = dict(core="names, files, configs, state", data="tasks, demonstrations, data sets", envs="environments, their processes",
            policies="policies and adapters", cl="methods against forgetting", eval="metrics, intervals, episodes", run="a run as a process",
            train="imitation", rl="practice", crl="agents by reward", command="clvla from a terminal")
W, H, GAP = 178, 62, 14   # of a room, pixels


def modules(room): return [p for p in sorted((ROOT/"clvla"/room).rglob("*.py")) if p.name != "__init__.py"]


def imported(path):
    "The rooms that a module imports."
    package, found = path.relative_to(ROOT).with_suffix("").parts[:-1], set()
    for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in n.names] if isinstance(n, ast.Import) else []
        if isinstance(n, ast.ImportFrom):
            stem = ".".join([*(package[:len(package)-n.level+1] if n.level else ()), *filter(None, [n.module])])
            names = [stem, *(f"{stem}.{a.name}" for a in n.names)]
        found |= {name.split(".")[1] for name in names if name.startswith("clvla.")}
    return found & set(SAYS)


def floors():
    "Rooms by floor: each stands above all that it imports."
    below = {room: set().union(*(imported(p) for p in modules(room)))-{room} for room in SAYS}
    height = {}
    def floor(room):
        if room not in height: height[room] = 1+max((floor(other) for other in below[room]), default=-1)
        return height[room]
    for room in SAYS: floor(room)
    return [[room for room in SAYS if height[room] == k] for k in range(max(height.values())+1)]


def box(room, x, y):
    "A room as SVG."
    lines = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in modules(room))
    return (f'<rect x="{x}" y="{y}" width="{W}" height="{H}" rx="6" fill="#e8f1f2" stroke="#2a7f86"/>'
            f'<text x="{x+W/2}" y="{y+21}" text-anchor="middle" font-weight="bold" font-size="15">{room}</text>'
            f'<text x="{x+W/2}" y="{y+38}" text-anchor="middle" font-size="11">{escape(SAYS[room])}</text>'
            f'<text x="{x+W/2}" y="{y+53}" text-anchor="middle" font-size="10" fill="#555">{len(modules(room))} modules, {round(lines, -2):,} lines</text>')


def main():
    rooms = floors()
    width, height = max(map(len, rooms))*(W+GAP)+GAP, len(rooms)*(H+GAP)+GAP+18
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for k, floor in enumerate(rooms):
        y = height-18-(k+1)*(H+GAP)
        x = (width-len(floor)*(W+GAP)+GAP)/2
        parts += [box(room, x+i*(W+GAP), y) for i, room in enumerate(floor)]
    parts.append(f'<text x="{width/2}" y="{height-8}" text-anchor="middle" font-size="11" fill="#555">a room imports from the rooms below it, and never from those above or beside</text></svg>')
    (ROOT/"nbs/images/rooms.svg").write_text("\n".join(parts)+"\n", encoding="utf-8")


if __name__ == "__main__": main()
