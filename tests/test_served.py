"Policies over sockets: messages that vla-eval 0.8.0 wrote, hostile ones, both of our ends against each other, and each fault in a sentence."
import asyncio
import base64
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest

from clvla.command.main import main
from clvla.core.files import read_json, write_json
from clvla.core.names import IMAGES
from clvla.core.trust import code_of
from clvla.envs.dot import dot
from clvla.eval.compare import read_run
from clvla.eval.elsewhere import Connections, RemotePlayer, ServerFault
from clvla.eval.messages import MOST, action_of, array_of, pack, unpack
from clvla.eval.results import read_results
from clvla.train.checkpoint_eval import eval_cl
from clvla.train.config import TrainConfig, resolve
from clvla.train.eval_config import EvalConfig, check_eval, read_eval_config
from clvla.train.learner import train_cl
from clvla.train.serve import PolicyServer, answered, serving

GOLDEN = json.loads((Path(__file__).parent/"vla_eval_frames_080.json").read_text())
frame = lambda name: base64.b64decode(GOLDEN["frames"][name])
TASKS = dot.streams()["dot_2"].tasks


@pytest.fixture(scope="module")
def run(tmp_path_factory, shared_data):
    home = tmp_path_factory.mktemp("served")
    small = dict(suite="dot_2", algo="er", n_demos=2, steps_per_task=35, evaluate="none", n_workers=1, threads=1, image_size=32, rows_per_task=1)
    return train_cl(resolve(TrainConfig(run_dir=str(home/"run"), data_dir=str(shared_data), **small)), say=len).path


@pytest.fixture(scope="module")
def server(run): return PolicyServer(run, say=len)


def ends(records): return sorted((r["task"], r["trial"], r["success"], r["steps"]) for r in records)


# ---- messages that vla-eval wrote

def test_the_frames_of_vla_eval_are_read():
    assert GOLDEN["written_by"] == "vla-eval 0.8.0"
    assert unpack(frame("hello"))["payload"] == dict(harness_version="0.8.0", protocol_version=1, benchmark="x")
    assert unpack(frame("episode_start"))["payload"]["task"] == dict(name="push the button", suite="mw", task_id=3, episode_idx=7)
    for form in ("png", "raw"):
        found = unpack(frame(f"observation_{form}"))
        p = found["payload"]
        assert (found["type"], found["seq"], p["step"], p["ok"]) == ("observation", 3, 4, True)
        assert np.array_equal(p["images"]["agentview"], np.uint8(GOLDEN["picture"])) and p["states"].tolist() == [.5, -1, 2] and p["mask"].tolist() == [True, False]
    jpeg = unpack(frame("observation_jpeg"))["payload"]["images"]["agentview"]
    assert jpeg.shape == (16, 16, 3) and np.abs(jpeg[:, 0, 0].astype(int)-GOLDEN["smooth"]).max() <= 4
    assert action_of(unpack(frame("action"))["payload"], 2).tolist() == [.25, -.5]
    assert unpack(frame("error"))["payload"]["error"].startswith("observation_failed")


def test_what_we_write_has_the_form_of_what_it_writes():
    theirs = msgpack.unpackb(frame("action"), raw=False)
    ours = msgpack.unpackb(pack("action", dict(actions=np.float32([.25, -.5])), 3), raw=False)
    assert ours | dict(timestamp=0) == theirs | dict(timestamp=0)


# ---- hostile ones

ARRAY = dict(__ndarray__=True, data=b"\0"*8, dtype="<f4", shape=[2])


def said(payload): return msgpack.packb(dict(type="action", payload=payload, seq=1))


