"""Tests of the benchmark's tables: python3 benchmarks/test_table.py"""

import json
import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import table  # noqa: E402

EPYC = {"cpu": "AMD EPYC", "vectors": ["avx2", "avx512f", "avx512_bf16"]}
AVX2 = EPYC | {"vectors": ["avx2"]}
XEON = {"cpu": "Intel(R) Xeon(R) Processor", "vectors": ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]}


def ranks(seconds):
    """The runs of the cell `ranks/s`, one and two ranks."""
    run = {"round": 1, "threads": 1, "stage": 0, "collectives": [0.0], "waiting": [0.0], "peaks": [1e9]}
    return [run | {"ranks": 1, "update": [seconds]}, run | {"ranks": 2, "update": [seconds / 2]}]


class Tables(unittest.TestCase):
    def page(self, *reports):
        """The page of reports: (date, machine, cells)."""
        usual = {"cores": 2, "threads": 2, "memory_bytes": 2**30}
        with tempfile.TemporaryDirectory() as folder:
            for number, (date, machine, cells) in enumerate(reports):
                report = {"date": date, "commit": "c0ffee", "machine": usual | machine, "versions": {}, "cells": cells}
                pathlib.Path(folder, f"{number}.json").write_text(json.dumps(report))
            return table.page(table.newest(pathlib.Path(folder)))

    def rows(self, *reports):
        """The rows of `ranks/s` in the page: name, processor, seconds, and times the first."""
        lines = [line.split(" | ") for line in self.page(*reports).splitlines() if line.startswith(("| 1 rank,", "| 2 ranks,"))]
        return [(line[0][2:8].rstrip(","), *line[1:4]) for line in lines]

    def test_a_cell_has_a_row_for_each_kind_of_processor_and_the_newest_result_of_it(self):
        rows = self.rows(
            ("2026-01-02", EPYC, {"ranks/s": ranks(4.0)}),
            ("2026-01-01", EPYC, {"ranks/s": ranks(9.0)}),
            ("2026-01-03", XEON, {"ranks/s": ranks(6.0)}),
        )
        epyc, xeon = "AMD EPYC, AVX-512 bf16", "Intel Xeon, AMX"
        expected = [("1 rank", epyc, "4.00", "1.00"), ("1 rank", xeon, "6.00", "1.00")]
        self.assertEqual(rows, expected + [("2 rank", epyc, "2.00", "0.50"), ("2 rank", xeon, "3.00", "0.50")])

    def test_one_name_with_other_vector_instructions_is_another_processor(self):
        rows = self.rows(("2026-01-01", EPYC, {"ranks/s": ranks(4.0)}), ("2026-01-02", AVX2, {"ranks/s": ranks(5.0)}))
        self.assertEqual([row[1:3] for row in rows[:2]], [("AMD EPYC, AVX-512 bf16", "4.00"), ("AMD EPYC, AVX2", "5.00")])

    def test_generations_of_one_name_and_the_same_flags_are_different_processors(self):
        zen4, zen5 = EPYC | {"family": 25}, EPYC | {"family": 26}
        names = ["AMD EPYC, AVX-512 bf16", "AMD EPYC (Zen 4), AVX-512 bf16", "AMD EPYC (Zen 5), AVX-512 bf16", "AMD EPYC, AVX2"]
        self.assertEqual([table.processor(machine) for machine in (EPYC, zen4, zen5, AVX2 | {"family": 25})], names)

    def test_a_result_without_flags_says_that_they_are_unknown(self):
        page = self.page(("2026-01-01", {"cpu": "AMD EPYC"}, {"ranks/s": ranks(4.0)}))
        self.assertIn("| AMD EPYC, vector instructions unknown | 4.00 |", page)
        self.assertIn("AMD EPYC, 2 cores, 1 GiB, vector instructions unknown; 2 threads.", page)

    def test_names_of_processors_are_short(self):
        self.assertEqual(table.processor({"cpu": "Intel(R) Xeon(R) Gold 6154 CPU @ 3.00GHz", "vectors": ["avx2"]}), "Intel Xeon Gold 6154, AVX2")
        self.assertEqual(table.processor({"cpu": "aarch64", "vectors": ["asimd", "sve"]}), "aarch64, SVE")
        self.assertEqual(table.processor({"cpu": "x86_64", "vectors": []}), "x86_64, no vectors")

    def test_runs_from_python_are_beside_those_of_the_command_line_and_held_to_3_percent(self):
        run = {"generate": [1.0], "rollout": [1.0], "optimise": [1.0], "start_up": 1.0, "peak_bytes": 1e9, "precision": "f32"}
        seconds = [(1, "rlhf", 2.0), (1, "Python", 2.02), (2, "Python", 2.2), (2, "rlhf", 2.0)]
        runs = [run | {"round": number, "program": program, "update": [update]} for number, program, update in seconds]
        page = self.page(("2026-01-01", EPYC, {"python/grpo/s": runs}))
        line = next(line for line in page.splitlines() if line.startswith("| update from Python against the command line, grpo/s"))
        self.assertEqual(line.split(" | ")[2:], ["<= 1.03", "<= 1.01", "1.01 1.10", "**1.06**", "**missed** |"])
        self.assertIn("| rlhf from Python, f32 | AMD EPYC, AVX-512 bf16 | 2.02 2.20 | 2.11 |", page)

    def test_the_page_in_the_results_is_the_one_of_its_raw_numbers(self):
        folder = HERE / "results"
        self.assertEqual(table.page(table.newest(folder)), (folder / table.NAME).read_text(), "run: bench.py table")


if __name__ == "__main__":
    unittest.main()
