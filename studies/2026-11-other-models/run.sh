#!/bin/sh
# run.sh WIKITEXT SOTU MODEL.gguf [CONTEXT BUDGET]: what the tables here are made of; records that are there are kept.
cd "$(dirname "$0")" || exit 1
measure="python ../2026-11-text-and-facts/measure.py --wikitext $1 --sotu $2 --model $3 --records records --context ${4:-1536} --budget ${5:-256}"
points="mean+k5v4+heads0.5 mean+k5v4+heads0.75 h2o+k5v4+heads0.75+recent64 h2o+k5v4+heads1+recent64 h2o+k4v3+heads0.75"
$measure --part report --texts wikitext-2 sotu-2 --only full $points h2o window+int4
$measure --part search --texts wikitext-2 sotu-2 --only full $points mean+k4v3+heads0.75 mean+k5v4+heads1 h2o+k4v3+heads1+recent64
$measure --part report --texts wikitext-2 sotu-2 --only "mean+k5v4+heads0.5, keys as they are" \
    "mean+k5v4+heads0.5, keys as they are, bits by layer" "window+int4, keys as they are" "window+int4, keys as they are, along tokens" \
    snapkv streamingllm keydiff kvzip kvzip+k5v4 snapkv-prompt mean+k4v3+heads0.75 mean+k5v4+heads1 h2o+k4v3+heads1+recent64
$measure --part report --texts built-in wikitext-3 --only full $points h2o window+int4