@pytest.mark.parametrize("data, says", [
    (b"", "no message"), (b"\x80\x04\x95", "no message"), (b"\xc1", "no message"), (said({})+b"x", "no message"), (msgpack.packb(7), "is a dict of type"), (msgpack.packb(dict(type="hello")), "is a dict of type"),
    (msgpack.packb(dict(type="exec", payload={}, seq=1)), "of type 'exec'"), (msgpack.packb(dict(type="hello", payload=[], seq=1)), "payload is a dict"), (msgpack.packb(dict(type="hello", payload={}, seq=True)), "whole number"),
    (said({1: 2}), "no message"), (said(dict(a=msgpack.ExtType(3, b"x"))), "no message"), (said(dict(a="x"*200_000)), "no message"), (said(dict(a=[0]*20_000)), "no message"), (said(dict(a=b"x")), "holds a bytes"),
    (said(dict(a=ARRAY | dict(dtype="|O"))), "dtype is"), (said(dict(a=ARRAY | dict(dtype="<U2"))), "dtype is"), (said(dict(a=ARRAY | dict(dtype=[["a", "<f4"]]))), "dtype is"), (said(dict(a=ARRAY | dict(dtype=">f4"))), "dtype is"),
    (said(dict(a=ARRAY | dict(shape=[3]))), "has 12 bytes, found 8"), (said(dict(a=ARRAY | dict(shape=[-2]))), "shape is"), (said(dict(a=ARRAY | dict(shape=[2**31-1]*8))), "bytes, found 8"), (said(dict(a=ARRAY | dict(shape=[True, 2]))), "shape is"),
    (said(dict(a=ARRAY | dict(shape=2))), "shape is"), (said(dict(a=ARRAY | dict(data="text"))), "found str"), (said(dict(a=ARRAY | dict(dtype="|b1", shape=[8], data=b"\2"*8))), "other bytes than 0 and 1"), (said(dict(a=dict(__ndarray__=True))), "shape is"),
    (said(dict(a=dict(__image__=True, format="png", data=b"GIF89a", shape=[1, 1, 3]))), "is no PNG"), (said(dict(a=dict(__image__=True, format="tiff", data=b"", shape=[1, 1, 3]))), "expected raw, png or jpeg"),
    (said(dict(a=dict(__image__=True, format=["png"], data=b"", shape=[]))), "expected raw, png or jpeg")], ids=lambda x: "" if isinstance(x, bytes) else x)
def test_what_is_no_message_is_refused_in_a_line(data, says):
    with pytest.raises(ValueError, match=re.escape(says)) as e: unpack(data)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600


def test_deep_and_large_messages_are_refused():
    deep = 1
    for _ in range(400): deep = [deep]
    with pytest.raises(ValueError, match="more than 8 levels|no message"): unpack(said(dict(a=deep)))
    with pytest.raises(ValueError, match="at most"): unpack(b"\0"*(MOST+1))


def test_a_picture_that_unfolds_into_too_many_pixels_is_refused_before_it_is_decoded():
    import io
    from PIL import Image
    out = io.BytesIO()
    Image.new("L", (9000, 9000)).save(out, "PNG")   # some kilobytes
    with pytest.raises(ValueError, match="expected at most"): unpack(said(dict(a=dict(__image__=True, format="png", data=out.getvalue(), shape=[9000, 9000, 1]))))
    small = base64.b64decode(GOLDEN["frames"]["observation_png"])
    with pytest.raises(ValueError, match="and says"): unpack(small.replace(msgpack.packb([8, 6, 3]), msgpack.packb([6, 8, 3])))


def test_random_damage_is_refused_or_read():
    rng = np.random.default_rng(0)
    for name in GOLDEN["frames"]:
        for _ in range(150):
            data = bytearray(frame(name))
            for at in rng.integers(0, len(data), 3): data[at] = rng.integers(256)
            try: unpack(bytes(data[:rng.integers(1, len(data)+1)] if rng.random() < .3 else data))
            except ValueError: pass


@pytest.mark.parametrize("payload, says", [
    ({}, "has nothing"), (dict(x=1), "expected 'actions'"), (dict(actions=np.zeros(3)), "shape (3,), expected (2,)"), (dict(actions=np.zeros((4, 2))), "set its chunk_size"), (dict(actions=np.float64([1e300, 0])), "expected finite"),
    (dict(actions=[0., float("inf")]), "expected finite"), (dict(actions=np.array([True, False])), "expected 'actions'"), (dict(actions=["a", "b"]), "expected 'actions'"), (dict(actions=None), "expected 'actions'"), (dict(actions=np.zeros(())), "shape ()")])
