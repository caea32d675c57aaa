"""Tests of curves.py and of the committed reference, without a run."""

import json
import unittest

import curves
from curves import BENDS, STAGES, WINDOWS, departures, pinned

REFERENCE = json.loads(curves.REFERENCE.read_text())


class Bands(unittest.TestCase):
    def test_a_curve_is_the_means_of_equal_parts_of_a_run(self):
        values = [float(at // 3) for at in range(3 * WINDOWS + 2)]  # two values too many
        self.assertEqual(curves.curve(values, "x"), [float(at) for at in range(WINDOWS)])

    def test_a_run_that_is_too_short_or_not_finite_is_an_error(self):
        for values in ([1.0] * (WINDOWS - 1), [1.0] * WINDOWS + [float("nan")], [None] * WINDOWS):
            with self.assertRaises(SystemExit):
                curves.curve(values, "x")

    def test_a_band_is_the_mean_of_the_seeds_with_at_least_the_deviation_of_the_whole_curve(self):
        # Deviations 0, 0, 0 and two of sqrt(2): the mean variance of five points is 4 / 5.
        still, spread = [1.0, 1.0, 1.0], [1.0 - 2**0.5, 1.0, 1.0 + 2**0.5]
        pin = pinned(list(zip(*[still, still, still, spread, spread])))
        self.assertEqual(pin["mean"], [1.0] * 5)
        self.assertEqual(pin["deviation"], [round(0.8**0.5, 5)] * 3 + [round(2**0.5, 5)] * 2)

    def test_a_point_outside_of_its_band_is_named(self):
        pin = {"mean": [0.0] * WINDOWS, "deviation": [1.0] * WINDOWS}
        self.assertEqual(departures([curves.WIDTH] * WINDOWS, pin), [])
        words = departures([0.0] * (WINDOWS - 1) + [-curves.WIDTH - 0.5], pin)
        self.assertEqual(words, [f"part {WINDOWS} of {WINDOWS}: expected -5.000 to 5.000, found -5.500 (-5.5 deviations)"])


class Reference(unittest.TestCase):
    def test_it_has_each_curve(self):
        self.assertEqual({stage: set(pins) for stage, pins in REFERENCE.items()}, {stage: set(about.metrics) for stage, about in STAGES.items()})

    def test_a_run_that_learns_nothing_leaves_the_first_metric_of_each_stage(self):
        for stage, about in STAGES.items():
            pin = REFERENCE[stage][about.metrics[0]]
            self.assertTrue(departures([pin["mean"][0]] * WINDOWS, pin), stage)

    def test_scores_of_reinforcement_learning_gain_more_than_twice_the_half_width_of_their_band(self):
        for stage, metric in (("ppo", "objective/scores"), ("grpo", "reward")):
            pin = REFERENCE[stage][metric]
            gain = pin["mean"][-1] - pin["mean"][0]
            self.assertGreater(gain, 2 * curves.WIDTH * pin["deviation"][-1], stage)

    def test_each_stage_is_bent_by_some_change(self):
        self.assertEqual({stage for stage, _ in BENDS.values()}, set(STAGES))


if __name__ == "__main__":
    unittest.main()
