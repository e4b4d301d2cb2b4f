#!/bin/sh
# small.sh WIKITEXT SOTU MODEL: the search parts at 1/16 of 2048 tokens; records that are there are kept.
cd "$(dirname "$0")" || exit 1
wikitext=$1 sotu=$2 model=$3
ladder=mean+ladder-half-overlap
python measure.py --wikitext "$wikitext" --sotu "$sotu" --model "$model" --context 2048 --budget 128 --part search \
    --texts built-in wikitext-2 sotu-2 --records records/2048-128 --only full \
    mean+k5v4+heads0.5 mean+k5v4+heads0.75 mean+k4v3+heads0.75 mean+k4v3+heads1 mean+k4v2+heads1 mean+k3v3+heads1 mean+k3v2+heads0.5 mean+k3v2+heads0.75 mean+k3v2+heads1 \
    $ladder+k5v4+heads0.75 $ladder+k4v3+heads0.75 $ladder+k4v3+heads1 $ladder+k4v2+heads0.75 $ladder+k3v3+heads0.75 $ladder+k3v2+heads0.75 \
    h2o+k5v4+heads1 h2o+k4v3+heads0.75 h2o+k3v3+heads1 h2o+k3v2+heads0.75 h2o+k3v2+heads1
