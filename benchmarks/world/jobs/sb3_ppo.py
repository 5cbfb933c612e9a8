"""stable-baselines3: PPO on an environment whose every step takes a known time."""

import time

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO


class SlowEnv(gymnasium.Env):
    """Reach the end of a line; a step takes 2 ms."""

    observation_space = gymnasium.spaces.Box(-20, 20, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.zeros(4, np.float32)
        self.steps = 0
        return self.position.copy(), {}

    def step(self, action):
        time.sleep(0.002)
        self.steps += 1
        self.position[self.steps % 4] += 2 * action - 1
        return self.position.copy(), float(self.position.sum()), False, self.steps == 32, {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = PPO("MlpPolicy", SlowEnv(), n_steps=128, batch_size=32, n_epochs=4, seed=0, device="cpu", verbose=0)
    model.learn(512)
    for name, values in model.policy.state_dict().items():
        print("loss", name, values.double().sum().item().hex())
