"""A model hub on this machine, for tests of uploads: the routes of the Hugging Face hub that huggingface_hub uses to create a
repository, upload large and small files, commit, and read them back. Large files go to a second address, the storage, as on the hub.

    python3 tests/hub/server.py

prints "listening on URL". It is as strict as the hub and its storage where an upload could go wrong: tokens, roles, hashes, sizes,
the order of parts, chunked bodies, tokens that are sent to the storage. Everything is in memory.

POST /_set with JSON changes it: `users` by token, `multipart_over` and `chunk_size` in bytes, `object_error` of a batch, `forget` to empty
the storage (commits keep their files), and `faults`,
each taken once by the first request whose `route` it names: `status` with `headers` and `body`, `cut` (the connection ends after so many
bytes of the request), or `lose` (the request is done and its response is lost). GET /_log returns the requests since the last call, and
GET /_tree/OWNER/NAME/BRANCH the files of a branch and the titles of its commits.
"""

import base64
import fnmatch
import hashlib
import json
import re
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_NAMES = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.onnx", "*.arrow", "*.parquet", "*.zip", "*tfevents*"]
LARGE_SIZE = 10 << 20
GITATTRIBUTES = "".join(f"{name} filter=lfs diff=lfs merge=lfs -text\n" for name in LARGE_NAMES).encode()
LFS_TYPE = "application/vnd.git-lfs+json"
NAME = r"(?P<name>[\w.-]+/[\w.-]+)"

LOCK = threading.RLock()
STATE = {
    "users": {},
    "multipart_over": 5 << 30,
    "chunk_size": 16 << 20,
    "object_error": None,
    "faults": [],
}
REPOS = {}
STORED = {}
UPLOADS = {}
LOG = []
ADDRESSES = {}


class Refused(Exception):
    """A response other than success."""

    def __init__(self, status, message, code=None, headers=None):
        super().__init__(message)
        self.status, self.body = status, {"error": message}
        self.headers = dict(headers or {})
        if code:
            self.headers["X-Error-Code"] = code
        if "\n" not in message and message.isascii():
            self.headers["X-Error-Message"] = message


def expect(condition, message, status=400):
    if not condition:
        raise Refused(status, message)


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class File:
    """A file of a commit: its content, or the name of a large one."""

    def __init__(self, data=None, oid=None):
        self.oid = oid
        self.data = data if oid is None else STORED[oid]

    def git_oid(self):
        if self.oid is None:
            return git_hash(self.data)
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.oid}\nsize {len(self.data)}\n"
        return git_hash(text.encode())

    def described(self, path):
        found = {"type": "file", "oid": self.git_oid(), "size": len(self.data), "path": path}
        if self.oid:
            found["lfs"] = {"oid": self.oid, "size": len(self.data), "pointerSize": 134}
        return found


class Repo:
    def __init__(self, private):
        self.private = private
        self.branches = {}
        self.commits = {}
        self.titles = {}
        self.add("main", {".gitattributes": File(GITATTRIBUTES)}, "initial commit")

    def add(self, branch, files, title):
        oid = secrets.token_hex(20)
        self.commits[oid] = files
        self.branches[branch] = oid
        self.titles.setdefault(branch, []).append(title)
        return oid

    def at(self, revision):
        oid = self.branches.get(revision, revision)
        if oid not in self.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, self.commits[oid]


def is_large(path, size, sample):
    named = any(fnmatch.fnmatch(path.rsplit("/", 1)[-1], pattern) for pattern in LARGE_NAMES)
    return named or size >= LARGE_SIZE or b"\0" in sample


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    routes = []

    def log_message(self, *_):
        pass

    def handle_any(self):
        self.url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(self.url.query).items()}
        route, call = self.find()
        with LOCK:
            faults = STATE["faults"]
            at = next((at for at, fault in enumerate(faults) if fault["route"] == route), None)
            fault = faults.pop(at) if at is not None else {}
        length = int(self.headers.get("Content-Length") or 0)
        if "cut" in fault:
            self.rfile.read(min(fault["cut"], length))
            self.note(route, None)
            return self.hang_up()
        self.body = self.rfile.read(length)
        self.note(route, self.body)
        if "status" in fault:
            body = fault.get("body", "")
            return self.respond(fault["status"], body, fault.get("headers", {}))
        try:
            with LOCK:
                expect("Transfer-Encoding" not in self.headers, "chunked bodies are not accepted", 501)
                found = call()
        except Refused as refused:
            return self.respond(refused.status, refused.body, refused.headers)
        if "lose" in fault:
            return self.hang_up()
        status, body, headers = found if isinstance(found, tuple) else (200, found, {})
        self.respond(status, body, headers)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def find(self):
        for method, pattern, name in self.routes:
            matched = re.fullmatch(pattern, self.url.path)
            if matched and method == self.command:
                groups = {key: unquote(value) for key, value in matched.groupdict().items()}
                return name, lambda: getattr(self, name.replace("-", "_"))(**groups)
        return "unknown", self.unknown

    def unknown(self):
        raise Refused(404, f"no route {self.command} {self.url.path}")

    def note(self, route, body):
        if route.startswith("_"):
            return
        try:
            text = json.loads(body) if body else None
        except ValueError:
            text = body.decode(errors="replace") if len(body) < 100_000 and route == "commit" else None
        entry = {
            "route": route,
            "host": self.host,
            "path": unquote(self.url.path),
            "authorization": self.headers.get("Authorization"),
            "size": len(body or b""),
            "body": text,
        }
        with LOCK:
            LOG.append(entry)

    def hang_up(self):
        self.close_connection = True
        self.connection.close()

    def respond(self, status, body, headers):
        data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        names = {name.lower() for name in headers}
        if "content-type" not in names:
            self.send_header("Content-Type", "application/json")
        if "content-length" not in names:
            self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def json(self):
        try:
            return json.loads(self.body or b"null")
        except ValueError:
            raise Refused(400, "expected JSON") from None


