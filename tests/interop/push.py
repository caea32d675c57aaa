"""Uploads the same folder with huggingface_hub and with `rlhf push`, to tests/hub/server.py, and compares.

    python tests/interop/push.py target/debug/rlhf

The client of the hub accepts the server, so the server follows the hub's protocol; the requests of rlhf are then compared with the
client's, and so are the repositories. Each reads back what the other has uploaded. Needs huggingface_hub; no network.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from runner import ROOT, binary, copy_model, expect, run_checks

TOKEN = "hf_of_me"


def start():
    """The server, and its address."""
    program = [sys.executable, str(ROOT / "tests/hub/server.py")]
    server = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return server, server.stdout.readline().split()[-1]


def call(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data=data)) as response:
        return json.load(response)


def protocol(log, name):
    """The requests that make an upload, by route: bodies without the repository, in an order that does not depend on threads."""
    found = {}
    for entry in log:
        route, body = entry["route"], entry["body"]
        if route == "commit":
            body = [json.loads(line) for line in body.splitlines()]
        if route in ("preupload", "batch", "put", "complete", "verify", "commit"):
            path = "" if route in ("put", "complete") else entry["path"].replace(name, "NAME")
            sent = [entry["host"], path, entry["size"] if route == "put" else body]
            found.setdefault(route, []).append(json.dumps([*sent, bool(entry["authorization"])], sort_keys=True))
    return {route: sorted(bodies) for route, bodies in found.items()}


def checks(work, url):
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    folder = work / "model"
    copy_model(folder)
    (folder / "onnx").mkdir()
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# Tiny\n")
    (folder / "empty.txt").write_text("")
    (folder / "onnx/small.onnx").write_bytes(bytes(range(200)) * 3)
    title = "The same title"
    logs = {}

    def rlhf(*words):
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(work / "home")}
        done = subprocess.run([str(BINARY), *words], cwd=work, env=env, capture_output=True, text=True, timeout=120)
        expect(done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-800:]}")
        return done.stdout

    def tree(name):
        return {key: value for key, value in call(url, f"/_tree/me/{name}/main").items() if key != "private"}

    def both():
        api = HfApi()
        api.create_repo("me/theirs")
        call(url, "/_log")
        api.upload_folder(repo_id="me/theirs", folder_path=folder, commit_message=title)
        logs["theirs"] = protocol(call(url, "/_log"), "me/theirs")
        # The storage of large files is common to all repositories: without this the second upload would send none.
        call(url, "/_set", {"forget": True})
        rlhf("push", "model", "me/ours", "--commit_message", title, "--include", "*")
        log = call(url, "/_log")
        # The first request about files is only a check that the token may write.
        log.remove(next(entry for entry in log if entry["route"] == "preupload"))
        logs["ours"] = protocol(log, "me/ours")
        expect(tree("theirs") == tree("ours"), f"{tree('theirs')}: {tree('ours')}")
        expect(len(tree("ours")["large"]) == 2 and len(tree("ours")["files"]) == 8, f"{tree('ours')}")

    def requests():
        expect(logs["theirs"].keys() == logs["ours"].keys(), f"{logs['theirs'].keys()}: {logs['ours'].keys()}")
        for route, theirs in logs["theirs"].items():
            expect(theirs == logs["ours"][route], f"{route}: {theirs}: {logs['ours'][route]}")

    def theirs_reads_ours():
        found = Path(snapshot_download("me/ours", cache_dir=work / "cache"))
        for path in folder.rglob("*"):
            name = path.relative_to(folder)
            expect(path.is_dir() or (found / name).read_bytes() == path.read_bytes(), f"{name}")

    def ours_reads_theirs():
        line = ("generate", "--do_sample", "false", "--max_new_tokens", "4", "--model")
        local = rlhf(*line, "model", "The")
        for name in ("me/theirs", "me/ours"):
            expect(rlhf(*line, name, "The") == local, name)

    def unchanged():
        call(url, "/_log")
        rlhf("push", "model", "me/theirs")
        routes = {entry["route"] for entry in call(url, "/_log")}
        expect(not routes & {"put", "commit"}, f"{routes}")
        HfApi().upload_folder(repo_id="me/ours", folder_path=folder)
        routes = {entry["route"] for entry in call(url, "/_log")}
        expect(not routes & {"put", "commit"}, f"{routes}")

    def branches():
        rlhf("push", "model", "me/secret", "--revision", "v2", "--private")
        expect(call(url, "/_tree/me/secret/v2")["private"], "a public repository")
        path = hf_hub_download("me/secret", "README.md", revision="v2", cache_dir=work / "cache")
        expect(Path(path).read_text() == (folder / "README.md").read_text(), "README.md of the branch v2")

    yield "hub: huggingface_hub and rlhf push make the same repository", both
    yield "hub: their requests are the same: files, hashes, parts, commit, and where the token goes", requests
    yield "hub: huggingface_hub downloads what rlhf has pushed", theirs_reads_ours
    yield "hub: rlhf downloads what huggingface_hub has pushed", ours_reads_theirs
    yield "hub: what either has pushed is not sent again by the other", unchanged
    yield "hub: a branch", branches


def main():
    server, url = start()
    os.environ.update(HF_ENDPOINT=url, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.pop("HF_HUB_OFFLINE", None)
    users = {TOKEN: {"name": "me", "orgs": []}}
    call(url, "/_set", {"users": users, "multipart_over": 20_000, "chunk_size": 7_000})
    try:
        with tempfile.TemporaryDirectory(prefix="rlhf-push-") as folder:
            return run_checks(checks(Path(folder), url))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    BINARY = binary(__doc__.split("\n")[0])
    sys.exit(main())
