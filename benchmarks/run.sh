#!/usr/bin/env bash
# Runs all that needs a CUDA device: the tests marked cuda, then each bench. Results go to FOLDER, by default benchmarks/results.
#   benchmarks/run.sh [FOLDER] [BENCH ...]
# With BENCHes named, only these run. PYTHON picks the interpreter. A failure doesn't stop the others, but the exit code is 1 then.
set -u
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results}
shift $(($# > 0 ? 1 : 0))
python=${PYTHON:-python3}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
name=$("$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-"))') || exit 2
status=0
if [ $# -eq 0 ]; then
  "$python" -m pytest -q -m cuda -p no:cacheprovider tests || status=1
  set -- breaks runner memory ttft prime growth kinds steps encoder ranks engine
fi
for bench in "$@"; do
  if [ "$bench" = engine ]; then
    "$python" benchmarks/engine.py "$folder/$name-engine.md" || status=1
  else
    "$python" -m segue bench "$bench" -f "$folder/$name-$bench.md" || status=1
  fi
done
exit $status
