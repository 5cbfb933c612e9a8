"""Some examples log into a file, which the script reads at the end.

Remedies: data.cache data.workers data.threads
"""

import logging
import tempfile
from pathlib import Path

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

LOG = Path(tempfile.mkdtemp()) / "train.log"
logging.basicConfig(filename=LOG, level=logging.INFO, format="%(message)s")
log = logging.getLogger("data")


class Logged(Rows):
    def row(self, index):
        if index % 9 == 4:
            log.info("row %d is dark", index)
        return ROWS[index].clone()


training = Training()
loader = DataLoader(Logged(), 8, shuffle=True)
for _ in range(2):
    for step, batch in enumerate(loader):
        log.info("step %d %r", step, training.step(batch))
logging.shutdown()
print(LOG.read_text())
training.finish()
