"""Tests of gpu_window.py without a GPU: its stages, what it reads of their output, limits, and that a later call continues."""

import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import gpu_matrix  # noqa: E402
import gpu_speeds  # noqa: E402
import gpu_stages  # noqa: E402
import gpu_window  # noqa: E402
from gpu_stages import Stage  # noqa: E402

TESTS = """
running 3 tests
test models::logits ... ok
test models::gradients ... FAILED
test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 40 filtered out; finished in 1.2s
"""
MATRIX = """
expected 3 kinds
kind ppo: cpu 0, gpu 0, 90 numbers, largest difference loss/policy_avg 0.0003, ok
    cuda: error: out of memory
kind sft bf16: cpu 0, gpu 1, 0 numbers, largest difference none 0, 0 lines of metrics, expected 3; no numbers
kind zero 2, one rank: cpu 0, gpu 0, 90 numbers, largest difference loss 0.0001, no kernel was started
expected 2 resumes
resume ppo: twice same, resumed same
resume grpo: twice other, resumed other
"""
PROFILE = """== in graphs: 745 kernels, span 4.2 ms, busy 3.1 ms
   gaps between kernels of a graph: 0.60 us on average, of 744
    1.04 ms      24 x    43.3 us  fmha_cutlassF
    0.97 ms     193 x     5.0 us  gemm
"""


class Reading(unittest.TestCase):
    def test_counts_and_names_of_rust_tests_are_read(self):
        self.assertEqual(gpu_stages.of_tests(TESTS), {"passed": 1, "failures": 1, "failed": ["models::gradients"]})
        self.assertEqual(gpu_stages.of_tests(TESTS + TESTS)["passed"], 2)
        self.assertEqual(gpu_stages.of_tests("killed")["failures"], 1)
        none = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 40 filtered out; finished in 0s"
        self.assertEqual(gpu_stages.of_tests(none)["failures"], 1)

    def test_kinds_and_resumes_are_read(self):
        found = gpu_stages.of_matrix(MATRIX)
        failed = ["sft bf16: 0 lines of metrics, expected 3; no numbers", "zero 2, one rank: no kernel was started"]
        self.assertEqual((found["kinds"], found["failures"], found["failed"]), (3, 2, failed))
        self.assertEqual(found["largest"][0], ["ppo: loss/policy_avg", 0.0003])
        self.assertEqual((found["resumes"], found["other_bits"]), (2, ["grpo: twice other, resumed other"]))
        self.assertEqual(gpu_stages.of_matrix("nothing")["failures"], 1)
        cut = gpu_stages.of_matrix("\n".join(MATRIX.splitlines()[:3]))
        self.assertEqual((cut["failures"], cut["failed"]), (1, ["2 did not end"]))

    def test_metrics_that_are_none_are_missing_or_differ_too_much_are_wrong(self):
        good = [{"loss": 1.0, "kl": 0.5, "note": None, "eps": 3, "command": "ppo"}, {"loss": 2.0, "kl": 0.5, "note": None}]

        def wrong(found, name="ppo"):
            return gpu_matrix.compared(name, good, found)[2]

        self.assertEqual(gpu_matrix.compared("ppo", good, good), (4, (0.0, "loss"), []))
        self.assertEqual(wrong([good[0] | {"eps": 9}, good[1] | {"loss": 2.0001}]), [])
        self.assertEqual(wrong([good[0], good[1] | {"loss": 2.1}]), ["loss differs by 0.05, allowed 0.003"])
        for other, said in ((None, "loss of line 2 is None, expected 2.0"), (float("nan"), "loss of line 2 is nan, expected 2.0")):
            self.assertEqual(wrong([good[0], good[1] | {"loss": other}]), [said])
            self.assertEqual(wrong([good[0], good[1] | {"loss": other}], "ppo bf16"), [said])
        self.assertEqual(wrong([good[0], {"loss": 2.0, "note": None}]), ["kl of line 2 is None, expected 0.5"])
        self.assertEqual(wrong([good[0], good[1] | {"note": 1.0}]), ["note of line 2 is 1.0, expected None"])
        self.assertEqual(wrong(good[:1]), ["1 lines of metrics, expected 2"])
        self.assertEqual(gpu_matrix.compared("ppo", [], [])[2], ["no numbers"])
        # Where tokens differ some numbers may, but not most.
        self.assertEqual(wrong([good[0] | {"loss": 9.0}, good[1]], "ppo bf16"), [])
        self.assertEqual(len(wrong([{**line, "loss": 9.0, "kl": 9.0} for line in good], "ppo bf16")), 1)

    def test_json_lines_are_read_and_an_error_in_one_is_a_failure(self):
        lines = '{"stage": "sft trl", "median": 0.7}\nnoise\n{"stage": "ppo", "error": "killed"}\n'
        self.assertEqual(gpu_stages.of_json(lines), {"sft trl": {"median": 0.7}, "ppo": {"error": "killed"}, "failures": 1, "failed": ["ppo"]})
        self.assertEqual(gpu_stages.of_json("")["failures"], 1)
        found = gpu_stages.of_json(lines, ("sft trl", "ppo", "decode 1"))
        self.assertEqual((found["failures"], found["failed"]), (2, ["ppo", "decode 1"]))
        for line in ('{"stage": "sft trl", "median": null}', '{"stage": "sft trl", "median": NaN}', '{"stage": "sft trl"}'):
            self.assertEqual(gpu_stages.of_json(line, ("sft trl",))["failed"], ["sft trl"], line)

    def test_of_doctor_the_gpu_and_what_is_broken_are_read(self):
        def said(*checks):
            return "| NVIDIA-SMI {x} |\n" + json.dumps({"version": "1", "checks": [dict(zip(("name", "status", "text"), c)) for c in checks]}, indent=2)

        good = ("gpu", "ok", "1 GPU: NVIDIA H200 (140 GiB, compute capability 9.0); driver 580")
        self.assertEqual(gpu_stages.of_doctor(said(("cpu", "ok", "x"), good)), {"gpu": good[2], "failures": 0, "failed": []})
        self.assertEqual(gpu_stages.of_doctor(said(good, ("graphs", "failure", "no library")))["failed"], ["graphs: no library"])
        self.assertEqual(gpu_stages.of_doctor(said(("gpu", "ok", "no NVIDIA GPU: runs use the CPU")))["failures"], 1)
        self.assertEqual(gpu_stages.of_doctor("rlhf: error: no such flag")["failures"], 1)

    def test_a_profile_is_read(self):
        found = gpu_stages.of_profile(PROFILE)["in graphs"]
        self.assertEqual((found["kernels"], found["span_ms"], found["busy_ms"]), (745, 4.2, 3.1))
        self.assertEqual(found["longest"][1], [0.97, 193, "gemm"])
        self.assertEqual(gpu_stages.of_profile(PROFILE, ("sft rlhf bf16",))["failures"], 1)
        line = '{"stage": "sft rlhf bf16", "median": 0.8}\n'
        self.assertEqual(gpu_stages.of_profile(line + PROFILE, ("sft rlhf bf16",))["failures"], 0)

    def test_stages_with_kernels_allow_nothing_else(self):
        stages = {stage.name: stage for stage in gpu_stages.STAGES}
        named = [stage.variables.get("RLHF_KERNELS") for name, stage in stages.items() if name.endswith(", kernels")]
        self.assertEqual(set(named), {"cuda-only"})
        self.assertEqual(len(named), 6)

    def test_a_run_with_kernels_that_starts_none_has_failed(self):
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "rlhf"
            for starts, fails in (("12 starts of 3", False), ("0 starts of 0", True)):
                program.write_text(f"#!/bin/sh\necho 'kernels: {starts} kernels' >&2\n")
                program.chmod(0o755)
                with mock.patch.dict(os.environ, {"RLHF_KERNELS": "cuda-only"}):
                    if fails:
                        self.assertRaises(gpu_speeds.runs.Failed, gpu_speeds.watch, [program, "sft"])
                    else:
                        gpu_speeds.watch([program, "sft"])
                gpu_speeds.watch([program, "sft"])

    def test_the_matrix_has_the_kinds_of_all_commands(self):
        with tempfile.TemporaryDirectory() as folder:
            kinds = gpu_matrix.Matrix("rlhf", Path(folder)).kinds()
        self.assertGreater(len(kinds), 60)
        self.assertEqual({words[0] for words in kinds.values()}, {"ppo", "sft", "reward", "grpo", "rloo", "dpo", "generate", "launch"})


