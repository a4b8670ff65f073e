#!/usr/bin/env bash
# The real packages from PyPI, apart from the helpers' .venv, for `make oracle` and `make bench`.
set -eu
venv=$1
if ! "$venv/bin/python" -c 'import torch, transformers, tokenizers, hydra, tensorboard' 2>/dev/null; then
    echo "making $venv (torch, transformers, tokenizers, verl's sources, ...): some GB"
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check torch transformers tokenizers safetensors accelerate pyarrow jinja2 \
        omegaconf hydra-core tensorboard tensordict numpy
    "$venv/bin/pip" install -q --disable-pip-version-check --no-deps verl==0.9.1 bitsandbytes
fi
