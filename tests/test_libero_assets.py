"LIBERO's files: hostile ones are refused, damaged ones are named, and several processes prepare them once."
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import numpy as np
import pytest
from libero_help import libero_root, without_full

from clvla.envs.libero import assets, command
from clvla.envs.libero.files import KNOWN, check_whole, layout, unpack
from clvla.envs.libero.states import SUITES, package, read_npz, read_pickled

ROOT = libero_root()
HERE = Path(__file__).resolve().parents[1]


def python(code, *args, **env):
    "Run code in a process that has no terminal and may not connect to anything."
    guard = ("import socket, sys\n"
             "def no(*a, **k): raise OSError('this test has no network')\n"
             "socket.socket.connect = no\n")
    env = {k: v for k, v in (os.environ | env).items() if v is not None}
    return subprocess.run([sys.executable, "-c", guard+code, *map(str, args)], env=env, cwd=HERE, text=True, timeout=300,
                          stdin=subprocess.DEVNULL, capture_output=True)


# 1. pickled states

def program(names=(b"numpy.core.multiarray", b"_reconstruct"), kind=b"f8", rows=50, cols=3, numbers=None):
    "The bytes of a file of initial states, with what a test changes."
    raw = np.arange(float(50*3)).tobytes() if numbers is None else numbers
    text = raw.decode("latin1").encode()
    return (b"\x80\x02c"+names[0]+b"\n"+names[1]+b"\nq\0cnumpy\nndarray\nq\1K\0\x85q\2c_codecs\nencode\nq\3X\1\0\0\0bq\4X\6\0\0\0latin1q\5"
            b"\x86q\6Rq\7\x87q\x08Rq\t(K\1K"+bytes([rows])+b"K"+bytes([cols])+b"\x86q\ncnumpy\ndtype\nq\x0bX\2\0\0\0"+kind +
            b"q\x0c\x89\x88\x87q\rRq\x0e(K\3X\1\0\0\0<q\x0fNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tq\x10b\x89h\3X" +
            len(text).to_bytes(4, "little")+text+b"q\x11h\5\x86q\x12Rq\x13tq\x14b.")


def torch_file(path, data, **more):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, d in {"archive/data.pkl": data, "archive/version": b"3\n", **more}.items(): z.writestr(name, d)
    return path


def test_plain_numbers_are_read(tmp_path):
    for name in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        x = read_pickled(torch_file(tmp_path/"x", program((name, b"_reconstruct"))))
        assert np.array_equal(x, np.arange(150.).reshape(50, 3)) and x.dtype == np.float64


RUNS = b"cposix\nsystem\nX\x10\0\0\0touch pwned_hereX\0\0\0\0\x85R."
HOSTILE = {
    "os.system": b"\x80\x02"+RUNS,
    "os.system after the array": program()[:-1]+RUNS,
    "os.system before the array": b"\x80\x02"+RUNS[:-1]+b"0"+program()[2:],
    "builtins": b"\x80\x02cbuiltins\nexec\nX\1\0\0\0x\x85R.",
    "protocol 4": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "another function in the array's place": program((b"posix", b"system")),
    "numpy's own loader": program((b"numpy", b"load")),
    "objects": program(kind=b"O8"),
    "float32": program(kind=b"f4"),
    "too few rows": program(rows=49, numbers=bytes(8*49*3)),
    "a shape larger than its numbers": program(cols=255),
    "nan": program(numbers=np.full(150, np.nan).tobytes()),
    "infinite": program(numbers=np.full(150, np.inf).tobytes()),
    "one column": program(cols=1, numbers=bytes(400)),
    "nothing": b"", "a dot": b".", "zeros": bytes(5000)}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_states_are_refused(tmp_path, case, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError): read_pickled(torch_file(tmp_path/"x", HOSTILE[case]))
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_files_that_are_no_states_are_refused(tmp_path):
    good = program()
    two = torch_file(tmp_path/"two", good, **{"other/data.pkl": good})
    bomb = torch_file(tmp_path/"bomb", bytes(200_000_000))
    none = torch_file(tmp_path/"none", good); none.write_bytes(none.read_bytes()[:300])
    (tmp_path/"raw").write_bytes(good)
    for p in (two, bomb, none, tmp_path/"raw"):
        with pytest.raises(ValueError, match=p.name): read_pickled(p)
    assert bomb.stat().st_size < 1_000_000