def test_what_is_no_action_is_refused(payload, says):
    with pytest.raises(ValueError, match=re.escape(says)): action_of(payload, 2)


# ---- both ends

def test_the_same_starts_end_alike_over_the_socket(run, server):
    own = eval_cl(EvalConfig(run_dir=str(run), n_trials=5, n_workers=1, last_only=True), len).episodes()
    with serving(server) as address:
        remote = EvalConfig(run_dir=str(run), n_trials=5, n_workers=1, policy_server=address)
        out = eval_cl(remote, len)
        said = []
        again = eval_cl(remote, said.append)   # it is done, whichever policy is served there by now
        assert said[0] == f"10 episodes that a server at {address} has played before are kept, whichever policy it had then; for another policy remove {out.path}"
        with pytest.raises(ValueError, match="belongs to another evaluation: image_size: 0 -> 40"): eval_cl(EvalConfig(run_dir=str(run), n_trials=5, n_workers=1, policy_server=address, image_size=40), len)
    assert ends(out.episodes()) == ends(own) and 0 < sum(r["success"] for r in own) < len(own)
    assert out.path == again.path and address[5:].replace(":", "_") in out.path.name
    assert read_run(out.path).config["evaluation"] == out.path.name
    assert read_results(f"theirs={out.path}").k == sum(r["success"] for r in own)


@pytest.mark.parametrize("kw", [dict(batch=2, rows=3), dict(rows_per_task=2)], ids=["queue", "rows"])
def test_any_schedule_gives_the_same_episodes(server, kw):
    "One connection for each row; noise is that of the trial."
    def played(**kw):
        with serving(server) as address, RemotePlayer(server.stream.tasks, address, n_workers=1, image_size=32, **kw) as player: return ends(player.play(range(3)))
    assert played(**kw) == played(rows_per_task=1)


def asked(server, *messages):
    "What the server answers, by a connection of raw bytes."
    import aiohttp
    async def talk(address):
        async with aiohttp.ClientSession() as http, http.ws_connect(address) as ws:
            found = []
            for m in messages:
                await ws.send_bytes(m)
                if msgpack.unpackb(m, raw=False, strict_map_key=False)["type"] in ("hello", "observation"): found.append(await asyncio.wait_for(ws.receive(), 20))
            return [unpack(m.data) if m.type == aiohttp.WSMsgType.BINARY else m.type.name for m in found]
    with serving(server) as address: return asyncio.run(talk(address))


def seen_by(server, **change):
    names = [k.removeprefix(IMAGES) for k in server.policy.pixels]
    return dict(images=dict.fromkeys(names, np.zeros((40, 32, 3), np.uint8)), states=np.zeros(server.dim), task_description=TASKS[0].prompt) | change


def test_a_client_is_answered_and_faults_leave_the_connection(server):
    good = pack("observation", seen_by(server), 5)
    found = asked(server, frame("hello"), pack("episode_start", dict(task=dict(name=TASKS[0].prompt, episode_idx=0)), 2), good, pack("observation", seen_by(server, states=[1.]), 6), good)
    assert [m["type"] for m in found[:2]] == ["hello", "action"] and [m["seq"] for m in found[1:]] == [5, 6, 5]
    assert found[0]["payload"]["model_server"] == "clvla" and found[0]["payload"]["observation_params"]["send_state"]
    assert found[1]["payload"]["actions"].shape == (2,) and found[1]["payload"]["actions"].dtype == np.float32


@pytest.mark.parametrize("change, says", [
    (dict(states=None), "states are no numbers|1 numbers of state"), (dict(states=[[1, 2, 3]]), "3 numbers of state, the policy was trained on 2"), (dict(states=["a", "b"]), "no numbers"), (dict(states=[1., float("nan")]), "not all finite"),
    (dict(images=None), "it has none"), (dict(images=dict(a=np.zeros((4, 4, 3), np.uint8), b=np.zeros((4, 4, 3), np.uint8))), "it has a, b; start the server with --cameras"), (dict(images={"front": np.zeros((4, 4, 7), np.uint8), "wrist": "x"}), "no picture|picture"),
    (dict(task_description="fly"), "no single task of this policy is called 'fly'"), (dict(task_description=None), "is called nothing"), (dict(task_description="\x1b[2J"), "x1b")])
