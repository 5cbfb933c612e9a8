"""A training state that is put back: the job goes on bit for bit, in the same tensors."""

import pytest
import torch

from headway.core.errors import InputError
from headway.runtime.torch_state import TrainingState
from tests.test_states import OPTIMIZERS, equal


class Job:
    """A job with all kinds of state: batch statistics, dropout, a schedule, a scaler, a position in its data."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 2)
        self.model = torch.nn.Sequential(*layers)
        self.model.register_buffer("seen", torch.zeros(1), persistent=False)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state.pop("position")

    @property
    def objects(self):
        return {
            "loader": self, "model": self.model, "optimizer": self.optimizer, "schedule": self.schedule,
            "scaler": self.scaler,
        }  # fmt: skip

    def step(self) -> float:
        inputs = torch.arange(20.0).view(5, 4).sin() + self.position

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(inputs).square().mean()
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        self.model.seen += 1
        self.position += 1
        self.schedule.step()
        return float(loss.detach())

    def scaled_step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(5, 4).cumsum(0)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())


def job_after(kind: str, steps: int) -> Job:
    job = Job(kind)
    for _ in range(steps):
        job.step()
    return job


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_job_that_is_put_back_repeats_its_steps_bit_for_bit(kind, before):
    job = job_after(kind, before)
    state, addresses = TrainingState(job.objects), [p.data_ptr() for p in job.model.parameters()]

    runs = []
    for _ in range(3):
        runs.append([job.step() for _ in range(4)])
        runs[-1] += [job.model.seen.item(), job.optimizer.param_groups[0]["lr"], job.position]
        state.put_back()

    assert runs[0] == runs[1] == runs[2]
    assert [p.data_ptr() for p in job.model.parameters()] == addresses
    assert equal(job.optimizer.state_dict(), job_after(kind, before).optimizer.state_dict())


def test_a_scaler_and_the_moments_of_an_optimizer_stay_the_same_objects():
    job = Job("adam")
    job.scaled_step()
    weight = job.model[0].weight
    moment, state = job.optimizer.state[weight]["exp_avg"], TrainingState(job.objects)

    first = [job.scaled_step() for _ in range(5)], job.scaler.get_scale()
    state.put_back()
    again = [job.scaled_step() for _ in range(5)], job.scaler.get_scale()

    assert first == again
    assert first[1] > 8.0
    assert job.optimizer.state[weight]["exp_avg"] is moment
    weights = sum(tensor.nbytes for tensor in [*job.model.parameters(), *job.model.buffers()])
    assert state.num_bytes > weights


def test_an_object_without_state_is_refused():
    with pytest.raises(InputError, match="'loader' is a list, which has no state_dict and load_state_dict"):
        TrainingState({"loader": [1]})


def test_an_object_that_refuses_its_state_leaves_the_others_with_theirs():
    job = Job("adam")
    state = TrainingState({"job": job, "model": job.model})
    before = job.model[0].weight.clone()
    job.step()
    job.load_state_dict = lambda state: {}["gone"]

    with pytest.raises(InputError, match=r"'job' refuses the state that it had \(KeyError"):
        state.put_back()
    assert torch.equal(job.model[0].weight, before)
