"The pool's transport: lost, late, doubled and oversized messages; and a stride that holds in every way to play."
import os
import socket
import threading
import time

import numpy as np
import pytest

from clvla.core.names import STATE
from clvla.envs.child import Child, recv, report, send
from clvla.envs.pool import EnvPool
from clvla.envs.supervisor import Slot, Worker, Workers
from clvla.rl.config import PracticeConfig
from clvla.rl.episodes import load_episodes
from clvla.rl.learner import practise
from clvla.rl.transitions import transitions
from test_practice import config, done  # noqa: F401 -- a fixture

DOT = dict(kind="dot", name="left", goal=[5, 5], max_steps=1000)


@pytest.fixture(scope="module")
def data(shared_data): return shared_data


def by_hand():
    "A supervisor whose only worker is this test, at the other end of the socket; it has been sent command 2."
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = Worker([0])
    worker.child, worker.starting = Child.__new__(Child), False   # the parent's side, without a process
    worker.child.sock = ours
    supervisor = Workers([worker], [Slot(worker, DOT)], {}, timeout=5)
    supervisor._finalizer.detach()
    os.close(supervisor.memory_fd)
    for _ in range(2): supervisor.command(0, n=1)
    return supervisor, worker, theirs


def test_late_and_doubled_answers_are_passed_over():
    supervisor, worker, theirs = by_hand()
    heard = lambda: [a["seq"] for a in supervisor.answers(time.monotonic()+.2)]
    assert [recv(theirs)["seq"] for _ in range(2)] == [1, 2]
    send(theirs, slot=0, seq=1)   # late: the command was overtaken
    assert heard() == [] and worker.owed == {0: 2}
    for _ in range(2): send(theirs, slot=0, seq=2)
    assert heard() == [2] and not worker.owed
    supervisor.command(0, n=1)    # the double is still in the socket, and is no answer to this one
    assert heard() == [] and worker.owed == {0: 3}
    send(theirs, slot=0, seq=3)
    assert heard() == [3]


def test_a_lost_command_counts_as_a_hang_and_the_trial_begins_again(monkeypatch):
    from clvla.envs import child as module
    with EnvPool([DOT], 1, image_size=8, timeout=1.) as pool:
        pool.reset(0, 3)
        start = pool.wait()[0].obs[STATE].copy()
        real, lost = module.send, []
        def send_once(sock, **message):
            if "n" in message and not lost: lost.append(message)
            else: real(sock, **message)
        monkeypatch.setattr(module, "send", send_once)
        pool.step(0, np.ones((2, 2)))
        result, = pool.wait()
        assert lost and result.restarted and result.n_steps == 0 and pool.restarts == 1
        np.testing.assert_array_equal(result.obs[STATE], start)


def test_an_oversized_message_is_refused_by_name_and_a_long_error_arrives():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(ValueError, match="a message of 3000.. bytes with text is longer"): send(ours, text="x"*3_000_00)
    send(ours, text="short")      # the refused one left nothing behind
    assert recv(theirs) == dict(text="short")
    send(theirs, error=report(ValueError("y"*5_000_000)))
    assert recv(ours)["error"]["message"] == "y"*20_000
    with EnvPool([DOT], 1, image_size=8) as pool:
        with pytest.raises(ValueError, match="is longer than the socket carries"): pool.reset(0, 0, spec=DOT | dict(prompt="z"*400_000))


def test_messages_are_whole_and_apart_whatever_their_length():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for n in (100_000, 1, 50_000, 0): send(ours, text="x"*n)
    assert [len(recv(theirs)["text"]) for _ in range(4)] == [100_000, 1, 50_000, 0]   # a longer one before leaves nothing in a shorter


@pytest.mark.parametrize("said,words", [(None, "nobody answers at address '127.0.0.1:.*' within 0.3 s .timed out.*leave address out"),
                                        (b"SSH-2.0-OpenSSH_9.6", "is no head of a Ray cluster .it said b'SSH-2.0-O'"), (bytes(9), "is no head"),
                                        (bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), "")])
def test_a_port_that_is_not_rays_is_named_in_time(said, words):
    "Ray itself waits for ever for one that accepts and says nothing."
    from clvla.crl.ray import check_address
    with socket.create_server(("127.0.0.1", 0)) as server:
        def answer():
            with server.accept()[0] as other:
                if other.recv(100).startswith(b"PRI * HTTP/2.0") and said: other.sendall(said)
                other.recv(100)   # until the asker goes
        thread = threading.Thread(target=answer)
        thread.start()
        ask, start = lambda: check_address(f"127.0.0.1:{server.getsockname()[1]}", .3), time.monotonic()
        if not words: ask()
        else:
            with pytest.raises(ValueError, match=words): ask()
        assert time.monotonic()-start < 5
        thread.join(5)


AHEAD = [dict()] + [dict(overlap=True)]*("overlap" in PracticeConfig.__dataclass_fields__)


@pytest.mark.parametrize("way", AHEAD)
def test_every_way_to_play_keeps_an_observation_every_second_step(data, tmp_path, done, way):  # noqa: F811
    run = practise(config(data, tmp_path/"run", **way), say=len) if way else done
    episodes = [e for path in sorted((run.path/"practice").glob("*.safetensors")) for e in load_episodes(path)]
    H = run.cfg.chunk
    assert len(episodes) == 12 and H == 8 and max(e.n_steps for e in episodes) > H
    for e in episodes:
        found = transitions(e.at, e.success_reward, e.ended, H, .99)
        assert e.at.tolist() == [*range(0, e.n_steps, 2), e.n_steps] and len(found["start"]) == -(-e.n_steps//2)
        assert [(found["first"]//H == k).sum() for k in range(e.n_steps//H)] == [4]*(e.n_steps//H)
