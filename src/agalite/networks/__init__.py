"""Networks of agents: encoders of observations, action heads, and the actor-critic."""
