"""Asynchronous PPO for Gymnasium environments: actors collect rollouts while the learner learns.

    actor 0                                                  learner (train.py)
      group 0: workers (envs in processes)  \\
      group 1: workers                       \\  trajectories   +------------------+
    actor 1                                   >---------------> | TrajectoryQueue  | --> update
      group 0: workers                       /   (queue.py)     +------------------+       |
      group 1: workers                      /                                              |
         ^                                       weights        +------------------+       |
         +----------------------------------------------------- | ParameterStore   | <-----+
                                                                +------------------+

- actor.py: the acting loop. An actor has its own environments and the newest weights.
- worker.py: groups of environments that may fail and are restarted.
- queue.py: trajectories, the bounded queue to the learner, the store of the newest weights.
- learner.py: the compiled programs that act, and the learner.
- threads.py, ray.py: actors as threads of this process, or on a Ray cluster.
- train.py: the training loop around them.
- evaluate.py: scoring and filming a trained agent.

The learner recomputes a sequence from the memory state that the actor had at its beginning. The
policy lag of a sequence is the number of updates between the weights that acted and those that
learn from it.
"""
