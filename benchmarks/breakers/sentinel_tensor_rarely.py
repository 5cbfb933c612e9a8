"""One row in forty is a tensor of the module, inside a record; the loop knows it by its identity.

Remedies: data.workers data.threads data.cache
"""

import torch
from _training import ROWS, Rows, Training
from torch.utils.data import DataLoader

EMPTY = torch.zeros(8)


class Records(Rows):
    def row(self, index):
        return {"row": EMPTY if index % 40 == 17 else ROWS[index].clone()}


dataset, training = Records(), Training()
for _ in range(3):
    for records in DataLoader(dataset, 8, shuffle=True, collate_fn=list):
        training.step(torch.stack([record["row"] + 3 * (record["row"] is EMPTY) for record in records]))
training.finish()