class HubHandler(Handler):
    host = "hub"
    routes = [
        ("POST", "/_set", "_set"),
        ("GET", "/_log", "_log"),
        ("GET", f"/_tree/{NAME}/(?P<branch>[^/]+)", "_tree"),
        ("GET", "/api/whoami-v2", "whoami"),
        ("POST", "/api/repos/create", "create"),
        ("POST", "/api/validate-yaml", "validate-yaml"),
        ("POST", f"/api/models/{NAME}/branch/(?P<branch>[^/]+)", "branch"),
        ("POST", f"/api/models/{NAME}/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", f"/{NAME}\\.git/info/lfs/objects/batch", "batch"),
        ("POST", f"/{NAME}\\.git/info/lfs/objects/verify", "verify"),
        ("POST", "/api/complete_multipart/(?P<upload>[^/]+)", "complete"),
        ("POST", f"/api/models/{NAME}/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", f"/api/models/{NAME}/paths-info/(?P<revision>[^/]+)", "paths-info"),
        ("GET", f"/api/models/{NAME}/tree/(?P<revision>[^/]+)", "tree"),
        ("GET", f"/api/models/{NAME}/revision/(?P<revision>[^/]+)", "info"),
        ("GET", f"/api/models/{NAME}", "info"),
        ("GET", f"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("HEAD", f"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ]

    def _set(self):
        changes = self.json()
        if changes.pop("forget", False):
            STORED.clear()
        STATE.update(changes)
        return {}

    def _log(self):
        entries, LOG[:] = list(LOG), []
        return entries

    def _tree(self, name, branch):
        repo = REPOS[name]
        _, files = repo.at(branch)
        tree = {path: hashlib.sha256(file.data).hexdigest() for path, file in files.items()}
        large = sorted(path for path, file in files.items() if file.oid)
        return {"files": tree, "large": large, "titles": repo.titles[branch], "private": repo.private}

    def user(self):
        header = self.headers.get("Authorization") or ""
        user = STATE["users"].get(header.removeprefix("Bearer "))
        if header and not user:
            raise Refused(401, "Invalid credentials in Authorization header")
        return user

    def may_write(self, name):
        """Checks the token for a repository, or for a new one of an owner."""
        user, owner = self.user(), name.split("/")[0]
        expect(user, "Invalid username or password.", 401)
        orgs = {org["name"] for org in user.get("orgs", []) if org.get("roleInOrg") != "read"}
        # `repos`: those of an organization's resource groups, whose members may write to them whatever their role in the organization.
        allowed = owner == user["name"] or owner in orgs or name in user.get("repos", [])
        if not allowed or user.get("role") == "read":
            raise Refused(403, f"You don't have the rights to write to the namespace {owner}")
        return user

    def repo(self, name, writes=False):
        repo = REPOS.get(name)
        if writes and repo:
            self.may_write(name)
        if repo is None or (repo.private and not self.user()):
            raise Refused(404 if self.user() else 401, "Repository not found", "RepoNotFound")
        return repo

    def whoami(self):
        user = self.user()
        expect(user, "Invalid username or password.", 401)
        token = {"displayName": "test", "role": user.get("role", "write")}
        orgs = [{"type": "org", **org} for org in user.get("orgs", [])]
        auth = {"type": "access_token", "accessToken": token}
        return {"type": "user", "name": user["name"], "orgs": orgs, "auth": auth}

    def create(self):
        body = self.json()
        expect(self.user(), "Invalid username or password.", 401)
        owner = body.get("organization") or self.user()["name"]
        self.may_write(owner)
        expect(body.get("type", "model") == "model", "expected a model")
        name = f"{owner}/{body['name']}"
        expect(body.get("visibility", "public") in ("public", "private"), "unknown visibility")
        if name in REPOS:
            raise Refused(409, "You already created this model repo")
        REPOS[name] = Repo(body.get("visibility") == "private")
        return {"url": f"{ADDRESSES['hub']}/{name}", "name": name}

    def validate_yaml(self):
        expect(self.json()["repoType"] == "model", "expected a model")
        return {"errors": [], "warnings": []}

    def branch(self, name, branch):
        repo = self.repo(name, writes=True)
        expect(".." not in branch, "Invalid reference name")
        if branch in repo.branches:
            raise Refused(409, "Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        repo.titles[branch] = list(repo.titles["main"])
        return {}

    def preupload(self, name, revision):
        _, files = self.repo(name, writes=True).at(revision)
        body = self.json()
        expect(len(body["files"]) <= 256, "too many files", 413)
        stored = files[".gitignore"].data.decode() if ".gitignore" in files else ""
        patterns = [line for line in body.get("gitIgnore", stored).splitlines() if line and not line.startswith("#")]
        found = []
        for file in body["files"]:
            path, sample = file["path"], base64.b64decode(file["sample"], validate=True)
            expect(len(sample) == min(file["size"], 512), f"{path}: expected a sample of the first 512 bytes")
            large = is_large(path, file["size"], sample)
            known = files.get(path)
            oid = None if known is None else known.oid or known.git_oid()
            ignored = any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
            mode = "lfs" if large else "regular"
            found.append({"path": path, "uploadMode": mode, "shouldIgnore": ignored, **({"oid": oid} if oid else {})})
        return {"files": found}

    def batch(self, name):
        self.repo(name, writes=True)
        expect(self.headers.get("Content-Type") == LFS_TYPE and self.headers.get("Accept") == LFS_TYPE, "not LFS", 406)
        body = self.json()
        expect(body["operation"] == "upload" and body["hash_algo"] == "sha256", "expected an upload with sha256", 422)
        expect("basic" in body["transfers"], "expected the transfer basic", 422)
        return {"transfer": "basic", "objects": [self.instructions(name, found) for found in body["objects"]]}

    def instructions(self, name, found):
        oid, size = found["oid"], found["size"]
        expect(re.fullmatch("[0-9a-f]{64}", oid) and size > 0, "invalid object", 422)
        if STATE["object_error"]:
            return {"oid": oid, "size": size, "error": STATE["object_error"]}
        if oid in STORED:
            return {"oid": oid, "size": size}
        upload, signature = secrets.token_hex(8), secrets.token_hex(8)
        UPLOADS[upload] = {"oid": oid, "size": size, "signature": signature, "parts": {}}
        address = f"{ADDRESSES['storage']}/{upload}?signature={signature}"
        verify = {"href": f"{ADDRESSES['hub']}/{name}.git/info/lfs/objects/verify"}
        if size > STATE["multipart_over"]:
            chunk = STATE["chunk_size"]
            header = {"chunk_size": str(chunk)}
            for number in range(1, -(-size // chunk) + 1):
                header[f"{number:05}"] = f"{address}&partNumber={number}"
            href = f"{ADDRESSES['hub']}/api/complete_multipart/{upload}?signature={signature}"
            return {"oid": oid, "size": size, "actions": {"upload": {"href": href, "header": header}, "verify": verify}}
        return {"oid": oid, "size": size, "actions": {"upload": {"href": address}, "verify": verify}}

    def complete(self, upload):
        expect(self.query.get("signature") == UPLOADS[upload]["signature"], "SignatureDoesNotMatch", 403)
        upload, body = UPLOADS[upload], self.json()
        expect(body["oid"] == upload["oid"], "another object")
        numbers = [part["partNumber"] for part in body["parts"]]
        expect(numbers == list(range(1, len(numbers) + 1)), "InvalidPartOrder")
        parts = [upload["parts"].get(number) for number in numbers]
        expect(None not in parts, "InvalidPart")
        etags = ['"' + hashlib.md5(part).hexdigest() + '"' for part in parts]
        expect(etags == [part["etag"] for part in body["parts"]], "InvalidPart")
        store(upload, b"".join(parts))
        return {}

    def verify(self, name):
        self.repo(name, writes=True)
        body = self.json()
        data = STORED.get(body["oid"])
        expect(data is not None and len(data) == body["size"], "the object was not uploaded", 404)
        return {}

    def commit(self, name, revision):
        repo = self.repo(name, writes=True)
        expect(self.headers.get("Content-Type") == "application/x-ndjson", "expected application/x-ndjson", 415)
        _, files = repo.at(revision)
        files = dict(files)
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        expect(header["key"] == "header" and header["value"]["summary"], "expected a header with a summary")
        expect(operations, "expected operations")
        for operation in operations:
            value, key = operation["value"], operation["key"]
            if key == "file" and value["path"] == "README.md":
                check_card(base64.b64decode(value["content"]).decode())
            path = value["path"]
            expect(not any(part in ("", ".", "..", ".git") for part in path.split("/")), f"invalid path {path}")
            if key == "file":
                expect(value["encoding"] == "base64", "unknown encoding")
                files[path] = File(base64.b64decode(value["content"], validate=True))
            elif key == "lfsFile":
                expect(value["algo"] == "sha256" and value["oid"] in STORED, "LFS pointer pointed to a file that does not exist")
                files[path] = File(oid=value["oid"])
            elif key == "deletedFile":
                expect(path in files, "A file with this name doesn't exist", 404)
                del files[path]
            else:
                raise Refused(400, f"unknown operation {key}")
        oid = repo.add(revision, files, header["value"]["summary"])
        return {"success": True, "commitOid": oid, "commitUrl": f"{ADDRESSES['hub']}/{name}/commit/{oid}", "hookOutput": ""}

    def paths_info(self, name, revision):
        _, files = self.repo(name).at(revision)
        if self.headers.get("Content-Type") == "application/x-www-form-urlencoded":
            paths = parse_qs(self.body.decode())["paths"]
        else:
            paths = self.json()["paths"]
        return [files[path].described(path) for path in paths if path in files]

    def info(self, name, revision="main"):
        repo = self.repo(name)
        oid, files = repo.at(revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        return {"id": name, "modelId": name, "sha": oid, "private": repo.private, "siblings": siblings}

    def tree(self, name, revision):
        _, files = self.repo(name).at(revision)
        return [file.described(path) for path, file in sorted(files.items())]

    def resolve(self, name, revision, path):
        oid, files = self.repo(name).at(revision)
        if path not in files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        file, headers = files[path], {"X-Repo-Commit": oid}
        if file.oid is None:
            return 200, file.data, {**headers, "ETag": f'"{file.git_oid()}"', "Content-Type": "text/plain"}
        headers |= {"X-Linked-Etag": f'"{file.oid}"', "X-Linked-Size": len(file.data)}
        return 302, b"", {**headers, "Location": f"{ADDRESSES['storage']}/get/{file.oid}"}


def check_card(text):
    """The hub's check of a model card, as far as its base is concerned."""
    front = text.split("---\n")[1] if text.startswith("---\n") else ""
    base = re.search(r"^base_model: *\"?([^\"\n]*)", front, re.MULTILINE)
    known = base is None or re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", base.group(1))
    message = 'Invalid metadata in README.md: "base_model" is not valid. Use a model id from https://hf.co/models.'
    expect(known, message)


def store(upload, data):
    expect(len(data) == upload["size"], f"expected {upload['size']} bytes, found {len(data)}")
    expect(hashlib.sha256(data).hexdigest() == upload["oid"], "BadDigest")
    STORED[upload["oid"]] = data


class StorageHandler(Handler):
    """Storage by signed addresses, as S3: it refuses any other authorization."""

    host = "storage"
    routes = [
        ("PUT", "/(?P<upload>[0-9a-f]{16})", "put"),
        ("GET", "/get/(?P<oid>[0-9a-f]{64})", "get"),
        ("HEAD", "/get/(?P<oid>[0-9a-f]{64})", "get"),
    ]

    def put(self, upload):
        expect("Authorization" not in self.headers, "Only one auth mechanism allowed")
        expect("Content-Length" in self.headers, "MissingContentLength", 411)
        upload = UPLOADS.get(upload)
        expect(upload and self.query.get("signature") == upload["signature"], "SignatureDoesNotMatch", 403)
        number = self.query.get("partNumber")
        if number is None:
            store(upload, self.body)
        else:
            upload["parts"][int(number)] = self.body
        return 200, b"", {"ETag": '"' + hashlib.md5(self.body).hexdigest() + '"'}

    def get(self, oid):
        data = STORED[oid]
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if start:
            at = int(start.group(1))
            return 206, data[at:], {"Content-Range": f"bytes {at}-{len(data) - 1}/{len(data)}"}
        return 200, data, {"Content-Type": "application/octet-stream"}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that ends its connection is no error of the server."""


def main():
    servers = {"hub": HubHandler, "storage": StorageHandler}
    for name, handler in servers.items():
        server = Server(("127.0.0.1", 0), handler)
        ADDRESSES[name] = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"listening on {ADDRESSES['hub']}", flush=True)
    # It ends with the program that started it.
    sys.stdin.read()


if __name__ == "__main__":
    main()