def test_any_changed_byte_gives_numbers_or_a_refusal(tmp_path):
    good, g = program(), np.random.default_rng(0)
    for k in g.integers(0, len(good), 300):
        bad = bytearray(good); bad[k] = g.integers(256)
        try: x = read_pickled(torch_file(tmp_path/"x", bytes(bad)))
        except ValueError: continue
        assert x.shape == (50, 3) and x.dtype == np.float64 and np.isfinite(x).all()


def test_converted_states_equal_the_archives_and_no_pickle_runs():
    "All 130, in a process that notes every attempt of a pickle to name something."
    code = """
import sys
from clvla.envs.libero.states import SUITES, suite_states
from clvla.envs.libero.files import KNOWN, states_fingerprint
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event.startswith("pickle.") else None)
n = 0
for s in SUITES:
    x = suite_states(s); n += len(x)
    assert states_fingerprint(x) == KNOWN["init_states"][s], s
assert not seen and "torch" not in sys.modules and "libero" not in sys.modules
print(n)"""
    p = python(code)
    assert p.stdout.strip() == "130", p.stdout+p.stderr
    for suite in SUITES:
        for path in sorted((package()/"init_files"/suite).glob("*.pruned_init"))[::9]:
            x = assets.init_states(suite, path.stem, ROOT)
            assert x.tobytes() == read_pickled(path).tobytes() and x.shape[0] == 50


def test_npz_holds_plain_numbers_only(tmp_path):
    x = np.zeros((50, 9))
    np.savez(tmp_path/"ok.npz", a=x)
    assert read_npz(tmp_path/"ok.npz")["a"].shape == (50, 9)
    for name, y in dict(objects=np.array([dict()]*50, object), f4=x.astype("f4"), rows=x[:49], cube=x[None], nan=x*np.nan, big=x.astype(">f8")).items():
        np.savez(tmp_path/f"{name}.npz", a=y)
        with pytest.raises(ValueError, match=f"{name}.npz"): read_npz(tmp_path/f"{name}.npz")
    head = b"\x93NUMPY\x01\x00\x76\x00"+b"{'descr': '<f8', 'fortran_order': False, 'shape': (50, 99999999999), }".ljust(117)+b"\n"
    for data in (head, head.replace(b"99999999999", b"9          "), b"\x93NUMPY\x01\x00", b"", b"hello"):
        with zipfile.ZipFile(tmp_path/"h.npz", "w") as z: z.writestr("a.npy", data)
        with pytest.raises(ValueError, match="h.npz"): read_npz(tmp_path/"h.npz")


# 2. archives

def test_archives_do_no_harm(tmp_path):
    link = zipfile.ZipInfo("assets/scenes"); link.external_attr = 0o120777 << 16
    for k, (name, data) in enumerate([("../../evil", b"x"), ("/tmp/evil", b"x"), (link, b"/etc"), ("a/../../evil", b"x")]):
        with zipfile.ZipFile(tmp_path/"a.zip", "w") as z: z.writestr(name, data)
        with pytest.raises(ValueError, match="a.zip is refused"): unpack(tmp_path/"a.zip", tmp_path/f"z{k}")
    for k, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)):
        m = tarfile.TarInfo("x"); m.type, m.linkname = kind, "../../etc/passwd"
        (tmp_path/"a.tar").write_bytes(m.tobuf()+bytes(1024))
        with pytest.raises(ValueError, match="a.tar is refused"): unpack(tmp_path/"a.tar", tmp_path/f"t{k}")
    (tmp_path/"text").write_text("no archive")
    with pytest.raises(ValueError, match="text is damaged or cut off"): unpack(tmp_path/"text", tmp_path/"no")
    assert not [p for p in tmp_path.parent.rglob("evil*")]


# 3. a prepared folder

@pytest.fixture
def place(tmp_path, monkeypatch):
    "An empty data folder, and a small copy of the assets that a test may spoil."
    monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"data")); monkeypatch.delenv("CLVLA_LIBERO_ASSETS", raising=False)
    mine = tmp_path/"mine"
    for top in ("lite", "robosuite_lite"):
        for f in (ROOT/top).rglob("*"):
            if not f.is_file(): continue
            to = mine/top/f.relative_to(ROOT/top); to.parent.mkdir(parents=True, exist_ok=True)
            os.link(f.resolve(), to) if os.stat(f.resolve()).st_dev == os.stat(tmp_path).st_dev else to.write_bytes(f.read_bytes())
    return mine


