"""A proxy in front of a server of S3 that makes chosen requests fail, as networks and servers do."""

import contextlib
import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# "500": an error of the server. "timeout": no answer. "cut": the connection is cut within the request. "lost": the
# request takes effect, but the connection is cut before the answer. "short": cut within the answer. "slow": delayed.
FAULTS = ("500", "timeout", "cut", "lost", "short", "slow")
_DROPPED = {"connection", "keep-alive", "transfer-encoding"}


class FaultyProxy:
    """Forwards to `port` of this machine. `choose(number, method, path)` returns a fault, or None, for each request."""

    def __init__(self, port, choose=lambda number, method, path: None):
        self.choose, self.target, self.counted, self.injected = choose, port, 0, []
        self.requests, self.lock = [], threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def _forward(self):
                with proxy.lock:
                    number = proxy.counted
                    proxy.counted += 1
                    fault = proxy.choose(number, self.command, self.path)
                    proxy.requests.append((self.command, self.path))
                    if fault is not None:
                        proxy.injected.append((number, fault))
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length // 2 if fault == "cut" else length)
                if fault in ("cut", "timeout"):
                    if fault == "timeout":
                        time.sleep(proxy.silence)
                    return self._end()
                if fault == "500":
                    return self._answer(500, [], b"<Error><Code>InternalError</Code><Message>try</Message></Error>")
                if fault == "slow":
                    time.sleep(proxy.silence / 3)
                server = http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _DROPPED}
                headers.pop("Expect", None)
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                data = answer.read()
                server.close()
                if fault == "lost":
                    return self._end()
                return self._answer(answer.status, answer.getheaders(), data, short=fault == "short")

            def _answer(self, status, headers, data, short=False):
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in _DROPPED | {"content-length"}:
                        self.send_header(name, value)
                lengths = [value for name, value in headers if name.lower() == "content-length"]
                self.send_header("Content-Length", lengths[0] if self.command == "HEAD" and lengths else str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if short else data)
                if short:
                    self._end()

            def _end(self):
                self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

        self.silence = 3.0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # connections that were cut on purpose
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def stop(self):
        with contextlib.suppress(OSError):
            self._server.shutdown()
            self._server.server_close()
