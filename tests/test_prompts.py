"What a policy hears: other scripts, sentences that it reads alike, and each frame's own sentence in place of a joined title."
import re, string, zlib
import numpy as np
import pytest
import torch
from clvla.core.names import ACTION, IMAGE, PROMPT, STATE
from clvla.core.seeds import np_rng
from clvla.data.controls import Controls
from clvla.data.demos import record_one
from clvla.data.lerobot import import_lerobot
from clvla.data.lerobot_write import write_lerobot
from clvla.data.partition import by_task_index, partitions
from clvla.envs.all import make_env, make_stream, stream_names
from clvla.policies.all import make_policy, policies
from clvla.policies.tiny import word_ids, words_of
from clvla.train.checks import check_instructions, sentences
from clvla.train.config import TrainConfig, resolve
from clvla.train.learner import train_cl

def tiny(**kw): return make_policy("tiny", 32, 2, 2, 4, "l1", **kw)

def told(*texts): return {f"task{i}": [text] for i,text in enumerate(texts)}


# other scripts

PAIRS = [("打开抽屉", "关上抽屉"), ("открой ящик", "закрой ящик"), ("引き出しを開ける", "引き出しを閉める"), ("افتح الدرج", "اغلق الدرج"), ("서랍을 열어", "서랍을 닫아"),
         ("दराज खोलो", "दराज खोली"), ("เปิดลิ้นชัก", "ปิดลิ้นชัก"), ("άνοιξε", "κλείσε"), ("tür auf", "tur auf"), ("pelota", "pelotá")]
@pytest.mark.parametrize("a,b", PAIRS)
def test_every_script_is_heard(a, b):
    policy = tiny().eval()
    check_instructions(policy, told(a, b), Controls())
    obs = {IMAGE: torch.zeros(1, 3, 32, 32, dtype=torch.uint8), STATE: torch.zeros(1, 2)}
    assert not torch.equal(*(policy.predict_chunk(obs | {PROMPT: [text]}) for text in (a, b)))

def test_latin_words_keep_their_rows():
    old = lambda text: tuple(1+zlib.crc32(w.encode())%511 for w in re.findall(r"[a-z0-9]+", text.lower()))
    g = np_rng(0, "prompts")
    drawn = ["".join(g.choice(list(string.printable), 60)) for _ in range(300)]
    for text in [t.prompt for name in stream_names() for t in make_stream(name).tasks]+drawn: assert word_ids(text, 512) == old(text)

@pytest.mark.parametrize("a,b", [("caf\u00e9", "cafe\u0301"), ("ＯＰＥＮ it", "open it"), ("Straße", "STRASSE"), ("می\u200cرود", "میرود"), ("ﬁnd it", "find it")])
def test_one_sentence_in_two_spellings(a, b): assert words_of(a) == words_of(b)

@pytest.mark.parametrize("name", ["tiny", "qwenoft-tiny", "lerobot-smolvla-tiny"])
def test_accents_are_one_sentence_to_every_reader(name):
    size = 48 if name == "tiny" else policies[name].defaults.get("image_size", 64)
    policy = make_policy(name, size, 2, 2, 4, "")
    assert policy.prompt_ids("caf\u00e9") == policy.prompt_ids("cafe\u0301") != policy.prompt_ids("cafe")
    assert policy.prompt_length("open it") == len(policy.prompt_ids("open it")) > 0
    for text in ("", " ", "!?"):
        with pytest.raises(ValueError, match="holds no word"): policy.check_prompts([text])

def test_two_spellings_in_two_data_sets_are_one_task(tmp_path):
    ep = lambda text: {IMAGE: np.zeros((3, 8, 8, 3), np.uint8), STATE: np.zeros((3, 2), np.float32), ACTION: np.zeros((3, 2), np.float32), PROMPT: text}
    paths = [write_lerobot(tmp_path/n, [ep(text)], 10, "png") for n,text in (("a", "ouvre le caf\u00e9"), ("b", "ouvre le cafe\u0301"))]
    (task,) = by_task_index(paths)
    assert len(task.source["parts"]) == 2
    store, = import_lerobot(paths, tmp_path/"out", "by_task_index").values()
    assert store.prompts == ["ouvre le caf\u00e9"]