def spoil(path, data):
    "Replace a file, which may be a second name of another."
    path.unlink(); path.write_bytes(data)


def test_what_is_missing_or_changed_is_named(place):
    with pytest.raises(FileNotFoundError, match="clvla-libero"): assets.libero_root()
    root = assets.libero_root(place)
    assert assets.describe(root) == dict(full="none", lite="the known version", robosuite_lite="the known version", init_states="the known version")
    with pytest.raises(ValueError, match="has no `full` assets"): assets.tree(root, "full")
    file = place/"lite/scenes/libero_floor_base_style.xml"; whole = file.read_bytes()
    spoil(file, whole+b" "); digest = assets.index(root)["files"]["lite/scenes/libero_floor_base_style.xml"][2]
    with pytest.raises(ValueError, match=f"libero_floor_base_style.xml has changed.*expected {digest}.*clvla-libero SOURCE"): assets.bootstrap(place)
    spoil(file, whole)
    assert assets.damaged(root) == [], "the time of change alone is no damage"
    file.unlink()
    with pytest.raises(ValueError, match="is missing"): assets.bootstrap(root)
    with pytest.raises(ValueError, match=r"incomplete: 1 of 166 files are missing.*libero_floor_base_style.xml \(for libero_object\)"):
        assets.lay_out(place, lambda line: None)
    assert not list(assets.home().glob(".new-*"))


def test_another_version_is_used_and_said(place):
    spoil(place/"lite/textures/gray_ceramic_tile.png", (place/"lite/textures/light-gray-plaster.png").read_bytes())
    said = []
    root = command.prepare(place, said.append)
    assert any("lite: not the known version, pictures differ from its own: textures; the physics are the same" in line for line in said)
    assert assets.assets_id(root) != assets.assets_id(ROOT)
    assert assets.libero_root() == root, "what the command prepared is found without a name"


def test_what_another_version_prepared_is_prepared_anew_from_its_source(tmp_path, monkeypatch):
    part = without_full(tmp_path/"part")
    monkeypatch.setenv("CLVLA_DATA", str(tmp_path/"data")); monkeypatch.delenv("CLVLA_LIBERO_ASSETS", raising=False)
    root = command.prepare(str(part), say=lambda line: None); d = json.loads((root/"assets.json").read_text())
    (root/"assets.json").write_text(json.dumps(d | dict(format=d["format"]-1)))
    assert not assets.index(root)
    again = assets.libero_root(); assert assets.index(again)["format"] == d["format"] and assets.libero_root() == again
    (again/"assets.json").write_text(json.dumps(d | dict(format=d["format"]-1, source=str(tmp_path/"gone"))))
    with pytest.raises(FileNotFoundError, match="no LIBERO assets are prepared"): assets.libero_root()


def test_a_half_prepared_folder_does_not_count(place):
    root = assets.libero_root(place); (root/"assets.json").write_text('{"format": 2, "fil')
    (assets.home()/".new-1").mkdir(); (assets.home()/".new-1/full").symlink_to(place/"lite")
    assert assets.libero_root(place) == root and assets.index(root) and not (assets.home()/".new-1").exists()
    assert (place/"lite/scenes").is_dir(), "a folder behind a link is not removed"
    assert len(check_whole(root/"lite")) == 166 and layout(place).keys() == {"lite", "robosuite_lite"}


def test_processes_that_begin_at_once_prepare_once(place):
    code = "import sys; from clvla.envs.libero import assets as a; p = a._lay_out; n = []\n" \
           "a._lay_out = lambda *x: (n.append(1), p(*x)); print(len(n) if a.libero_root(sys.argv[1]) is None else a.libero_root(sys.argv[1]), len(n))"
    ps = [subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE, text=True, cwd=HERE) for _ in range(3)]
    out = [p.communicate(timeout=120)[0].split() for p in ps]
    assert len({o[0] for o in out}) == 1 and sorted(o[1] for o in out) == ["0", "0", "1"]


# 4. a process that uses it

