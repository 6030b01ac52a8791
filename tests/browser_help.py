"""JupyterLab and Chromium for tests: a server on loopback with folders of its own, and tabs whose console errors are kept.

    with lab(folder) as server: page = Page(tab, server, "run_cl.ipynb"); page.call("notebook:run-all-cells")

`chromium()` says where the browser is; it is installed only where $CLVLA_BROWSER is "install" (as root, with apt)."""
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

NAMES = "chromium", "chromium-browser", "google-chrome"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
KERNEL = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status"
WAIT = 300_000   # milliseconds until a condition has to hold; a quiet machine needs a thirtieth


class NoBrowser(RuntimeError): "This machine has no Chromium; the text says what to do."


def chromium():
    "Path of the machine's Chromium; NoBrowser where there is none."
    found = lambda: next(filter(None, map(shutil.which, NAMES)), None)
    if found() is None and os.environ.get("CLVLA_BROWSER") == "install":
        for words in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            try: subprocess.run(["apt-get", "-qq", *words], env=os.environ | dict(DEBIAN_FRONTEND="noninteractive"), capture_output=True, timeout=600)
            except (OSError, subprocess.TimeoutExpired): break
    if path := found(): return path
    raise NoBrowser("the tests in a browser need Chromium, and there is none; install it (Debian, as root: apt-get install chromium)")


@contextmanager
def lab(folder):
    "A JupyterLab on 127.0.0.1 that serves `folder`; its address and token. Its settings are its own, not the user's."
    own = Path(folder)/".lab"
    own.mkdir()
    settings = own/"settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')   # cells that are not on the screen are in the page, too
    places = dict(JUPYTER_CONFIG_DIR="config", JUPYTER_DATA_DIR="data", JUPYTER_RUNTIME_DIR="runtime", JUPYTERLAB_SETTINGS_DIR="settings",
                  JUPYTERLAB_WORKSPACES_DIR="workspaces", IPYTHONDIR="ipython")
    env = os.environ | {name: str(own/place) for name, place in places.items()} | dict(JUPYTER_NO_CONFIG="1")
    words = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={folder}",
             "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with open(own/"log.txt", "wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *words], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try: yield _wait_for(server, own)
        finally:
            server.terminate()   # ends the kernels, too
            try: server.wait(60)
            except subprocess.TimeoutExpired: server.kill()


def _wait_for(server, own):
    "What the server says of itself once it answers."
    deadline = time.monotonic()+WAIT/1000
    while True:
        assert server.poll() is None and time.monotonic() < deadline, (own/"log.txt").read_text(errors="replace")[-3000:]
        try: return json.loads(next((own/"runtime").glob("jpserver-*.json")).read_text())
        except (StopIteration, ValueError): time.sleep(.1)


class Page:
    "A notebook in a tab of JupyterLab."
    def __init__(self, tab, server, name, idle=True):
        self.tab = tab
        tab.goto(f"{server['url']}lab/tree/{name}?reset&token={server['token']}", timeout=WAIT)
        self.until("window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.id", "there is a kernel")   # a busy one has not said yet how it is
        if idle: self.until_idle()

    def until_idle(self): self.until(f"{KERNEL} === 'idle'", "the kernel is idle")

    def until(self, condition, what):
        "Wait until a condition in JavaScript holds."
        if condition.startswith("{"): condition = f"() => {condition}"
        try: self.tab.wait_for_function(condition, timeout=WAIT, polling=200)
        except Exception as e: raise AssertionError(f"not within {WAIT/1000:.0f} s: {what}; the page says\n{self.text()[-3000:]}") from e

    def call(self, command): self.tab.evaluate("c => { window.jupyterapp.commands.execute(c) }", command)
    def text(self): return self.tab.evaluate("[...document.querySelectorAll('.jp-OutputArea-output')].map(o => o.innerText).join('\\n')")
