"""Tests of the Python package's trainers, without torch, transformers or datasets.

    python3 tests/python/test_trainers.py PROGRAM [unittest's arguments]

PROGRAM is the built `rlhf`; a debug build will do. Standard library only; no network.
"""

import asyncio
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import support
from support import PAIRS, POLICY, PROMPTS, REWARD, ROOT, TEXTS, Case, brief, grpo, lines, ppo, supervised, untimed


class TheSameNumbers(Case):
    """Through Python, weights and metrics are those of the command line, to the bit."""

    def command(self, *words):
        done = subprocess.run([os.environ["RLHF_PROGRAM"], *map(str, words)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def rows(self, rows):
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def check(self, trainer, name="model.safetensors"):
        ours, theirs = self.folder / "python", self.folder / "line"
        self.assertEqual(self.bytes_of(ours, name), self.bytes_of(theirs, name))
        self.assertEqual(lines(ours), lines(theirs))
        self.assertEqual([untimed(logs) for logs in trainer.state.log_history], lines(theirs))

    def test_sft(self):
        from rlhf import SFTConfig, SFTTrainer

        trainer = SFTTrainer(POLICY, supervised(SFTConfig, self.folder / "python"), train_dataset=TEXTS)
        result = trainer.train()
        words = "--per_device_train_batch_size 4 --max_steps 2 --logging_steps 1 --no_report --num_threads 1 --max_grad_norm 1".split()
        self.command(
            "sft", "--model_name_or_path", POLICY, "--dataset_name", self.rows(TEXTS), "--output_dir", self.folder / "line", *words
        )
        # The logs of SFT have an epoch of their own.
        trainer.state.log_history = [dict(logs) for logs in trainer.state.log_history]
        self.check(trainer)
        self.assertEqual(result.global_step, 2)
        self.assertAlmostEqual(result.training_loss, sum(line["loss"] for line in lines(self.folder / "python")) / 2)

    def test_dpo_with_another_reference_model(self):
        from rlhf import DPOConfig, DPOTrainer

        args = supervised(DPOConfig, self.folder / "python")
        args.loss_type, args.loss_weights, args.beta = ["sigmoid", "sft"], [1.0, 0.5], 0.3
        other = self.folder / "other"
        shutil.copytree(POLICY, other)
        trainer = DPOTrainer(POLICY, other, args, train_dataset=PAIRS, eval_dataset=PAIRS[:2])
        trainer.train()
        words = "--per_device_train_batch_size 4 --max_steps 2 --logging_steps 1 --no_report --num_threads 1".split()
        words += "--loss_type sigmoid sft --loss_weights 1 0.5 --beta 0.3 --eval_dataset_name".split()
        rows = self.rows(PAIRS)
        held_out = self.folder / "held_out.jsonl"
        held_out.write_text("".join(json.dumps(row) + "\n" for row in PAIRS[:2]))
        self.command(
            *("dpo", "--model_name_or_path", POLICY, "--ref_model_name_or_path", other, "--dataset_name", rows),
            *("--output_dir", self.folder / "line", *words, held_out),
        )
        trainer.state.log_history = [dict(logs) for logs in trainer.state.log_history]
        self.check(trainer)
        self.assertIn("eval_rewards/margins", lines(self.folder / "python")[-1])
        # The copy that TRL's scripts pass is the reference that the program has by itself.
        self.assertNotIn("ref_model_name_or_path", DPOTrainer(POLICY, POLICY, args, train_dataset=PAIRS)._inputs(False))

    def test_distillation_and_gkd(self):
        from rlhf import DistillationConfig, DistillationTrainer, GKDConfig, GKDTrainer
        from rlhf.experimental.gkd import GKDTrainer as same

        self.assertIs(same, GKDTrainer)
        teacher = self.folder / "teacher"
        shutil.copytree(POLICY, teacher)
        args = supervised(DistillationConfig, self.folder / "python")
        args.max_completion_length, args.teacher_model_init_kwargs = 5, {"dtype": "float32"}
        trainer = DistillationTrainer(POLICY, str(teacher), args, PROMPTS)
        trainer.train()
        words = "--per_device_train_batch_size 4 --max_steps 2 --logging_steps 1 --no_report --num_threads 1".split()
        line = ["distill", "--model_name_or_path", POLICY, "--teacher_model_name_or_path", teacher]
        rows = ["--dataset_name", self.rows(PROMPTS), "--output_dir", self.folder / "line", *words]
        self.command(*line, *rows, *"--max_completion_length 5 --teacher_dtype float32".split())
        trainer.state.log_history = [dict(logs) for logs in trainer.state.log_history]
        self.check(trainer)
        self.assertIn("completions/mean_length", lines(self.folder / "python")[-1])
        # GKDTrainer has defaults of its own, and its teacher may be named in the settings.
        shutil.rmtree(self.folder / "python")
        shutil.rmtree(self.folder / "line")
        shutil.rmtree(self.folder / "python.inputs")
        args = supervised(GKDConfig, self.folder / "python")
        args.lmbda, args.teacher_model_name_or_path = 0.0, str(teacher)
        demos = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
        trainer = GKDTrainer(POLICY, args=args, train_dataset=demos)
        trainer.train()
        rows = ["--dataset_name", self.rows(demos), "--output_dir", self.folder / "line", *words]
        own = "--lmbda 0 --beta 0.5 --temperature 0.9 --loss_temperature 1 --max_new_tokens 128 --learning_rate 2e-5 --disable_dropout"
        self.command(*line, *rows, *own.split())
        trainer.state.log_history = [dict(logs) for logs in trainer.state.log_history]
        self.check(trainer)
        with self.assertRaisesRegex(ValueError, "GKDTrainer: teacher_model: expected a model to learn from, found none"):
            GKDTrainer(POLICY, args=GKDConfig("o"), train_dataset=demos)
        with self.assertRaisesRegex(Exception, "tools: responses have one turn here"):
            DistillationTrainer(POLICY, POLICY, DistillationConfig("o"), PROMPTS, tools=[print])

    def test_distillation_quantizes_no_model_that_is_not_asked_for(self):
        from rlhf import DistillationConfig, DistillationTrainer, LoraConfig, Unsupported

        def settings(teacher=None, **more):
            args = DistillationConfig(str(self.folder / "o"), teacher_model_init_kwargs=teacher, **more.pop("args", {}))
            return DistillationTrainer(POLICY, POLICY, args, PROMPTS, **more)._settings

        bits, lora = {"load_in_4bit": True}, LoraConfig(r=2)

        def of(found):
            return {name: found.get(name) for name in ("load_in_4bit", "teacher_load_in_4bit", "teacher_load_in_8bit")}

        both, of_teacher = (True, True, None), (None, True, None)
        same, eight = {"quantization_config": bits}, {"quantization_config": {"load_in_8bit": True}}
        for expected, teacher, more in (
            (of_teacher, bits, {}),
            (of_teacher, bits, {"peft_config": lora}),
            (both, same, {"quantization_config": bits, "peft_config": lora}),
            (both, same, {"args": {"model_init_kwargs": bits | same}, "peft_config": lora}),
            ((True, None, True), eight, {"quantization_config": bits, "peft_config": lora}),
            ((True, False, None), None, {"quantization_config": bits, "peft_config": lora}),
        ):
            self.assertEqual(tuple(of(settings(teacher, **more)).values()), expected, more)
        # What transformers' configuration does not say is not the student's.
        nested = {"quantization_config": {**bits, "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_type": "fp4"}, "peft_config": lora}
        found = settings(bits, **nested)
        names = ("bnb_4bit_quant_type", "use_bnb_nested_quant")
        self.assertEqual([found[name] for name in names], ["fp4", True])
        self.assertEqual([found[f"teacher_{name}"] for name in names], ["nf4", False])
        for words, teacher, more in (
            ("quantization_config: a student in 4 or 8 bits trains adapters", None, {"quantization_config": bits}),
            ("teacher_model_init_kwargs: attention = 1: expected revision", {"attention": 1}, {}),
            ("teacher_model_init_kwargs: quantization_config: expected load_in_4bit", {"quantization_config": {}}, {}),
        ):
            with self.assertRaisesRegex(Unsupported, words):
                settings(teacher, **more)

    def test_grpo_with_a_function(self):
        from rlhf import GRPOTrainer

        trainer = GRPOTrainer(POLICY, brief, grpo(self.folder / "python"), PROMPTS)
        trainer.train()
        (self.folder / "my_rewards.py").write_text(
            "def brief(completions, **kwargs):\n    return [-float(len(text)) for text in completions]\n"
        )
        words = "--per_device_train_batch_size 4 --num_sample_generations 0 --max_completion_length 5 --max_steps 2 --learning_rate 1e-3"
        words += " --no_report --num_threads 1 --num_generations 2 --reward python:my_rewards.brief"
        os.environ["PYTHONPATH"] = f"{self.folder}{os.pathsep}{os.environ['PYTHONPATH']}"
        self.command(
            "grpo",
            "--model_name_or_path",
            POLICY,
            "--dataset_name",
            self.rows(PROMPTS),
            "--output_dir",
            self.folder / "line",
            *words.split(),
        )
        self.check(trainer)

    def test_ppo_with_a_reward_model(self):
        from rlhf.experimental.ppo import PPOTrainer

        config = ppo(self.folder / "python", total_episodes=8)
        trainer = PPOTrainer(args=config, model=POLICY, ref_model=None, reward_model=REWARD, value_model=REWARD, train_dataset=PROMPTS)
        trainer.train()
        words = "--per_device_train_batch_size 4 --num_sample_generations 0 --response_length 5 --num_ppo_epochs 1 --total_episodes 8"
        words += f" --learning_rate 1e-3 --no_report --num_threads 1 --reward_model_path {REWARD} --value_model_path {REWARD}"
        self.command(
            "ppo", "--sft_model_path", POLICY, "--dataset_name", self.rows(PROMPTS), "--output_dir", self.folder / "line", *words.split()
        )
        self.check(trainer)


class Rewards(Case):
    """Reward functions run in this process, as TRL calls them."""

    def train(self, functions, rows=PROMPTS, **more):
        from rlhf import GRPOTrainer

        trainer = GRPOTrainer(POLICY, functions, grpo(self.folder / "out", **{"max_steps": 1, **more}), rows)
        trainer.train()
        return trainer

    def test_functions_of_all_kinds_with_columns_state_and_logs(self):
        calls = []

        def noted(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra):
            calls.append((os.getpid(), threading.current_thread(), prompts, answer, trainer_state.global_step, trainer_state.max_steps))
            log_metric("longest", max(map(len, completion_ids)))
            log_extra("seen", answer)
            return [None if number == "3" else 1.0 for number in answer]

        class Judge:
            def score(self, completions, **kwargs):
                return [2] * len(completions)

            def __call__(self, completions, **kwargs):
                return tuple(3.0 for _ in completions)

        async def later(completions, **kwargs):
            await asyncio.sleep(0.001)
            return [4.0] * len(completions)

        def scaled(completions, factor, **kwargs):
            return [factor * 1.0] * len(completions)

        functions = [
            noted,
            Judge().score,
            Judge(),
            later,
            functools.partial(scaled, factor=5),
            lambda completions, **kw: [6.0] * len(completions),
        ]
        trainer = self.train(functions, reward_weights=[1, 1, 1, 1, 1, 0.5])
        logs = trainer.state.log_history[-1]
        names = ["noted", "score", "Judge", "later", "scaled", "<lambda>"]
        found = [logs[f"rewards/{name}/mean"] for name in names]
        self.assertEqual(found[1:], [2.0, 3.0, 4.0, 5.0, 6.0])
        self.assertEqual(logs["reward/noted/longest"], 5.0)
        pid, thread, prompts, answer, step, total = calls[-1]
        self.assertEqual((pid, thread, step, total), (os.getpid(), threading.current_thread(), 0, 1))
        self.assertEqual((len(prompts), len(answer)), (4, 4))
        self.assertTrue(all(prompt == f"w{number} it" for prompt, number in zip(prompts, answer, strict=True)))

    def test_conversations_are_lists_of_messages(self):
        import rlhf

        seen = []

        def polite(prompts, completions, **kwargs):
            seen.extend([prompts[0], completions[0]])
            return [1.0] * len(completions)

        # A tiny tokenizer with a template.
        tokenizer = self.folder / "tokenizer"
        tokenizer.mkdir()
        (tokenizer / "tokenizer.json").write_bytes(Path(POLICY, "tokenizer.json").read_bytes())
        config = json.loads(Path(POLICY, "tokenizer_config.json").read_text())
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": rlhf.SIMPLE_CHAT_TEMPLATE}))
        rows = [{"prompt": [{"role": "user", "content": f"w{number}"}]} for number in range(8)]
        trainer = rlhf.GRPOTrainer(POLICY, polite, grpo(self.folder / "out", max_steps=1), rows, processing_class=str(tokenizer))
        trainer.train()
        self.assertEqual(seen[0][0]["role"], "user")
        self.assertEqual(seen[1][0]["role"], "assistant")

    def test_an_exception_is_the_users_own_and_the_run_can_be_resumed(self):
        from rlhf import GRPOTrainer

        broken = [True]

        def fragile(completions, trainer_state, **kwargs):
            if trainer_state.global_step == 2 and broken[0]:
                raise KeyError("lost")
            return [float(len(text)) for text in completions]

        trainer = GRPOTrainer(POLICY, fragile, grpo(self.folder / "out", max_steps=3), PROMPTS)
        try:
            self.fail(trainer.train())
        except KeyError as error:
            self.assertIn("fragile", [frame.name for frame in traceback.extract_tb(error.__traceback__)])
        self.assertNotIn("Traceback", self.err.getvalue())
        self.assertEqual(trainer.state.global_step, 2)
        broken[0] = False
        result = trainer.train(resume_from_checkpoint=True)
        self.assertEqual(result.global_step, 3)
        self.assertEqual([logs["step"] for logs in trainer.state.log_history], [1, 2, 3])
        whole = GRPOTrainer(POLICY, fragile, grpo(self.folder / "whole", max_steps=3), PROMPTS)
        whole.train()
        self.assertEqual(self.bytes_of(self.folder / "out"), self.bytes_of(self.folder / "whole"))

    def test_results_that_are_no_scores_are_named(self):
        from rlhf import GRPOTrainer

        for result, kind, expected in (
            (3.0, TypeError, "reward `odd`: expected a list with one score per completion, found float"),
            ([1.0], ValueError, "reward `odd`: expected 4 scores, one per completion, found 1"),
            (["a"] * 4, TypeError, "reward `odd`: expected a number or None, found str"),
        ):

            def odd(completions, result=result, **kwargs):
                return result

            with self.assertRaises(kind) as caught:
                GRPOTrainer(POLICY, odd, grpo(self.folder / f"out{kind.__name__}{len(expected)}", max_steps=1), PROMPTS).train()
            self.assertEqual(str(caught.exception), expected)

    def test_rules_of_answers_can_be_called(self):
        from rlhf.rewards import accuracy_reward, reasoning_accuracy_reward

        answers = ["The answer is $\\frac{6}{2}$", [{"role": "assistant", "content": "4 — \u20ac\n"}], "$3$"]
        found = accuracy_reward(completions=answers, solution=["$3$", "$3$", "no number"], prompts=["q"] * 3)
        self.assertEqual(found, [1.0, 0.0, None])
        self.assertEqual(
            reasoning_accuracy_reward(["<think>4</think> $\\boxed{3}$", "<think>$\\boxed{3}$</think> 4"], ["$3$", "$3$"]), [1.0, 0.0]
        )
        self.assertEqual(accuracy_reward([], []), [])

    def test_rules_and_models_are_computed_by_the_program(self):
        from rlhf import rewards

        rule = rewards.get_soft_overlong_punishment(max_completion_len=5, soft_punish_cache=2)
        trainer = self.train([rule, rewards.rule("length:target=4"), REWARD])
        names = {name for name in trainer.state.log_history[-1] if name.startswith("rewards/") and name.endswith("/mean")}
        self.assertEqual(names, {"rewards/soft_overlong_punishment_reward/mean", "rewards/length/mean", "rewards/gpt_neox_cls/mean"})
        with self.assertRaisesRegex(TypeError, "reward_funcs: expected a function, a model, a path or a name, found int"):
            self.train([3])


class Callbacks(Case):
    """transformers' hooks, in their order, with what they can ask for."""

    def test_the_hooks_of_a_run_and_what_they_ask_for(self):
        from rlhf import SFTConfig, SFTTrainer

        calls = []

        class Noted:
            def __getattr__(self, name):
                if not name.startswith("on_"):
                    raise AttributeError(name)

                def hook(args, state, control, **kwargs):
                    calls.append((name, state.global_step))
                    if name == "on_step_end":
                        control.should_save = state.global_step == 1
                        control.should_evaluate = state.global_step == 2
                        control.should_training_stop = state.global_step == 3
                    if name == "on_evaluate":
                        assert kwargs["metrics"]["eval_loss"] > 0
                    return control

                return hook

        config = supervised(SFTConfig, self.folder / "out", max_steps=9, logging_steps=9)
        trainer = SFTTrainer(POLICY, config, train_dataset=TEXTS, eval_dataset=TEXTS[:2], callbacks=[Noted()])
        result = trainer.train()
        self.assertEqual(result.global_step, 3)
        steps = [call for call in calls if call[0] not in ("on_epoch_begin", "on_epoch_end")]
        self.assertEqual(steps[:5], [("on_init_end", 0), ("on_train_begin", 0), ("on_step_begin", 0), ("on_step_end", 1), ("on_save", 1)])
        self.assertEqual(steps[5:9], [("on_step_begin", 1), ("on_step_end", 2), ("on_log", 2), ("on_evaluate", 2)])
        self.assertEqual(calls[-1], ("on_train_end", 3))
        self.assertTrue((self.folder / "out/checkpoint-1").is_dir())
        self.assertGreater(trainer.evaluate()["eval_loss"], 0)

    def test_an_exception_of_a_callback_ends_the_run_after_its_update(self):
        from rlhf import RewardConfig, RewardTrainer, TrainerCallback

        class Fails(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                raise LookupError("mine")

        trainer = RewardTrainer(REWARD, supervised(RewardConfig, self.folder / "out"), train_dataset=PAIRS, callbacks=[Fails])
        with self.assertRaisesRegex(LookupError, "mine"):
            trainer.train()
        self.assertTrue((self.folder / "out/checkpoint-1").is_dir())


class Ends(Case):
    """Runs that end early, and processes in unusual states."""

    def script(self, text, **more):
        """Starts a script in a process of its own."""
        head = f"import sys\nsys.path[:0] = [{str(ROOT / 'python')!r}, {str(Path(__file__).parent)!r}]\nimport rlhf, support\n"
        path = self.folder / "script.py"
        path.write_text(head + text)
        return subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder, **more)

    LONG = """
import time
def slow(completions, trainer_state, **kwargs):
    print("at", trainer_state.global_step, flush=True)
    time.sleep(0.5)
    return [1.0 * i for i, _ in enumerate(completions)]
trainer = rlhf.GRPOTrainer(support.POLICY, slow, support.grpo("out", max_steps=40), support.PROMPTS)
"""

    def test_ctrl_c_finishes_the_update_and_says_how_to_resume(self):
        process = self.script(self.LONG + "trainer.train()")
        for line in process.stdout:
            if line.startswith("at 1"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertIn(
            "KeyboardInterrupt: stopped as requested; trainer.train(resume_from_checkpoint=True) continues after update 2 of 40", err
        )
        self.assertTrue((self.folder / "out/checkpoint-2").is_dir())

    def test_an_interrupt_in_any_phase_stops_a_run_that_resumes_to_the_same_bits(self):
        from rlhf import GRPOTrainer
        from rlhf._run import Run

        more = {"max_steps": 3, "save_steps": 1, "save_strategy": "steps"}
        GRPOTrainer(POLICY, brief, grpo(self.folder / "whole", **more), PROMPTS).train()
        receive = Run.on_phase
        for phase in ("sampling", "scoring", "optimising", "saving"):
            seen = []

            def on_phase(run, connection, message, phase=phase, seen=seen):
                receive(run, connection, message)
                if message["phase"] == phase and not seen:
                    seen.append(phase)
                    signal.raise_signal(signal.SIGINT)

            trainer = GRPOTrainer(POLICY, brief, grpo(self.folder / phase, **more), PROMPTS)
            with mock.patch.object(Run, "on_phase", on_phase), self.assertRaisesRegex(KeyboardInterrupt, "stopped as requested"):
                trainer.train()
            self.assertEqual(seen, [phase])
            self.assertEqual(trainer.train(resume_from_checkpoint=True).global_step, 3)
            self.assertEqual(self.bytes_of(self.folder / phase), self.bytes_of(self.folder / "whole"), phase)

    def test_a_killed_program_is_one_line(self):
        text = self.LONG.replace(
            "time.sleep(0.5)", "import os, signal; os.kill(int(open('pid').read()), signal.SIGKILL) if trainer_state.global_step else 0"
        )
        text += """
import subprocess
class Popen(subprocess.Popen):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        open("pid", "w").write(str(self.pid))
subprocess.Popen = Popen
try:
    trainer.train()
except rlhf.RunError as error:
    print("found:", error)
"""
        out, err = self.script(text).communicate(timeout=60)
        self.assertIn("found: the program was killed by SIGKILL; the system does so where memory runs out", out, err)

    def test_a_killed_script_leaves_no_program(self):
        process = self.script(self.LONG + "trainer.train()")
        for line in process.stdout:
            if line.startswith("at 1"):
                break
        process.kill()
        process.communicate(timeout=60)
        for _ in range(300):
            if (self.folder / "out/model.safetensors").exists():
                break
            time.sleep(0.1)
        self.assertTrue((self.folder / "out/model.safetensors").exists(), "the program has saved what it had")

    def test_two_trainers_in_threads_and_a_closed_output(self):
        from rlhf import GRPOTrainer, SFTConfig, SFTTrainer

        results = {}

        def run(name, trainer):
            results[name] = trainer.train()

        closed = io.StringIO()
        closed.close()
        with redirect_stdout(closed):
            trainers = {
                "grpo": GRPOTrainer(POLICY, brief, grpo(self.folder / "a"), PROMPTS),
                "sft": SFTTrainer(POLICY, supervised(SFTConfig, self.folder / "b"), train_dataset=TEXTS),
            }
            threads = [threading.Thread(target=run, args=item) for item in trainers.items()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual({name: result.global_step for name, result in results.items()}, {"grpo": 2, "sft": 2})

    def test_a_reader_of_the_output_that_is_gone(self):
        text = """
trainer = rlhf.SFTTrainer(support.POLICY, support.supervised(rlhf.SFTConfig, "out"), train_dataset=support.TEXTS)
print(trainer.train().global_step, file=sys.stderr)
"""
        process = self.script(text)
        process.stdout.close()
        self.assertIn("2", process.stderr.read().splitlines())
        process.stderr.close()
        process.wait(60)

    def test_a_fork_after_import(self):
        text = """
import os
trainer = rlhf.SFTTrainer(support.POLICY, support.supervised(rlhf.SFTConfig, "out"), train_dataset=support.TEXTS)
child = os.fork()
if child == 0:
    trainer.args.output_dir = "other"
    print(rlhf.SFTTrainer(support.POLICY, trainer.args, train_dataset=support.TEXTS).train().global_step, flush=True)
    os._exit(0)
print(trainer.train().global_step, flush=True)
os.waitpid(child, 0)
"""
        out, err = self.script(text).communicate(timeout=60)
        self.assertEqual([line for line in out.splitlines() if not line.startswith("{")], ["2", "2"], err)

    def test_spawned_workers_train_and_score(self):
        text = """
import multiprocessing
def length(text):
    return float(len(text))
def pooled(completions, **kwargs):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(length, completions)
def train():
    trainer = rlhf.GRPOTrainer(support.POLICY, pooled, support.grpo("out", max_steps=1), support.PROMPTS)
    print("steps", trainer.train().global_step, flush=True)
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=train)
    worker.start()
    worker.join()
    print("code", worker.exitcode)
"""
        out, err = self.script(text).communicate(timeout=120)
        self.assertEqual([line for line in out.splitlines() if line.startswith(("steps", "code"))], ["steps 1", "code 0"], err)

    def test_errors_of_the_program_are_exceptions_with_its_lines(self):
        from rlhf import GRPOTrainer, RunError

        for config, rows, expected in (
            (grpo(self.folder / "a", beta=-1), PROMPTS, r"beta = -1: expected .*|kl_coef = -1: expected .*"),
            (grpo(self.folder / "b"), [{"question": "w"}], r"row 1|line 1"),
            (grpo(self.folder / "c", trust_remote_code=True), PROMPTS, "trust_remote_code"),
        ):
            with self.assertRaisesRegex(RunError, expected):
                GRPOTrainer(POLICY, brief, config, rows).train()
        with self.assertRaisesRegex(RunError, "/nowhere"):
            GRPOTrainer("/nowhere", brief, grpo(self.folder / "d"), PROMPTS).train()

    def test_several_ranks(self):
        from rlhf import GRPOTrainer

        # The rows of all ranks are scored in this process.
        trainer = GRPOTrainer(
            POLICY, brief, grpo(self.folder / "out", max_steps=1, num_processes=2, per_device_train_batch_size=2), PROMPTS
        )
        self.assertEqual(trainer.train().global_step, 1)


class Arguments(Case):
    """Configurations, datasets, and what cannot be honoured."""

    def test_a_configuration_has_trls_names_and_defaults(self):
        import rlhf

        config = rlhf.GRPOConfig("out", kl_coef=0.1, max_completion_length=7)
        self.assertEqual((config.beta, config.kl_coef, config.response_length, config.output_dir), (0.1, 0.1, 7, "out"))
        config.kl_coef = 0.2
        self.assertEqual(config.beta, 0.2)
        defaults = {
            rlhf.GRPOConfig: {
                "learning_rate": 1e-6,
                "beta": 0.0,
                "num_generations": 8,
                "max_completion_length": 512,
                "temperature": 1.0,
                "epsilon": 0.2,
            },
            rlhf.RLOOConfig: {"beta": 0.05, "num_generations": 2},
            rlhf.PPOConfig: {"learning_rate": 3e-6, "kl_coef": 0.05, "response_length": 53, "temperature": 0.7, "num_ppo_epochs": 4},
            rlhf.SFTConfig: {
                "learning_rate": 2e-5,
                "max_length": 1024,
                "max_grad_norm": 1.0,
                "per_device_train_batch_size": 8,
                "save_steps": 500,
            },
            rlhf.DPOConfig: {"learning_rate": 1e-6, "beta": 0.1, "max_length": 1024, "max_grad_norm": 1.0, "disable_dropout": True},
            rlhf.DistillationConfig: {"learning_rate": 1e-6, "beta": 1.0, "temperature": 1.0, "max_completion_length": 512},
            rlhf.GKDConfig: {
                "learning_rate": 2e-5,
                "lmbda": 0.5,
                "beta": 0.5,
                "temperature": 0.9,
                "max_new_tokens": 128,
                "max_length": 1024,
                "disable_dropout": True,
                "seq_kd": False,
            },
            rlhf.RewardConfig: {"learning_rate": 1e-4, "max_length": 1024, "max_grad_norm": 1.0},
        }
        for kind, expected in defaults.items():
            config = kind()
            self.assertEqual({name: getattr(config, name) for name in expected}, expected, kind.__name__)

    def test_a_wrong_name_is_an_error_with_the_nearest(self):
        import rlhf

        for named, expected in (
            ({"max_completion_len": 3}, "GRPOConfig: unknown setting `max_completion_len`; did you mean `max_completion_length`?"),
            ({"beta": 1, "kl_coef": 1}, "GRPOConfig: `kl_coef` and `beta` are the same setting: give one of them"),
            ({"reward_funcs": 1}, "`reward_funcs` is an argument of the trainer"),
        ):
            with self.assertRaises(TypeError) as caught:
                rlhf.GRPOConfig(**named)
            self.assertIn(expected, str(caught.exception))
        with self.assertRaisesRegex(AttributeError, "GRPOConfig has no setting `bta`; did you mean `beta`"):
            print(rlhf.GRPOConfig().bta)
        with self.assertRaisesRegex(AttributeError, "has no attribute 'GRPOTrainr'; did you mean `GRPOTrainer`"):
            print(rlhf.GRPOTrainr)

    def test_the_classes_are_those_that_the_program_describes(self):
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/python_configs.py", os.environ["RLHF_PROGRAM"], "--check"], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_what_cannot_be_honoured_is_refused_in_one_line(self):
        import rlhf

        class Mine(rlhf.GRPOTrainer):
            def compute_loss(self, *args):
                return 0

        class Module:
            def forward(self):
                pass

            def parameters(self):
                return []

            def __call__(self):
                pass

        sft = functools.partial(rlhf.SFTTrainer, POLICY, train_dataset=TEXTS)
        for make, expected in (
            (
                lambda: Mine(POLICY, brief, train_dataset=PROMPTS),
                "Mine.compute_loss: it would not be called: the program computes the loss",
            ),
            (lambda: sft(optimizers=(object(), None)), "optimizers: the program has the optimizer: set optim, learning_rate"),
            (lambda: sft(compute_metrics=len), "compute_metrics: the metrics of an evaluation are in state.log_history"),
            (lambda: rlhf.GRPOTrainer(POLICY, brief, train_dataset=PROMPTS, rollout_func=len), "rollout_func: the program samples the responses"),
            (
                lambda: rlhf.GRPOTrainer(POLICY, Module(), grpo(self.folder / "out"), PROMPTS).train(),
                "pass a function of the completions that calls it",
            ),
            (
                lambda: rlhf.PPOTrainer(model=POLICY, ref_model="other", reward_model=REWARD, train_dataset=PROMPTS),
                "ref_model: expected a copy",
            ),
        ):
            with self.assertRaises(rlhf.Unsupported) as caught:
                make()
            self.assertIn(expected, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))

    def test_rows_of_all_kinds(self):
        from rlhf._data import Data, rows, write

        class Frame:
            columns = ("prompt", "n")

            def itertuples(self, index, name):
                return iter([("a", 1), ("b", 2)])

        class Polars:
            def iter_rows(self, named):
                return iter([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}])

        expected = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
        for given in (expected, iter(expected), {"prompt": ["a", "b"], "n": [1, 2]}, Frame(), Polars()):
            self.assertEqual(list(rows(given, "train_dataset")), expected)
        path = str(self.folder / "rows.jsonl")
        for given, expected in (
            ([], "train_dataset: expected rows, found none"),
            (
                [{"prompt": "a", "image": object()}],
                "train_dataset: row 1: column `image`: expected texts, numbers, lists and maps, found object",
            ),
            ([3], "train_dataset: row 1: expected a map of columns, found int"),
            (
                {"train": object(), "test": object()},
                "expected one dataset, found a map of several (train, test): choose one, as in dataset['train']",
            ),
        ):
            with self.assertRaises(Exception) as caught:
                write(given, path, "train_dataset")
            self.assertIn(expected, str(caught.exception))
        settings = Data(str(self.folder)).settings(PROMPTS, PROMPTS[:2], separate=False)
        self.assertEqual(sorted(os.listdir(settings["dataset_name"][0])), ["test.jsonl", "train.jsonl"])

    def test_import_is_quick_and_needs_nothing(self):
        code = "import sys, time; t = time.perf_counter(); import rlhf; print(time.perf_counter() - t); assert 'torch' not in sys.modules"
        best = min(float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(3))
        self.assertLess(best, 0.1)

    def test_secrets_are_in_no_file_and_no_command_line(self):
        import rlhf

        config = grpo(self.folder / "out", hub_token="hf_secret", max_steps=1)
        seen = []

        def spy(completions, **kwargs):
            seen.append(
                "".join(
                    Path(f"/proc/{pid}/cmdline").read_text()
                    for pid in os.listdir("/proc")
                    if pid.isdigit() and os.path.exists(f"/proc/{pid}/cmdline")
                )
            )
            return [1.0] * len(completions)

        rlhf.GRPOTrainer(POLICY, spy, config, PROMPTS).train()
        self.assertNotIn("hf_secret", "".join(seen))
        self.assertNotIn("hf_secret", repr(config.to_dict()))
        for folder in (self.folder / "out", self.folder / "out.inputs"):
            for path in folder.rglob("*"):
                if path.is_file():
                    self.assertNotIn(b"hf_secret", path.read_bytes(), path)

    def test_the_arguments_of_scripts(self):
        from rlhf import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_kbit_device_map, get_peft_config, get_quantization_config

        parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
        path = self.folder / "run.json"
        path.write_text(json.dumps({"beta": 0.5, "dataset_name": "d", "env": {"RLHF_TEST_ENV": "1"}}))
        words = (
            f"--config {path} --output_dir o --learning-rate 1e-5 --use_peft --lora_target_modules q_proj v_proj --kl_coef 0.1 --bf16 false"
        )
        script, args, model = parser.parse_args_and_config(words.split())
        self.assertEqual((script.dataset_name, args.beta, args.learning_rate, args.bf16), ("d", 0.1, 1e-5, False))
        self.assertEqual(os.environ.pop("RLHF_TEST_ENV"), "1")
        self.assertEqual(get_peft_config(model).target_modules, ["q_proj", "v_proj"])
        self.assertIsNone(get_quantization_config(model))
        self.assertIsNone(get_kbit_device_map())
        with self.assertRaises(SystemExit):
            parser.parse_args_and_config(["--bta", "1"])
        self.assertIn("unknown argument `bta`; did you mean `beta`?", self.err.getvalue())


class Notebook(Case):
    """The page of a run in a notebook, without one."""

    def page(self, command, lines, samples=()):
        from rlhf._callbacks import TrainerState
        from rlhf._notebook import Display

        with mock.patch("importlib.import_module"):
            display = Display(command)
        for logs in lines:
            display.log(logs)
        display.samples(list(samples))
        display.begin(TrainerState(global_step=2, max_steps=4))
        return display.page()

    def test_the_table_has_the_metrics_that_matter_and_those_of_reward_functions(self):
        line = {"step": 1, "reward": 0.25, "kl": 0.5, "rewards/brief/mean": 0.25, "reward/brief/words": 12.5, "time/update": 3.0}
        page = self.page("grpo", [line, {**line, "step": 2}])
        self.assertIn("<th>step</th><th>reward</th><th>kl</th><th>reward/brief/words</th></tr>", page)
        self.assertIn("<td>1</td><td>0.25</td><td>0.5</td><td>12.5</td>", page)
        page = self.page("grpo", [{**line, "rewards/digits/mean": 1.0}])
        self.assertIn("<th>rewards/brief/mean</th><th>reward/brief/words</th><th>rewards/digits/mean</th>", page)

    def test_texts_keep_their_lines_and_are_no_code_of_the_page(self):
        samples = [{"prompt": [{"role": "user", "content": "a\n<b>"}], "response": "<script>", "score": 1.5}]
        page = self.page("ppo", [{"step": 1}], samples)
        self.assertIn('<td style="text-align: left; white-space: pre-wrap">a\n&lt;b&gt;</td>', page)
        self.assertIn("&lt;script&gt;</td><td>1.5</td>", page)
        self.assertNotIn("<script>", page)

    def test_turns_with_tools_have_calls_and_results(self):
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}
        messages = [
            {"role": "assistant", "content": "So:", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "3" * 300},
            {"role": "assistant", "content": "Done."},
        ]
        page = self.page("grpo", [], [{"prompt": "p", "response": "raw", "score": 1.0, "messages": messages}])
        lines = ["So:", "-&gt; add({&quot;a&quot;: 1, &quot;b&quot;: &quot;&lt;é&gt;&quot;})", f"&lt;- {'3' * 200}...", "Done."]
        self.assertIn("\n".join(lines) + "</td>", page)
        self.assertNotIn("raw", page)

    def test_the_time_left_has_hours(self):
        from rlhf._notebook import duration

        self.assertEqual([duration(seconds) for seconds in (9, 75, 3723)], ["0:09", "1:15", "1:02:03"])


class Results(Case):
    """What a trainer has after a run."""

    def test_completions_a_copy_of_the_model_and_the_report(self):
        from rlhf import RunError, SFTConfig, SFTTrainer
        from rlhf.experimental.ppo import PPOTrainer

        trainer = PPOTrainer(args=ppo(self.folder / "out", total_episodes=4), model=POLICY, reward_model=brief, train_dataset=PROMPTS)
        with self.assertRaisesRegex(RunError, "save_model: expected a trained model in .*; call train\\(\\) first"):
            trainer.save_model(str(self.folder / "copy"))
        trainer.train()
        trainer.save_model(str(self.folder / "copy"))
        self.assertEqual(self.bytes_of(self.folder / "copy"), self.bytes_of(self.folder / "out"))
        self.assertTrue((self.folder / "copy/tokenizer.json").exists())
        self.assertEqual(len(trainer.generate_completions()), 8)
        self.assertIn("iframe", trainer.report()._repr_html_())
        trainer = SFTTrainer(
            None,
            supervised(SFTConfig, self.folder / "sft"),
            train_dataset=TEXTS,
            processing_class=POLICY,
            config_name=f"{POLICY}/config.json",
        )
        trainer.train()
        self.assertTrue((self.folder / "sft/model.safetensors").exists())

    def test_a_push_passes_the_token_in_the_environment(self):
        from rlhf import SFTConfig, SFTTrainer

        trainer = SFTTrainer(POLICY, supervised(SFTConfig, self.folder / "out", hub_token="hf_secret"), train_dataset=TEXTS)
        (self.folder / "out").mkdir()
        (self.folder / "out/config.json").write_text("{}")
        with self.assertRaisesRegex(ValueError, "push_to_hub: expected hub_model_id in args, such as me/my-model, found none"):
            trainer.push_to_hub()
        trainer.args.hub_model_id = "me/model"
        # A program that prints what it is given.
        program = self.folder / "program"
        program.write_text('#!/bin/sh\necho "$@ token=$HF_TOKEN"\n')
        program.chmod(0o755)
        with mock.patch.dict(os.environ, RLHF_PROGRAM=str(program)):
            told = trainer.push_to_hub("mine", dataset_name="d")
        self.assertEqual(told, f"push {self.folder}/out me/model --commit_message mine token=hf_secret")

    def test_a_push_puts_the_trained_model_on_the_hub(self):
        from rlhf import RewardConfig, RewardTrainer, RunError, SFTConfig, SFTTrainer

        with support.hub() as call:
            config = supervised(SFTConfig, self.folder / "out", hub_model_id="me/tiny", hub_private_repo=True)
            trainer = SFTTrainer(POLICY, config, train_dataset=TEXTS)
            trainer.train()
            with self.assertRaisesRegex(RunError, "push_to_hub: .*(token|401)"):
                trainer.push_to_hub(token="hf_of_nobody")
            said = trainer.push_to_hub("My title", token=support.HUB_TOKEN, revision="v2")
            self.assertIn("me/tiny", said)
            found = call("/_tree/me/tiny/v2")
            self.assertTrue(found["private"])
            self.assertIn("My title", json.dumps(found))
            self.assertLessEqual({"config.json", "model.safetensors", "tokenizer.json", "README.md"}, {*found["files"], *found["large"]})
            # At the end of a run, by its setting; the token is in the environment of the program alone.
            config = supervised(SFTConfig, self.folder / "two", push_to_hub=True, hub_model_id="me/two", hub_token=support.HUB_TOKEN)
            SFTTrainer(POLICY, config, train_dataset=TEXTS).train()
            self.assertIn("model.safetensors", call("/_tree/me/two/main")["large"])
            # A language model by its name on the hub gets a score head, and a classifier keeps its own.
            with mock.patch.dict(os.environ, HF_HOME=str(self.folder / "home")):
                rewards = RewardTrainer("me/two", supervised(RewardConfig, self.folder / "reward", max_steps=1), train_dataset=PAIRS)
                self.assertEqual(rewards.train().global_step, 1)
                rewards.args.hub_model_id = "me/judge"
                rewards.push_to_hub(token=support.HUB_TOKEN)
                named = RewardTrainer("me/judge", supervised(RewardConfig, self.folder / "named"), train_dataset=PAIRS, eval_dataset=PAIRS)
                self.assertEqual(named.evaluate()["eval_loss"], rewards.evaluate(PAIRS)["eval_loss"])

    def test_an_evaluation_before_training(self):
        from rlhf import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer, Unsupported

        trainer = SFTTrainer(POLICY, supervised(SFTConfig, self.folder / "sft"), train_dataset=TEXTS, eval_dataset=TEXTS[:2])
        with self.assertRaises(Unsupported) as caught:
            trainer.evaluate()
        self.assertIn("sft evaluates during a run, and the last update has no evaluation; set eval_strategy", str(caught.exception))
        # A reward model that is given has scores already.
        trainer = RewardTrainer(REWARD, supervised(RewardConfig, self.folder / "reward"), train_dataset=PAIRS, eval_dataset=PAIRS[:4])
        before = trainer.evaluate()["eval_accuracy"]
        self.assertTrue(0 <= before <= 1)
        self.assertEqual(len(trainer.predict([{"prompt": "w1", "completion": " it"}])), 1)

    def test_the_best_model_is_the_one_of_the_trainer(self):
        from rlhf import SFTConfig, SFTTrainer

        more = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1.0, "max_steps": 3}
        trainer = SFTTrainer(POLICY, supervised(SFTConfig, self.folder / "out", **more), train_dataset=TEXTS, eval_dataset=TEXTS[:2])
        trainer.train()
        trainer.save_model(str(self.folder / "copy"))
        self.assertEqual(self.bytes_of(self.folder / "copy"), self.bytes_of(self.folder / "out/best"))
        losses = [logs["eval_loss"] for logs in trainer.state.log_history if logs["step"] > 0]
        self.assertEqual(trainer.state.best_global_step, 1 + losses.index(min(losses)))

    def test_a_reward_model_evaluates_and_predicts(self):
        from rlhf import RewardConfig, RewardTrainer

        # A language model gets a new head.
        trainer = RewardTrainer(POLICY, supervised(RewardConfig, self.folder / "out"), train_dataset=PAIRS, eval_dataset=PAIRS[:4])
        trainer.train()
        self.assertIn("eval_accuracy", trainer.evaluate())
        scores = trainer.predict([{"prompt": "w1", "completion": " it"}, {"prompt": "w2", "completion": " is"}])
        self.assertEqual(len(scores), 2)
        self.assertTrue(all(isinstance(score, float) for score in scores))


if __name__ == "__main__":
    support.main(__doc__)