def test_nobody_is_asked_and_nothing_is_fetched(tmp_path):
    code = """
import os, sys
from clvla.envs.libero.assets import bootstrap
root = bootstrap(which="lite")
import libero.libero
assert libero.libero.get_assets_path() == str(root/"lite"), libero.libero.get_assets_path()
bootstrap(which="full"); assert libero.libero.get_assets_path().endswith("full")
assert "torch" not in sys.modules and "mujoco" not in sys.modules
print(sorted(os.listdir(os.environ["HOME"])))"""
    p = python(code, HOME=str(tmp_path), LIBERO_CONFIG_PATH=None, CLVLA_LIBERO_ASSETS=str(ROOT), CLVLA_DATA=str(tmp_path/"d"))
    assert p.returncode == 0 and p.stdout.strip() == "['d']", p.stdout+p.stderr


def test_a_display_is_no_way_to_draw(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "glfw"); monkeypatch.setenv("DISPLAY", ":0")
    with pytest.raises(ImportError, match="export MUJOCO_GL=osmesa"): assets.bootstrap(ROOT)


def test_both_ways_to_draw_agree(tmp_path):
    "robosuite would set MUJOCO_GL to egl; the picture's process says what was used."
    from PIL import Image
    code = ("import os, sys; from clvla.envs.libero.command import draw; want = os.environ['MUJOCO_GL']; draw(sys.argv[1]); "
            "assert os.environ['MUJOCO_GL'] == os.environ['PYOPENGL_PLATFORM'] == want")
    made = []
    for gl in ("osmesa", "egl"):
        assert command.try_draw(gl, tmp_path/f"{gl}.png", ROOT, 240, code) == ""
        made.append(np.asarray(Image.open(tmp_path/f"{gl}.png")).astype(float))
    assert made[0].shape == (256, 256, 3) and np.abs(made[0]-made[1]).mean() < 2


# 5. the command, and how it is installed

def test_the_command(tmp_path):
    code = "import runpy, sys; sys.argv = ['clvla-libero', *sys.argv[1:]]; runpy.run_module('clvla.envs.libero.command', run_name='__main__')"
    p = python(code, ROOT, "--no-picture", CLVLA_DATA=str(tmp_path))
    assert p.returncode == 0 and "all is well" in p.stdout and "init_states: the known version" in p.stdout, p.stdout+p.stderr
    assert json.loads((tmp_path/"libero/prepared.json").read_text()) == dict(root=str(ROOT))
    p = python(code, tmp_path/"nothing", CLVLA_DATA=str(tmp_path))
    assert p.returncode == 1 and p.stderr.startswith("clvla-libero: LIBERO's assets: there is no") and "Traceback" not in p.stderr
    p = python(code, CLVLA_DATA=str(tmp_path/"other"), CLVLA_LIBERO_ASSETS=None, HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert p.returncode == 1 and "name a folder or an archive: clvla-libero SOURCE" in p.stderr and "Traceback" not in p.stderr, p.stderr


def test_the_command_is_installed_and_the_extra_is_whole():
    cp = ConfigParser(delimiters=["="]); cp.read(HERE/"settings.ini", encoding="utf-8"); c = cp["DEFAULT"]
    assert "clvla-libero=clvla.envs.libero.command:main" in c["console_scripts"].split()
    asked = {r.split(">")[0].split("=")[0] for r in c["libero_requirements"].split()}
    assert asked == set(assets.VERSIONS) | {"huggingface_hub"}
    assert set(SUITES) == set(KNOWN["init_states"])


@pytest.mark.parametrize("there", [True, False])
def test_ci_without_assets_says_what_is_skipped(there, tmp_path):
    "The lines of .ci/run that look for them; the rest of it would be the whole suite."
    text = (HERE/".ci/run").read_text()
    lines = text[text.index("CLVLA_LIBERO_ASSETS=${"):text.index("SECONDS=0")]
    named = str(tmp_path if there else tmp_path/"nothing")
    p = subprocess.run(["bash", "-euc", lines+'echo "named: ${CLVLA_LIBERO_ASSETS-none}"'], env=os.environ | dict(CLVLA_LIBERO_ASSETS=named), capture_output=True, text=True)
    assert p.returncode == 0 and p.stdout.endswith(f"named: {named if there else 'none'}\n")
    assert ("the tests that draw LIBERO's pictures are skipped" in p.stdout) != there
