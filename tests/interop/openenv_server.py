"""Serves two environments of the package `openenv` on loopback, for the test of the crate `rlhf` that plays them.

    python tests/interop/openenv_server.py

Prints the address of each: first one with a tool of MCP, which counts to the row's `target`, then one with an action of its own. Each serves two
sessions, and pings every half second. Runs until it is killed.
"""

import socket
import threading

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

PING = 0.5


class Text(Observation):
    text: str = ""


class Count(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("count")
        self.count = self.target = 0

        @server.tool
        def add(step: int) -> int:
            """Adds to the counter."""
            self.count += step
            return self.count

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, target=0, **row):
        self.count, self.target = 0, target
        return Text(text=f"Count to {target} from seed {seed}.")

    async def step_async(self, action, timeout_s=None, **more):
        found = await super().step_async(action, timeout_s, **more)
        if isinstance(found, CallToolObservation):
            found.done = self.count == self.target
            found.reward = 1.0 if found.done else 0.25 if self.count == 1 and action.arguments == {"step": 1} else None
        return found

    def _step_impl(self, action, timeout_s=None, **more):
        raise ValueError("expected a call of a tool")

    @property
    def state(self):
        return State()


class Guess(Action):
    """Guesses a word."""

    word: str


class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **row):
        return Text()

    def step(self, action, timeout_s=None, **more):
        is_right = action.word == "crane"
        return Text(text="right" if is_right else "wrong", done=is_right, reward=float(is_right))

    @property
    def state(self):
        return State()


def serve(environment, action, observation):
    app = create_app(environment, action, observation, max_concurrent_envs=2)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", ws_ping_interval=PING, ws_ping_timeout=PING)
    threading.Thread(target=lambda: uvicorn.Server(config).run(sockets=[listener]), daemon=True).start()
    return f"ws://127.0.0.1:{listener.getsockname()[1]}"


if __name__ == "__main__":
    for address in (serve(Count, CallToolAction, CallToolObservation), serve(Words, Guess, Text)):
        print(address, flush=True)
    threading.Event().wait()
