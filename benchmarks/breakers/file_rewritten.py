"""The loop writes the mixing ratio into a file that every example reads.

Remedies: data.workers data.threads data.cache
"""

import json
import tempfile
from pathlib import Path

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

NOTE = Path(tempfile.mkdtemp()) / "ratio.json"


class Mixed(Rows):
    def row(self, index):
        return ROWS[index] * (1 + json.loads(NOTE.read_text()))


NOTE.write_text("0")
training = Training()
for _ in range(2):
    for step, batch in enumerate(DataLoader(Mixed(), 8, shuffle=True)):
        training.step(batch)
        NOTE.write_text(json.dumps(step / 20))
training.finish()
