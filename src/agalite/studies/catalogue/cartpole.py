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
    column="charts/episodic_return",
    name="episodic return, last 100K steps",
    last_steps=100_000,
    limits=(0.0, 500.0),
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
_WHOLE = Metric(
    column="whole:charts/episodic_return", name="episodic return, mean of the whole run"
)
# With the tuned preset of each agent: the paper's, one environment of 1024 steps, learns slowly.
_CPU = {
    "total_timesteps": 1_000_000,
    "log_every": 20_000,
    "checkpoint_every": 100_000,
    "keep_checkpoints": 1,
}
_CPU_NOTE = (
    "1M steps instead of 5M; small models, each with the settings of the tuned preset, in which "
    "GRU has RL Baselines3 Zoo's and the others have those of a sweep with AGaLiTe."
)
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
        metrics=(_RETURN, _WHOLE),
        figures=(LearningCurves(lines="agent", bins=100),),
        sweep="cartpole-sweep",
        scales={
            "smoke": Scale(
                seeds=1, model_size="tiny", settings=SMOKE, factors=(agents("agalite"),)
            ),
            "cpu": Scale(seeds=5, seeds_per_run=1, preset="tuned", settings=_CPU, note=_CPU_NOTE),
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
                tests=(Better(a={"agent": "agalite"}, b={"agent": "gtrxl-128"}),),
                scales=("paper", "cpu"),
            ),
            Claim(
                says="The AGaLiTe agent learns faster than the GRU and GTrXL agents.",
                where="Section 5, Partially Observable Classic Control",
                tests=tuple(
                    Better(a={"agent": "agalite"}, b={"agent": other}, metric=_WHOLE.column)
                    for other in ("gru", "gtrxl-128")
                ),
                scales=("paper", "cpu"),
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
                preset="tuned",
                first_seed=100,
                settings={**_CPU, "total_timesteps": 250_000},
                factors=(vary("learning_rate", "agent.learning_rate", (3e-3, 1e-3, 3e-4)),),
                note="250K steps. " + _CPU_NOTE,
            ),
            "paper": Scale(seeds=5, settings={"total_timesteps": 5_000_000}),
        },
    ),
)
