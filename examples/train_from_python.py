"""Train from Python, read the summary, and play with the trained policy.

    python examples/train_from_python.py [FOLDER]

A T-Maze of 3 steps and a small model take seconds. The settings are those of `agalite train`.
"""

import sys
import tempfile

import gymnasium

import agalite
from agalite.agents.a2c import A2C

folder = sys.argv[1] if len(sys.argv) > 1 else f"{tempfile.mkdtemp()}/run"
run = agalite.train(
    "tmaze",
    folder,
    memory="agalite",
    memory_options={
        **{"d_model": 32, "layers": 1, "heads": 2, "head_size": 16, "ffn_size": 32},
        "horizon": (2, 32),  # time constants of the gates at the start, in steps
    },
    env_options={"corridor": 3, "max_steps": 50},
    hidden_size=32,
    num_steps=16,
    agent=A2C(learning_rate=1e-3, ent_coef=0.01),
    total_timesteps=100_000,
    log_every=20_000,
)
summary = run.read_summary() or {}
print("mean of the last tenth of training:", summary["last_tenth"])

policy = agalite.load_policy(run)  # or agalite.load_policy(folder)
env = gymnasium.make("agalite/TMaze-v0", corridor=3, max_steps=50)
wins = 0
for episode in range(20):
    obs, _ = env.reset(seed=episode)
    memory_state, reset, done = policy.initial_state(), True, False
    while not done:
        action, memory_state = policy.act(obs, memory_state, reset)
        obs, _, terminated, truncated, info = env.step(action)
        reset, done = False, terminated or truncated
    wins += bool(info["success"])
print(f"{wins} of 20 new episodes ended with the correct turn; the run is in {folder}")
