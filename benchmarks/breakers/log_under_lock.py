"""The script logs an error while it holds the lock of its handler, as code that writes to the handler's stream does.

Remedies: host.logging
"""

import logging
import tempfile
from pathlib import Path

import torch
from _training import Training

handler = logging.FileHandler(Path(tempfile.mkdtemp()) / "log")
logging.getLogger().addHandler(handler)
training = Training()
for step in range(30):
    logging.warning("step %d", step)
    training.step(torch.full((4, 8), 1.0))
    if step % 10 == 5:
        handler.acquire()
        try:
            logging.error("by hand")
        finally:
            handler.release()
handler.close()
print(Path(handler.baseFilename).read_text())
training.finish()
