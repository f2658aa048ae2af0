#!/usr/bin/env bash
# From text to a model that guesses words, step by step; every command is shown before it runs.
# usage: demo/run.sh [FOLDER]    (bertrain must be on the PATH; make demo sees to that)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-runs/demo}
if [ -e "$out" ]; then
    echo "bertrain: $out exists already; remove it or name another folder: demo/run.sh FOLDER" >&2
    exit 2
fi
mkdir -p "$out"

run() {
    printf '\n$ bertrain'
    for word in "$@"; do
        case $word in *" "*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    bertrain "$@"
}

run data vocab "$here/train-1.txt" "$here/train-2.txt" --size 4000 --out "$out/vocab.txt"
run data prepare "$here/train-1.txt" "$here/train-2.txt" --vocab "$out/vocab.txt" --max-seq-length 128 --out "$out/data"
run data prepare "$here/held-out.txt" --vocab "$out/vocab.txt" --max-seq-length 128 --out "$out/held-out"
run pretrain bert-demo --data "$out/data" --run "$out/run"
run evaluate "$out/run" --data "$out/held-out"
run fill-mask "$out/run" --top 3 \
    "in 1998 , the album was released in the united [MASK] ." \
    "he was born in london [MASK] 1905 ." \
    "it is one of [MASK] most important species of the genus ." \
    "she was the daughter [MASK] the king ." \
    "the [MASK] of the river was built in the 19th century ."
run weights export "$out/run" --to huggingface --out "$out/exported"
run report "$out/run"
printf '\nThe page above shows the run; the weights in %s load with transformers.\n' "$out/exported"