def test_an_observation_that_does_not_fit_is_answered_by_a_sentence(server, change, says):
    kind, payload = answered(server, server.session(), dict(type="observation", payload=seen_by(server, **change)))
    assert kind == "error" and re.search(says, payload["error"]) and "\x1b" not in payload["error"] and "\n" not in payload["error"]


def test_bytes_that_are_no_message_end_the_connection_and_not_the_server(server):
    with serving(server) as address:
        import aiohttp
        async def talk(send):
            async with aiohttp.ClientSession() as http, http.ws_connect(address) as ws:
                await send(ws)
                return (await asyncio.wait_for(ws.receive(), 20)).type.name
        for send in (lambda ws: ws.send_bytes(b"\x80\x04."), lambda ws: ws.send_str("hello"), lambda ws: ws.send_bytes(b"")):
            assert asyncio.run(talk(send)) in ("CLOSE", "CLOSED", "CLOSING")
        assert asyncio.run(talk(lambda ws: ws.send_bytes(frame("hello")))) == "BINARY"
        async def browser():
            async with aiohttp.ClientSession() as http, http.get(address.replace("ws", "http", 1)+"/health") as r:
                assert (r.status, await r.json()) == (200, dict(status="ok"))
            async with aiohttp.ClientSession() as http:
                with pytest.raises(aiohttp.WSServerHandshakeError, match="403"): await http.ws_connect(address, headers=dict(Origin="http://elsewhere.example"))
        asyncio.run(browser())


def test_vla_eval_s_benchmark_of_libero_is_told_the_form_of_our_state():
    from types import SimpleNamespace
    from clvla.envs.all import make_stream
    from clvla.train.serve import hello_of
    asked = lambda suite, *cameras: hello_of(SimpleNamespace(stream=make_stream(suite), policy=SimpleNamespace(pixels=dict.fromkeys(cameras, 64))))["observation_params"]
    assert asked("libero_five", "front") == dict(send_state=True, quat_no_antipodal=True, env_seed=0)
    assert asked("libero_five", "front", "wrist") == dict(send_state=True, send_wrist_image=True, quat_no_antipodal=True, env_seed=0)
    assert asked("dot_2", "front") == dict(send_state=True)
    said = hello_of(SimpleNamespace(stream=make_stream("libero_goal"), policy=SimpleNamespace(pixels=dict(front=64))))
    assert list(said["action_spec"]) == ["position", "rotation", "gripper"] and said["observation_spec"]["state"]["format"] == "eef_pos3_axisangle3_gripper2"


def test_it_listens_on_this_machine_alone(server):
    with serving(server) as address:
        host, port = address[5:].split(":")
        assert host == "127.0.0.1"
        ours = next((a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET) if not a[4][0].startswith("127.")), None)
        if ours:
            with socket.socket() as s: assert s.connect_ex((ours, int(port))) != 0


@contextmanager
def talker(answer):
    "A server of which `answer` says what it sends for a message; None: nothing."
    from aiohttp import web
    import threading
    async def handle(request):
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async for m in ws:
            sent = answer(unpack(m.data))
            if sent == "close": break
            if sent is not None: await ws.send_bytes(sent)
        return ws
    async def begin():
        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner, port = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try: yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def hello_then(answer): return lambda m: pack("hello", {}, m["seq"]) if m["type"] == "hello" else answer(m) if m["type"] == "observation" else None


@pytest.mark.parametrize("answer, says", [
    (lambda m: None, "did not answer within 1 s"), (lambda m: "close", "it sent CLOSE"), (hello_then(lambda m: None), "did not answer within 1 s"), (hello_then(lambda m: "close"), "it sent CLOSE"),
    (lambda m: pack("action", {}, m["seq"]), "answered hello by 'action'"), (hello_then(lambda m: b"\x80\x04."), "no message"), (hello_then(lambda m: pack("hello", {}, m["seq"])), "answered an observation by 'hello'"),
    (hello_then(lambda m: pack("action", dict(actions=np.zeros(2)), m["seq"]-1)), "it answered message 2, the last one was 3"), (hello_then(lambda m: pack("error", dict(error="out of memory\x1b[2J\nsecond"), m["seq"])), r"it says: out of memory\\x1b"),
    (hello_then(lambda m: pack("action", dict(actions=np.float32([np.nan, 0])), m["seq"])), "task 'left', trial 0, step 0: it returned .*expected finite"),
    (hello_then(lambda m: pack("action", dict(actions=np.zeros((8, 2))), m["seq"])), "set its chunk_size"), (hello_then(lambda m: pack("action", dict(actions=np.zeros(7)), m["seq"])), r"expected \(2,\)")])
