#!/usr/bin/env python3
"""A reward service in Python's standard library: longer responses score higher, up to 100 characters.

    RLHF_REWARD_TOKEN=secret python3 examples/rewards/serve.py 5000 &
    RLHF_REWARD_TOKEN=secret rlhf ppo --reward_url http://127.0.0.1:5000/score ...

The protocol is that of OpenRLHF's remote reward models: `query` is the prompt with its response, `prompts` the prompts alone,
`labels` the column `--reward_label_column` of the dataset, null where a row has none. The scores are `rewards`, one number
per query; numbers in `extra_logs` are logged in metrics.jsonl.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = os.environ.get("RLHF_REWARD_TOKEN")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        if TOKEN and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send_error(401)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        lengths = [len(query) - len(prompt) for query, prompt in zip(request["query"], request["prompts"])]
        rewards = [min(length, 100) / 100 for length in lengths]
        body = json.dumps({"rewards": rewards, "scores": rewards, "extra_logs": {"characters": lengths}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 5000), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}/score", flush=True)
    server.serve_forever()
