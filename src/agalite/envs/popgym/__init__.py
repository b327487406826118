"""POPGym (Morad et al., 2023) in JAX: sixteen families of tasks, each in three difficulties.

Given the same random draws and actions, observations, rewards and ends are those of the package
popgym 1.0.7, its peculiarities included; `docs/popgym.md` lists them. base.py holds what the
families share, table.py their names and difficulties.
"""
