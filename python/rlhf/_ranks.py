"""Several ranks: the program starts them. Where a launcher has started this script several times, rank 0 drives and the others wait."""

import json
import os
import sys
import time
from typing import Any

from rlhf._errors import RunError, Unsupported


class Ranks:
    """The processes of this script."""

    def __init__(self, num_processes: int | None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world)))
        if self.world > 1 and local != self.world:
            raise Unsupported(
                f"{self.world} processes on {self.world // max(local, 1)} machines: expected one machine; for several, start the "
                "program there: rlhf launch --nnodes N --node_rank K --master_addr HOST COMMAND --config FILE"
            )
        if self.world > 1 and num_processes not in (None, self.world):
            raise ValueError(f"num_processes = {num_processes}: expected {self.world}, as the launcher has started, or none")
        self.count = num_processes or self.world

    def drives(self) -> bool:
        """Whether this process starts the program."""
        return self.rank == 0

    def command(self, arguments: list[str]) -> list[str]:
        """The command line with its launcher, if there are several ranks."""
        return ["launch", "--nproc_per_node", str(self.count), *arguments] if self.count > 1 else arguments

    def marker(self, folder: str, number: int) -> str:
        """The file in which rank 0 reports the end of a run: all processes of a machine have one launcher as their parent."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return os.path.join(folder, f"ended-{os.getppid()}-{attempt}-{number}.json")

    def report(self, folder: str, number: int, result: dict[str, Any]) -> None:
        """Tells the other processes that the run has ended."""
        if self.world > 1:
            path = self.marker(folder, number)
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                json.dump(result, file)
            os.replace(f"{path}.part", path)

    def wait(self, folder: str, number: int) -> dict[str, Any]:
        """Waits for the end of the run that rank 0 drives."""
        print(f"rank {self.rank}: rank 0 drives the run, and the program has its ranks; waiting for its end", file=sys.stderr, flush=True)
        path, parent = self.marker(folder, number), os.getppid()
        while not os.path.exists(path):
            if os.getppid() != parent:
                raise RunError(f"rank {self.rank}: the launcher of this process is gone")
            time.sleep(0.1)
        with open(path, encoding="utf-8") as file:
            result: dict[str, Any] = json.load(file)
        if "error" in result:
            raise RunError(f"rank 0: {result['error']}")
        return result
