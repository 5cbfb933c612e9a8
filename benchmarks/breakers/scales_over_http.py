"""Rows are scaled by what a server on this host answers; late in training the loop has it answer otherwise.

Remedies: data.workers data.threads data.cache
"""

import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from _training import NUM_ROWS, ROWS, Rows, Training
from torch.utils.data import DataLoader

scales = [1.0] * NUM_ROWS


class Answering(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(repr(scales[int(self.path[1:])]).encode())

    def log_message(self, *_):
        pass


class Scaled(Rows):
    def __init__(self, port):
        self.port = port

    def row(self, index):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{index}") as answer:
            return ROWS[index] * float(answer.read())


server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
threading.Thread(target=server.serve_forever, daemon=True).start()
training = Training()
loader = DataLoader(Scaled(server.server_port), 8, shuffle=True)
for _ in range(3):
    for batch in loader:
        loss = training.step(batch)
        if training.num_steps > 20:
            scales[training.num_steps * 7 % NUM_ROWS] += loss
training.finish()
