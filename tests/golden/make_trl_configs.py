#!/usr/bin/env python3
"""Writes every field of TRL's `trl grpo`, `trl rloo` and `trl dpo`, and of its distillation script, with its default, as a file for --config.

    python make_trl_configs.py          # with trl 1.11.0; writes trl_configs/{grpo,rloo}.yaml
    python make_trl_configs.py dpo      # with trl 1.16.0; writes trl_configs/{dpo,distillation}.yaml

The fields are those of the four dataclasses that each script parses. Tests check that the commands of rlhf accept each file as it is, and
know each key.
"""
import dataclasses
import enum
import json
import sys
from pathlib import Path

import trl
from trl import DatasetMixtureConfig, ModelConfig

OUT = Path(__file__).parent / "trl_configs"


def default(field):
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = None
    return value.value if isinstance(value, enum.Enum) else value


def main():
    OUT.mkdir(exist_ok=True)
    if sys.argv[1:] == ["dpo"]:
        classes = [("dpo", trl.ScriptArguments, trl.DPOConfig), ("distillation", trl.ScriptArguments, trl.DistillationConfig)]
    else:
        from trl.scripts.grpo import GRPOScriptArguments
        from trl.scripts.rloo import RLOOScriptArguments

        classes = [("grpo", GRPOScriptArguments, trl.GRPOConfig), ("rloo", RLOOScriptArguments, trl.RLOOConfig)]
    for name, script, config in classes:
        lines = [f"# Every field of `trl {name}`, trl {trl.__version__}, with its default; written by make_trl_configs.py."]
        seen = set()
        for cls in [script, config, ModelConfig, DatasetMixtureConfig]:
            for field in dataclasses.fields(cls):
                if field.init and field.name not in seen:
                    seen.add(field.name)
                    lines.append(f"{field.name}: {json.dumps(default(field))}")
        (OUT / f"{name}.yaml").write_text("\n".join(lines) + "\n")


main()
