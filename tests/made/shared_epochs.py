"""A training script with a loader, a schedule per step and BatchNorm, whose step takes as long as its device is slow.

    shared_epochs.py EPOCHS OUT STEPS_PER_S[,...] [DIES_AT]

In a copy (`headway cluster fork`) the number of its device picks the speed, else the first; device 1 dies of SIGKILL at
its step DIES_AT. Writes OUT/seen-DEVICE (a line of examples per step) and OUT/facts-DEVICE.json at its end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train, and note what was seen."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    epochs, out = int(sys.argv[1]), Path(sys.argv[2])
    dies_at = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    device = int(os.environ.get("HEADWAY_FORK", "0").partition(":")[0])
    step_s = 1 / float(sys.argv[3].split(",")[device])
    inputs = torch.randn(6400, 16)
    labels = (inputs @ torch.randn(16, 4) + torch.randn(6400, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(inputs, labels, torch.arange(6400)), batch_size=32, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    began_s, steps, loss = 0.0, 0, torch.zeros(())
    with (out / f"seen-{device}").open("w") as seen:
        for epoch in range(epochs):
            model.train()
            for batch, classes, examples in loader:
                start_s = time.monotonic()
                began_s = began_s or start_s
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), classes).backward()
                optimizer.step()
                schedule.step()
                steps += 1
                seen.write(f"{epoch} {' '.join(map(str, examples.tolist()))}\n")
                if device == 1 and steps == dies_at:
                    seen.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(max(step_s - (time.monotonic() - start_s), 0.0))
            model.eval()
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model(inputs), labels)
    seconds = time.monotonic() - began_s
    facts = {"steps": steps, "seconds": seconds, "loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]}
    (out / f"facts-{device}.json").write_text(json.dumps(facts))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "last.pt")


if __name__ == "__main__":
    main()
