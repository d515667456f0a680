#!/usr/bin/env bash
# The runs behind MHA2MLA's two figures (arXiv 2502.14837) for one model: converts by every recipe, heals, draws.
#
#   runs/mha2mla.sh smollm-135m FOLDER [RECIPE ...]
#
# RECIPE: some of those in recipes/mha2mla/convert/head-dim-*, such as high or 2-norm-joint-16; they are drawn over the
# baseline in one figure (default: all of them, in the paper's two figures).
#
# Finished runs are skipped, begun ones go on, so it may be started again at any time.
#   LAUNCH="torchrun --nproc-per-node 8 -m kvfold.cli.main"   starts healing that way (default: kvfold, one process)
#   OPTIONS="--fsdp --gradient-checkpointing"                 more flags for kvfold heal
#   DRY=1                                                     prints the commands and runs none
set -euo pipefail

declare -A hub=(
  [smollm-135m]=HuggingFaceTB/SmolLM-135M
  [smollm-360m]=HuggingFaceTB/SmolLM-360M
  [smollm-1.7b]=HuggingFaceTB/SmolLM-1.7B
  [llama-2-7b]=meta-llama/Llama-2-7b-hf
)
if [[ $# -lt 2 || -z "${hub[${1:-none}]:-}" ]]; then
  echo "usage: runs/mha2mla.sh {smollm-135m|smollm-360m|smollm-1.7b|llama-2-7b} FOLDER [RECIPE ...]" >&2
  exit 2
fi
model=$1 folder=$2 original=${hub[$1]}
shift 2
recipes=$(dirname "$0")/../recipes/mha2mla
if [[ $model == llama-2-7b ]]; then dim=128 middle=32 ranks=(64 32 16); else dim=64 middle=16 ranks=(32 16 8); fi
if [[ $model == smollm-1.7b || $model == llama-2-7b ]]; then title="MHA2MLA: $original"; else title="GQA2MLA: $original"; fi
read -ra launch <<<"${LAUNCH:-kvfold}"
read -ra options <<<"${OPTIONS:-}"

run() {
  printf '+'
  printf ' %q' "$@"
  echo
  [[ -n "${DRY:-}" ]] || "$@"
}

heal() { # name, model
  [[ -d "$folder/runs/$1/model" ]] ||
    run "${launch[@]}" heal "$2" "$folder/runs/$1" --config "$recipes/heal/$model.yaml" --resume "${options[@]}"
}

draw() { # name of the figure, names of runs
  local curves=()
  for name in "${@:2}"; do curves+=("$name=$folder/runs/$name"); done
  run kvfold plot "${curves[@]}" --title "$title" --out "$folder/$1.png" "$folder/$1.svg"
}

names=("$@")
if [[ $# -eq 0 ]]; then
  for recipe in "$recipes/convert/head-dim-$dim"/*.yaml; do names+=("$(basename "$recipe" .yaml)"); done
fi
for name in "${names[@]}"; do
  if [[ ! -f "$recipes/convert/head-dim-$dim/$name.yaml" ]]; then
    echo "runs/mha2mla.sh: no recipe $name; see recipes/mha2mla/convert/head-dim-$dim" >&2
    exit 2
  fi
done

run mkdir -p "$folder/runs" "$folder/starts"
heal full-rope "$original"
for name in "${names[@]}"; do
  start=$folder/starts/$name
  [[ -d "$start" ]] || run kvfold convert "$original" "$start" --config "$recipes/convert/head-dim-$dim/$name.yaml"
  heal "$name" "$start"
done
if [[ $# -gt 0 ]]; then
  draw figure full-rope "$@"
else
  draw figure1 full-rope high low uniform 2-norm "2-norm-joint-$middle" "2-norm-split-$middle"
  draw figure2 full-rope "${ranks[@]/#/2-norm-joint-}"
fi
