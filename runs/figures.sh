#!/usr/bin/env bash
# The healing curves on a small machine: trains, converts and heals by every recipe of recipes/figures, and draws.
#
#   runs/figures.sh TRAIN_FOLDER HELD_OUT.txt WORK_FOLDER [RECIPE ...]      (RECIPE: small, smollm2; default: both)
#
# TRAIN_FOLDER holds .txt files. Hours on two cores; finished runs are skipped, begun ones go on.
set -euo pipefail

if [[ $# -lt 3 ]]; then
  echo "usage: runs/figures.sh TRAIN_FOLDER HELD_OUT.txt WORK_FOLDER [RECIPE ...]" >&2
  exit 2
fi
train=$(realpath "$1") held_out=$(realpath "$2") work=$(realpath -m "$3")
shift 3
cd "$(dirname "$0")/.."
[[ $# -gt 0 ]] || set -- small smollm2
for recipe in "$@"; do
  python benchmarks/healing_curves.py "recipes/figures/$recipe.yaml" "$train" "$held_out" --work "$work/$recipe"
done
python benchmarks/figures.py
