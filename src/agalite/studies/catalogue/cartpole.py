"""CartPole without velocities, with and without noise: integrating what is seen over time."""

from agalite.studies.catalogue.agents import agents
from agalite.studies.declaration import (
    Better,
    Claim,
    Factor,
    LearningCurves,
    LinePlot,
    Metric,
    Scale,
    Selection,
    Study,
    Training,
    vary,
)

_RETURN = Metric(
    column="charts/episodic_return", name="episodic return, last 100K steps", last_steps=100_000
)
SMOKE = {
    "total_timesteps": 1024,
    "num_envs": 2,
    "num_steps": 64,
    "agent.update_epochs": 1,
    "agent.num_minibatches": 1,
    "log_every": 256,
    "checkpoint_every": 1024,
}
# What learns fastest on two cores (docs/training.md); the paper's is one environment of 1024 steps.
_CPU = {
    "num_envs": 8,
    "num_steps": 128,
    "agent.learning_rate": 5e-4,
    "agent.gae_lambda": 0.95,
    "agent.vf_coef": 0.5,
    "agent.update_epochs": 4,
    "agent.num_minibatches": 4,
    "total_timesteps": 250_000,
    "log_every": 10_000,
    "checkpoint_every": 100_000,
    "keep_checkpoints": 1,
}
_NOTE = "The paper does not say how large its models for CartPole were; these are its T-Maze's."


def _study(name: str, env: str, title: str, paper: str) -> Study:
    return Study(
        name=name,
        title=title,
        paper=paper,
        note=_NOTE,
        kind=Training(preset="paper"),
        base={"env": env},
        factors=(agents("gru", "gtrxl-128", "agalite"),),
        metrics=(_RETURN,),
        figures=(LearningCurves(lines="agent", bins=100),),
        scales={
            "smoke": Scale(
                seeds=1, model_size="tiny", settings=SMOKE, factors=(agents("agalite"),)
            ),
            "cpu": Scale(
                seeds=2,
                model_size="small",
                settings=_CPU,
                factors=(agents("gru", "gtrxl-64", "agalite"),),
                note="Small models, 250K steps of eight environments instead of 5M of one; a "
                "window of 64 for GTrXL.",
            ),
            "paper": Scale(seeds=30, seeds_per_run=10, settings={"total_timesteps": 5_000_000}),
        },
        claims=(
            Claim(
                says="The AGaLiTe agent finds a better-balancing policy than the GRU agent.",
                where="Section 5, Partially Observable Classic Control",
                tests=(Better(a={"agent": "agalite"}, b={"agent": "gru"}),),
                scales=("paper", "cpu"),
            ),
            Claim(
                says="The AGaLiTe agent finds a better-balancing policy than the GTrXL agent.",
                where="Section 5, Partially Observable Classic Control",
                tests=(Better(a={"agent": "agalite"}, b={"agent": ("gtrxl-128", "gtrxl-64")}),),
                scales=("paper", "cpu"),
            ),
            Claim(
                says="The AGaLiTe agent learns faster than the GRU and GTrXL agents.",
                where="Section 5, Partially Observable Classic Control",
            ),
        ),
    )


STUDIES = (
    _study(
        "cartpole-noisy",
        "noisy-masked-cartpole",
        "CartPole without velocities, with noise: return over training",
        "Section 5, figure on CartPole",
    ),
    _study(
        "cartpole-masked",
        "masked-cartpole",
        "CartPole without velocities: return over training",
        "Appendix G.2",
    ),
    Study(
        name="cartpole-sweep",
        title="CartPole: the sweep over learning rates, both variants",
        paper="Appendix G.2, table of hyperparameters",
        note=_NOTE + " Nor does it say how it chose; here it is by the mean return.",
        kind=Training(preset="paper"),
        factors=(
            agents("gru", "gtrxl-128", "agalite"),
            Factor(
                "variant",
                {"noisy": {"env": "noisy-masked-cartpole"}, "masked": {"env": "masked-cartpole"}},
            ),
            vary("learning_rate", "agent.learning_rate", (1e-2, 1e-3, 1e-4, 1e-5)),
        ),
        metrics=(_RETURN,),
        selection=Selection(choose=("learning_rate",), within=("agent",)),
        figures=(LinePlot(x="learning_rate", lines="agent", panels="variant"),),
        scales={
            "smoke": Scale(
                seeds=1,
                model_size="tiny",
                settings=SMOKE,
                factors=(
                    agents("agalite"),
                    Factor("variant", {"masked": {"env": "masked-cartpole"}}),
                    vary("learning_rate", "agent.learning_rate", (1e-3,)),
                ),
            ),
            "cpu": Scale(
                seeds=2,
                model_size="small",
                settings=_CPU,
                factors=(
                    agents("gru", "gtrxl-64", "agalite"),
                    vary("learning_rate", "agent.learning_rate", (3e-3, 1e-3, 3e-4)),
                ),
                note="Small models, 250K steps of eight environments.",
            ),
            "paper": Scale(seeds=5, settings={"total_timesteps": 5_000_000}),
        },
    ),
)
