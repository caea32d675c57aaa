"""Tests of `tools` and `environment_factory` of the Python package's trainers, without torch, transformers or datasets.

    python3 tests/python/test_tools.py PROGRAM [unittest's arguments]

PROGRAM is the built `rlhf`; a debug build will do. Standard library only; no network.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import support
from support import ROOT, Case, grpo, lines, ppo, untimed

# It writes a call of `add` with two numbers, and then an answer.
POLICY = str(ROOT / "tests/golden/tools_policy")
TOOLS = ROOT / "tests/golden/trl_tools"
SUMS = [{"prompt": [{"role": "user", "content": f"{a}+{b}"}], "answer": str(a + b)} for a, b in ((7, 7), (1, 5), (2, 6), (9, 3))]
LONG = {"max_completion_length": 100, "max_steps": 1}


def of_file():
    """The tools of the golden runs."""
    spec = importlib.util.spec_from_file_location("tools", TOOLS / "tools.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def short(completions, **kwargs):
    """A reward that differs between responses."""
    return [-float(len(completion[-1]["content"])) for completion in completions]


def results(completions):
    """The results of tools in completions that are lists of messages."""
    return [message["content"] for completion in completions for message in completion if message["role"] == "tool"]


class Tools(Case):
    """Functions of this process are tools of the policy, called as TRL calls them."""

    def train(self, tools, kind="GRPOTrainer", rewards=None, **more):
        import rlhf

        self.seen = []

        def seen(completions, **kwargs):
            self.seen.extend(completions)
            return short(completions)

        config = rlhf.RLOOConfig if kind == "RLOOTrainer" else rlhf.GRPOConfig
        args = config(str(self.folder / "out"), **{**support.ROLLOUTS, "num_generations": 2, **LONG, **more})
        trainer = getattr(rlhf, kind)(POLICY, [seen] if rewards is None else rewards, args, SUMS, tools=tools)
        trainer.train()
        return trainer

    def test_the_numbers_are_those_of_the_command_line(self):
        from rlhf import GRPOTrainer

        args = grpo(self.folder / "python", **{**LONG, "max_steps": 2})
        trainer = GRPOTrainer(POLICY, "exact:answer", args, SUMS, tools=[of_file().add])
        trainer.train()
        rows = self.folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
        words = "--per_device_train_batch_size 4 --num_sample_generations 0 --max_completion_length 100 --max_steps 2 --learning_rate 1e-3"
        words += f" --no_report --num_threads 1 --num_generations 2 --reward exact:answer --tools tools.add --dataset_name {rows}"
        places = ["--model_name_or_path", POLICY, "--output_dir", str(self.folder / "line")]
        environ = {**os.environ, "PYTHONPATH": str(TOOLS)}
        done = subprocess.run(
            [os.environ["RLHF_PROGRAM"], "grpo", *places, *words.split()], capture_output=True, text=True, env=environ
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.bytes_of(self.folder / "python"), self.bytes_of(self.folder / "line"))
        self.assertEqual(lines(self.folder / "python"), lines(self.folder / "line"))
        logs = trainer.state.log_history[-1]
        self.assertEqual(untimed(logs), lines(self.folder / "line")[-1])
        self.assertGreater(logs["tools/call_frequency"], 0.5)
        self.assertEqual(logs["tools/failure_frequency"], 0.0)

    def test_a_closure_has_its_state_on_the_thread_of_train(self):
        calls = []

        def add(a: int, b: int) -> int:
            """Adds.

            Args:
                a: One.
                b: Two.
            """
            print("in here")
            calls.append((os.getpid(), threading.current_thread()))
            return len(calls)

        trainer = self.train([add])
        logs = trainer.state.log_history[-1]
        self.assertEqual(set(calls), {(os.getpid(), threading.current_thread())})
        self.assertEqual(logs["tools/call_frequency"], len(calls) / 4)
        self.assertEqual(sorted(results(self.seen)), sorted(str(at + 1) for at in range(len(calls))))
        self.assertEqual(self.out.getvalue().count("in here"), len(calls))

    def test_a_coroutine_function_is_awaited(self):
        async def add(a: int, b: int) -> str:
            """Adds.

            Args:
                a: One.
                b: Two.
            """
            await asyncio.sleep(0.001)
            return f"later {a + b}"

        self.train([add], kind="RLOOTrainer")
        self.assertTrue(results(self.seen))
        self.assertTrue(all(result.startswith("later ") for result in results(self.seen)))

    def test_what_a_tool_raises_is_a_result(self):
        class Abacus:
            def add(self, a: int, b: int) -> int:
                """Adds.

                Args:
                    a: One.
                    b: Two.
                """
                raise ValueError("it is broken")

        trainer = self.train([Abacus().add])
        self.assertEqual(set(results(self.seen)), {"{'error': 'it is broken'}"})
        self.assertEqual(trainer.state.log_history[-1]["tools/failure_frequency"], 1.0)
        self.assertNotIn("Traceback", self.err.getvalue())

    def test_an_exit_in_a_tool_ends_the_run(self):
        calls = []

        def add(a: int, b: int) -> int:
            """Adds.

            Args:
                a: One.
                b: Two.
            """
            calls.append(a)
            raise SystemExit(3)

        with self.assertRaises(SystemExit):
            self.train([add])
        self.assertEqual(len(calls), 1)

    def test_the_limit_of_iterations_is_one_of_the_settings(self):
        from rlhf import GRPOTrainer, RunError

        self.assertLessEqual(self.train([of_file().add], max_tool_calling_iterations=1).state.log_history[-1]["tools/call_frequency"], 1.0)
        with self.assertRaisesRegex(RunError, "max_tool_calling_iterations = 3 has no effect without `?tools"):
            GRPOTrainer(POLICY, short, grpo(self.folder / "none", max_tool_calling_iterations=3), SUMS).train()

    def test_tools_by_their_names_are_those_of_the_program(self):
        with mock.patch.dict(os.environ, PYTHONPATH=f"{TOOLS}{os.pathsep}{os.environ['PYTHONPATH']}"):
            self.train(["tools.add"])
        self.assertTrue(results(self.seen))

    def test_an_interrupt_in_a_tool_stops_a_run_that_resumes_to_the_same_bits(self):
        from rlhf import GRPOTrainer

        left = [0]

        def add(a: int, b: int) -> int:
            """Adds.

            Args:
                a: One.
                b: Two.
            """
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
            return a + b

        more = {**LONG, "max_steps": 3, "save_steps": 1, "save_strategy": "steps"}
        GRPOTrainer(POLICY, "length:target=4", grpo(self.folder / "whole", **more), SUMS, tools=[add]).train()
        left[0] = 5
        trainer = GRPOTrainer(POLICY, "length:target=4", grpo(self.folder / "out", **more), SUMS, tools=[add])
        with self.assertRaisesRegex(KeyboardInterrupt, "stopped as requested"):
            trainer.train()
        self.assertLess(trainer.state.global_step, 3)
        self.assertEqual(trainer.train(resume_from_checkpoint=True).global_step, 3)
        self.assertEqual(self.bytes_of(self.folder / "out"), self.bytes_of(self.folder / "whole"))
        # The command line has no functions of this process.
        words = ["grpo", "--config", str(self.folder / "out.inputs/config.yaml"), "--output_dir", str(self.folder / "line")]
        environ = {name: value for name, value in os.environ.items() if name != "RLHF_DRIVER"}
        done = subprocess.run([os.environ["RLHF_PROGRAM"], *words], capture_output=True, text=True, env=environ)
        self.assertIn("expected the process of the trainer, whose functions and classes these are", done.stderr)

    def test_functions_of_a_script_are_tools_and_its_end_is_that_of_the_program(self):
        text = f"""
