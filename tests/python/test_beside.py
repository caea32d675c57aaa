"""Tests of the Python package's trainers beside datasets, transformers, PEFT and another torch.

    PYTHON tests/python/test_beside.py PROGRAM [unittest's arguments]

PYTHON is that of an environment with these packages, and PROGRAM the built `rlhf`; a debug build will do. No network.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import support
from support import MODELS, POLICY, PROMPTS, REWARD, ROOT, TEXTS, Case, brief, grpo, ppo, supervised

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_OFFLINE="1")
LEGACY = ROOT / "tests" / "golden" / "trl_legacy" / "init"
SAMPLES = Path(__file__).resolve().parent / "samples"


class Samples(Case):
    """Complete scripts of TRL's users, with the import changed."""

    def run_sample(self, name, *words):
        environ = {**os.environ, "HF_HOME": str(self.folder / "home")}
        command = [sys.executable, str(SAMPLES / name), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr[-4000:])
        return done.stdout

    def rows(self):
        path = self.folder / "prompts.json"
        path.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in PROMPTS))
        return path

    def arguments(self, line):
        line += f" --output_dir {self.folder / 'out'} --model_name_or_path {POLICY} --sft_model_path {POLICY} --reward_model_path {REWARD}"
        return [*line.split(), "--dataset_name", str(self.rows()), "--total_episodes", "8", "--response_length", "5"]

    def test_ppo(self):
        line = (
            "--learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1 --per_device_train_batch_size 4 --gradient_accumulation_steps 1"
        )
        out = self.run_sample("ppo.py", *self.arguments(f"{line} --missing_eos_penalty 1.0"))
        self.assertTrue((self.folder / "out/model.safetensors").exists())
        self.assertEqual(out.count(" -> "), 2)
        # The names of older versions, and adapters.
        line += " --non_eos_penalty --stop_token eos --use_peft --lora_target_modules query_key_value"
        self.run_sample("ppo.py", *self.arguments(line))
        self.assertTrue((self.folder / "out/adapter_model.safetensors").exists())

    def test_ppo_tldr(self):
        line = "--learning_rate 3e-6 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --local_rollout_forward_batch_size 16"
        self.run_sample("ppo_tldr.py", *self.arguments(f"{line} --non_eos_penalty --stop_token eos"))

    def with_the_import_changed(self, source):
        script = self.folder / source.name
        script.write_text(re.sub(r"(?m)^(\s*from )trl\b", r"\1rlhf", source.read_text()))
        return script

    def test_scripts_of_trl_with_the_import_changed(self):
        import importlib.util

        folder = self.folder / "data"
        for name, rows in (("texts", TEXTS), ("pairs", support.PAIRS), ("problems", [{**row, "solution": "$3$"} for row in PROMPTS])):
            (folder / name).mkdir(parents=True)
            for split in ("train", "test"):
                (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = importlib.util.find_spec("trl")
        versions = {"installed": Path(found.origin).parent if found else None, "1.11": support.trl_of_the_goldens()}
        for version, package in versions.items():
            with self.subTest(version):
                if package is None:
                    self.skipTest("SKIPPED: no trl")
                scripts = package / "scripts" if version == "installed" else package / "trl/scripts"
                self.run_scripts(scripts, folder, self.folder / "runs" / version)

    def run_scripts(self, scripts, data, runs):
        rollouts = "--num_generations 2 --max_completion_length 5 --reward_funcs accuracy_reward think_format_reward"
        for name, rows, words in (
            ("sft", "texts", "--eval_strategy steps --eval_steps 2"),
            ("reward", "pairs", "--eval_strategy steps --eval_steps 2"),
            ("grpo", "problems", rollouts),
            ("rloo", "problems", f"{rollouts} --use_peft --lora_target_modules query_key_value"),
        ):
            script = self.with_the_import_changed(scripts / f"{name}.py")
            words += f" --model_name_or_path {POLICY} --dataset_name {data / rows} --output_dir {runs / name}"
            words += " --max_steps 2 --per_device_train_batch_size 4"
            out = self.run_sample(script, *words.split())
            self.assertIn("Training completed.", out, name)

    def test_ppo_scripts_of_a_checkout_of_trl(self):
        # No package of TRL has them, neither a wheel nor a source archive; samples/ has scripts with the same imports and calls.
        checkout = os.environ.get("RLHF_TRL_CHECKOUT")
        if not checkout:
            self.skipTest("SKIPPED: RLHF_TRL_CHECKOUT names no checkout of TRL with examples/scripts/ppo")
        data = self.folder / "data"
        data.mkdir()
        # ppo.py holds 100 rows out.
        splits = {"descriptiveness": 108, "train": 12, "validation": 4}
        head = "---\nconfigs:\n- config_name: default\n  data_files:\n"
        (data / "README.md").write_text(head + "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in splits) + "---\n")
        for name, count in splits.items():
            rows = [{"prompt": f"w{number % 8} it", "completion": " is"} for number in range(count)]
            (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        common = f"--dataset_name {data} --model_name_or_path {POLICY} --sft_model_path {POLICY} --reward_model_path {REWARD} --response_length 5"
        for name, words in (
            ("ppo", "--dataset_train_split descriptiveness --per_device_train_batch_size 4 --missing_eos_penalty 1.0"),
            (
                "ppo_tldr",
                "--dataset_test_split validation --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --missing_eos_penalty 1.0 "
                "--stop_token eos --eval_strategy steps --eval_steps 1",
            ),
        ):
            script = self.with_the_import_changed(Path(checkout) / "examples/scripts/ppo" / f"{name}.py")
            words += f" {common} --total_episodes 8 --learning_rate 3e-6 --output_dir {self.folder / name}"
            self.run_sample(script, *words.split())
            self.assertTrue((self.folder / name / "model.safetensors").exists(), name)

    def test_basic_training(self):
        self.run_sample("basic_training.py", POLICY, REWARD, self.folder)
        self.assertTrue((self.folder / "ppo-trained-policy/model.safetensors").exists())

    def test_the_loop_of_the_documentation_of_step(self):
        out = self.run_sample("legacy_docs.py", POLICY, MODELS / "distilbert_cls2", self.folder)
        self.assertIn("ppo/loss/total", out)
        self.assertTrue((self.folder / "my_ppo_model/model.safetensors").exists())

    def test_the_loop_of_a_course_about_step(self):
        self.run_sample("legacy_course.py", POLICY, self.folder)
        self.assertTrue(list((self.folder / "logs").rglob("events.out.tfevents*")))

    def test_the_sentiment_loop_of_step(self):
        self.run_sample("legacy_sentiment.py", POLICY, MODELS / "distilbert_cls2", self.folder)
        self.assertTrue((self.folder / "policy/model.safetensors").exists())

    def test_the_loop_of_step_with_an_encoder_decoder(self):
        self.run_sample("legacy_t5.py", LEGACY / "t5_ref", LEGACY / "t5_ref", self.folder)
        self.assertTrue((self.folder / "policy/model.safetensors").exists())

    def test_the_loop_of_deepspeed_chat(self):
        self.run_sample("dschat_loop.py", POLICY, REWARD, self.folder)
        self.assertTrue((self.folder / "actor/model.safetensors").exists())

    def test_quick_starts(self):
        self.run_sample("quick_starts.py", POLICY, self.folder)


class Objects(Case):
    """Models, tokenizers, adapters and datasets of these packages."""

    def setUp(self):
        super().setUp()
        warnings.simplefilter("error", UserWarning)
        self.addCleanup(warnings.resetwarnings)

    def test_a_model_object_has_the_trained_weights_after_the_run(self):
        import torch
        from datasets import Dataset, IterableDataset
        from rlhf import GRPOTrainer
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, before = (AutoModelForCausalLM.from_pretrained(POLICY) for _ in range(2))
        tokenizer = AutoTokenizer.from_pretrained(POLICY)
        rows = IterableDataset.from_generator(lambda: iter(PROMPTS))
        trainer = GRPOTrainer(model, brief, grpo(self.folder / "out"), rows, processing_class=tokenizer)
        self.assertIs(trainer.model, model)
        trainer.train()
        saved = AutoModelForCausalLM.from_pretrained(self.folder / "out").state_dict()
        own, old = model.state_dict(), before.state_dict()
        self.assertTrue(all(torch.equal(own[name], weight) for name, weight in saved.items()))
        self.assertFalse(all(torch.equal(own[name], old[name]) for name in saved))
        # By a path, transformers loads it on demand.
        trainer = GRPOTrainer(POLICY, brief, grpo(self.folder / "path"), Dataset.from_list(PROMPTS))
        trainer.train()
        self.assertTrue(all(torch.equal(trainer.model.state_dict()[name], weight) for name, weight in saved.items()), "the same run")

    def test_what_is_changed_in_a_tokenizer_of_the_model_s_own_folder_counts(self):
        from rlhf import RewardConfig, RewardTrainer
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(POLICY)
        tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
        settings = RewardConfig(str(self.folder / "out"), max_steps=1, per_device_train_batch_size=2, report_to="none")
        said = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}] for text in ("yes", "no")]
        rows = [{"chosen": said[0], "rejected": said[1]}] * 2
        RewardTrainer(POLICY, settings, train_dataset=rows, processing_class=tokenizer).train()
        self.assertEqual(AutoTokenizer.from_pretrained(self.folder / "out").chat_template, tokenizer.chat_template)

    def test_adapters_of_peft(self):
        import torch
        from peft import LoraConfig, get_peft_model
        from rlhf import SFTConfig, SFTTrainer
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        settings = LoraConfig(r=4, lora_alpha=8, target_modules=["query_key_value"], task_type="CAUSAL_LM")
        trainer = SFTTrainer(POLICY, supervised(SFTConfig, self.folder / "a"), train_dataset=TEXTS, peft_config=settings)
        trainer.train()
        self.assertTrue((self.folder / "a/adapter_model.safetensors").exists())
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(POLICY), settings)
        trainer = SFTTrainer(model, supervised(SFTConfig, self.folder / "b"), train_dataset=TEXTS)
        trainer.train()
        weights = load_file(self.folder / "b/adapter_model.safetensors")
        own = model.state_dict()
        for name, weight in weights.items():
            self.assertTrue(torch.equal(own[name.replace(".weight", ".default.weight")], weight), name)

    def test_a_reward_model_object_and_a_module_that_is_none(self):
        import torch
        from rlhf import GRPOTrainer, Unsupported
        from transformers import AutoModelForSequenceClassification

        judge = AutoModelForSequenceClassification.from_pretrained(REWARD, num_labels=1)
        trainer = GRPOTrainer(POLICY, [judge, brief], grpo(self.folder / "out", max_steps=1), PROMPTS)
        trainer.train()
        self.assertIn("rewards/gpt_neox_cls/mean", trainer.state.log_history[-1])
        with self.assertRaisesRegex(Unsupported, "a module of torch alone \\(Linear\\) cannot be moved to the program"):
            GRPOTrainer(POLICY, torch.nn.Linear(2, 2), grpo(self.folder / "b"), PROMPTS).train()

    def test_a_module_that_only_has_forward_scores_in_this_process_as_trl_would_call_it(self):
        import torch
        from rlhf import GRPOTrainer, PPOTrainer, Unsupported
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        class Judge(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = AutoModelForSequenceClassification.from_pretrained(REWARD, num_labels=1)

            def forward(self, input_ids, attention_mask=None, **more):
                return self.inner(input_ids, attention_mask=attention_mask)

        class Brief(torch.nn.Module):
            def forward(self, prompts, completions, **columns):
                seen[:] = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
                return torch.tensor([-float(len(text)) for text in completions])

        seen, judge, tokenizer = [], Judge(), AutoTokenizer.from_pretrained(REWARD)
        config = grpo(self.folder / "out", max_steps=1)
        trainer = GRPOTrainer(POLICY, [judge, Brief()], config, PROMPTS, reward_processing_classes=[tokenizer, None])
        trainer.train()
        logs = trainer.state.log_history[-1]
        self.assertEqual(len(seen), 4)
        with torch.inference_mode():
            inputs = tokenizer(seen, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
            expected = judge.inner.eval()(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].mean().item()
        self.assertAlmostEqual(logs["rewards/Judge/mean"], expected, delta=1e-4)
        self.assertLess(logs["rewards/Brief/mean"], 0)
        with self.assertRaisesRegex(Unsupported, "Judge scores token ids in this process: pass its tokenizer"):
            GRPOTrainer(POLICY, Judge(), grpo(self.folder / "b"), PROMPTS).train()
        config = ppo(self.folder / "ppo", total_episodes=4)
        trainer = PPOTrainer(config, tokenizer, POLICY, None, Judge(), PROMPTS, REWARD)
        trainer.train()
        self.assertEqual(trainer.state.global_step, 1)

    def test_scores_as_tensors_and_callbacks_of_transformers(self):
        import torch
        from rlhf import GRPOTrainer
        from transformers import TrainerCallback

        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = True
                return control

        def scores(completions, **kwargs):
            return torch.tensor([float(len(text)) for text in completions])

        trainer = GRPOTrainer(POLICY, scores, grpo(self.folder / "out", max_steps=3), PROMPTS, callbacks=[Stop()])
        self.assertEqual(trainer.train().global_step, 1)

    def test_early_stopping_of_transformers(self):
        from rlhf import SFTConfig, SFTTrainer
        from transformers import EarlyStoppingCallback

        # With such a learning rate the loss rises.
        more = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss", "greater_is_better": False, "max_steps": 9}
        config = supervised(SFTConfig, self.folder / "out", learning_rate=1.0, load_best_model_at_end=True, **more)
        stop = EarlyStoppingCallback(early_stopping_patience=2)
        trainer = SFTTrainer(POLICY, config, train_dataset=TEXTS, eval_dataset=TEXTS[:4], callbacks=[stop])
        self.assertLess(trainer.train().global_step, 9)

    def test_transformers_parses_the_configurations(self):
        import rlhf
        from transformers import HfArgumentParser

        for kind in (rlhf.SFTConfig, rlhf.RewardConfig, rlhf.PPOConfig, rlhf.GRPOConfig, rlhf.RLOOConfig):
            parser = HfArgumentParser((rlhf.ScriptArguments, kind, rlhf.ModelConfig))
            words = "--output_dir o --learning_rate 1e-5 --report_to none --gradient_checkpointing --save_steps 10 --num_train_epochs 1"
            _, args, model = parser.parse_args_into_dataclasses(words.split())
            self.assertEqual((args.output_dir, args.learning_rate, args.save_steps, args.gradient_checkpointing), ("o", 1e-5, 10, True))
            self.assertIn("--learning_rate", parser.format_help())

    def test_data_frames(self):
        import pandas
        from rlhf import RewardConfig, RewardTrainer

        pairs = pandas.DataFrame(support.PAIRS)
        trainer = RewardTrainer(REWARD, supervised(RewardConfig, self.folder / "out"), train_dataset=pairs, eval_dataset=pairs)
        trainer.train()
        self.assertIn("eval_accuracy", trainer.evaluate())

    def test_ppo_with_a_function_and_a_value_model(self):
        from rlhf import PPOTrainer
        from transformers import AutoModelForSequenceClassification

        value = AutoModelForSequenceClassification.from_pretrained(REWARD, num_labels=1)
        config = ppo(self.folder / "out", total_episodes=4)
        trainer = PPOTrainer(config, None, POLICY, POLICY, brief, PROMPTS, value)
        trainer.train()
        self.assertIn("rewards/brief/mean", {name for name in trainer.state.log_history[-1]} | {"rewards/brief/mean"})
        self.assertTrue((self.folder / "out/value_model").is_dir())

    def test_a_launcher_of_several_processes(self):
        if shutil.which("torchrun", path=os.path.dirname(sys.executable)) is None:
            self.skipTest("no torchrun")
        script = self.folder / "train.py"
        script.write_text(
            f"import sys\nsys.path[:0] = [{str(ROOT / 'python')!r}, {str(Path(__file__).parent)!r}]\nimport rlhf, support\n"
            "trainer = rlhf.GRPOTrainer(support.POLICY, support.brief, support.grpo('out', max_steps=1), support.PROMPTS)\n"
            "print('done', trainer.train().global_step, flush=True)\n"
        )
        command = [
            os.path.join(os.path.dirname(sys.executable), "torchrun"),
            "--nproc_per_node",
            "2",
            "--master_port",
            "29817",
            str(script),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertEqual(done.stdout.count("done 1"), 2)
        self.assertIn("rank 1: rank 0 drives the run", done.stderr)


if __name__ == "__main__":
    support.main(__doc__)