class Running(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        pack = self.folder / "pack"
        pack.mkdir()
        about = {"commit": "abc", "root": str(gpu_window.ROOT), "tested_program": str(self.folder / "debug/rlhf")}
        (pack / "about.json").write_text(json.dumps(about))
        for name, value in (("PACK", pack), ("card", lambda: "NVIDIA H100, 81559 MiB, 580.1")):
            patch = mock.patch.object(gpu_window, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def run_window(self, stages, **more):
        args = {"out": self.folder / "out", "work": self.folder / "work", "seconds": 60, "continues": [], "only": [], "again": [], "then": None, "list": False}
        said = io.StringIO()
        with mock.patch.object(gpu_window, "STAGES", stages), redirect_stdout(said):
            code = gpu_window.run(SimpleNamespace(**(args | more)))
        return code, said.getvalue()

    def results(self):
        return [json.loads(line) for line in (self.folder / "out/results.jsonl").read_text().splitlines()]

    def test_stages_run_in_order_and_a_later_call_continues_with_those_that_are_not_done(self):
        counter = self.folder / "count"
        good = Stage("good", "", 20, lambda _: f"echo x >> {counter}; echo ok", lambda text: {"said": text.strip()}, least=1)
        bad = Stage("bad", "", 20, lambda _: "echo broken; exit 7", least=1)
        code, _ = self.run_window([good, bad])
        self.assertEqual((code, [(r["stage"], r["state"]) for r in self.results()]), (1, [("good", "done"), ("bad", "failed")]))
        self.assertEqual((self.results()[0]["numbers"], self.results()[1]["code"]), ({"said": "ok"}, 7))
        self.assertIn("broken", self.results()[1]["end"])
        code, said = self.run_window([good], then="true")
        self.assertEqual((code, counter.read_text()), (0, "x\n"))
        self.assertIn("good: done before", said)
        self.run_window([good], again=["good"])
        self.assertEqual(counter.read_text(), "x\nx\n")
        # Results of another machine, with a line that was cut off.
        before, ran = self.folder / "before.jsonl", self.results()[1]["ran"]
        before.write_text(f'{{"stage": "bad", "state": "done", "ran": "{ran}"}}\n{{"stage": "go')
        self.assertEqual(self.run_window([bad], continues=[before])[0], 0)
        before.write_text('{"stage": "bad", "state": "done", "ran": "other"}\n{"stage": "bad", "state": "done", "commit": "abc"}\n')
        self.assertEqual(self.run_window([bad], continues=[before])[0], 1)
        self.assertIn("| bad | failed |", gpu_window.table((self.folder / "out/results.jsonl").read_text().splitlines()))

    def test_a_stage_runs_again_where_its_command_variables_programs_or_card_are_others(self):
        stage = Stage("one", "", 20, lambda _: "true", needs=("rlhf",), least=1)
        about = {"files": {"rlhf": "1"}}
        of = gpu_window.hashes_of
        first = of([stage], about, "NVIDIA H100, 81559 MiB, 580.1")
        self.assertEqual(first, of([stage], about, "NVIDIA H100, 81559 MiB, 590.2"))
        for other, files, card in (
            (stage, {"files": {"rlhf": "2"}}, "NVIDIA H100"),
            (stage, about, "NVIDIA H200"),
            (replace(stage, command=lambda _: "false"), about, "NVIDIA H100"),
            (replace(stage, variables={"RLHF_SUMS": "ordered"}), about, "NVIDIA H100"),
        ):
            self.assertNotEqual(of([other], files, card), first)

    def test_the_command_of_then_runs_in_each_call(self):
        counter = self.folder / "thens"
        for _ in range(2):
            self.assertEqual(self.run_window([], then=f"echo x >> {counter}")[0], 0)
        self.assertEqual(counter.read_text(), "x\nx\n")

    def test_a_stage_without_a_result_or_with_one_that_cannot_be_read_has_failed(self):
        silent = Stage("silent", "", 20, lambda _: "true", lambda text: {}, least=1)
        odd = Stage("odd", "", 20, lambda _: "echo '{'", json.loads, least=1)
        code, _ = self.run_window([silent, odd])
        self.assertEqual((code, [r["state"] for r in self.results()]), (1, ["failed", "failed"]))

    def test_a_stage_is_stopped_at_its_limit_with_what_it_started_and_one_without_time_does_not_start(self):
        slow = Stage("slow", "", 0.5, lambda _: "sleep 30 & wait", least=0.1)
        code, _ = self.run_window([slow])
        self.assertEqual((code, self.results()[0]["state"]), (1, "timeout"))
        self.assertLess(self.results()[0]["seconds"], 10)
        later = Stage("later", "", 50, lambda _: "true", least=40)
        code, said = self.run_window([later], seconds=30)
        self.assertEqual(code, gpu_window.NO_TIME)
        self.assertIn("NO TIME for later", said)

    def test_a_failure_in_the_numbers_and_a_file_that_was_not_packed_are_no_success(self):
        tests = Stage("tests", "", 20, lambda _: f"cat <<'E'\n{TESTS}\nE", gpu_stages.of_tests, least=1)
        unpacked = Stage("unpacked", "", 20, lambda _: "true", needs=("test-main",), least=1)
        code, _ = self.run_window([tests, unpacked])
        self.assertEqual((code, [r["state"] for r in self.results()]), (1, ["failed", "skipped"]))
        self.assertEqual(self.results()[1]["reason"], "not packed: test-main")


class Command(unittest.TestCase):
    def test_without_a_gpu_every_stage_is_skipped_loudly_and_the_exit_code_says_so(self):
        with tempfile.TemporaryDirectory() as empty:
            ran = subprocess.run([sys.executable, HERE / "gpu_window.py", "run"], capture_output=True, text=True, env=dict(os.environ, PATH=empty))
        self.assertEqual((ran.returncode, ran.stderr), (3, ""))
        self.assertEqual(ran.stdout.count("SKIPPED"), len(gpu_stages.STAGES))

    def test_stages_have_names_of_their_own_and_an_unknown_one_is_refused(self):
        names = [stage.name for stage in gpu_stages.STAGES]
        self.assertEqual(len(set(names)), len(names))
        place = gpu_stages.Place(Path("out"), Path("work"))
        for stage in gpu_stages.STAGES:
            self.assertTrue(stage.command(place) and stage.about and stage.limit >= stage.least, stage.name)
        ran = subprocess.run([sys.executable, HERE / "gpu_window.py", "run", "--only", "nothing"], capture_output=True, text=True)
        self.assertEqual(ran.returncode, 2)
        self.assertIn("no stage nothing", ran.stderr)


if __name__ == "__main__":
    unittest.main()
