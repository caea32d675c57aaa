"""A reward for --reward_command: the share of a row's facts that the response states as JSON members, from 0 to 1.

A member such as "age": 21 counts wherever it stands in the response, so that a response which is not quite right yet gets a part
of the reward; each member with another key costs as much as a right one gives, down to 0. Standard library only.
"""

import json
import re
import sys

MEMBER = re.compile(r'"(\w+)"\s*:\s*("[^"]*"|-?[0-9.]+)')


def score(response, facts):
    members = MEMBER.findall(response)
    right = sum((key, json.dumps(value)) in members for key, value in facts.items())
    others = sum(key not in facts for key, _ in members)
    return max(0, right - others) / len(facts)


def main():
    for line in sys.stdin:
        row = json.loads(line)
        print(json.dumps({"score": score(row["response"], row["row"]["facts"]), "id": row.get("id")}))
        if row.get("left", 0) == 0:
            sys.stdout.flush()  # otherwise the run waits for buffered output


if __name__ == "__main__":
    main()
