"""The log goes to a string in memory, and the loop looks at its length.

Remedies: host.logging
"""

import io
import logging

import torch
from _training import Training

text = io.StringIO()
logging.basicConfig(stream=text, level="INFO", format="%(message)s")
training = Training()
for step in range(40):
    logging.info("step %d", step)
    training.step(torch.full((4, 8), 1 + len(text.getvalue()) / 400))
training.finish()
