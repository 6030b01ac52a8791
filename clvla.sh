#!/usr/bin/env bash
# Sets clvla up on a fresh Linux machine and runs it.
#   ./clvla.sh run [papermill options]   the main job: papermill nbs/run_cl.ipynb runs/page.ipynb -p cl mir
#   ./clvla.sh test [pytest options]     the tests in ten minutes; `test more`, which .ci/run runs, in 35, `test all` in 50
#   ./clvla.sh lab [jupyter options]     JupyterLab on copies of the experiment pages in runs/pages, and on nbs/ beside them
#   ./clvla.sh docs [notebooks]          the pages as a site in _site, without a network; a link that leads nowhere is an error
#   ./clvla.sh setup                     only make the environment
# It makes a virtual environment in .venv (or $CLVLA_ENV) and, where they are missing and this user may, installs the
# system packages libosmesa6, libegl1, libgl1, libglib2.0-0 (software rendering), g++ and make (two packages that LIBERO's
# simulator needs are compiled). Nothing else on the machine is touched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
ENV_DIR=${CLVLA_ENV:-.venv}

say() { printf 'clvla: %s\n' "$*" >&2; }

find_python() {
  local p
  for p in python3.12 python3.13 python3 "$HOME"/.pyenv/versions/3.12*/bin/python "$HOME"/.pyenv/versions/3.13*/bin/python; do
    if "$p" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then echo "$p"; return; fi
  done
  if command -v uv >/dev/null; then uv python install 3.12 >&2 && uv python find 3.12 && return; fi
  say "needs Python 3.12 or 3.13 and found none. Install one (Debian 13: apt-get install python3.13-venv; or uv, or pyenv), then start this again."
  exit 1
}

system_packages() {
  local libs sudo="" missing=()
  libs=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p)   # which an ordinary user of Debian has not in PATH
  case $libs in *libOSMesa*) ;; *) missing+=(libosmesa6) ;; esac
  case $libs in *libEGL.so*) ;; *) missing+=(libegl1) ;; esac
  case $libs in *libGL.so.1*) ;; *) missing+=(libgl1) ;; esac
  case $libs in *libgthread-2.0*) ;; *) missing+=(libglib2.0-0) ;; esac
  command -v c++ >/dev/null || missing+=(g++)
  command -v make >/dev/null || missing+=(make)
  if [ ${#missing[@]} = 0 ]; then return; fi
  [ "$(id -u)" = 0 ] || sudo="sudo -n"
  say "installing the system packages ${missing[*]}"
  if ! { $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } >&2; then
    say "could not install them. Ask an administrator for: apt-get install ${missing[*]} (Fedora: mesa-libOSMesa mesa-libEGL mesa-libGL glib2 gcc-c++ make)"
    exit 1
  fi
}

setup() {
  system_packages
  local want; want=$(cat settings.ini setup.py | sha256sum | cut -c1-16)
  if [ "$(cat "$ENV_DIR/.clvla" 2>/dev/null || true)" = "$want" ]; then return; fi
  local py; py=$(find_python)
  say "making the environment $ENV_DIR with $($py --version) at $py (a few minutes, about 9 GB with torch)"
  "$py" -m venv "$ENV_DIR"
  "$ENV_DIR/bin/python" -m pip install -q --upgrade pip "setuptools<82" wheel "cmake<4.2"
  # egl_probe, which LIBERO's package asks for, is compiled with cmake and written for an old one
  # --no-compile: a module is compiled when it is first imported, and most of the 31 000 never are, which took 90 s of one core
  # editable_mode=compat: this folder stands on the path; setuptools' own way lets a clone named clvla hide the package from Python above it
  # (setuptools, which is pinned, calls that mode transitional: PYTHONWARNINGS)
  PYTHONWARNINGS=ignore CMAKE_POLICY_VERSION_MINIMUM=3.5 PATH=$(cd "$ENV_DIR/bin" && pwd):$PATH \
    "$ENV_DIR/bin/python" -m pip install -q --no-build-isolation --no-compile --config-settings editable_mode=compat -e '.[metaworld,libero,gym,envpool,ray,lerobot,peft,vlm,deepspeed,search,served,tensorboard,dev,docs]'
  echo "$want" > "$ENV_DIR/.clvla"
}

copy_pages() {   # what a user runs and saves is a copy, so that no tracked page changes
  local page copy
  mkdir -p runs/pages
  for page in run_cl run_rl run_crl eval_cl compare audit sweep; do
    copy=runs/pages/$page.ipynb
    if [ ! -e "$copy" ]; then cp "nbs/$page.ipynb" "$copy"
    elif [ "nbs/$page.ipynb" -nt "$copy" ]; then say "$copy is older than nbs/$page.ipynb; remove it to get the newer page"; fi
  done
}

command=${1:-help}; shift || true
case "$command" in
  setup) setup ;;
  run) setup; mkdir -p runs
    if [ $# = 0 ]; then set -- -p cl mir; fi
    "$ENV_DIR/bin/papermill" --log-output --no-progress-bar nbs/run_cl.ipynb runs/page.ipynb "$@"
    say "the executed page is runs/page.ipynb; the results are in the run folder that it names" ;;
  test) setup
    case "${1:-}" in all|more) level=--$1; shift; set -- "$level" "$@" ;; esac
    where=(tests)
    for word in "$@"; do case $word in tests/*) where=() ;; esac; done   # a file that is named runs alone
    "$ENV_DIR/bin/python" -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder \
    -o tmp_path_retention_policy=failed "$@" "${where[@]}" ;;
  docs) setup; exec "$ENV_DIR/bin/python" docs/make_site.py "$@" ;;
  lab) setup; copy_pages
    exec "$ENV_DIR/bin/jupyter" lab --ServerApp.root_dir="$PWD" --LabApp.default_url=/lab/tree/runs/pages/run_cl.ipynb "$@" ;;
  *) sed -n '2,10p' "$0" ; [ "$command" = help ] ;;
esac
