"""The loop flushes the handler by hand, then a child reads the file.

Remedies: host.logging
"""

import logging
import subprocess
import tempfile

import torch
from _training import Training

path = tempfile.mktemp()
handler = logging.FileHandler(path)
logger = logging.getLogger("job")
logger.setLevel("INFO")
logger.addHandler(handler)
training = Training()
for step in range(20):
    for part in range(30):
        logger.info("step %d part %d", step, part)
    handler.flush()
    found = len(subprocess.run(["cat", path], capture_output=True, check=True).stdout) if step % 5 == 4 else 0
    training.step(torch.full((4, 8), 1 + found / 4000))
training.finish()