import os, sys
sys.path[:0] = [{str(ROOT / 'python')!r}, {str(Path(__file__).parent)!r}]
import rlhf, support, test_tools

def add(a: int, b: int) -> int:
    \"\"\"Adds.

    Args:
        a: One.
        b: Two.
    \"\"\"
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), 9)

args = support.grpo("out", **test_tools.LONG)
rlhf.GRPOTrainer(test_tools.POLICY, test_tools.short, args, test_tools.SUMS, tools=[add]).train()
"""
        path = self.folder / "script.py"
        path.write_text(text)
        process = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder)
        out, err = process.communicate(timeout=60)
        self.assertEqual(out.split()[:1], [str(process.pid)], err)
        # The program had the standard error too, and has said why it ends.
        self.assertIn("the process of the trainer is gone", err)

    def test_ppo_has_them_as_keywords(self):
        from rlhf import PPOTrainer

        args = ppo(self.folder / "out", response_length=100, total_episodes=4, new_reward_head=True, stop_token="eos")
        trainer = PPOTrainer(args, model=POLICY, reward_funcs=short, value_model=POLICY, train_dataset=SUMS, tools=[of_file().add])
        trainer.train()
        self.assertGreater(trainer.state.log_history[-1]["tools/call_frequency"], 0)

    def test_what_cannot_be_a_tool_is_refused_at_once(self):
        from rlhf import GRPOTrainer

        def untold(a: int) -> int:
            """Adds."""
            return a

        add = of_file().add
        for given, kind, expected in (
            ([lambda x: x], ValueError, "tools: `<lambda>` has no docstring, which tells the model what it does"),
            ([untold], ValueError, "tools: `untold`: its docstring has no description of the argument `a` below `Args:`"),
            ([dict], TypeError, "tools: expected functions, found dict"),
            ([3], TypeError, "tools: expected functions, found int"),
            ([add, add], ValueError, "tools: `add`: expected names that differ"),
        ):
            with self.assertRaises(kind) as caught:
                GRPOTrainer(POLICY, short, grpo(self.folder / "out"), SUMS, tools=given)
            self.assertEqual(str(caught.exception), expected)
        with self.assertRaisesRegex(Exception, "tool_memory = 1GB: expected none, as tools and environments run in this process"):
            GRPOTrainer(POLICY, short, grpo(self.folder / "out", tool_memory="1GB"), SUMS, tools=[add])


class Adding:
    """An environment that judges the last sum; its instances are counted."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, answer, **row):
        self.answer, self.found = answer, None
        return f" ({len(row['prompt'])})"

    def add(self, a: int, b: int) -> int:
        """Adds.

        Args:
            a: One.
            b: Two.
        """
        self.found = str(a + b)
        return a + b

    def get_reward(self):
        return 1.0 if self.found == self.answer else 0.25


