#!/usr/bin/env bash
# Makes docs/demo.svg and docs/report.png from the demo itself: `make pictures`. Needs script(1) and Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ln -s "$PWD/demo" "$work/demo" # the pictures show the paths of a user in the checkout, not of this run
script -qec "stty cols 100; cd $work; PATH=$PWD/.venv/bin:$PATH demo/run.sh" "$work/recording" < /dev/null
.venv/bin/python docs/make_picture.py "$work/recording" docs/demo.svg --title "make demo"
chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,1500 --screenshot=docs/report.png \
    "file://$work/runs/demo/report.html"
