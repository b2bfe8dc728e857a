"""A hub in a thread: the requests by which huggingface_hub lists, fetches, creates and commits, over HTTP."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


@dataclass
class Repository:
    """Commits in their order (sha -> {path: bytes}), and tags; `main` is the last commit."""

    commits: dict = field(default_factory=dict)
    tags: dict = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files):
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha] = dict(files)
        return sha

    def sha(self, revision):
        if revision == "main":
            return next(reversed(self.commits))
        return self.tags.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """The repositories by name, requested paths, and uploaded blobs; `broken` fails uploads."""

    repositories: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)
    blobs: dict = field(default_factory=dict)
    broken: bool = False
    url: str = ""

    def add(self, name, files, **options):
        repository = self.repositories.setdefault(name, Repository(**options))
        return repository.commit(files)

    def fetched(self):
        """The files whose content was asked for."""
        return [path.rsplit("/", 1)[1] for method, path in self.asked if method == "GET" and "/resolve/" in path]


@contextmanager
def serve(host="127.0.0.1"):
    hub = Hub()
    server = ThreadingHTTPServer((host, 0), type("Asked", (Handler,), {"hub": hub}))
    hub.url = f"http://{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Refused(Exception):
    def __init__(self, status, code, words="", **more):
        self.status, self.code, self.words, self.more = status, code, words, more


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self._answer()

    def do_PUT(self):
        self._answer()

    def _answer(self):
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, unquote(path)))
        body = self._body()
        try:
            for pattern, method, do in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method:
                    data, headers = do(self, body, *map(unquote, match.groups()))
                    break
            else:
                raise Refused(404, "EntryNotFound", f"no route for {self.command} {path}")
            self._send(200, data, headers)
        except Refused as error:
            words = error.words or error.code
            content = {"error": words, "errors": [{"message": words}], **error.more}
            self._send(
                error.status, json.dumps(content).encode(), {"X-Error-Code": error.code, "X-Error-Message": words}
            )

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status, data, headers):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def authorized(self):
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repository(self, name):
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.authorized()):
            raise Refused(401 if repository is None else 404, "RepoNotFound", "Repository not found")
        return repository

    def files(self, name, revision):
        repository = self.repository(name)
        if repository.gated and not self.authorized():
            raise Refused(403, "GatedRepo", "Access to this model is restricted")
        sha = repository.sha(revision)
        if sha is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repository.commits[sha]


def plain(value):
    return json.dumps(value).encode(), {"Content-Type": "application/json"}


def oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def root(handler, body):
    return b"a hub", {}


def info(handler, body, name, revision="main"):
    repository = handler.repository(name)
    if not repository.commits:
        return plain({"id": name, "sha": "0" * 40, "private": repository.private, "siblings": []})
    sha = repository.sha(revision)
    if sha is None:
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    siblings = [{"rfilename": path} for path in repository.commits[sha]]
    return plain({"id": name, "sha": sha, "private": repository.private, "siblings": siblings})


def tree(handler, body, name, revision):
    if not handler.repository(name).commits:
        return plain([])
    _, files = handler.files(name, revision)
    return plain([{"type": "file", "path": p, "size": len(d), "oid": oid(d)} for p, d in files.items()])


def resolve(handler, body, name, revision, path):
    sha, files = handler.files(name, revision)
    if path not in files:
        raise Refused(404, "EntryNotFound", "Entry not found")
    return files[path], {"ETag": f'"{oid(files[path])}"', "X-Repo-Commit": sha}


def create(handler, body):
    if not handler.authorized():
        raise Refused(401, "", "Invalid username or password.")
    asked = json.loads(body)
    name = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
    address = {"url": f"{handler.hub.url}/{name}"}
    if name in handler.hub.repositories:
        raise Refused(409, "", "You already created this model repo", **address)
    handler.hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
    return plain(address)


def validate(handler, body):
    content = json.loads(body)["content"]
    base = re.search(r'^base_model: "(.*)"$', content, re.M)
    if base and not re.fullmatch(r"[\w.-]+/[\w.-]+", base[1]):
        raise Refused(400, "", '"base_model" must be a repository')
    return plain({"warnings": [], "errors": []})


def preupload(handler, body, name, revision):
    if not handler.authorized():
        raise Refused(401, "", "Invalid token")
    files = json.loads(body)["files"]
    repository = handler.repository(name)
    there = repository.commits[repository.sha("main")] if repository.commits else {}
    answers = []
    for path in (one["path"] for one in files):
        large = path.endswith(".safetensors")
        digest = (lambda data: hashlib.sha256(data).hexdigest()) if large else oid
        same = {"oid": digest(there[path])} if path in there else {}
        answers.append({"path": path, "shouldIgnore": False, "uploadMode": "lfs" if large else "regular", **same})
    return plain({"files": answers})


def batch(handler, body, name):
    objects = []
    for asked in json.loads(body)["objects"]:
        upload = {"actions": {"upload": {"href": f"{handler.hub.url}/lfs/{asked['oid']}"}}}
        objects.append(
            {"oid": asked["oid"], "size": asked["size"], **({} if asked["oid"] in handler.hub.blobs else upload)}
        )
    return plain({"transfer": "basic", "objects": objects})


def put(handler, body, sha):
    if handler.hub.broken:
        raise Refused(403, "", "out of storage")
    assert hashlib.sha256(body).hexdigest() == sha
    handler.hub.blobs[sha] = body
    return b"", {"ETag": sha}


def commit(handler, body, name, revision):
    repository = handler.repository(name)
    files = dict(repository.commits[repository.sha("main")]) if repository.commits else {}
    for line in body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            files[value["path"]] = handler.hub.blobs[value["oid"]]
        elif entry["key"] == "deletedFile":
            del files[value["path"]]
    sha = repository.commit(files)
    return plain({"success": True, "commitOid": sha, "commitUrl": f"{handler.hub.url}/{name}/commit/{sha}"})


NAME = r"([\w.-]+/[\w.-]+?)"
ROUTES = [
    (r"/", ("HEAD", "GET"), root),
    (rf"/api/(?:models|datasets)/{NAME}/revision/([^/]+)", ("GET",), info),
    (rf"/api/(?:models|datasets)/{NAME}/tree/([^/]+)", ("GET",), tree),
    (rf"/api/models/{NAME}/preupload/([^/]+)", ("POST",), preupload),
    (rf"/api/models/{NAME}/commit/([^/]+)", ("POST",), commit),
    (rf"/api/(?:models|datasets)/{NAME}", ("GET",), info),
    (r"/api/repos/create", ("POST",), create),
    (r"/api/validate-yaml", ("POST",), validate),
    (rf"/{NAME}\.git/info/lfs/objects/batch", ("POST",), batch),
    (r"/lfs/(\w+)", ("PUT",), put),
    (rf"(?:/datasets)?/{NAME}/resolve/([^/]+)/(.+)", ("HEAD", "GET"), resolve),
]