def test_what_a_server_does_wrong_is_said_and_no_step_is_made(answer, says):
    with talker(answer) as address, RemotePlayer(TASKS[:1], address, timeout=1, n_workers=1, image_size=16, rows_per_task=1) as player:
        with pytest.raises(ServerFault, match=says) as e: player.play(range(1))
        assert player.clock["steps"] == 0 and "\x1b" not in str(e.value)


def test_nobody_listens():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with Connections(str(port), 2) as c, pytest.raises(ServerFault, match=f"ws://127.0.0.1:{port}: ClientConnectorError"): c.tell(0, "episode_start", {})


def test_the_settings_are_refused_at_the_door(run):
    for kw, says in ((dict(policy_server="http://x"), "expected HOST:PORT"), (dict(image_size=64), "or name a policy_server"), (dict(policy_server="8000", image_size=10**6), "expected at most"), (dict(policy_server="8000", image_size=-1), "1 or more|0 or more")):
        with pytest.raises(ValueError, match=says): check_eval(EvalConfig(run_dir=str(run), **kw))
    with pytest.raises(ValueError, match="did you mean"): PolicyServer(run, cameras="frnt=agentview", say=len)
    assert check_eval(EvalConfig(run_dir=str(run), policy_server="8000")).cfg.last_only
    with pytest.raises(ValueError, match="timeout is 0"): RemotePlayer(TASKS, "8000", timeout=0)
    with pytest.raises(ValueError, match="discrete"): RemotePlayer(dot.streams()["dot_discrete"].tasks if "dot_discrete" in dot.streams() else _discrete(), "8000", n_workers=1, image_size=16)


def _discrete():
    from clvla.data.streams import Task
    return [Task(id="left", name="left", prompt="left", env=dict(kind="dot", name="left", max_steps=5, discrete=True))]


def test_a_strangers_folder_chooses_no_server(run, tmp_path, monkeypatch):
    import shutil
    monkeypatch.setenv("CLVLA_STATE", str(tmp_path/"state"))
    theirs = shutil.copytree(run, tmp_path/"theirs")
    write_json(theirs/"evals/x/config.json", dict(run_dir=str(theirs), policy_server="10.9.8.7:1"))
    assert code_of(read_json(theirs/"evals/x/config.json")) == ["host 10.9.8.7:1"]
    with pytest.raises(ValueError, match="host 10.9.8.7:1"): read_eval_config(theirs, "x")


def test_the_command_serves_until_it_is_ended(run):
    command = [sys.executable, "-c", "import sys; from clvla.command.main import main; sys.exit(main())", "serve", str(run), "--port", "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        while not lines or "listening at" not in lines[-1]:
            line = child.stdout.readline()
            assert line, lines
            lines.append(line)
        address = re.search(r"ws://127.0.0.1:\d+", lines[-1])[0]
        with urllib.request.urlopen(address.replace("ws", "http", 1), timeout=20) as r: assert json.load(r) == dict(status="ok")
        with RemotePlayer(TASKS[:1], address, n_workers=1, image_size=32, rows_per_task=1) as player: assert len(player.play(range(1))) == 1
        child.send_signal(2)
        assert child.wait(30) == 130
    finally: child.kill()


def test_the_command_says_what_is_wrong(capsys, tmp_path):
    for words, says in ((["serve"], "expected one folder"), (["serve", str(tmp_path)], "is no run folder"), (["serve", "x", "--prt", "1"], "no parameter 'prt'")):
        assert main(words) == 1
        assert says in capsys.readouterr().err