class Silent:
    """An environment without a reward or a text."""

    def reset(self, **row):
        return None

    def add(self, a: int, b: int) -> str:
        """Adds.

        Args:
            a: One.
            b: Two.
        """
        return "silence"


class OfEnvironments(Case):
    """Classes of this process are environments of the policy."""

    def trainer(self, factory, rewards=None, rows=SUMS, output="out", **more):
        from rlhf import GRPOTrainer

        args = grpo(self.folder / output, **{**LONG, **more})
        return GRPOTrainer(POLICY, rewards, args, rows, environment_factory=factory)

    def test_a_class_gives_the_prompt_the_tools_and_the_reward(self):
        Adding.made = 0
        seen = []

        def noted(prompts, completions, **kwargs):
            seen.extend(prompts)
            return short(completions)

        trainer = self.trainer(Adding, [noted], max_steps=2)
        trainer.train()
        logs = trainer.state.log_history
        self.assertEqual(len(logs), 2)
        # One for each row of a batch, and they are reused.
        self.assertEqual(Adding.made, 4)
        self.assertTrue(all(0.25 <= line["rewards/Adding/mean"] <= 1.0 for line in logs), logs)
        self.assertTrue(all(prompt[-1]["content"].endswith(" (1)") for prompt in seen), seen)

    def test_its_reward_may_be_the_only_one(self):
        trainer = self.trainer(Adding)
        trainer.train()
        logs = trainer.state.log_history[-1]
        self.assertEqual(logs["reward"], logs["rewards/Adding/mean"])

    def test_the_column_environment_chooses_one_of_several(self):
        rows = [{**row, "environment": name} for row, name in zip(SUMS, ("sums", "quiet") * 2, strict=True)]
        seen = []

        def noted(completions, environment, **kwargs):
            seen.extend(zip(environment, completions, strict=True))
            return short(completions)

        self.trainer({"sums": Adding, "quiet": Silent}, [noted], rows).train()
        of = {name: results(completion for found, completion in seen if found == name) for name in ("sums", "quiet")}
        self.assertTrue(set(of["quiet"]) <= {"silence"} and "silence" not in of["sums"], of)
        with self.assertRaisesRegex(ValueError, "expected one of the environments `sums`, `quiet` in the column `environment`, found None"):
            self.trainer({"sums": Adding, "quiet": Silent}, [short], output="none").train()

    def test_an_exception_is_the_users_own(self):
        class Fragile(Adding):
            def get_reward(self):
                raise KeyError("lost")

        try:
            self.fail(self.trainer(Fragile).train())
        except KeyError as error:
            self.assertIn("get_reward", [frame.name for frame in traceback.extract_tb(error.__traceback__)])
        kept = self.trainer(Fragile, output="kept", environment_failure_reward=-2.0)
        kept.train()
        self.assertEqual(kept.state.log_history[-1]["reward"], -2.0)
        self.assertIn("KeyError: 'lost'", self.err.getvalue())

        class Unmade(Adding):
            def __init__(self):
                raise OSError("no board")

        with self.assertRaisesRegex(OSError, "no board"):
            self.trainer(Unmade, output="unmade").train()

    def test_what_cannot_be_an_environment_is_refused(self):
        with self.assertRaisesRegex(TypeError, "environment_factory: expected a class without arguments, found Adding"):
            self.trainer(Adding())
        with self.assertRaisesRegex(TypeError, "environment_factory: expected a class, or a map of names to classes, found a list"):
            self.trainer([Adding])
        with self.assertRaisesRegex(ValueError, "GRPOTrainer: reward_funcs: expected a reward function or model, found none"):
            self.trainer(None)

    def test_each_rank_has_instances_of_its_own(self):
        Adding.made = 0
        trainer = self.trainer(Adding, num_processes=2, per_device_train_batch_size=2)
        trainer.train()
        self.assertEqual(Adding.made, 4)
        self.assertIn("rewards/Adding/mean", trainer.state.log_history[-1])


if __name__ == "__main__":
    support.main(__doc__)
