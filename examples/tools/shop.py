"""The environment: a shop whose prices nobody knows before they are looked up.

`Shop` has three tools, `lookup`, `calculate` and `answer`; `Closed` has `answer` alone. The reward of both is 1 if the first answer is the total of
the order, and 0 else. Prices are drawn from the seed that `reset` gets, which rows of a group share.

Python 3.9 or newer, standard library only.
"""

import ast
import operator
import random

GOODS = "apples bagels candles dates eggs figs grapes herbs jars kiwis lemons mugs nuts olives pears roses".split()
PRICES = range(10, 100)

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 60


class Closed:
    """The shop without its price list and calculator: what an order costs can only be guessed."""

    def reset(self, order, seed, **row):
        """Starts a session with `order`, goods with their quantities; the question is in the prompt already."""
        rng = random.Random(seed)
        self._prices = {item: rng.choice(PRICES) for item in GOODS}
        self._total = sum(quantity * self._prices[item] for item, quantity in order)
        self._answer = None

    def answer(self, total: int) -> str:
        """Gives the answer. Only the first one counts.

        Args:
            total: What all goods cost together.
        """
        if self._answer is None:
            self._answer = total
        return "noted"

    def get_reward(self) -> float:
        return float(self._answer == self._total)


class Shop(Closed):
    """The open shop."""

    def lookup(self, item: str) -> int:
        """Looks up what one piece costs.

        Args:
            item: Name of the goods, as in the question.
        """
        if item not in self._prices:
            raise ValueError(f"no {item} here")
        return self._prices[item]

    def calculate(self, expression: str) -> int:
        """Computes sums, differences and products.

        Args:
            expression: Whole numbers with +, - and *.
        """
        if len(expression) > LONGEST:
            raise ValueError("too long")
        return value(ast.parse(expression, mode="eval").body)


def value(node):
    """The value of a parsed expression. A policy writes expressions, so that they are never given to `eval`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("not a sum of products")
