"""A reward for --reward_command: VADER's compound sentiment of a response, from -1 to 1.

Needs vaderSentiment (requirements.txt), the rule-based classifier of Hutto and Gilbert 2014.
"""

import json
import sys

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


def main():
    analyzer = SentimentIntensityAnalyzer()
    for line in sys.stdin:
        row = json.loads(line)
        print(json.dumps({"score": analyzer.polarity_scores(row["response"])["compound"], "id": row.get("id")}))
        if row.get("left", 0) == 0:
            sys.stdout.flush()  # otherwise the run waits for buffered output


if __name__ == "__main__":
    main()
