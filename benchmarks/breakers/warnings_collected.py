"""One row in forty is damaged, and warns; the script collects the warnings and prints their texts per epoch.

Remedies: data.workers data.threads data.cache
"""

import warnings

from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader


class Damaged(Rows):
    def row(self, index):
        if index % 40 == 17:
            warnings.warn(f"row {index} is damaged", stacklevel=1)
            return ROWS[index] * 0
        return ROWS[index].clone()


training = Training()
loader = DataLoader(Damaged(), 8, shuffle=True)
for _ in range(3):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            training.step(batch)
    print([str(one.message) for one in caught if "damaged" in str(one.message)])
training.finish()
