#!/usr/bin/env bash
# The speedrun's data: WikiExtractor archives in, FOLDER/data (training), FOLDER/sentences (without sentence pairs) and
# FOLDER/held-out out. The held-out documents and their masks are fixed by the seeds below.
# usage: data.sh FOLDER ARCHIVE...    (bertrain on the PATH; if FOLDER/text exists, it is used as it is)
set -euo pipefail
folder=$1
shift
[ -d "$folder/text" ] || bertrain data extract "$@" --out "$folder/text" --deduplicate --hold-out 300 --hold-out-seed 12345
python "$(dirname "$0")/near_copies.py" "$folder/text"
bertrain data prepare "$folder/text/train" --out "$folder/data" --max-seq-length 128 --seed 12345
bertrain data prepare "$folder/text/train" --out "$folder/sentences" --max-seq-length 128 --seed 12345 --full-sentences
bertrain data prepare "$folder/text/eval.txt" --out "$folder/held-out" --max-seq-length 128 --seed 12345 \
    --reference --max-predictions 20 --masked-lm-prob 0.15
