#!/bin/sh
# run.sh WIKITEXT SOTU QWEN.gguf: what the table here is made of; records that are there are kept.
cd "$(dirname "$0")" || exit 1
measure() { # MODEL CONTEXT BUDGET POLICY ...
    model=$1 context=$2 budget=$3
    shift 3
    python ../2026-11-text-and-facts/measure.py --wikitext "$wikitext" --sotu "$sotu" --model "$model" --context "$context" --budget "$budget" \
        --part report --texts wikitext-2 sotu-2 --records "records/$context-$budget" --only "$@"
}
wikitext=$1 sotu=$2
points="mean+k5v4+heads0.5 h2o+k4v3+heads0.75 h2o+k3v3+heads1"
ladder="mean+ladder-half-overlap+k4v3+heads0.75"
for model in smollm2-135m "$3"; do
    measure "$model" 2048 128 full h2o $points mean+k4v3+heads0.75 h2o+k5v4+heads0.75+recent64 window+int4 kvzip+k5v4 kvzip+k4v3+refit kvzip+k4v3+refit+bias $ladder
done
measure smollm2-135m 2048 64 full mean+k4v3+heads0.75 $ladder mean+ladder-half-overlap+k3v2+heads0.75 kvzip+k5v4 kvzip+k4v3 kvzip+k4v3+refit kvzip+k4v3+refit+bias
measure "$3" 2048 128 kvzip+k3v2+refit+bias
measure "$3" 2048 64 full kvzip+k4v3 kvzip+k3v2 kvzip+k4v3+refit+bias kvzip+k3v2+refit+bias
measure smollm2-135m 2048 256 full h2o $points kvzip+k5v4
measure smollm2-135m 4096 512 full $points kvzip+k5v4
