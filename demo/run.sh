#!/usr/bin/env bash
# From text to a model that guesses words; every command is shown before it runs. Run it again to continue.
# usage: demo/run.sh [FOLDER] [TIME]    (bertrain must be on the PATH; make demo sees to that)
set -euo pipefail
here=$(dirname "$0")
out=${1:-runs/demo}
budget=${2:-2m}

run() {
    printf '\n$ bertrain'
    for word in "$@"; do
        case $word in *" "*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    bertrain "$@"
}

run train "$here/train-1.txt" "$here/train-2.txt" --out "$out" --budget "$budget"
run fill-mask "$out/model" --top 3 \
    "in 1998 , the album was released in the united [MASK] ." \
    "he was born in london [MASK] 1905 ." \
    "it is one of [MASK] most important species of the genus ." \
    "she was the daughter [MASK] the king ." \
    "the [MASK] of the river was built in the 19th century ."
