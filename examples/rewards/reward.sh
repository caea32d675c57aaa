#!/bin/sh
# A reward in plain shell: a tenth off for every exclamation mark of the answer.
#
#     rlhf ppo --reward_command "sh examples/rewards/reward.sh" ...
#
# A line in, a line out. Quotes within texts are escaped in JSON, so the two patterns fit at the answer's ends alone.
while IFS= read -r line; do
    answer=${line#*\"response\":\"}
    answer=${answer%%\",\"prompt_ids\":*}
    marks=$(printf %s "$answer" | tr -cd '!' | wc -c)
    echo "{\"score\": -$((marks / 10)).$((marks % 10))}"
done
