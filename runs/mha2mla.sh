#!/usr/bin/env bash
# The runs behind MHA2MLA's two figures (arXiv 2502.14837) for one model: converts by every recipe, heals, draws.
#
#   runs/mha2mla.sh smollm-135m FOLDER
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
if [[ $# -ne 2 || -z "${hub[${1:-none}]:-}" ]]; then
  echo "usage: runs/mha2mla.sh {smollm-135m|smollm-360m|smollm-1.7b|llama-2-7b} FOLDER" >&2
  exit 2
fi
model=$1 folder=$2 original=${hub[$1]}
recipes=$(dirname "$0")/../recipes/mha2mla
if [[ $model == llama-2-7b ]]; then dim=128 middle=32 ranks=(64 32 16); else dim=64 middle=16 ranks=(32 16 8); fi
if [[ $model == smollm-1.7b || $model == llama-2-7b ]]; then title="MHA2MLA: $original"; else title="GQA2MLA: $original"; fi
read -ra launch <<<"${LAUNCH:-kvfold}"
read -ra options <<<"${OPTIONS:-}"

run() {
  echo "+ $*"
  [[ -n "${DRY:-}" ]] || "$@"
}

heal() { # name, model
  [[ -d "$folder/runs/$1/model" ]] ||
    run "${launch[@]}" heal "$2" "$folder/runs/$1" --config "$recipes/heal/$model.yaml" --resume "${options[@]}"
}

run mkdir -p "$folder/runs" "$folder/starts"
heal full-rope "$original"
for recipe in "$recipes/convert/head-dim-$dim"/*.yaml; do
  name=$(basename "$recipe" .yaml)
  [[ -d "$folder/starts/$name" ]] || run kvfold convert "$original" "$folder/starts/$name" --config "$recipe"
  heal "$name" "$folder/starts/$name"
done

curves() { # names of runs
  for name in "$@"; do echo "$name=$folder/runs/$name"; done
}
mapfile -t ablation < <(curves full-rope high low uniform 2-norm "2-norm-joint-$middle" "2-norm-split-$middle")
mapfile -t budgets < <(curves full-rope "${ranks[@]/#/2-norm-joint-}")
run kvfold plot "${ablation[@]}" --title "$title" --out "$folder/figure1.png" "$folder/figure1.svg"
run kvfold plot "${budgets[@]}" --title "$title" --out "$folder/figure2.png" "$folder/figure2.svg"
