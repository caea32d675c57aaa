#!/bin/sh
# A reward in plain shell: minus 0.1 for each exclamation mark in the response.
#
#     rlhf ppo --reward_command "sh examples/rewards/reward.sh" ...
#
# One line in, one line out. JSON escapes quotes within texts, so the two patterns match only at the ends of the response.
while IFS= read -r line; do
    response=${line#*\"response\":\"}
    response=${response%%\",\"prompt_ids\":*}
    marks=$(printf %s "$response" | tr -cd '!' | wc -c)
    echo "{\"score\": -$((marks / 10)).$((marks % 10))}"
done
