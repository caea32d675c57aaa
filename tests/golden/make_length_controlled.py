"""Length-controlled win rates by statsmodels, whose binomial GLM takes outcomes between 0 and 1.

    pip install statsmodels==0.14.6
    python3 make_length_controlled.py        # writes length_controlled.json beside itself

`win_rate` is P(win) at equal length under logit P(win) = a + b tanh(difference / std(difference)), with the unbiased standard deviation.
"""

import json
import pathlib
import random

import numpy as np
import statsmodels.api as sm


def win_rate(outcomes, differences):
    differences = np.array(differences, dtype=float)
    features = sm.add_constant(np.tanh(differences / differences.std(ddof=1)))
    fit = sm.GLM(outcomes, features, family=sm.families.Binomial()).fit(tol=1e-14, maxiter=100)
    return float(1 / (1 + np.exp(-fit.params[0])))


def main():
    draw = random.Random(5)
    cases = []
    for count, bias, share in [(12, 1.5, 0.2), (60, 0.8, 0.3), (200, -2.0, 0.1), (200, 0.0, 0.0)]:
        differences = [round(draw.gauss(40, 150)) for _ in range(count)]
        outcomes = []
        for difference in differences:
            chance = 1 / (1 + np.exp(-(0.4 + bias * np.tanh(difference / 150))))
            outcomes.append(0.5 if draw.random() < share else float(draw.random() < chance))
        cases.append({"outcomes": outcomes, "differences": differences, "win_rate": win_rate(outcomes, differences)})
    # A lopsided case: one loss among many wins, and one pair of very different lengths.
    outcomes, differences = [1.0] * 30 + [0.0], [float(i) for i in range(30)] + [2000.0 / 7]
    differences[3] = -1500.0
    outcomes[7] = 0.0
    cases.append({"outcomes": outcomes, "differences": differences, "win_rate": win_rate(outcomes, differences)})
    path = pathlib.Path(__file__).with_name("length_controlled.json")
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
