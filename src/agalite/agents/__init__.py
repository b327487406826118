"""Learning rules: collecting rollouts, returns, and A2C, PPO and APPO."""
