"""The loop changes the working directory in mid-epoch, and examples read a relative path.

Remedies: data.workers data.threads data.cache
"""

import os
import tempfile
from pathlib import Path

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Relative(Rows):
    def row(self, index):
        return ROWS[index] * float(Path("scale").read_text())


places = [tempfile.mkdtemp(), tempfile.mkdtemp()]
for scale, place in enumerate(places):
    (Path(place) / "scale").write_text(str(1 + scale))
os.chdir(places[0])
training = Training()
for step, batch in enumerate(DataLoader(Relative(), 8, shuffle=True)):
    training.step(batch)
    os.chdir(places[step // 3 % 2])
training.finish()