# sentences that are read alike

@pytest.mark.parametrize("a,b", [("turn the dial", "turn the window"), ("move 5 cm", "move -5 cm"), ("push the \U0001F534 one", "push the \U0001F535 one")])
def test_different_sentences_that_are_read_alike(a, b):
    with pytest.raises(ValueError) as e: check_instructions(tiny(), told(a, b), Controls())
    assert a in str(e.value) and b in str(e.value) and "accept='prompts'" in str(e.value)
    with pytest.raises(ValueError): check_instructions(tiny(), dict(one=[a, b]), Controls())   # frames of one task
    assert check_instructions(tiny(), told(a, b), Controls(), "prompts")[0].startswith("accepted (prompts)")
    assert check_instructions(tiny(), told(a, b), Controls(sentence="do the task")) == []

@pytest.mark.parametrize("a,b,said", [("Open the drawer.", "open the drawer", "in two spellings"), ("open it", "open it", "is the instruction of task0, task1")])
def test_spellings_and_shared_sentences_are_said(a, b, said):
    (line,) = check_instructions(tiny(), told(a, b), Controls())
    assert said in line

def test_a_sentence_that_differs_behind_the_last_word_read():
    a,b = ("open the box and then "*8+word for word in ("left", "right"))
    with pytest.raises(ValueError, match="takes 41 positions, Tiny reads 32"): check_instructions(tiny(), told(a, b), Controls())
    assert check_instructions(tiny(max_words=64), told(a, b), Controls()) == []

def test_a_policy_that_reads_nothing_says_so():
    act = make_policy("lerobot-act-tiny", policies["lerobot-act-tiny"].defaults.get("image_size", 64), 2, 2, 4, "")
    assert "reads no instruction" in check_instructions(act, told("open", "close"), Controls())[0]

@pytest.mark.parametrize("name", [n for n in stream_names() if n not in ("libero",)])
def test_shipped_streams_are_told_apart(name):
    "No shipped stream has two different instructions that are the same rows of tiny's table."
    stream = make_stream(name)
    assert not [line for line in check_instructions(tiny(), {t.id: [t.prompt] for t in stream.tasks}, Controls()) if "alike" in line]


# each frame's own sentence

@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    "Two data sets of the dot with several instructions each, whose joined title is longer than tiny reads."
    root = tmp_path_factory.mktemp("titles")
    long = "move the dot that lies in the square over to the {} side and stay there"
    for k,names in enumerate((("left", "right", "up"), ("down", "left"))):
        eps = [record_one(make_env(dict(kind="dot", name=name, prompt=long.format(name)), 32), 10**6+i, np_rng(0, i), 0., 1) for i,name in enumerate(names)]
        write_lerobot(root/f"set{k}", eps, 10, "png")
    return root

@pytest.mark.parametrize("kw", [{}, dict(deaf=True)])
def test_joined_titles_are_not_what_is_read(sets, tmp_path, kw):
    lines = []
    cfg = resolve(TrainConfig(suite=[str(sets/"set0"), str(sets/"set1")], partition="by_dataset", run_dir=str(tmp_path/"run"), data_dir=str(sets/"data"), evaluate="none",
                              algo="er", steps_per_task=2, batch_size=8, image_size=32, n_workers=1, device="cpu", chunk=4, threads=1, **kw))
    train_cl(cfg, say=lines.append)
    shared = [line for line in lines if "is the instruction of set0, set1" in line]
    assert len(shared) == (0 if kw else 1) and not any(" / " in line for line in lines)

def test_sentences_are_those_of_frames_and_of_evaluation(sets, tmp_path):
    stream = make_stream(dict(base=[str(sets/"set0"), str(sets/"set1")], partition="by_dataset"))
    stores = import_lerobot([sets/"set0", sets/"set1"], tmp_path, "by_dataset")
    got = sentences(stream, stores)
    assert [len(of) for of in got.values()] == [3, 2] and " / " in stream.tasks[0].prompt and not any(" / " in text for of in got.values() for text in of)
    with pytest.raises(ValueError, match="shorten it"): tiny(max_words=8).check_prompts([got["set0"][0]])
