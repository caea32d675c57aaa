"""Tests of this example's data, environment and scripts; the training itself takes run.py."""

import contextlib
import io
import itertools
import json
import pathlib
import random
import re
import sys
import tempfile
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import make_data
import run
import shop


def opened(environment=shop.Shop, order=(("apples", 3), ("pears", 4)), seed=1):
    found = environment()
    found.reset(order=[list(pair) for pair in order], seed=seed, prompt=[])
    return found


class Environment(unittest.TestCase):
    def test_the_first_answer_is_rewarded_if_it_is_the_total_of_the_looked_up_prices(self):
        session = opened()
        total = session.calculate(f"3*{session.lookup('apples')}+4*{session.lookup('pears')}")
        self.assertEqual(session.get_reward(), 0.0)
        self.assertEqual(session.answer(total), "noted")
        session.answer(0)
        self.assertEqual(session.get_reward(), 1.0)
        session.reset(order=[["eggs", 2]], seed=2)
        self.assertEqual(session.get_reward(), 0.0)
        session.answer(session.lookup("eggs"))
        session.answer(2 * session.lookup("eggs"))
        self.assertEqual(session.get_reward(), 0.0)

    def test_prices_are_those_of_the_seed_and_differ_between_seeds(self):
        prices = [[opened(seed=seed).lookup(item) for item in shop.GOODS] for seed in (1, 1, 2)]
        self.assertEqual(prices[0], prices[1])
        self.assertNotEqual(prices[0], prices[2])

    def test_only_sums_and_products_of_whole_numbers_are_computed(self):
        session = opened()
        self.assertEqual(session.calculate("2*3 + 4*(5-1)"), 22)
        for bad in ["", "2**99", "1/2", "1.5", "x", "True", "'a'*9", "__import__('os')", "1+", "9*" * 50 + "9", "(" * 50]:
            with self.assertRaises((ValueError, SyntaxError), msg=bad):
                session.calculate(bad)

    def test_an_unknown_item_is_an_error_and_the_closed_shop_has_neither_prices_nor_a_calculator(self):
        with self.assertRaises(ValueError):
            opened().lookup("gold")
        names = {environment: [tool["function"]["name"] for tool in make_data.schemas(environment)] for environment in (shop.Shop, shop.Closed)}
        self.assertEqual(names, {shop.Shop: ["answer", "calculate", "lookup"], shop.Closed: ["answer"]})


class Data(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = make_data.files()
        cls.demos, cls.train, cls.test = (
            [json.loads(line) for line in cls.files[name].splitlines()] for name in ("demos.jsonl", "tasks/train.jsonl", "tasks/test.jsonl")
        )

    def goods(self, question):
        return re.findall("|".join(shop.GOODS), question)

    def test_no_pair_of_goods_in_a_task_that_is_held_out_is_whole_in_training(self):
        def pairs(text):
            return {frozenset(pair) for pair in itertools.combinations(self.goods(text), 2)}

        seen = set().union(*(pairs(demo["messages"][0]["content"]) for demo in self.demos))
        seen |= set().union(*(pairs(row["prompt"][0]["content"]) for row in self.train))
        self.assertTrue(all(pairs(row["prompt"][0]["content"]) - seen for row in self.test))

    def test_the_question_has_the_order_and_half_of_the_held_out_tasks_have_no_tools(self):
        for row in self.train + self.test:
            asked = re.findall(r"(\d) ([a-z]+)", row["prompt"][0]["content"])
            self.assertEqual([[item, int(quantity)] for quantity, item in asked], row["order"])
        self.assertEqual({row["environment"] for row in self.train}, {"shop"})
        self.assertEqual(sum(row["environment"] == "closed" for row in self.test), make_data.TEST)

    def test_few_demonstrations_are_right_and_none_is_of_an_open_shop_without_a_price(self):
        rng = random.Random(0)
        rewards = [make_data.demo(rng)[1] for _ in range(2000)]
        self.assertTrue(0.02 < sum(rewards) / len(rewards) < 0.15, sum(rewards))

    def test_words_and_digits_are_tokens_and_every_byte_is_in_the_vocabulary(self):
        words = json.loads(self.files["tokenizer/tokenizer.json"])
        vocabulary = words["model"]["vocab"]
        self.assertEqual(len(set(vocabulary.values())), len(vocabulary))
        self.assertTrue(set(make_data.byte_letters().values()) <= set(vocabulary))
        texts = [part for demo in self.demos[:200] for part in re.findall("[A-Za-z]+", json.dumps(demo["messages"]))]
        unknown = set(texts) - set(vocabulary) - {"messages", "role", "content", "type", "function", "calls", "n"}
        self.assertEqual(unknown, set())
        added = [token["id"] for token in words["added_tokens"]]
        self.assertEqual(json.loads(self.files["model.json"])["vocab_size"], max(*added, *vocabulary.values()) + 1)


class Results(unittest.TestCase):
    def test_a_number_beyond_its_threshold_is_named_and_others_are_not(self):
        good = ({"with": 0.1, "without": 0.0}, {"with": 0.6, "without": 0.1})
        self.assertEqual(list(run.misses(1, "ppo", *good)), [])
        bad = ({"with": 0.11, "without": 0.2}, {"with": 0.59, "without": 0.11})
        found = list(run.misses(1, "ppo", *bad))
        self.assertEqual(len(found), 4)
        self.assertIn("seed 1, ppo: solved after training: expected at least 60%, found 59.0%", found)

    def test_a_run_that_ended_is_not_made_again_and_one_that_fails_is_one_line(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(make_data, "write"):
            binary, out = pathlib.Path(folder) / "fake", pathlib.Path(folder) / "out"
            binary.write_text(FAKE.format(python=sys.executable))
            binary.chmod(0o755)
            for fails, code in [("ppo", 1), ("none", 0), ("all", 0)]:
                (pathlib.Path(folder) / "fails").write_text(fails)
                with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as errors:
                    self.assertEqual(run.main([str(binary), "--seeds", "3", "--output_dir", str(out)]), code, errors.getvalue())
            self.assertIn("| 3 | 5.0% | 70.0% | 70.0% | 0.0% | 1.0% | 1.0% |", printed.getvalue())
            calls = (pathlib.Path(folder) / "calls").read_text().split()
            self.assertEqual(sorted(calls), ["grpo", "ppo", "ppo", "sft"])
            self.assertEqual(json.loads((out / "results.json").read_text())[0]["seed"], 3)


FAKE = """#!{python}
import json, pathlib, sys
here, stage = pathlib.Path(__file__).parent, sys.argv[1]
with open(here / "calls", "a") as calls:
    calls.write(stage + "\\n")
if (here / "fails").read_text() in (stage, "all"):
    sys.exit("error: it broke")
out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
out.mkdir(parents=True)
rows = [dict(zip(["eval/scores/Shop", "eval/scores/Closed"], pair)) for pair in [(0.05, 0.0), (0.3, 0.0), (0.7, 0.01)]]
(out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


if __name__ == "__main__":
    unittest.main()
