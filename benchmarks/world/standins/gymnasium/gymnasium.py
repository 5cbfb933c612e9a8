"""A stand-in for gymnasium: a CartPole that is solved after 22 episodes, each of 25 steps of 2 ms.

The real one is solved after some thousand episodes; the script has no option to stop earlier.
"""

import time
import types

import numpy as np

EPISODE, STEP_S = 25, 0.002


class CartPole:
    """Four numbers that drift with the actions."""

    spec = types.SimpleNamespace(reward_threshold=20.0)

    def reset(self, seed=None):
        """Return the first state of an episode."""
        self.state, self.steps = np.zeros(4, np.float32), 0
        return self.state.copy(), {}

    def step(self, action):
        """Return the next state."""
        time.sleep(STEP_S)
        self.steps += 1
        self.state[self.steps % 4] += 0.1 * (2 * action - 1)
        return self.state.copy(), 1.0, self.steps == EPISODE, False, {}


def make(name, render_mode=None):
    """Return the environment."""
    return CartPole()
